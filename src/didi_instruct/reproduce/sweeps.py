"""A grid of your own: one recipe in all combinations of some settings.

    students = sweep("oracle-didi", {"optim.lr": [1e-4, 3e-4]}, teacher="runs/teacher")
    Grid(students, Path("out")).run()

`Grid` runs any jobs, each once: what is done is read, what was stopped goes on (examples/grid.py).
"""

import json
import re
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from didi_instruct.errors import UserError
from didi_instruct.reproduce.jobs import Job


def sweep(
    recipe: str,
    choices: Mapping[str, Sequence[Any]],
    *,
    teacher: Job | str | None = None,
    overrides: Sequence[str] = (),
) -> list[Job]:
    """A training for each combination of `choices`, values by setting (`section.key`).

    With a `teacher` they distil it, without they pretrain. `overrides` (`section.key=value`) hold
    for all. The last setting of `choices` changes first; those of a job end its `overrides`.
    """
    for setting, values in choices.items():
        if isinstance(values, str) or not values:
            raise UserError(f"choices of {setting} are {values!r}: give a list of values.")
    jobs = []
    for values in product(*choices.values()):
        chosen = [f"{s}={_written(v)}" for s, v in zip(choices, values, strict=True)]
        job = Job(
            name=_name(recipe, chosen),
            does="pretrain" if teacher is None else "distill",
            recipe=recipe,
            overrides=(*overrides, *chosen),
            inputs={} if teacher is None else {"teacher": teacher},
        )
        job.settings()  # a setting that is none is told now, not when its turn comes
        jobs.append(job)
    return jobs


def _written(value: Any) -> str:
    """As an override has it."""
    return value if isinstance(value, str) else json.dumps(value)


def _name(recipe: str, chosen: Sequence[str]) -> str:
    """The recipe, and each setting's own word with its value, as a folder may be called."""
    words = [Path(recipe).stem]
    for setting, _, value in (one.partition("=") for one in chosen):
        words.append(f"{setting.rpartition('.')[2]}-{value}")
    return "-".join(re.sub(r"[^A-Za-z0-9.]+", "-", word).strip("-") for word in words)
