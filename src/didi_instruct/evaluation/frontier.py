"""Perplexity at matched entropy: a sampler against the frontier that a baseline reaches.

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
from numpy.typing import NDArray

from didi_instruct.errors import UserError

SHARE_OF_PASSES, PART_OF_A_PASS = 0.01, 0.1
"""Costs this close are equal: coins decide what a step skips, batches share the first pass."""


@dataclass(frozen=True, slots=True)
class Point:
    """One sampler in one setting."""

    perplexity: float
    """Under the judge."""
    entropy: float
    """Mean per-sequence unigram entropy, nats."""
    nfe: int
    """Scheduled steps."""
    passes: float
    """What really ran, in forward passes per sample."""
    temperature: float
    top_p: float
    cloud: NDArray[np.float64] | None = field(default=None, compare=False, repr=False)
    """(2, R) entropy and log-perplexity in resamples, the same resamples for all points."""

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> "Point":
        """Where a row of a table stands."""
        names = ("ppl", "entropy", "nfe", "passes", "temperature", "top_p")
        return cls(*(row[name] for name in names))


@dataclass(frozen=True, slots=True)
class Vsf:
    """Perplexity over the frontier's at the same entropy; below 1 is a gain."""

    value: float | None
    """None where the comparison cannot be made."""
    reason: str = ""
    """Why not, in words."""


class Setting(NamedTuple):
    """What a sweep changes."""

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


def equal_nfe(points: Iterable[Point], nfe: int) -> list[Point]:
    """Points with that many scheduled steps."""
    return [point for point in points if point.nfe == nfe]


def equal_passes(points: Iterable[Point], passes: float) -> list[Point]:
    """Points of the largest budget that costs no more than `passes`; none if all cost more.

    A budget is a number of scheduled steps, and costs what its dearest point cost.
    """
    budgets: dict[int, list[Point]] = defaultdict(list)
    for point in points:
        budgets[point.nfe].append(point)
    limit = passes + max(SHARE_OF_PASSES * passes, PART_OF_A_PASS)
    affordable = [found for found in budgets.values() if cost(found) <= limit]
    return max(affordable, key=cost, default=[])


def curves(points: Iterable[Point]) -> list[list[Point]]:
    """Sort points into sweeps: one setting varies, the other and the number of steps stay.

    Each is ordered by what varies; a point may lie on two, and be alone on one.
    """
    sweeps: dict[Hashable, list[Point]] = defaultdict(list)
    for point in points:
        sweeps["temperature", point.nfe, point.top_p].append(point)
        sweeps["top_p", point.nfe, point.temperature].append(point)
    return [
        sorted(found, key=lambda p: (p.temperature, p.top_p, p.entropy))
        for found in sweeps.values()
    ]


def vsf(point: Point, baseline: Sequence[Point]) -> Vsf:
    """Ratio of the point's perplexity to the baseline's frontier at the same entropy.

    The baseline is the set to compare with, chosen by `equal_nfe` or `equal_passes`.
    """
    if not _usable(point):
        return Vsf(
            None, f"perplexity is {point.perplexity} at entropy {point.entropy}: nothing to compare"
        )
    lowest = _log_frontier(baseline, point.entropy)
    if lowest is None:
        return Vsf(None, _why_not(point.entropy, baseline))
    return Vsf(math.exp(math.log(point.perplexity) - lowest))


def log_vsf_resampled(point: Point, baseline: Sequence[Point]) -> NDArray[np.float64] | None:
    """Log of the ratio in every resample (R,), NaN where no curve reaches; None without clouds.

    The frontier is made anew in each: which of its curves is the lowest may change.
    """
    if point.cloud is None or any(rival.cloud is None for rival in baseline):
        return None
    entropy, log_perplexity = point.cloud
    lowest = np.full_like(entropy, np.inf)
    for left, right in _segments(baseline):
        assert left.cloud is not None
        assert right.cloud is not None
        lowest = np.fmin(lowest, _log_perplexity(left.cloud, right.cloud, entropy))
    ratio: NDArray[np.float64] = log_perplexity - np.where(lowest < np.inf, lowest, np.nan)
    return ratio


def cost(points: Sequence[Point]) -> float:
    """Passes of the dearest point."""
    return max(point.passes for point in points)


def _usable(point: Point) -> bool:
    return 0 < point.perplexity < math.inf and math.isfinite(point.entropy)


def _segments(baseline: Iterable[Point]) -> list[tuple[Point, Point]]:
    """Neighbours of all curves, and every point with itself, for curves of one point."""
    points = list(baseline)
    pairs = [pair for curve in curves(points) for pair in pairwise(curve)]
    pairs += [(point, point) for point in points]
    return [pair for pair in pairs if all(map(_usable, pair))]


def _log_frontier(baseline: Iterable[Point], entropy: float) -> float | None:
    """Lowest log-perplexity of all curves at that entropy; None where none reaches.

    A curve may pass an entropy several times, where noise bends it back; each passage counts. A
    setting whose numbers are not finite interrupts its curve.
    """
    passages = [
        float(_log_perplexity(_place(left), _place(right), np.array(entropy)))
        for left, right in _segments(baseline)
    ]
    return min((value for value in passages if not math.isnan(value)), default=None)


def _place(point: Point) -> NDArray[np.float64]:
    """Entropy and log-perplexity: (2,)."""
    return np.array([point.entropy, math.log(point.perplexity)])


def _log_perplexity(
    left: NDArray[np.float64], right: NDArray[np.float64], entropy: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Log-perplexity on the straight line between two places, NaN outside.

    Shapes: left and right (2, ...), entropy (...) -> (...).
    """
    turned = left[0] > right[0]
    low, high = np.where(turned, right, left), np.where(turned, left, right)
    width = high[0] - low[0]
    weight = (entropy - low[0]) / np.where(width > 0, width, 1)
    between = (1 - weight) * low[1] + weight * high[1]
    value = np.where(width > 0, between, np.minimum(low[1], high[1]))
    return np.where((low[0] <= entropy) & (entropy <= high[0]), value, np.nan)


def _why_not(entropy: float, baseline: Sequence[Point]) -> str:
    covered: list[list[float]] = []
    for low, high in sorted(sorted(p.entropy for p in pair) for pair in _segments(baseline)):
        if covered and low <= covered[-1][1]:
            covered[-1][1] = max(covered[-1][1], high)
        else:
            covered.append([low, high])
    if not covered:
        return "the baseline has no point to compare with"
    reach = " and ".join(f"{low:.6g} to {high:.6g}" for low, high in covered)
    if entropy < covered[0][0]:
        return f"entropy {entropy:.6g} is below all that the baseline reaches ({reach})"
    if entropy > covered[-1][1]:
        return f"entropy {entropy:.6g} is above all that the baseline reaches ({reach})"
    return f"entropy {entropy:.6g} lies in a gap between the baseline's curves ({reach})"
