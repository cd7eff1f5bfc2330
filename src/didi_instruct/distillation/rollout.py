"""Student trajectories: from all masks (or a prompt) to text, and what is needed to score them.

Which positions a step reveals does not depend on the tokens, so one uniform number per position
fixes the whole order beforehand: a position is revealed by the time s at which the number falls
below (alpha_s - alpha_1) / (1 - alpha_1), the share of masks revealed until s.

Texts often start a step from the same state: all of them from all masks, the members of a group
from one prompt or one z_τ. The network reads each distinct state once, in drawing and in scoring,
gradient included; the result is that of reading every copy.

Starts, times, orders and masks are planned on the host, states are where the networks are: so the
host never waits for a GPU.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from didi_instruct.config.model import ModelConfig, Order
from didi_instruct.process import masking
from didi_instruct.process.masking import LengthLaw, revealed_shares
from didi_instruct.process.schedule import Schedule
from didi_instruct.sampling.ancestral import Draw, run
from didi_instruct.sampling.draw import Noise, Purpose
from didi_instruct.sampling.plan import Step, flat_positions, time_grid
from didi_instruct.sampling.state import PAD, Canvas, State
from didi_instruct.transfer import sent

HOST = torch.device("cpu")
READ_ALL_THRESHOLD = 0.75
"""Share of states that are drawn from, from which on all are read."""
REPRESENTATIVE_LENGTHS = 8
"""Lengths of windows that stand for all in a number of the log."""

References = Callable[[int, int], Tensor]
"""Texts start .. start + count - 1 of an endless stream: (count, L)."""


class Starts:
    """States that texts start from: tokens that are given, and masks to be written.

    Usually nothing is given, one row of masks for all. A prompt gives the first tokens. Where each
    text has a window of its own, its end is given too: that of the text whose prompt it continues,
    or one of a length drawn from the teacher's law.
    """

    def __init__(self, model: ModelConfig, length: int, prompt: int = 0) -> None:
        """Take the vocabulary and the ends of a model; an id V stands for a mask that it lacks."""
        self.mask_id, self.length, self.prompt = model.num_tokens, length, prompt
        self.banned = model.banned  # of texts that are given: visible throughout
        self.end_id = model.end_id  # fills a window behind its text; None: texts fill their windows
        self.law = None if model.end_id is None else LengthLaw(model.lengths)

    @property
    def shared(self) -> bool:
        """True where all texts start from one row."""
        return not self.prompt and self.law is None

    def open(self, rows: Tensor) -> Tensor:
        """Positions of texts (B, L) that are written, not given: after the prompt, before the end.

        None, where a text is no longer than its prompt; and not those of banned tokens.
        """
        after = torch.arange(self.length, device=rows.device) >= self.prompt
        if self.end_id is None and not self.banned:
            return after.expand(rows.shape)
        return after & masking.written(rows, self.end_id, self.banned)

    def __call__(
        self, noise: Noise, rows: Tensor | None = None, group: int = 1
    ) -> tuple[Tensor, Tensor]:
        """Distinct starts (U, L) of the texts of some noise, and the start of each text: (B,).

        `rows` (R, L) are the texts whose prompts are continued, each by B / R in turn. Of drawn
        lengths, each `group` of texts has one.
        """
        text = torch.arange(len(noise.samples), device=noise.samples.device)
        if self.prompt:
            assert rows is not None, "prompts come from texts"
            starts = torch.where(self.open(rows), self.mask_id, rows)
            return starts, text // (len(text) // len(rows))
        if self.law is None:
            return self.representative(text.device), torch.zeros_like(text)
        drawn = self.law.draw(noise.of_groups(group).uniforms(1, Purpose.LENGTH).squeeze(1))
        lengths, which = torch.unique(drawn, return_inverse=True)
        return self._windows(lengths), which[text // group]

    def log_prob(self, start: Tensor) -> Tensor:
        """Log-probability of drawing the starts (B, L): (B,) float64, 0 without a law."""
        if self.law is None or self.prompt:
            return torch.zeros(len(start), dtype=torch.float64, device=start.device)
        return self.law.log_prob((start == self.mask_id).sum(1))

    def representative(self, device: torch.device) -> Tensor:
        """Starts without a prompt that stand for all: one row, or windows from short to long."""
        if self.law is None:
            return torch.full((1, self.length), self.mask_id, device=device)
        count = REPRESENTATIVE_LENGTHS
        middle = torch.arange(count, dtype=torch.float64, device=device) + 0.5
        return self._windows(self.law.draw(middle / count))

    def _windows(self, lengths: Tensor) -> Tensor:
        assert self.end_id is not None
        return masking.window(self.length, self.mask_id, self.end_id, lengths)


# Steps


@dataclass(frozen=True, slots=True)
class Jump:
    """Tokens drawn at once, as they are scored; `step` has what drawing them needs.

    `state`, `writes` and `masked` are on the host if the jump is planned there.
    """

    z: Tensor  # (U, L) distinct states
    t: Tensor  # (U,) their times
    state: Tensor  # (B,) index of the state that each text starts from
    writes: Tensor  # (B, L) positions drawn
    masked: Tensor  # (U, L) masks of the states

    @property
    def left(self) -> Tensor:
        """(B, L) masks of the texts that stay."""
        return self.masked[self.state] & ~self.writes

    def step(self, index: int, uniforms: Tensor) -> Step:
        """The step of a plan that takes the jump by uniforms (B, L).

        States from which nothing is drawn are not read if they are many; a few are read along, so
        that most passes have one size. One state is always read, so that all processes of a sharded
        network make the same calls.
        """
        device, (count, length) = self.z.device, self.z.shape
        text, position = self.writes.nonzero(as_tuple=True)
        place = self.state[text] * length + position
        reads = torch.zeros(count * length, dtype=torch.bool).index_fill_(0, place, True)
        row = reads.cumsum(0)[place] - 1
        reads, t = reads.view(count, length), self.t
        owner = torch.zeros(count, dtype=torch.long)  # a text that starts from each state
        owner[self.state] = torch.arange(len(self.state))
        active = reads.any(1)
        if int(active.sum()) < READ_ALL_THRESHOLD * count:
            active[0] |= ~active.any()
            which = active.nonzero().squeeze(1)
            reads, owner, t = reads[which], owner[which], t[sent(which, device)]
        writes = sent(text * length + position, device)
        return Step(
            index=index,
            time=0.0,
            t=t,
            states=sent(owner, device),
            reads=flat_positions(reads),
            writes=writes,
            u=uniforms.view(-1)[writes],
            row=sent(row, device),
        )


@dataclass(frozen=True, slots=True)
class Rollout:
    """Texts, and the jumps that wrote them."""

    x: Tensor  # (B, L)
    jumps: tuple[Jump, ...]  # in order, the last one from z_τ to x
    log_prob: Tensor  # (B,) float64, of all drawn tokens along the path
    written: Tensor  # (B, L) positions that were not given


def texts_from(z: Tensor, mask_id: int, *, padded: bool = False) -> State:
    """Texts z (B, L) on their way; states that were read are kept."""
    canvas = Canvas(z, mask_id, torch.arange(len(z), device=z.device))
    return State(canvas, keeps=True, padded=padded)


def walk(
    draw: Draw, schedule: Schedule, start: Tensor, state: Tensor, times: Tensor, order: Tensor,
    noise: Noise, mask_id: int,
) -> tuple[State, list[Jump]]:  # fmt: skip
    """Take the steps of ancestral sampling along `times`, with the law of `sampling.ancestral`.

    A text whose time stands still takes no step. All inputs are on the host, states are where the
    noise is made. Shapes: start (U, L), state (W,) in 0..U-1, times (W, K + 1) float64 falling from
    1, order (W, L) when each position is revealed (`order_of`).
    """
    device, shares = noise.device or start.device, revealed_shares(schedule, times)
    z, t, masked = sent(start, device), sent(times, device), start == mask_id
    padded = bool((start == PAD).any())
    texts, jumps = texts_from(z[sent(state, device)], mask_id, padded=padded), []
    for k in range(times.shape[1] - 1):
        writes = masked[state] & revealed_between(order, shares[:, k], shares[:, k + 1])
        jump = Jump(z, t[:, k] if k else t.new_ones(len(z)), state, writes, masked)
        run([jump.step(k, noise.uniforms(start.shape[1], Purpose.TOKEN, k))], texts, draw)
        z, masked, state = texts.z, jump.left, torch.arange(len(times))
        jumps.append(jump)
    return texts, jumps


def rollout(
    draw: Draw, schedule: Schedule, start: Tensor, state: Tensor, tau: Tensor | None,
    noise: Noise, mask_id: int, *, steps: int = 1, shared: int = 1, order: Order = "random",
) -> Rollout:  # fmt: skip
    """Go from `start` to z_τ in `steps` steps, then draw all that is left at once (Algorithm 1).

    In `streams`, `steps` are those of the whole path, and the stop is the last one before τ.

    Without τ there is no stop: one step from the start to text ("w/o score decomposition"). With
    `shared` > 1 the members of each group of that many texts stand at the same z_τ, and only their
    last jumps differ.

    Shapes: start (U, L), state (B,), tau (B,) float64, the same within a shared group; all of them
    on the host.
    """
    device, masked = noise.device or start.device, start == mask_id
    written, log_prob = masked[state], None
    jumps: list[Jump] = []
    if tau is None:
        z = sent(start, device)
        last = Jump(z, z.new_ones(len(z), dtype=torch.float64), state, written, masked)
    else:
        own, stop = noise.of_groups(shared), tau[::shared]
        times, turn = _way_to(stop, steps, order, schedule, own.planned, written[::shared])
        way, jumps = walk(draw, schedule, start, state[::shared], times, turn, own, mask_id)
        group, left = torch.arange(len(state)) // shared, jumps[-1].left
        last = Jump(way.z, sent(times[:, -1], device), group, left[group], left)
        log_prob = way.costs.sum(1).repeat_interleave(shared)
    padded = bool((start == PAD).any())
    texts = texts_from(last.z[sent(last.state, device)], mask_id, padded=padded)
    uniforms = noise.uniforms(start.shape[1], Purpose.TOKEN, steps, Purpose.SELECT)
    run([last.step(steps, uniforms)], texts, draw)
    total = texts.costs.sum(1) if log_prob is None else log_prob + texts.costs.sum(1)
    return Rollout(texts.z, (*jumps, last), total, sent(written, device))


# Times and orders


def _way_to(
    tau: Tensor, steps: int, order: Order, schedule: Schedule, noise: Noise, open: Tensor
) -> tuple[Tensor, Tensor]:
    """Times of the walks to τ (W,), one row each, and when each position has its turn (W, L)."""
    turn = order_of(order, noise, open, torch.full((len(tau),), steps), (steps,))
    if order == "streams":
        stops = torch.tensor(masking.interleaved_times(schedule, steps)[:-1], dtype=torch.float64)
        passed = (stops >= tau[:, None]).sum(1, keepdim=True).clamp(min=1)
        # A walk stands still once it has arrived.
        return torch.maximum(stops, stops[passed - 1].view(-1, 1)), turn
    fractions = torch.linspace(0, 1, steps + 1, dtype=torch.float64)
    return 1 + (tau[:, None] - 1) * fractions, turn


def order_of(
    order: Order, noise: Noise, open: Tensor, steps: Tensor, budgets: tuple[int, ...]
) -> Tensor:
    """Numbers (B, L) in [0, 1): a position is revealed once a larger share of all is.

    `open` (B, L) are the positions to write, `steps` (B,) those of the path that a text is on, each
    one of the budgets.
    """
    if order == "streams":
        return masking.interleaved_numbers(open, steps, budgets)
    return noise.uniforms(open.shape[1], Purpose.REVEAL)


def revealed_between(order: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Positions (W, L) whose number lies in [low, high): both (W,)."""
    return (order >= low[:, None]) & (order < high[:, None])


