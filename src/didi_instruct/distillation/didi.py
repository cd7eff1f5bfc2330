"""DiDi-Instruct: Algorithm 1 of the paper, with the switches of its ablations and beyond.

An iteration has two acts. First, without gradient, the student writes texts and they are corrupted
beside the teacher's; the discriminator takes a step, and its log-ratios become advantages over the
whole batch. Then the student scores the same tokens with gradient, part by part.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from didi_instruct.config.distill import DistillConfig
from didi_instruct.config.methods import DidiConfig
from didi_instruct.config.model import ModelConfig
from didi_instruct.distillation import losses
from didi_instruct.distillation.critic import (
    Corrupted,
    Critic,
    Pair,
    reference_noise,
    texts_per_reference,
)
from didi_instruct.distillation.losses import LOGIT_ROWS, HeadInParts, PathScore
from didi_instruct.distillation.rollout import Jump, Rollout, rollout
from didi_instruct.distillation.run import USUAL_STEPS, Distillation, Loss, MethodEntry, MicroBatch
from didi_instruct.distillation.watch import unique_ngrams
from didi_instruct.errors import UserError
from didi_instruct.models.discriminator import Discriminator
from didi_instruct.process.masking import mask
from didi_instruct.sampling.ancestral import plain
from didi_instruct.sampling.denoiser import LogitsDenoiser
from didi_instruct.sampling.draw import Noise, Purpose
from didi_instruct.sampling.plan import flat_positions
from didi_instruct.seeding import mix
from didi_instruct.training.loop import Metrics
from didi_instruct.transfer import sent

StudentTexts = Callable[[Distillation, MicroBatch, Tensor, Tensor | None], Rollout]
"""(distillation, part, τ (B,), rows that begin with the prompts or None) -> texts."""
Score = Callable[[Distillation, Pair], PathScore]
"""Scores of the student's texts, with gradient."""


class Didi:
    """Student p_ν and discriminator D_λ, updated in turns."""

    def __init__(
        self,
        d: Distillation,
        discriminator: Discriminator,
        *,
        student_texts: StudentTexts | None = None,
        path_score: Score | None = None,
        keep_states: bool = True,
    ) -> None:
        """A benchmark replaces parts of the iteration by others that give the same numbers."""
        self.d, self.critic = d, Critic(d, discriminator, keep_states=keep_states)
        self.student_texts = student_texts or write_texts
        self.path_score = path_score or score_texts
        self.learners = {"discriminator": self.critic.learner}
        self.state = {
            "watch/accuracy": self.critic.accuracy.state,
            "watch/sharpness": self.critic.sharpness.state,
        }

    def step(self, step: int) -> Metrics:
        """One iteration of Algorithm 1."""
        d, critic, settings = self.d, self.critic, self.d.config.discriminator
        for turn in range(settings.steps):
            batches = d.micro_batches(step, turn)
            pairs = [make_pair(d, each, self.student_texts) for each in batches]  # t, x, x', z, z'
            update = critic.update(step, pairs)  # D_λ by Eq. (8)
        metrics, accuracy = update.metrics, critic.accuracy.add(update.accuracy)
        critic.sharpness.add(update.sharpness)
        known = zip(pairs, update.states, strict=True)
        reward = torch.cat([critic.reward(*each) for each in known])  # R of Eq. (6)
        advantage = normalise(d.config.didi, d.world.gather(reward))  # Eq. (7)
        at_chance = d.learns(step) and accuracy < (settings.chance or 0)
        learns = d.learns(step) and not at_chance
        if learns:  # p_ν by Eq. (5) and (9)
            metrics |= update_student(d, step, pairs, advantage.values, self.path_score)
        return metrics | {
            "student_waits": d.number(not learns),
            "at_chance": d.number(at_chance),
            "advantage_std": advantage.values.std(correction=0),
            "advantage_max": advantage.values.abs().max(),
            "clip_fraction": advantage.clip_fraction,
            "unique_4gram": _unique(d, pairs),
            **d.start_metrics(step),
        }


# First act: texts of both, at one noise level


