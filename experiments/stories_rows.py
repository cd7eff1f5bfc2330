"""What `experiments/stories.sh` measured, read for the table and the picture of docs/results.md.

Folders have `*.json` (what `didi eval --json` wrote), and path gaps of single samples in `evals/`.
Rows are told apart by the last part of the model's name; what ends in a number is a seed, and a
setting is the mean over the seeds that there are. Of rows measured twice the first in the order of
the folders counts.
"""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


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
