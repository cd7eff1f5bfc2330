"""Denoiser of a DiT on a CPU: the same function of the same weights, laid out anew.

Without time conditioning all modulations are constant, so gates go into the matrices before them.
Halves of q and k that turn together are put side by side, so that rotary positions are one product
of complex numbers. Weights are packed. The last block needs keys and values of all positions, but
the rest of it only positions whose logits are asked for.

Float32 results differ from the network's by rounding. A network in bfloat16 multiplies in
bfloat16 here too; its residual stream stays float32, as in the network.
"""

import math
import platform
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from didi_instruct.models.dit import DiT
from didi_instruct.models.layers import NEVER, NORM_EPS, Block
from didi_instruct.sampling.denoiser import LogitsDenoiser
from didi_instruct.sampling.engines import keep_few
from didi_instruct.sampling.state import Reads

BLANK_TEXTS = 32
"""Texts without a word whose states are kept: every text starts from one, often from the same."""
ROUND = 16
"""Selected positions are rounded up to a multiple: oneDNN makes a kernel for every number, and
keeps it in memory."""
SMALL = 2**20
"""Largest number of bfloat16 attention weights that are held at once: up to it the fused kernel is
slower."""


def fits(network: DiT) -> bool:
    """True for networks that can be laid out so."""
    if network.training or network.config.time_conditioning:
        return False
    weight = network.vocab_embed.embedding
    return weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.bfloat16)


def packed_denoiser(network: DiT) -> LogitsDenoiser:
    """Denoiser of a network that `fits`, with a copy of its weights."""
    return LogitsDenoiser(PackedDiT(network).logits, network.config.num_tokens)


