"""Ancestral sampling of uniform-state models (DUO): from random tokens to text.

No token is ever final before the last step: each step may change any of them.
"""

import torch

from didi_instruct.process.schedule import Schedule
from didi_instruct.process.uniform import posterior
from didi_instruct.sampling.denoiser import Denoiser
from didi_instruct.sampling.draw import Purpose, in_parts, invert, law_of
from didi_instruct.sampling.plan import Grid, flat_positions, local_positions, time_grid
from didi_instruct.sampling.state import Samples, State


@torch.no_grad()
def uniform_state(
    denoiser: Denoiser,
    schedule: Schedule,
    state: State,
    *,
    steps: int,
    grid: Grid = "uniform",
    greedy_tail: bool = False,
) -> Samples:
    """Draw z_1 uniformly, then z_s ~ q(z_s | z_t, p(x | z_t)) in `steps` steps.

    The reverse step is `process.uniform.posterior` in float64, with the denoiser's law of x at
    position l given the *other* positions; the last one, to s = 0, draws from the posterior of x
    itself. `greedy_tail` takes its most probable token there. Temperature, top-p and top-k apply to
    the denoiser's law.

    These models have no mask. The canvas' `mask_id` only marks the positions to write, and is any
    number that is neither a token nor `PAD`. Given tokens stay as they are, and the denoiser sees
    them among noise as if they might be noise too.

    A text can be reached along many paths: `log_prob` is None. A callback sees as revealed what a
    step has changed, and as confidence what the denoiser thinks of the tokens now there.
    """
    num_tokens, length, times = denoiser.num_tokens, state.z.shape[1], time_grid(grid, steps)
    state.steps = steps
    alphas = schedule.alpha(torch.tensor(times, dtype=torch.float64))
    alphas[-1] = 1.0  # not up to rounding
    start = (state.noise.uniforms(length, Purpose.START, 0) * num_tokens).long()
    state.z = state.shown = torch.where(state.open, start, state.z)
    at = flat_positions(state.open)
    rows = state.open.any(1).nonzero().squeeze(1)
    reads = local_positions(at, rows, length)
    for n in range(steps):
        if len(at):
            shown = state.reads(rows)
            state.count(len(shown))
            logits = denoiser.logits(shown, times[n], reads)
            u = state.noise.uniforms(length, Purpose.TOKEN, n).flatten()[at]
            greedy = greedy_tail and n == steps - 1
            alpha_t, alpha_s = alphas[n : n + 2].to(at.device).view(2, 1, 1)
            tokens, beliefs = [], []
            for part, z, numbers in in_parts(logits, state.z.flatten()[at], u):
                log_p = law_of(part, state.settings)
                law = posterior(z[None], log_p.exp()[None], alpha_s, alpha_t)[0]
                token = law.argmax(-1) if greedy else invert(law.log(), numbers)
                tokens.append(token)
                beliefs.append(log_p.gather(-1, token[:, None]).squeeze(-1))
            state.write(at, torch.cat(tokens), torch.cat(beliefs))
        state.report(times[n])
    return state.samples(exact_path=False)
