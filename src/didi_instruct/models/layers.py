"""Layers of the DiT and the left-to-right model.

Attribute names are the keys of the public MDLM and DUO checkpoints (docs/foreign.md, "Core keys"),
and parameters are declared in the order in which foreign EMA lists store them. The residual stream
is float32 (float64 in a float64 model); matrix products run in the weights' type or in autocast's.
"""

import functools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROTARY_BASE = 10_000.0
NORM_EPS = 1e-5
TIME_WIDTH = 256
TIME_PERIOD = 10_000.0
ALIGN = 64  # GPUs multiply matrices of other widths than multiples of it slowly
NEVER = -1e4  # a logit that means probability 0; divergences of two laws that have it stay finite

Extend = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Stores new keys and values (B, H, L, D); returns all of them so far, (B, H, S, D) each."""


def upcast(x: Tensor) -> Tensor:
    """Return x in float32, or in float64 if it is float64 already."""
    return x if x.dtype == torch.float64 else x.float()


def product_dtype(weight: Tensor) -> torch.dtype:
    """Return the type in which a matrix product with a weight is computed."""
    kind = weight.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return weight.dtype


@functools.cache
def constant_ids(ids: tuple[int, ...], device: torch.device) -> Tensor:
    """Return ids as a tensor on a device, sent there once."""
    with torch.inference_mode(False):  # it outlives the context in which it is asked for first
        return torch.tensor(ids, device=device)


def no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return a context without autocast."""
    if device.type == "meta":  # where autocast does not exist
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def first_weight(layers: nn.Sequential) -> Tensor:
    weight = layers[0].weight
    assert isinstance(weight, Tensor)
    return weight


class Rotary(nn.Module):
    """Tables `cos` and `sin` (length, D/2) of rotary positions, base 10,000.

    Checkpoints have `inv_freq` (D/2,) alone. All three stay in float32 when the model is cast, and
    are rebuilt when it leaves the meta device.
    """

    inv_freq: Tensor
    cos: Tensor
    sin: Tensor

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.width, self.length = width, length
        self.register_buffer("inv_freq", self._frequencies().to(torch.empty(0).device))
        self.register_buffer("cos", None, persistent=False)
        self.register_buffer("sin", None, persistent=False)
        self._fill(self.inv_freq)

    def _frequencies(self) -> Tensor:
        exponents = torch.arange(0, self.width, 2, dtype=torch.float32, device="cpu") / self.width
        return 1.0 / ROTARY_BASE**exponents

    def _fill(self, inv_freq: Tensor) -> None:
        device = inv_freq.device
        self.inv_freq = inv_freq.float()
        if inv_freq.is_meta:  # shapes alone: a length read from a file may be absurd
            shape = (self.length, len(inv_freq))
            self.cos, self.sin = (torch.empty(shape, device=device) for _ in range(2))
            return
        # Built on the CPU, so that every device sees the same bits.
        positions = torch.arange(self.length, dtype=torch.float32, device="cpu")
        angles = torch.outer(positions, self.inv_freq.cpu())
        self.cos, self.sin = angles.cos().to(device), angles.sin().to(device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Rotary":
        before = self._frequencies() if self.inv_freq.is_meta else self.inv_freq
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._fill(before.to(self.inv_freq.device))
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *rest)
        value = state_dict.get(f"{prefix}inv_freq")
        if value is None or value.is_meta or value.shape != (self.width // 2,):
            return
        ours, errors = self._frequencies(), rest[-1]
        if not torch.allclose(value.cpu().float(), ours, rtol=1e-2, atol=0.0):
            errors.append(f"{prefix}inv_freq is not that of rotary positions with base 10,000")
        exact = value.dtype in (torch.float32, torch.float64)
        device = self.inv_freq.device
        # Frequencies rounded to 16 bits would turn far positions by whole radians.
        self._fill((value.detach() if exact else ours).to(device=device, dtype=torch.float32))

    def forward(self, length: int, start: int = 0) -> tuple[Tensor, Tensor]:
        """Return cos and sin for positions start .. start + length, (length, 1, 1, D/2) each."""
        if start + length > self.length:
            raise ValueError(f"{start + length} positions, but the model has {self.length}")
        rows = slice(start, start + length)
        return self.cos[rows, None, None], self.sin[rows, None, None]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate by position, half-split: dimension i pairs with i + D/2.

    Shapes: x (B, L, n, H, D), cos and sin (L, 1, 1, D/2) -> (B, L, n, H, D).
    """
    first, second = upcast(x).chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)


class LayerNorm(nn.Module):
    """LayerNorm without bias (ε 1e-5), in float32 under autocast too."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def modulated(self, shift: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weight and bias that make this norm `norm(x)·(1 + scale) + shift`."""
        return upcast(self.weight) * (1 + scale), shift

    def forward(
        self, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None
    ) -> Tensor:
        """Normalise x (..., d); `weight` and `bias` of `modulated` replace the norm's own."""
        x = upcast(x)
        weight = upcast(self.weight) if weight is None else weight
        if weight.ndim == 1:  # the same for all rows: one fused kernel
            return F.layer_norm(x, weight.shape, weight, bias, NORM_EPS)
        normed = F.layer_norm(x, x.shape[-1:], None, None, NORM_EPS)
        return normed * weight if bias is None else torch.addcmul(bias, normed, weight)


class Embedding(nn.Module):
    """A vector for each token or position; its one parameter is called `embedding`, (num, d)."""

    def __init__(self, num: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(num, hidden))
        nn.init.kaiming_uniform_(self.embedding, a=math.sqrt(5))

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.embedding)

    def add_to(self, x: Tensor, start: int = 0) -> Tensor:
        """Add the vectors of positions start .. start + L to x (B, L, d)."""
        return x + upcast(self.embedding[start : start + x.shape[1]])


