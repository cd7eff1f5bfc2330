"""An evaluation at several lengths: a table for each, and the mean over them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from didi_instruct.api.plan import Plan
from didi_instruct.api.quality import evaluate_quality
from didi_instruct.errors import UserError
from didi_instruct.evaluation.evaluate import Evaluation
from didi_instruct.evaluation.measuring import Progress, Row


def evaluate_lengths(
    sources: Sequence[str],
    plan: Plan,
    metrics: Sequence[str],
    lengths: Sequence[int | None],
    *,
    progress: Progress | None = None,
    **settings: Any,
) -> Evaluation:
    """Evaluate at each length as `evaluate_quality` does, with rows of means over lengths.

    Samples are drawn and compared at each length alone; a mean weighs all lengths equally.
    """
    if settings.get("samples") and len(lengths) > 1:
        raise UserError("Saved samples have the length that they have: leave out --lengths.")

    def told(length: int | None) -> Progress | None:
        if progress is None or len(lengths) == 1:
            return progress
        tell = progress
        return lambda stage, done, total: tell(f"{stage}, length {length}", done, total)

    found = [
        evaluate_quality(
            sources, replace(plan, length=length), metrics, progress=told(length), **settings
        )
        for length in lengths
    ]
    return found[0] if len(found) == 1 else joined(found, [n for n in lengths if n is not None])


def joined(found: Sequence[Evaluation], lengths: Sequence[int]) -> Evaluation:
    """One table of several, in the order of their rows: each row at all lengths, then its mean.

    The `length` of a row is the one that was asked for, though its window may be longer.
    """
    reference = [quality.reference for quality in found if quality.reference]
    return Evaluation(
        rows=_with_means([quality.rows for quality in found], lengths),
        baseline=_with_means([quality.baseline for quality in found], lengths),
        judge=found[0].judge,
        reference=_with_means([[row] for row in reference], lengths)[-1] if reference else {},
        samples=tuple(chain.from_iterable(quality.samples for quality in found)),
        controls=tuple(_with_means([quality.controls for quality in found], lengths)),
    )


def _with_means(tables: Sequence[Sequence[Row]], lengths: Sequence[int]) -> list[Row]:
    rows: list[Row] = []
    for alike in zip(*tables, strict=True):
        told = [row | {"length": n} for row, n in zip(alike, lengths, strict=True)]
        rows += [row | {"lengths": list(lengths)} for row in told]
        rows.append(mean_row(told))
    return rows


def mean_row(rows: Sequence[Row]) -> Row:
    """Mean of rows that differ in length alone; what any of them lacks is null.

    Its intervals are those of a mean of independent numbers.
    """
    names = list(dict.fromkeys(chain.from_iterable(rows)))
    row: Row = {name: _mean([r.get(name) for r in rows]) for name in names}
    for name in names:
        if name.endswith("_note"):
            row[name] = "; ".join(dict.fromkeys(note for r in rows if (note := r.get(name))))
        elif name.endswith("_ci95"):
            row[name] = _interval(name.removesuffix("_ci95"), row, rows)
    return row | {"length": None, "lengths": [r["length"] for r in rows]}


def _mean(values: Sequence[Any]) -> Any:
    """The value that all share, or the mean of numbers; None where there is neither."""
    if all(value == values[0] for value in values):
        return values[0]
    if not all(isinstance(value, int | float) for value in values):
        return None
    return sum(values) / len(values)


def _interval(name: str, mean: Row, rows: Sequence[Mapping[str, Any]]) -> list[float] | None:
    ends = [row.get(f"{name}_ci95") for row in rows]
    if mean.get(name) is None or not all(ends):
        return None
    sides = [
        math.hypot(*(end[side] - row[name] for row, end in zip(rows, ends, strict=True) if end))
        for side in (0, 1)
    ]
    return [mean[name] - sides[0] / len(rows), mean[name] + sides[1] / len(rows)]
