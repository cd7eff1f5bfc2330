"""Two pictures of `experiments/stories.sh`: perplexity over steps, and over entropy at 8 steps.

    python experiments/stories_plot.py runs/stories/*.json --out docs/stories.png

Reads what `didi eval --json` wrote; models are told apart by the last part of their names.
"""

import argparse
import json
from pathlib import Path
from typing import Any

NAMES = {
    "teacher": "teacher, random order",
    "teacher-streams": "teacher, streams",
    "didi-0": "DiDi-Instruct, random order",
    "path-0": "likelihood along streams",
    "matching-0": "shipped student",
}
COLOURS = {
    "teacher": "#777777",
    "teacher-streams": "#E69F00",
    "didi-0": "#CC79A7",
    "path-0": "#56B4E9",
    "matching-0": "#0072B2",
}
FEW, MANY = 8, 256

Key = tuple[str, int, float, float]


def read(files: list[Path]) -> dict[Key, dict[str, Any]]:
    """Rows by model, steps, temperature and top-p."""
    rows = {}
    for file in files:
        value = json.loads(file.read_text(encoding="utf-8"))
        for row in [*value.get("rows", []), *(value.get("baseline") or [])]:
            if row.get("ppl") is None or row.get("steps") is None:
                continue
            name = Path(row["model"]).name
            rows[name, row["steps"], row["temperature"], row["top_p"]] = row
    return rows


def draw(rows: dict[Key, dict[str, Any]], out: Path) -> None:
    """Draw both panels."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    many = rows["teacher", MANY, 1.0, 1.0]
    for name, label in NAMES.items():
        own = [(key, row) for key, row in rows.items() if key[0] == name and key[3] == 1]
        plain = sorted((steps, row["ppl"]) for (_, steps, t, _), row in own if t == 1)
        sweep = sorted((row["entropy"], row["ppl"]) for (_, n, _, _), row in own if n == FEW)
        style = {"color": COLOURS[name], "label": label, "marker": "o", "markersize": 4}
        if plain:
            left.plot(*zip(*plain, strict=True), **style)
        if sweep:
            right.plot(*zip(*sweep, strict=True), **style)
    left.axhline(many["ppl"], color="#777777", linestyle=":", linewidth=1)
    right.plot(many["entropy"], many["ppl"], "*", color="black", markersize=12)
    right.annotate(
        f"teacher, {MANY} steps", (many["entropy"], many["ppl"]), xytext=(-8, 8), ha="right",
        textcoords="offset points",
    )  # fmt: skip
    left.set(xscale="log", yscale="log", xlabel="steps", ylabel="perplexity under the source")
    left.set_xticks([2, 4, 8, 16, 32, MANY], ["2", "4", "8", "16", "32", str(MANY)])
    left.minorticks_off()
    left.set_title("T = 1")
    right.set(yscale="log", xlabel="unigram entropy, nats", ylabel="perplexity under the source")
    right.set_title(f"{FEW} steps; along a line the temperature falls from 1")
    for panel in (left, right):
        panel.grid(alpha=0.25)
    left.legend(frameon=False, fontsize=9)
    figure.savefig(out, dpi=110)


def main() -> None:
    """Parse, read, draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    draw(read(given.files), given.out)


if __name__ == "__main__":
    main()
