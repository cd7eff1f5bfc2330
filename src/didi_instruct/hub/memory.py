"""Memory of sampling and of distilling a bidirectional causal LM, in bytes by part.

The formulas are in docs/large.md. They count what grows with the model, the texts and the adapters;
buffers of libraries and gaps left by the allocator come on top. Parts that are not in memory at
the same time do not add up to the total.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from didi_instruct.config.distill import DistillConfig
from didi_instruct.sampling.draw import LAW_ELEMENTS

Parts = dict[str, int]
"""Bytes by part, and `total`, the most in memory at once."""

ROWS = 1024
"""Positions whose logits a loss holds at a time."""
ADAM = 16
"""Bytes for each number that AdamW trains in float32: itself, its gradient, two moments."""
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
        """Read the sizes from a config.json in the words of `transformers`."""
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
    parts = {
        "weights": shape.weights,
        # Embeddings, input, residual and normed states; gate, values and their product.
        "block": tokens * size * (4 * shape.hidden + 3 * shape.inner),
        "states": 4 * (tokens + read) * shape.hidden,  # in float32, and those that are read
        "logits": read * shape.vocab_size * size,
        "draws": 3 * 8 * min(read * shape.vocab_size, LAW_ELEMENTS),  # laws in float64
    }
    head = parts["logits"] + max(parts["states"], parts["draws"])
    return parts | {"total": parts["weights"] + max(parts["block"], head)}


def with_adapters(
    shape: CausalShape, *, batch: int, length: int, rank: int, roles: int = 2
) -> Parts:
    """Bytes of a distillation whose roles are adapters on one frozen base.

    The teacher is the base. `roles` counts student and discriminator, and the auxiliary denoiser
    of a method that has one. Activations are checkpointed at blocks.
    """
    kept = {
        "base": shape.weights,
        "adapters": roles * ADAM * shape.adapter(rank),
        "discriminator_head": ADAM * (shape.hidden + 2) * shape.hidden,
    }
    return _with_activations(kept, shape, batch * length, lora=True)


def distillation(
    shape: CausalShape, config: DistillConfig, numbers: int, *, texts: int, length: int
) -> Parts:
    """Bytes of a distillation with adapters of so many numbers, `texts` in a pass of a process.

    Texts have `length` tokens, of which a prompt's are not written. It is the largest of a pass
    with gradients and a pass that draws.
    """
    d, size, v = shape.hidden, shape.itemsize, shape.vocab_size
    second = {"didi": ADAM, "token-matching": ADAM, "sdtt": 4}.get(config.method, 0)
    average = 4 if config.train.ema else 0
    kept = {"base": shape.weights, "adapters": numbers * (ADAM + average + second)}
    if config.method == "didi":
        kept["discriminator_head"] = ADAM * (d + 2) * d
    group = config.group_size
    at_once, written = texts, config.prompts.length if config.prompts.source else length
    if config.method == "didi":  # what is compared is read with the student's
        at_once += texts // group if config.continues else texts
    elif config.method == "token-matching":  # two graphs are there
        at_once += texts // group
    elif config.method == "mixture":
        at_once *= config.mixture.learning
    rows = texts * written
    if config.method == "didi":
        # Logits, their logarithms and a gradient; the teacher's and their logarithms.
        logits = min(rows, ROWS) * v * (2 * size + 12)
    else:  # whole: logits, log-probabilities of student and teacher or auxiliary, gradients
        logits = rows * v * (size + 16)
    passing = _with_activations({}, shape, at_once * length, lora=True)
    parts = kept | {name: passing[name] for name in ("checkpoints", "block")}
    parts["logits"] = logits
    starts = texts // group if config.continues else 1
    reads = max(starts, texts) * written
    drawing = 4 * (texts * length + reads) * d + reads * v * size
    parts["drawing"] = drawing + 3 * 8 * min(reads * v, LAW_ELEMENTS)
    learning = parts["checkpoints"] + max(parts["block"], logits)
    return parts | {"total": sum(kept.values()) + max(learning, parts["drawing"])}


def three_copies(shape: CausalShape, *, batch: int, length: int) -> Parts:
    """Bytes of a distillation with a network each for teacher, student and discriminator."""
    kept = {
        "weights": 3 * shape.weights,
        "optimizers": 2 * _KEPT_BY_ADAM * shape.parameters,
        "gradients": 2 * shape.weights,
        "discriminator_head": ADAM * (shape.hidden + 2) * shape.hidden,
    }
    return _with_activations(kept, shape, batch * length, lora=False)


def _with_activations(kept: Parts, shape: CausalShape, tokens: int, *, lora: bool) -> Parts:
    """Add what a pass with gradients holds: checkpoints, then logits or a block computed anew."""
    d, k, f, size = shape.hidden, shape.keys, shape.inner, shape.itemsize
    # Residuals, queries, keys, values, attention and its projection, gate, its activation, values,
    # product; norms in float32.
    block = size * (5 * d + 2 * k + 4 * f) + 4 * 4 * d
    if lora:
        # What enters the adapters and the gradient of the widest, in float32; both are in 16 bits
        # beside it for a while.
        block += 4 * (4 * d + 2 * f) + 3 * size * f // 2
    parts = kept | {"checkpoints": shape.layers * tokens * d * size}
    passing = {
        "block": tokens * block,
        "logits": min(tokens, ROWS) * shape.vocab_size * (size + 4 + 4),
    }
    return parts | passing | {"total": sum(parts.values()) + max(passing.values())}
