"""Experiments, and the lines of their tables: which model a line samples, and how."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

from didi_instruct.distillation.watch import MOSTLY
from didi_instruct.reproduce.figures import draw_lines, drawn
from didi_instruct.reproduce.jobs import Job
from didi_instruct.reproduce.measure import quality_job
from didi_instruct.reproduce.methods import ALL_TRICKS, METHODS
from didi_instruct.reproduce.paper import Printed
from didi_instruct.reproduce.scale import Scale
from didi_instruct.reproduce.tables import ENTROPY, PASSES, PATH_KL, PPL, Row, Shown, Table

Results = Mapping[str, Any]
"""Results of finished jobs by key; failed jobs are missing."""


@dataclass(frozen=True, slots=True)
class Line:
    """A job that measures, with the labels of its rows."""

    job: Job
    labels: Mapping[str, Any] = field(default_factory=dict)
    group: str = ""
    """Part of the table, where lines of several kinds make one."""


@dataclass(frozen=True, slots=True)
class Answers:
    """Lines of an experiment with the results of their jobs."""

    lines: Sequence[Line]
    results: Results

    def rows(self, group: str = "") -> list[Row]:
        """Labelled rows of all finished lines of a group."""
        return [
            {**line.labels, **row}
            for line in self.lines
            if line.group == group
            for row in self.results.get(line.job.key, ())
        ]

    def only(self, otherwise: Mapping[str, Any]) -> Mapping[str, Any]:
        """Result of an experiment of one job, where it is not a list of rows."""
        (line,) = self.lines
        found: Mapping[str, Any] = self.results.get(line.job.key, otherwise)
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Experiment:
    """A table or figure of the paper, or of our own."""

    name: str
    title: str
    where: str
    """Place in the paper; empty if the paper has no such table."""
    lines: Callable[[Scale], Iterable[Line]]
    """Builds the graph of jobs: one line for each job that measures."""
    table: Callable[[Scale, Answers], Table]
    draw: Callable[[Scale, Table, Path], None] | None = None
    """Draws a PNG of the table."""
    packages: tuple[str, ...] = ()
    """Packages and programs beyond the core that it needs (`preflight.PACKAGES`)."""
    equal_minutes: bool = False
    """Its students may train equal minutes (`--minutes`)."""
    chooses_rivals: bool = False
    """Its models may be chosen (`--rivals`)."""
    timed_training: bool = False
    """Its trainings are timed, and must not share a GPU."""


def ask_method(
    scale: Scale,
    role: str,
    *,
    steps: Sequence[int] | None = None,
    metrics: Sequence[str] = (),
    does: str = "quality",
    named: str = "measure",
    recipe: str = ALL_TRICKS,
) -> Iterator[Line]:
    """Rows of one method at all budgets, for all seeds; none where the scale has no such model.

    `recipe` is that of the student of DiDi-Instruct.
    """
    if not scale.has(role):
        return
    way = METHODS[role]
    for seed in scale.seeds:
        for model, budgets in _models(scale, role, seed, steps or scale.budgets, recipe):
            yield Line(
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
    """Columns of tables of generation; path KL except at paper scale."""
    return (PPL, ENTROPY, *(() if scale.name == "paper" else (PATH_KL,)), PASSES)


def learnt(rows: Iterable[Row]) -> list[str]:
    """Notes on how often each student was updated; a student without updates comes first."""
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


def draw_quality(scale: Scale, table: Table, path: Path) -> None:
    """Draw the numbers of a table over NFE; at paper scale the paper's too."""
    caption = f"{scale.name} scale; judge: {scale.judge_name}; seeds {scale.seed_list}"
    is_paper = scale.name == "paper"
    draw_lines(table, path, drawn(table.shown), paper=is_paper, caption=caption)


def printed(numbers: Mapping[str, Printed], names: Mapping[str, str]) -> list[Row]:
    """Rows of the paper under the names that ours have."""
    return [
        {"method": names.get(key, line.label), "nfe": nfe, "ppl": cell.ppl, "entropy": cell.entropy}
        for key, line in numbers.items()
        for nfe, cell in line.cells.items()
    ]
