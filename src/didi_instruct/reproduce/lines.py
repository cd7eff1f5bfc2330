"""Experiments, and the lines of their tables: which model a line samples, and how."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from didi_instruct.distillation.watch import MOSTLY
from didi_instruct.reproduce.jobs import Job
from didi_instruct.reproduce.measure import quality_job
from didi_instruct.reproduce.methods import ALL_TRICKS, METHODS
from didi_instruct.reproduce.paper import Printed
from didi_instruct.reproduce.scale import Scale
from didi_instruct.reproduce.tables import ENTROPY, PASSES, PATH_KL, PPL, Row, Shown

if TYPE_CHECKING:
    from didi_instruct.reproduce.tables import Table


Results = Mapping[str, Any]
"""What each finished job returned, by the job's key; a failed one is missing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """A table or a figure of the paper."""

    name: str
    title: str
    where: str
    """In the paper; empty for what it does not have."""
    jobs: Callable[["Scale"], Sequence["Job"]]
    """Jobs whose results the table needs; theirs follow from them."""
    table: Callable[["Scale", Results], "Table"]
    figure: Callable[["Scale", "Table", Results, Path], None] | None = None
    """Draws a PNG."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A job that measures, and what its rows are called."""

    job: Job
    labels: Mapping[str, Any]


def ask_method(
    scale: Scale,
    role: str,
    *,
    steps: Sequence[int] | None = None,
    metrics: Sequence[str] = (),
    does: str = "quality",
    named: str = "measure",
    recipe: str = ALL_TRICKS,
) -> Iterator[Ask]:
    """Rows of one method at all budgets, for all seeds; none where the scale has no such model.

    `recipe` is that of the student of DiDi-Instruct.
    """
    if role not in ("teacher", "didi", "didi-plain") and not scale.has(role):
        return
    way = METHODS[role]
    for seed in scale.seeds:
        for model, budgets in _models(scale, role, seed, steps or scale.budgets, recipe):
            yield Ask(
                quality_job(
                    scale,
                    f"{named}-{role}-{budgets[0]}-seed{seed}",
                    model,
                    steps=budgets,
                    seed=seed,
                    metrics=metrics,
                    sampler=way.sampler,
                    does=does,
                ),
                {"method": way.label, "role": role},
            )


def _models(
    scale: Scale, role: str, seed: int, steps: Sequence[int], recipe: str
) -> Iterator[tuple[Job | str, list[int]]]:
    """The model for each budget; most methods have one for all."""
    if role == "teacher":
        yield scale.teacher, list(steps)
    elif role in ("didi", "didi-plain"):
        yield from ablated(scale, recipe, seed, steps)
    else:
        yield scale.model(role, seed), list(steps)


def ablated(
    scale: Scale, recipe: str, seed: int, steps: Sequence[int]
) -> Iterator[tuple[Job, list[int]]]:
    """Students of an ablation recipe, with the budgets that each is for."""
    students: dict[str, tuple[Job, list[int]]] = {}
    for nfe in steps:
        student = scale.ablated(recipe, seed, nfe)
        students.setdefault(student.key, (student, []))[1].append(nfe)
    yield from students.values()


def quality(scale: Scale) -> tuple[Shown, ...]:
    """What tables of generation show; path KL where the judge may know the law of the data."""
    return (PPL, ENTROPY, *(() if scale.name == "paper" else (PATH_KL,)), PASSES)


def learnt(rows: Iterable[Row]) -> list[str]:
    """How often the students of some rows learnt; loud of one that never did."""
    found: dict[tuple[str, Any], Row] = {}
    for row in rows:
        place = row["method"], row.get("seed")
        if row.get("updates") is not None:  # of several students, the one that learnt least
            found[place] = min(row, found.get(place, row), key=itemgetter("updates"))
    if not found:
        return []
    several = len({seed for _, seed in found}) > 1
    told = {
        f"{method}, seed {seed}" if several else method: row
        for (method, seed), row in found.items()
    }
    words = "; ".join(f"{name} {r['updates']} of {r['updates_of']}" for name, r in told.items())
    notes = [
        f"Steps in which a student learnt, and did not wait for its discriminator: {words}.",
    ]
    idle = [name for name, row in told.items() if row["updates"] == 0]
    if idle:
        notes.insert(0, f"**Made no update, so that the row is the teacher: {'; '.join(idle)}.**")
    for share, words in (
        ("at_chance", "at chance, and says little"),
        ("saturated", "sure of itself, and did not learn"),
    ):
        mostly = [
            f"{name} ({row[share]:.0%} of its steps)"
            for name, row in told.items()
            if row.get(share, 0.0) > MOSTLY
        ]
        if mostly:
            notes.append(f"The discriminator was mostly {words}: {'; '.join(mostly)}.")
    return notes


def answers(asks: Iterable[Ask], results: Results) -> list[Row]:
    """Rows of all jobs that have a result, named."""
    return [{**ask.labels, **row} for ask in asks for row in results.get(ask.job.key, ())]


def printed(numbers: Mapping[str, Printed], names: Mapping[str, str]) -> list[Row]:
    """Rows of the paper under the names that ours have."""
    return [
        {"method": names.get(key, line.label), "nfe": nfe, "ppl": cell.ppl, "entropy": cell.entropy}
        for key, line in numbers.items()
        for nfe, cell in line.cells.items()
    ]
