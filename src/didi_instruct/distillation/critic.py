"""The discriminator of DiDi-Instruct: it learns to tell texts apart, and rewards them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from didi_instruct.distillation.losses import rewards, smooth_bce
from didi_instruct.distillation.replica import Metrics
from didi_instruct.distillation.rollout import Rollout
from didi_instruct.distillation.run import Distillation, MicroBatch
from didi_instruct.distillation.watch import RunningMean, Totals
from didi_instruct.models.discriminator import Discriminator
from didi_instruct.transfer import Later


@dataclass(frozen=True, slots=True)
class Pair:
    """Student texts of a part, and reference texts, at the same noise level."""

    batch: MicroBatch
    rollout: Rollout
    t: Tensor
    """(B,) time of the comparison: with coupled times the stop on the student's way (in streams,
    the time drawn, which is before the next stop)."""
    z: Tensor
    """(B, L) the student's texts at t."""
    t_reference: Tensor
    """(R,)."""
    z_reference: Tensor
    """(R, L)."""
    written_reference: Tensor
    """(R, L) positions that were not given."""


@dataclass(frozen=True, slots=True)
class CriticUpdate:
    """An update of the discriminator, and what it saw."""

    metrics: Metrics
    accuracy: float
    """Share of texts classified correctly."""
    sharpness: float
    """Share of positions classified correctly, which is what its loss is of."""
    states: Sequence[Tensor | None]
    """States (B, L, d) of its frozen blocks on the student's texts of each part, where kept."""


class Critic:
    """The discriminator, log q_teacher / q_student at every position (Lemma 3.2), and its gates."""

    def __init__(
        self, d: Distillation, discriminator: Discriminator, *, keep_states: bool = True
    ) -> None:
        self.d, self.keep_states = d, keep_states
        self.learner = d.learner(discriminator, d.config.discriminator.lr)
        self.accuracy, self.sharpness = RunningMean(), RunningMean()

    def update(self, step: int, pairs: Sequence[Pair]) -> CriticUpdate:
        """Balanced cross-entropy, Eq. (8), teacher = 1; wait instead if it is saturated."""
        d, settings, batch = self.d, self.d.config.discriminator, self.d.config.train.batch_size
        count = sum(len(pair.z_reference) for pair in pairs) * d.world.size
        totals, states = Totals(), []
        for pair in pairs:
            fake, real, state = self._log_ratios(pair)
            states.append(state)
            written, written_real = pair.rollout.written, pair.written_reference
            masked, masked_real = pair.z == d.mask_id, pair.z_reference == d.mask_id
            where, where_real = written, written_real
            if settings.positions == "masked":
                where, where_real = masked, masked_real
            loss = (
                smooth_bce(fake, where, settings.label_smoothing).sum() / batch
                + smooth_bce(real, where_real, 1 - settings.label_smoothing).sum() / count
            ) / 2
            fake_, real_ = fake.detach(), real.detach()
            reward = rewards(fake_, masked, written)
            reward_real = rewards(real_, masked_real, written_real)
            right = num_correct(-reward, written), num_correct(reward_real, written_real)
            sharp = share_correct(-fake_, where), share_correct(real_, where_real)
            tokens = written.sum(1).clamp(min=1)
            totals.add(
                disc_loss=loss,
                disc_accuracy=right[0] / (2 * batch) + right[1] / (2 * count),
                disc_sharpness=sharp[0] / (2 * batch) + sharp[1] / (2 * count),
                reward_student=reward.sum() / batch,
                reward_reference=reward_real.sum() / count,
                path_entropy=-(pair.rollout.log_prob / tokens).sum() / batch,
            )
            if pair.batch.last:  # asked for before the last gradients are computed
                metrics = d.summed(totals)
                found = Later(metrics["disc_accuracy"], metrics["disc_sharpness"])
            self.learner.backward(loss, sync=pair.batch.last)
        accuracy, sharpness = found.read()
        saturated = self.is_saturated()
        if saturated:  # it waits until the student has caught up
            self.learner.drop_gradients()
            norm = d.number(0.0)
        else:
            norm = self.learner.update(step)
        metrics |= {"disc_grad_norm": norm, "disc_waits": d.number(saturated)}
        return CriticUpdate(metrics, accuracy, sharpness, states)

    def is_saturated(self) -> bool:
        """Judge by positions, of which its loss is: whole texts are told apart long before.

        And by batches before this one: to learn from those alone that it errs on were a bias. What
        it has not seen yet counts as one half, so that a few good batches are not enough.
        """
        return self.sharpness.cautious(0.5) > self.d.config.discriminator.saturation

    def remember(self, update: CriticUpdate) -> float:
        """Add an update to the memory of the gates; return the running accuracy."""
        self.sharpness.add(update.sharpness)
        return self.accuracy.add(update.accuracy)

    def _log_ratios(self, pair: Pair) -> tuple[Tensor, Tensor, Tensor | None]:
        """Log-ratios (B, L) of the student's texts and (R, L) of the reference texts.

        And the states of frozen blocks on the student's texts, if they are kept.
        """
        z = torch.cat([pair.z, pair.z_reference])
        sigma = self.d.schedule.sigma(torch.cat([pair.t, pair.t_reference]))

        def forward(network: Discriminator) -> tuple[Tensor, Tensor | None]:
            if pair.batch.first:  # a power iteration once per update, however many passes
                network.iterate()
            if not (self.keep_states and network.frozen):
                return network(z, sigma).clone(), None  # a copy: FSDP mistrusts views
            below = network.below(z, sigma)
            return network.above(below, sigma).clone(), below

        ratio, below = self.learner.replica.run(forward, sync=pair.batch.last)
        size = len(pair.z)
        return ratio[:size], ratio[size:], None if below is None else below[:size]

    @torch.no_grad()
    def reward(self, pair: Pair, below: Tensor | None = None) -> Tensor:
        """Rewards of the student's texts under the discriminator as it is now: (B,).

        `below` are the states of its frozen blocks, if they are known.
        """
        sigma = self.d.schedule.sigma(pair.t)

        def forward(network: Discriminator) -> Tensor:
            return network(pair.z, sigma) if below is None else network.above(below, sigma)

        ratio = self.learner.replica.run(forward)
        return rewards(ratio, pair.z == self.d.mask_id, pair.rollout.written)


def num_correct(margin: Tensor, written: Tensor) -> Tensor:
    """Correctly classified texts, margin (B,) above 0; empty ones count one half."""
    return torch.where(written.any(1), (margin > 0).float(), 0.5).sum()


def share_correct(log_ratio: Tensor, where: Tensor) -> Tensor:
    """Sum over texts of the share of positions (B, L) classified correctly, log-ratio above 0."""
    shares = (where & (log_ratio > 0)).sum(1) / where.sum(1).clamp(min=1)
    return torch.where(where.any(1), shares, 0.5).sum()
