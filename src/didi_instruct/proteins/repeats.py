"""Low complexity of chains: what a collapse into repeats looks like, which clusters may not see.

A chain of one repeat has few residues, few 3-mers or long runs, and MMseqs2 masks it before it
compares anything.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from didi_instruct.data.tokenizer import AMINO_ACIDS

LOW = 0.93
"""Share of the highest 3-mer entropy of its length below which a chain is of low complexity: half a
percent of Swiss-Prot, and all copies of a 7-residue repeat of which 40% are noise."""


@dataclass(frozen=True, slots=True, eq=False)
class Repeats:
    """Measures of each chain, in order: (N,) float64 each."""

    commonest: NDArray[np.float64]
    """Share of its commonest residue."""
    trimer_entropy: NDArray[np.float64]
    """Entropy of its 3-mers in nats."""
    longest_run: NDArray[np.float64]
    """Residues of its longest run of one letter."""
    low_complexity: NDArray[np.float64]
    """1 where it is of low complexity, else 0."""


def repeats(sequences: Sequence[str]) -> Repeats:
    """Measure each chain; an empty one has zeros."""
    columns = (commonest_share, trimer_entropy, longest_run, is_low_complexity)
    return Repeats(*(np.array([measure(s) for s in sequences], np.float64) for measure in columns))


def commonest_share(sequence: str) -> float:
    """Share of the commonest residue."""
    return max(Counter(sequence).values(), default=0) / max(len(sequence), 1)


def trimer_entropy(sequence: str) -> float:
    """Entropy in nats of the counts of all overlapping 3-mers; 0 for fewer than 4 residues."""
    counts = Counter(sequence[place : place + 3] for place in range(len(sequence) - 2))
    total = counts.total()
    found = -sum(n / total * math.log(n / total) for n in counts.values()) if total else 0.0
    return max(0.0, found)  # not the -0.0 of a single 3-mer, which tables print with its sign


def longest_run(sequence: str) -> int:
    """Residues of the longest run of one letter."""
    return max((sum(1 for _ in run) for _, run in groupby(sequence)), default=0)


def is_low_complexity(sequence: str) -> bool:
    """True if its 3-mer entropy is below `LOW` of the highest that its length allows."""
    places = len(sequence) - 2
    if places < 2:
        return False
    return trimer_entropy(sequence) < LOW * math.log(min(places, len(AMINO_ACIDS) ** 3))
