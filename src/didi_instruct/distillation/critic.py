"""The discriminator of DiDi-Instruct: it tells texts apart, and rewards them (Eq. 6 and 8)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from didi_instruct.distillation import losses
from didi_instruct.distillation.rollout import Rollout
from didi_instruct.distillation.run import Distillation, MicroBatch
from didi_instruct.distillation.watch import RunningMean
from didi_instruct.models.discriminator import Discriminator
from didi_instruct.sampling.draw import Noise, Purpose
from didi_instruct.training.loop import Metrics
from didi_instruct.transfer import Later


class Corrupted(NamedTuple):
    """Texts at a noise level, as the discriminator sees them."""

    z: Tensor  # (B, L)
    t: Tensor
    """(B,) time of the comparison: with coupled times the stop on the student's way (in streams,
    the time drawn, which is before the next stop)."""
    written: Tensor  # (B, L) positions that were not given


@dataclass(frozen=True, slots=True)
class Pair:
    """Student texts of a part, and reference texts, at the same noise level."""

    batch: MicroBatch
    rollout: Rollout
    fake: Corrupted  # the student's
    real: Corrupted
    """The teacher's, one for each of the student's; with prompts, for each group of one prompt."""


def texts_per_reference(d: Distillation) -> int:
    """Student texts that share a reference text: those of one prompt."""
    return d.config.didi.group_size if d.config.continues else 1


def reference_noise(d: Distillation, noise: Noise) -> Noise:
    """The noise of a part's reference texts, one for each of them."""
    return replace(noise, samples=noise.samples[:: texts_per_reference(d)])


JUDGED = ("loss", "accuracy", "sharpness")
"""Of the discriminator's log: its loss, the share of texts classified correctly, and that of
positions, of which its loss is."""


class CriticUpdate(NamedTuple):
    """An update of the discriminator, and what it saw."""

    metrics: Metrics
    accuracy: float
    sharpness: float
    states: Sequence[Tensor | None]
    """States (B, L, d) of its frozen blocks on the student's texts of each part, where kept."""


