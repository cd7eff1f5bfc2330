"""RGAS, the reward-guided ancestral sampler: Algorithm 2.

The first steps tilt the logits along the gradient of a discriminator's reward (Eq. 10), the others
draw several candidates and keep one by its reward (Eq. 11). High reward means teacher-like.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from didi_instruct.config.model import Order
from didi_instruct.errors import UserError
from didi_instruct.models.compile import fusing
from didi_instruct.models.network import Mixture
from didi_instruct.process.schedule import Schedule
from didi_instruct.sampling import guide as guides
from didi_instruct.sampling import plan as plans
from didi_instruct.sampling.ancestral import Draw, ancestral, plain, run
from didi_instruct.sampling.denoiser import Denoiser
from didi_instruct.sampling.draw import Purpose, draw_tokens, invert
from didi_instruct.sampling.guide import Guidance, Guide
from didi_instruct.sampling.plan import Grid, Step
from didi_instruct.sampling.state import Samples, State

MIXED_ROWS = 4096  # of probabilities over the vocabulary that are mixed at a time


@torch.no_grad()
def rgas(
    denoiser: Denoiser,
    schedule: Schedule,
    guide: Guide | None,
    state: State,
    *,
    steps: int,
    guidance: Guidance | None = None,
    grid: Grid | None = None,
    order: Order = "random",
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
    if not reranks and not any(scales):
        return ancestral(denoiser, schedule, state, steps=steps, grid=grid, order=order)
    if guide is None:
        raise UserError(
            "RGAS needs a discriminator, and this model has none: distil with --method didi, "
            "or use another sampler."
        )
    if guide.num_tokens != denoiser.num_tokens:
        raise UserError(
            f"The discriminator knows {guide.num_tokens} tokens and the denoiser "
            f"{denoiser.num_tokens}: use one that was trained for this model."
        )
    # The law of a guided step is not the denoiser's, whose code could be summed out.
    state.settings, state.steps = replace(state.settings, measure_path=False), steps
    turn, times = plans.reveal_turns(schedule, state.noise, state.open, steps, grid, order)
    turn = torch.where(state.masked, turn, -1)
    plan, draw = plans.make_plan(state, turn, times, begun=state.canvas.masks > 1), plain(denoiser)
    if any(scales):
        plan = read_all_masks(plan, turn, scales)
        draw = tilting(denoiser, guide, scales, guidance)
    known = len(scales) if reranks else steps
    run(plan[:known], state, draw)
    if reranks:
        chances = plans.reveal_chances(schedule, times) if order == "random" else None
        search = Search(denoiser, guide, state, guidance, times, turn, chances)
        search.run(range(known, steps), plan[:known])
    return state.samples(exact_path=state.measured and not reranks)


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
            reads = plans.first_true(here, sizes[n] // running[n])
            row = torch.searchsorted(reads, step.writes % length)
            found[n] = replace(step, reads=reads, row=row)
            continue
        if sizes[n] < len(masks):
            masks = masks[plans.first_true(active[:, n][masks // length], sizes[n])]
        found[n] = replace(step, reads=plans.local_positions(masks, step.states, length))
    return found


def tilting(denoiser: Denoiser, guide: Guide, scales: list[float], guidance: Guidance) -> Draw:
    """Draw from logits + h * gradient of the reward, Eq. (10), with the h of each step.

    The reward of a text is the sum of the log-ratios over its masks, or their mean, Eq. (6); each
    mask shows the guide the average embedding under the denoiser. A gradient is taken where tokens
    are drawn.
    """
    otherwise, clamp = plain(denoiser), guidance.clamp

    @fusing(denoiser.compiled)
    def draw(state: State, step: Step) -> tuple[Tensor, Tensor]:
        h = scales[step.index] if step.index < len(scales) else 0.0
        if h == 0:
            return otherwise(state, step)
        reads, count, start = state.reads(step.states), len(step.writes), 0
        coded = reads if step.codes is None else state.reads(step.states, step.codes)
        kept: list[Tensor] = []
        mixed: list[Tensor] = []
        for logits in denoiser.logits_in_parts(coded, step.t, step.reads):
            vectors = guide.vectors(logits.shape[1])
            parts = torch.split(logits, MIXED_ROWS)
            mixed += [guides.mixed_vectors(part, vectors) for part in parts]
            # Those that are written come first, unless one text stands for all.
            kept.append(logits if step.row is not None else logits[: max(0, count - start)])
            start += len(logits)
        counted = state.masked if step.states is None else state.masked[step.states]
        if guidance.reward == "mean":
            counted = counted / counted.sum(1, keepdim=True).clamp(min=1).double()
        mixture = Mixture(step.reads, torch.cat(mixed))
        gradient = guide.gradient(reads, step.time, mixture, counted)
        state.count(len(reads), guides.FORWARD + guides.FORWARD_AND_BACKWARD)
        state.count_calls(step.writes // state.z.shape[1], 1)
        logits = kept[0] if len(kept) == 1 else torch.cat(kept)
        row = slice(0, count) if step.row is None else step.row
        dtype = torch.promote_types(logits.dtype, torch.float32)
        slope = guides.slopes(gradient[row], vectors, dtype)
        strength, limit = (slope.new_full((), x) for x in (h, clamp))
        logits = guides.fused_tilt(logits[row], slope, strength, limit)
        return draw_tokens(logits[:, : denoiser.num_tokens], step.u, None, state.settings)

    return draw


# Re-ranking


@dataclass(frozen=True, slots=True)
class Search:
    """Re-ranking steps: each draws several next states and keeps one of every text, Eq. (11)."""

    denoiser: Denoiser
    guide: Guide
    state: State
    guidance: Guidance
    times: list[float]
    turn: Tensor  # (B, L) step that reveals each position, where chance has no say in it
    chances: list[float] | None  # that each step reveals a mask; None: it has its turn

    def run(self, steps: range, before: list[Step]) -> None:
        """Take the steps that come after those `before`."""
        state, count, length = self.state, self.guidance.candidates, self.state.z.shape[1]
        coins, numbers = (
            (each for some in state.noise.of_steps(purpose, steps, length, count) for each in some)
            for purpose in (Purpose.REVEAL, Purpose.TOKEN)
        )
        # With codes, or once something is written, texts are no longer alike.
        begun = state.canvas.masks > 1 or any(len(step.writes) for step in before)
        for n in steps:
            with fusing(self.denoiser.compiled):  # not in the callback
                begun |= self.step(n, next(coins), next(numbers), begun=begun)
            state.report(self.times[n])

    def step(self, n: int, coins: Tensor, numbers: Tensor, *, begun: bool) -> bool:
        """Take step n by numbers (M, B, L) of its candidates; return whether any wrote something.

        Every candidate draws a token wherever any of them reveals one, from one pass, and forgets
        those that it does not reveal: so the host waits for two sizes alone.
        """
        state, num = self.state, self.guidance.candidates
        if self.chances is None:
            reveal = (state.masked & (self.turn == n)).expand(num, -1, -1)
        else:
            reveal = state.masked & (coins < self.chances[n])
        either = reveal.any(0)
        ran = either.any(1)
        size, active = torch.stack([either.sum(), ran.sum()]).tolist()  # the host waits here
        if not size:
            return False
        at, rows = plans.first_true(either.flatten(), size), plans.first_true(ran, active)
        shared = None if begun else plans.shared_positions(state, at, rows)
        numbers, hit = numbers.flatten(1)[:, at], reveal.flatten(1)[:, at]
        step = plans.make_step(state, n, self.times[n], at, rows, numbers, shared)
        token, log_p = self._draw(step, hit)
        token, log_p = token.masked_fill(~hit, state.mask_id), log_p.masked_fill(~hit, 0.0)
        z = state.z.flatten().repeat(num, 1).index_copy_(1, at, token).view_as(reveal)
        costs = state.costs.flatten().repeat(num, 1).index_copy_(1, at, log_p).view_as(reveal)
        taken = rows.new_zeros(len(state.z)).index_copy_(0, rows, self._choose(n, z, rows))
        chosen = taken, torch.arange(len(taken), device=taken.device)
        state.z, state.costs = z[chosen], costs[chosen]
        state.count_calls(rows, num)
        return True

    def _draw(self, step: Step, hit: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens and log-probabilities (M, N) by numbers (M, N), wherever they count, `hit`."""
        reads, numbers = self.state.reads(step.states, step.codes), step.u
        self.state.count(len(reads), guides.FORWARD)
        tokens, log_ps = step.writes.new_zeros(numbers.shape), torch.zeros_like(numbers)
        rows = torch.arange(len(step.writes), device=hit.device) if step.row is None else step.row
        start = 0
        for logits in self.denoiser.logits_in_parts(reads, step.t, step.reads):
            if not self.state.settings.restricted and step.row is None:
                here = slice(start, start + len(logits))
                own, row = numbers[:, here], rows[: len(logits)].expand(len(numbers), -1)
                drawn = draw_tokens(logits, own.flatten(), row.flatten())
                tokens[:, here], log_ps[:, here] = (found.view_as(own) for found in drawn)
            else:  # laws over the vocabulary are dear: worth a wait for where they are needed
                inside = hit & (rows >= start) & (rows < start + len(logits))
                chosen = inside.nonzero(as_tuple=True)
                row = rows[chosen[1]] - start
                real = logits[:, : self.denoiser.num_tokens]
                drawn = draw_tokens(real, numbers[chosen], row, self.state.settings)
                tokens[chosen], log_ps[chosen] = drawn
            start += len(logits)
        return tokens, log_ps

    def _choose(self, n: int, z: Tensor, rows: Tensor) -> Tensor:
        """(A,) which of the candidates z (M, B, L) the texts `rows` (A,) take.

        Their score is a sum of log-ratios over the positions that are written, or their average
        over masks: given tokens, and ends behind a text, a discriminator has not learnt to judge.
        """
        state, written = self.state, self.state.open
        if len(rows) < len(state.z):
            z, written = z[:, rows], written[rows]
        flat = z.flatten(0, 1)
        ratio = self.guide.log_ratio(state.as_reads(flat), self.times[n + 1]).double()
        state.count(len(flat), guides.FORWARD)
        if self.guidance.score == "sum":
            scores = ratio.masked_fill(~written.repeat(len(z), 1), 0.0).sum(1)
        else:
            masked = flat == state.mask_id
            scores = ratio.masked_fill(~masked, 0.0).sum(1) / masked.sum(1).clamp(min=1)
        scores = scores.view(len(z), -1).T
        if self.guidance.select == "best":
            return scores.argmax(1)
        select = state.noise.uniforms(1, Purpose.SELECT, n).squeeze(1)
        return invert(scores.log_softmax(1), select[rows])
