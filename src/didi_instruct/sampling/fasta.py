"""Residues that users give, and FASTA files of drawn chains."""

from collections.abc import Sequence

from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import UserError

LINE = 60
"""Letters of a line."""


def check_residues(text: str, tokenizer: Tokenizer) -> None:
    """Refuse letters that are no residues: the tokenizer would take them for unknown ones."""
    number = 0
    for letter in text:
        if letter.isspace():
            continue
        number += 1
        if not (letter.isalpha() and letter in tokenizer.vocabulary):
            capital = " Residues are capital letters." if letter.islower() else ""
            raise UserError(
                f"`{letter}`, letter {number} of the given `{_shortened(text)}`, is no residue: "
                f"use the 20 amino acids, or X for any.{capital}"
            )


def as_fasta(chains: Sequence[str], seed: int) -> str:
    """FASTA with each chain's length, the seed and the number of the sample in its header."""
    parts = []
    for number, chain in enumerate(chains):
        length = len(chain)
        name = f"L{length}_S{seed}_{number}"
        parts.append(f">{name} length={length} seed={seed} index={number}")
        parts += [chain[first : first + LINE] for first in range(0, length, LINE)]
    return "\n".join([*parts, ""])


def _shortened(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:40]}…"
