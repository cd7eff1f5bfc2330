"""Ancestral sampling that never waits for the GPU.

Which positions a step reveals does not depend on any token, so it is settled for all steps before
the first pass. Then the CPU knows every size, queues step after step, and the GPU never idles. The
noise, and so the tokens, are those of a chain of steps; only the first pass is shared by samples
that are alike, where a chain would look again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from didi_instruct.models.graphs import Chosen, round_up
from didi_instruct.sampling.chain import PAD, Canvas, Chain, Denoiser, Purpose, Samples
from didi_instruct.sampling.reveals import Reveals

NARROWEST = 8
"""Positions of a text that a pass is asked for at least: few sizes, few graphs."""
NARROW_FROM = 4096
"""Tokens of a batch from which a pass is asked for few positions. What that saves grows with them,
what it costs (more and smaller operations) does not: an H200 took 1.062 ms for a step of 1,024
tokens instead of 1.051, and 7.595 for 16,384 instead of 7.715, a line through 0 at 2,300."""

Drawing = Callable[[Tensor, float, Tensor, Tensor, Chosen | None], tuple[Tensor, Tensor]]


class Placed(Protocol):
    """A denoiser that is told positions by their numbers in (B * L)."""

    draw_at: Drawing | None
    """Tokens and log-probabilities (R,) there, as it is, by numbers (R,); None: by `at` alone.

    The positions are told text by text, too, where that is known and they are few."""

    def at(self, z: Tensor, t: float, place: Tensor) -> Tensor:
        """Logits (R, V) of the positions `place` (R,) of texts z (B, L) without padding."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What each step does."""

    turns: Tensor
    """(B, L) the step that writes each position; -1: none does."""
    places: tuple[Tensor, ...]
    """Of each step: the positions it writes, by their numbers in (B * L), in order."""
    rows: tuple[Tensor, ...]
    """Of each step: the samples that it writes something in."""
    alike: bool
    """Whether all samples that the first pass is for start from the same text."""
    chosen: tuple[Chosen | None, ...]
    """Of each step: the same positions, text by text; None: not asked for, none, or too many."""


def can_plan(denoiser: Denoiser, canvas: Canvas) -> bool:
    """Whether `planned` can replace a chain of steps: one wait for the GPU."""
    placed = getattr(denoiser, "at", None) is not None
    return placed and canvas.masks == 1 and not bool((canvas.tokens == PAD).any())


def make_plan(chain: Chain, reveals: Reveals, *, by_text: bool = True) -> Plan:
    """Settle all steps, with the positions text by text if asked; waits for the GPU."""
    steps, z = chain.steps, chain.z
    turns = reveals.turns if reveals.turns is not None else _turns_by_chance(chain, reveals)
    turns = torch.where(chain.masked, turns, -1)
    counts = torch.zeros(len(z), steps + 1, dtype=torch.long, device=z.device)
    counts.scatter_add_(1, turns + 1, torch.ones_like(turns))
    active = (counts[:, 1:] > 0).T
    first = torch.where(turns >= 0, turns, steps).min()
    begins = (turns == first).any(1)
    leader = z.index_select(0, begins.long().argmax()[None])
    alike = ((z == leader).all(1) | ~begins).all()[None].long()
    # One transfer for all sizes.
    sizes = torch.cat([counts.sum(0), active.sum(1), counts.amax(0)[1:], alike]).tolist()
    order = torch.argsort(turns.flatten(), stable=True)
    places = torch.split(order, sizes[: steps + 1])[1:]
    rows = torch.split(active.nonzero()[:, 1], sizes[steps + 1 : 2 * steps + 1])
    chosen: tuple[Chosen | None, ...] = (None,) * steps
    if by_text:
        chosen = _by_text(order, counts, z.shape[1], sizes[: steps + 1], sizes[2 * steps + 1 : -1])
    return Plan(turns, places, rows, bool(sizes[-1]), chosen)


