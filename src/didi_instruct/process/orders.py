"""In which order positions are revealed, where chance need not decide it.

Tokens that a step reveals are drawn independently, so neighbours revealed together do not know of
each other, and that is most of what few steps cost. `streams` keeps them apart. With N steps every
N-th position begins a stream, and a step writes the next token of every stream, to the right of one
that is known. At the beginning nothing is known, so the first tokens of the streams take two steps,
every other one first; near the end most is known, so the last token but one comes early, and the
last step writes the two beside it. (With 2 steps there are too few for that.)

No token has a say in it, so the probability of a path is exact; nor has chance, so a text has one
path, and the path KL is the KL itself.
"""

import functools
from collections.abc import Iterable

import torch
from torch import Tensor

from didi_instruct.process.schedule import Schedule


@functools.cache
def streams(steps: int) -> tuple[int, ...]:
    """The step at which each of some positions in a row has its turn; the next begin anew."""
    if steps < 4:
        return ((0,), (0, 1, 1, 1), (0, 2, 1, 2))[steps - 1]
    stream = [2 + k for k in range(steps - 4)] + [steps - 1, steps - 2, steps - 1]
    return (0, *stream, 1, *stream)


def turns(open: Tensor, steps: int) -> Tensor:
    """The step at which each position has its turn in `streams`, counting open ones: (B, L)."""
    plan = torch.tensor(streams(steps), device=open.device)
    return plan[(open.cumsum(1) - 1).clamp(min=0) % len(plan)]


@functools.cache
def shares(steps: int) -> tuple[float, ...]:
    """Share of the positions that `streams` has revealed after 0, 1, ... steps: steps + 1 of them.

    Of whole rounds; a text whose length is no multiple may have a little more or less.
    """
    plan = streams(steps)
    return tuple(sum(turn < n for turn in plan) / len(plan) for n in range(steps + 1))


def stream_times(schedule: Schedule, steps: int) -> list[float]:
    """Times of the steps of `streams`, from 1 to 0: as much is masked then as they leave."""
    left = 1 - torch.tensor(shares(steps), dtype=torch.float64)
    alpha_1 = schedule.alpha(torch.ones((), dtype=torch.float64))
    times: list[float] = schedule.time(1 - left * (1 - alpha_1)).tolist()
    return [1.0, *times[1:-1], 0.0]


def numbers(open: Tensor, steps: Tensor, known: Iterable[int]) -> Tensor:
    """Numbers in [0, 1): a position is revealed once a larger share of all is.

    Each lies in the middle of its step's shares, so that rounding does not matter. `steps` (B,) are
    those of the path that each text is on, all of them `known`. Shapes: open (B, L) -> (B, L).
    """
    found = torch.zeros(open.shape, dtype=torch.float64, device=open.device)
    for count in known:
        edges = torch.tensor(shares(count), dtype=torch.float64, device=open.device)
        middle = (edges[:-1] + edges[1:]) / 2
        found = torch.where((steps == count)[:, None], middle[turns(open, count)], found)
    return found
