"""The discriminator's side of DiDi-Instruct: it learns to tell texts apart, and rewards them.

Its logit is log q_teacher / q_student at every position (Lemma 3.2), of texts at the same noise.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from didi_instruct.config.distill import DistillConfig
from didi_instruct.data.dataset import TokenSource
from didi_instruct.distillation.critics import CriticTask
from didi_instruct.distillation.hosting import Tensors
from didi_instruct.distillation.monitor import RunningMean, Totals
from didi_instruct.distillation.rewards import rewards
from didi_instruct.distillation.rollout import Rollout
from didi_instruct.distillation.task import Teacher, check_fit
from didi_instruct.models.discriminator import Discriminator
from didi_instruct.models.dit import DiT
from didi_instruct.seeding import mix
from didi_instruct.training.distributed import World
from didi_instruct.transfer import Later


@dataclass(frozen=True, slots=True)
class Compared:
    """Student texts of a part, and reference texts, at the same noise level."""

    rollout: Rollout
    t: Tensor
    """(B,) where it is compared: if the times are coupled, where it stopped on its way (in streams,
    before its next stop)."""
    z: Tensor
    """(B, L) the student's texts at t."""
    t_reference: Tensor
    """(R,)."""
    z_reference: Tensor
    """(R, L)."""
    written_reference: Tensor
    """(R, L) positions that were not given."""


@dataclass(frozen=True, slots=True)
class Taught:
    """What is known after the discriminator has learned."""

    numbers: Tensors
    accuracy: float
    """Share of the texts that it told apart."""
    sharpness: float
    """Share of their positions, which is what it learns."""
    states: Sequence[Tensor | None]
    """What its frozen blocks make of the student's texts of each part, (B, L, d)."""


