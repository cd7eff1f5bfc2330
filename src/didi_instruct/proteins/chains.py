"""Chains of residues: read from FASTA, chosen by length, shuffled."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from didi_instruct.data.sources import Meter, Source, find_sources, open_decompressed, readable
from didi_instruct.errors import UserError
from didi_instruct.seeding import mix

RESIDUES = "ACDEFGHIKLMNPQRSTVWY"
"""The 20 amino acids."""
UNUSUAL = "BJOUXZ"
"""Letters that FASTA files of real proteins have besides: rare residues, and `any of several`."""
LONGER = 1.1
"""A real chain that stands for a length has at most so many times its residues."""


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
    """Whether a chain has the 20 amino acids alone."""
    return not sequence.strip(RESIDUES)


def speaks_residues(vocabulary: Iterable[str]) -> bool:
    """Whether a vocabulary has the 20 amino acids as letters, and nothing longer but specials."""
    words = set(vocabulary)
    longer = (
        word for word in words if len(word) > 1 and not (word[0] in "<[" and word[-1] in ">]")
    )
    return words >= set(RESIDUES) and next(longer, None) is None


def is_fasta(source: str) -> bool:
    """Whether a SOURCE is a FASTA file by its name, compressed or not."""
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

    Lower case is read as upper case, and a `*` at the end of a chain (a stop) is dropped. A file
    that has not changed is read once.
    """
    files = find_sources(source)
    other = next((file for file in files if file.kind != "fasta"), None)
    if other is not None:
        raise UserError(f"{other.name}: is no FASTA file: give chains as .fasta or .fa.")
    stats = [(file.name, file.path.stat()) for file in files if file.path is not None]
    return _read(source, tuple((name, s.st_size, s.st_mtime_ns) for name, s in stats))


def _sequences(file: Source) -> Iterator[str]:
    """Read the chains of one file, a line at a time."""
    parts: list[str] = []
    started = False
    with readable(file), open_decompressed(file, Meter()) as stream:
        for number, raw in enumerate(stream, 1):
            line = raw.decode("utf-8", "replace").removeprefix("\ufeff").strip()
            if line.startswith(">"):
                yield from _whole(parts)
                parts, started = [], True
            elif line:
                parts.append(_residues(line, f"{file.name}:{number}", started))
        yield from _whole(parts)


def _whole(parts: Sequence[str]) -> Iterator[str]:
    """Join the lines of a chain; a header without residues is none."""
    sequence = "".join(parts).removesuffix("*")
    if sequence:
        yield sequence


def _residues(line: str, where: str, started: bool) -> str:
    if not started:
        raise UserError(f"{where}: a sequence before the first `>` header: not FASTA.")
    line = "".join(line.upper().split())
    odd = line.removesuffix("*").strip(RESIDUES + UNUSUAL)
    if odd:
        raise UserError(
            f"{where}: `{odd[0]}` is no residue: chains have the letters {RESIDUES} (and "
            f"{UNUSUAL} for rare and unknown ones)."
        )
    return line


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
