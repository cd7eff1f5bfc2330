"""Which positions a step reveals: decided before any token is drawn, never by one."""

from functools import cached_property

import torch
from torch import Tensor

from didi_instruct.config.model import Order
from didi_instruct.errors import UserError
from didi_instruct.process.masking import interleaved_times, interleaved_turns, reveal_probability
from didi_instruct.process.schedule import Schedule
from didi_instruct.sampling.chain import Chain, Purpose
from didi_instruct.sampling.grids import Grid, time_grid


class Reveals:
    """The steps of a chain: their times, and what each of them reveals."""

    def __init__(self, chain: Chain, schedule: Schedule, grid: Grid | None, order: Order) -> None:
        """Plan the steps."""
        self.chain, self.schedule = chain, schedule
        self.turns: Tensor | None = None
        """(B, L) the step that reveals each position, where chance has no say in it."""
        if order == "streams":
            if grid is not None:
                raise UserError("order=streams has steps of its own: leave out grid.")
            self.turns = interleaved_turns(chain.open, chain.steps)
            self.times = interleaved_times(schedule, chain.steps)
        elif order == "random":
            self.times = time_grid("uniform" if grid is None else grid, chain.steps)
        else:
            raise UserError(f"order is `{order}`: use random or streams.")

    @cached_property
    def chances(self) -> list[float]:
        """Probability that a mask is revealed by each step."""
        return reveal_chances(self.schedule, self.times)

    def __call__(self, step: int, *stream: int) -> Tensor:
        """(B, L) masks that a step reveals; `stream` tells throws of the same step apart."""
        if self.turns is not None:
            return self.chain.masked & (self.turns == step)
        coins = self.chain.uniforms(Purpose.REVEAL, step, *stream)
        return self.chain.masked & (coins < self.chances[step])


def reveal_chances(schedule: Schedule, times: list[float]) -> list[float]:
    """Probability that a mask is revealed by each step of a grid; 1 for the last."""
    alphas = schedule.alpha(torch.tensor(times, dtype=torch.float64))
    chances: list[float] = reveal_probability(alphas[1:], alphas[:-1]).tolist()
    return [*chances[:-1], 1.0]
