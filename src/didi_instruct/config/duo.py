"""Settings of discrete consistency distillation (DUO)."""

from dataclasses import dataclass
from typing import Literal

from didi_instruct.config.rounds import Rounds, share
from didi_instruct.errors import UserError

ROUNDS = 5
"""The published number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DuoConfig:
    """Rounds in which a uniform-state student learns to say at t what is said at t - Δ."""

    steps: int = 512
    """Δ of the first round is one over this; it doubles in each that follows."""
    iterations: int | None = None
    """Of a round, after which the student is its own target; `train.steps` are whole rounds. None:
    `train.steps` are shared evenly among the published 5 rounds."""
    target: Literal["average", "student"] = "average"
    """What the next round's target is: the average of the student's weights, or those themselves.
    Without `train.ema` there is no average, and it is the student."""
    kl: Literal["forward", "backward", "jeffreys"] = "backward"
    """KL(target ‖ student), KL(student ‖ target), or their mean."""
    clock: Literal["schedule", "gaussian"] = "schedule"
    """What Δ is a difference of: the schedule's time, in which samplers take even steps, or the
    log noise-to-signal ratio of the Gaussian latent between the bounds `gamma` (the published one).
    """
    gamma: tuple[float, float] = (-4.0, -1.0)
    """Of the clock `gaussian`: the ratio at times 0 and 1. The bounds that leave nothing out depend
    on the vocabulary; these are for some 50,000 tokens."""

    def __post_init__(self) -> None:
        """Refuse rounds that cannot be."""
        for name, least in (("steps", 2), ("iterations", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UserError(f"duo.{name} is {value}: use {least} or more.")
        if len(self.gamma) != 2 or not -30 <= self.gamma[0] < self.gamma[1] <= 30:
            raise UserError(
                f"duo.gamma is {list(self.gamma)}: two numbers from -30 to 30, the smaller first."
            )

    def rounds(self, total: int) -> Rounds:
        """The rounds of so many iterations; refuses what is not whole rounds, or too many."""
        most = self.steps.bit_length()
        rounds = share("duo", total, self.iterations, ROUNDS, most)
        if rounds.count > most:
            raise UserError(
                f"duo.steps is {self.steps}, so in the last of {rounds.count} rounds Δ would be "
                f"above 1: use {most} rounds at most (train.steps / duo.iterations)."
            )
        return rounds

    def delta(self, number: int) -> float:
        """Δ of a round, counted from 0."""
        return float(2**number / self.steps)
