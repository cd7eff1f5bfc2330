"""Downstream tasks and their reports."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from didi_instruct.data.files import write_atomic
from didi_instruct.evaluation.provenance import versions
from didi_instruct.model import Model

Progress = Callable[[str, int, int], None]
"""Called with the stage, how many questions (or steps) are done, and of how many."""

Row = dict[str, Any]

KEYS = ("model", "task", "split", "num", "accuracy", "accuracy_ci95", "f1", "nll", "nll_choices")
"""Keys that each row of each task has (`baseline` too), null where it does not measure them."""


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model, and what its rows call it."""

    name: str
    model: Model


@dataclass(frozen=True, slots=True)
class TaskReport:
    """Results of a task."""

    task: str
    rows: list[Row]
    """Models first, then baselines, whose key `baseline` is chance, majority or untrained."""
    notes: list[str] = field(default_factory=list)
    """Plain sentences about the rows."""
    differences: list[str] = field(default_factory=list)
    """A sentence for every two models: one is better, or they do not differ."""
    tables: dict[str, list[Row]] = field(default_factory=dict)
    """Further rows by the name of their table, such as accuracies by subject."""
    settings: Row = field(default_factory=dict)
    """Options in force, and what else the numbers depend on."""

    def as_json(self) -> dict[str, Any]:
        """Plain values; every row has the keys that all tasks share."""
        shared = dict.fromkeys((*KEYS, "baseline")) | {"task": self.task}
        return {
            "task": self.task,
            "rows": [shared | row for row in self.rows],
            "notes": [*self.notes, *self.differences],
            "tables": self.tables,
            "settings": self.settings,
            "versions": versions(),
        }

    def write(self, path: Path) -> None:
        """Write `as_json`."""
        content = json.dumps(self.as_json(), indent=1, allow_nan=False) + "\n"
        write_atomic(path, content.encode())


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a task's table on the terminal; intervals are read from `KEY_ci95`."""

    key: str
    title: str
    kind: Literal["percent", "number", "count", "shares", "text"] = "number"
    """`shares`: a mapping of names to parts of 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A downstream task: its entry in `tasks.registry.TASKS` is all that the package knows of it.

    `evaluate(models, data, options, progress)` measures the models and the task's baselines.
    """

    name: str
    help: str
    options: type
    """Frozen dataclass with a default for every field; validated in `__post_init__`."""
    evaluate: Callable[[Sequence[NamedModel], Path, Any, Progress], TaskReport]
    counts: str = "questions"
    """Things that `num` of a row counts."""
    columns: tuple[Column, ...]
    """The table on the terminal, after the column of models."""


def merged(remarks: Sequence[tuple[str, str]], models: int) -> list[str]:
    """Notes from (model, sentence) pairs: a sentence of several models is said once.

    `models` is the number of models measured.
    """
    names: dict[str, list[str]] = {}
    for name, sentence in remarks:
        names.setdefault(sentence, []).append(name)
    return [
        f"{'All models' if len(who) == models > 1 else ', '.join(who)}: {sentence}"
        for sentence, who in names.items()
    ]
