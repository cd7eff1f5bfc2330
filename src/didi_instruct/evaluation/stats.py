"""Intervals of numbers that are made of several sets of samples, by resampling all of them.

Sets of one seed and one size share their noise, sample by sample, so they are resampled together:
what they have in common cancels from a difference, as it does in the data. (Where two such sets are
independent all the same, that is no worse than resampling each alone.) Other sets are resampled
apart.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from didi_instruct.errors import UserError
from didi_instruct.seeding import mix

Numbers = NDArray[np.float64]
Interval = list[float]
"""Lower and upper end."""

RESAMPLES = 1000
ENOUGH = 0.95
"""Share of resamples that must have a value, else there is no interval."""
WEIGHTS_AT_ONCE = 1 << 22
"""Weights that are held as floats."""
DRAWS_AT_ONCE = 1 << 22
"""Indices the bootstrap holds in memory."""


class Noise(NamedTuple):
    """What two sets must have in common to be resampled together."""

    seed: int
    size: int


class Resampling:
    """How often each sample occurs in each resample, drawn once per kind of noise."""

    def __init__(self, seed: int = 0, resamples: int = RESAMPLES) -> None:
        self.seed, self.resamples = seed, resamples
        self._counts: dict[Noise, NDArray[np.uint16]] = {}

    def means(self, values: Numbers, noise: Noise) -> Numbers:
        """Mean of per-sample values in each resample: (N,) -> (R,)."""
        if len(values) != noise.size:
            raise ValueError(f"{len(values)} values of {noise.size} samples")
        counts = self._of(noise)
        rows = max(1, WEIGHTS_AT_ONCE // noise.size)
        parts = range(0, self.resamples, rows)
        sums = [counts[first : first + rows].astype(np.float64) @ values for first in parts]
        return np.concatenate(sums) / noise.size

    def _of(self, noise: Noise) -> NDArray[np.uint16]:
        if noise not in self._counts:
            generator = np.random.default_rng(mix(self.seed, "resample", *noise))
            counts = np.empty((self.resamples, noise.size), np.uint16)
            for row in counts:
                drawn = generator.integers(noise.size, size=noise.size)
                row[:] = np.bincount(drawn, minlength=noise.size)
            self._counts[noise] = counts
        return self._counts[noise]


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


def share_with_value(values: Numbers) -> float:
    """Part of the resamples in which a number exists."""
    return float(np.isfinite(values).mean())


def around(value: float, error: float) -> Interval | None:
    """95% interval of a normal estimate; none where its error is not known."""
    if not np.isfinite([value, error]).all():
        return None
    return [value - 1.96 * error, value + 1.96 * error]


def bootstrap(
    values: ArrayLike,
    *,
    statistic: Literal["mean"] | Callable[[NDArray[Any]], float] = "mean",
    samples: int = 1000,
    seed: int = 0,
) -> tuple[float, float]:
    """95% percentile interval of a statistic: `values` are resampled along their first axis.

    A callable gets an array of the same shape as `values`, so a row may hold several numbers (nats
    and tokens of one text, say). The rows must be independent; Self-BLEU values are not, they share
    references.
    """
    table = np.asarray(values)
    if table.ndim == 0 or len(table) < 2:
        raise UserError("A bootstrap interval needs 2 or more values.")
    if samples < 1:
        raise UserError(f"samples is {samples}: use 1 or more.")
    if statistic == "mean" and table.ndim > 1:
        raise UserError("The mean is of plain numbers: give one per row, or a callable statistic.")
    generator = np.random.default_rng(seed)
    at_once = max(1, DRAWS_AT_ONCE // len(table))
    results: list[float] = []
    while len(results) < samples:
        draws = min(at_once, samples - len(results))
        rows = generator.integers(len(table), size=(draws, len(table)))
        if callable(statistic):
            results += [statistic(table[row]) for row in rows]
        else:
            results += table[rows].mean(1).tolist()
    low, high = np.quantile(results, [0.025, 0.975])
    return float(low), float(high)
