"""Means, standard errors, and intervals by the bootstrap.

Numbers that are made of several sets of samples are resampled over all of them. Sets of one seed
and one size share their noise, sample by sample, so they are resampled together: what they have in
common cancels from a difference, as it does in the data. (Where two such sets are independent all
the same, that is no worse than resampling each alone.) Other sets are resampled apart.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from didi_instruct.seeding import mix

Numbers = NDArray[np.float64]
Interval = list[float]
"""Lower and upper end."""

Z = 1.96
"""Half the width of a normal 95% interval, in standard errors."""
RESAMPLES = 1000
ENOUGH = 0.95
"""Share of resamples that must have a value, else there is no interval."""
HELD_AT_ONCE = 1 << 22
"""Weights or indices of resamples in memory."""


class Noise(NamedTuple):
    """Key that two sets must share to be resampled together."""

    seed: int
    size: int


class Resampling:
    """Counts of each sample in each resample, drawn once per kind of noise."""

    def __init__(self, seed: int = 0, resamples: int = RESAMPLES) -> None:
        self.seed, self.resamples = seed, resamples
        self._counts: dict[Noise, NDArray[np.uint16]] = {}

    def means(self, values: Numbers, noise: Noise) -> Numbers:
        """Mean of per-sample values in each resample: (N,) -> (R,)."""
        if len(values) != noise.size:
            raise ValueError(f"{len(values)} values of {noise.size} samples")
        if noise not in self._counts:
            self._counts[noise] = self._draw(noise)
        counts, rows = self._counts[noise], max(1, HELD_AT_ONCE // noise.size)
        parts = range(0, self.resamples, rows)
        sums = [counts[first : first + rows].astype(np.float64) @ values for first in parts]
        return np.concatenate(sums) / noise.size

    def _draw(self, noise: Noise) -> NDArray[np.uint16]:
        generator = np.random.default_rng(mix(self.seed, "resample", *noise))
        counts = np.empty((self.resamples, noise.size), np.uint16)
        for row in counts:
            drawn = generator.integers(noise.size, size=noise.size)
            row[:] = np.bincount(drawn, minlength=noise.size)
        return counts


def aligned(*columns: Numbers) -> Numbers:
    """Stack arrays, cut to the columns that all have: K times (..., C) -> (K, ..., smallest C)."""
    width = min(each.shape[-1] for each in columns)
    return np.stack([each[..., :width] for each in columns])


def reflected(value: float, resampled: Numbers) -> Interval | None:
    """95% interval of a number from its resamples (R,), NaN where it does not exist.

    A number that is measured against the best of several settings profits from their luck; its
    resamples do so twice, and lie to one side of it. So their quantiles are reflected at the value
    (the basic bootstrap), which moves the interval to the other side, where the truth is.

    None where the number exists in too few resamples: it would be an interval of the lucky ones.
    """
    found = resampled[np.isfinite(resampled)]
    if not len(found) or len(found) < ENOUGH * len(resampled):
        return None
    low, high = 2 * value - np.quantile(found, [0.975, 0.025])
    return [float(low), float(high)]


def around(value: float, error: float) -> Interval | None:
    """95% interval of a normal estimate; None where its error is not known."""
    if not np.isfinite([value, error]).all():
        return None
    return [value - Z * error, value + Z * error]


def mean_and_error(values: ArrayLike) -> tuple[float, float]:
    """Mean of independent values and its standard error, infinite for one value."""
    numbers = np.asarray(values, np.float64)
    count = len(numbers)
    error = numbers.std(ddof=1) / math.sqrt(count) if count > 1 else math.inf
    return float(numbers.mean()), float(error)


def _mean(resamples: NDArray[Any]) -> Numbers:
    mean: Numbers = resamples.mean(axis=1)
    return mean


def bootstrap(
    values: ArrayLike,
    *,
    statistic: Callable[[NDArray[Any]], Numbers] = _mean,
    samples: int = RESAMPLES,
    seed: int = 0,
) -> tuple[float, float]:
    """95% percentile interval of a statistic of 2 or more `values`, by resampling their first axis.

    A row may hold several numbers (nats and tokens of one text, say); a statistic of resamples
    (R, N, ...) is (R,). The rows must be independent; Self-BLEU values are not, they share
    references.
    """
    table = np.asarray(values)
    generator = np.random.default_rng(seed)
    at_once = max(1, HELD_AT_ONCE // len(table))
    found = []
    for first in range(0, samples, at_once):
        draws = min(at_once, samples - first)
        rows = generator.integers(len(table), size=(draws, len(table)))
        found.append(statistic(table[rows]))
    low, high = np.quantile(np.concatenate(found), [0.025, 0.975])
    return float(low), float(high)
