"""Intervals of shares and means, and paired comparisons of models on the same questions."""

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from didi_instruct.seeding import mix
from didi_instruct.tasks.task import Row

Z = 1.959963984540054
"""Of a 95% interval."""
RESAMPLES = 10_000

Right = NDArray[np.bool_] | NDArray[np.float64]
"""(N,) which questions were answered correctly; ties between choices count in part."""


def wilson(correct: float, num: int) -> list[float]:
    """Wilson's 95% interval of a share of `num` independent questions."""
    share, spread = correct / num, Z * Z / num
    centre = (share + spread / 2) / (1 + spread)
    half = Z * math.sqrt(share * (1 - share) / num + spread / (4 * num)) / (1 + spread)
    return [max(0.0, centre - half), min(1.0, centre + half)]


def mean_interval(values: NDArray[np.float64]) -> list[float] | None:
    """Normal 95% interval of a mean; none of fewer than two values."""
    if len(values) < 2:
        return None
    mean, half = values.mean(), Z * values.std(ddof=1) / math.sqrt(len(values))
    return [float(mean - half), float(mean + half)]


def mcnemar(only_first: int, only_second: int) -> float:
    """Exact two-sided p-value that questions only one model gets right fall to both alike."""
    total, few = only_first + only_second, min(only_first, only_second)
    tail = sum(math.comb(total, k) for k in range(few + 1))
    # Whole numbers: 2^total exceeds any float from 1,024 on.
    return min(1.0, 2 * tail / 2**total) if total else 1.0


def compare(
    first: str, right1: Right, second: str, right2: Right, seed: int = 0
) -> tuple[Row, str]:
    """Difference in accuracy of two models over the same questions, and a sentence on it.

    The interval is a paired bootstrap's over questions; McNemar's exact test is of those that one
    model alone gets right. If its interval holds 0, or p is 0.05 or more, a difference is none.
    """
    paired = np.asarray(right1, np.float64) - np.asarray(right2, np.float64)
    values, counts = np.unique(paired, return_counts=True)
    generator = np.random.default_rng(mix(seed, "compare", len(paired)))
    drawn = generator.multinomial(len(paired), counts / counts.sum(), size=RESAMPLES)
    low, high = np.quantile(drawn @ values / len(paired), [0.025, 0.975])
    p = mcnemar(int((paired > 0).sum()), int((paired < 0).sum()))
    difference = float(paired.mean())
    if low <= 0 <= high or p >= 0.05:
        verdict = f"No difference in accuracy between {first} and {second}"
        told = _points(difference, low, high)
    elif difference > 0:
        verdict, told = f"{first} is more accurate than {second}", _points(difference, low, high)
    else:
        verdict, told = f"{second} is more accurate than {first}", _points(-difference, -high, -low)
    verdict = f"{verdict} ({told}, p = {p:.2g})."
    row = {"models": [first, second], "difference": difference, "mcnemar_p": p}
    return row | {"difference_ci95": [float(low), float(high)]}, verdict


def _points(difference: float, low: float, high: float) -> str:
    return f"{100 * difference:+.1f} points, 95% [{100 * low:+.1f}, {100 * high:+.1f}]"


def compare_all(
    right: Mapping[str, Right], seed: int = 0, baselines: Collection[str] = ()
) -> tuple[list[Row], list[str]]:
    """`compare` of every two models, but for two baselines."""
    pairs = [pair for pair in combinations(right, 2) if not set(pair) <= set(baselines)]
    found = [compare(a, right[a], b, right[b], seed) for a, b in pairs]
    return [row for row, _ in found], [said for _, said in found]


def against_chance(name: str, interval: Sequence[float], chance: float) -> str | None:
    """A sentence on a model whose interval of accuracy holds that of guessing."""
    if interval[0] <= chance <= interval[1]:
        return f"{name} cannot be told from guessing: {100 * chance:.1f}% lies within its interval."
    return None
