"""Rows of all rivals set against each other, of the numbers of their samples.

The baseline is plain ancestral sampling: vsF is a row's perplexity over the lowest that the teacher
so reaches at the same NFE and the same entropy, below 1 a gain. Some students sample in streams
order, which costs a teacher nothing: all rows stand beside the teacher in that order too. On the
oracle language mistakes raise the entropy, so that vsF punishes repairs: there path KL is the
measure to choose by.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from didi_instruct.evaluation.compare import best_by_vsf, compare
from didi_instruct.evaluation.measuring import Measured, Row

BASELINE = "MDLM, ancestral"
STREAMS, BESIDE_STREAMS = "MDLM, streams order", "streams_"
"""The second baseline, and how the columns of numbers against it begin."""
VALUES = "values"
"""Of each sample, in a row that waits for the others."""


def with_values(row: Row, values: Mapping[str, NDArray[np.float64]]) -> Row:
    """The row with the numbers of its samples, as JSON holds them: null is infinite."""
    numbers = {
        name: [v if np.isfinite(v) else None for v in each.tolist()]
        for name, each in values.items()
    }
    return row | {VALUES: numbers}


def compared(rows: Sequence[Row], most_steps: int | None = None) -> list[Row]:
    """Rows of one seed with their places on both baselines' frontiers, and without `values`.

    `length_spread` says how much the lengths of texts vary.
    Numbers against the teacher in streams order begin with `streams_`; there are none where that
    was lost. A row without perplexity, of a judge of its own samples, has none of these.
    """
    measured = [_measured(row) for row in rows]
    baseline = [m for m in measured if m.row["method"] == BASELINE]
    if not baseline:
        raise ValueError(f"{BASELINE} is missing, with which all are compared")
    seed = rows[0]["bootstrap_seed"]
    found = compare(measured, baseline, most_steps, seed)
    beside = _beside_streams(measured, most_steps, seed)
    best = best_by_vsf(measured, baseline, seed)
    return [
        row
        | (other | chosen if row["ppl"] is not None else {})
        | {"is_baseline": row["method"] == BASELINE, "length_spread": _spread(each)}
        for row, other, chosen, each in zip(found, beside, best, measured, strict=True)
    ]


def _spread(measured: Measured) -> float | None:
    """Standard deviation of the lengths of texts, in tokens of the judge; None without two."""
    lengths = measured.values.get("tokens", np.empty(0))
    return float(lengths.std(ddof=1)) if len(lengths) > 1 else None


def _measured(row: Row) -> Measured:
    values = {
        name: np.array([np.inf if v is None else v for v in each], dtype=np.float64)
        for name, each in row[VALUES].items()
    }
    return Measured({name: value for name, value in row.items() if name != VALUES}, values)


def _beside_streams(rows: Sequence[Measured], most_steps: int | None, seed: int) -> list[Row]:
    """What sets every row apart from the teacher in streams order, at its own best settings."""
    rivals = [m for m in rows if m.row["method"] == STREAMS]
    if not rivals:
        return [{} for _ in rows]
    names = ("vsf", "path_kl_vs_baseline", "gap_closed", "gap_closed_best")
    return [
        {
            f"{BESIDE_STREAMS}{name}": value
            for name, value in row.items()
            if name.startswith(names) and not name.startswith("vsf_passes")
        }
        for row in compare(rows, rivals, most_steps, seed)
    ]
