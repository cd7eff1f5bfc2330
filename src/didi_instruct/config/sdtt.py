"""Settings of SDTT, a section of a recipe for `didi distill`."""

from dataclasses import dataclass
from typing import Literal

from didi_instruct.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class SdttConfig:
    """Self-distillation through time: rounds in which one step learns to be worth two."""

    steps: int = 1024
    """Steps of the teacher in the first round; half as many in each that follows."""
    iterations: int = 10_000
    """Of a round, after which the student is the teacher; `train.steps` are whole rounds."""
    divergence: Literal["backward", "forward", "mse", "tv"] = "backward"
    """KL(student ‖ target), KL(target ‖ student), the mean squared difference of log-probabilities,
    or the total variation."""
    grid: Literal["even", "published"] = "even"
    """Times of the teacher's two steps: t and t - dt, or those of the published code, where a slip
    makes the first step reveal less."""

    def __post_init__(self) -> None:
        """Refuse rounds that cannot be."""
        for name, least in (("steps", 2), ("iterations", 1)):
            if getattr(self, name) < least:
                raise UserError(f"sdtt.{name} is {getattr(self, name)}: use {least} or more.")

    def check_rounds(self, total: int) -> None:
        """Refuse a number of iterations that is not one of whole rounds, or of too many."""
        rounds, rest = divmod(total, self.iterations)
        if rest:
            raise UserError(
                f"train.steps is {total}, which is not a whole number of rounds of "
                f"sdtt.iterations, {self.iterations}."
            )
        if 2**rounds > self.steps:
            raise UserError(
                f"sdtt.steps is {self.steps}, which {rounds} rounds cannot all halve: use "
                f"{self.steps.bit_length() - 1} rounds at most (train.steps / sdtt.iterations)."
            )
