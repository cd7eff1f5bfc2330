"""Bytes that a bidirectional causal LM takes, by part: to sample from it, and to distil it.

The formulas are in docs/large.md. They count what grows with the model, the texts and the adapters;
buffers of libraries and what an allocator leaves between its blocks come on top.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from didi_instruct.sampling.draw import LAW_ELEMENTS

Parts = dict[str, int]
"""Bytes by part, and their `total`."""

ROWS = 1024
"""Positions whose logits a loss holds at a time."""
ADAM = 16
"""Bytes of a number that AdamW trains in float32: itself, its gradient, two moments."""
_KEPT_BY_ADAM = 12  # beside weights in 16 bits: a float32 copy, two moments


@dataclass(frozen=True, kw_only=True, slots=True)
class CausalShape:
    """Sizes of a Llama or a Qwen2."""

    layers: int
    hidden: int
    inner: int
    """Width of the MLP."""
    keys: int
    """Width of all keys."""
    vocab_size: int
    parameters: int
    itemsize: int = 2
    """Bytes of a weight."""

    @classmethod
    def of(cls, settings: Mapping[str, Any], parameters: int, itemsize: int) -> "CausalShape":
        """Sizes that a config.json in the words of `transformers` says."""
        hidden, heads = settings["hidden_size"], settings["num_attention_heads"]
        return cls(
            layers=settings["num_hidden_layers"],
            hidden=hidden,
            inner=settings["intermediate_size"],
            keys=hidden // heads * settings["num_key_value_heads"],
            vocab_size=settings["vocab_size"],
            parameters=parameters,
            itemsize=itemsize,
        )

    @property
    def weights(self) -> int:
        """Bytes of all weights."""
        return self.parameters * self.itemsize

    def adapter(self, rank: int) -> int:
        """Numbers of a LoRA adapter on the seven linear layers of each block."""
        d, k, f = self.hidden, self.keys, self.inner
        return self.layers * rank * (2 * (d + d) + 2 * (d + k) + 3 * (d + f))


def sampling(shape: CausalShape, *, batch: int, length: int, reads: int | None = None) -> Parts:
    """Bytes of a pass over texts (batch, length), with logits at `reads` positions (None: all)."""
    tokens, size = batch * length, shape.itemsize
    read = tokens if reads is None else reads
    law = min(read * shape.vocab_size, LAW_ELEMENTS)
    return _summed(
        weights=shape.weights,
        # Input, residual and normed states; gate, values and their product.
        block=tokens * size * 3 * (shape.hidden + shape.inner),
        states=tokens * shape.hidden * (4 + size),
        logits=read * shape.vocab_size * size,
        draws=2 * 8 * law,
    )


def with_adapters(
    shape: CausalShape, *, batch: int, length: int, rank: int, roles: int = 2
) -> Parts:
    """Bytes of a distillation whose roles are adapters on one frozen base.

    The teacher is the base. `roles` counts student and discriminator, and the auxiliary denoiser
    of a method that has one. Activations are checkpointed at blocks.
    """
    return _summed(
        base=shape.weights,
        adapters=roles * ADAM * shape.adapter(rank),
        discriminator_head=ADAM * (shape.hidden + 2) * shape.hidden,
        **_activations(shape, batch * length, with_lora=True),
    )


def three_copies(shape: CausalShape, *, batch: int, length: int) -> Parts:
    """Bytes of a distillation with a network each for teacher, student and discriminator."""
    return _summed(
        weights=3 * shape.weights,
        optimizers=2 * _KEPT_BY_ADAM * shape.parameters,
        gradients=2 * shape.weights,
        discriminator_head=ADAM * (shape.hidden + 2) * shape.hidden,
        **_activations(shape, batch * length, with_lora=False),
    )


def _activations(shape: CausalShape, tokens: int, *, with_lora: bool) -> Parts:
    d, k, f, size = shape.hidden, shape.keys, shape.inner, shape.itemsize
    # Of the block that is computed anew: residuals, queries, keys, values, attention and its
    # projection, gate, its activation, values, product; norms in float32.
    block = size * (5 * d + 2 * k + 4 * f) + 4 * 4 * d
    if with_lora:
        block += 4 * (6 * d + f)  # what enters each adapter, in float32
    return {
        "checkpoints": shape.layers * tokens * d * size,
        "block": tokens * block,
        "logits": min(tokens, ROWS) * shape.vocab_size * (size + 4 + 4),
    }


def _summed(**parts: int) -> Parts:
    return {**parts, "total": sum(parts.values())}
