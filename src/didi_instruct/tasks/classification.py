"""Accuracy and F1 of predictions by several seeds, with intervals over texts and over seeds."""

import math
import statistics
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from didi_instruct.evaluation.intervals import Interval, Noise, Resampling, reflected

Probs = NDArray[np.float64]
Labels = NDArray[np.bool_]

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
    mean = statistics.fmean(values)
    half = _T[len(values) - 2] * statistics.stdev(values) / math.sqrt(len(values))
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
    score, accuracy, nll = statistics.fmean(by_seed), float(right.mean()), float(nats.mean())
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
