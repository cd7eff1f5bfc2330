"""Sampling as research code writes it: the stand-in for published samplers.

Every step runs the whole network on every sample, keeps float64 probabilities of all positions over
the whole vocabulary, adds noise to all of (B, L, V), takes the largest entries and keeps those at
masks. Its samples have the same law as those of `sampling`, in any order.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from didi_instruct.config.model import Order
from didi_instruct.models.network import Mixture
from didi_instruct.process.masking import interleaved_times, interleaved_turns, posterior
from didi_instruct.process.schedule import Schedule
from didi_instruct.sampling.guide import Guidance, Guide
from didi_instruct.sampling.plan import time_grid
from didi_instruct.sampling.state import Reads

DenseDenoiser = Callable[[Tensor, Tensor], Tensor]
"""(z (B, L), t (B,)) -> logits (B, L, V)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NaiveSampler:
    """Ancestral sampling, or RGAS (Algorithm 2) with a guide."""

    denoiser: DenseDenoiser
    schedule: Schedule
    mask_id: int
    steps: int
    order: Order = "random"
    guide: Guide | None = None
    guidance: Guidance = field(default_factory=Guidance)

    @torch.no_grad()
    def __call__(self, start: Tensor, generator: torch.Generator) -> Tensor:
        """Sample from `start` (B, L), given tokens and masks."""
        times, turns = time_grid("uniform", self.steps), None
        if self.order == "streams":
            times = interleaved_times(self.schedule, self.steps)
            turns = interleaved_turns(start == self.mask_id, self.steps)
        alphas = self.schedule.alpha(torch.tensor(times, dtype=torch.float64, device=start.device))
        alphas[-1] = 1.0  # the last step reveals everything

        def step(z: Tensor, logits: Tensor, n: int) -> Tensor:
            """Draw at every position: by Eq. (2), or tokens alone where the order gives a turn."""
            law, open_ = logits.double().softmax(-1), z == self.mask_id
            if turns is None:
                alpha_s, alpha_t = alphas[n + 1].view(1, 1), alphas[n].view(1, 1)
                law = posterior(z, law, alpha_s, alpha_t, self.mask_id)
            else:
                open_ = open_ & (turns == n)
            drawn = draw_dense(law, generator)
            drawn = torch.where(drawn == logits.shape[-1], self.mask_id, drawn)
            return torch.where(open_, drawn, z)

        scales, z = self.guidance.scales(self.steps), start
        for n in range(self.steps):
            t = times[n]
            level = torch.full((len(z),), t, dtype=torch.float32, device=z.device)
            logits = self.denoiser(z, level)
            if self.guide is None:
                z = step(z, logits, n)
            elif n < len(scales):
                z = step(z, self.tilted(logits, z, t, scales[n]), n)
            else:
                candidates = [step(z, logits, n) for _ in range(self.guidance.candidates)]
                scores = [self._score(c, times[n + 1]) for c in candidates]
                z = self._choose(torch.stack(candidates), torch.stack(scores), generator)
        return z

    def tilted(self, logits: Tensor, z: Tensor, t: float, h: float) -> Tensor:
        """Logits plus h times the gradient of the reward with respect to all of them, (B, L, V)."""
        assert self.guide is not None
        masked = z == self.mask_id
        dtype = torch.promote_types(logits.dtype, torch.float32)
        with torch.enable_grad():
            leaf = logits.to(dtype).detach().requires_grad_()
            vectors = self.guide.vectors(self.guide.num_tokens).to(dtype)
            mixed = (leaf.softmax(-1) @ vectors)[masked]
            mixture = Mixture(masked.flatten().nonzero().squeeze(1), mixed)
            mean = self.guidance.reward == "mean"
            counted = masked / masked.sum(1, keepdim=True) if mean else masked
            slope = self.guide.gradient(Reads(z), t, mixture, counted)
            (gradient,) = torch.autograd.grad(mixed, leaf, slope.to(mixed.dtype))
        return leaf.detach() + h * gradient.clamp(-self.guidance.clamp, self.guidance.clamp)

    def _score(self, z: Tensor, t: float) -> Tensor:
        """Score one candidate of each sample: (B, L) -> (B,)."""
        assert self.guide is not None
        ratio = self.guide.log_ratio(Reads(z), t).double()
        if self.guidance.score == "sum":
            return ratio.sum(1)
        masked = z == self.mask_id
        return torch.where(masked, ratio, 0.0).sum(1) / masked.sum(1).clamp(min=1)

    def _choose(self, candidates: Tensor, scores: Tensor, generator: torch.Generator) -> Tensor:
        """Choose one of the candidates (M, B, L) of each sample by scores (M, B)."""
        if self.guidance.select == "best":
            choice = scores.argmax(0)
        else:
            choice = draw_dense(scores.T.softmax(-1)[:, None], generator)[:, 0]
        return candidates[choice, torch.arange(len(choice), device=choice.device)]


def draw_dense(p: Tensor, generator: torch.Generator) -> Tensor:
    """Draw one entry per position as the largest p / e with e exponential (Gumbel's trick).

    Shapes: p (B, L, K) float64, need not sum to 1 -> (B, L).
    """
    noise = torch.rand(p.shape, generator=generator, dtype=torch.float64, device=p.device)
    return (p / -noise.log()).argmax(-1)
