"""DiDi-Instruct: Algorithm 1 of the paper, with the switches of its ablations and beyond.

An iteration has two acts. First, without gradient, the student writes texts and they are corrupted
beside the teacher's; the discriminator takes a step, and its log-ratios become advantages over the
whole batch. Then the student scores the same tokens with gradient, part by part.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from didi_instruct.config.distill import DistillConfig
from didi_instruct.data.dataset import TokenSource
from didi_instruct.distillation.critics import CriticTask
from didi_instruct.distillation.hosting import Tensors
from didi_instruct.distillation.monitor import Totals, unique_ngrams
from didi_instruct.distillation.rewards import advantages, rewards
from didi_instruct.distillation.rollout import Jump, Noise, References, Rollout, rollout
from didi_instruct.distillation.scoring import masks_of, score
from didi_instruct.distillation.task import Teacher, check_fit
from didi_instruct.models.discriminator import Discriminator
from didi_instruct.models.dit import DiT
from didi_instruct.process.masking import mask
from didi_instruct.process.weighting import beta_density, beta_times, omega
from didi_instruct.sampling.chain import Purpose
from didi_instruct.seeding import mix
from didi_instruct.training.world import World
from didi_instruct.transfer import Later, sent


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
    states: Sequence[Tensor | None]
    """What its frozen blocks make of the student's texts of each part, (B, L, d)."""


