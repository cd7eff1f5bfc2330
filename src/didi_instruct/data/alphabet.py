"""The alphabet of proteins: the 20 amino acids, and the vocabulary of ESM-2 and DPLM."""

from collections.abc import Iterable, Iterator, Mapping

from didi_instruct.errors import UserError

AMINO_ACIDS = "ACDEFGHIKLMNPQRSTVWY"
"""The letters that a model of proteins draws."""

ESM_VOCABULARY = (
    *("<cls>", "<pad>", "<eos>", "<unk>"),
    *"LAGVSERTIDPKQNFYMHWCXBUZO.-",
    *("<null_1>", "<mask>"),
)
"""The 33 tokens of ESM-2 and DPLM, in the order of their ids. Beside the 20 amino acids stand
selenocysteine (U), pyrrolysine (O), letters for residues that are not known (X any, B and Z one of
two) and signs of alignments."""

LONGEST_CHAIN = 100_000
"""Residues of a chain; the longest proteins known have about half as many."""


def is_protein(vocabulary: Mapping[str, int]) -> bool:
    """Return True if the texts of a vocabulary are chains of residues, a letter each."""
    letters = {word for word in vocabulary if len(word) == 1}
    pieces = any(len(word) > 1 and word[0] not in "<[" for word in vocabulary)
    text = any(letter.islower() for letter in letters)
    return letters >= set(AMINO_ACIDS) and not pieces and not text


def amino_ids(vocabulary: Mapping[str, int]) -> set[int]:
    """Ids of the 20 amino acids."""
    return {vocabulary[letter] for letter in AMINO_ACIDS}


def residues_of(vocabulary: Mapping[str, int]) -> str:
    """Letters that a chain may have in a vocabulary of residues; nothing for any other."""
    if not is_protein(vocabulary):
        return ""
    return "".join(sorted(word for word in vocabulary if len(word) == 1 and word.isalpha()))


def check_residues(text: str, vocabulary: Mapping[str, int]) -> None:
    """Refuse letters that are no residues: a tokenizer would take them for unknown ones."""
    for number, letter in enumerate("".join(text.split()), 1):
        if not (letter.isalpha() and letter in vocabulary):
            given = text if len(text) <= 40 else f"{text[:40]}…"
            capital = " Residues are capital letters." if letter.islower() else ""
            raise UserError(
                f"`{letter}`, letter {number} of the given `{given}`, is no residue: use the 20 "
                f"amino acids, or X for any.{capital}"
            )


def checked_chains(
    fragments: Iterable[tuple[str, str, bool]], letters: str, *, refuse_empty: bool
) -> Iterator[tuple[str, bool]]:
    """Chains in upper case and without white space: (place, text, last) -> (text, last).

    `place` is what an error calls the text. A letter that is not among `letters` is refused, and so
    is a chain of more than `LONGEST_CHAIN` or, with `refuse_empty`, of no letters.
    """
    known, length = frozenset(letters), 0
    for place, text, last in fragments:
        chain = "".join(text.split()).upper()
        if odd := set(chain) - known:
            first = next(letter for letter in chain if letter in odd)
            raise UserError(
                f"{place}: {first!r} is no residue. Known are {letters}: write X for a residue "
                "that is not known, and leave out gaps and stops."
            )
        length += len(chain)
        if length > LONGEST_CHAIN:
            raise UserError(
                f"{place}: a chain of more than {LONGEST_CHAIN:,} residues, and no protein is as "
                "long: remove it, or start each chain with a `>` header."
            )
        if last and not length and refuse_empty:
            raise UserError(f"{place}: an empty chain: remove its header, or add its sequence.")
        yield chain, last
        length = 0 if last else length
