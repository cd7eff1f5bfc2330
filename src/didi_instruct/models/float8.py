"""Products of a trunk in 8-bit floats (e4m3), which recent GPUs multiply twice as fast.

Each row of the weights and each row of what comes in has a scale of its own; sums are in 32 bits.
It rounds a number to 3 bits after the first, so a model in float8 is another model: measure it.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from didi_instruct.errors import UserError
from didi_instruct.models.dit import Trunk
from didi_instruct.models.layers import Block

LARGEST = 448.0
"""Of an e4m3 number."""
MULTIPLE = 16
"""GPUs want both sides of a matrix to be multiples of it; others stay as they are."""
CAPABILITY = (8, 9)
"""CUDA's number of the first GPUs that can: Ada, then Hopper."""


class Float8Linear(nn.Module):
    """A linear layer for inference; what comes in and out has the type of the layer it replaces."""

    weight8: Tensor
    scale: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        """Round the weights of a layer."""
        super().__init__()
        self.reads = linear.weight.dtype
        weight8, scale = rounded(linear.weight.detach())
        self.register_buffer("weight8", weight8)
        self.register_buffer("scale", scale.T)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """Map x (..., in) to (..., out)."""
        if not x.numel():
            return x.new_empty(*x.shape[:-1], len(self.weight8))
        x8, scale = rounded(x.flatten(0, -2))
        bias = None if self.bias is None else self.bias.to(torch.bfloat16)
        out = torch._scaled_mm(
            x8, self.weight8.T, scale_a=scale, scale_b=self.scale, bias=bias,
            out_dtype=torch.bfloat16, use_fast_accum=True,
        )  # fmt: skip
        return out.to(self.reads).view(*x.shape[:-1], len(self.weight8))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Float8Linear":
        """Move; a cast would spoil what is rounded already."""
        weight8, scale = self.weight8, self.scale
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.weight8, self.scale = weight8.to(self.weight8.device), scale.to(self.scale.device)
        return self


def rounded(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows (R, n) as 8-bit floats, and the scales (R, 1) to multiply them with."""
    rows = rows.float()
    scale = rows.abs().amax(-1, keepdim=True).clamp(min=1e-12) / LARGEST
    return (rows / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scale


def to_float8(network: Trunk) -> None:
    """Replace the linear layers of all blocks; there is no way back."""
    device = network.vocab_embed.embedding.device
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < CAPABILITY:
        name = torch.cuda.get_device_name(device)
        raise UserError(f"{name} does not multiply 8-bit floats: use bfloat16.")
    for block in network.blocks:
        assert isinstance(block, Block)
        for part, name in (
            (block, "attn_qkv"),
            (block, "attn_out"),
            (block.mlp, "0"),
            (block.mlp, "2"),
        ):
            layer = getattr(part, name)
            if isinstance(layer, nn.Linear) and not any(n % MULTIPLE for n in layer.weight.shape):
                setattr(part, name, Float8Linear(layer))


def is_float8(network: nn.Module) -> bool:
    """Whether any layer was replaced."""
    return any(isinstance(module, Float8Linear) for module in network.modules())
