"""Samples that no model of a table drew: the reference, and chains of FASTA files."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from didi_instruct.data.dataset import TokenSource
from didi_instruct.data.readers import ReadOptions
from didi_instruct.data.tokenizer import Tokenizer, is_protein
from didi_instruct.errors import UserError
from didi_instruct.evaluation.samples import (
    SHUFFLED,
    Origin,
    SampleSet,
    is_sample_file,
    read_samples,
    texts_of,
)
from didi_instruct.evaluation.text_likelihood import held_out
from didi_instruct.proteins.chains import (
    LETTERS,
    LONGER,
    chains_of_length,
    is_fasta,
    read_chains,
    shuffling,
    some_chains,
)

END = "<eos>"
"""Token that fills the window behind a chain where the tokenizer names no end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """The samples that a reference is compared with: it has to be text that they could be."""

    num: int
    length: int
    until_eot: bool
    tokenizer_hash: str | None
    """None where their tokenizer is not known."""
    tokenizer: Tokenizer | None = None
    """Tokenizer to read text with, where there is one."""
    num_tokens: int | None = None
    """Ids that all models know, where there are models."""
    documents: bool = False
    """Each text has a window of its own."""
    residues: int | None = None
    """Length of every sample, where they are chains of one length."""


def open_reference(data: str, wanted: Wanted, reading: ReadOptions) -> SampleSet:
    """Read as many texts as there are samples (or all, if they are fewer), in the same tokens.

    `data` is a file of samples, a FASTA file, or text. Other tokens and lengths are refused.
    """
    if is_fasta(data) and (wanted.tokenizer is None or is_of_residues(wanted.tokenizer)):
        return _chains(data, wanted)
    if is_sample_file(Path(data)):
        return _samples(data, wanted)
    return _text(data, wanted, reading)


def _samples(data: str, wanted: Wanted) -> SampleSet:
    found = read_samples(Path(data))
    origin = found.origin
    if origin.tokenizer != wanted.tokenizer_hash:
        raise UserError(
            f"{data} was written with another tokenizer than the samples: give a reference of a "
            "model with the same."
        )
    if (origin.length, origin.until_eot) != (wanted.length, wanted.until_eot):
        raise UserError(
            f"{data} has texts of {origin.length} tokens{_ends(origin.until_eot)}, and the samples "
            f"have {wanted.length}{_ends(wanted.until_eot)}: draw both alike."
        )
    if len(found) <= wanted.num:
        return replace(found, origin=replace(origin, model=data))
    some = found.first(wanted.num)
    return replace(some, origin=replace(origin, model=data, seconds=None))


def _ends(until_eot: bool) -> str:
    return " that end at their end-of-text" if until_eot else ""


def _text(data: str, wanted: Wanted, reading: ReadOptions) -> SampleSet:
    length = wanted.length
    source = held_out(wanted.tokenizer, length, data, wanted.num, reading, wanted.documents)
    _check(data, wanted, source)
    tokens = source.ordered(0, wanted.num)[:, :length]
    tokenizer = None if wanted.tokenizer_hash is None else source.tokenizer
    if wanted.tokenizer is not None:
        tokenizer = wanted.tokenizer  # the same, but for a token that ends no text of the model's
    texts, lengths = texts_of(tokenizer, tokens, wanted.until_eot)
    origin = Origin.of_text(data, wanted.tokenizer_hash, length, until_eot=wanted.until_eot)
    return SampleSet(origin, tokens, texts, None, lengths)


def _check(data: str, wanted: Wanted, source: TokenSource) -> None:
    """Refuse text of other tokens than the samples', or of shorter rows."""
    if wanted.tokenizer_hash is not None and source.tokenizer.hash != wanted.tokenizer_hash:
        raise UserError(
            f"{data} has other tokens than the samples: read or prepare it with the model's "
            "tokenizer (--tokenizer MODEL)."
        )
    if wanted.num_tokens is not None and source.num_tokens > wanted.num_tokens:
        raise UserError(
            f"{data} has {source.num_tokens} token ids, but the model knows {wanted.num_tokens}: "
            "prepare it again with the model's tokenizer."
        )
    if source.length < wanted.length:
        raise UserError(
            f"{data} has rows of {source.length} tokens, fewer than the samples "
            f"({wanted.length}): draw them with --length {source.length}."
        )


def _chains(data: str, wanted: Wanted) -> SampleSet:
    """Real chains: as long as the samples where those have one length, else of any length."""
    chains = read_chains(data)
    if wanted.residues is not None:
        found = chains_of_length(chains, wanted.residues, wanted.num)
        lengths = f"{wanted.residues} to {int(LONGER * wanted.residues)}"
    else:
        found = some_chains(chains, wanted.length, wanted.num)
        lengths = f"1 to {wanted.length}"
    if not found:
        raise UserError(
            f"{data} has no chain of {lengths} amino acids, which samples are compared with: give "
            "another --reference, or other lengths."
        )
    return chain_set(data, found, wanted.length, wanted.tokenizer, until_eot=wanted.until_eot)


def is_of_residues(tokenizer: Tokenizer) -> bool:
    """True for a tokenizer of chains of residues."""
    return is_protein(tokenizer.vocabulary)


def read_chain_set(path: str, tokenizer: Tokenizer | None, length: int | None = None) -> SampleSet:
    """Chains of a FASTA file as samples, all or those of one length."""
    chains = read_chains(path).sequences
    found = chains if length is None else [s for s in chains if len(s) == length]
    if not found:
        raise UserError(f"{path} has no chain of {length} residues: leave it out of --lengths.")
    return chain_set(path, found, max(map(len, found)), tokenizer)


def chain_set(
    name: str,
    sequences: Sequence[str],
    length: int,
    tokenizer: Tokenizer | None,
    *,
    until_eot: bool = False,
) -> SampleSet:
    """Chains as texts that nobody sampled, in windows of `length`; without tokenizer, by letter."""
    if tokenizer is None:
        rows = [[LETTERS.index(letter) for letter in sequence] for sequence in sequences]
        end, spoken = 0, None
    else:
        rows, spoken = tokenizer.encode(list(sequences)), tokenizer.hash
        fills = tokenizer.vocabulary.get(END, 0)
        end = fills if tokenizer.eot_id is None else tokenizer.eot_id
    odd = next((s for s, ids in zip(sequences, rows, strict=True) if len(s) != len(ids)), None)
    if odd is not None:
        raise UserError(f"{name}: the tokenizer does not cut `{odd[:20]}` into single residues.")
    tokens = torch.tensor([[*ids, *[end] * (length - len(ids))] for ids in rows])
    origin = Origin.of_text(name, spoken, length, until_eot=until_eot)
    counts = torch.tensor([len(ids) for ids in rows])
    return SampleSet(origin, tokens, tuple(sequences), None, counts)


def shuffled_set(real: SampleSet) -> SampleSet:
    """Shuffle the residues of each chain."""
    tokens = real.tokens.clone()
    orders = shuffling(real.lengths.tolist())
    for row, order in zip(tokens, orders, strict=True):
        row[: len(order)] = row[torch.from_numpy(order)]
    texts = ("".join(t[i] for i in order) for t, order in zip(real.texts, orders, strict=True))
    return replace(
        real, origin=replace(real.origin, model=SHUFFLED), tokens=tokens, texts=tuple(texts)
    )
