"""Settings of DiMO, a section of a recipe for `didi distill`."""

import math
from dataclasses import dataclass
from typing import Literal

from didi_instruct.errors import UserError

RANDOM, NOISE = 0.4, 0.1
"""The published start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DimoConfig:
    """DiMO, adapted to text: a generator of few steps from a start that is partly random."""

    random: float = RANDOM
    """Share of the start's masks that are random tokens instead."""
    noise: float = NOISE
    """Share of Gaussian noise in the embeddings of the start, by standard deviation."""
    budgets: tuple[int, ...] = (1,)
    """Step counts that the student learns."""
    beta: float = 0.0
    """Weight of the reverse KL in the token gradient, 1 - beta that of the forward KL: 0 is the
    difference of both predictions, 1 seeks modes, below 0 spreads."""
    remask: Literal["arccos", "uniform"] = "arccos"
    """Law of the share of a text that is hidden again: `arccos` hides much (the published one)."""
    aux_lr: float = 1e-5
    aux_steps: int = 1
    """Updates of the auxiliary denoiser per iteration, each on fresh text."""
    warmup: int = 0
    """Iterations in which the auxiliary denoiser alone learns."""

    def __post_init__(self) -> None:
        """Refuse settings that cannot train."""
        if not self.budgets or min(self.budgets) < 1:
            raise UserError(f"dimo.budgets is {list(self.budgets)}: step counts, 1 or more.")
        for name in ("random", "noise"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"dimo.{name} is {getattr(self, name)}: use 0 or more, below 1.")
        if not math.isfinite(self.beta):
            raise UserError(f"dimo.beta is {self.beta}: use a finite number.")
        if not 0 < self.aux_lr < math.inf:
            raise UserError(f"dimo.aux_lr is {self.aux_lr}: use a finite number above 0.")
        for name, least in (("aux_steps", 1), ("warmup", 0)):
            if getattr(self, name) < least:
                raise UserError(f"dimo.{name} is {getattr(self, name)}: use {least} or more.")
