"""Ancestral sampling of a masked diffusion model, and what it knows about its own draws."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from didi_instruct.errors import UserError
from didi_instruct.process.masking import reveal_probability
from didi_instruct.process.schedule import Schedule
from didi_instruct.sampling.categorical import draw, restrict
from didi_instruct.sampling.noise import uniforms

Denoiser = Callable[[Tensor, Tensor], Tensor]
"""(z (B, L), t (B,)) -> logits (B, L, V) over the real tokens."""

Callback = Callable[[int, Tensor, Tensor], None]
"""Sees (step, z after it (B, L), positions revealed by it (B, L))."""


@dataclass(frozen=True, slots=True)
class Samples:
    """Sequences, and how they came about."""

    tokens: Tensor
    """(B, L)."""
    log_prob: Tensor
    """(B,) log-probability of the drawn tokens along the path; minus its mean is path entropy."""
    nfe: int
    """Scheduled steps of the denoiser per sample."""
    passes: float
    """Forward passes that really ran, per sample."""


@torch.no_grad()
def ancestral(
    denoiser: Denoiser,
    schedule: Schedule,
    *,
    samples: Tensor,
    length: int,
    steps: int,
    mask_id: int,
    seed: int = 0,
    temperature: float = 1.0,
    top_p: float = 1.0,
    callback: Callback | None = None,
) -> Samples:
    """Draw sequences in `steps` steps from all masks to none (Eq. 2 with x drawn from p(x | z)).

    A masked position is revealed on the way from t to s with probability
    (alpha_s - alpha_t) / (1 - alpha_t), and then drawn from the denoiser; which ones are revealed
    does not depend on the tokens, so the coins are thrown first and a step that reveals nothing
    needs no forward pass.

    Shapes: samples (B,) int64, the index of each sample within the seed.
    """
    if steps < 1:
        raise UserError(f"steps is {steps}: use 1 or more.")
    z = torch.full((len(samples), length), mask_id, device=samples.device)
    log_prob = torch.zeros(len(samples), dtype=torch.float64, device=samples.device)
    times = torch.linspace(1, 0, steps + 1, dtype=torch.float64, device=samples.device)
    alphas = schedule.alpha(times)
    alphas[-1] = 1  # not 1 - 1e-16: the last step leaves no mask
    passes = 0
    for n in range(steps):
        chance = reveal_probability(alphas[n + 1], alphas[n])
        coins = uniforms(seed, samples, 2 * n, length)
        reveal = (z == mask_id) & (coins < chance)
        if reveal.any():
            passes += 1
            logits = denoiser(z, times[n].float().expand(len(samples)))[reveal]
            log_p = restrict(logits, temperature=temperature, top_p=top_p)
            token = draw(log_p, uniforms(seed, samples, 2 * n + 1, length)[reveal])
            z = z.masked_scatter(reveal, token)
            chosen = log_p.gather(-1, token[:, None]).squeeze(-1)
            log_prob.index_add_(0, reveal.nonzero()[:, 0], chosen)
        if callback is not None:
            callback(n, z, reveal)
    return Samples(z, log_prob, nfe=steps, passes=passes)
