"""Two pictures of `experiments/stories.sh`: perplexity over steps, and over entropy at 8 steps.

    python experiments/stories_plot.py runs/stories --out docs/stories.png

Lines are means of the seeds that there are.
"""

import argparse
from pathlib import Path

from stories_rows import Key, Measured, read

NAMES = {
    "teacher": "teacher, random order",
    "teacher-streams": "teacher, streams",
    "didi": "DiDi-Instruct (our variant), random order",
    "path": "likelihood along streams",
    "matching": "then token-level matching (shipped)",
}
COLOURS = {
    "teacher": "#777777",
    "teacher-streams": "#E69F00",
    "didi": "#CC79A7",
    "path": "#56B4E9",
    "matching": "#0072B2",
}
FEW, MANY = 8, 256


def draw(found: dict[Key, Measured], out: Path) -> None:
    """Draw both panels."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    points = {
        (key.model, key.steps, key.temperature): (row.mean("entropy"), row.perplexity)
        for key, row in found.items()
        if not key.sampler
    }
    many = points["teacher", MANY, 1.0]
    for name, label in NAMES.items():
        own = [(steps, t, point) for (model, steps, t), point in points.items() if model == name]
        plain = sorted((steps, ppl) for steps, t, (_, ppl) in own if t == 1)
        sweep = sorted(point for steps, t, point in own if steps == FEW and t <= 1)
        style = {"color": COLOURS[name], "label": label, "marker": "o", "markersize": 4}
        if plain:
            left.plot(*zip(*plain, strict=True), **style)
        if sweep:
            right.plot(*zip(*sweep, strict=True), **style)
    left.axhline(many[1], color="#777777", linestyle=":", linewidth=1)
    right.plot(*many, "*", color="black", markersize=12)
    right.annotate(
        f"teacher, {MANY} steps", many, xytext=(-8, 8), ha="right", textcoords="offset points"
    )
    one_by_one = points.get(("ar", MANY, 1.0))
    if one_by_one is not None:
        left.plot(MANY, one_by_one[1], "s", color="black", markersize=5)
        left.annotate(
            "left to right", (MANY, one_by_one[1]), xytext=(-8, 0), ha="right", va="center",
            textcoords="offset points",
        )  # fmt: skip
    left.set(xscale="log", yscale="log", xlabel="steps", ylabel="perplexity under the source")
    ticks = [2**n for n in range(1, MANY.bit_length())]
    left.set_xticks(ticks, [str(n) for n in ticks])
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
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    draw(read(given.folders), given.out)


if __name__ == "__main__":
    main()
