"""Chains of residues: read from FASTA, chosen by length, shuffled."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from didi_instruct.data.readers import ReadOptions, read_pieces
from didi_instruct.data.sources import Meter, Source, find_sources
from didi_instruct.data.tokenizer import AMINO_ACIDS
from didi_instruct.errors import UserError
from didi_instruct.seeding import mix

LETTERS = AMINO_ACIDS + "UOXBZ"
"""Letters of real chains: the amino acids, two rare residues, and those for unknown ones."""
LONGER = 1.1
"""A real chain that stands for a length has at most so many times its residues."""

_LINE = 60
"""Letters of a line of FASTA that is written."""


@dataclass(frozen=True, slots=True, eq=False)
class Chains:
    """Chains of a FASTA file or a folder of such."""

    name: str
    sequences: tuple[str, ...]
    """In capitals; rare residues and letters for `any of several` as they are."""
    fingerprint: str
    """Of the sequences."""

    @property
    def usual(self) -> list[str]:
        """Chains of the 20 amino acids alone."""
        return [s for s in self.sequences if is_usual(s)]


def is_usual(sequence: str) -> bool:
    """True if a chain has no letters but those of the 20 amino acids."""
    return not sequence.strip(AMINO_ACIDS)


def is_fasta(source: str) -> bool:
    """True if a SOURCE is a FASTA file by its name, compressed or not; False for a folder."""
    if not Path(source).is_file():
        return False
    try:
        return all(found.kind == "fasta" for found in find_sources(source))
    except UserError:
        return False


@lru_cache(maxsize=2)
def _read(source: str, _: tuple[tuple[str, int, int], ...]) -> Chains:
    digest, sequences = hashlib.sha256(), []
    for file in find_sources(source):
        for sequence in _sequences(file):
            digest.update(sequence.encode() + b"\n")
            sequences.append(sequence)
    if not sequences:
        raise UserError(f"{source}: has no chain: give a FASTA file with sequences.")
    return Chains(source, tuple(sequences), digest.hexdigest())


def read_chains(source: str) -> Chains:
    """Read all chains of a FASTA file or folder; refuse letters that are no residues, by line.

    Lower case is read as upper case. A file that has not changed is read once.
    """
    files = find_sources(source)
    other = next((file for file in files if file.kind != "fasta"), None)
    if other is not None:
        raise UserError(f"{other.name}: is no FASTA file: give chains as .fasta or .fa.")
    stats = [(file.name, file.path.stat()) for file in files if file.path is not None]
    return _read(source, tuple((name, s.st_size, s.st_mtime_ns) for name, s in stats))


def _sequences(file: Source) -> Iterator[str]:
    """Read the chains of one file."""
    parts: list[str] = []
    for piece in read_pieces(file, ReadOptions(residues=LETTERS), Meter()):
        parts.append(piece.text)
        if piece.last:
            yield "".join(parts)
            parts = []


def chains_of_length(chains: Chains, length: int, num: int, seed: int = 0) -> list[str]:
    """Choose `num` real chains for a length (all there are, if fewer), cut to exactly that.

    They have the 20 amino acids alone, and `length` residues or up to a tenth more; those nearest
    in length come first, in an order drawn by the seed. What is longer loses its end.
    """
    fit = [s for s in chains.usual if length <= len(s) <= LONGER * length]
    order = np.random.default_rng(mix(seed, "real chains", length)).permutation(len(fit))
    nearest = sorted((fit[place] for place in order), key=len)
    return [sequence[:length] for sequence in nearest[:num]]


def some_chains(chains: Chains, longest: int, num: int, seed: int = 0) -> list[str]:
    """Draw `num` real chains of any length up to `longest` (all there are, if fewer)."""
    fit = [s for s in chains.usual if len(s) <= longest]
    order = np.random.default_rng(mix(seed, "real chains")).permutation(len(fit))
    return [fit[place] for place in order[:num]]


def shuffling(lengths: Sequence[int], seed: int = 0) -> list[NDArray[np.int64]]:
    """Order of places that shuffles each chain, chain by chain."""
    return [
        np.random.default_rng(mix(seed, "shuffled", number)).permutation(length)
        for number, length in enumerate(lengths)
    ]


def as_fasta(chains: Sequence[str], seed: int) -> str:
    """FASTA with each chain's length, the seed and the number of the sample in its header."""
    parts = []
    for number, chain in enumerate(chains):
        length = len(chain)
        name = f"L{length}_S{seed}_{number}"
        parts.append(f">{name} length={length} seed={seed} index={number}")
        parts += [chain[first : first + _LINE] for first in range(0, length, _LINE)]
    return "\n".join([*parts, ""])
