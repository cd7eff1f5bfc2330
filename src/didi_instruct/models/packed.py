"""Matrix products as a CPU does them fastest: weights packed once, what follows in the same kernel.

PyTorch's own path multiplies by weights as they lie in the file, then reads and writes the result
again for a bias, a GELU, a residual. oneDNN, which is inside PyTorch on most CPUs, wants weights in
tiles, and does the rest while a tile is in a register. Where it is missing, all in plain steps.
"""

import platform
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 256
"""Of x, to choose the layout for; any number works."""

X86 = ("x86_64", "amd64")
"""Elsewhere oneDNN may fall back on loops that are there for reference, and slow."""

OPERATORS = ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported")
"""What is used of PyTorch's namespace for oneDNN, which makes no promises."""


def packs(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies by weights of a type on this machine, and does it well."""
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
            self.weight = pack(self.weight.contiguous(), ROWS)

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
