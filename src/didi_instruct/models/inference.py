"""The denoiser as a CPU writes with it: the same function of the same weights, laid out anew.

Without time conditioning all that modulates a layer is constant, so gates go into the matrices
before them. Halves of q and k that turn together are put side by side, so that rotary positions
are one product of complex numbers. Weights are packed (`models/packed.py`). The last block needs
keys and values of all positions, the rest of it those alone whose logits are asked for. And the
state of a text that has not begun depends on nothing but its length: it is kept.

Float32 results differ from the network's by rounding. A network in bfloat16 multiplies in
bfloat16 here too; its residual stream stays float32, as in the network.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from didi_instruct.models.dit import DiT
from didi_instruct.models.float8 import is_float8
from didi_instruct.models.layers import NEVER, NORM_EPS, Block, versions
from didi_instruct.models.packed import PackedLinear

KEPT_BYTES = 2**26
"""Memory for states of texts not begun, one for each length: enough for all those of stories."""

ROUND = 16
"""Selected positions are rounded up to a multiple: oneDNN makes a kernel for every number."""

SMALL = 2**20
"""Attention weights that are held all at once in bfloat16, where the kernel that avoids it is
slower."""


def suits(network: nn.Module) -> bool:
    """Whether a network can be laid out so."""
    if not isinstance(network, DiT) or network.training or network.config.time_conditioning:
        return False
    weight = network.vocab_embed.embedding
    known = weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.bfloat16)
    return known and not is_float8(network)  # which looks at every layer


class InferenceDiT:
    """A `DiT` for inference on a CPU. The weights are copied; `is_current` tells when in vain."""

    def __init__(self, network: DiT) -> None:
        """Lay out the weights of a network that `suits`."""
        assert suits(network), "a DiT in evaluation mode, on the CPU, without time conditioning"
        self.config = network.config
        self._made_of = [p.detach() for p in network.parameters()]
        self._versions = versions(self._made_of)
        self._kept: dict[bytes, Tensor] = {}
        with torch.no_grad():
            c = network.condition()
            self._embedding = network.vocab_embed.embedding.detach()
            learned = network.position_embed
            self._positions = None if learned is None else learned.embedding.detach().float()
            rotary = network.rotary_emb
            self._turns = torch.complex(rotary.cos, rotary.sin)[:, None]
            *blocks, last = (_Block(b, c) for b in network.blocks if isinstance(b, Block))
            self._blocks, self._last = blocks, last
            self._norm = network.output_layer.affine(c, ndim=2)
            linear, num = network.output_layer.linear, self.config.num_tokens
            bias = linear.bias.clone()
            if self.config.end_id is not None:
                bias[self.config.end_id] = NEVER
            self._head = PackedLinear(linear.weight[:num], bias[:num])

    def is_current(self, network: nn.Module) -> bool:
        """Whether a network still has the weights that were laid out, as far as torch can tell."""
        weights = list(network.parameters())
        return (
            suits(network)
            and [w.data_ptr() for w in weights] == [w.data_ptr() for w in self._made_of]
            and versions(weights) == self._versions
        )

    def forget(self) -> None:
        """Drop the states that are kept."""
        self._kept.clear()

    @torch.no_grad()
    def __call__(self, tokens: Tensor, attended: Tensor | None = None) -> Tensor:
        """Logits (B, L, V) over the real tokens; `attended` (B, L), None: all."""
        logits = self.rows(tokens, torch.ones_like(tokens, dtype=torch.bool), attended)
        return logits.view(*tokens.shape, -1)

    @torch.no_grad()
    def rows(self, tokens: Tensor, where: Tensor, attended: Tensor | None = None) -> Tensor:
        """Logits (R, V) of the positions that `where` (B, L) selects, in order."""
        mask = None if attended is None else attended[:, None, None, :]
        x = self._before_last(tokens, mask)
        # Selected positions first, in order, then others: rows are as wide as the widest needs.
        counts = where.sum(1)
        width = min(math.ceil(max(1, int(counts.max())) / ROUND) * ROUND, tokens.shape[1])
        chosen = (~where).to(torch.uint8).argsort(dim=1, stable=True)[:, :width]
        x = self._last.selected(x, self._turns, mask, chosen)
        x = x[torch.arange(width) < counts[:, None]]
        return self._head(_normed(x, *self._norm))

    def _before_last(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        """State (B, L, d) that the last block gets, from memory if nothing is written yet."""
        if len(tokens) > 1 or mask is not None or not self._is_blank(tokens):
            return self._run(tokens, mask)
        key = tokens.numpy().tobytes()
        x = self._kept.pop(key, None)
        x = self._run(tokens, mask) if x is None else x
        if (len(self._kept) + 1) * x.nbytes > KEPT_BYTES and self._kept:
            self._kept.pop(next(iter(self._kept)), None)
        self._kept[key] = x  # the last to go
        return x

    def _run(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        x = F.embedding(tokens, self._embedding).float()
        if self._positions is not None:
            x = x + self._positions[: tokens.shape[1]]
        turns = self._turns[: tokens.shape[1]]
        for block in self._blocks:
            x = block(x, turns, mask)
        return x

    def _is_blank(self, tokens: Tensor) -> bool:
        """Whether a text is masks alone, and ends behind them."""
        if self.config.mask_id is None:
            return False
        blank = tokens >= self.config.mask_id
        if self.config.end_id is not None:
            blank |= tokens == self.config.end_id
        return bool(blank.all())


class _Block:
    """A block whose modulation is constant."""

    def __init__(self, block: Block, c: Tensor) -> None:
        weight1, bias1, gate1, weight2, bias2, gate2 = block.affine(c, ndim=2)
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
