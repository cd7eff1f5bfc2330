"""The plain way of sampling, as research code does it: the stand-in for what is published.

Every step runs the whole network on every sample, keeps logits of all positions over the whole
vocabulary, turns them into float64 laws, adds noise to all of (B, L, V) and takes the largest
entries; then it keeps what was a mask. The law of the samples is that of `sampling`.
"""

import torch
from torch import Tensor

from didi_instruct.process.masking import posterior
from didi_instruct.process.schedule import Schedule
from didi_instruct.sampling.chain import Denoiser
from didi_instruct.sampling.grids import time_grid
from didi_instruct.sampling.guided import Guidance, Guide


def draw_dense(p: Tensor, generator: torch.Generator) -> Tensor:
    """Draw one entry per position: the largest p / e with e exponential, which is Gumbel's trick.

    Shapes: p (B, L, K) float64, need not sum to 1 -> (B, L).
    """
    noise = torch.rand(p.shape, generator=generator, dtype=torch.float64, device=p.device)
    return (p / -noise.log()).argmax(-1)


@torch.no_grad()
def naive_ancestral(
    denoiser: Denoiser,
    schedule: Schedule,
    start: Tensor,
    mask_id: int,
    *,
    steps: int,
    generator: torch.Generator,
) -> Tensor:
    """Ancestral sampling from `start` (B, L), which is given tokens and masks."""
    times, alphas = _levels(schedule, steps, start.device)
    z = start
    for n in range(steps):
        logits = denoiser(z, _times(z, times[n]))
        z = _step(z, logits, alphas[n + 1], alphas[n], mask_id, generator)
    return z


@torch.no_grad()
def naive_rgas(
    denoiser: Denoiser,
    schedule: Schedule,
    guide: Guide,
    start: Tensor,
    mask_id: int,
    *,
    steps: int,
    generator: torch.Generator,
    guidance: Guidance | None = None,
) -> Tensor:
    """RGAS from `start` (B, L): early steps tilt all logits, late ones re-rank candidates."""
    guidance = guidance or Guidance()
    scales = guidance.scales(steps)
    times, alphas = _levels(schedule, steps, start.device)
    z = start
    for n in range(steps):
        logits = denoiser(z, _times(z, times[n]))
        if n < len(scales):
            logits = tilt_dense(guide, logits, z, mask_id, times[n], scales[n], guidance.clamp)
            z = _step(z, logits, alphas[n + 1], alphas[n], mask_id, generator)
            continue
        candidates = [
            _step(z, logits, alphas[n + 1], alphas[n], mask_id, generator)
            for _ in range(guidance.candidates)
        ]
        scores = [_score(guide, c, times[n + 1], mask_id, guidance) for c in candidates]
        z = _pick(torch.stack(candidates), torch.stack(scores), guidance, generator)
    return z


def tilt_dense(
    guide: Guide, logits: Tensor, z: Tensor, mask_id: int, t: float, h: float, clamp: float
) -> Tensor:
    """Logits + h * gradient of the reward with respect to all of them, (B, L, V)."""
    masked = z == mask_id
    dtype = torch.promote_types(logits.dtype, torch.float32)
    with torch.enable_grad():
        leaf = logits.to(dtype).detach().requires_grad_()
        mixed = leaf.softmax(-1) @ guide.embedding.detach().to(dtype)
        hard = guide.embed(z).detach()
        embeddings = torch.where(masked[..., None], mixed.to(hard.dtype), hard)
        ratio = guide.score(embeddings, z, _times(z, t))
        reward = torch.where(masked, ratio, 0.0).sum()
        (gradient,) = torch.autograd.grad(reward, leaf)
    return leaf.detach() + h * gradient.clamp(-clamp, clamp)


def _step(
    z: Tensor, logits: Tensor, alpha_s: Tensor, alpha_t: Tensor, mask_id: int, g: torch.Generator
) -> Tensor:
    """One step of Eq. (2) at every position, then only masks take what was drawn."""
    p = logits.double().softmax(-1)
    law = posterior(z, p, alpha_s.view(1, 1), alpha_t.view(1, 1), mask_id)
    drawn = draw_dense(law, g)
    drawn = torch.where(drawn == logits.shape[-1], mask_id, drawn)
    return torch.where(z == mask_id, drawn, z)


def _score(guide: Guide, z: Tensor, t: float, mask_id: int, guidance: Guidance) -> Tensor:
    """Of one candidate of each sample: (B, L) -> (B,)."""
    ratio = guide.score(guide.embed(z), z, _times(z, t)).double()
    if guidance.score == "sum":
        return ratio.sum(1)
    masked = z == mask_id
    return torch.where(masked, ratio, 0.0).sum(1) / masked.sum(1).clamp(min=1)


def _pick(candidates: Tensor, scores: Tensor, guidance: Guidance, g: torch.Generator) -> Tensor:
    """One of the candidates (M, B, L) of each sample, by scores (M, B)."""
    if guidance.select == "best":
        choice = scores.argmax(0)
    else:
        choice = draw_dense(scores.T.softmax(-1)[:, None], g)[:, 0]
    return candidates[choice, torch.arange(len(choice), device=choice.device)]


def _levels(schedule: Schedule, steps: int, device: torch.device) -> tuple[list[float], Tensor]:
    """Times of an even grid, and alpha at each; the last step reveals all."""
    times = time_grid("uniform", steps)
    alphas = schedule.alpha(torch.tensor(times, dtype=torch.float64, device=device))
    alphas[-1] = 1.0
    return times, alphas


def _times(z: Tensor, t: float) -> Tensor:
    return torch.full((len(z),), t, dtype=torch.float32, device=z.device)
