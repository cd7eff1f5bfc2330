"""Ancestral sampling of uniform-state models (DUO): from random tokens to text.

No token is ever final before the last step: each step may change any of them.
"""

import torch
from torch import Tensor

from didi_instruct.errors import UserError
from didi_instruct.process.schedule import Schedule
from didi_instruct.process.uniform import posterior
from didi_instruct.sampling.categorical import draw
from didi_instruct.sampling.chain import (
    PAD,
    Callback,
    Canvas,
    Chain,
    Denoiser,
    Draw,
    Purpose,
    Samples,
    in_parts,
)
from didi_instruct.sampling.grids import Grid, time_grid


@torch.no_grad()
def uniform_state(
    denoiser: Denoiser,
    schedule: Schedule,
    canvas: Canvas,
    *,
    steps: int,
    num_tokens: int | None = None,
    settings: Draw | None = None,
    grid: Grid = "uniform",
    greedy_tail: bool = False,
    callback: Callback | None = None,
) -> Samples:
    """Draw z_1 uniformly, then z_s ~ q(z_s | z_t, p(x | z_t)) in `steps` steps.

    The reverse step is `process.uniform.posterior` in float64, with the denoiser's law of x at
    position l given the *other* positions; the last one, to s = 0, draws from the posterior of x
    itself. `greedy_tail` takes its most probable token there. Temperature, top-p and top-k apply to
    the denoiser's law.

    These models have no mask. `canvas.mask_id` only marks the positions to write, and is any number
    that is neither a token nor `PAD`; without `num_tokens` it is V, the number of tokens. Given
    tokens stay as they are, and the denoiser sees them among noise as if they might be noise too.

    A text can be reached along many paths: `log_prob` is None. A callback sees as revealed what a
    step has changed, and as confidence what the denoiser thinks of the tokens now there.
    """
    num_tokens = canvas.mask_id if num_tokens is None else num_tokens
    _check(canvas, num_tokens)
    chain = Chain(denoiser, canvas, settings or Draw(), steps=steps, callback=callback)
    times = time_grid(grid, steps)
    alphas = schedule.alpha(torch.tensor(times, dtype=torch.float64))
    alphas[-1] = 1.0  # not up to rounding
    start = (chain.uniforms(Purpose.START, 0) * num_tokens).long().clamp(max=num_tokens - 1)
    chain.z = torch.where(chain.open, start, chain.z)
    for n in range(steps):
        before = chain.z
        if chain.open.any():
            logits = chain.logits(times[n], chain.open)
            if logits.shape[1] != num_tokens:
                raise UserError(
                    f"The denoiser knows {logits.shape[1]} tokens, not {num_tokens}: "
                    "give the number as num_tokens, or as the canvas's mask_id."
                )
            greedy = greedy_tail and n == steps - 1
            _reverse_step(chain, logits, n, alphas[n + 1], alphas[n], greedy=greedy)
        chain.tell(times[n], chain.z != before)
    return chain.samples(nfe=steps, exact_path=False)


def _reverse_step(
    chain: Chain, logits: Tensor, n: int, alpha_s: Tensor, alpha_t: Tensor, *, greedy: bool
) -> None:
    """Replace the token at every open position, by logits (R, V) of x there."""
    alpha_s, alpha_t = (alpha.to(logits.device).view(1, 1) for alpha in (alpha_s, alpha_t))
    uniforms = chain.uniforms(Purpose.TOKEN, n)[chain.open]
    tokens, beliefs = [], []
    for part, z, numbers in in_parts(logits, chain.z[chain.open], uniforms):
        log_p = chain.law(part)
        law = posterior(z[None], log_p.exp()[None], alpha_s, alpha_t)[0]
        token = law.argmax(-1) if greedy else draw(law.log(), numbers)
        tokens.append(token)
        beliefs.append(log_p.gather(-1, token[:, None]).squeeze(-1))
    chain.put(chain.open, torch.cat(tokens), torch.cat(beliefs))


def _check(canvas: Canvas, num_tokens: int) -> None:
    if num_tokens < 2:
        raise UserError(f"num_tokens is {num_tokens}: noise needs 2 tokens or more.")
    if 0 <= canvas.mask_id < num_tokens or canvas.mask_id == PAD:
        raise UserError(
            f"mask_id is {canvas.mask_id}, which is a token or padding: "
            f"mark what is to be written by {num_tokens}."
        )
    if bool(((canvas.tokens == canvas.mask_id) & ~canvas.open).any()):
        raise UserError(
            "A uniform-state model has no mask to show where later blocks are: "
            "write all positions at once."
        )
