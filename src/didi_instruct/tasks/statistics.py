"""Intervals of shares and means, paired comparisons of models, accuracy and F1 over seeds."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from didi_instruct.evaluation.stats import Interval, Noise, Resampling, reflected
from didi_instruct.seeding import mix
from didi_instruct.tasks.task import Row

Z = 1.959963984540054
"""Of a 95% interval."""
SIGNIFICANT = 0.05
"""Differences of a larger p-value are called none."""
RESAMPLES = 10_000

Right = NDArray[np.bool_] | NDArray[np.float64]
"""(N,) which questions were answered correctly; ties between choices count in part."""
Probs = NDArray[np.float64]
Labels = NDArray[np.bool_]


def wilson(correct: float, num: int) -> Interval:
    """Wilson's 95% interval of a share of `num` independent questions."""
    share, spread = correct / num, Z * Z / num
    centre = (share + spread / 2) / (1 + spread)
    half = Z * math.sqrt(share * (1 - share) / num + spread / (4 * num)) / (1 + spread)
    return [max(0.0, centre - half), min(1.0, centre + half)]


def mean_interval(values: NDArray[np.float64]) -> Interval | None:
    """Normal 95% interval of a mean; none of fewer than two values."""
    if len(values) < 2:
        return None
    mean, half = values.mean(), Z * values.std(ddof=1) / math.sqrt(len(values))
    return [float(mean - half), float(mean + half)]


def mcnemar(only_first: int, only_second: int) -> float:
    """Exact two-sided p-value that questions only one model gets right fall to both alike."""
    total, few = only_first + only_second, min(only_first, only_second)
    # Whole numbers, since 2^total exceeds any float from 1,024 on; each term from the one before.
    term = tail = 1
    for k in range(1, few + 1):
        term = term * (total - k + 1) // k
        tail += term
    p: float = 2 * tail / 2**total
    return min(1.0, p)


def compare(
    first: str, right1: Right, second: str, right2: Right, seed: int = 0
) -> tuple[Row, str]:
    """Compare two models by their accuracy on the same questions: a row, and a sentence on it.

    The interval is a paired bootstrap's over questions; McNemar's exact test is of those that one
    model alone gets right. If its interval holds 0, or p is 0.05 or more, a difference is none, and
    `better` of the row is None.
    """
    paired = np.asarray(right1, np.float64) - np.asarray(right2, np.float64)
    values, counts = np.unique(paired, return_counts=True)
    generator = np.random.default_rng(mix(seed, "compare", len(paired)))
    drawn = generator.multinomial(len(paired), counts / counts.sum(), size=RESAMPLES)
    low, high = np.quantile(drawn @ values / len(paired), [0.025, 0.975])
    p = mcnemar(int((paired > 0).sum()), int((paired < 0).sum()))
    difference = float(paired.mean())
    better = None
    if low <= 0 <= high or p >= SIGNIFICANT:
        verdict = f"No difference in accuracy between {first} and {second}"
        told = _points(difference, low, high)
    elif difference > 0:
        better, verdict = first, f"{first} is more accurate than {second}"
        told = _points(difference, low, high)
    else:
        better, verdict = second, f"{second} is more accurate than {first}"
        told = _points(-difference, -high, -low)
    verdict = f"{verdict} ({told}, p = {p:.2g})."
    row = {"models": [first, second], "difference": difference, "mcnemar_p": p}
    row["better"] = better
    return row | {"difference_ci95": [float(low), float(high)]}, verdict


def _points(difference: float, low: float, high: float) -> str:
    return f"{100 * difference:+.1f} points, 95% [{100 * low:+.1f}, {100 * high:+.1f}]"


def compare_all(
    right: Mapping[str, Right], seed: int = 0, baselines: Collection[str] = ()
) -> tuple[list[Row], list[str]]:
    """`compare` of every two models, and of each with each baseline."""
    pairs = [pair for pair in combinations(right, 2) if not set(pair) <= set(baselines)]
    found = [compare(a, right[a], b, right[b], seed) for a, b in pairs]
    return [row for row, _ in found], [said for _, said in found]


def against_chance(rows: Sequence[Row], chance: float) -> list[str]:
    """A sentence on the models whose intervals of accuracy hold that of guessing; none if none."""
    found = []
    for row in rows:
        low, high = row["accuracy_ci95"]
        if low <= chance <= high:
            found.append(row["model"])
    if not found:
        return []
    of = "their intervals" if len(found) > 1 else "its interval"
    return [f"Not told from guessing, since {100 * chance:.1f}% lies in {of}: {'; '.join(found)}."]


# Predictions of two labels, by several seeds

# Quantiles 0.975 of Student's t with 1 to 30 degrees of freedom.
_T = (
    12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281, 2.2010, 2.1788,
    2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860, 2.0796, 2.0739, 2.0687, 2.0639,
    2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423,
)  # fmt: skip
MOST_SEEDS = len(_T) + 1


def f1(hits: float, misses: float, false_alarms: float) -> float:
    """F1 of the positive label: 2·tp / (2·tp + fn + fp); 0 where there is nothing to find."""
    total = 2 * hits + misses + false_alarms
    return 2 * hits / total if total else 0.0


def over_seeds(values: list[float]) -> Interval | None:
    """95% interval of the mean of shares by Student's t; None for one value."""
    if len(values) < 2:
        return None
    mean, spread = float(np.mean(values)), float(np.std(values, ddof=1))
    half = _T[len(values) - 2] * spread / math.sqrt(len(values))
    return [max(0.0, mean - half), min(1.0, mean + half)]


@dataclass(frozen=True, slots=True)
class Measures:
    """Means over seeds, each with an interval over texts (bootstrap) and one over seeds (t)."""

    accuracy: float
    accuracy_ci95: Interval | None
    accuracy_seeds: list[float]
    f1: float
    f1_ci95: Interval | None
    f1_seeds: list[float]
    nll: float
    """Mean cross-entropy of the two labels, in nats."""
    nll_ci95: Interval | None


def measure(probs: Probs, labels: Labels, seed: int = 0) -> Measures:
    """Measure probabilities of label 1, (seeds, N), against labels (N,)."""
    positive = probs >= 0.5
    right = (positive == labels).astype(np.float64)
    hits, alarms = positive & labels, positive & ~labels
    misses = ~positive & labels
    nats = -np.log(np.clip(np.where(labels, probs, 1 - probs), 1e-300, None))

    noise, resampling = Noise(seed, len(labels)), Resampling(seed)
    means = [
        np.stack([resampling.means(row.astype(np.float64), noise) for row in counts])
        for counts in (hits, misses, alarms)
    ]
    with np.errstate(invalid="ignore"):
        drawn = (2 * means[0] / (2 * means[0] + means[1] + means[2])).mean(0)
    by_seed = [
        f1(*(int(count.sum()) for count in counts))
        for counts in zip(hits, misses, alarms, strict=True)
    ]
    score, accuracy, nll = float(np.mean(by_seed)), float(right.mean()), float(nats.mean())
    return Measures(
        accuracy=accuracy,
        accuracy_ci95=reflected(accuracy, resampling.means(right.mean(0), noise)),
        accuracy_seeds=right.mean(1).tolist(),
        f1=score,
        f1_ci95=reflected(score, np.nan_to_num(drawn)),
        f1_seeds=by_seed,
        nll=nll,
        nll_ci95=reflected(nll, resampling.means(nats.mean(0), noise)),
    )
