"""RGAS that hardly waits for the GPU: Algorithm 2 on the fast path.

What a tilting step reveals depends on no token, so all of them are settled before the first pass.
What a re-ranking step reveals depends on the candidates taken before: there the CPU waits for two
sizes, once, and queues the rest of the step. The noise, and so the tokens, are those of `guided`;
only the first pass is shared by samples that are alike, where a chain of steps would look again.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from didi_instruct.models.compile import fusing
from didi_instruct.sampling.categorical import draw
from didi_instruct.sampling.chain import Canvas, Chain, Denoiser, Purpose, Samples
from didi_instruct.sampling.chunks import draw_compiled
from didi_instruct.sampling.guidance import (
    FORWARD,
    FORWARD_AND_BACKWARD,
    Guidance,
    Guide,
    check_vocabularies,
    total_score,
)
from didi_instruct.sampling.planned import Plan, can_plan, make_plan
from didi_instruct.sampling.reveals import Reveals
from didi_instruct.sampling.throws import Throws
from didi_instruct.sampling.tilting import fused_tilt, mixture, slopes

ROWS_AT_ONCE = 4096
"""Rows of logits that are made at a time; those that tokens are drawn from are kept."""


class PlacedDenoiser(Protocol):
    """A denoiser that is told positions by their numbers in (B * L), and has padded logits."""

    @property
    def num_tokens(self) -> int:
        """V, the real tokens."""

    def states_at(self, z: Tensor, t: float, place: Tensor) -> tuple[Tensor, Tensor]:
        """What logits are made of, at the positions `place` (R,) of texts z without padding.

        The second part has a row for each position, or one for all.
        """

    def wide_logits(self, states: Tensor, condition: Tensor) -> Tensor:
        """Logits (R, W); the columns beyond the vocabulary are -inf."""


class PlacedGuide(Protocol):
    """A guide that is told positions so, of texts without padding."""

    @property
    def embedding(self) -> Tensor:
        """(V, d) embeddings of the real tokens."""

    @property
    def table(self) -> Tensor:
        """(W, d) the same, with rows of 0 below."""

    def score_texts(self, z: Tensor, t: float) -> Tensor:
        """Log-ratio (B, L) at every position."""

    def gradient(
        self, z: Tensor, t: float, place: Tensor, mixed: Tensor, counted: Tensor
    ) -> Tensor:
        """Gradient (B * L, d) of the log-ratios where `counted` with respect to all embeddings.

        Those at `place` (K,) are `mixed` (K, d).
        """


def can_plan_guided(denoiser: Denoiser, guide: Guide | None, canvas: Canvas) -> bool:
    """Whether `planned_rgas` can replace a chain of steps: one wait for the GPU."""
    placed = hasattr(denoiser, "wide_logits") and hasattr(guide, "score_texts")
    return placed and can_plan(denoiser, canvas)


@dataclass(frozen=True, slots=True)
class Parts:
    """What steps are made with."""

    denoiser: PlacedDenoiser
    guide: PlacedGuide
    chain: Chain
    reveals: Reveals
    guidance: Guidance


def planned_rgas(parts: Parts, *, exact_path: bool) -> Samples:
    """Take all steps of a chain."""
    chain, guidance = parts.chain, parts.guidance
    scales = guidance.scales(chain.steps)
    known = len(scales) if guidance.candidates > 1 else chain.steps
    batch = _Batch(parts)
    for n in range(chain.steps):
        with fusing(True):  # not what a callback does
            if n < known:
                revealed = known_step(batch, n, scales[n] if n < len(scales) else 0.0)
            else:
                revealed = rerank(batch, n)
        if chain.callback is not None:
            chain.tell(parts.reveals.times[n], revealed())
    chain.log_prob += batch.costs.sum(1)
    disc_calls = max(batch.calls.tolist(), default=0)
    return chain.samples(nfe=chain.steps, exact_path=exact_path, disc_calls=disc_calls)


class _Batch:
    """Samples on their way, and what is known of it beforehand."""

    def __init__(self, parts: Parts) -> None:
        """Settle what can be settled; waits for the GPU."""
        self.parts, self.chain = parts, parts.chain
        z = self.chain.z
        self.size, self.length = z.shape
        self.costs = torch.zeros(z.shape, dtype=torch.float64, device=z.device)
        """Log-probability of what is written at each position."""
        self.calls = torch.zeros(self.size, dtype=torch.long, device=z.device)
        self.agenda = _Agenda(make_plan(self.chain, parts.reveals, by_text=False))
        self.throws = Throws(self.chain, parts.guidance.candidates)
        masked = self.chain.masked
        begins = masked.any(1)
        first = begins.long().argmax()[None]
        same = (z == z[first]) & (masked == masked[first])
        alike, masks = torch.stack([(same.all(1) | ~begins).all(), masked[first].sum()]).tolist()
        self.leader = _Leader(first, _first(masked[first].flatten(), masks)) if alike else None

    def texts(self, rows: Tensor) -> "_Texts":
        """What is run for the samples `rows`: the same, or one for all while they are alike."""
        leader = self.leader if len(rows) > 1 else None
        if leader is None and len(rows) == self.size:
            return _Texts(self.chain.z, self.chain.masked, None, None)
        run = rows if leader is None else leader.row
        return _Texts(self.chain.z[run], self.chain.masked[run], rows, leader)

    def logits(self, texts: "_Texts", t: float, place: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Logits (R, W) at positions (R,) of those texts, some rows at a time from a first one."""
        states, condition = self.parts.denoiser.states_at(texts.z, t, place)
        self.chain.passes += FORWARD * len(texts.z) / self.size
        for start in range(0, len(place), ROWS_AT_ONCE):
            here = slice(start, start + ROWS_AT_ONCE)
            own = condition if len(condition) == 1 else condition[here]
            yield start, self.parts.denoiser.wide_logits(states[here], own)

    def draw(self, logits: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens and log-probabilities (R,) from padded logits (R, W)."""
        if not self.chain.settings.as_it_is:
            logits = logits[:, : self.parts.denoiser.num_tokens]
        return self.chain.draw(logits, numbers)

    def asked(self, rows: Tensor, times: int) -> None:
        """Count evaluations of the guide for samples."""
        self.calls.index_add_(0, rows, torch.full_like(rows, times))


@dataclass(frozen=True, slots=True)
class _Leader:
    """A sample that stands for all that have masks, while they are alike."""

    row: Tensor
    """(1,)."""
    masks: Tensor
    """(K,) its masks."""


@dataclass(frozen=True, slots=True)
class _Texts:
    """Texts that are run."""

    z: Tensor
    """(b, L)."""
    masked: Tensor
    """(b, L) positions still to write."""
    rows: Tensor | None
    """The samples that they are run for; None: all of them."""
    leader: _Leader | None
    """Whose text is the only one, if one serves all."""

    def local(self, place: Tensor) -> Tensor:
        """Positions in (b * L), from those in (B * L)."""
        length = self.z.shape[1]
        if self.leader is not None:
            return place % length
        if self.rows is None:
            return place
        return torch.searchsorted(self.rows, place // length) * length + place % length


# Tilting


def known_step(batch: _Batch, n: int, h: float) -> Callable[[], Tensor]:
    """Draw tokens from tilted logits where the plan says; return what tells where (B, L)."""
    chain, plan, t = batch.chain, batch.agenda.plan, batch.parts.reveals.times[n]
    if len(place := plan.places[n]):
        texts = batch.texts(plan.rows[n])
        if h == 0:
            logits = _join([part for _, part in batch.logits(texts, t, texts.local(place))])
        else:
            logits = _tilted(batch, texts, n, h)
            batch.asked(plan.rows[n], 1)
        numbers = chain.uniforms(Purpose.TOKEN, n).flatten()[place]
        token, log_p = batch.draw(logits, numbers)
        chain.put_at(place, token, log_p)
        batch.costs.view(-1).index_copy_(0, place, log_p.double())
        batch.leader = None
    return lambda: plan.turns == n


def _tilted(batch: _Batch, texts: _Texts, n: int, h: float) -> Tensor:
    """Logits + h * gradient of the reward where step n writes: Eq. (10), (R, W).

    As in `guided`, the denoiser's output is needed at all masks of those samples. The ones to be
    written are the first of them: a slice, not a copy.
    """
    guide, t = batch.parts.guide, batch.parts.reveals.times[n]
    check_vocabularies(len(guide.embedding), batch.parts.denoiser.num_tokens)
    local = texts.local(batch.agenda.plan.places[n])
    if texts.leader is None:
        masks, rows, size = texts.local(batch.agenda.masks(n)), None, len(local)
    else:  # its masks are those of all, in its own order
        masks = texts.leader.masks
        rows, size = torch.searchsorted(masks, local), len(masks)
    kept, mixed = [], []
    for start, logits in batch.logits(texts, t, masks):
        mixed.append(mixture(logits, guide.table))
        if start < size:
            kept.append(logits[: size - start])
    logits = _join(kept) if rows is None else _join(kept)[rows]
    gradient = guide.gradient(texts.z, t, masks, torch.cat(mixed), texts.masked)
    batch.chain.passes += FORWARD_AND_BACKWARD * len(texts.z) / batch.size
    dtype = torch.promote_types(logits.dtype, torch.float32)
    slope = slopes(gradient[local], guide.table, dtype)
    strength, clamp = (slope.new_full((), x) for x in (h, batch.parts.guidance.clamp))
    return fused_tilt(logits, slope, strength, clamp)


class _Agenda:
    """Where the masks are at each step whose reveals depend on no token."""

    def __init__(self, plan: Plan) -> None:
        """Waits for the GPU."""
        self.plan, (batch, self.length) = plan, plan.turns.shape
        counts = torch.zeros(
            batch, len(plan.places) + 1, dtype=torch.long, device=plan.turns.device
        )
        counts.scatter_add_(1, plan.turns + 1, torch.ones_like(plan.turns))
        counts = counts[:, 1:]
        left = counts.flip(1).cumsum(1).flip(1)
        self._active = counts > 0
        self._sizes: list[int] = (left * self._active).sum(0).tolist()
        self._order = torch.cat(plan.places)
        self._starts = [0, *itertools.accumulate(len(place) for place in plan.places)]

    def masks(self, n: int) -> Tensor:
        """All masks of the samples that step n writes in, beginning with those that it writes."""
        masks = self._order[self._starts[n] :]
        if self._sizes[n] < len(masks):
            keep = self._active[:, n][masks // self.length]
            masks = masks[_first(keep, self._sizes[n])]
        return masks


# Re-ranking


def rerank(batch: _Batch, n: int) -> Callable[[], Tensor]:
    """Take one of M next states of each sample by its score after the step: Eq. (11).

    Return what tells the positions (B, L) that it wrote. Every candidate draws a token wherever any
    of them reveals one, of which the sums are made once, and forgets those that it does not reveal:
    so only two sizes have to be known.
    """
    chain, num = batch.chain, batch.parts.guidance.candidates
    reveal = _reveal(batch, n)
    either = reveal.any(0)
    ran = either.any(1)
    size, active = torch.stack([either.sum(), ran.sum()]).tolist()  # the CPU waits here
    if size == 0:
        return lambda: either
    place, rows = _first(either.flatten(), size), _first(ran, active)
    hit = reveal.flatten(1)[:, place]
    token, log_p = _tokens(batch, n, batch.texts(rows), place, hit)
    token, log_p = token.masked_fill(~hit, chain.canvas.mask_id), log_p.masked_fill(~hit, 0.0)
    z = chain.z.flatten().repeat(num, 1).index_copy_(1, place, token).view_as(reveal)
    costs = batch.costs.flatten().repeat(num, 1).index_copy_(1, place, log_p).view_as(reveal)

    choice = torch.zeros_like(batch.calls).index_copy_(0, rows, _choose(batch, n, z, rows))
    chosen = (choice, torch.arange(batch.size, device=choice.device))
    chain.z, batch.costs = z[chosen], costs[chosen]
    if chain.callback is not None:
        confidence = batch.costs.exp()
        chain.confidence = torch.where(reveal[chosen], confidence, chain.confidence)
    batch.asked(rows, num)
    batch.leader = None
    return lambda: reveal[chosen]


def _reveal(batch: _Batch, n: int) -> Tensor:
    """(M, B, L) positions that each candidate writes."""
    reveals, masked = batch.parts.reveals, batch.chain.masked
    if reveals.turns is not None:
        return (masked & (reveals.turns == n)).expand(batch.throws.num, -1, -1)
    return masked & (batch.throws(Purpose.REVEAL, n) < reveals.chances[n])


def _tokens(
    batch: _Batch, n: int, texts: _Texts, place: Tensor, hit: Tensor
) -> tuple[Tensor, Tensor]:
    """Tokens of all candidates at positions (U,), and their log-probabilities: (M, U) each.

    They count where `hit` (M, U).
    """
    numbers = batch.throws(Purpose.TOKEN, n).flatten(1)[:, place]
    tokens, log_ps = place.new_zeros(numbers.shape), torch.zeros_like(numbers)
    t, which = batch.parts.reveals.times[n], torch.arange(len(place), device=place.device)
    for start, logits in batch.logits(texts, t, texts.local(place)):
        here = slice(start, start + len(logits))
        own, row = numbers[:, here], which[: len(logits)].expand(len(numbers), -1)
        if batch.chain.settings.as_it_is:
            drawn = draw_compiled(logits, own.flatten(), row.flatten())
            tokens[:, here], log_ps[:, here] = (found.view_as(own) for found in drawn)
        else:  # laws over the vocabulary are dear: worth a wait for where they are needed
            chosen = hit[:, here].nonzero(as_tuple=True)
            drawn = batch.draw(logits[row[chosen]], own[chosen])
            tokens[:, here].index_put_(chosen, drawn[0])
            log_ps[:, here].index_put_(chosen, drawn[1])
    return tokens, log_ps


def _choose(batch: _Batch, n: int, z: Tensor, rows: Tensor) -> Tensor:
    """(b,) which of the candidates z (M, B, L) the samples `rows` (b,) take."""
    guidance, times = batch.parts.guidance, batch.parts.reveals.times
    z = z if len(rows) == batch.size else z[:, rows]
    flat = z.flatten(0, 1)
    ratio = batch.parts.guide.score_texts(flat, times[n + 1])
    batch.chain.passes += FORWARD * len(flat) / batch.size
    chain = batch.chain
    written = (chain.open if len(rows) == batch.size else chain.open[rows]).repeat(len(z), 1)
    scores = total_score(ratio, flat, written, chain.canvas.mask_id, guidance.score)
    scores = scores.view(len(z), -1).T
    if guidance.select == "best":
        return scores.argmax(1)
    return draw(scores.log_softmax(1), batch.throws.select(n)[rows])


# Helpers


def _first(where: Tensor, count: int) -> Tensor:
    """The `count` places (count,) at which `where` (N,) is true, in order, without a wait."""
    return (~where).byte().argsort(stable=True)[:count]


def _join(parts: list[Tensor]) -> Tensor:
    """Rows as one tensor; a copy only if there are several."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)
