"""Rounds of a distillation, in each of which a step is worth two of the round before."""

from dataclasses import dataclass

from didi_instruct.errors import UserError


@dataclass(frozen=True, slots=True)
class Rounds:
    """Iterations shared among rounds, evenly: none has more than one iteration above another."""

    count: int
    iterations: int
    """Of all rounds."""

    def of(self, step: int) -> int:
        """Which round an iteration belongs to, from 0."""
        return step * self.count // self.iterations

    def begins(self, step: int) -> bool:
        """Whether an iteration is the first of a round that follows another."""
        return step > 0 and self.of(step) != self.of(step - 1)


def share(section: str, total: int, iterations: int | None, usual: int, most: int) -> Rounds:
    """Whole rounds of so many iterations; where nobody says how many, the `usual` rounds.

    Those are fewer where there are fewer iterations, or where no more than `most` are possible.
    """
    if iterations is None:
        return Rounds(min(usual, most, total), total)
    rounds, rest = divmod(total, iterations)
    if rest:
        raise UserError(
            f"train.steps is {total}, which is not a whole number of rounds of "
            f"{section}.iterations, {iterations}: change one of the two, or use "
            f"{section}.iterations=null, which shares the steps evenly."
        )
    return Rounds(rounds, total)
