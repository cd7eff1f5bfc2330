"""Discrete consistency distillation (DUO, Sahoo et al. 2025) of a uniform-state teacher.

One noise ε gives a text's states at all times, z_t = argmax(α̃_t x + σ̃_t ε): a path from text to
noise on which nothing is random any more. The student at (z_t, t) is to say what a frozen copy says
at (z_s, s), s = t - Δ. After a round the copy takes over the student's weights and Δ doubles, so
what was a step of Δ becomes the start of one twice as long.

Given z_t the target is random. What forward KL learns, its mean, is not the denoiser of time t even
if the target is exact: that one must not know z_t^l (`process.uniform`), of which the rest of z_s
has a little. It differs the more the larger Δ is, and is sharper.
"""

import copy
from typing import Any

import torch
from torch import Tensor

from didi_instruct.config.distill import DistillConfig
from didi_instruct.distillation.losses import divergence, entropy
from didi_instruct.distillation.run import Distillation, Loss, MethodEntry, MicroBatch
from didi_instruct.errors import UserError
from didi_instruct.process.masking import stratified_times
from didi_instruct.process.uniform import gaussian_to_discrete, level_of_gamma, state
from didi_instruct.sampling.draw import Purpose
from didi_instruct.sampling.state import Reads
from didi_instruct.training.loop import Metrics
from didi_instruct.transfer import sent


class Duo:
    """A uniform-state student and the frozen copy that it is consistent with."""

    def __init__(self, d: Distillation, target: Any) -> None:
        self.d, self.rounds = d, d.config.duo.rounds(d.config.train.steps)
        self.target = d.frozen(target)
        self.learners = {"target": self.target}
        self.state: dict[str, Tensor] = {}

    def step(self, step: int) -> Metrics:
        """One update from one batch of texts; a round begins with a new target."""
        d, settings = self.d, self.d.config.duo
        if self.rounds.begins(step):
            self.target.take(d.student, average=settings.target == "average")
        delta, batches = settings.delta(self.rounds.of(step)), d.micro_batches(step)
        times = draw_times(d, step, delta)
        metrics = d.descend(step, lambda batch: self.loss(batch, times, delta), batches)
        return metrics | {"delta": d.number(delta)}

    def loss(self, batch: MicroBatch, times: Tensor, delta: float) -> Loss:
        """A part's share of the divergence per position, and numbers of it."""
        d, num_tokens = self.d, self.d.model_config.num_tokens
        x, noise, t = (
            d.reference_texts(batch),
            batch.noise,
            sent(times[batch.indices], d.world.device),
        )
        uniforms = noise.uniforms(d.length, Purpose.REVEAL)
        others = (noise.uniforms(d.length, Purpose.TOKEN) * (num_tokens - 1)).long()
        others = others.clamp(max=num_tokens - 2)  # a product just below may be rounded up

        def state_at(time: Tensor) -> tuple[Reads, Tensor, Tensor]:
            alpha = level(d, time)
            z = state(x, alpha[:, None], num_tokens, uniforms, others)
            return Reads(z), d.schedule.time(alpha), everywhere

        everywhere = torch.arange(x.numel(), device=x.device)
        with torch.no_grad():
            target = self.target.log_probs(*state_at((t - delta).clamp(min=0)))
        log_p = d.student.log_probs(*state_at(t))
        count = d.config.train.batch_size * d.length
        loss = divergence(d.config.duo.kl, target, log_p).sum() / count
        return loss, {
            "entropy": entropy(log_p.detach()).sum() / count,
            "target_entropy": entropy(target).sum() / count,
        }


def draw_times(d: Distillation, step: int, delta: float) -> Tensor:
    """Times of the whole batch, Δ or more; a share Δ of them is 1, where samplers begin."""
    times = stratified_times(d.config.train.batch_size, d.generator("times", step)).double()
    return (times + delta).clamp(max=1)


def level(d: Distillation, time: Tensor) -> Tensor:
    """Alpha (B,) at times of the clock."""
    settings = d.config.duo
    if settings.clock == "schedule":
        return d.schedule.alpha(time)
    low, high = settings.gamma
    tilde = level_of_gamma(low + time * (high - low))
    return gaussian_to_discrete(tilde, d.model_config.num_tokens)


def _networks(config: DistillConfig, teacher: Any, student: Any) -> tuple[Any, Any]:
    """The target of the first round is a copy of the teacher."""
    assert student.config.kind == teacher.config.kind == "duo"
    assert student.config.schedule == teacher.config.schedule
    if _shapes(student) != _shapes(teacher):
        raise UserError(
            "The student has another shape than the teacher, but is to take its place after a "
            "round: use a student of the teacher's shape, or none."
        )
    return student, copy.deepcopy(teacher)


def _shapes(network: Any) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in network.named_parameters()}


def _sampling_flags(config: DistillConfig) -> str:
    rounds = config.duo.rounds(config.train.steps)
    return f"--steps {config.duo.steps // 2 ** (rounds.count - 1)}"


ENTRY = MethodEntry(
    networks=_networks,
    make=Duo,
    texts="data",
    teacher_kind="duo",
    pads=False,  # any of the columns may replace a token
    sampling_flags=_sampling_flags,
)
