"""Denoiser of a DiT on a CPU: the same function of the same weights, laid out anew.

Without time conditioning all that modulates a layer is constant, so gates go into the matrices
before them. Halves of q and k that turn together are put side by side, so that rotary positions
are one product of complex numbers. Weights are packed. The last block needs keys and values of all
positions, the rest of it those alone whose logits are asked for.

Float32 results differ from the network's by rounding. A network in bfloat16 multiplies in
bfloat16 here too; its residual stream stays float32, as in the network.
"""

import math
import platform
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from didi_instruct.models.dit import DiT
from didi_instruct.models.layers import NEVER, NORM_EPS, Block
from didi_instruct.sampling.denoiser import LogitsDenoiser
from didi_instruct.sampling.state import Reads

ROUND = 16
"""Selected positions are rounded up to a multiple: oneDNN makes a kernel for every number."""
SMALL = 2**20
"""Attention weights that are held all at once in bfloat16, where the kernel that avoids it is
slower."""


def fits(network: DiT) -> bool:
    """True for networks that can be laid out so."""
    if network.training or network.config.time_conditioning:
        return False
    weight = network.vocab_embed.embedding
    return weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.bfloat16)


def packed_denoiser(network: DiT) -> LogitsDenoiser:
    """Denoiser of a network that `fits`, with a copy of its weights."""
    packed = PackedDiT(network)

    def logits(reads: Reads, t: Tensor | float, at: Tensor) -> Tensor:
        where = torch.zeros(reads.tokens.shape, dtype=torch.bool)
        where.view(-1)[at] = True
        found = packed.logits(reads.tokens, where, reads.attended)
        if bool((at[1:] > at[:-1]).all()):
            return found
        return found[(where.flatten().cumsum(0) - 1)[at]]

    return LogitsDenoiser(logits, network.config.num_tokens)


