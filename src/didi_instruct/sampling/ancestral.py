"""The reverse process of masked diffusion: one loop, and ancestral sampling by it."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from didi_instruct.config.model import Order
from didi_instruct.process.schedule import Schedule
from didi_instruct.sampling.denoiser import Denoiser
from didi_instruct.sampling.draw import (
    PLAIN,
    DrawOptions,
    draw_tokens,
    in_parts,
    law_of,
    restrict,
)
from didi_instruct.sampling.plan import Grid, Reveals, Step, make_plan
from didi_instruct.sampling.state import (
    Callback,
    Canvas,
    Reads,
    Samples,
    State,
    mixture_log_prob,
)

Draw = Callable[[State, Step], tuple[Tensor, Tensor]]
"""Tokens and log-probabilities (N,) of what a step writes, by one pass at least, counted."""


@torch.no_grad()
def run(
    plan: Sequence[Step],
    state: State,
    draw: Draw,
    callback: Callback | None = None,
    steps: int | None = None,
) -> None:
    """Take the steps of a plan: the reverse process of every sampler that does not look at tokens.

    A step that reads no text needs no pass. `steps` are all that a callback is told of, where
    the plan is a part of them.
    """
    steps = len(plan) if steps is None else steps
    for step in plan:
        if step.states is None or len(step.states):
            state.write(step.writes, *draw(state, step))
        if step.erases is not None:
            state.erase(step.erases)
        if callback is not None:
            callback(state.snapshot(step.index, steps, step.time, step.writes))


def plain(denoiser: Denoiser, options: DrawOptions = PLAIN) -> Draw:
    """Draw from the denoiser's law; where texts carry codes, from that of a mixture of codes."""

    def draw(state: State, step: Step) -> tuple[Tensor, Tensor]:
        reads = state.reads(step.states)
        if step.codes is not None:
            return _draw_coded(denoiser, options, state, step, reads)
        state.count(len(reads))
        return denoiser.draw(
            reads, step.t, step.reads, step.u, step.row, options, greedy=step.greedy
        )

    return draw


def _draw_coded(
    denoiser: Denoiser, options: DrawOptions, state: State, step: Step, reads: Reads
) -> tuple[Tensor, Tensor]:
    """Draw where all masks of a text are the same one of several.

    The path's log-probability is that of the mixture of codes, for which a pass per code is taken.
    """
    assert step.codes is not None
    logits, row = coded_logits(denoiser, state, step, reads)
    tokens, log_p = draw_tokens(logits, step.u, row, options, greedy=step.greedy)
    if options.measure_path:
        text = step.writes // state.z.shape[1]
        none = torch.zeros(len(state.z), dtype=torch.float64, device=state.z.device)
        drawn, each = none.index_add(0, text, log_p), []
        for code in range(state.canvas.masks):
            coded = reads.with_codes(state.mask_id, code)
            found = denoiser.logits(coded, step.t, step.reads)
            found = found if step.row is None else found[step.row]
            own = none.index_add(0, text, log_prob_of(found, tokens, options, greedy=step.greedy))
            # The drawn code as it was drawn: a batch of another shape may round otherwise.
            each.append(torch.where(step.codes == code, drawn, own))
        state.correction = state.correction + mixture_log_prob(each) - drawn
    return tokens, log_p


def coded_logits(
    denoiser: Denoiser, state: State, step: Step, reads: Reads
) -> tuple[Tensor, Tensor | None]:
    """Logits (R, V) of what a step reads under its codes, and the row of each token (N,)."""
    assert step.codes is not None
    if step.row is None:
        codes = step.codes if step.states is None else step.codes[step.states]
        state.count(len(reads))
        coded = reads.with_codes(state.mask_id, codes)
        return denoiser.logits(coded, step.t, step.reads), None
    # One text stands for all: a row for each code that they have.
    text = step.writes // state.z.shape[1]
    codes, which = torch.unique(step.codes[text], return_inverse=True)
    tokens = reads.tokens.expand(len(codes), -1)
    attended = None if reads.attended is None else reads.attended.expand(len(codes), -1)
    coded = Reads(tokens, attended).with_codes(state.mask_id, codes)
    offset = torch.arange(len(codes), device=codes.device)[:, None] * tokens.shape[1]
    state.count(len(codes))
    t = step.t.expand(len(codes)) if isinstance(step.t, Tensor) else step.t
    logits = denoiser.logits(coded, t, (offset + step.reads).flatten())
    return logits, which * len(step.reads) + step.row


def log_prob_of(
    logits: Tensor, tokens: Tensor, options: DrawOptions, *, greedy: bool = False
) -> Tensor:
    """Log-probabilities (N,) of tokens (N,) under the laws that logits (N, V) are drawn from."""
    found = []
    for part, own in in_parts(logits, tokens):
        law = restrict(part, temperature=0.0) if greedy else law_of(part, options)
        found.append(law.gather(-1, own[:, None]).squeeze(-1))
    return torch.cat(found)


@torch.no_grad()
def ancestral(
    denoiser: Denoiser,
    schedule: Schedule,
    canvas: Canvas,
    *,
    steps: int,
    settings: DrawOptions = PLAIN,
    grid: Grid | None = None,
    order: Order = "random",
    greedy_tail: bool = False,
    callback: Callback | None = None,
) -> Samples:
    """Go from all masks to none in `steps` steps, Eq. (2) with x drawn from p(x | z).

    A masked position is revealed on the way from t to s with probability
    (alpha_s - alpha_t) / (1 - alpha_t), and then drawn from the denoiser; in the order `streams` a
    step reveals positions apart from each other instead. The output layer runs where something is
    revealed, and a text of which a step reveals nothing is not read.

    `greedy_tail`: the last step takes the most probable tokens instead of drawing them.
    """
    state, noise = State(canvas, watched=callback is not None), canvas.noise(settings.seed)
    reveals = Reveals.of(schedule, state.open, steps, grid, order)
    plan = make_plan(state, reveals.turn(noise, state.z.shape[1]), reveals.times, noise)
    if greedy_tail:
        plan[-1] = replace(plan[-1], greedy=True)
    run(plan, state, plain(denoiser, settings), callback)
    return state.samples(nfe=steps, exact_path=canvas.masks == 1 or settings.measure_path)
