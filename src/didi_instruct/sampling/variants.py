"""Reverse processes that are plans of their own: first-hitting, re-masking, blocks."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from didi_instruct.config.model import Order
from didi_instruct.errors import UserError
from didi_instruct.process.schedule import Schedule
from didi_instruct.sampling import plan as plans
from didi_instruct.sampling.ancestral import plain, run
from didi_instruct.sampling.confidence import keep_surest
from didi_instruct.sampling.denoiser import Denoiser
from didi_instruct.sampling.draw import Purpose
from didi_instruct.sampling.plan import Grid, Step
from didi_instruct.sampling.state import Samples, State

Strategy = Literal["cap", "rescale"]


@torch.no_grad()
def first_hitting(denoiser: Denoiser, schedule: Schedule, state: State) -> Samples:
    """Reveal one token at a time, when the reverse process would (Zheng et al. 2025).

    Going back from t = 1 a mask survives until the masked level is m = 1 - alpha with probability
    m / m_1, on its own: the level at which it is revealed is uniform on (0, m_1). One number per
    mask thus gives both the order and the times. The next of n masks comes at the highest of n such
    levels, m' = m u^(1/n), and is any of them, which is how the paper draws them one by one.

    The denoiser sees the state just before a token is revealed, at the time at which it is: the
    token is drawn by the rate of the jump, which belongs to that moment, not to the last one. Every
    sample has its own times. With an exact denoiser the samples are exact. `nfe` is the number of
    masks of the longest.
    """
    counts = state.open.sum(1)
    nfe = state.steps = max(counts.tolist(), default=0)
    # A position that is not open comes after all others; its level is never looked at.
    uniform = state.noise.uniforms(state.z.shape[1], Purpose.ORDER, 0)
    uniform = uniform.masked_fill(~state.open, -1.0)
    level, position = uniform.sort(dim=1, descending=True, stable=True)
    masked_at_start = 1 - schedule.eps
    times = schedule.time(1 - masked_at_start * level.clamp(min=0.0))
    left = (counts[:, None] - torch.arange(nfe, device=counts.device)).clamp(min=0).sum(0)
    shares = (left / counts.sum()).tolist()
    plan = plans.make_plan(state, position.argsort(1), [*shares, 0.0], begun=True)
    plan = [
        replace(step, t=times[:, n] if step.states is None else times[step.states, n])
        for n, step in enumerate(plan)
    ]
    run(plan, state, plain(denoiser))
    return state.samples()


@torch.no_grad()
def remasking(
    denoiser: Denoiser,
    schedule: Schedule,
    state: State,
    *,
    steps: int,
    eta: float,
    strategy: Strategy = "cap",
    grid: Grid = "uniform",
    greedy_tail: bool = False,
) -> Samples:
    """Ancestral sampling that masks some written tokens again: ReMDM (Wang et al. 2025).

    From t to s a written token (never a given one) is masked with probability sigma_t, to be drawn
    anew when more of the text is known, and a mask revealed with probability
    (alpha_s - (1 - sigma_t) alpha_t) / (1 - alpha_t), see `remask_chances`: the noise level at
    every time is that of ancestral sampling. Both are decided on z_t, which is also what the
    denoiser sees. The last step reveals everything and masks nothing.

    With eta = 0 it is `ancestral`, bit for bit. Otherwise a text can be reached along many paths,
    and `log_prob` is None.
    """
    measured, times = eta == 0 and state.settings.measure_path, plans.time_grid(grid, steps)
    state.settings, state.steps = replace(state.settings, measure_path=measured), steps
    uniforms, length, begun = state.noise.uniforms, state.z.shape[1], False
    masked, plan = state.masked, []
    for n, (reveals, remasks) in enumerate(remask_chances(schedule, times, eta, strategy)):
        reveal = masked & (uniforms(length, Purpose.REVEAL, n) < reveals)
        erase = state.open & ~masked & (uniforms(length, Purpose.REMASK, n) < remasks)
        masked = (masked & ~reveal) | erase
        step = plans.step_where(state, n, times[n], reveal, begun=begun)
        greedy = greedy_tail and n == steps - 1
        plan.append(replace(step, erases=plans.flat_positions(erase), greedy=greedy))
        begun = begun or len(step.writes) > 0
    run(plan, state, plain(denoiser))
    return state.samples(exact_path=eta == 0 and state.measured)


def remask_chances(
    schedule: Schedule, times: Sequence[float], eta: float, strategy: Strategy
) -> list[tuple[float, float]]:
    """Probabilities of each step that a mask is revealed and that a token is masked.

    A token that is visible with probability alpha_t at t stays so with 1 - sigma, a mask becomes
    visible with r, and alpha_t (1 - sigma) + (1 - alpha_t) r = alpha_s asks for

        r = (alpha_s - alpha_t) / (1 - alpha_t) + sigma alpha_t / (1 - alpha_t),

    ancestral sampling's and as much as sigma takes away. r <= 1 asks for sigma <= sigma_max =
    min(1, (1 - alpha_s) / alpha_t), which is 0 in the last step. `cap`: sigma = min(eta,
    sigma_max); `rescale`: sigma = eta sigma_max.

    The chain starts from masks alone also where alpha_1 = eps > 0. What is visible at t is then
    (alpha_t - eps) / (1 - eps), and that takes the place of alpha, which it is if eps = 0.
    """
    if not 0 <= eta <= 1:
        raise UserError(f"eta is {eta}: use 0 (no re-masking) to 1.")
    masked = 1 - schedule.alpha(torch.tensor(times, dtype=torch.float64))
    visible = 1 - masked / masked[0]
    visible_s, visible_t = visible[1:], visible[:-1]
    most = ((1 - visible_s) / visible_t).clamp(max=1)  # infinite at t = 1, where nothing is visible
    sigma = most.clamp(max=eta) if strategy == "cap" else eta * most
    sigma[-1] = 0.0  # not a rounding error
    chances = torch.tensor(plans.reveal_chances(schedule, times), dtype=torch.float64)
    reveal: Tensor = chances + sigma * visible_t / (1 - visible_t)
    return list(zip(reveal.tolist(), sigma.tolist(), strict=True))


@torch.no_grad()
def blocks(
    denoiser: Denoiser,
    schedule: Schedule,
    state: State,
    *,
    steps: int,
    block_length: int,
    inner: str = "ancestral",
    order: Order = "random",
) -> Samples:
    """Semi-autoregressive sampling: finish each block of positions before the next begins.

    The denoiser always sees the whole text, with masks where later blocks are. Blocks are counted
    from the first position of the window, given or not, and one without anything to write takes no
    steps. Each takes `steps` steps of `inner`: `ancestral`, or an order of `confidence`. A single
    block is that sampler itself, bit for bit. The clock runs from 1 to 0 in every block: a model
    that reads the time sees it too early in the first ones. `nfe`, `passes` and `log_prob` are sums
    over the blocks.
    """
    plans.check_steps(steps)
    if block_length < 1:
        raise UserError(f"block_length is {block_length}: use 1 or more.")
    columns, canvas = torch.arange(state.z.shape[1], device=state.z.device), state.canvas
    numbers = sorted(set((columns[state.open.any(0)] // block_length).tolist()))
    state.steps = steps * len(numbers)
    plan: list[Step] = []
    for place, number in enumerate(numbers):
        # By the block's number, not by how many came before: that depends on the batch.
        stream = (*canvas.stream, Purpose.BLOCK, number) if number else canvas.stream
        state.noise = replace(state.noise, stream=stream)
        inside = state.open & (columns // block_length == number)
        if inner != "ancestral":
            keep_surest(denoiser, state, inside, inner, steps)
            continue
        turn, times = plans.reveal_turns(schedule, state.noise, inside, steps, None, order)
        plan += plans.make_plan(state, turn.where(inside, -1), times, begun=place > 0)
    run(plan, state, plain(denoiser))
    return state.samples(exact_path=inner == "ancestral" and state.measured)