class Critic:
    """The discriminator, log q_teacher / q_student at every position (Lemma 3.2), and its gates."""

    def __init__(
        self, d: Distillation, discriminator: Discriminator, *, keep_states: bool = True
    ) -> None:
        self.d, self.keep_states, settings = d, keep_states, d.config.discriminator
        rates = settings.lr, settings.weight_decay, settings.lr_warmup
        self.learner = d.learner(discriminator, *rates)
        self.accuracy, self.sharpness = RunningMean(), RunningMean()

    def update(self, step: int, pairs: Sequence[Pair]) -> CriticUpdate:
        """Balanced cross-entropy, Eq. (8), teacher = 1; wait instead if it is saturated."""
        d, batch = self.d, self.d.config.train.batch_size
        count = sum(len(pair.real.z) for pair in pairs) * d.world.size
        found: list[Metrics] = []
        states = []
        for pair in d.passes(pairs):
            ratio, ratio_real, below = self._log_ratios(pair, first=not found)
            states.append(below)
            fake = self._terms(pair.fake, ratio, teacher=False, count=batch)
            real = self._terms(pair.real, ratio_real, teacher=True, count=count)
            both = {f"disc_{name}": (fake[name] + real[name]) / 2 for name in JUDGED}
            tokens = pair.fake.written.sum(1).clamp(min=1)
            own = {
                "reward_student": fake["reward"],
                "reward_reference": real["reward"],
                "path_entropy": -(pair.rollout.log_prob / tokens).sum() / batch,
            }
            found.append(both | own)
            if len(found) == len(pairs):  # asked for before the last gradients are computed
                metrics = d.summed(found)
                asked = Later(metrics["disc_accuracy"], metrics["disc_sharpness"])
            self.learner.backward(both["disc_loss"])
        accuracy, sharpness = asked.read()
        # Judged by positions, of which its loss is: whole texts are told apart long before. And by
        # earlier batches: to learn from those alone that it errs on were a bias. Batches not seen
        # yet count as one half, so that a few good ones are not enough.
        saturated = self.sharpness.cautious(0.5) > (d.config.discriminator.saturation or 1)
        if saturated:  # it waits until the student has caught up
            self.learner.drop_gradients()
            norm = d.number(0.0)
        else:
            norm = self.learner.update(step)
        metrics |= {"disc_grad_norm": norm, "disc_waits": d.number(saturated)}
        return CriticUpdate(metrics, accuracy, sharpness, states)

    def _terms(self, texts: Corrupted, log_ratio: Tensor, *, teacher: bool, count: int) -> Metrics:
        """Loss, shares judged rightly, reward of some of `count` texts; log-ratios (B, L)."""
        settings, written = self.d.config.discriminator, texts.written
        masked = texts.z == self.d.mask_id
        where = masked if settings.positions == "masked" else written
        target = 1 - settings.label_smoothing if teacher else settings.label_smoothing
        loss = losses.smooth_bce(log_ratio, where, target).sum() / count
        log_ratio = log_ratio.detach()
        reward = losses.rewards(log_ratio, masked, written)
        towards, margin = (log_ratio, reward) if teacher else (-log_ratio, -reward)
        right, sharp = num_correct(margin, written), share_correct(towards, where)
        return {
            "loss": loss,
            "accuracy": right / count,
            "sharpness": sharp / count,
            "reward": reward.sum() / count,
        }

    def _log_ratios(self, pair: Pair, *, first: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        """Log-ratios (B, L) of the student's texts and (R, L) of the reference texts.

        And the states of frozen blocks on the student's texts, if they are kept.
        """
        d, z = self.d, torch.cat([pair.fake.z, pair.real.z])
        reads = d.reads(z)
        sigma = d.schedule.sigma(torch.cat([pair.fake.t, pair.real.t]))
        dropout = self._dropout(pair)

        def forward(network: Discriminator) -> tuple[Tensor, Tensor | None]:
            if first:  # a power iteration once per update, however many passes
                network.iterate()
            if d.padded or not (self.keep_states and network.frozen):
                ratio = network(reads.tokens, sigma, reads.attended, dropout=dropout)
                return ratio.clone(), None  # FSDP mistrusts views
            below = network.below(z, sigma)
            return network.above(below, sigma, dropout).clone(), below

        ratio, below = self.learner.run(forward)
        size = len(pair.fake.z)
        return ratio[:size], ratio[size:], None if below is None else below[:size]

    def _dropout(self, pair: Pair) -> Tensor | None:
        """Factors of the head's hidden units (B + R, L, d) in an update."""
        share, noise = self.d.config.discriminator.dropout, pair.batch.noise
        if not share:
            return None
        count = self.d.length * self.learner.network.config.hidden
        texts = enumerate((noise, reference_noise(self.d, noise)))
        units = torch.cat([each.uniforms(count, Purpose.DROPOUT, kind) for kind, each in texts])
        return ((units >= share).float() / (1 - share)).view(len(units), self.d.length, -1)

    @torch.no_grad()
    def reward(self, pair: Pair, below: Tensor | None = None) -> Tensor:
        """Rewards of the student's texts under the discriminator as it is now, Eq. (6): (B,).

        `below` are the states of its frozen blocks, if they are known.
        """
        z, sigma = pair.fake.z, self.d.schedule.sigma(pair.fake.t)
        reads = self.d.reads(z)

        def forward(network: Discriminator) -> Tensor:
            if below is None:
                return network(reads.tokens, sigma, reads.attended)
            return network.above(below, sigma)

        ratio = self.learner.run(forward)
        return losses.rewards(ratio, z == self.d.mask_id, pair.fake.written)


def num_correct(margin: Tensor, written: Tensor) -> Tensor:
    """Correctly classified texts, margin (B,) above 0; empty ones count one half."""
    return torch.where(written.any(1), (margin > 0).float(), 0.5).sum()


def share_correct(log_ratio: Tensor, where: Tensor) -> Tensor:
    """Sum over texts of the share of positions (B, L) classified correctly, log-ratio above 0."""
    shares = (where & (log_ratio > 0)).sum(1) / where.sum(1).clamp(min=1)
    return torch.where(where.any(1), shares, 0.5).sum()
