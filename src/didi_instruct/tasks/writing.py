"""Texts written behind prompts, each of a given number of tokens."""

from collections.abc import Sequence
from typing import Any

import torch

from didi_instruct.model import Model
from didi_instruct.sampling.generate import Request
from didi_instruct.sampling.state import PAD, Callback, Samples

GREEDY_SAMPLERS = {"mdlm": "confidence", "duo": "uniform-state", "ar": None}
"""Samplers that write the likeliest tokens at temperature 0, by kind of model."""


def write(
    model: Model,
    prompts: Sequence[Sequence[int]],
    counts: Sequence[int],
    *,
    batch_tokens: int,
    callback: Callback | None = None,
    **settings: Any,
) -> list[list[int]]:
    """Tokens of `write_samples`."""
    return write_samples(
        model, prompts, counts, batch_tokens=batch_tokens, callback=callback, **settings
    )[0]


def write_samples(
    model: Model,
    prompts: Sequence[Sequence[int]],
    counts: Sequence[int],
    *,
    batch_tokens: int,
    callback: Callback | None = None,
    **settings: Any,
) -> tuple[list[list[int]], Samples]:
    """Write `counts` tokens behind each prompt; settings are those of `Request`.

    All are rows of one request, so that their noise does not depend on batches. Nothing follows
    what is written, except where texts have windows of their own: there ends fill the window, so
    that the model knows how many tokens there are to be.
    """
    config = model.config
    ends = config.kind == "mdlm" and config.end_id is not None
    spans = [slice(len(p), len(p) + count) for p, count in zip(prompts, counts, strict=True)]
    width = config.length if ends else max(span.stop for span in spans)
    fill = config.end_id if ends and config.end_id is not None else PAD
    table = torch.full((len(prompts), width), fill)
    for row, prompt, span in zip(table, prompts, spans, strict=True):
        row[: span.start] = torch.tensor(prompt, dtype=torch.long)
        row[span] = config.mask_symbol
    if config.kind == "ar":
        settings = settings | {"steps": None}  # it takes one for each token
    request = Request(tokens=table, batch_size=max(1, batch_tokens // width), **settings)
    samples = model.request(request, callback=callback)
    rows = zip(samples.tokens.tolist(), spans, strict=True)
    return [row[span] for row, span in rows], samples