@torch.no_grad()
def make_pair(d: Distillation, batch: MicroBatch, student_texts: StudentTexts) -> Pair:
    """Texts x and x' of the student and of the teacher, corrupted to one time: z and z'."""
    didi, noise, device = d.config.didi, batch.noise, d.world.device
    tau = _times(didi, noise, 0)  # t ~ π
    reference = _references(d, batch)  # x' ~ p_θ
    texts = student_texts(d, batch, tau, reference if d.config.continues else None)  # x ~ p_ν
    reference = sent(reference, device)
    time = tau if didi.coupled_time else _times(didi, noise, 1)
    # Texts that share a state are corrupted alike; those that share a prompt have one reference.
    shared = _texts_per_state(didi)
    group = sent(torch.arange(len(tau)) // shared, device)
    coins = noise.of_groups(shared).uniforms(d.length, Purpose.REMASK, 0)[group]
    fake = _corrupt(d, texts.x, texts.written, time, coins)  # z
    time = time[:: texts_per_reference(d)]
    coins = reference_noise(d, noise).uniforms(d.length, Purpose.REMASK, 1)
    real = _corrupt(d, reference, d.starts.open(reference), time, coins)  # z'
    return Pair(batch, texts, fake, real)


def write_texts(d: Distillation, batch: MicroBatch, tau: Tensor, prompts: Tensor | None) -> Rollout:
    """Texts of the student that go through z_τ."""
    didi, shared = d.config.didi, _texts_per_state(d.config.didi)
    rows = None if prompts is None else prompts.cpu()
    start, state = d.starts(batch.noise.planned, rows, shared)
    return rollout(
        plain(LogitsDenoiser(d.student.logits, d.mask_id)),
        d.schedule,
        start,
        state,
        tau if didi.score_decomposition else None,
        batch.noise,
        d.mask_id,
        steps=didi.rollout_steps,
        shared=shared,
        order=d.config.order,
    )


def _times(didi: DidiConfig, noise: Noise, which: int) -> Tensor:
    """Times ~ π (B,) for each text, or one for each group, on the host."""
    a, b = didi.pi
    size = 1 if didi.grouping == "batch" else didi.group_size
    uniforms = noise.planned.of_groups(size).uniforms(a + b - 1, Purpose.START, which)
    return losses.beta_times(a, b, uniforms).repeat_interleave(size)


def _texts_per_state(didi: DidiConfig) -> int:
    return didi.group_size if didi.grouping == "state" else 1


def _references(d: Distillation, batch: MicroBatch) -> Tensor:
    """Reference texts of a part (R, L), wherever they come from."""
    each = texts_per_reference(d)
    number = batch.step * d.config.discriminator.steps + batch.turn
    first = (number * d.config.train.batch_size + int(batch.indices[0])) // each
    return d.references(first, len(batch.indices) // each)


def _corrupt(d: Distillation, x: Tensor, written: Tensor, t: Tensor, coins: Tensor) -> Corrupted:
    """Corrupt text to times t (B,), which may be on the host, Eq. (1); what was given stays."""
    t = sent(t, x.device)
    z = mask(x, d.schedule.alpha(t)[:, None], d.mask_id, coins)
    return Corrupted(torch.where(written, z, x), t, written)


def _unique(d: Distillation, pairs: Sequence[Pair]) -> Tensor:
    """Share of distinct 4-grams of the written tokens, one text for each prompt or z_τ."""
    each = max(_texts_per_state(d.config.didi), texts_per_reference(d))
    x = torch.cat([pair.rollout.x[::each] for pair in pairs])
    written = torch.cat([pair.rollout.written[::each] for pair in pairs])
    return unique_ngrams(d.world.gather(x), d.world.gather(written))


def normalise(didi: DidiConfig, reward: Tensor) -> losses.Advantages:
    """Advantages of the rewards (B,) of a whole batch, Eq. (7)."""
    return losses.advantages(
        reward,
        len(reward) if didi.grouping == "batch" else didi.group_size,
        baseline=didi.baseline,
        scale=didi.scale,
        eps=didi.advantage_eps,
        clip=didi.advantage_clip,
    )


# Second act: the student


def update_student(
    d: Distillation, step: int, pairs: Sequence[Pair], advantage: Tensor, path_score: Score
) -> Metrics:
    """Policy gradient with KL and entropy terms; advantage (B,) of the texts of all processes."""
    didi, batch = d.config.didi, d.config.train.batch_size

    def loss_of(pair: Pair, advantage: Tensor) -> Loss:
        score = path_score(d, pair)
        policy = -(time_weight(d, pair.fake.t) * advantage * score.log_prob).sum() / batch
        kl, entropy = score.kl.sum() / batch, score.entropy.sum() / batch
        loss = policy
        if didi.regularisation:
            loss = policy + didi.kl_weight * kl - didi.entropy_weight * entropy
        return loss, {"policy_loss": policy, "kl": kl, "entropy": entropy}

    share = d.world.share(len(advantage))
    sizes = [len(pair.fake.z) for pair in pairs]
    own = torch.split(advantage[share.start : share.stop], sizes)
    return d.descend(step, loss_of, pairs, own)


def score_texts(d: Distillation, pair: Pair) -> PathScore:
    """Score the student's texts along their path, or its last jump alone, Eq. (9)."""
    didi, path, x = d.config.didi, pair.rollout.jumps, pair.rollout.x
    jumps = path if didi.score_steps == "all" else path[-1:]
    # Adapters are for large networks, whose vocabularies are large too.
    parts = HeadInParts(LOGIT_ROWS, d.teacher_head) if d.config.lora.rank else None

    def teacher_logits(jump: Jump) -> Tensor | None:
        if not didi.regularisation:
            return None
        if parts is not None:
            return d.teacher_states(d.reads(jump.z), flat_positions(jump.masked))
        if jump is path[0] and d.starts.shared:
            return d.teacher_at_start
        return d.teacher_logits(d.reads(jump.z), jump.t, flat_positions(jump.masked))

    teacher = [teacher_logits(jump) for jump in jumps]

    def forward(network: Any) -> PathScore:
        return losses.score_path(network, d.schedule, jumps, x, teacher, didi.kl, d.reads, parts)

    score: PathScore = d.student.run(forward)
    return mean_log_prob(score, jumps) if didi.log_prob == "mean" else score


def mean_log_prob(score: PathScore, jumps: Sequence[Jump]) -> PathScore:
    """Divide `log_prob` by the number of drawn tokens of each text."""
    tokens = torch.stack([jump.writes.sum(1) for jump in jumps]).sum(0).clamp(min=1)
    return score._replace(log_prob=score.log_prob / sent(tokens, score.log_prob.device))


def time_weight(d: Distillation, t: Tensor) -> Tensor:
    """ω(t), or ω(t) / π(t), of the time at which a text is compared (Theorem 3.1)."""
    didi = d.config.didi
    weight = losses.omega(d.schedule, t, didi.omega, didi.omega_min_time)
    return weight / losses.beta_density(*didi.pi, t) if didi.importance_weighting else weight


# The method's entry


def _networks(config: DistillConfig, teacher: Any, student: Any) -> tuple[Any, Discriminator]:
    """The discriminator begins as the teacher, with a head of its own."""
    torch.manual_seed(mix(config.train.seed, "discriminator"))
    discriminator = Discriminator.from_network(teacher).requires_grad_(True)
    if config.discriminator.trainable_blocks is not None:
        discriminator.freeze_lower(config.discriminator.trainable_blocks)
    return student, discriminator


def _check(config: DistillConfig, teacher: ModelConfig) -> None:
    blocks = config.discriminator.trainable_blocks
    if blocks is not None and blocks > teacher.layers:
        raise UserError(
            f"discriminator.trainable_blocks is {blocks}, but the teacher has {teacher.layers} "
            "blocks: use that many, or null for all weights."
        )


def _recurring_passes(config: DistillConfig) -> bool:
    """Unless texts of the teacher, or steps of the student, take more passes in turns."""
    few = config.didi.rollout_steps == config.discriminator.steps == 1
    return few and config.reference.source != "online"


def _sampling_flags(config: DistillConfig) -> str:
    # In an order, rollouts are whole paths; else z_τ may lie anywhere on one.
    return f"--steps {USUAL_STEPS if config.order == 'random' else config.didi.rollout_steps}"


ENTRY = MethodEntry(
    networks=_networks,
    make=Didi,
    lr_setting_names="optim.lr or discriminator.lr",
    texts="reference",
    recurring_passes=_recurring_passes,
    collapse_metric="path_entropy",
    restraint="didi.kl_weight",
    check=_check,
    sampling_flags=_sampling_flags,
)
