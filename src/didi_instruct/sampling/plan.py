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

    index: int  # from 0
    time: float  # where it starts, 1 to 0, as a callback is told
    t: Tensor | float  # time of the states that are read: one for all, or (U,)
    states: Tensor | None  # (U,) rows of z to read; None: all
    reads: Tensor  # (R,) flat positions in (U, L) whose laws are needed
    writes: Tensor  # (N,) flat positions in (B, L) that are written
    u: Tensor  # (N,) float64 numbers in [0, 1) that their tokens are drawn by
    row: Tensor | None = None  # (N,) which read each token is drawn from; None: the same one
    erases: Tensor | None = None  # flat positions in (B, L) that are masked after the writing
    codes: Tensor | None = None  # (U,) which mask the states carry, where a model has several
    greedy: bool = False  # take the most probable tokens


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


def reveal_turns(
    schedule: Schedule, noise: Noise, open: Tensor, steps: int, grid: Grid | None, order: Order
) -> tuple[Tensor, list[float]]:
    """Step (B, L) that reveals each of the `open` positions, and the times of the steps."""
    if order == "random":
        times = time_grid("uniform" if grid is None else grid, steps)
        return random_turns(noise, reveal_chances(schedule, times), open.shape[1]), times
    if grid is not None:
        raise UserError("order=streams has steps of its own: leave out grid.")
    check_steps(steps)
    return interleaved_turns(open, steps), interleaved_times(schedule, steps)


def random_turns(noise: Noise, chances: Sequence[float], length: int) -> Tensor:
    """The first step at which a position's coin falls below the chance: (B, L)."""
    device, first = noise.samples.device, 0
    turns = torch.full((1, len(noise.samples), length), -1, device=device)
    limits = sent(torch.tensor(chances, dtype=torch.float64), device)[:, None, None, None]
    for coins in noise.of_steps(Purpose.REVEAL, range(len(chances)), length):
        falls = coins < limits[first : first + len(coins)]
        turns = torch.where((turns < 0) & falls.any(0), first + falls.byte().argmax(0), turns)
        first += len(coins)
    return turns[0]


def make_plan(
    state: State, turn: Tensor, times: Sequence[float], *, begun: bool = False
) -> list[Step]:
    """Steps that write each mask at its turn, -1 for never; waits for a GPU once.

    Texts that start alike are read once in the first step that writes; `begun`: they are on their
    way already and no longer alike. Shapes: turn (B, L), in -1 .. steps - 1.
    """
    z, (batch, length), steps = state.z, state.z.shape, len(times) - 1
    turn = torch.where(state.masked, turn, -1)
    counts = torch.zeros(batch, steps + 1, dtype=torch.long, device=z.device)
    counts.scatter_add_(1, turn + 1, torch.ones_like(turn))
    active = (counts[:, 1:] > 0).T
    begins = turn == torch.where(turn >= 0, turn, steps).amin()
    columns, starting = begins.any(0), begins.any(1)
    alike = (state.same_as(starting.long().argmax()[None]) | ~starting).all()
    flags = torch.stack([columns.sum(), alike.long(), (z == PAD).any().long()])
    found = torch.cat([counts.sum(0), active.sum(1), flags])
    *sizes, num_columns, shares, state.padded = found.tolist()  # the one transfer
    written, running = sizes[: steps + 1], sizes[steps + 1 :]
    order = torch.argsort(turn.flatten(), stable=True)
    u = state.noise.uniforms(length, Purpose.TOKEN, turn).flatten()[order]
    every = first_true(active.flatten(), sum(running)) % batch
    parts = zip(
        torch.split(order, written)[1:], torch.split(u, written)[1:], torch.split(every, running),
        strict=True,
    )  # fmt: skip
    plan, share = [], bool(shares) and not begun
    for n, (at, numbers, rows) in enumerate(parts):
        shared = first_true(columns, num_columns) if share and len(rows) > 1 else None
        plan.append(make_step(state, n, times[n], at, rows, numbers, shared))
        share = share and not len(at)
    return plan


def make_step(
    state: State,
    index: int,
    time: float,
    at: Tensor,
    rows: Tensor,
    u: Tensor,
    shared: Tensor | None,
) -> Step:
    """Step that writes flat positions `at` (N,) of the texts `rows` (A,) by numbers u (N,).

    `shared` (C,): texts are alike, and the first is read for all, at these of its positions; with
    several masks once for each code that they have, which a GPU is waited for.
    """
    length, codes = state.z.shape[1], step_codes(state.noise, index, state.canvas.masks)
    if shared is None:
        codes = None if codes is None else codes[rows]
        states = None if len(rows) == len(state.z) else rows
        reads = local_positions(at, states, length)
        return Step(index, time, time, states, reads, at, u, codes=codes)
    states, reads, row = rows[:1], shared, torch.searchsorted(shared, at % length)
    if codes is not None:
        codes, which = torch.unique(codes[at // length], return_inverse=True)
        start = length * torch.arange(len(codes), device=at.device)
        states, reads = states.expand(len(codes)), (start[:, None] + shared).flatten()
        row = row + which * len(shared)
    return Step(index, time, time, states, reads, at, u, row, codes=codes)


def step_where(state: State, index: int, time: float, mask: Tensor, *, begun: bool = False) -> Step:
    """Step that writes where a mask (B, L) says; waits for a GPU."""
    at, rows = flat_positions(mask), mask.any(1).nonzero().squeeze(1)
    u = state.noise.uniforms(mask.shape[1], Purpose.TOKEN, index).flatten()[at]
    shared = None if begun else shared_positions(state, at, rows)
    return make_step(state, index, time, at, rows, u, shared)


def flat_positions(mask: Tensor) -> Tensor:
    """Flat positions (N,) at which a mask (B, L) is true; waits for a GPU."""
    return mask.flatten().nonzero().squeeze(1)


def shared_positions(state: State, at: Tensor, rows: Tensor) -> Tensor | None:
    """Positions (C,) to read of one text for all `rows` (A,) that are alike; waits for a GPU."""
    if len(rows) < 2 or not state.same_as(rows[:1])[rows].all():
        return None
    columns: Tensor = torch.unique(at % state.z.shape[1])
    return columns


def step_codes(noise: Noise, step: int, masks: int) -> Tensor | None:
    """(B,) which mask each text has in a step; None where there is one alone."""
    if masks == 1:
        return None
    return (noise.uniforms(1, Purpose.CODE, step).squeeze(1) * masks).long()


def local_positions(at: Tensor, states: Tensor | None, length: int) -> Tensor:
    """Flat positions in (U, L), from those in (B, L), if some rows `states` (U,) alone are read."""
    if states is None or not len(at):
        return at
    return torch.searchsorted(states, at // length) * length + at % length


def first_true(where: Tensor, count: int) -> Tensor:
    """The `count` places at which `where` (N,) is true, in order, without a wait: (count,)."""
    return (~where).byte().argsort(stable=True)[:count]
