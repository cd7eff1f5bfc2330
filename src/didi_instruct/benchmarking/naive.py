"""The plain way of sampling, as research code does it: the stand-in for what is published.

Every step runs the whole network on every sample, keeps logits of all positions over the whole
vocabulary, turns them into float64 laws, adds noise to all of (B, L, V) and takes the largest
entries; then it keeps what was a mask. The law of the samples is that of `sampling`, in any order.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from didi_instruct.config.model import Order
from didi_instruct.models.network import Mixture
from didi_instruct.process.masking import interleaved_times, interleaved_turns, posterior
from didi_instruct.process.schedule import Schedule
from didi_instruct.sampling.guide import Guidance, Guide, Score
from didi_instruct.sampling.plan import time_grid
from didi_instruct.sampling.state import Reads

DenseDenoiser = Callable[[Tensor, Tensor], Tensor]
"""(z (B, L), t (B,)) -> logits (B, L, V)."""


def draw_dense(p: Tensor, generator: torch.Generator) -> Tensor:
    """Draw one entry per position: the largest p / e with e exponential, which is Gumbel's trick.

    Shapes: p (B, L, K) float64, need not sum to 1 -> (B, L).
    """
    noise = torch.rand(p.shape, generator=generator, dtype=torch.float64, device=p.device)
    return (p / -noise.log()).argmax(-1)


@torch.no_grad()
def naive_ancestral(
    denoiser: DenseDenoiser,
    schedule: Schedule,
    start: Tensor,
    mask_id: int,
    *,
    steps: int,
    generator: torch.Generator,
    order: Order = "random",
) -> Tensor:
    """Ancestral sampling from `start` (B, L), which is given tokens and masks."""
    path = _Path(schedule, start, mask_id, steps, order)
    z = start
    for n in range(steps):
        logits = denoiser(z, _times(z, path.times[n]))
        z = path.step(z, logits, n, generator)
    return z


@torch.no_grad()
def naive_rgas(
    denoiser: DenseDenoiser,
    schedule: Schedule,
    guide: Guide,
    start: Tensor,
    mask_id: int,
    *,
    steps: int,
    generator: torch.Generator,
    guidance: Guidance | None = None,
    order: Order = "random",
) -> Tensor:
    """RGAS from `start` (B, L): early steps tilt all logits, late ones re-rank candidates."""
    guidance = guidance or Guidance()
    scales = guidance.scales(steps)
    path = _Path(schedule, start, mask_id, steps, order)
    times, z = path.times, start
    for n in range(steps):
        logits = denoiser(z, _times(z, times[n]))
        if n < len(scales):
            strength = scales[n], guidance.clamp, guidance.reward
            logits = tilt_dense(guide, logits, z, mask_id, times[n], *strength)
            z = path.step(z, logits, n, generator)
            continue
        candidates = [path.step(z, logits, n, generator) for _ in range(guidance.candidates)]
        scores = [_score(guide, c, times[n + 1], mask_id, guidance) for c in candidates]
        z = _pick(torch.stack(candidates), torch.stack(scores), guidance, generator)
    return z


def tilt_dense(
    guide: Guide,
    logits: Tensor,
    z: Tensor,
    mask_id: int,
    t: float,
    h: float,
    clamp: float,
    reward: Score = "sum",
) -> Tensor:
    """Logits + h * gradient of the reward with respect to all of them, (B, L, V)."""
    masked = z == mask_id
    dtype = torch.promote_types(logits.dtype, torch.float32)
    with torch.enable_grad():
        leaf = logits.to(dtype).detach().requires_grad_()
        vectors = guide.vectors(guide.num_tokens).to(dtype)
        mixed = (leaf.softmax(-1) @ vectors)[masked]
        mixture = Mixture(masked.flatten().nonzero().squeeze(1), mixed)
        counted = masked / masked.sum(1, keepdim=True) if reward == "mean" else masked
        slope = guide.gradient(Reads(z), t, mixture, counted)
        (gradient,) = torch.autograd.grad(mixed, leaf, slope.to(mixed.dtype))
    return leaf.detach() + h * gradient.clamp(-clamp, clamp)


class _Path:
    """The steps: their times, and what each of them reveals."""

    def __init__(
        self, schedule: Schedule, start: Tensor, mask_id: int, steps: int, order: Order
    ) -> None:
        self.mask_id = mask_id
        self.turns: Tensor | None = None
        """(B, L) the step that reveals each position, where chance has no say in it."""
        if order == "streams":
            self.turns = interleaved_turns(start == mask_id, steps)
            self.times = interleaved_times(schedule, steps)
        else:
            self.times = time_grid("uniform", steps)
        levels = torch.tensor(self.times, dtype=torch.float64, device=start.device)
        self.alphas = schedule.alpha(levels)
        self.alphas[-1] = 1.0  # the last step reveals all

    def step(self, z: Tensor, logits: Tensor, n: int, generator: torch.Generator) -> Tensor:
        """Draw at every position, Eq. (2) or the token whose turn it is; masks alone take it."""
        law, here = logits.double().softmax(-1), z == self.mask_id
        if self.turns is None:
            alpha_s, alpha_t = self.alphas[n + 1].view(1, 1), self.alphas[n].view(1, 1)
            law = posterior(z, law, alpha_s, alpha_t, self.mask_id)
        else:
            here = here & (self.turns == n)
        drawn = draw_dense(law, generator)
        drawn = torch.where(drawn == logits.shape[-1], self.mask_id, drawn)
        return torch.where(here, drawn, z)


def _score(guide: Guide, z: Tensor, t: float, mask_id: int, guidance: Guidance) -> Tensor:
    """Of one candidate of each sample: (B, L) -> (B,)."""
    ratio = guide.log_ratio(Reads(z), t).double()
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


def _times(z: Tensor, t: float) -> Tensor:
    return torch.full((len(z),), t, dtype=torch.float32, device=z.device)
