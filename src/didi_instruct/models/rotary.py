"""Rotary positions."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from didi_instruct.models.precision import upcast

ROTARY_BASE = 10_000.0


class Rotary(nn.Module):
    """Rotary positions, base 10,000; the tables for `length` positions are cached.

    `inv_freq` (D/2,) is in the checkpoint; `cos` and `sin` (length, D/2) are not. All three stay in
    float32 when the model is cast, and are rebuilt when it leaves the meta device.
    """

    inv_freq: Tensor
    cos: Tensor
    sin: Tensor

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.width, self.length = width, length
        device = torch.empty(0).device
        self.register_buffer("inv_freq", self._frequencies().to(device))
        self.register_buffer("cos", torch.empty(0, device=device), persistent=False)
        self.register_buffer("sin", torch.empty(0, device=device), persistent=False)
        self._fill(self.inv_freq)

    def _frequencies(self) -> Tensor:
        exponents = torch.arange(0, self.width, 2, dtype=torch.float32, device="cpu") / self.width
        return 1.0 / ROTARY_BASE**exponents

    def _fill(self, inv_freq: Tensor) -> None:
        """Set the frequencies and rebuild the tables beside them."""
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

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Tensor],
        prefix: str,
        local_metadata: dict[str, object],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        value = state_dict.get(f"{prefix}inv_freq")
        if value is None or value.is_meta or value.shape != (self.width // 2,):
            return
        ours = self._frequencies()
        if not torch.allclose(value.cpu().float(), ours, rtol=1e-2, atol=0.0):
            error_msgs.append(f"{prefix}inv_freq is not that of rotary positions with base 10,000")
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

    Shapes: x (B, L, n, H, D), cos and sin (L, 1, 1, D/2), or (B, L, 1, 1, D/2) where texts differ
    -> (B, L, n, H, D).
    """
    first, second = upcast(x).chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)