class PackedDiT:
    """A DiT for inference on a CPU, with a copy of its weights."""

    @torch.no_grad()
    def __init__(self, network: DiT) -> None:
        assert fits(network), "a DiT in evaluation mode, on the CPU, without time conditioning"
        mods = network.constants()
        assert mods is not None
        assert mods.layers is not None
        *folded, last = mods.layers
        self._embedding = network.vocab_embed.embedding.detach()
        learned = network.position_embed
        self._positions = None if learned is None else learned.embedding.detach().float()
        self._turns = torch.complex(network.rotary_emb.cos, network.rotary_emb.sin)[:, None]
        pairs = zip(network.blocks, folded, strict=True)
        *self._blocks, self._last = [_PackedBlock(block, own) for block, own in pairs]
        self._norm = last.unbind()
        linear, num = network.output_layer.linear, network.config.num_tokens
        bias = linear.bias.clone()
        self._mask_id, self._end_id = network.config.mask_id, network.config.end_id
        bias[list(network.config.never_drawn)] = NEVER
        self._head = PackedLinear(linear.weight[:num], bias[:num])
        self._blank_states: dict[bytes, Tensor] = {}

    @torch.no_grad()
    def logits(self, reads: Reads, t: Tensor | float, at: Tensor) -> Tensor:
        """Logits (R, V) at flat positions `at` (R,) of texts (U, L)."""
        tokens, length = reads.tokens, reads.tokens.shape[1]
        mask, turns = None, self._turns[:length]
        if reads.attended is not None:
            mask = reads.attended[:, None, None, :]
        if len(tokens) == 1 and mask is None and self._is_blank(tokens):
            key, make = tokens.numpy().tobytes(), partial(self._states, tokens)
            x = keep_few(self._blank_states, key, make, BLANK_TEXTS)
        else:
            x = self._states(tokens, mask)
        where = torch.zeros(tokens.shape, dtype=torch.bool)
        where.view(-1)[at] = True
        # Selected positions first, in order, then others: rows are as wide as the widest needs.
        counts = where.sum(1)
        width = min(math.ceil(max(1, int(counts.max())) / ROUND) * ROUND, length)
        chosen = (~where).to(torch.uint8).argsort(dim=1, stable=True)[:, :width]
        x = self._last(x, turns, mask, chosen)
        x = x[torch.arange(width) < counts[:, None]]
        count = len(x)
        if count > ROUND:
            x = F.pad(x, (0, 0, 0, -count % ROUND))
        found = self._head(_normed(x, *self._norm))[:count]
        if bool((at[1:] > at[:-1]).all()):
            return found
        return found[(where.flatten().cumsum(0) - 1)[at]]

    def _states(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """States (U, L, d) before the last block."""
        length = tokens.shape[1]
        x = F.embedding(tokens, self._embedding).float()
        if self._positions is not None:
            x = x + self._positions[:length]
        for block in self._blocks:
            x = block(x, self._turns[:length], mask)
        return x

    def _is_blank(self, tokens: Tensor) -> bool:
        """True for masks alone, with ends behind them where texts have windows of their own."""
        if self._mask_id is None:
            return False
        blank = tokens >= self._mask_id
        if self._end_id is not None:
            blank |= tokens == self._end_id
        return bool(blank.all())


class _PackedBlock:
    """A block whose modulation is constant."""

    def __init__(self, block: nn.Module, folded: Tensor) -> None:
        assert isinstance(block, Block)
        weight1, bias1, gate1, weight2, bias2, gate2 = folded.unbind()
        self.norm1, self.norm2, self.heads = (weight1, bias1), (weight2, bias2), block.heads
        weight = block.attn_qkv.weight
        width = weight.shape[1] // block.heads
        q, k, v = weight.view(3, block.heads, width, -1).unbind()
        interleaved = torch.arange(width).view(2, -1).t().flatten()
        parts = q[:, interleaved] / math.sqrt(width), k[:, interleaved], v
        self.qkv = PackedLinear(torch.stack(parts).flatten(0, 2))
        self.out = PackedLinear(_gated(block.attn_out.weight, gate1))
        first, second = block.mlp[0], block.mlp[2]
        assert isinstance(first, nn.Linear)
        assert isinstance(second, nn.Linear)
        self.first = PackedLinear(first.weight, first.bias)
        self.second = PackedLinear(_gated(second.weight, gate2), _gated(second.bias, gate2))

    def __call__(
        self, x: Tensor, turns: Tensor, mask: Tensor | None, chosen: Tensor | None = None
    ) -> Tensor:
        """Map x (B, L, d) to (B, L, d), or to (B, S, d) for the `chosen` (B, S) of each row alone.

        `turns` (L, 1, D/2) are the rotary positions.
        """
        qkv = self.qkv(_normed(x, *self.norm1)).view(*x.shape[:2], 3, self.heads, -1)
        qk = qkv[:, :, :2].float()
        pairs = torch.view_as_complex(qk.view(*qk.shape[:-1], -1, 2))
        turned = torch.view_as_real(pairs * turns[:, None]).flatten(-2)
        q, k = turned.to(qkv.dtype).unbind(2)
        if chosen is not None:
            row = torch.arange(len(x))[:, None]
            q, x = q[row, chosen], x[row, chosen]
        x = self.out.added(_attend(q, k, qkv[:, :, 2], mask), x)
        return self.second.added(self.first.gelu(_normed(x, *self.norm2)), x)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attention, (B, L, H, D) of each -> (B, L, H·D); q is scaled already."""
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    weights = q[..., 0].numel() * k.shape[2]
    if q.dtype == torch.bfloat16 and mask is None and weights <= SMALL:
        out = torch.softmax(q @ k.transpose(2, 3), -1) @ v
    else:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0)
    return out.transpose(1, 2).flatten(2)


def _normed(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, NORM_EPS)


def _gated(weight: Tensor, gate: Tensor) -> Tensor:
    """Rows of a matrix, or numbers of a vector, times the gate of each."""
    gate = gate.view(-1, *(1,) * (weight.ndim - 1))
    return (weight.float() * gate).to(weight.dtype)


# Matrix products by oneDNN, which is inside PyTorch on most CPUs: weights in tiles, and a bias, a
# GELU or a residual added while a tile is in a register.

PACK_ROWS = 256
"""Rows of x that the layout is chosen for; any number works."""
OPERATORS = ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported")
"""Operators of PyTorch's private namespace for oneDNN, any of which a version may lack."""


def packs(dtype: torch.dtype) -> bool:
    """True where oneDNN multiplies by weights of a type on this machine, and does it well."""
    mkldnn: Any = torch.backends.mkldnn  # oneDNN's name of old
    if not mkldnn.is_available() or not mkldnn.enabled:
        return False
    if platform.machine().lower() not in ("x86_64", "amd64"):  # elsewhere it may be slow
        return False
    if not all(hasattr(torch.ops.mkldnn, name) for name in OPERATORS):
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


class PackedLinear:
    """x ↦ x Wᵀ + b of a fixed W (out, in) and b (out,), in their type; packed for oneDNN."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight.detach(), None if bias is None else bias.detach()
        self.dtype, self.fused = weight.dtype, packs(weight.dtype)
        if self.fused:
            pack = torch.ops.mkldnn._reorder_linear_weight
            self.weight = pack(self.weight.contiguous(), PACK_ROWS)

    def __call__(self, x: Tensor) -> Tensor:
        """Map x (..., in) to (..., out)."""
        if not self.fused:
            return F.linear(x.to(self.dtype), self.weight, self.bias)
        return self._run(x, "none", "")

    def gelu(self, x: Tensor) -> Tensor:
        """The tanh-GELU of it."""
        if not self.fused:
            return F.gelu(self(x), approximate="tanh")
        return self._run(x, "gelu", "tanh")

    def added(self, x: Tensor, to: Tensor) -> Tensor:
        """It, added to a residual stream (..., out), in the stream's type."""
        if not self.fused or to.dtype != self.dtype:
            return to + self(x)
        run = torch.ops.mkldnn._linear_pointwise.binary
        out: Tensor = run(x.to(self.dtype), to, self.weight, self.bias, "add")
        return out

    def _run(self, x: Tensor, then: str, variant: str) -> Tensor:
        run = torch.ops.mkldnn._linear_pointwise
        out: Tensor = run(x.to(self.dtype), self.weight, self.bias, then, [], variant)
        return out
