"""Prompts and answers as tokens that a model can read, or a refusal that names the row."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import UserError
from didi_instruct.tasks.task import NamedModel


@dataclass(frozen=True, slots=True)
class Encoded:
    """Tokens of a prompt and of its answer; together, those of the whole text."""

    prompt: list[int]
    answer: list[int]


def encode(prompt: str, answer: str, tokenizer: Tokenizer) -> Encoded:
    """Tokens of a prompt and its answer, encoded as one text and cut between them."""
    [encoded] = encode_all([(prompt, answer)], tokenizer)
    return encoded


def encode_all(pairs: Sequence[tuple[str, str]], tokenizer: Tokenizer) -> list[Encoded]:
    """`encode` for many pairs of prompt and answer, on all cores.

    White space that ends a prompt moves to its answer, since tokens of words mostly begin with
    their space. The answer begins at the first token that the prompt alone would not have, so all
    of its text is in it even where a token spans the cut.
    """
    prompts = [prompt.rstrip() for prompt, _ in pairs]
    whole = tokenizer.encode([prompt + answer for prompt, answer in pairs])
    alone = tokenizer.encode(prompts)
    return [_cut(text, prompt) for text, prompt in zip(whole, alone, strict=True)]


def encode_rows(
    pairs: Sequence[tuple[str, str]],
    where: Sequence[str],
    tokenizer: Tokenizer,
    reader: str | None = None,
) -> list[Encoded]:
    """`encode_all`, where a pair that cannot be encoded is refused by file and row.

    `reader` names the model whose tokenizer it is, where there are several.
    """
    try:
        return encode_all(pairs, tokenizer)
    except UserError:
        for pair, place in zip(pairs, where, strict=True):
            try:
                encode(*pair, tokenizer)
            except UserError as error:
                refused = "" if reader is None else f"{reader} cannot read it. "
                raise UserError(
                    f"{place}: {refused}{error}. Reword it, or take a model of another tokenizer."
                ) from error
        raise


def _cut(text: list[int], prompt: list[int]) -> Encoded:
    shared = min(len(text), len(prompt))
    first = next((i for i in range(shared) if text[i] != prompt[i]), shared)
    return Encoded(text[:first], text[first:])


def encode_pairs(
    entry: NamedModel, pairs: Sequence[tuple[str, str]], where: Sequence[str]
) -> list[Encoded]:
    """Encode prompts and answers with a model's tokenizer; `where` names rows for errors."""
    tokenizer = entry.model.tokenizer
    assert tokenizer is not None, "checked where sources are loaded"
    if not pairs:
        return []
    encoded = encode_rows(pairs, where, tokenizer, entry.name)
    _check(entry, encoded, where)
    return encoded


def _check(entry: NamedModel, encoded: Sequence[Encoded], where: Sequence[str]) -> None:
    """Refuse answers without tokens, and answers that the model never gives."""
    model = entry.model
    assert model.tokenizer is not None
    for pair, place in zip(encoded, where, strict=True):
        if not pair.prompt or not pair.answer:
            part = "answer" if pair.prompt else "prompt"
            raise UserError(
                f"{place}: the tokenizer of {entry.name} leaves nothing of its {part}: write one "
                "that it knows."
            )
    asked = torch.tensor([token for pair in encoded for token in pair.answer])
    config = model.config
    never = {*model.never_written(asked).tolist(), *asked[asked >= config.num_tokens].tolist()}
    if config.kind == "mdlm" and config.end_id is not None:
        never |= {config.end_id}
    if not never & set(asked.tolist()):
        return
    pair, place = next(
        (pair, place)
        for pair, place in zip(encoded, where, strict=True)
        if never & set(pair.answer)
    )
    token = next(token for token in pair.answer if token in never)
    raise UserError(
        f"{place}: its answer has the token `{model.tokenizer.decode([token])}`, which "
        f"{entry.name} never writes: take a model whose vocabulary has the answers."
    )


def fit(pair: Encoded, length: int, where: str) -> Encoded:
    """Cut a prompt from the left, so that it and the answer fit a window of `length` tokens.

    One token of the prompt at least is left: an answer that leaves no room for it is refused.
    """
    room = length - len(pair.answer)
    if room < 1:
        raise UserError(
            f"{where}: the answer has {len(pair.answer)} tokens, and the model reads {length}, "
            "prompt included: shorten it, take the row out, or take a model that reads more."
        )
    return Encoded(pair.prompt[-room:], pair.answer)