class TimeEmbedding(nn.Module):
    """Sinusoids of σ (width 256, period 10,000, cosine half first), then linear, SiLU, linear."""

    def __init__(self, cond_dim: int) -> None:
        super().__init__()
        first, second = nn.Linear(TIME_WIDTH, cond_dim), nn.Linear(cond_dim, cond_dim)
        self.mlp = nn.Sequential(first, nn.SiLU(), second)

    def forward(self, sigma: Tensor) -> Tensor:
        """Map σ (N,) to (N, cond_dim)."""
        half = TIME_WIDTH // 2
        ramp = torch.arange(half, dtype=sigma.dtype, device=sigma.device)
        angles = sigma[:, None] * torch.exp(-math.log(TIME_PERIOD) / half * ramp)
        embedding = torch.cat((angles.cos(), angles.sin()), dim=-1)
        return self.mlp(embedding.to(first_weight(self.mlp).dtype))


class Modulation(nn.Linear):
    """adaLN: shifts, scales and gates of a layer, linear in the condition, zero at first."""

    def __init__(self, cond_dim: int, width: int) -> None:
        super().__init__(cond_dim, width)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def split(self, c: Tensor, parts: int, ndim: int) -> tuple[Tensor, ...]:
        """Compute `parts` tensors: (d,) each for one row of c, else (N, 1, ..., d) of `ndim`."""
        with no_autocast(c.device):
            out = upcast(self(c.to(self.weight.dtype)))
        rows, width = out.shape
        out = out[0] if rows == 1 else out.view(rows, *(1,) * (ndim - 2), width)
        return out.chunk(parts, dim=-1)


