"""The reverse process of masked diffusion: one loop, and ancestral sampling by it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from didi_instruct.config.model import Order
from didi_instruct.process.schedule import Schedule
from didi_instruct.sampling.denoiser import Denoiser
from didi_instruct.sampling.draw import DrawOptions, log_prob_of
from didi_instruct.sampling.plan import Grid, Step, make_plan, reveal_turns
from didi_instruct.sampling.state import Samples, State

Draw = Callable[[State, Step], tuple[Tensor, Tensor]]
"""Tokens and log-probabilities (N,) of what a step writes, by one pass at least, counted."""


@torch.no_grad()
def run(plan: Sequence[Step], state: State, draw: Draw) -> None:
    """Take the steps of a plan: the reverse process of every sampler that does not look at tokens.

    A step that reads no text needs no pass.
    """
    for step in plan:
        if step.states is None or len(step.states):
            state.write(step.writes, *draw(state, step))
        if step.erases is not None:
            state.erase(step.erases)
        state.report(step.time)


def plain(denoiser: Denoiser) -> Draw:
    """Draw from the denoiser's law; the path's is that of a mixture where texts carry codes."""

    def draw(state: State, step: Step) -> tuple[Tensor, Tensor]:
        settings = replace(state.settings, temperature=0.0) if step.greedy else state.settings
        reads = state.reads(step.states, step.codes)
        state.count(len(reads))
        tokens, log_p = denoiser.draw(reads, step, settings)
        if step.codes is not None and settings.measure_path:
            correction = _code_correction(denoiser, settings, state, step, tokens, log_p)
            state.correction += correction
        return tokens, log_p

    return draw


def _code_correction(
    denoiser: Denoiser,
    settings: DrawOptions,
    state: State,
    step: Step,
    tokens: Tensor,
    log_p: Tensor,
) -> Tensor:
    """(B,) log-probability of what a step wrote under the even mixture of codes, less `log_p`.

    A pass per code is taken.
    """
    assert step.codes is not None
    length, each = state.z.shape[1], []
    text = step.writes // length
    own_code = step.codes[(step.reads if step.row is None else step.reads[step.row]) // length]
    none = torch.zeros(len(state.z), dtype=torch.float64, device=state.z.device)
    for code in range(state.canvas.masks):
        logits = denoiser.logits(state.reads(step.states, code), step.t, step.reads)
        logits = logits if step.row is None else logits[step.row]
        # The drawn code as it was drawn: a batch of another shape may round otherwise.
        found = torch.where(own_code == code, log_p, log_prob_of(logits, tokens, settings))
        each.append(none.index_add(0, text, found))
    mixture = torch.stack(each).logsumexp(0) - math.log(len(each))
    return mixture - none.index_add(0, text, log_p)


@torch.no_grad()
def ancestral(
    denoiser: Denoiser,
    schedule: Schedule,
    state: State,
    *,
    steps: int,
    grid: Grid | None = None,
    order: Order = "random",
    greedy_tail: bool = False,
) -> Samples:
    """Go from all masks to none in `steps` steps, Eq. (2) with x drawn from p(x | z).

    A masked position is revealed on the way from t to s with probability
    (alpha_s - alpha_t) / (1 - alpha_t), and then drawn from the denoiser; in the order `streams` a
    step reveals positions apart from each other instead. The output layer runs where something is
    revealed, and a text of which a step reveals nothing is not read.

    `greedy_tail`: the last step takes the most probable tokens instead of drawing them.
    """
    state.steps = steps
    turn, times = reveal_turns(schedule, state.noise, state.open, steps, grid, order)
    plan = make_plan(state, turn, times)
    if greedy_tail:
        plan[-1] = replace(plan[-1], greedy=True)
    run(plan, state, plain(denoiser))
    return state.samples()
