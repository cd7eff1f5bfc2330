"""The extra id of foreign models: DUO's padding, and the start of a text in AR models.

DUO's vocabulary has one id more than its tokenizer: padding, which is among the noise that the
network was trained with, but is never text. Here `duo` models draw any of their `vocab_size` ids.
So the padding's output bias is replaced by a number so low that its probability is 0 in every
precision. Noise stays what it was, any sampler does the right thing, and our own files keep it.
The number that was there is in the provenance, from where it returns when the model is written as
`duo-hub`: not a bit is lost.
"""

from typing import Any

import torch
from torch import Tensor, nn

from didi_instruct.config.model import ModelConfig
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import UserError
from didi_instruct.models.ar import ARModel
from didi_instruct.models.tensor_files import shown_value

BANNED = -3e4
"""A logit whose exponential is 0 also in float64, and that float16 can hold."""

PADDED_GPT2 = 50_258
"""GPT-2's 50,257 tokens and one more."""

BIAS = "output_layer.linear.bias"
KEY = "padding"


def find_padding(
    config: ModelConfig, said: int | None, tokenizer: Tokenizer | None = None
) -> int | None:
    """Return the padding id of a uniform-state model if it is the last id, which is DUO's way."""
    last = config.vocab_size - 1
    if config.kind != "duo":
        return None
    spare = tokenizer is not None and tokenizer.size == last
    return last if said == last or spare or config.vocab_size == PADDED_GPT2 else None


@torch.no_grad()
def close_padding(network: nn.Module, padding: int) -> dict[str, Any]:
    """Make an id impossible; return what `reopen_padding` needs, as JSON."""
    bias = network.get_parameter(BIAS)
    before = float(bias[padding])
    bias[padding] = BANNED
    return {"id": padding, "bias": before}


def reopen_padding(tensors: dict[str, Tensor], provenance: dict[str, Any]) -> int | None:
    """Give the padding its bias back, in a copy; return the padding's id, None without one."""
    padding = provenance.get(KEY)
    if not isinstance(padding, dict):
        return None
    bias = tensors[BIAS].clone()
    index, before = padding.get("id"), padding.get("bias")
    known = type(index) is int and 0 <= index < len(bias)
    if not known or not isinstance(before, int | float) or abs(before) > 1e300:
        raise UserError(
            f"config.json: `provenance.{KEY}` is {shown_value(padding)}, not an `id` below "
            f"{len(bias)} and the `bias` it had: mend it, or remove it if no id is padding."
        )
    if float(bias[index]) == float(torch.tensor(BANNED, dtype=bias.dtype)):
        bias[index] = float(before)
    tensors[BIAS] = bias
    return index


@torch.no_grad()
def start_with(network: ARModel, token: int) -> None:
    """Let our start symbol be that token: the family's AR models begin a text with end-of-text.

    The row that it replaces belongs to the mask, which those models never read.
    """
    embedding = network.vocab_embed.embedding
    embedding[-1] = embedding[token]