class DiscriminatorTask(CriticTask):
    """Student and discriminator, which begins as the teacher with a head of its own."""

    critic_name, rates = "discriminator", "optim.lr or discriminator.lr"
    keeps_states = True
    """Whether what frozen blocks make of texts is kept for their rewards."""

    def __init__(
        self,
        config: DistillConfig,
        teacher: Teacher,
        student: DiT,
        world: World,
        *,
        data: TokenSource | None = None,
    ) -> None:
        check_fit(config, teacher.network.config)
        torch.manual_seed(mix(config.train.seed, "discriminator"))
        discriminator = Discriminator.from_denoiser(teacher.network).requires_grad_(True)
        if config.discriminator.trainable_blocks is not None:
            discriminator.freeze_lower(config.discriminator.trainable_blocks)
        lr = config.discriminator.lr
        super().__init__(config, teacher, student, discriminator, lr, world, data)
        self.sharpness = RunningMean()

    def tensors(self) -> Mapping[str, Tensor]:
        """With the memory of the discriminator's own gate."""
        return {**super().tensors(), "watch/sharpness": self.sharpness.state}

    def teach_discriminator(self, step: int, parts: Sequence[Compared]) -> Taught:
        """Balanced cross-entropy, Eq. (8), teacher = 1; wait instead if it is saturated."""
        settings, batch = self.config.discriminator, self.config.train.batch_size
        counts = sum(len(p.z_reference) for p in parts) * self.world.size
        totals, states = Totals(), []
        for part in parts:
            last = part is parts[-1]
            ratio, state = self._log_ratio(part, first=part is parts[0], sync=last)
            fake, real = ratio[: len(part.z)], ratio[len(part.z) :]
            states.append(state)
            where = self._where(part.z, part.rollout.written)
            where_real = self._where(part.z_reference, part.written_reference)
            loss = (
                smooth_bce(fake, where, settings.label_smoothing).sum() / batch
                + smooth_bce(real, where_real, 1 - settings.label_smoothing).sum() / counts
            ) / 2
            r_fake = rewards(fake.detach(), part.z == self.mask_id, part.rollout.written)
            r_real = rewards(
                real.detach(), part.z_reference == self.mask_id, part.written_reference
            )
            right = _told(-r_fake, part.rollout.written), _told(r_real, part.written_reference)
            sharp = _told_at(-fake.detach(), where), _told_at(real.detach(), where_real)
            totals.add(
                disc_loss=loss,
                disc_accuracy=right[0] / (2 * batch) + right[1] / (2 * counts),
                disc_sharpness=sharp[0] / (2 * batch) + sharp[1] / (2 * counts),
                reward_student=r_fake.sum() / batch,
                reward_reference=r_real.sum() / counts,
                path_entropy=self.path_entropy(part.rollout),
            )
            if last:  # how well it told them apart is known before the last gradients are
                numbers = self.summed(totals)
                found = Later(numbers["disc_accuracy"], numbers["disc_sharpness"])
            self.critic.backward(loss, sync=last)
        accuracy, sharpness = found.read()
        saturated = self._is_saturated()
        if saturated:
            # The remedy: it waits until the student has caught up.
            self.critic_updater.optimizer.zero_grad(set_to_none=True)
            norm = self.number(0.0)
        else:
            norm = self.critic_updater.update(step)
        numbers |= {"disc_grad_norm": norm, "disc_waits": self.number(saturated)}
        return Taught(numbers, accuracy, sharpness, states)

    def _is_saturated(self) -> bool:
        """By positions, of which its loss is: whole texts are told apart long before it is sharp.

        And by batches before this one: to learn from those alone that it errs on were a bias. What
        it has not seen yet counts as one half, so that a few good batches are not enough.
        """
        return self.sharpness.cautious(0.5) > self.config.discriminator.saturation

    def _log_ratio(
        self, part: Compared, *, first: bool, sync: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Log-ratios of student and reference texts, those of the student first.

        And what the blocks that do not learn made of the student's, if there are such blocks.
        """
        z = torch.cat([part.z, part.z_reference])
        sigma = self.schedule.sigma(torch.cat([part.t, part.t_reference]))

        def forward(network: Discriminator) -> Tensors:
            if first:  # a power iteration once per update, however many passes
                network.iterate()
            if not (self.keeps_states and network.frozen):
                # A copy: FSDP mistrusts views.
                return {"ratio": network(z, sigma).clone()}
            below = network.below(z, sigma)
            return {"ratio": network.above(below, sigma).clone(), "below": below}

        found = self.critic.run(forward, sync=sync)
        below = found.get("below")
        return found["ratio"], None if below is None else below[: len(part.z)]

    def _where(self, z: Tensor, written: Tensor) -> Tensor:
        if self.config.discriminator.positions == "masked":
            return z == self.mask_id
        return written

    @torch.no_grad()
    def reward(self, part: Compared, below: Tensor | None = None) -> Tensor:
        """Rewards of the student's texts under the discriminator as it is now: (B,).

        `below` is what its frozen blocks make of them, if that is known.
        """
        sigma = self.schedule.sigma(part.t)

        def forward(network: Discriminator) -> Tensors:
            ratio = network(part.z, sigma) if below is None else network.above(below, sigma)
            return {"ratio": ratio}

        ratio = self.critic.run(forward)["ratio"]
        return rewards(ratio, part.z == self.mask_id, part.rollout.written)

    def path_entropy(self, texts: Rollout) -> Tensor:
        """A part's share of the entropy per token."""
        tokens = texts.written.sum(1).clamp(min=1)
        return -(texts.log_prob / tokens).sum() / self.config.train.batch_size


def _told(margin: Tensor, written: Tensor) -> Tensor:
    """How many texts were told apart, margin (B,) above 0; half of those with nothing to see."""
    return torch.where(written.any(1), (margin > 0).float(), 0.5).sum()


def _told_at(log_ratio: Tensor, where: Tensor) -> Tensor:
    """The sum over texts of the share of positions told apart, (B, L) log-ratio above 0."""
    shares = (where & (log_ratio > 0)).sum(1) / where.sum(1).clamp(min=1)
    return torch.where(where.any(1), shares, 0.5).sum()


def smooth_bce(log_ratio: Tensor, where: Tensor, target: float) -> Tensor:
    """Cross-entropy against one target, mean over the selected positions of each text.

    Shapes: log_ratio (B, L), where (B, L) -> (B,); 0 where nothing is selected.
    """
    losses = F.binary_cross_entropy_with_logits(
        log_ratio, torch.full_like(log_ratio, target), reduction="none"
    )
    return torch.where(where, losses, 0.0).sum(1) / where.sum(1).clamp(min=1)
