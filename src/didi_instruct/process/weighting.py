"""Times of distillation: the law π that draws them, the weight ω that they get.

π is Beta(a, b) with whole a and b: the a-th smallest of a + b - 1 uniform numbers, so that a draw
is a pure function of uniforms.
"""

import math

from torch import Tensor

from didi_instruct.process.schedule import Schedule

MARGIN = 2.0**-24
"""How close a drawn time comes to 0 and 1: neither t nor 1 - t rounds away in float32."""


def beta_times(a: int, b: int, uniforms: Tensor) -> Tensor:
    """Draw times from Beta(a, b): uniforms (n, a + b - 1) or more columns -> (n,)."""
    smallest = uniforms[:, : a + b - 1].sort(1).values
    return smallest[:, a - 1].clamp(MARGIN, 1 - MARGIN)


def beta_density(a: int, b: int, t: Tensor) -> Tensor:
    """Density of Beta(a, b) at t in (0, 1)."""
    constant = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b))
    return constant * t ** (a - 1) * (1 - t) ** (b - 1)


def omega(schedule: Schedule, t: Tensor, kind: str, min_time: float) -> Tensor:
    """Weight of time t in the integral KL: 1, or -alpha'_t / (1 - alpha_t) held at min_time below.

    The paper's table prints alpha_t for alpha'_t by mistake: that would not be positive.
    """
    if kind == "constant":
        return t.new_ones(t.shape)
    return schedule.nelbo_weight(t.clamp(min=min_time))
