"""DPLM's decoder: tokens are proposed everywhere, and the least certain positions masked again.

The decoder of the diffusion protein language model (Wang et al. 2024), there called
`reparam-uncond-deterministic-linear` with `gumbel_argmax`.
"""

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from didi_instruct.errors import UserError
from didi_instruct.process.masking import with_code
from didi_instruct.sampling.confidence import rank
from didi_instruct.sampling.denoiser import Denoiser
from didi_instruct.sampling.draw import GREEDY, DrawOptions, Purpose, in_parts, law_of
from didi_instruct.sampling.plan import (
    Step,
    check_steps,
    flat_positions,
    make_step,
    shared_positions,
)
from didi_instruct.sampling.state import Samples, State

Proposal = Literal["sample", "argmax"]

GUARD_TOP_P = 0.95
"""Of the law that the repetition guard draws again from."""
_AGAIN = 1  # number of the guard's stream of noise within a step
_NO_NUMBERS = torch.empty(0)  # one number does not draw a token here, but one for each of V


@torch.no_grad()
def dplm(
    denoiser: Denoiser,
    state: State,
    *,
    steps: int,
    draw: Proposal = "sample",
    guard: float | None = None,
) -> Samples:
    """Propose tokens for all masks in each step, and mask the positions of the lowest scores again.

    Of the N positions of a text that are written, floor(N (1 - s/T)) are masked after step s of T;
    given ones neither change nor count. A mask that is not masked again keeps its proposal, and a
    token once kept is not rewritten, but may be masked. So T > N has a meaning: masks move, and
    tokens are revised. A step that finds nothing masked takes no pass.

    A proposal is the Gumbel-max of the logits: the largest of logits + temperature * g, g Gumbel
    noise, which is a sample at that temperature (top-k and top-p leave tokens out beforehand).
    `argmax`, as temperature 0, has no noise. The score of a position is the log-softmax of these
    noisy logits at their largest. All scores are fresh in each step: a visible position too gets
    one, from a draw of its own, even if the token drawn there is not the one that it keeps. Among
    equal scores the leftmost is masked first.

    `guard`: in a text with a token at more than this share of the N positions, counted over kept
    tokens and proposals (in DPLM over the whole row, special tokens included), the positions of all
    such tokens are masked, those kept before too, and drawn again by an extra pass: with top-p
    0.95, at the temperature, or at 1 where proposals are greedy. It is drawn once, whatever comes.
    `nfe` counts the guard's passes of the text that had the most.

    There is no schedule: the denoiser is told the share of the text that is masked. A path has no
    known probability.
    """
    check_steps(steps)
    if guard is not None and not 0 < guard < 1:
        raise UserError(f"guard is {guard}: a share of a text is more than 0 and less than 1.")
    state.steps = steps
    settings = replace(state.settings, temperature=0.0) if draw == "argmax" else state.settings
    count, written = state.open.sum(1, keepdim=True), flat_positions(state.open)
    extra = torch.zeros_like(count[:, 0])
    for n in range(steps):
        masked, left = state.masked, count * (steps - n - 1) // steps
        if masked.any():
            texts, costs, scores = _propose(denoiser, state, settings, n, masked, left)
            if guard is not None:
                again = _repeated(texts, state, guard * count) & masked.any(1, keepdim=True)
                extra += again.any(1)
                _draw_again(denoiser, state, settings, n, again, (texts, costs, scores))
            remask = rank(-scores, state.open) < left
            texts, costs = texts.masked_fill(remask, state.mask_id), costs.masked_fill(remask, 0.0)
            state.write(written, texts.view(-1)[written], costs.view(-1)[written])
        state.report(1 - n / steps)
    return state.samples(steps + max(extra.tolist(), default=0), exact_path=False)


