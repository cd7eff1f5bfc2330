"""What samples are compared with: real text, or saved samples of a teacher with all its steps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from didi_instruct.api.chain_sets import chain_set
from didi_instruct.api.studio import texts_of
from didi_instruct.data.alphabet import is_protein
from didi_instruct.data.dataset import TokenSource
from didi_instruct.data.readers import ReadOptions
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import UserError
from didi_instruct.evaluation.mauve import FEWEST as FEWEST_OF_MAUVE
from didi_instruct.evaluation.probes import FEWEST_SAMPLES
from didi_instruct.evaluation.samples import (
    Origin,
    SampleSet,
    is_sample_file,
    read_samples,
)
from didi_instruct.evaluation.text_likelihood import held_out
from didi_instruct.proteins.chains import (
    LONGER,
    chains_of_length,
    is_fasta,
    read_chains,
    some_chains,
)

FEWEST: Mapping[str, int] = {
    "ar-kl": FEWEST_SAMPLES,
    "c2st": FEWEST_SAMPLES,
    "mauve": FEWEST_OF_MAUVE,
}
"""Texts that a metric cannot do without."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Like:
    """The samples that a reference is compared with."""

    num: int
    length: int
    until_eot: bool
    hash: str | None
    """Of their tokenizer; None where it is not known."""
    tokenizer: Tokenizer | None = None
    """To read text with, where there is one."""
    num_tokens: int | None = None
    """Ids that the model knows, where there is one."""
    documents: bool = False
    """Whether each text has a window of its own."""
    residues: int | None = None
    """Of each sample, where they are chains of one length."""


def open_reference(
    data: str, like: Like, reading: ReadOptions, metrics: Sequence[str] = ()
) -> SampleSet:
    """As many texts as there are samples (or all, if they are fewer), in the same tokens.

    Refuses texts of other tokens or of other lengths, and fewer than a metric needs.
    """
    read = _samples if is_sample_file(Path(data)) else _text
    if is_fasta(data) and (like.tokenizer is None or is_of_residues(like.tokenizer)):
        read = _chains
    found = read(data, like, reading)
    for name in metrics:
        # Fewer samples are not the reference's fault, and refused where samples are.
        if name in ("c2st", "mauve") and len(found) < FEWEST[name] <= like.num:
            length = like.residues or like.length
            raise UserError(
                f"{data} has {len(found)} texts of {length} tokens, and the metric {name} needs "
                f"{FEWEST[name]}: give more as --reference, or leave out {name}."
            )
    return found


def _samples(data: str, like: Like, _: ReadOptions) -> SampleSet:
    found = read_samples(Path(data))
    origin = found.origin
    if origin.tokenizer != like.hash:
        raise UserError(
            f"{data} was written with another tokenizer than the samples: give a reference of a "
            "model with the same."
        )
    if (origin.length, origin.until_eot) != (like.length, like.until_eot):
        raise UserError(
            f"{data} has texts of {origin.length} tokens{_ends(origin.until_eot)}, and the samples "
            f"have {like.length}{_ends(like.until_eot)}: draw both alike."
        )
    log_prob = found.log_prob
    whole = len(found) <= like.num  # else the time of drawing is that of more
    return SampleSet(
        replace(origin, model=data, seconds=origin.seconds if whole else None),
        found.tokens[: like.num],
        found.texts[: like.num],
        None if log_prob is None else log_prob[: like.num],
        found.lengths[: like.num],
    )


def _ends(until_eot: bool) -> str:
    return " that end at their end-of-text" if until_eot else ""


def _text(data: str, like: Like, reading: ReadOptions) -> SampleSet:
    source = held_out(like.tokenizer, like.length, data, like.num, reading, like.documents)
    _check(data, like, source)
    tokens = source.ordered(0, like.num)[:, : like.length]
    tokenizer = None if like.hash is None else source.tokenizer
    if like.tokenizer is not None:
        tokenizer = like.tokenizer  # the same, but for a token that ends no text of the model's
    texts, lengths = texts_of(tokenizer, tokens, like.until_eot)
    origin = Origin.of_text(data, like.hash, like.length, until_eot=like.until_eot)
    return SampleSet(origin, tokens, texts, None, lengths)


def _chains(data: str, like: Like, _: ReadOptions) -> SampleSet:
    """Real chains: as long as the samples where those have one length, else of any length."""
    chains = read_chains(data)
    if like.residues is not None:
        found = chains_of_length(chains, like.residues, like.num)
        lengths = f"{like.residues} to {int(LONGER * like.residues)}"
    else:
        found = some_chains(chains, like.length, like.num)
        lengths = f"1 to {like.length}"
    if not found:
        raise UserError(
            f"{data} has no chain of {lengths} amino acids, which samples are compared with: give "
            "another --reference, or other lengths."
        )
    return chain_set(data, found, like.length, like.tokenizer, until_eot=like.until_eot)


def is_of_residues(tokenizer: Tokenizer) -> bool:
    """Whether what a tokenizer cuts are chains of residues."""
    return is_protein(tokenizer.vocabulary)


def _check(data: str, like: Like, source: TokenSource) -> None:
    """Refuse text of other tokens than the samples', or of shorter rows."""
    if like.hash is not None and source.tokenizer.hash != like.hash:
        raise UserError(
            f"{data} has other tokens than the samples: read or prepare it with the model's "
            "tokenizer (--tokenizer MODEL)."
        )
    if like.num_tokens is not None and source.num_tokens > like.num_tokens:
        raise UserError(
            f"{data} has {source.num_tokens} token ids, but the model knows {like.num_tokens}: "
            "prepare it again with the model's tokenizer."
        )
    if source.length < like.length:
        raise UserError(
            f"{data} has rows of {source.length} tokens, fewer than the samples ({like.length}): "
            f"draw them with --length {source.length}."
        )