class PathStep(NamedTuple):
    """A step of a path in some number of steps, and the walk to where it starts."""

    times: Tensor  # (U, K + 1) of the walk, K the same for all; it stands still once it arrives
    order: Tensor  # (U, L) when positions are revealed
    t: Tensor  # (U,) where the step starts
    after: Tensor  # (U,) where it ends
    masked: Tensor  # (U, L) positions not written yet where it starts
    revealed: Tensor  # (U, L) those of them that it writes


def path_step(
    budgets: tuple[int, ...], place: Tensor, open: Tensor, noise: Noise, schedule: Schedule,
    order: Order = "random",
) -> PathStep:  # fmt: skip
    """A random step of a random budget, chosen by `place` (U,) in [0, 1), of texts to be written.

    Shapes: open (U, L), the positions to write.
    """
    times, t, after, budget = path_times(budgets, place, schedule, order)
    numbers = order_of(order, noise, open, budget, budgets)
    low, high = revealed_shares(schedule, torch.stack([t, after]))
    revealed = revealed_between(numbers, low, high) & open
    return PathStep(times, numbers, t, after, (numbers >= low[:, None]) & open, revealed)


def path_times(
    budgets: tuple[int, ...], place: Tensor, schedule: Schedule, order: Order = "random"
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
    longest, grids = max(budgets), [time_grid("uniform", steps) for steps in budgets]
    if order == "streams":
        grids = [masking.interleaved_times(schedule, steps) for steps in budgets]
    rows = [grid + [0.0] * (longest + 1 - len(grid)) for grid in grids]
    table = torch.tensor(rows, dtype=torch.float64, device=place.device)[which]
    steps = torch.arange(longest, device=place.device)
    times = table.gather(1, torch.minimum(steps, done[:, None]))
    t, after = table.gather(1, torch.stack([done, done + 1], 1)).unbind(1)
    return times, t, after, budget
