"""The table of docs/results.md from what `experiments/stories.sh` left behind.

    python experiments/stories_table.py runs/stories

Reads `*.json` of a folder (what `didi eval --json` wrote) and the path gaps of single samples in
its `evals/`. Rows are told apart by the last part of the model's name; what ends in a number is a
seed, and a row is the mean over the seeds that there are (perplexity: geometric). Intervals are of
the samples, not of the seeds: every sample of a row stands beside the same one of the others, so
samples are resampled for all rows at once. Of rows measured twice the first in the order of the
folders counts.
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

RESAMPLES, MANY, SEED = 2000, 256, 0
TEACHER = "teacher"


class Key(NamedTuple):
    """What a row is of, its seed left out."""

    model: str
    sampler: str
    temperature: float
    steps: int


@dataclass
class Measured:
    """Rows of all seeds of one setting, and the path gaps of their samples."""

    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    gaps: list[np.ndarray] = field(default_factory=list)

    def mean(self, name: str) -> float:
        """Of a number, over the seeds."""
        return sum(row[name] for row in self.rows.values()) / len(self.rows)

    @property
    def perplexity(self) -> float:
        """Geometric mean."""
        logs = [math.log(row["ppl"]) for row in self.rows.values()]
        return math.exp(sum(logs) / len(logs))

    @property
    def gap(self) -> np.ndarray | None:
        """Of each sample, in the mean over the seeds; None where a seed has none."""
        return np.mean(self.gaps, axis=0) if len(self.gaps) == len(self.rows) else None


def read(folders: list[Path]) -> dict[Key, Measured]:
    """Rows of unguided and guided samplers without top-p."""
    gaps = dict(_gaps(folders))
    found: dict[Key, Measured] = {}
    for row in _rows(folders):
        name = Path(row["model"]).name
        key = Key(
            re.sub(r"-\d+$", "", name), _sampler(row), row["temperature"], row["steps"]
        )  # fmt: skip
        measured = found.setdefault(key, Measured())
        if name in measured.rows:
            continue
        measured.rows[name] = row
        own = gaps.get(row.get("path_kl"))
        if own is not None:
            measured.gaps.append(own)
    return found


def _rows(folders: list[Path]) -> Iterator[dict[str, Any]]:
    for folder in folders:
        for file in sorted(folder.glob("*.json")):
            value = json.loads(file.read_text(encoding="utf-8"))
            for row in [*value.get("rows", []), *(value.get("baseline") or [])]:
                measured = row.get("self_bleu") is not None and row.get("ppl") is not None
                if measured and row.get("top_p") == 1:
                    yield row


def _gaps(folders: list[Path]) -> Iterator[tuple[float, np.ndarray]]:
    """Path gaps of samples by their mean, which a row has to all digits."""
    for folder in folders:
        for file in folder.glob("evals/*/measured/*/path-kl-*.json"):
            value = json.loads(file.read_text(encoding="utf-8"))
            yield value["row"]["path_kl"], np.array(value["values"]["path_gap"])


def _sampler(row: dict[str, Any]) -> str:
    """By what it does: re-ranking and tilting are parts of rgas."""
    options = row.get("options") or {}
    if row["sampler"] != "rgas":
        return ""
    if options.get("candidates") == 1:
        return "tilting"
    return "re-ranking" if options.get("h_start") == 0 else "rgas"


def _closed(few: np.ndarray, own: np.ndarray, many: np.ndarray) -> tuple[float, float, float]:
    """Share of the teacher's loss from few steps that is won back, with its 95% interval."""
    index = np.random.default_rng(SEED).integers(0, len(own), (RESAMPLES, len(own)))
    a, b, c = (x[index].mean(1) for x in (few, own, many))
    low, high = np.quantile((a - b) / (a - c), [0.025, 0.975])
    return (few.mean() - own.mean()) / (few.mean() - many.mean()), low, high


def _line(key: Key, measured: Measured, found: dict[Key, Measured]) -> str:
    ppl = measured.perplexity
    seeds = ", ".join(sorted(m for n in measured.rows for m in re.findall(r"-(\d+)$", n))) or "-"
    own, kl, closed = measured.gap, "", ""
    if own is not None:
        kl = f"{own.mean():.1f} ± {1.96 * own.std(ddof=1) / math.sqrt(len(own)):.1f}"
        few = found.get(Key(TEACHER, "", 1.0, key.steps))
        many = found.get(Key(TEACHER, "", 1.0, MANY))
        sides = [side.gap for side in (few, many) if side is not None]
        if key.model != TEACHER and key.steps < MANY and len(sides) == 2:
            assert sides[0] is not None
            assert sides[1] is not None
            value, low, high = _closed(sides[0], own, sides[1])
            closed = f"{value:.1%} [{low:.1%}, {high:.1%}]"
    name = f"{key.model} {key.sampler}".strip()
    cells = (
        name, seeds, f"{key.temperature:g}", str(key.steps), f"{measured.mean('passes'):.0f}",
        f"{ppl:,.1f}", f"{measured.mean('entropy'):.3f}", kl, closed,
        f"{measured.mean('self_bleu'):.3f}", f"{measured.mean('unique_4gram'):.3f}",
    )  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Parse, read, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path)
    found = read(parser.parse_args().folders)
    heads = (
        "model", "seeds", "T", "steps", "passes", "perplexity", "entropy", "path KL", "gap closed",
        "Self-BLEU", "4-grams",
    )  # fmt: skip
    print("| " + " | ".join(heads) + " |")
    print("|---|---" + "|--:" * (len(heads) - 2) + "|")
    for key in sorted(found, key=lambda k: (k.model, k.sampler, -k.temperature, -k.steps)):
        print(_line(key, found[key], found))


if __name__ == "__main__":
    main()
