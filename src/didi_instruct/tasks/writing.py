"""Texts written behind prompts, each of a given number of tokens."""

from collections.abc import Sequence
from typing import Any

import torch

from didi_instruct.api.generation import Request, mask_symbol
from didi_instruct.api.model import Model
from didi_instruct.sampling.state import PAD

GREEDY_SAMPLERS = {"mdlm": "confidence", "duo": "uniform-state", "ar": None}
"""What writes the likeliest tokens at temperature 0, by kind of model."""


def write(
    model: Model, prompts: Sequence[Sequence[int]], counts: Sequence[int], **settings: Any
) -> list[list[int]]:
    """Write `counts` tokens behind each prompt, in one batch; settings are those of `Request`.

    Nothing follows the tokens, except where texts have windows of their own: there ends fill the
    window, so that the model knows how many tokens there are to be.
    """
    config = model.config
    ends = config.kind == "mdlm" and config.end_id is not None
    widths = [len(prompt) + count for prompt, count in zip(prompts, counts, strict=True)]
    fill = config.end_id if ends and config.end_id is not None else PAD
    table = torch.full((len(prompts), config.length if ends else max(widths)), fill)
    for row, prompt, width in zip(table, prompts, widths, strict=True):
        row[: len(prompt)] = torch.tensor(prompt, dtype=torch.long)
        row[len(prompt) : width] = mask_symbol(config)
    if config.kind == "ar":
        settings = settings | {"steps": None}  # one for each token
    request = Request(tokens=table, batch_size=len(prompts), **settings)
    rows = model.request(request).samples.tokens.tolist()
    return [
        row[len(prompt) : width] for row, prompt, width in zip(rows, prompts, widths, strict=True)
    ]
