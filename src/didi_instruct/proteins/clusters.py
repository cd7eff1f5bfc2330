"""Clusters of chains by MMseqs2, and their entropy: how many kinds of chains there are.

The paper's diversity: `mmseqs easy-cluster` at 30% identity and 80% coverage of both chains.

MMseqs2 masks what is of low complexity before it compares chains. So it fails where all chains are
repeats, and finds copies of one repeat with noise in them to be many kinds. Chains of low
complexity (`repeats.is_low_complexity`) are therefore clustered a second time among themselves,
without mask and without correction for composition, and two chains are in one cluster if either run
says so.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from didi_instruct.errors import UserError
from didi_instruct.proteins.mmseqs import NO_KMER, MMseqsError, run_mmseqs, scratch, write_fasta
from didi_instruct.proteins.repeats import is_low_complexity

CRITERIA = ("--min-seq-id", "0.3", "-c", "0.8", "--cov-mode", "0")
UNMASKED = (
    "--single-step-clustering", "1", "-s", "7.5", "--mask", "0", "--comp-bias-corr", "0",
    "--cluster-mode", "1",
)  # fmt: skip
"""Of the second run: connected components, since each chain is like most others."""

JOINED = (
    "chains of low complexity, which MMseqs2 masks, were clustered a second time without the mask, "
    "and the clusters of both runs joined"
)
ALONE = (
    "MMseqs2 finds nothing to compare with its mask of low complexity on: the chains were "
    "clustered without it (--single-step-clustering --mask 0)"
)


@dataclass(frozen=True, slots=True)
class Clusters:
    """Chains with the number of the cluster that each belongs to."""

    labels: tuple[int, ...]
    plain: tuple[int, ...] | None
    """The same by the first run alone; None where it failed."""
    low_complexity: int
    """Chains of low complexity."""
    note: str | None = None
    """Why there was a second run; None where there was none."""


def cluster(sequences: Sequence[str]) -> Clusters:
    """Cluster chains, those of low complexity twice."""
    if len(sequences) < 2:
        raise UserError("Clusters are of 2 or more chains: give more.")
    low = [number for number, chain in enumerate(sequences) if is_low_complexity(chain)]
    try:
        plain: tuple[int, ...] | None = easy_cluster(sequences)
    except MMseqsError as error:
        if NO_KMER not in str(error):
            raise UserError(f"MMseqs2 failed: {error}.") from None
        plain = None
    again = low if plain is not None else list(range(len(sequences)))
    if len(again) < 2:
        return Clusters(plain or (0,) * len(sequences), plain, len(low))
    second = _without_mask([sequences[number] for number in again])
    labels = joined(plain or tuple(range(len(sequences))), again, second)
    return Clusters(labels, plain, len(low), JOINED if plain is not None else ALONE)


def _without_mask(sequences: Sequence[str]) -> tuple[int, ...]:
    try:
        return easy_cluster(sequences, *UNMASKED, "--max-seqs", max(len(sequences), 20))
    except MMseqsError as error:
        short = min(map(len, sequences))
        remedy = f" The shortest chain has {short} residues: use longer ones." if short < 14 else ""
        raise UserError(f"MMseqs2 failed: {error}.{remedy}") from None


def easy_cluster(sequences: Sequence[str], *options: object) -> tuple[int, ...]:
    """Label of each chain's cluster from one run of `mmseqs easy-cluster`."""
    with scratch() as folder:
        write_fasta(folder / "in.fasta", sequences)
        run_mmseqs(folder, "easy-cluster", "in.fasta", "out", "tmp", *CRITERIA, *options)
        return _labels(folder / "out_cluster.tsv", len(sequences))


def _labels(path: Path, num: int) -> tuple[int, ...]:
    """Read lines of a representative and a member, both numbers of chains."""
    pairs = [line.split("\t") for line in path.read_text(encoding="ascii").splitlines()]
    labels = {int(member): int(representative) for representative, member in pairs}
    if sorted(labels) != list(range(num)):
        raise UserError(f"MMseqs2 clustered {len(labels)} of {num} chains: its version is unknown.")
    return tuple(labels[number] for number in range(num))


def joined(labels: Sequence[int], members: Sequence[int], second: Sequence[int]) -> tuple[int, ...]:
    """Labels where chains are together that either clustering puts together.

    `second` has the labels of the chains numbered `members` alone.
    """
    root, representative = dict[int, int](), dict[int, int]()
    for member, label in zip(members, second, strict=True):
        other = representative.setdefault(label, labels[member])
        root[_root(root, labels[member])] = _root(root, other)
    return tuple(_root(root, label) for label in labels)


def _root(root: dict[int, int], label: int) -> int:
    while root.get(label, label) != label:
        label = root[label]
    return label


def entropy(labels: Sequence[int]) -> float:
    """Entropy in nats of the shares of clusters: ln N where all N chains differ, 0 for one kind."""
    shares = np.array(list(Counter(labels).values())) / len(labels)
    return float(max(0.0, -(shares * np.log(shares)).sum()))


def entropy_interval(labels: Sequence[int]) -> tuple[float, float] | None:
    """95% interval of the entropy at this number of chains, from leaving out each (jackknife).

    None where leaving out any changes it equally, as where all chains differ.
    """
    num, counts = len(labels), Counter(labels)
    if num < 3:
        return None
    total = sum(count * math.log(count) for count in counts.values())
    without = {}
    for count in set(counts.values()):
        left = total - count * math.log(count) + ((count - 1) * math.log(max(count - 1, 1)))
        without[count] = math.log(num - 1) - left / (num - 1)
    values = np.array([without[counts[label]] for label in labels])
    half = 1.96 * float(np.sqrt((num - 1) * values.var()))
    if half < 1e-9:
        return None
    value = entropy(labels)
    return max(0.0, value - half), min(math.log(num), value + half)