class DidiTask(CriticTask):
    """Student and discriminator, in turns."""

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
        references: References | None = None,
        data: TokenSource | None = None,
    ) -> None:
        check_fit(config, teacher.network.config)
        torch.manual_seed(mix(config.train.seed, "discriminator"))
        discriminator = Discriminator.from_denoiser(teacher.network).requires_grad_(True)
        if config.discriminator.trainable_blocks is not None:
            discriminator.freeze_lower(config.discriminator.trainable_blocks)
        lr = config.discriminator.lr
        super().__init__(config, teacher, student, discriminator, lr, world, data)
        if references is None and config.reference.source != "online":
            raise ValueError(
                f"references are needed for reference.source={config.reference.source}"
            )
        self.references = references or self.teacher_texts

    def passes_recur(self) -> bool:
        """Not if texts of the teacher, or steps of the student, take more of them in turns.

        Nor if texts have windows of their own, or a batch is more than one pass.
        """
        settings = self.config
        few = settings.didi.rollout_steps == settings.discriminator.steps == 1
        drawn = settings.reference.source == "online"
        whole = self.model_config.end_id is None and len(self.parts()) == 1
        return few and whole and not drawn

    def iterate(self, step: int) -> Tensors:
        """One iteration of Algorithm 1."""
        didi = self.config.didi
        self.remember_entropy(step)
        for turn in range(self.config.discriminator.steps):
            parts = [self.compare(step, turn, indices) for indices in self.parts()]
            taught = self.teach_discriminator(step, parts)
        numbers, accuracy = taught.numbers, self.accuracy.add(taught.accuracy)

        rewarded = [self.reward(*each) for each in zip(parts, taught.states, strict=True)]
        reward = self.world.gather(torch.cat(rewarded))
        advantage = advantages(
            reward,
            len(reward) if didi.grouping == "batch" else didi.group_size,
            baseline=didi.baseline,
            scale=didi.scale,
            eps=didi.advantage_eps,
            clip=didi.advantage_clip,
        )
        at_chance = self.learns(step) and accuracy < self.config.discriminator.chance
        learns = self.learns(step) and not at_chance
        if learns:
            share = self.world.share(len(reward))
            numbers |= self.teach_student(step, parts, advantage.values[share.start : share.stop])
        return numbers | {
            "student_waits": self.number(not learns),
            "at_chance": self.number(at_chance),
            "advantage_std": advantage.values.std(correction=0),
            "advantage_max": advantage.values.abs().max(),
            "clip_fraction": advantage.clip_fraction,
            "unique_4gram": self._unique(parts),
            **self.watched(step),
        }

    # First act: texts, and the discriminator's view of them

    @torch.no_grad()
    def compare(self, step: int, turn: int, indices: Tensor) -> Compared:
        """Roll the student out, take reference texts, corrupt both to the same time."""
        didi, noise = self.config.didi, self.noise(step, turn, indices)
        tau = self._times(noise, 0)
        reference = self._reference(step, turn, indices)
        texts = self._roll_out(noise, tau, reference)
        reference = sent(reference, self.world.device)
        t = sent(tau if didi.coupled_time else self._times(noise, 1), self.world.device)
        coins = noise.of_groups(didi.group_size) if didi.grouping == "state" else noise
        numbers = coins.uniforms(self.length, Purpose.REMASK, 0)
        numbers = numbers.repeat_interleave(len(tau) // len(numbers), 0)
        t_reference = t[:: len(t) // len(reference)]
        written = self.starts.open(reference)
        of_reference = replace(noise, indices=indices[:: len(t) // len(reference)])
        other = of_reference.uniforms(self.length, Purpose.REMASK, 1)
        return Compared(
            texts,
            t,
            self._corrupt(texts.x, texts.written, t, numbers),
            t_reference,
            self._corrupt(reference, written, t_reference, other),
            written,
        )

    def _roll_out(self, noise: Noise, tau: Tensor, prompts: Tensor | None) -> Rollout:
        """Texts of the student; `prompts` are rows that begin with them, where there are any."""
        didi = self.config.didi
        shared = didi.group_size if didi.grouping == "state" else 1
        rows = prompts.cpu() if prompts is not None and self.config.prompt else None
        start, owner = self.starts(noise.on_host, rows, shared)
        return rollout(
            self.student_logits,
            self.schedule,
            start,
            owner,
            tau if didi.score_decomposition else None,
            noise,
            self.mask_id,
            steps=didi.rollout_steps,
            shared=shared,
            order=self.config.order,
        )

    @torch.no_grad()
    def drawn_entropy(self, turn: int) -> Tensor:
        """Path entropy per token of a batch that nobody learns from."""
        totals = Totals()
        for indices in self.parts():
            noise = self.noise(0, turn, indices)
            prompts = self._reference(0, turn, indices) if self.config.prompt else None
            texts = self._roll_out(noise, self._times(noise, 0), prompts)
            totals.add(entropy=self._path_entropy(texts))
        return self.summed(totals)["entropy"]

    def _path_entropy(self, texts: Rollout) -> Tensor:
        """A part's share of the entropy per token."""
        tokens = texts.written.sum(1).clamp(min=1)
        return -(texts.log_prob / tokens).sum() / self.config.train.batch_size

    def _times(self, noise: Noise, which: int) -> Tensor:
        """τ ~ π for each text, or one for each group, on the host."""
        didi = self.config.didi
        a, b = didi.pi
        size = 1 if didi.grouping == "batch" else didi.group_size
        source = noise.on_host if size == 1 else noise.on_host.of_groups(size)
        return beta_times(a, b, source.uniforms(a + b - 1, Purpose.START, which)).repeat_interleave(
            size
        )

    def _reference(self, step: int, turn: int, indices: Tensor) -> Tensor:
        """Reference texts of a part (R, L), wherever they come from.

        As many as the student writes; with prompts, one for each group, whose prompt it gives.
        """
        each = self.config.didi.group_size if self.config.prompt else 1
        total = self.config.train.batch_size // each
        number = step * self.config.discriminator.steps + turn
        first = number * total + int(indices[0]) // each
        return self.references(first, len(indices) // each)

    def _corrupt(self, x: Tensor, written: Tensor, t: Tensor, numbers: Tensor) -> Tensor:
        """Corrupt text to time t; what was given stays."""
        z = mask(x, self.schedule.alpha(t)[:, None], self.mask_id, numbers)
        return torch.where(written, z, x)

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
            totals.add(
                disc_loss=loss,
                disc_accuracy=right[0] / (2 * batch) + right[1] / (2 * counts),
                reward_student=r_fake.sum() / batch,
                reward_reference=r_real.sum() / counts,
                path_entropy=self._path_entropy(part.rollout),
            )
            if last:  # the accuracy is known before the last gradients are
                numbers = self.summed(totals)
                found = Later(numbers["disc_accuracy"])
            self.critic.backward(loss, sync=last)
        accuracy = found.read()
        saturated = self._is_saturated(accuracy)
        if saturated:
            # The remedy: it waits until the student has caught up.
            self.critic_updater.optimizer.zero_grad(set_to_none=True)
            norm = self.number(0.0)
        else:
            norm = self.critic_updater.update(step)
        numbers |= {"disc_grad_norm": norm, "disc_waits": self.number(saturated)}
        return Taught(numbers, accuracy, states)

    def _is_saturated(self, accuracy_now: float) -> bool:
        before, weight = self.accuracy.state.tolist()
        usual = before / weight if weight else 0.5
        return min(usual, accuracy_now) > self.config.discriminator.saturation

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

    # Second act: the student

    def teach_student(self, step: int, parts: Sequence[Compared], advantage: Tensor) -> Tensors:
        """Policy gradient with KL and entropy terms; advantage (B,) of this process's texts."""
        didi, batch = self.config.didi, self.config.train.batch_size
        totals = Totals()
        for part, own in zip(parts, torch.split(advantage, [len(p.z) for p in parts]), strict=True):
            last = part is parts[-1]
            scores = self._scores(part, sync=last)
            weighted = self.weight(part.t) * own * scores["log_prob"]
            policy = -weighted.sum() / batch
            kl, entropy = scores["kl"].sum() / batch, scores["entropy"].sum() / batch
            loss = policy
            if didi.regularisation:
                loss = loss + didi.kl_weight * kl - didi.entropy_weight * entropy
            self.student.backward(loss, sync=last)
            totals.add(loss=loss, policy_loss=policy, kl=kl, entropy=entropy)
        numbers = self.summed(totals)
        return numbers | {"grad_norm": self.updater.update(step - self.config.warmup)}

    def _scores(self, part: Compared, sync: bool) -> Tensors:
        didi = self.config.didi
        jumps = part.rollout.jumps if didi.score_steps == "all" else part.rollout.jumps[-1:]
        laws: list[Tensor | None] = [None] * len(jumps)
        if didi.regularisation:
            laws = [self._teacher_law(jump, jump is part.rollout.jumps[0]) for jump in jumps]

        def forward(network: DiT) -> Tensors:
            x = part.rollout.x
            return score(network, self.schedule, jumps, x, laws, didi.kl)

        scores = self.student.run(forward, sync=sync)
        if didi.log_prob == "mean":
            tokens = torch.stack([jump.where.sum(1) for jump in jumps]).sum(0).clamp(min=1)
            scores["log_prob"] = scores["log_prob"] / sent(tokens, self.world.device)
        return scores

    def weight(self, t: Tensor) -> Tensor:
        """ω(t), or ω(t) / π(t), of the time at which a text is compared (Theorem 3.1)."""
        didi = self.config.didi
        weight = omega(self.schedule, t, didi.omega, didi.omega_min_time)
        return weight / beta_density(*didi.pi, t) if didi.importance_weighting else weight

    @torch.no_grad()
    def _teacher_law(self, jump: Jump, from_start: bool) -> Tensor:
        """Teacher's logits at the masks of a jump's states; kept for all masks."""
        if from_start and self.starts.shared:
            return self.teacher_at_start()
        return self.teacher_logits(jump.z, jump.t, masks_of(jump))

    def _unique(self, parts: Sequence[Compared]) -> Tensor:
        """Distinct 4-grams of what was written, one text for each prompt or z_τ."""
        didi = self.config.didi
        each = didi.group_size if didi.grouping == "state" or self.config.prompt else 1
        x = torch.cat([part.rollout.x[::each] for part in parts])
        written = torch.cat([part.rollout.written[::each] for part in parts])
        return unique_ngrams(self.world.gather(x), self.world.gather(written))


def _told(margin: Tensor, written: Tensor) -> Tensor:
    """How many texts were told apart, margin (B,) above 0; half of those with nothing to see."""
    return torch.where(written.any(1), (margin > 0).float(), 0.5).sum()


def smooth_bce(log_ratio: Tensor, where: Tensor, target: float) -> Tensor:
    """Cross-entropy against one target, mean over the selected positions of each text.

    Shapes: log_ratio (B, L), where (B, L) -> (B,); 0 where nothing is selected.
    """
    losses = F.binary_cross_entropy_with_logits(
        log_ratio, torch.full_like(log_ratio, target), reduction="none"
    )
    return torch.where(where, losses, 0.0).sum(1) / where.sum(1).clamp(min=1)