def _by_text(
    order: Tensor, counts: Tensor, length: int, sizes: list[int], most: list[int]
) -> tuple[Chosen | None, ...]:
    """Positions of each step, text by text, at one width for all steps that have few.

    `order` are all positions, step by step and in order; `counts` (B, steps + 1) those of each text
    and step, beginning with those that no step writes; `sizes` and `most` their sums and maxima.
    """
    batch, steps = len(counts), len(most)
    few = [m for m in most if 0 < 2 * m <= length]
    if not few:
        return (None,) * steps
    width = min(length, max(NARROWEST, round_up(max(few), parts=1)))
    # Rank of a position among those of its text and step, and its spot in (steps, B, W).
    groups = counts.T.flatten()
    ends = groups.cumsum(0)
    group = torch.repeat_interleave(groups, output_size=len(order))
    rank = torch.arange(len(order), device=order.device) - (ends - groups)[group]
    spots = (group - batch) * width + rank
    size = steps * batch * width
    positions = torch.zeros(size + 1, dtype=torch.long, device=order.device)
    # Those of no step, and of steps with more than fit, go to the last place, which is cut off.
    target = torch.where((spots >= 0) & (rank < width), spots, size)
    positions.scatter_(0, target, order % length)
    tables = positions[:-1].view(steps, batch, width)
    own = torch.split(spots % (batch * width), sizes)[1:]
    return tuple(
        Chosen(table, spots) if 0 < m <= width else None
        for table, spots, m in zip(tables, own, most, strict=True)
    )


def _turns_by_chance(chain: Chain, reveals: Reveals) -> Tensor:
    """The first step of which a position's coin falls below the chance: (B, L)."""
    turns = torch.full_like(chain.z, -1)
    chances = torch.tensor(reveals.chances, dtype=torch.float64, device=turns.device)[:, None, None]
    n = 0
    while n < chain.steps:
        coins = chain.ahead(Purpose.REVEAL, n, *(() if n else (Purpose.TOKEN,)))
        falls = coins < chances[n : n + len(coins)]
        first = n + falls.byte().argmax(0)
        turns = torch.where((turns < 0) & falls.any(0), first, turns)
        n += len(coins)
    return turns


def planned(
    denoiser: Placed, chain: Chain, reveals: Reveals, *, greedy_tail: bool = False
) -> Samples:
    """Take all steps of a chain."""
    at_once = denoiser.draw_at if chain.settings.as_it_is else None
    narrow = at_once is not None and chain.z.numel() >= NARROW_FROM
    plan = make_plan(chain, reveals, by_text=narrow)
    batch, length = chain.z.shape
    untouched = plan.alike
    costs = torch.zeros(chain.z.numel(), dtype=torch.float64, device=chain.z.device)
    steps = zip(plan.places, plan.rows, plan.chosen, strict=True)
    for n, (place, rows, chosen) in enumerate(steps):
        if len(place):
            if untouched and len(rows) > 1:
                # The same text in every row, such as all masks: one row serves all.
                z, local, chosen = chain.z[rows[:1]], place % length, None
            elif len(rows) == batch:
                z, local = chain.z, place
            else:
                z, own = chain.z[rows], torch.searchsorted(rows, place // length)
                local, chosen = own * length + place % length, _of_texts(chosen, rows, own)
            numbers = chain.uniforms(Purpose.TOKEN, n).flatten()[place]
            greedy = greedy_tail and n == chain.steps - 1
            if at_once is not None and not greedy:
                drawn = at_once(z, reveals.times[n], local, numbers, chosen)
            else:
                logits = denoiser.at(z, reveals.times[n], local)
                drawn = chain.draw(logits, numbers, greedy=greedy)
            chain.passes += len(z) / batch
            chain.put_at(place, *drawn)
            costs.scatter_(0, place, drawn[1])
            untouched = False
        if chain.callback is not None:
            chain.tell(reveals.times[n], plan.turns == n)
    chain.log_prob += costs.view(batch, length).sum(1)
    return chain.samples(nfe=chain.steps)


def _of_texts(chosen: Chosen | None, rows: Tensor, own: Tensor) -> Chosen | None:
    """The same for some texts alone, in which `own` (R,) are the rows of the positions."""
    if chosen is None:
        return None
    width = chosen.positions.shape[1]
    return Chosen(chosen.positions[rows], own * width + chosen.spots % width)