def _propose(
    denoiser: Denoiser, state: State, settings: DrawOptions, n: int, masked: Tensor, left: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Texts without masks, log-probabilities of their tokens, and scores, all (B, L).

    Scores of visible positions are needed where masks will be `left` (B, 1).
    """
    running = masked.any(1)
    needed = masked | (state.open & running[:, None] & (left > 0))
    at, rows = flat_positions(needed), running.nonzero().squeeze(1)
    shared = shared_positions(state, at, rows) if n == 0 else None
    step = make_step(state, n, 1.0, at, rows, _NO_NUMBERS, shared)
    token, log_p, score = _draw(denoiser, state, settings, step, state.z)
    hidden = masked.view(-1)[at]
    texts, costs = state.z.clone(), state.costs.clone()
    scores = torch.full_like(costs, torch.inf)
    texts.view(-1)[at[hidden]], costs.view(-1)[at[hidden]] = token[hidden], log_p[hidden]
    scores.view(-1)[at] = score
    return texts, costs, scores


def _repeated(texts: Tensor, state: State, most: Tensor) -> Tensor:
    """Written positions (B, L) whose token stands at more than `most` (B, 1) of them."""
    token = texts.masked_fill(~state.open, 0)
    counts = torch.zeros(len(texts), state.mask_id, dtype=torch.long, device=texts.device)
    counts.scatter_add_(1, token, state.open.long())
    return state.open & (counts.gather(1, token) > most)


def _draw_again(
    denoiser: Denoiser,
    state: State,
    settings: DrawOptions,
    n: int,
    again: Tensor,
    tables: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Draw positions (B, L) of texts anew; the tables of `_propose` are changed in place."""
    at, rows = flat_positions(again), again.any(1).nonzero().squeeze(1)
    if not len(at):
        return
    temperature = 1.0 if settings.temperature < GREEDY else settings.temperature
    top_p = min(settings.top_p, GUARD_TOP_P)
    settings = replace(settings, temperature=temperature, top_p=top_p)
    step = make_step(state, n, 1.0, at, rows, _NO_NUMBERS, None)
    drawn = _draw(
        denoiser, state, settings, step, tables[0].masked_fill(again, state.mask_id), _AGAIN
    )
    for table, values in zip(tables, drawn, strict=True):
        table.view(-1)[at] = values


def _draw(
    denoiser: Denoiser,
    state: State,
    settings: DrawOptions,
    step: Step,
    z: Tensor,
    *stream: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, their log-probabilities and scores (N,) where a step writes, by one pass over z."""
    z = z if step.states is None else z[step.states]
    reads = state.as_reads(z if step.codes is None else with_code(z, state.mask_id, step.codes))
    times = state.as_reads(z).masked_share(state.mask_id)
    state.count(len(reads))
    logits = denoiser.logits(reads, times, step.reads)
    logits = logits if step.row is None else logits[step.row]
    found, length = [], state.z.shape[1]
    for part, at in in_parts(logits, step.writes):
        # The noise of a token at a position depends on nothing else of the text: not on its length.
        noise = replace(state.noise, samples=state.noise.samples[at // length])
        place = (at % length)[:, None]
        u = noise.uniforms(part.shape[1], Purpose.TOKEN, step.index, place, *stream)
        token, score = gumbel_max(part, u, settings)
        log_p = law_of(part).gather(-1, token[:, None]).squeeze(-1)
        found.append((token, log_p, score))
    token, log_p, score = (torch.cat(each) for each in zip(*found, strict=True))
    return token, log_p, score


def gumbel_max(logits: Tensor, u: Tensor, options: DrawOptions) -> tuple[Tensor, Tensor]:
    """Largest of noisy logits, and the log-softmax of these there, (R,) both.

    The noise is -temperature * log(-log u). Shapes: logits and u (R, V).
    """
    noisy, greedy = logits.double(), options.temperature < GREEDY
    if options.restricted and not greedy:
        noisy = noisy.masked_fill(law_of(logits, options) == -torch.inf, -torch.inf)
    if not greedy:
        noisy = noisy - options.temperature * torch.log(-torch.log(u))
    score, token = noisy.log_softmax(-1).max(-1)
    return token, score
