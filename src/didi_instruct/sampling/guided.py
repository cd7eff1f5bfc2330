"""RGAS, the reward-guided ancestral sampler: Algorithm 2.

The first steps tilt the logits along the gradient of a discriminator's reward (Eq. 10), the others
draw several candidates and keep one by its reward (Eq. 11). High reward means teacher-like.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from didi_instruct.config.model import Order
from didi_instruct.errors import UserError
from didi_instruct.models.compile import fusing
from didi_instruct.models.network import Mixture
from didi_instruct.process.schedule import Schedule
from didi_instruct.sampling.ancestral import Draw, plain, run
from didi_instruct.sampling.denoiser import Denoiser
from didi_instruct.sampling.draw import (
    NOISE_ELEMENTS,
    PLAIN,
    DrawOptions,
    Noise,
    Purpose,
    draw_tokens,
    invert,
)
from didi_instruct.sampling.guide import (
    FORWARD,
    FORWARD_AND_BACKWARD,
    Guidance,
    Guide,
    fused_tilt,
    mixed_vectors,
    slopes,
    total_score,
)
from didi_instruct.sampling.plan import (
    Grid,
    Reveals,
    Step,
    first_true,
    local_positions,
    make_plan,
    step_codes,
)
from didi_instruct.sampling.state import Callback, Canvas, Reads, Samples, State

MIXED_ROWS = 4096
"""Rows of probabilities over the vocabulary that are mixed at a time."""


@torch.no_grad()
def rgas(
    denoiser: Denoiser,
    schedule: Schedule,
    guide: Guide | None,
    canvas: Canvas,
    *,
    steps: int,
    settings: DrawOptions = PLAIN,
    guidance: Guidance | None = None,
    grid: Grid | None = None,
    order: Order = "random",
    callback: Callback | None = None,
) -> Samples:
    """Algorithm 2: ancestral sampling whose early steps tilt and whose late steps re-rank.

    Temperature, top-p and top-k apply after tilting. With h = 0 and M = 1 it is `ancestral`, bit
    for bit (but for rounding where passes are captured), and needs no guide. Tilting depends on
    the state alone, so its path has an exact probability; re-ranking has none (`log_prob` is
    None). `disc_calls` is that of the sample with the most.
    """
    guidance = guidance or Guidance()
    scales = guidance.scales(steps)
    reranks = guidance.candidates > 1 and len(scales) < steps
    guided = reranks or any(scales)
    # The law of a guided step is not the denoiser's, whose code could be summed out.
    known = not reranks and (canvas.masks == 1 or (not guided and settings.measure_path))
    settings = replace(settings, measure_path=known)
    if guided and guide is None:
        raise UserError(
            "RGAS needs a discriminator, and this model has none: distil with --method didi, "
            "or use another sampler."
        )
    if guided and guide is not None:
        check_vocabularies(guide, denoiser)
    state, noise = State(canvas, watched=callback is not None), canvas.noise(settings.seed)
    reveals = Reveals.of(schedule, state.open, steps, grid, order)
    turn = torch.where(state.masked, reveals.turn(noise, state.z.shape[1]), -1)
    plan = make_plan(state, turn, reveals.times, noise, begun=guided and canvas.masks > 1)
    calls = torch.zeros(len(state.z), dtype=torch.long, device=state.z.device)
    draw = plain(denoiser, settings)
    if any(scales):
        assert guide is not None
        plan = read_all_masks(plan, turn, scales)
        draw = tilted(denoiser, guide, settings, guidance, scales, calls)
    known_steps = len(scales) if reranks else steps
    run(plan[:known_steps], state, draw, callback, steps)
    if reranks:
        assert guide is not None
        search = Search(denoiser, guide, state, noise, settings, guidance, reveals, calls)
        search.run(
            range(known_steps, steps),
            callback,
            begun=any(len(step.writes) for step in plan[:known_steps]),
        )
    return state.samples(nfe=steps, exact_path=known, disc_calls=max(calls.tolist(), default=0))


def check_vocabularies(guide: Guide, denoiser: Denoiser) -> None:
    """Refuse a guide that knows other tokens than the denoiser."""
    if guide.num_tokens != denoiser.num_tokens:
        raise UserError(
            f"The discriminator knows {guide.num_tokens} tokens and the denoiser "
            f"{denoiser.num_tokens}: use one that was trained for this model."
        )


# Tilting


def read_all_masks(plan: list[Step], turn: Tensor, scales: list[float]) -> list[Step]:
    """Steps that tilt read every mask of their texts, those that they write first.

    The reward of a text depends on the average embedding at each of its masks. Waits for a GPU
    once. Shapes: turn (B, L), -1 where nothing is to write.
    """
    length, count = turn.shape[1], len(scales)
    number = torch.arange(count, device=turn.device)
    active = (turn[..., None] == number).any(1)
    left = (turn[..., None] >= number).sum(1)
    sizes, running = torch.stack([(left * active).sum(0), active.sum(0)]).tolist()
    order, start = torch.cat([step.writes for step in plan]), 0
    found = list(plan)
    for n, step in enumerate(plan[:count]):
        masks, start = order[start:], start + len(step.writes)
        if not len(step.writes) or not scales[n]:
            continue
        if step.row is not None:  # one text stands for all
            assert step.states is not None
            here = turn[step.states[0]] >= 0
            reads = first_true(here, sizes[n] // running[n])
            row = torch.searchsorted(reads, step.writes % length)
            found[n] = replace(step, reads=reads, row=row)
            continue
        if sizes[n] < len(masks):
            masks = masks[first_true(active[:, n][masks // length], sizes[n])]
        found[n] = replace(step, reads=local_positions(masks, step.states, length))
    return found


def tilted(
    denoiser: Denoiser,
    guide: Guide,
    options: DrawOptions,
    guidance: Guidance,
    scales: list[float],
    calls: Tensor,
) -> Draw:
    """Draw from logits + h * gradient of the reward, Eq. (10), and count the guide's `calls` (B,).

    The reward of a text is the sum of the log-ratios over its masks, each of which shows the guide
    the average embedding under the denoiser. A gradient is taken where tokens are drawn.
    """
    otherwise = plain(denoiser, options)

    def draw(state: State, step: Step) -> tuple[Tensor, Tensor]:
        h = scales[step.index] if step.index < len(scales) else 0.0
        if h == 0:
            return otherwise(state, step)
        with fusing(denoiser.compiled):
            return draw_tilted(state, step, h)

    def draw_tilted(state: State, step: Step, h: float) -> tuple[Tensor, Tensor]:
        reads, count, start = state.reads(step.states), len(step.writes), 0
        kept: list[Tensor] = []
        mixed: list[Tensor] = []
        for logits in denoiser.logits_in_parts(coded_reads(state, step), step.t, step.reads):
            vectors = guide.vectors(logits.shape[1])
            mixed += [mixed_vectors(part, vectors) for part in torch.split(logits, MIXED_ROWS)]
            # Those that are written come first, unless one text stands for all.
            kept.append(logits if step.row is not None else logits[: max(0, count - start)])
            start += len(logits)
        counted = state.masked if step.states is None else state.masked[step.states]
        mixture = Mixture(step.reads, torch.cat(mixed))
        gradient = guide.gradient(reads, step.time, mixture, counted)
        state.count(len(reads), FORWARD + FORWARD_AND_BACKWARD)
        calls.add_(torch.zeros_like(calls).index_fill_(0, step.writes // state.z.shape[1], 1))
        logits = kept[0] if len(kept) == 1 else torch.cat(kept)
        row = slice(0, count) if step.row is None else step.row
        slope = slopes(gradient[row], vectors, torch.promote_types(logits.dtype, torch.float32))
        strength, clamp = (slope.new_full((), x) for x in (h, guidance.clamp))
        logits = fused_tilt(logits[row], slope, strength, clamp)
        return draw_tokens(logits[:, : denoiser.num_tokens], step.u, None, options)

    return draw


def coded_reads(state: State, step: Step) -> Reads:
    """Texts of a step as the denoiser reads them: their masks carry a code if there are several."""
    reads = state.reads(step.states)
    if step.codes is None:
        return reads
    codes = step.codes if step.states is None else step.codes[step.states]
    return reads.with_codes(state.mask_id, codes)


# Re-ranking


@dataclass(frozen=True, slots=True)
class Search:
    """Re-ranking steps: each draws several next states and keeps one of every text, Eq. (11)."""

    denoiser: Denoiser
    guide: Guide
    state: State
    noise: Noise
    options: DrawOptions
    guidance: Guidance
    reveals: Reveals
    calls: Tensor
    """(B,) evaluations of the guide so far."""

    def run(self, steps: range, callback: Callback | None, *, begun: bool) -> None:
        """Take the steps; `begun`: something is written, so texts are no longer alike."""
        count, length = self.guidance.candidates, self.state.z.shape[1]
        coins = candidate_uniforms(self.noise, Purpose.REVEAL, steps, count, length)
        numbers = candidate_uniforms(self.noise, Purpose.TOKEN, steps, count, length)
        for n in steps:
            before = self.state.z
            with fusing(self.denoiser.compiled):  # not in the callback
                begun |= self.step(n, next(coins), next(numbers), begun=begun)
            if callback is not None:
                at = (self.state.z != before).flatten().nonzero().squeeze(1)
                callback(self.state.snapshot(n, steps.stop, self.reveals.times[n], at))

    def step(self, n: int, coins: Tensor, numbers: Tensor, *, begun: bool) -> bool:
        """Take step n by numbers (M, B, L) of its candidates; return whether any wrote something.

        Every candidate draws a token wherever any of them reveals one, from one pass, and forgets
        those that it does not reveal: so the host waits for two sizes alone.
        """
        state, num = self.state, self.guidance.candidates
        if self.reveals.turns is not None:
            reveal = (state.masked & (self.reveals.turns == n)).expand(num, -1, -1)
        else:
            reveal = state.masked & (coins < self.reveals.chances[n])
        either = reveal.any(0)
        ran = either.any(1)
        size, active = torch.stack([either.sum(), ran.sum()]).tolist()  # the host waits here
        at, rows = first_true(either.flatten(), size), first_true(ran, active)
        if not size:
            return False
        hit = reveal.flatten(1)[:, at]
        step = self._reading(n, at, rows, begun=begun)
        token, log_p = self._draw(step, hit, numbers.flatten(1)[:, at])
        token, log_p = token.masked_fill(~hit, state.mask_id), log_p.masked_fill(~hit, 0.0)
        z = state.z.flatten().repeat(num, 1).index_copy_(1, at, token).view_as(reveal)
        costs = state.costs.flatten().repeat(num, 1).index_copy_(1, at, log_p).view_as(reveal)
        taken = torch.zeros_like(self.calls).index_copy_(0, rows, self._choose(n, z, rows))
        chosen = taken, torch.arange(len(taken), device=taken.device)
        state.z, state.costs = z[chosen], costs[chosen]
        self.calls.index_add_(0, rows, torch.full_like(rows, num))
        return True

    def _reading(self, n: int, at: Tensor, rows: Tensor, *, begun: bool) -> Step:
        """The step as its one pass reads it: texts that are alike are read once."""
        state, time, row = self.state, self.reveals.times[n], None
        length = state.z.shape[1]
        states, reads = (None if len(rows) == len(state.z) else rows), at
        if not begun and len(rows) > 1 and state.canvas.masks == 1 and state.are_alike():
            columns = torch.zeros_like(state.open[0]).index_fill_(0, at % length, True)
            states, reads = rows[:1], columns.nonzero().squeeze(1)
            row = (columns.cumsum(0) - 1)[at % length]
        else:
            reads = local_positions(at, states, length)
        codes = step_codes(self.noise, n, state.canvas.masks)
        return Step(n, time, time, states, reads, at, at, row, codes=codes)

    def _draw(self, step: Step, hit: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens of all candidates at U positions by numbers (M, U), and log-probabilities."""
        reads = coded_reads(self.state, step)
        self.state.count(len(reads), FORWARD)
        tokens, log_ps = step.writes.new_zeros(numbers.shape), torch.zeros_like(numbers)
        rows = torch.arange(len(step.writes), device=hit.device) if step.row is None else step.row
        start = 0
        for logits in self.denoiser.logits_in_parts(reads, step.t, step.reads):
            if not self.options.restricted and step.row is None:
                here = slice(start, start + len(logits))
                own, row = numbers[:, here], rows[: len(logits)].expand(len(numbers), -1)
                drawn = draw_tokens(logits, own.flatten(), row.flatten())
                tokens[:, here], log_ps[:, here] = (found.view_as(own) for found in drawn)
            else:  # laws over the vocabulary are dear: worth a wait for where they are needed
                inside = hit & (rows >= start) & (rows < start + len(logits))
                chosen = inside.nonzero(as_tuple=True)
                row = rows[chosen[1]] - start
                real = logits[:, : self.denoiser.num_tokens]
                drawn = draw_tokens(real, numbers[chosen], row, self.options)
                tokens[chosen], log_ps[chosen] = drawn
            start += len(logits)
        return tokens, log_ps

    def _choose(self, n: int, z: Tensor, rows: Tensor) -> Tensor:
        """(b,) which of the candidates z (M, B, L) the texts `rows` (b,) take."""
        state, guidance = self.state, self.guidance
        z = z if len(rows) == len(state.z) else z[:, rows]
        flat = z.flatten(0, 1)
        ratio = self.guide.log_ratio(state.as_reads(flat), self.reveals.times[n + 1])
        state.count(len(flat), FORWARD)
        written = state.open if len(rows) == len(state.z) else state.open[rows]
        written = written.repeat(len(z), 1)
        scores = total_score(ratio, flat, written, state.mask_id, guidance.score)
        scores = scores.view(len(z), -1).T
        if guidance.select == "best":
            return scores.argmax(1)
        select = self.noise.uniforms(1, Purpose.SELECT, n).squeeze(1)
        return invert(scores.log_softmax(1), select[rows])


def candidate_uniforms(
    noise: Noise, purpose: Purpose, steps: range, num: int, count: int
) -> Iterator[Tensor]:
    """Numbers (M, B, count) of the candidates of each step; those of the first are `ancestral`'s.

    The others add their number to the stream. Those of many steps are made at once.
    """
    device = noise.samples.device
    each = max(1, NOISE_ELEMENTS // max(1, num * len(noise.samples) * count))
    which = torch.arange(1, num, device=device)[:, None, None]
    for first in range(steps.start, steps.stop, each):
        some = torch.arange(first, min(first + each, steps.stop), device=device)[:, None, None]
        made = [noise.uniforms(count, purpose, some)[:, None]]
        made.append(noise.uniforms(count, purpose, some[:, None], which))
        yield from torch.cat(made, 1)
