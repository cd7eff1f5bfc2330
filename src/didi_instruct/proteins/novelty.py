"""Novelty of chains: how like they are to those of a training FASTA, by `mmseqs easy-search`.

A chain's identity is the best over its hits: identical residues over columns of the local
alignment (gaps counted), of hits that cover at least 80% of the chain at an E-value of at most
0.001. A chain without hit has 0, one that is in the file word for word 1, even where MMseqs2 masks
it as low complexity.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from didi_instruct.errors import UserError
from didi_instruct.proteins.chains import Chains
from didi_instruct.proteins.mmseqs import (
    LONGEST,
    NO_KMER,
    MMseqsError,
    run_mmseqs,
    scratch,
    write_fasta,
)

CRITERIA = ("-c", "0.8", "--cov-mode", "2", "-e", "0.001", "--alignment-mode", "3")


@dataclass(frozen=True, slots=True, eq=False)
class Novelty:
    """Likeness of each chain to those of the training FASTA, in order."""

    identity: NDArray[np.float64]
    """(N,) best identity, 0 to 1; 0 without a hit."""
    hit: NDArray[np.bool_]
    """(N,) True for a chain with a hit or in the file word for word."""
    copy: NDArray[np.bool_]
    """(N,) True for a chain that is in the file word for word."""


def novelty(sequences: Sequence[str], training: Chains) -> Novelty:
    """Search each chain among those of a training FASTA."""
    if not sequences:
        raise UserError("There are no chains to search: give one or more.")
    known = set(training.sequences)
    copy = np.array([sequence in known for sequence in sequences])
    identity = np.where(copy, 1.0, 0.0)
    for number, share in _hits(sequences, training):
        identity[number] = max(identity[number], share)
    return Novelty(identity, identity > 0, copy)


def _hits(sequences: Sequence[str], training: Chains) -> list[tuple[int, float]]:
    """Number of the chain and identity of every hit."""
    with scratch() as folder:
        write_fasta(folder / "chains.fasta", sequences)
        write_fasta(folder / "training.fasta", [s for s in training.sequences if len(s) <= LONGEST])
        names = ("chains.fasta", "training.fasta", "hits.tsv", "tmp")
        try:
            run_mmseqs(folder, "easy-search", *names, *CRITERIA, "--format-output", "query,fident")
        except MMseqsError as error:
            if NO_KMER in str(error):  # all of the training chains are masked
                return []
            raise UserError(f"MMseqs2 failed: {error}.") from None
        lines = (folder / "hits.tsv").read_text(encoding="ascii").splitlines()
    pairs = (line.split("\t") for line in lines)
    return [(int(number), float(share)) for number, share in pairs]
