"""Noise schedules: alpha_t, the probability that a token is still clean at time t.

Every schedule falls from alpha_0 = 1 to alpha_1 = eps. Arguments are tensors of any shape, and
results have their shape, dtype and device.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from didi_instruct.config.model import ScheduleConfig

HALF_PI = math.pi / 2


@dataclass(frozen=True)
class Schedule(ABC):
    """alpha_t, its derivative and its inverse."""

    eps: float = 0.0
    """alpha_1: what is left clean at t = 1."""

    @abstractmethod
    def alpha(self, t: Tensor) -> Tensor:
        """Return alpha_t for t in [0, 1]."""

    @abstractmethod
    def alpha_prime(self, t: Tensor) -> Tensor:
        """Return d alpha_t / dt, which is never positive."""

    @abstractmethod
    def time(self, alpha: Tensor) -> Tensor:
        """Return the t at which alpha_t = alpha; outside [eps, 1], the nearer end."""

    @abstractmethod
    def nelbo_weight(self, t: Tensor) -> Tensor:
        """Return -alpha'_t / (1 - alpha_t), the weight of Eq. (3); infinite at t = 0."""

    def sigma(self, t: Tensor) -> Tensor:
        """Return -log alpha_t, what the time embedder reads; infinite at t = 1 if eps is 0."""
        return -self.alpha(t).log()

    def _masked_share(self, alpha: Tensor) -> Tensor:
        """Return (1 - alpha) / (1 - eps), which runs from 0 to 1 as t does."""
        # Rounding may put alpha_1 just below eps, where an arcsine would be NaN.
        return ((1 - alpha) / (1 - self.eps)).clamp(0, 1)


class LogLinear(Schedule):
    """alpha_t = 1 - (1 - eps) t; the reference checkpoints have eps = 1e-3."""

    def alpha(self, t: Tensor) -> Tensor:
        return (1 - t) + self.eps * t  # in this order alpha_1 is eps to the last bit

    def alpha_prime(self, t: Tensor) -> Tensor:
        return t.new_full(t.shape, -(1 - self.eps))

    def time(self, alpha: Tensor) -> Tensor:
        return self._masked_share(alpha)

    def nelbo_weight(self, t: Tensor) -> Tensor:
        return 1 / t


class Cosine(Schedule):
    """1 - alpha_t = (1 - eps) sin(pi t / 2): the cosine schedule of MaskGIT and MD4."""

    def alpha(self, t: Tensor) -> Tensor:
        # 1 - sin(pi t / 2) as a square: the difference would lose a small alpha to rounding.
        clean = 2 * (HALF_PI / 2 * (1 - t)).sin().square()
        return clean + self.eps * (1 - clean)

    def alpha_prime(self, t: Tensor) -> Tensor:
        return -(1 - self.eps) * HALF_PI * _cos_half_pi(t)

    def time(self, alpha: Tensor) -> Tensor:
        return self._masked_share(alpha).asin() / HALF_PI

    def nelbo_weight(self, t: Tensor) -> Tensor:
        return HALF_PI * _cos_half_pi(t) / (HALF_PI * t).sin()


def make_schedule(config: ScheduleConfig) -> Schedule:
    """Return the schedule a configuration names."""
    return {"log-linear": LogLinear, "cosine": Cosine}[config.name](config.eps)


def _cos_half_pi(t: Tensor) -> Tensor:
    """Return cos(pi t / 2), exactly 0 at t = 1, where that of a rounded pi / 2 is negative."""
    return (HALF_PI * (1 - t)).sin()