class Block(nn.Module):
    """Transformer block: attention with rotary positions, then an MLP ×4 with tanh-GELU.

    With `cond_dim` adaLN modulates both: `x·(1+scale)+shift` after the norm, `x + gate·f(x)` at
    the residual.
    """

    def __init__(self, hidden: int, heads: int, cond_dim: int | None, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1 = LayerNorm(hidden)
        self.attn_qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.attn_out = nn.Linear(hidden, hidden, bias=False)
        self.norm2 = LayerNorm(hidden)
        wide, narrow = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.mlp = nn.Sequential(wide, nn.GELU(approximate="tanh"), narrow)
        if cond_dim is not None:
            self.adaLN_modulation = Modulation(cond_dim, 6 * hidden)

    def affine(self, c: Tensor, ndim: int) -> tuple[Tensor, ...]:
        """Weight and bias of the norm and gate, of the attention and then of the MLP, under c."""
        shift1, scale1, gate1, shift2, scale2, gate2 = self.adaLN_modulation.split(c, 6, ndim)
        first, second = self.norm1.modulated(shift1, scale1), self.norm2.modulated(shift2, scale2)
        return (*first, gate1, *second, gate2)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        c: Tensor | None = None,
        folded: Tensor | None = None,
        mask: Tensor | None = None,
        causal: bool = False,
        extend: Extend | None = None,
    ) -> Tensor:
        """Map x (B, L, d) to (B, L, d).

        `folded` (6, d), the `affine` computed before, modulates it, or else the condition c (1 or
        B, cond_dim). mask, broadcastable to (B, H, L, S), is True where a key is attended.
        """
        affine: tuple[Tensor | None, ...] = (None,) * 6
        if folded is not None:
            affine = folded.unbind()
        elif c is not None:
            affine = self.affine(c, x.ndim)
        weight1, bias1, gate1, weight2, bias2, gate2 = affine
        branch = self.attend(self.norm1(x, weight1, bias1), cos, sin, mask, causal, extend)
        x = self.residual(x, branch, gate1)
        branch = self.norm2(x, weight2, bias2).to(first_weight(self.mlp).dtype)
        return self.residual(x, self.feed(branch), gate2)

    def feed(self, x: Tensor) -> Tensor:
        """The MLP of x (..., d); on a GPU in 16 bits, without gradients, its GELU is fused."""
        first, _, second = self.mlp
        dtype = product_dtype(first_weight(self.mlp))
        narrow = dtype in (torch.bfloat16, torch.float16)
        if not (x.is_cuda and narrow) or torch.is_grad_enabled():
            return self.mlp(x)
        product = torch.ops.aten._addmm_activation.default  # its GELU is the tanh one on GPUs
        rows, weight, bias = x.flatten(0, -2), first.weight, first.bias
        inner = product(bias.to(dtype), rows.to(dtype), weight.to(dtype).T, use_gelu=True)
        return second(inner).view_as(x)

    def attend(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | None,
        causal: bool,
        extend: Extend | None,
    ) -> Tensor:
        """Attention of x (B, L, d); qkv packed in one linear, ordered q, k, v then heads."""
        qkv = self.attn_qkv(x.to(self.attn_qkv.weight.dtype)).unflatten(-1, (3, self.heads, -1))
        q, k = rotate(qkv[:, :, :2], cos, sin).transpose(1, 3).unbind(2)
        v = qkv[:, :, 2].transpose(1, 2)
        if extend is not None:
            k, v = extend(k, v)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
        return self.attn_out(out.transpose(1, 2).flatten(2))

    def residual(self, x: Tensor, branch: Tensor, gate: Tensor | None) -> Tensor:
        """Return x + gate · dropout(branch)."""
        if self.dropout > 0:
            branch = F.dropout(branch, self.dropout, self.training)
        return x + branch if gate is None else torch.addcmul(x, gate, branch)


class OutputLayer(nn.Module):
    """Final norm, modulated if there is `cond_dim`, and LM head, zero at first."""

    def __init__(self, hidden: int, vocab_size: int, cond_dim: int | None) -> None:
        super().__init__()
        self.norm_final = LayerNorm(hidden)
        self.linear = nn.Linear(hidden, vocab_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        if cond_dim is not None:
            self.adaLN_modulation = Modulation(cond_dim, 2 * hidden)

    def affine(self, c: Tensor, ndim: int) -> tuple[Tensor, Tensor]:
        """Weight and bias of the final norm under the condition c."""
        return self.norm_final.modulated(*self.adaLN_modulation.split(c, 2, ndim))

    def normed(
        self, hidden: Tensor, c: Tensor | None = None, folded: Tensor | None = None
    ) -> Tensor:
        """Normalise hidden (..., d), modulated as in `Block.forward`, in the weights' type."""
        affine: tuple[Tensor, ...] = ()
        if folded is not None:
            affine = folded.unbind()
        elif c is not None:
            affine = self.affine(c, hidden.ndim)
        return self.norm_final(hidden, *affine).to(self.linear.weight.dtype)

    def forward(
        self,
        hidden: Tensor,
        c: Tensor | None = None,
        folded: Tensor | None = None,
        *,
        num: int,
        align: int = 1,
        never: tuple[int, ...] = (),
    ) -> Tensor:
        """Map hidden (..., d) to logits (..., num) of the first `num` ids.

        c is (1, cond_dim), or has one row per leading index of hidden. Columns that pad to a
        multiple of `align`, and the ids in `never`, have the logit `NEVER`.
        """
        x = self.normed(hidden, c, folded)
        weight, bias = self.linear.weight[:num], self.linear.bias[:num]
        if never:
            bias = bias.index_fill(0, constant_ids(never, bias.device), NEVER)
        if extra := -len(weight) % align:
            dtype = product_dtype(weight)  # cast before it is copied
            weight = F.pad(weight.to(dtype), (0, 0, 0, extra))
            bias = F.pad(bias.to(dtype), (0, extra), value=NEVER)
        return F.linear(x.to(weight.dtype), weight, bias)
