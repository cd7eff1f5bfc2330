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
from collections.abc import Mapping

import torch
from torch import Tensor

from didi_instruct.config.distill import DistillConfig
from didi_instruct.data.dataset import TokenSource
from didi_instruct.distillation.hosting import Host, law, rows_of
from didi_instruct.distillation.monitor import Totals
from didi_instruct.distillation.task import StudentTask, Teacher
from didi_instruct.errors import UserError
from didi_instruct.models.dit import DiT
from didi_instruct.process.divergences import divergence, entropy
from didi_instruct.process.masking import stratified_times
from didi_instruct.process.uniform import gaussian_to_discrete, level_of_gamma, state
from didi_instruct.sampling.chain import Purpose
from didi_instruct.seeding import mix
from didi_instruct.training.distributed import World
from didi_instruct.transfer import sent


class DuoTask(StudentTask):
    """A uniform-state student and the frozen copy that it is consistent with."""

    pads = False  # any of the columns may replace a token

    def __init__(
        self,
        config: DistillConfig,
        teacher: Teacher,
        student: DiT,
        world: World,
        *,
        data: TokenSource,
    ) -> None:
        assert student.config.kind == teacher.network.config.kind == "duo"
        assert student.config.schedule == teacher.network.config.schedule
        if _shapes(student) != _shapes(teacher.network):
            raise UserError(
                "The student has another shape than the teacher, but is to take its place after a "
                "round: use a student of the teacher's shape, or none."
            )
        target = copy.deepcopy(teacher.network)
        super().__init__(config, teacher, student, world, data)
        self.texts = data.rows
        self.rounds = config.duo.rounds(config.train.steps)
        self.target = Host(target.requires_grad_(False), config.train, world)
        self.target_rows = rows_of(self.target, self.schedule)

    def iterate(self, step: int) -> dict[str, Tensor]:
        """One update from one batch of texts."""
        if self.rounds.begins(step):
            self.begin_round()
        delta = self.config.duo.delta(self.rounds.of(step))
        t = self._times(step, delta)
        parts, totals = self.parts(), Totals()
        for indices in parts:
            last, time = indices is parts[-1], sent(t[indices], self.world.device)
            loss = self._loss(step, indices, time, delta, totals, sync=last)
            self.student.backward(loss, sync=last)
        numbers = self.summed(totals)
        return numbers | {"grad_norm": self.updater.update(step), "delta": self.number(delta)}

    @torch.no_grad()
    def begin_round(self) -> None:
        """Make the student, or the average of its weights, the target."""
        target, ema = self.target.network, self.updater.ema
        if ema is not None and self.config.duo.target == "average":
            ema.copy_to(target)
            return
        own = dict(self.student.network.named_parameters())
        for name, parameter in target.named_parameters():
            parameter.copy_(own[name])

    def _times(self, step: int, delta: float) -> Tensor:
        """Times of the whole batch, Δ or more; a share Δ of them is 1, where samplers begin."""
        seed = mix(self.config.train.seed, "times", step)
        count = self.config.train.batch_size
        times = stratified_times(count, torch.Generator().manual_seed(seed)).double()
        return (times + delta).clamp(max=1)

    def _level(self, time: Tensor) -> Tensor:
        """Alpha (B,) at times of the clock."""
        settings = self.config.duo
        if settings.clock == "schedule":
            return self.schedule.alpha(time)
        low, high = settings.gamma
        tilde = level_of_gamma(low + time * (high - low))
        return gaussian_to_discrete(tilde, self.model_config.num_tokens)

    def _loss(
        self,
        step: int,
        indices: Tensor,
        t: Tensor,
        delta: float,
        totals: Totals,
        *,
        sync: bool,
    ) -> Tensor:
        """A part's share of the divergence per position."""
        batch, num_tokens = self.config.train.batch_size, self.model_config.num_tokens
        x = sent(self.texts(step * batch + int(indices[0]), len(indices)), self.world.device)
        noise = self.noise(step, 0, indices)
        uniforms = noise.uniforms(self.length, Purpose.REVEAL)
        others = (noise.uniforms(self.length, Purpose.TOKEN) * (num_tokens - 1)).long()
        others = others.clamp(max=num_tokens - 2)  # a product just below may be rounded up

        def state_at(time: Tensor) -> tuple[Tensor, Tensor]:
            alpha = self._level(time)
            z = state(x, alpha[:, None], num_tokens, uniforms, others)
            return z, self.schedule.time(alpha)

        now, then = state_at(t), state_at((t - delta).clamp(min=0))
        everywhere = torch.ones_like(now[0], dtype=torch.bool)
        target = self.target_rows(*then, everywhere)
        log_p = self.student.run(law(self.schedule, *now, everywhere), sync=sync)["log_p"]
        count = batch * self.length
        loss = divergence(self.config.duo.kl, target, log_p).sum() / count
        totals.add(
            loss=loss,
            entropy=entropy(log_p.detach()).sum() / count,
            target_entropy=entropy(target).sum() / count,
        )
        return loss

    # What the loop asks for

    def tensors(self) -> Mapping[str, Tensor]:
        """The student's, and the target, which is the student of another time."""
        target = self.target.network.named_parameters()
        return {**super().tensors(), **{f"target/{name}": p.detach() for name, p in target}}

    def checkpoint_bytes(self) -> int:
        """Another copy of the weights."""
        weights = sum(p.numel() * 4 for p in self.target.network.parameters())
        return super().checkpoint_bytes() + weights


def _shapes(network: DiT) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in network.named_parameters()}
