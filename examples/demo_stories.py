"""First part of the demo: the shipped student beside its teacher, timed and measured on the spot.

No other model is at hand offline, so the teacher is the judge, and what it says is called so:

- its NELBO of the stories, an upper bound of -log p. Low is fluent; dull is low too, so the entropy
  of the words stands beside it.
- path KL, E[log P(path)] + NELBO: an upper bound of the KL divergence from the sampler's stories to
  the teacher's law, as it would be with endless steps. It punishes nonsense and dullness alike.
"""

import math
import statistics
import time
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import didi_instruct as didi
from didi_instruct.evaluation.diversity import unigram_entropy
from didi_instruct.training.likelihood import nats_of_texts
from didi_instruct.training.objectives import make_objective

MOST_MASKS = 8
"""Of a student with more, the probability of a path takes longer to compute than the demo."""


@dataclass(frozen=True)
class Row:
    """One sampler: its stories and what they cost."""

    name: str
    steps: int
    texts: list[str]
    seconds: float
    """Of one story, the median."""
    nats: float
    """Of a token, by the teacher's bound."""
    nats_error: float
    entropy: float
    path_kl: float | None
    """Of a story; None where it was not measured."""
    path_kl_error: float | None

    def cells(self) -> list[str]:
        """What the table shows."""
        gap = "–"
        if self.path_kl is not None:
            gap = f"{self.path_kl:.0f} ± {self.path_kl_error:.0f}"
        return [
            self.name,
            f"{self.steps}",
            f"{self.seconds:.2f}",
            f"{self.nats:.2f} ± {self.nats_error:.2f}",
            f"{self.entropy:.2f}",
            gap,
        ]


HEADINGS = [
    "model",
    "steps",
    "seconds a story",
    "teacher's nats per token",
    "entropy of words",
    "path KL, nats a story",
]


def measure(
    name: str, model: didi.Model, teacher: didi.Model, steps: int, stories: int, draws: int = 8
) -> Row:
    """Write stories one by one, as somebody who waits for one would, and score them."""
    free = model.config.masks == 1  # then the probability of a path costs nothing
    seconds, drawn = [], []
    for seed in range(stories):
        started = time.perf_counter()
        drawn.append(model.draw(1, steps=steps, seed=seed, measure_path=free))
        seconds.append(time.perf_counter() - started)
    rows = torch.cat([samples.tokens for samples in drawn])
    nats, counts = bound(teacher, rows, draws)
    mean = float(nats.sum() / counts.sum())
    if not free and model.config.masks <= MOST_MASKS:
        drawn = [model.draw(1, steps=steps, seed=seed) for seed in range(stories)]
    paths = [samples.log_prob for samples in drawn if samples.log_prob is not None]
    gaps = nats + torch.cat(paths).double() if paths else None
    return Row(
        name=name,
        steps=steps,
        texts=model.texts(rows),
        seconds=statistics.median(seconds),
        nats=mean,
        nats_error=_error((nats - mean * counts) / counts.mean()),
        entropy=float(unigram_entropy(rows, counts.long()).mean()),
        path_kl=None if gaps is None else float(gaps.mean()),
        path_kl_error=None if gaps is None else _error(gaps),
    )


def bound(teacher: didi.Model, rows: Tensor, draws: int) -> tuple[Tensor, Tensor]:
    """The teacher's NELBO of each story in nats, its length included, and the story's tokens."""
    objective = make_objective(teacher.config)
    return nats_of_texts(
        lambda batch: objective.loss(teacher.network, batch),
        teacher.config,
        lambda start, count: rows[start : start + count],
        sequences=len(rows),
        draws=draws,
    )


def _error(values: Tensor) -> float:
    return float(values.std()) / math.sqrt(len(values)) if len(values) > 1 else math.inf


def tell(console: Console, stories: int, steps: int, most: int) -> list[Row]:
    """Write, measure and print; return what was found."""
    started = time.perf_counter()
    student, teacher = (didi.load(name, device="cpu") for name in ("stories", "stories/teacher"))
    console.print(f"Loaded student and teacher in {time.perf_counter() - started:.2f} s")
    student.sample(num=1, steps=1)  # the first pass of a process is slower
    rows = []
    for name, model, count in (
        ("student", student, steps),
        ("teacher", teacher, steps),
        ("teacher", teacher, most),
    ):
        rows.append(measure(name, model, teacher, count, stories))
        console.rule(f"{name}, {count} steps, {rows[-1].seconds:.2f} s", align="left")
        console.print(rows[-1].texts[0], highlight=False, markup=False)
    table = Table(title=f"{stories} stories each; ± is one standard error")
    for heading in HEADINGS:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*row.cells())
    console.print(table)
    return rows


def as_markdown(rows: list[Row], stories: int) -> list[str]:
    """The same for the report."""
    lines = ["## Stories", "", f"{stories} stories each; ± is one standard error.", ""]
    lines += [f"| {' | '.join(HEADINGS)} |", "|--:" * len(HEADINGS) + "|"]
    lines += [f"| {' | '.join(row.cells())} |" for row in rows]
    lines += [
        "",
        "The teacher is the judge of itself and of its student, as no other is at hand offline: "
        "its NELBO bounds -log p from above, and path KL (log P of the path plus NELBO) bounds "
        "from above how far the stories are from the teacher's own law.",
    ]
    for row in rows:
        lines += ["", f"### {row.name}, {row.steps} steps", "", *_quoted(row.texts[0])]
    return [*lines, ""]


def _quoted(text: str) -> list[str]:
    return [f"> {line}" for line in text.splitlines()]
