"""Plans of reverse processes: the steps of a sampling, known before any forward pass.

Which positions a step reveals does not depend on tokens, so it is settled for all steps first, with
the numbers that their tokens are drawn by. Then every size is known to the host, which queues step
after step and never waits for a GPU.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from didi_instruct.config.model import Order
from didi_instruct.errors import UserError
from didi_instruct.process.masking import interleaved_times, interleaved_turns, reveal_probability
from didi_instruct.process.schedule import Schedule
from didi_instruct.sampling.draw import Noise, Purpose
from didi_instruct.sampling.state import PAD, State
from didi_instruct.transfer import sent

Grid = str | Sequence[float]
"""`uniform`, `cosine`, or N + 1 falling times from 1 to 0."""


@dataclass(frozen=True, slots=True)
class Step:
    """One reverse step: what it reads, what it writes, and the noise it draws by."""

    index: int
    """Number of the step, from 0."""
    time: float
    """Where it starts, 1 to 0, as a callback is told."""
    t: Tensor | float
    """Time of the states that are read: one for all, or (U,)."""
    states: Tensor | None
    """(U,) rows of z to read; None: all."""
    reads: Tensor
    """(R,) flat positions in (U, L) whose laws are needed."""
    writes: Tensor
    """(N,) flat positions in (B, L) that are written."""
    u: Tensor
    """(N,) float64 numbers in [0, 1) that their tokens are drawn by."""
    row: Tensor | None = None
    """(N,) which of the reads each token is drawn from; None: the same one."""
    erases: Tensor | None = None
    """Flat positions in (B, L) that are masked again after the writing."""
    codes: Tensor | None = None
    """(B,) which mask each text has, where a model has several."""
    greedy: bool = False
    """Take the most probable tokens."""


def time_grid(grid: Grid, steps: int) -> list[float]:
    """N + 1 times from 1 to 0.

    `cosine` takes short steps first, while little is known, and long ones at the end:
    t_n = cos(pi/2 * n / N).
    """
    check_steps(steps)
    if not isinstance(grid, str):
        times = [float(t) for t in grid]
        falling = all(a > b for a, b in itertools.pairwise(times))
        if len(times) != steps + 1 or (times[0], times[-1]) != (1.0, 0.0) or not falling:
            raise UserError(
                f"A time grid of {steps} steps is {steps + 1} times falling from 1 to 0."
            )
        return times
    if grid == "uniform":
        return [1 - n / steps for n in range(steps)] + [0.0]
    if grid == "cosine":
        return [math.cos(math.pi / 2 * n / steps) for n in range(steps)] + [0.0]
    raise UserError(f"`{grid}` is not a time grid. Known: uniform, cosine, or a list of times.")


def check_steps(steps: int) -> None:
    """Refuse a sampling without steps."""
    if steps < 1:
        raise UserError(f"steps is {steps}: use 1 or more.")


def reveal_chances(schedule: Schedule, times: Sequence[float]) -> list[float]:
    """Probability that a mask is revealed by each step of a grid; 1 for the last."""
    alphas = schedule.alpha(torch.tensor(times, dtype=torch.float64))
    chances: list[float] = reveal_probability(alphas[1:], alphas[:-1]).tolist()
    return [*chances[:-1], 1.0]


@dataclass(frozen=True, slots=True)
class Reveals:
    """Times of a sampling's steps, and which positions each of them reveals."""

    times: list[float]
    """steps + 1 of them, from 1 to 0."""
    chances: list[float]
    """Probability that a mask is revealed by each step, in random order."""
    turns: Tensor | None
    """(B, L) the step that reveals each position, where chance has no say in it."""

    @classmethod
    def of(
        cls, schedule: Schedule, open: Tensor, steps: int, grid: Grid | None, order: Order
    ) -> "Reveals":
        """Reveal the `open` positions (B, L) in some order."""
        check_steps(steps)
        if order == "streams":
            if grid is not None:
                raise UserError("order=streams has steps of its own: leave out grid.")
            times, turns = interleaved_times(schedule, steps), interleaved_turns(open, steps)
        elif order == "random":
            times, turns = time_grid("uniform" if grid is None else grid, steps), None
        else:
            raise UserError(f"order is `{order}`: use random or streams.")
        return cls(times, reveal_chances(schedule, times), turns)

    def turn(self, noise: Noise, length: int) -> Tensor:
        """(B, L) the step that reveals each position: the first that its coins allow."""
        if self.turns is not None:
            return self.turns
        return random_turns(noise, self.chances, length)


def random_turns(noise: Noise, chances: Sequence[float], length: int) -> Tensor:
    """The first step at which a position's coin falls below the chance: (B, L)."""
    device = noise.samples.device
    turns = torch.full((len(noise.samples), length), -1, device=device)
    limits = sent(torch.tensor(chances, dtype=torch.float64), device)[:, None, None]
    for first, coins in noise.of_steps(Purpose.REVEAL, len(chances), length):
        falls = coins < limits[first : first + len(coins)]
        here = first + falls.byte().argmax(0)
        turns = torch.where((turns < 0) & falls.any(0), here, turns)
    return turns


