"""From a configuration to a network, its size and its cost."""

import torch

from didi_instruct.config.model import ModelConfig
from didi_instruct.models.ar import ARModel
from didi_instruct.models.discriminator import Discriminator
from didi_instruct.models.dit import DiT


def build_model(config: ModelConfig) -> DiT | ARModel:
    """Return a freshly initialised network: `DiT` for `mdlm` and `duo`, `ARModel` for `ar`."""
    return ARModel(config) if config.kind == "ar" else DiT(config)


def count_parameters(config: ModelConfig) -> int:
    """Return the number of parameters, buffers not counted, without allocating them."""
    with torch.device("meta"):
        return sum(p.numel() for p in build_model(config).parameters())


def count_discriminator_parameters(config: ModelConfig) -> int:
    """Return the number of parameters of the discriminator with that trunk."""
    with torch.device("meta"):
        return sum(p.numel() for p in Discriminator(config).parameters())


def flops_per_token(
    config: ModelConfig, head_fraction: float = 1.0, length: int | None = None
) -> float:
    """Return the floating-point operations of matrix products in one forward pass, per token.

    A multiplication and an addition count as two. Per block 24·d² (qkv 6, output 2, MLP 16) and
    4·L·d for the attention (scores and weighted values over L keys; (L + 1) / 2 keys on average in
    a causal model); the head costs 2·d·V on the `head_fraction` of positions it is applied to.
    Not counted: embedding, norms, softmax, rotary, and the modulation, which costs per sequence (or
    per batch), not per token. A training step costs three times as much.
    """
    keys = float(config.length if length is None else length)
    if config.kind == "ar":
        keys = (keys + 1) / 2
    block = 24 * config.hidden**2 + 4 * keys * config.hidden
    return config.layers * block + 2 * config.hidden * config.num_tokens * head_fraction
