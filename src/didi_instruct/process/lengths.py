"""Texts that have a window of their own: where they end, and how long they are.

A window holds the tokens of a text, the token that ends it, and more of that up to its length. The
length is the first thing drawn, n ~ p(n), and the text is then written given it:

    p(x) = p(n) p(x^1 .. x^n | n)

so nothing is ever written after an end, and the probability of a text is exact.
"""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor


def before_end(tokens: Tensor, end_id: int) -> Tensor:
    """Positions before the first end of each text, all where there is none: (B, L) -> (B, L)."""
    return (tokens == end_id).cumsum(1) == 0


def goes_on(tokens: Tensor, end_id: int) -> bool:
    """Whether something other than ends follows an end: such rows are not of one text each."""
    return bool((~before_end(tokens, end_id) & (tokens != end_id)).any())


def window(length: int, mask_id: int, end_id: int, count: Tensor) -> Tensor:
    """Windows with masks for texts of `count` (B,) tokens, and ends behind: (B, L)."""
    positions = torch.arange(length, device=count.device)
    return torch.where(positions < count[:, None], mask_id, end_id)


class LengthLaw:
    """How long texts are, from how many had each length."""

    def __init__(self, counts: Sequence[int]) -> None:
        """Take the number of texts of 0, 1, 2, ... tokens; none is empty.

        One text is added at every length, so that none is impossible.
        """
        weights = torch.tensor(counts, dtype=torch.float64) + 1
        weights[0] = 0
        self._p = weights / weights.sum()

    @cached_property
    def mean(self) -> float:
        """Tokens of a text, on average."""
        return float((self._p * torch.arange(len(self._p))).sum())

    def log_prob(self, count: Tensor, shortest: int = 1) -> Tensor:
        """Log-probability of lengths (B,), given that none is below `shortest`: float64."""
        allowed = self._from(shortest)
        return (allowed / allowed.sum()).log().to(count.device)[count]

    def draw(self, uniforms: Tensor, shortest: int = 1) -> Tensor:
        """Draw lengths, none below `shortest`: uniforms (B,) in [0, 1) -> (B,)."""
        total = self._from(shortest).cumsum(0).to(uniforms.device)
        return torch.searchsorted(total, uniforms * total[-1], right=True).clamp(max=len(total) - 1)

    def _from(self, shortest: int) -> Tensor:
        if not 1 <= shortest < len(self._p):
            raise ValueError(f"shortest is {shortest}: use 1 to {len(self._p) - 1}")
        return torch.where(torch.arange(len(self._p)) >= shortest, self._p, 0.0)
