"""Steps that are mixtures: the tokens of a step share a code, and so know of each other.

A step of the usual student draws its tokens independently given the state, which is what few steps
cost. Here all masks of a text carry the same one of K ids in a step, a code c drawn uniformly:

    q(x_S | z) = 1/K sum_c prod_{i in S} q(x_i | z, c),

at the price of one pass, and up to log K nats per step nearer to the teacher. The student learns by
maximum likelihood: texts of the teacher (or data) are masked to a random state of a random budget,
and what the next step reveals is to be likely. The gradient of the log of a mixture is that of its
parts weighted by their posterior, so codes are drawn from the posterior, and only those learn.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from didi_instruct.config.distill import DistillConfig
from didi_instruct.distillation.rollout import path_step
from didi_instruct.distillation.run import (
    Distillation,
    Loss,
    MethodEntry,
    MicroBatch,
    budget_flags,
)
from didi_instruct.errors import UserError
from didi_instruct.models.network import Network
from didi_instruct.process.masking import stratified_times, with_code
from didi_instruct.sampling.draw import Noise, Purpose
from didi_instruct.sampling.plan import flat_positions
from didi_instruct.seeding import mix
from didi_instruct.training.loop import Metrics
from didi_instruct.transfer import sent

TOKENS_PER_PASS = 1 << 18
"""Tokens of all codes that are read at once, at most."""


def add_masks(network: Network, masks: int, seed: int, spread: float) -> Network:
    """A copy of a denoiser that knows several masks.

    They differ from its own by noise of `spread` times the deviation of all embeddings. Codes that
    are nearly alike are a saddle: all have the same gradient, and it takes long to part them.
    """
    vectors = network.vectors.detach()
    shape = (masks - network.config.masks, vectors.shape[1])
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(mix(seed, "masks")))
    return network.with_masks(spread * vectors.std() * noise.to(vectors))


@dataclass(frozen=True, slots=True)
class Part:
    """Texts of a pass, masked to some state of a path, and what the next step reveals."""

    x: Tensor  # (B, L) the texts
    z: Tensor  # (B, L) their states, with the first mask
    t: Tensor  # (B,) the states' times
    revealed: Tensor  # (B, L)


class Mixture:
    """A student with several masks, by maximum likelihood."""

    def __init__(self, d: Distillation, second: None = None) -> None:
        self.d = d
        self.learners: dict[str, Any] = {}
        self.state: dict[str, Tensor] = {}

    def step(self, step: int) -> Metrics:
        """One update from one batch of texts."""
        batches = self.d.micro_batches(step)
        parts = [make_part(self.d, batch) for batch in batches]
        count = self.d.count(part.revealed.sum() for part in parts)
        loss_of = functools.partial(self.loss, count=count)
        return self.d.descend(step, loss_of, batches, parts)

    def loss(self, batch: MicroBatch, part: Part, count: Tensor) -> Loss:
        """Codes drawn from their posterior learn what the step reveals, per revealed position."""
        d, settings, codes = self.d, self.d.config.mixture, self.d.config.mixture.codes
        if codes == 1:
            code = torch.zeros(len(part.x), 1, dtype=torch.long, device=part.x.device)
        else:
            each = all_log_probs(d, part)
            code = draw_codes(each, batch.noise, settings.learning)
        loss = -log_probs_under(d, part, code).sum() / (code.shape[1] * count)
        if codes == 1:
            return loss, {}
        posterior = each.log_softmax(1)
        information = (posterior.exp() * (posterior + math.log(codes))).sum()
        return loss, {
            "loss": -(each.logsumexp(1) - math.log(codes)).sum() / count,
            "component_loss": loss,
            # Of log K at most: nats that the codes know of the tokens of a step.
            "code_information": information / d.config.train.batch_size,
        }


def make_part(d: Distillation, batch: MicroBatch) -> Part:
    """Take texts, and mask them as they are before a random step of a random budget."""
    settings, size = d.config.mixture, d.config.train.batch_size
    x, noise = d.reference_texts(batch), batch.noise
    strata = stratified_times(size, d.generator("budgets", batch.step))
    place = sent(strata[batch.indices], x.device)
    given = settings.budgets, place, d.starts.open(x), noise, d.schedule
    path = path_step(*given, d.config.order)
    t, masked, revealed = path.t, path.masked, path.revealed
    if settings.random:
        chosen, other = noise.uniforms(1, Purpose.SELECT) < settings.random, path_step(*given)
        t = torch.where(chosen.squeeze(1), other.t, t)
        masked = torch.where(chosen, other.masked, masked)
        revealed = torch.where(chosen, other.revealed, revealed)
    return Part(x, x.masked_fill(masked, d.mask_id), t, revealed)


def log_probs_under(d: Distillation, part: Part, code: Tensor) -> Tensor:
    """Log-probabilities of what a step reveals under codes: (B, M) -> (B, M) float64."""
    tensors = (part.x, part.z, part.t, part.revealed)
    x, z, t, revealed = (each.repeat_interleave(code.shape[1], 0) for each in tensors)
    at = flat_positions(revealed)
    log_p = d.student.log_probs(d.reads(with_code(z, d.mask_id, code.flatten())), t, at)
    own = log_p.gather(-1, x.flatten()[at][:, None]).squeeze(-1).double()
    total = torch.zeros(len(x), dtype=torch.float64, device=x.device)
    return total.index_add(0, at // d.length, own).view_as(code)


@torch.no_grad()
def all_log_probs(d: Distillation, part: Part) -> Tensor:
    """Log-probability of what a step reveals under every code: (B, K) float64."""
    codes = torch.arange(d.config.mixture.codes, device=part.z.device)
    some = torch.split(codes, max(1, TOKENS_PER_PASS // part.z.numel()))
    found = [log_probs_under(d, part, each.expand(len(part.x), -1)) for each in some]
    return torch.cat(found, 1)


def draw_codes(log_probs: Tensor, noise: Noise, count: int) -> Tensor:
    """Codes drawn from their posterior: (B, K) -> (B, count)."""
    uniforms = noise.uniforms(count, Purpose.CODE)
    below = log_probs.softmax(1).cumsum(1)[:, None] <= uniforms[..., None]
    return below.sum(-1).clamp(max=log_probs.shape[1] - 1)


def _networks(config: DistillConfig, teacher: Any, student: Any) -> tuple[Any, None]:
    """The student gets the masks that it lacks."""
    codes = config.mixture.codes
    if student.config.masks > codes:
        raise UserError(
            f"mixture.codes is {codes}, but the student has {student.config.masks} masks: "
            "use as many or more."
        )
    if student.config.masks < codes:
        student = add_masks(student, codes, config.train.seed, config.mixture.spread)
    return student, None


ENTRY = MethodEntry(
    networks=_networks,
    make=Mixture,
    texts="reference",
    several_masks=True,
    any_order=True,
    sampling_flags=lambda config: budget_flags(config.mixture.budgets),
)
