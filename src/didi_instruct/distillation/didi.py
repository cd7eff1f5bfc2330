"""DiDi-Instruct: Algorithm 1 of the paper, with the switches of its ablations and beyond.

An iteration has two acts. First, without gradient, the student writes texts and they are corrupted
beside the teacher's; the discriminator takes a step, and its log-ratios become advantages over the
whole batch. Then the student scores the same tokens with gradient, part by part.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from didi_instruct.config.distill import DistillConfig
from didi_instruct.data.dataset import TokenSource
from didi_instruct.distillation.discriminating import Compared, DiscriminatorTask
from didi_instruct.distillation.hosting import Tensors
from didi_instruct.distillation.monitor import Totals, unique_ngrams
from didi_instruct.distillation.rewards import advantages
from didi_instruct.distillation.rollout import Jump, Noise, References, Rollout, rollout
from didi_instruct.distillation.scoring import masks_of, score
from didi_instruct.distillation.task import Teacher
from didi_instruct.models.dit import DiT
from didi_instruct.process.masking import mask
from didi_instruct.process.weighting import beta_density, beta_times, omega
from didi_instruct.sampling.chain import Purpose
from didi_instruct.training.distributed import World
from didi_instruct.transfer import sent


class DidiTask(DiscriminatorTask):
    """Student and discriminator, in turns."""

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
        super().__init__(config, teacher, student, world, data=data)
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
        self.remember_variety(step)
        for turn in range(self.config.discriminator.steps):
            parts = [self.compare(step, turn, indices) for indices in self.parts()]
            taught = self.teach_discriminator(step, parts)
        numbers, accuracy = taught.numbers, self.accuracy.add(taught.accuracy)
        self.sharpness.add(taught.sharpness)

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
    def drawn_variety(self, turn: int) -> Tensor:
        """Path entropy per token of a batch that nobody learns from."""
        totals = Totals()
        for indices in self.parts():
            noise = self.noise(0, turn, indices)
            prompts = self._reference(0, turn, indices) if self.config.prompt else None
            texts = self._roll_out(noise, self._times(noise, 0), prompts)
            totals.add(entropy=self.path_entropy(texts))
        return self.summed(totals)["entropy"]

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
