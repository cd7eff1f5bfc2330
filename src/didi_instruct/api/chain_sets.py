"""Chains that nobody sampled, as sets of samples: those of a FASTA file, and shuffled ones."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import UserError
from didi_instruct.evaluation.samples import SHUFFLED, Origin, SampleSet
from didi_instruct.proteins.chains import LETTERS, read_chains, shuffling

END = "<eos>"
"""Token that fills the window behind a chain where the tokenizer names no end."""


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
    else:
        rows = tokenizer.encode(list(sequences))
    odd = next((s for s, ids in zip(sequences, rows, strict=True) if len(s) != len(ids)), None)
    if odd is not None:
        raise UserError(f"{name}: the tokenizer does not cut `{odd[:20]}` into single residues.")
    end = _end(tokenizer)
    tokens = torch.tensor([[*ids, *[end] * (length - len(ids))] for ids in rows])
    spoken = None if tokenizer is None else tokenizer.hash
    origin = Origin.of_text(name, spoken, length, until_eot=until_eot)
    counts = torch.tensor([len(ids) for ids in rows])
    return SampleSet(origin, tokens, tuple(sequences), None, counts)


def _end(tokenizer: Tokenizer | None) -> int:
    """Id that fills a window."""
    if tokenizer is None:
        return 0
    return tokenizer.vocabulary.get(END, 0) if tokenizer.eot_id is None else tokenizer.eot_id


def read_chain_set(path: str, tokenizer: Tokenizer | None, length: int | None = None) -> SampleSet:
    """Chains of a FASTA file as samples, all or those of one length."""
    chains = read_chains(path).sequences
    found = chains if length is None else [s for s in chains if len(s) == length]
    if not found:
        raise UserError(f"{path} has no chain of {length} residues: leave it out of --lengths.")
    return chain_set(path, found, max(map(len, found)), tokenizer)


def shuffled_set(real: SampleSet) -> SampleSet:
    """The same chains with the residues of each shuffled."""
    tokens = real.tokens.clone()
    orders = shuffling(real.lengths.tolist())
    for row, order in zip(tokens, orders, strict=True):
        row[: len(order)] = row[torch.from_numpy(order)]
    texts = ("".join(t[i] for i in order) for t, order in zip(real.texts, orders, strict=True))
    return replace(
        real, origin=replace(real.origin, model=SHUFFLED), tokens=tokens, texts=tuple(texts)
    )