def make_plan(
    state: State, turn: Tensor, times: Sequence[float], noise: Noise, *, begun: bool = False
) -> list[Step]:
    """Steps that write each open mask at its turn; waits for a GPU once.

    Texts that start alike are read once in the first step that writes; `begun`: they are on their
    way already and no longer alike. Shapes: turn (B, L), in 0 .. steps - 1.
    """
    z, (batch, length), steps = state.z, state.z.shape, len(times) - 1
    turn = torch.where(state.masked, turn, -1)
    counts = torch.zeros(batch, steps + 1, dtype=torch.long, device=z.device)
    counts.scatter_add_(1, turn + 1, torch.ones_like(turn))
    active = (counts[:, 1:] > 0).T
    first = torch.where(turn >= 0, turn, steps).amin()
    begins = turn == first
    columns, leader = begins.any(0), begins.any(1).long().argmax()[None]
    same = (z == z[leader]) & (state.masked == state.masked[leader])
    alike = (same.all(1) | ~begins.any(1)).all()[None].long()
    padded = (z == PAD).any()[None].long()
    sums = counts.sum(0), active.sum(1), columns.sum()[None], alike, padded
    *sizes, num_columns, shares, state.padded = torch.cat(sums).tolist()  # the one transfer
    order = torch.argsort(turn.flatten(), stable=True)
    u = token_uniforms(noise, turn).flatten()[order]
    written, running = sizes[: steps + 1], sizes[steps + 1 :]
    every = first_true(active.flatten(), sum(running)) % batch
    share = bool(shares) and not begun
    plan = []
    parts = zip(
        times, torch.split(order, written)[1:], torch.split(u, written)[1:],
        torch.split(every, running), strict=False,
    )  # fmt: skip
    for n, (time, at, own, rows) in enumerate(parts):
        states: Tensor | None = rows
        reads, row = at, None
        if len(at) and share and len(rows) > 1:
            # The same text in every row, such as all masks: one row serves all.
            states, reads = leader, first_true(columns, num_columns)
            row = (columns.cumsum(0) - 1)[at % length]
        elif len(rows) == batch:
            states = None
        elif len(at):
            reads = local_positions(at, rows, length)
        share = share and not len(at)
        codes = step_codes(noise, n, state.canvas.masks)
        plan.append(Step(n, time, time, states, reads, at, own, row, codes=codes))
    return plan


def token_uniforms(noise: Noise, turn: Tensor) -> Tensor:
    """Numbers that tokens are drawn by, of the step in which each position is written: (B, L)."""
    return noise.uniforms(turn.shape[1], Purpose.TOKEN, turn)


def step_codes(noise: Noise, step: int, masks: int) -> Tensor | None:
    """(B,) which mask each text has in a step; None where there is one alone."""
    if masks == 1:
        return None
    return (noise.uniforms(1, Purpose.CODE, step).squeeze(1) * masks).long()


def plan_of_masks(
    state: State,
    times: Sequence[float],
    noise: Noise,
    reveals: Sequence[Tensor],
    erases: Sequence[Tensor] = (),
    t: Sequence[Tensor] = (),
) -> list[Step]:
    """Steps from masks (B, L) of what each writes and erases; a GPU is waited for in each.

    A position may be written in several steps. `t`: times (B,) of each step, where texts differ in
    them. Texts that start alike are read once in the first step, if they have one time.
    """
    z, length, share = state.z, state.z.shape[1], not t
    plan = []
    for n, (time, reveal) in enumerate(zip(times, reveals, strict=False)):
        at, rows = reveal.flatten().nonzero().squeeze(1), reveal.any(1).nonzero().squeeze(1)
        u = noise.uniforms(length, Purpose.TOKEN, n).flatten()[at]
        states, row = rows, None
        reads = local_positions(at, rows, length)
        if share and len(rows) > 1 and bool((z[rows] == z[rows[:1]]).all()):
            columns = reveal.any(0)
            states, reads = rows[:1], columns.nonzero().squeeze(1)
            row = (columns.cumsum(0) - 1)[at % length]
        share = share and not len(at)
        erased = erases[n].flatten().nonzero().squeeze(1) if erases else None
        codes = step_codes(noise, n, state.canvas.masks)
        when = t[n][states] if t else time
        plan.append(Step(n, time, when, states, reads, at, u, row, erased, codes))
    return plan


def local_positions(at: Tensor, states: Tensor | None, length: int) -> Tensor:
    """Flat positions in (U, L), from those in (B, L), if some rows `states` (U,) alone are read."""
    if states is None:
        return at
    return torch.searchsorted(states, at // length) * length + at % length


def first_true(where: Tensor, count: int) -> Tensor:
    """The `count` places at which `where` (N,) is true, in order, without a wait: (count,)."""
    return (~where).byte().argsort(stable=True)[:count]
