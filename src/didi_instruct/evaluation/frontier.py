"""The frontier of a baseline: its lowest perplexity at an entropy, over temperature and top-p.

Perplexity under a judge falls when entropy falls, so a sampler is compared with the best that the
baseline (the teacher) reaches at the same entropy with a temperature or with top-p. A sweep of one
of the two is a curve of log-perplexity over entropy, straight between neighbouring settings; the
frontier is the lowest curve. Where no curve reaches, there is nothing to compare with, and nothing
is extrapolated.
"""

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from didi_instruct.errors import UserError
from didi_instruct.evaluation.stats import Numbers, aligned

SHARE_OF_PASSES, PART_OF_A_PASS = 0.01, 0.1
"""Costs this close are equal: coins decide what a step skips, batches share the first pass."""


class Setting(NamedTuple):
    """One point of a sweep."""

    temperature: float
    top_p: float


def sweep(temperatures: Iterable[float], top_ps: Iterable[float]) -> list[Setting]:
    """Settings that make two curves: each temperature without top-p, each top-p at temperature 1.

    The curves meet in the plain setting (1, 1), which comes first, whether it was named or not.
    """
    settings = [Setting(1.0, 1.0)]
    for temperature in temperatures:
        if not 0 < temperature < math.inf:
            raise UserError(f"temperature is {temperature}: use more than 0.")
        settings.append(Setting(float(temperature), 1.0))
    for top_p in top_ps:
        if not 0 < top_p <= 1:
            raise UserError(f"top_p is {top_p}: it is a share, more than 0 and at most 1.")
        settings.append(Setting(1.0, float(top_p)))
    return list(dict.fromkeys(settings))


@dataclass(frozen=True, slots=True)
class Point:
    """One sampler in one setting."""

    perplexity: float
    """Under the judge; finite."""
    entropy: float
    """Mean per-sequence unigram entropy, nats."""
    nfe: int
    """Scheduled steps."""
    passes: float
    """Forward passes per sample that really ran."""
    temperature: float
    top_p: float
    resamples: Numbers | None = field(default=None, compare=False, repr=False)
    """(2, R) entropy and log-perplexity, the same resamples for all points."""

    @classmethod
    def of(cls, row: Mapping[str, Any], resamples: Numbers | None = None) -> "Point":
        """Make the point of a row that has a perplexity and an entropy."""
        setting = row["nfe"], row["passes"], row["temperature"], row["top_p"]
        return cls(row["ppl"], row["entropy"], *setting, resamples)

    @property
    def columns(self) -> Numbers:
        """Entropy and log-perplexity: (2, 1 + R)."""
        data = np.array([[self.entropy], [math.log(self.perplexity)]])
        return data if self.resamples is None else np.hstack([data, self.resamples])


def curves(points: Iterable[Point]) -> list[list[Point]]:
    """Sort points into sweeps: one setting varies, the other and the number of steps stay.

    Each is ordered by what varies; a point may lie on two, and be alone on one.
    """
    sweeps: dict[Hashable, list[Point]] = defaultdict(list)
    for point in points:
        sweeps["temperature", point.nfe, point.top_p].append(point)
        sweeps["top_p", point.nfe, point.temperature].append(point)
    return [sorted(s, key=lambda p: (p.temperature, p.top_p, p.entropy)) for s in sweeps.values()]


def equal_passes(points: Iterable[Point], passes: float) -> list[Point]:
    """Points of the largest budget that costs no more than `passes`; none if all cost more.

    A budget is a number of scheduled steps; its cost is that of its most expensive point.
    """
    budgets: dict[int, list[Point]] = defaultdict(list)
    for point in points:
        budgets[point.nfe].append(point)
    limit = passes + max(SHARE_OF_PASSES * passes, PART_OF_A_PASS)
    affordable = [found for found in budgets.values() if cost(found) <= limit]
    return max(affordable, key=cost, default=[])


def cost(points: Sequence[Point]) -> float:
    """Passes of the most expensive point."""
    return max(point.passes for point in points)


def log_vsf(point: Point, baseline: Sequence[Point]) -> Numbers:
    """Log of a point's perplexity over the baseline's frontier at the same entropy: (1 + R,).

    NaN where no curve reaches. A curve may pass an entropy several times, where noise bends it
    back; each passage counts. The baseline is the set to compare with, of equal cost.
    """
    passages = [
        _log_perplexity(*aligned(point.columns, left.columns, right.columns))
        for left, right in _segments(baseline)
    ]
    if not passages:
        return np.array([math.nan])
    lowest = np.fmin.reduce(aligned(*passages))
    own, frontier = aligned(point.columns[1], lowest)
    ratio: Numbers = own - frontier
    return ratio


def why_not(entropy: float, baseline: Sequence[Point]) -> str:
    """Explain why an entropy has no place on the frontier."""
    covered: list[list[float]] = []
    for low, high in sorted(sorted(p.entropy for p in pair) for pair in _segments(baseline)):
        if covered and low <= covered[-1][1]:
            covered[-1][1] = max(covered[-1][1], high)
        else:
            covered.append([low, high])
    if not covered:
        return "the baseline has no point to compare with"
    where = "lies in a gap between the baseline's curves"
    if entropy < covered[0][0]:
        where = "is below all that the baseline reaches"
    elif entropy > covered[-1][1]:
        where = "is above all that the baseline reaches"
    reach = " and ".join(f"{low:.6g} to {high:.6g}" for low, high in covered)
    return f"entropy {entropy:.6g} {where} ({reach})"


def _segments(baseline: Iterable[Point]) -> list[tuple[Point, Point]]:
    """Neighbours on all curves, and every point with itself, for curves of one point."""
    points = list(baseline)
    pairs = [pair for curve in curves(points) for pair in pairwise(curve)]
    return pairs + [(point, point) for point in points]


def _log_perplexity(point: Numbers, left: Numbers, right: Numbers) -> Numbers:
    """Log-perplexity on the straight line between two places, NaN outside.

    Shapes: (2, ...) each, of the point the entropy alone counts -> (...).
    """
    entropy = point[0]
    low, high = np.where(left[0] > right[0], [right, left], [left, right])
    width = high[0] - low[0]
    weight = (entropy - low[0]) / np.where(width > 0, width, 1)
    between = (1 - weight) * low[1] + weight * high[1]
    value = np.where(width > 0, between, np.minimum(low[1], high[1]))
    return np.where((low[0] <= entropy) & (entropy <= high[0]), value, math.nan)
