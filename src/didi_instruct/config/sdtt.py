"""Settings of SDTT, a section of a recipe for `didi distill`."""

from dataclasses import dataclass
from typing import Literal

from didi_instruct.config.rounds import Rounds, share
from didi_instruct.errors import UserError

ROUNDS = 7
"""The published number: from 1,024 steps to 8."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SdttConfig:
    """Self-distillation through time: rounds in which one step learns to be worth two."""

    steps: int = 1024
    """Steps of the teacher in the first round; half as many in each that follows."""
    iterations: int | None = None
    """Of a round, after which the student is the teacher; `train.steps` are whole rounds. None:
    `train.steps` are shared evenly among the published 7 rounds."""
    divergence: Literal["backward", "forward", "mse", "tv"] = "backward"
    """KL(student ‖ target), KL(target ‖ student), the mean squared difference of log-probabilities,
    or the total variation."""
    grid: Literal["even", "published"] = "even"
    """Times of the teacher's two steps: t and t - dt, as the paper describes them, or those of the
    released code, where a slip makes the first step reveal less."""

    def __post_init__(self) -> None:
        """Refuse rounds that cannot be."""
        for name, least in (("steps", 2), ("iterations", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UserError(f"sdtt.{name} is {value}: use {least} or more.")

    def rounds(self, total: int) -> Rounds:
        """The rounds of so many iterations; refuses what is not whole rounds, or too many."""
        most = self.steps.bit_length() - 1
        rounds = share("sdtt", total, self.iterations, ROUNDS, most)
        if rounds.count > most:
            raise UserError(
                f"sdtt.steps is {self.steps}, which {rounds.count} rounds cannot all halve: use "
                f"{most} rounds at most (train.steps / sdtt.iterations)."
            )
        return rounds
