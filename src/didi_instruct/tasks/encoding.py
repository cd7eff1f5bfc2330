"""Prompts and answers as tokens that a model can read, or a refusal that names the row."""

from collections.abc import Sequence

import torch

from didi_instruct.errors import UserError
from didi_instruct.tasks.prompts import Encoded, encode_all
from didi_instruct.tasks.task import NamedModel


def encode_pairs(
    entry: NamedModel, pairs: Sequence[tuple[str, str]], where: Sequence[str]
) -> list[Encoded]:
    """Encode prompts and answers with a model's tokenizer; `where` names rows for errors."""
    tokenizer = entry.model.tokenizer
    assert tokenizer is not None, "checked where sources are loaded"
    if not pairs:
        return []
    try:
        encoded = encode_all(pairs, tokenizer)
    except UserError:
        for pair, place in zip(pairs, where, strict=True):
            try:
                encode_all([pair], tokenizer)
            except UserError as error:
                raise UserError(f"{place}: {entry.name} cannot read it. {error}") from error
        raise
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
    """Cut a prompt from the left, so that it and the answer fit a window."""
    room = length - len(pair.answer)
    if room < 1:
        raise UserError(
            f"{where}: the answer has {len(pair.answer)} tokens, the model's window {length}: "
            "shorten it, or take a model that reads more."
        )
    return Encoded(pair.prompt[-room:], pair.answer)