class PackedDiT:
    """A DiT for inference on a CPU, with a copy of its weights."""

    def __init__(self, network: DiT) -> None:
        """Lay out the weights of a network that `fits`."""
        assert fits(network), "a DiT in evaluation mode, on the CPU, without time conditioning"
        self.config = network.config
        mods = network.constants()
        assert mods is not None
        assert mods.layers is not None
        *folded, last = mods.layers
        with torch.no_grad():
            self._embedding = network.vocab_embed.embedding.detach()
            learned = network.position_embed
            self._positions = None if learned is None else learned.embedding.detach().float()
            rotary = network.rotary_emb
            self._turns = torch.complex(rotary.cos, rotary.sin)[:, None]
            pairs = zip(network.blocks, folded, strict=True)
            blocks = [_Block(b, own) for b, own in pairs if isinstance(b, Block)]
            *self._blocks, self._last = blocks
            self._norm = last.unbind()
            linear, num = network.output_layer.linear, self.config.num_tokens
            bias = linear.bias.clone()
            if self.config.end_id is not None:
                bias[self.config.end_id] = NEVER
            self._head = PackedLinear(linear.weight[:num], bias[:num])

    @torch.no_grad()
    def logits(self, tokens: Tensor, where: Tensor, attended: Tensor | None = None) -> Tensor:
        """Logits (R, V) of the positions that `where` (B, L) selects, in order."""
        mask = None if attended is None else attended[:, None, None, :]
        x = self._run(tokens, mask)
        # Selected positions first, in order, then others: rows are as wide as the widest needs.
        counts = where.sum(1)
        width = min(math.ceil(max(1, int(counts.max())) / ROUND) * ROUND, tokens.shape[1])
        chosen = (~where).to(torch.uint8).argsort(dim=1, stable=True)[:, :width]
        x = self._last.selected(x, self._turns, mask, chosen)
        x = x[torch.arange(width) < counts[:, None]]
        return self._head(_normed(x, *self._norm))

    def _run(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        x = F.embedding(tokens, self._embedding).float()
        if self._positions is not None:
            x = x + self._positions[: tokens.shape[1]]
        turns = self._turns[: tokens.shape[1]]
        for block in self._blocks:
            x = block(x, turns, mask)
        return x


class _Block:
    """A block whose modulation is constant."""

    def __init__(self, block: Block, folded: Tensor) -> None:
        weight1, bias1, gate1, weight2, bias2, gate2 = folded.unbind()
        self.norm1, self.norm2, self.heads = (weight1, bias1), (weight2, bias2), block.heads
        weight = block.attn_qkv.weight
        width = weight.shape[1] // block.heads
        q, k, v = weight.view(3, block.heads, width, -1).unbind()
        beside = torch.arange(width).view(2, -1).t().flatten()
        parts = q[:, beside] / math.sqrt(width), k[:, beside], v
        self.qkv = PackedLinear(torch.stack(parts).flatten(0, 2))
        self.out = PackedLinear(_gated(block.attn_out.weight, gate1))
        first, second = block.mlp[0], block.mlp[2]
        assert isinstance(first, nn.Linear)
        assert isinstance(second, nn.Linear)
        self.first = PackedLinear(first.weight, first.bias)
        self.second = PackedLinear(_gated(second.weight, gate2), _gated(second.bias, gate2))

    def __call__(self, x: Tensor, turns: Tensor, mask: Tensor | None) -> Tensor:
        """Map x (B, L, d) to (B, L, d); `turns` (L, 1, D/2) are the rotary positions."""
        q, k, v = self._qkv(x, turns)
        return self._mix(x, _attend(q, k, v, mask))

    def selected(self, x: Tensor, turns: Tensor, mask: Tensor | None, chosen: Tensor) -> Tensor:
        """The same for the `chosen` (B, S) positions of each row alone: (B, S, d)."""
        q, k, v = self._qkv(x, turns[: x.shape[1]])
        row = torch.arange(len(x))[:, None]
        attended = _attend(q[row, chosen], k, v, mask)
        return self._mix(x[row, chosen], attended)

    def _qkv(self, x: Tensor, turns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, (B, L, H, D) each, the first two turned."""
        qkv = self.qkv(_normed(x, *self.norm1)).view(*x.shape[:2], 3, self.heads, -1)
        qk = qkv[:, :, :2].float()
        pairs = torch.view_as_complex(qk.view(*qk.shape[:-1], -1, 2))
        turned = torch.view_as_real(pairs * turns[:, None]).flatten(-2)
        q, k = turned.to(qkv.dtype).unbind(2)
        return q, k, qkv[:, :, 2]

    def _mix(self, x: Tensor, attended: Tensor) -> Tensor:
        """Add what was attended to x (B, L, d), then the MLP."""
        x = self.out.added(attended, x)
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


# Packed matrix products: oneDNN, which is inside PyTorch on most CPUs, wants weights in tiles, and
# adds a bias, a GELU or a residual while a tile is in a register. Where it is missing, all in plain
# steps.

PACK_ROWS = 256
"""Of x, to choose the layout for; any number works."""

X86 = ("x86_64", "amd64")
"""Elsewhere oneDNN may fall back on loops that are there for reference, and slow."""

OPERATORS = ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported")
"""What is used of PyTorch's namespace for oneDNN, which makes no promises."""


def packs(dtype: torch.dtype) -> bool:
    """True where oneDNN multiplies by weights of a type on this machine, and does it well."""
    mkldnn: Any = torch.backends.mkldnn  # oneDNN's name of old
    if not mkldnn.is_available() or not mkldnn.enabled:
        return False
    if platform.machine().lower() not in X86:
        return False
    if not all(hasattr(torch.ops.mkldnn, name) for name in OPERATORS):
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


class PackedLinear:
    """x ↦ x Wᵀ + b of a fixed W (out, in) and b (out,), in their type."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Copy the weights into the layout that suits; without oneDNN they stay as they lie."""
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
