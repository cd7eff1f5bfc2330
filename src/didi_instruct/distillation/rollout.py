"""Student trajectories: from all masks (or a prompt) to text, and what is needed to score them.

Which positions a step reveals does not depend on the tokens, so one uniform number per position
fixes the whole order beforehand: a position is revealed by the time s at which the number falls
below (alpha_s - alpha_1) / (1 - alpha_1), the share of masks revealed until s.

Texts often start a step from the same state: all of them from all masks, the members of a group
from one prompt or one z_τ. A `Jump` keeps the distinct states, so the network reads each one once,
in drawing and in scoring, gradient included; the result is that of reading every copy.

What does not depend on tokens is planned on the host (starts, times, orders, and the masks that
follow), while states are where the networks are: so a GPU is never waited for.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from didi_instruct.config.model import Order
from didi_instruct.process.masking import interleaved_numbers, interleaved_times, revealed_shares
from didi_instruct.process.schedule import Schedule
from didi_instruct.sampling.chain import Purpose
from didi_instruct.sampling.chunks import draw_compiled
from didi_instruct.sampling.noise import uniforms
from didi_instruct.transfer import sent

HOST = torch.device("cpu")
MOSTLY = 0.75
"""Share of states that are drawn from, from which on all are read."""
Rows = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A denoiser where it is needed: (z (U, L), t (U,), where (U, L)) -> log-probabilities (R, V).

What is only drawn from need not be normalised. `where` may be on the host."""

References = Callable[[int, int], Tensor]
"""Texts start .. start + count - 1 of an endless stream: (count, L)."""


