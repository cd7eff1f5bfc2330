"""Evaluations at several lengths, joined into one with the means over lengths."""

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from didi_instruct.evaluation.measuring import Evaluation, Row


def joined(found: Sequence[Evaluation], lengths: Sequence[int]) -> Evaluation:
    """One evaluation of several, in the order of their rows: each at all lengths, then its mean.

    The `length` of a row is the one that was asked for, though its window may be longer. A mean
    weighs all lengths equally.
    """
    reference = [each.reference for each in found if each.reference]
    return Evaluation(
        model=found[0].model,
        rows=_with_means([each.rows for each in found], lengths),
        baseline=_with_means([each.baseline for each in found], lengths),
        judge=found[0].judge,
        reference=_with_means([[row] for row in reference], lengths)[-1] if reference else {},
        samples=tuple(chain.from_iterable(each.samples for each in found)),
        controls=tuple(_with_means([each.controls for each in found], lengths)),
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
