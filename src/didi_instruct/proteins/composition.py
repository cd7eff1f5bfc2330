"""Composition of chains beside that of real ones: residues, 2-mers and 3-mers.

The Jensen-Shannon divergence of two laws, in nats: half of KL(p, m) plus half of KL(q, m), m their
mean. It is finite whatever is missing in either, 0 for equal ones and ln 2 where nothing is shared.
Few chains have a divergence above 0 from the law that they were drawn from, so it is read beside a
floor: what as many real chains of the same lengths have, drawn anew.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from didi_instruct.data.tokenizer import AMINO_ACIDS
from didi_instruct.errors import UserError
from didi_instruct.proteins.chains import Chains
from didi_instruct.seeding import mix

Counts = NDArray[np.float64]
DRAWS = 20
"""Fresh samples of real chains behind a floor."""
_CODES = np.full(256, -1, np.int64)
_CODES[np.frombuffer(AMINO_ACIDS.encode(), np.uint8)] = np.arange(len(AMINO_ACIDS))


@dataclass(frozen=True, slots=True)
class Divergence:
    """Divergence of chains from real ones at one k."""

    value: float
    ci95: tuple[float, float] | None
    """By leaving out each chain (jackknife); None for fewer than 3."""
    floor: float
    """Mean of as many real chains."""


def counts(sequence: str, k: int) -> Counts:
    """Counts (20^k,) of the k-mers of a chain; those with other letters are left out."""
    codes = _CODES[np.frombuffer(sequence.encode("ascii", "replace"), np.uint8)]
    places = max(len(codes) - k + 1, 0)
    ids, usual = np.zeros(places, np.int64), np.ones(places, bool)
    for shift in range(k):
        part = codes[shift : shift + places]
        ids, usual = ids * len(AMINO_ACIDS) + part, usual & (part >= 0)
    return np.bincount(ids[usual], minlength=len(AMINO_ACIDS) ** k).astype(np.float64)


def total_counts(sequences: Iterable[str], k: int) -> Counts:
    """Counts (20^k,) of the k-mers of all chains together."""
    return sum((counts(s, k) for s in sequences), np.zeros(len(AMINO_ACIDS) ** k))


def jensen_shannon(one: Counts, other: Counts) -> float:
    """Jensen-Shannon divergence in nats of two laws, given by counts; 0 where one is empty."""
    if not one.sum() or not other.sum():
        return 0.0
    p, q = one / one.sum(), other / other.sum()
    middle = (p + q) / 2
    return float((_relative_entropy(p, middle) + _relative_entropy(q, middle)) / 2)


def _relative_entropy(p: Counts, q: Counts) -> float:
    present = p > 0
    return float((p[present] * np.log(p[present] / q[present])).sum())


@lru_cache(maxsize=8)
def _real_counts(chains: Chains, k: int) -> Counts:
    return total_counts(chains.sequences, k)


def divergence(sequences: Sequence[str], real: Chains, k: int, seed: int = 0) -> Divergence:
    """Divergence of the k-mers of chains from those of real chains."""
    law, own = _real_counts(real, k), [counts(s, k) for s in sequences]
    if not law.sum():
        raise UserError(f"{real.name} has no chain of {k} residues: give longer ones.")
    total = sum(own, np.zeros_like(law))
    value = jensen_shannon(total, law)
    return Divergence(
        value,
        _jackknife(value, [jensen_shannon(total - part, law) for part in own]),
        floor(list(map(len, sequences)), real, k, seed),
    )


def floor(lengths: Sequence[int], real: Chains, k: int, seed: int = 0, draws: int = DRAWS) -> float:
    """Mean divergence of real chains of these lengths from all others.

    Each is a stretch of a chain drawn at random from those long enough (the longest one if there
    are none), and is taken out of what it is compared with.
    """
    law, found = _real_counts(real, k), []
    sizes = np.array(list(map(len, real.sequences)))
    order = np.argsort(sizes, kind="stable")
    first = np.minimum(np.searchsorted(sizes[order], lengths), len(order) - 1)
    generator = np.random.default_rng(mix(seed, "composition", k))
    for _ in range(draws):
        sample = np.zeros_like(law)
        for length, low in zip(lengths, first, strict=True):
            chain = real.sequences[order[generator.integers(low, len(order))]]
            start = generator.integers(max(len(chain) - length, 0) + 1)
            sample += counts(chain[start : start + length], k)
        found.append(jensen_shannon(sample, np.maximum(law - sample, 0)))
    return float(np.mean(found))


def _jackknife(value: float, without: Sequence[float]) -> tuple[float, float] | None:
    if len(without) < 3:
        return None
    half = 1.96 * float(np.sqrt((len(without) - 1) * np.var(without)))
    return max(0.0, value - half), min(float(np.log(2)), value + half)
