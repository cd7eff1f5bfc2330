"""Student trajectories: from all masks (or a prompt) to text, and what is needed to score them.

Which positions a step reveals does not depend on the tokens, so one uniform number per position
fixes the whole order beforehand: a position is revealed by the time s at which the number falls
below (alpha_s - alpha_1) / (1 - alpha_1), the share of masks revealed until s.

Texts often start a step from the same state: all of them from all masks, the members of a group
from one prompt or one z_τ. A `Jump` keeps the distinct states, so the network reads each one once,
in drawing and in scoring, gradient included; the result is that of reading every copy.

Starts, times, orders and masks are planned on the host, states are where the networks are: so the
host never waits for a GPU.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from didi_instruct.config.model import Order
from didi_instruct.process.masking import interleaved_numbers, interleaved_times, revealed_shares
from didi_instruct.process.schedule import Schedule
from didi_instruct.sampling.ancestral import Draw, plain, run
from didi_instruct.sampling.denoiser import LogitsDenoiser
from didi_instruct.sampling.draw import Purpose, draw_tokens
from didi_instruct.sampling.draw import uniforms as hashed_uniforms
from didi_instruct.sampling.plan import Step
from didi_instruct.sampling.state import Canvas, Reads, State
from didi_instruct.transfer import sent

HOST = torch.device("cpu")
READ_ALL_THRESHOLD = 0.75
"""Share of states that are drawn from, from which on all are read."""

LogitsAt = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A denoiser at some positions: (z (U, L), t (U,), where (U, L)) -> logits (R, V), in order.

`where` may be on the host. Logits may be normalised: log-probabilities."""

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

    def uniforms(self, count: int, *stream: int | Tensor) -> Tensor:
        """(B, count) float64 numbers in [0, 1)."""
        return hashed_uniforms(self.seed, self._device_indices, stream, count)

    def of_groups(self, size: int) -> "Noise":
        """The noise of groups of consecutive texts, one index for each."""
        if size == 1:
            return self
        return Noise(self.seed, self.indices[::size] // size, self.device)

    @property
    def on_host(self) -> "Noise":
        """The same numbers on the host, for plans."""
        return Noise(self.seed, self.indices)

    @cached_property
    def _device_indices(self) -> Tensor:
        return sent(self.indices, self.device)


def row_index(selected: Tensor, state: Tensor, position: Tensor) -> Tensor:
    """Row of each token among the positions `selected` (U, L) of the states, in order.

    Shapes: state, position (R,), where the tokens are -> (R,).
    """
    row = (selected.flatten().cumsum(0) - 1).view_as(selected)
    return row[state, position]


@dataclass(frozen=True)
class Jump:
    """Tokens that are drawn at once: where, and from which states.

    `state`, `writes` and `masked` are on the host if the jump is planned there.
    """

    z: Tensor
    """(U, L) distinct states."""
    t: Tensor
    """(U,) their times."""
    state: Tensor
    """(B,) index of the state that each text starts from."""
    writes: Tensor
    """(B, L) positions drawn."""
    masked: Tensor | None = None
    """(U, L) masks of the states, where a whole rollout is planned."""

    @cached_property
    def host_index(self) -> tuple[Tensor, Tensor]:
        """Text and position of each drawn token, (R,) both, where the jump is planned."""
        text, position = self.writes.nonzero(as_tuple=True)
        return text, position

    @cached_property
    def index(self) -> tuple[Tensor, Tensor]:
        """The same where the states are."""
        text, position = (sent(index, self.z.device) for index in self.host_index)
        return text, position

    @cached_property
    def reads(self) -> Tensor:
        """(U, L) positions of the states that some text draws."""
        count = torch.zeros(self.z.shape, dtype=torch.int32, device=self.writes.device)
        return count.index_add_(0, self.state, self.writes.int()) > 0

    def row_index(self, selected: Tensor) -> Tensor:
        """Row of each drawn token among the positions `selected` (U, L) of the states: (R,)."""
        text, position = self.host_index
        return sent(row_index(selected, self.state[text], position), self.z.device)


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
def draw_from(
    logits: Tensor, jump: Jump, selected: Tensor, uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    """Draw a jump's tokens from logits (R', V) of the positions `selected` (U, L) of its states.

    A row is normalised once, however many texts draw from it.
    """
    return draw_tokens(logits, uniforms[jump.index], jump.row_index(selected))


@dataclass(frozen=True, slots=True)
class Walk:
    """Texts on their way."""

    z: Tensor
    """(W, L) current states."""
    masked: Tensor
    """(W, L) positions not written yet."""
    jumps: tuple[Jump, ...]
    log_prob: Tensor
    """(W,) of the tokens drawn so far."""


def walk(
    denoiser: LogitsAt,
    schedule: Schedule,
    start: Tensor,
    state: Tensor,
    times: Tensor,
    noise: Noise,
    mask_id: int,
    order: Tensor | None = None,
) -> Walk:
    """Take the steps of ancestral sampling along `times`, with the law of `sampling.ancestral`.

    A text whose time stands still takes no step. `order` (W, L) tells when each position is
    revealed (`order_of`); by default chance does. All inputs are on the host, states are where the
    noise is. Shapes: start (U, L), state (W,) in 0..U-1, times (W, K + 1) float64 falling from 1.
    """
    masked, everyone = (start == mask_id)[state], torch.arange(len(state))
    if order is None:
        order = noise.on_host.uniforms(start.shape[1], Purpose.REVEAL)
    shares = revealed_shares(schedule, times)
    begin, t = sent(start, noise.device), sent(times, noise.device)
    z = begin[sent(state, noise.device)]
    steps, planned = [], []
    for k in range(times.shape[1] - 1):
        writes = revealed_between(order, shares[:, k], shares[:, k + 1]) & masked
        jump = Jump(z, t[:, k], everyone, writes, masked)
        if k == 0:
            jump = Jump(begin, t.new_ones(len(begin)), state, writes, start == mask_id)
        uniforms = noise.uniforms(start.shape[1], Purpose.TOKEN, k)
        steps.append(jump_step(jump, k, uniforms))
        planned.append(jump)
        masked = masked & ~writes
    texts = texts_from(z, mask_id)
    jumps: list[Jump] = []
    run(steps, texts, _recorded(planned, jumps, plain(as_denoiser(denoiser))))
    return Walk(texts.z, masked, tuple(jumps), texts.costs.sum(1))


def texts_from(z: Tensor, mask_id: int) -> State:
    """Texts z (B, L) on their way; states that were read are kept."""
    canvas = Canvas(z, mask_id, torch.arange(len(z), device=z.device))
    return State(canvas, watched=True, padded=False)


def jump_step(jump: Jump, index: int, uniforms: Tensor) -> Step:
    """The step of a plan that takes a jump by uniforms (B, L).

    States from which nothing is drawn are not read if they are many; a few are read along, so that
    most passes have one size. One state is always read, so that all processes of a sharded network
    make the same calls.
    """
    device, length = jump.z.device, jump.writes.shape[1]
    reads, (text, position) = jump.reads, jump.host_index
    rows = _first_texts(jump.state, len(reads))
    active, t = reads.any(1), jump.t
    if int(active.sum()) < READ_ALL_THRESHOLD * len(active):
        active[0] |= ~active.any()
        which = active.nonzero().squeeze(1)
        reads, rows, t = reads[which], rows[which], t[sent(which, device)]
    row = jump.row_index(jump.reads)
    at = reads.flatten().nonzero().squeeze(1)
    writes, states = sent(text * length + position, device), sent(rows, device)
    return Step(index, 0.0, t, states, at, writes, uniforms.view(-1)[writes], row)


def _first_texts(state: Tensor, count: int) -> Tensor:
    """The first text (count,) of each state."""
    texts = torch.arange(len(state), device=state.device)
    return torch.zeros(count, dtype=torch.long, device=state.device).scatter_reduce(
        0, state, texts, "amin", include_self=False
    )


def _recorded(planned: Sequence[Jump], jumps: list[Jump], draw: Draw) -> Draw:
    """Keep the jumps that are taken, with the states that they were taken from."""

    def recorded(state: State, step: Step) -> tuple[Tensor, Tensor]:
        jump = planned[step.index]
        jumps.append(jump if step.index == 0 else replace(jump, z=state.z))
        return draw(state, step)

    return recorded


def as_denoiser(logits_at: LogitsAt, num_tokens: int = 0) -> LogitsDenoiser:
    """Logits at some positions as samplers ask for them."""

    def logits(reads: Reads, t: Tensor | float, at: Tensor) -> Tensor:
        z, where = reads.tokens, torch.zeros(reads.tokens.shape, dtype=torch.bool, device=at.device)
        where.view(-1).index_fill_(0, at, True)
        times = torch.as_tensor(t, dtype=torch.float64, device=z.device).expand(len(z))
        return logits_at(z, times, where)

    return LogitsDenoiser(logits, num_tokens)


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
    denoiser: LogitsAt,
    schedule: Schedule,
    start: Tensor,
    state: Tensor,
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

    Shapes: start (U, L), state (B,), tau (B,) float64, the same within a shared group; all of them
    on the host.
    """
    device = noise.device
    written = (start == mask_id)[state]
    if tau is None:
        z = sent(start, device)
        last = Jump(z, z.new_ones(len(z), dtype=torch.float64), state, written, start == mask_id)
        before: tuple[Jump, ...] = ()
        log_prob = torch.zeros(len(state), dtype=torch.float64, device=device)
    else:
        own = noise.of_groups(shared)
        times, turn = _way_to(tau[::shared], steps, order, schedule, own.on_host, written[::shared])
        path = walk(denoiser, schedule, start, state[::shared], times, own, mask_id, turn)
        group = torch.arange(len(state)) // shared
        last = Jump(path.z, sent(times[:, -1], device), group, path.masked[group], path.masked)
        before, log_prob = path.jumps, path.log_prob.repeat_interleave(shared)
    uniforms = noise.uniforms(start.shape[1], Purpose.TOKEN, steps, Purpose.SELECT)
    texts = texts_from(last.z[sent(last.state, device)], mask_id)
    run([jump_step(last, steps, uniforms)], texts, plain(as_denoiser(denoiser)))
    log_prob = log_prob + texts.costs.sum(1)
    return Rollout(texts.z, (*before, last), log_prob, sent(written, device))


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


def path_times(
    budgets: tuple[int, ...],
    place: Tensor,
    order: Order = "random",
    schedule: Schedule | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Walks to a random step of a random budget, chosen by `place` (U,) in [0, 1).

    Steps are equally long, or as the order asks for under the schedule. Returns the times of the
    walks (U, K + 1), K the same for all; start and end of the step that follows, (U,) each; and the
    budgets (U,).
    """
    scaled = place * len(budgets)
    which = scaled.long().clamp(max=len(budgets) - 1)
    budget = torch.tensor(budgets, device=place.device)[which]
    done = ((scaled - which) * budget).long().clamp(max=budget - 1)
    steps = torch.arange(max(budgets), device=place.device)
    size = max(budgets) + 1
    rows = [_times(count, order, schedule) for count in budgets]
    padded = [row + [0.0] * (size - len(row)) for row in rows]
    table = torch.tensor(padded, dtype=torch.float64, device=place.device)[which]
    times = table.gather(1, torch.minimum(steps, done[:, None]))
    t, after = table.gather(1, torch.stack([done, done + 1], 1)).unbind(1)
    return times, t, after, budget


def _times(steps: int, order: Order, schedule: Schedule | None) -> list[float]:
    """Times of a path in as many steps, from 1 to 0."""
    if order == "streams":
        assert schedule is not None, "how much is masked at a time depends on the schedule"
        return interleaved_times(schedule, steps)
    return [1 - n / steps for n in range(steps + 1)]