@dataclass(frozen=True)
class Noise:
    """Random numbers of some texts, each a function of (seed, index of the text, purpose)."""

    seed: int
    indices: Tensor
    """(B,) of the texts, over all processes; on the host."""
    device: torch.device = HOST
    """Where the numbers are made: they are the same everywhere."""

    def uniforms(self, count: int, *stream: int) -> Tensor:
        """(B, count) float64 numbers in [0, 1)."""
        return uniforms(self.seed, self._there, stream, count)

    def of_groups(self, size: int) -> "Noise":
        """The noise of the groups that consecutive texts form, one index for each."""
        return Noise(self.seed, self.indices[::size] // size, self.device)

    @property
    def on_host(self) -> "Noise":
        """The same numbers, for plans."""
        return Noise(self.seed, self.indices)

    @cached_property
    def _there(self) -> Tensor:
        return sent(self.indices, self.device)


@dataclass(frozen=True)
class Jump:
    """Tokens that are drawn at once: where, and from which states."""

    z: Tensor
    """(U, L) distinct states."""
    t: Tensor
    """(U,) their times."""
    owner: Tensor
    """(B,) the state that each text starts from; texts that share all of it count as one."""
    where: Tensor
    """(B, L) positions drawn."""
    masked: Tensor | None = None
    """(U, L) masks of the states, where a whole rollout is planned. With `owner` and `where` on the
    host, if the jump is planned there: to count them a GPU would be waited for."""

    @cached_property
    def planned(self) -> tuple[Tensor, Tensor]:
        """Text and position of each drawn token, (R,) both, where the jump is planned."""
        text, position = self.where.nonzero(as_tuple=True)
        return text, position

    @cached_property
    def drawn(self) -> tuple[Tensor, Tensor]:
        """The same where the states are."""
        text, position = (sent(numbers, self.z.device) for numbers in self.planned)
        return text, position

    @cached_property
    def needed(self) -> Tensor:
        """(U, L) positions of the states that some text draws."""
        count = torch.zeros(self.z.shape, dtype=torch.int32, device=self.where.device)
        return count.index_add_(0, self.owner, self.where.int()) > 0

    def places(self, selected: Tensor) -> Tensor:
        """Where each drawn token's law is among the rows that `selected` (U, L) picks: (R,)."""
        row = (selected.flatten().cumsum(0) - 1).view_as(selected)
        text, position = self.planned
        return sent(row[self.owner[text], position], self.z.device)


@dataclass(frozen=True, slots=True)
class Rollout:
    """Texts, and the jumps that wrote them."""

    x: Tensor
    """(B, L)."""
    jumps: tuple[Jump, ...]
    """In order, the last one from z_τ to x."""
    log_prob: Tensor
    """(B,) float64, of all drawn tokens along the path."""
    written: Tensor
    """(B, L) positions that were not given."""


@torch.no_grad()
def draw_jump(rows: Rows, jump: Jump, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Draw the tokens of a jump: numbers (B, L) in [0, 1) -> tokens (R,), log-probabilities (R,).

    States from which nothing is drawn are not read, if they are many: a few are read along, so
    that most passes have one size. One is read even if none is needed, so that all processes of a
    sharded network make the same calls.
    """
    needed, _ = jump.needed, jump.drawn  # counted before the pass, which would be waited for
    active = needed.any(1)
    if int(active.sum()) >= MOSTLY * len(active):
        laws = rows(jump.z, jump.t, needed)
    else:
        active[0] |= ~active.any()
        which = active.nonzero().squeeze(1)
        there = sent(which, jump.z.device)
        laws = rows(jump.z[there], jump.t[there], needed[which])
    return draw_from(laws, jump, needed, numbers)


@torch.no_grad()
def draw_from(laws: Tensor, jump: Jump, selected: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Draw the tokens of a jump from laws (R', V) of the positions `selected` (U, L) of its states.

    A law is read once, however many texts draw from it.
    """
    return draw_compiled(laws, numbers[jump.drawn], jump.places(selected))


@dataclass(frozen=True, slots=True)
class Walk:
    """Texts on their way."""

    z: Tensor
    """(W, L) where they stand."""
    masked: Tensor
    """(W, L) what is not written yet."""
    jumps: tuple[Jump, ...]
    log_prob: Tensor
    """(W,) of the tokens drawn so far."""


def walk(
    rows: Rows,
    schedule: Schedule,
    start: Tensor,
    owner: Tensor,
    times: Tensor,
    noise: Noise,
    mask_id: int,
    order: Tensor | None = None,
) -> Walk:
    """Take the steps of ancestral sampling along `times`, with the law of `sampling.ancestral`.

    A text whose time stands still takes no step. `order` (W, L) tells when each position is
    revealed (`order_of`); by default chance does. All that is given is on the host, states are
    where the noise is. Shapes: start (U, L), owner (W,) in 0..U-1, times (W, K + 1) float64 falling
    from 1.
    """
    device, masked = noise.device, (start == mask_id)[owner]
    if order is None:
        order = noise.on_host.uniforms(start.shape[1], Purpose.REVEAL)
    shares = revealed_shares(schedule, times)
    begin, there = sent(start, device), sent(times, device)
    z, everyone = begin[sent(owner, device)], torch.arange(len(owner))
    log_prob = torch.zeros(len(z), dtype=torch.float64, device=device)
    jumps = []
    for k in range(times.shape[1] - 1):
        where = revealed_between(order, shares[:, k], shares[:, k + 1]) & masked
        if k == 0:
            jump = Jump(begin, there.new_ones(len(begin)), owner, where, start == mask_id)
        else:
            jump = Jump(z, there[:, k], everyone, where, masked)
        token, log_p = draw_jump(rows, jump, noise.uniforms(z.shape[1], Purpose.TOKEN, k))
        z, masked = z.index_put(jump.drawn, token), masked & ~where
        log_prob.index_add_(0, jump.drawn[0], log_p)
        jumps.append(jump)
    return Walk(z, masked, tuple(jumps), log_prob)


def order_of(
    order: Order, noise: Noise, open: Tensor, steps: Tensor, budgets: tuple[int, ...]
) -> Tensor:
    """Numbers (B, L) in [0, 1): a position is revealed once a larger share of all is.

    `open` (B, L) are the positions to write, `steps` (B,) those of the path that a text is on, each
    one of the budgets.
    """
    if order == "streams":
        return interleaved_numbers(open, steps, budgets)
    return noise.uniforms(open.shape[1], Purpose.REVEAL)


def revealed_between(order: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Positions (W, L) whose number lies in [low, high): both (W,)."""
    return (order >= low[:, None]) & (order < high[:, None])


def rollout(
    rows: Rows,
    schedule: Schedule,
    start: Tensor,
    owner: Tensor,
    tau: Tensor | None,
    noise: Noise,
    mask_id: int,
    *,
    steps: int = 1,
    shared: int = 1,
    order: Order = "random",
) -> Rollout:
    """Go from `start` to z_τ in `steps` steps, then draw all that is left at once (Algorithm 1).

    In `streams`, `steps` are those of the whole path, and the stop is the last one before τ.

    Without τ there is no stop: one step from the start to text ("w/o score decomposition"). With
    `shared` > 1 the members of each group of that many texts stand at the same z_τ, and only their
    last jumps differ.

    Shapes: start (U, L), owner (B,), tau (B,) float64, the same within a shared group; all of them
    on the host.
    """
    device = noise.device
    written = (start == mask_id)[owner]
    if tau is None:
        begin = sent(start, device)
        time = begin.new_ones(len(begin), dtype=torch.float64)
        last = Jump(begin, time, owner, written, start == mask_id)
        before: tuple[Jump, ...] = ()
        log_prob = torch.zeros(len(owner), dtype=torch.float64, device=device)
    else:
        own = noise.of_groups(shared) if shared > 1 else noise
        times, turn = _way_to(tau[::shared], steps, order, schedule, own.on_host, written[::shared])
        path = walk(rows, schedule, start, owner[::shared], times, own, mask_id, turn)
        group = torch.arange(len(owner)) // shared
        time = sent(times[:, -1], device)
        last = Jump(path.z, time, group, path.masked[group], path.masked)
        before, log_prob = path.jumps, path.log_prob.repeat_interleave(shared)
    numbers = noise.uniforms(start.shape[1], Purpose.TOKEN, steps, Purpose.SELECT)
    token, log_p = draw_jump(rows, last, numbers)
    x = last.z[sent(last.owner, device)].index_put(last.drawn, token)
    log_prob = log_prob.index_add(0, last.drawn[0], log_p)
    return Rollout(x, (*before, last), log_prob, sent(written, device))


def _way_to(
    tau: Tensor, steps: int, order: Order, schedule: Schedule, noise: Noise, open: Tensor
) -> tuple[Tensor, Tensor]:
    """Times of the walks to τ (W,), one row each, and when each position has its turn (W, L)."""
    count = torch.full((len(tau),), steps, device=tau.device)
    turn = order_of(order, noise, open, count, (steps,))
    if order == "streams":
        stops = torch.tensor(
            interleaved_times(schedule, steps)[:-1], dtype=torch.float64, device=tau.device
        )
        passed = (stops >= tau[:, None]).sum(1, keepdim=True).clamp(min=1)
        # A walk stands still once it has arrived.
        return torch.maximum(stops, stops[passed - 1].view(-1, 1)), turn
    fractions = torch.linspace(0, 1, steps + 1, dtype=torch.float64, device=tau.device)
    return 1 + (tau[:, None] - 1) * fractions, turn
