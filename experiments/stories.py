"""Table and picture of docs/results.md from what `experiments/stories.sh` measured.

    python experiments/stories.py runs/stories [MORE ...] [--picture docs/stories.png]

Folders hold `*.json` (from `didi eval --json`) and path gaps of single samples in `evals/`. A
model's name ends in its seed: a setting is the mean over its seeds (perplexity: geometric). Of rows
measured twice the first one counts, in the order of the folders. Intervals are over samples, which
are the same noise in every row and so are resampled for all rows at once.
"""

import argparse
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

RESAMPLES, FEW, MANY, SEED = 2000, 8, 256, 0
TEACHER = "teacher"
HEADS = (
    "model", "seeds", "T", "steps", "passes", "perplexity", "entropy", "path KL", "gap closed",
    "Self-BLEU", "4-grams",
)  # fmt: skip
LOOKS = {
    "teacher": ("teacher, random order", "#777777"),
    "teacher-streams": ("teacher, streams", "#E69F00"),
    "didi": ("DiDi-Instruct (our variant), random order", "#CC79A7"),
    "path": ("likelihood along streams", "#56B4E9"),
    "matching": ("then token-level matching (shipped)", "#0072B2"),
}


class Key(NamedTuple):
    """A setting; its rows differ in the seed."""

    model: str
    sampler: str
    temperature: float
    steps: int


@dataclass
class Measured:
    """Rows of all seeds of a setting, and the path gaps of their samples."""

    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    gaps: list[np.ndarray] = field(default_factory=list)

    def mean(self, name: str) -> float:
        """Mean over the seeds."""
        return sum(row[name] for row in self.rows.values()) / len(self.rows)

    @property
    def perplexity(self) -> float:
        """Geometric mean over the seeds."""
        logs = [math.log(row["ppl"]) for row in self.rows.values()]
        return math.exp(sum(logs) / len(logs))

    @property
    def gap(self) -> np.ndarray | None:
        """Per sample, in the mean over seeds; None where a seed has none."""
        return np.mean(self.gaps, axis=0) if len(self.gaps) == len(self.rows) else None


def read(folders: list[Path]) -> dict[Key, Measured]:
    """Rows of ancestral and guided samplers without top-p."""
    gaps: dict[float, np.ndarray] = {}  # by their mean, which a row has to all digits
    for folder in folders:
        for file in folder.glob("evals/*/measured/*/path-kl-*.json"):
            value = json.loads(file.read_text(encoding="utf-8"))
            gaps[value["row"]["path_kl"]] = np.array(value["values"]["path_gap"])
    found: dict[Key, Measured] = {}
    for row in _rows(folders):
        name = Path(row["model"]).name
        model = re.sub(r"-\d+$", "", name)
        key = Key(model, _sampler(row), row["temperature"], row["steps"])
        measured = found.setdefault(key, Measured())
        if name not in measured.rows:
            measured.rows[name] = row
            if row.get("path_kl") in gaps:
                measured.gaps.append(gaps[row["path_kl"]])
    return found


def _rows(folders: list[Path]) -> Iterator[dict[str, Any]]:
    for folder in folders:
        for file in sorted(folder.glob("*.json")):
            value = json.loads(file.read_text(encoding="utf-8"))
            for row in [*value.get("rows", []), *(value.get("baseline") or [])]:
                measured = row.get("self_bleu") is not None and row.get("ppl") is not None
                if measured and row.get("top_p") == 1:
                    yield row


def _sampler(row: dict[str, Any]) -> str:
    """Re-ranking and tilting are the two halves of rgas."""
    options = row.get("options") or {}
    if row["sampler"] != "rgas":
        return ""
    if options.get("candidates") == 1:
        return "tilting"
    return "re-ranking" if options.get("h_start") == 0 else "rgas"


def line(key: Key, measured: Measured, found: dict[Key, Measured]) -> str:
    """A row of the table."""
    seeds = ", ".join(sorted(m for n in measured.rows for m in re.findall(r"-(\d+)$", n))) or "-"
    own, kl, closed = measured.gap, "", ""
    if own is not None:
        kl = f"{own.mean():.1f} ± {1.96 * own.std(ddof=1) / math.sqrt(len(own)):.1f}"
        sides = [found.get(Key(TEACHER, "", 1.0, steps)) for steps in (key.steps, MANY)]
        few, many = (None if side is None else side.gap for side in sides)
        if key.model != TEACHER and key.steps < MANY and few is not None and many is not None:
            index = np.random.default_rng(SEED).integers(0, len(own), (RESAMPLES, len(own)))
            a, b, c = (x[index].mean(1) for x in (few, own, many))
            low, high = np.quantile((a - b) / (a - c), [0.025, 0.975])
            value = (few.mean() - own.mean()) / (few.mean() - many.mean())
            closed = f"{value:.1%} [{low:.1%}, {high:.1%}]"
    cells = (
        f"{key.model} {key.sampler}".strip(), seeds, f"{key.temperature:g}", str(key.steps),
        f"{measured.mean('passes'):.0f}", f"{measured.perplexity:,.1f}",
        f"{measured.mean('entropy'):.3f}", kl, closed, f"{measured.mean('self_bleu'):.3f}",
        f"{measured.mean('unique_4gram'):.3f}",
    )  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def draw(found: dict[Key, Measured], out: Path) -> None:
    """Perplexity over steps at T 1, and over entropy at 8 steps as the temperature falls."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    points = {
        (key.model, key.steps, key.temperature): (row.mean("entropy"), row.perplexity)
        for key, row in found.items()
        if not key.sampler
    }
    many = points[TEACHER, MANY, 1.0]
    for name, (label, colour) in LOOKS.items():
        own = [(steps, t, point) for (model, steps, t), point in points.items() if model == name]
        plain = sorted((steps, ppl) for steps, t, (_, ppl) in own if t == 1)
        sweep = sorted(point for steps, t, point in own if steps == FEW and t <= 1)
        for panel, curve in ((left, plain), (right, sweep)):
            if curve:
                panel.plot(*zip(*curve, strict=True), "o-", color=colour, label=label, ms=4)
    left.axhline(many[1], color="#777777", linestyle=":", linewidth=1)
    right.plot(*many, "*", color="black", markersize=12)
    beside = {"ha": "right", "va": "center", "textcoords": "offset points"}
    right.annotate(f"teacher, {MANY} steps", many, xytext=(-8, 8), **beside)
    one_by_one = points.get(("ar", MANY, 1.0))
    if one_by_one is not None:
        left.plot(MANY, one_by_one[1], "s", color="black", markersize=5)
        left.annotate("left to right", (MANY, one_by_one[1]), xytext=(-8, 0), **beside)
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
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--picture", type=Path)
    given = parser.parse_args()
    found = read(given.folders)
    print("| " + " | ".join(HEADS) + " |\n|---|---" + "|--:" * (len(HEADS) - 2) + "|")
    for key in sorted(found, key=lambda k: (k.model, k.sampler, -k.temperature, -k.steps)):
        print(line(key, found[key], found))
    if given.picture is not None:
        draw(found, given.picture)


if __name__ == "__main__":
    main()
