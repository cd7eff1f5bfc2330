"""DiDi-Instruct: Algorithm 1 of the paper, with the switches of its ablations and beyond.

An iteration has two acts. First, without gradient, the student writes texts and they are corrupted
beside the teacher's; the discriminator takes a step, and its log-ratios become advantages over the
whole batch. Then the student scores the same tokens with gradient, part by part.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from didi_instruct.config.distill import DistillConfig
from didi_instruct.config.model import ModelConfig
from didi_instruct.distillation.critic import Critic, Pair
from didi_instruct.distillation.losses import (
    Advantages,
    PathScore,
    advantages,
    beta_density,
    beta_times,
    masks_of,
    omega,
    score_path,
)
from didi_instruct.distillation.replica import Metrics
from didi_instruct.distillation.rollout import Jump, Noise, Rollout, rollout
from didi_instruct.distillation.run import (
    USUAL_STEPS,
    Distillation,
    MethodEntry,
    MicroBatch,
)
from didi_instruct.distillation.watch import Totals, unique_ngrams
from didi_instruct.errors import UserError
from didi_instruct.models.discriminator import Discriminator
from didi_instruct.process.masking import mask
from didi_instruct.sampling.draw import Purpose
from didi_instruct.seeding import mix
from didi_instruct.transfer import sent

StudentTexts = Callable[[Distillation, MicroBatch, Tensor, Tensor | None], Rollout]
"""(distillation, part, τ (B,), rows that begin with the prompts or None) -> texts."""
Score = Callable[[Distillation, Pair], PathScore]
"""Scores of the student's texts, with gradient."""


class Didi:
    """Student and discriminator, in turns."""

    def __init__(
        self,
        d: Distillation,
        discriminator: Discriminator,
        *,
        student_texts: StudentTexts | None = None,
        path_score: Score | None = None,
        keep_states: bool = True,
    ) -> None:
        """Replace parts of the iteration, for a benchmark, by functions of the same law."""
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
            pairs = [make_pair(d, batch, self.student_texts) for batch in batches]
            update = critic.update(step, pairs)  # Eq. (8)
        accuracy = critic.remember(update)
        rewarded = [critic.reward(*each) for each in zip(pairs, update.states, strict=True)]
        reward = d.world.gather(torch.cat(rewarded))  # Eq. (6)
        advantage = normalise(d.config, reward)  # Eq. (7)
        at_chance = d.learns(step) and accuracy < settings.chance
        learns, metrics = d.learns(step) and not at_chance, update.metrics
        if learns:
            share = d.world.share(len(reward))
            own = advantage.values[share.start : share.stop]
            metrics |= update_student(d, step, pairs, own, self.path_score)  # Eq. (5) and (9)
        return metrics | {
            "student_waits": d.number(not learns),
            "at_chance": d.number(at_chance),
            "advantage_std": advantage.values.std(correction=0),
            "advantage_max": advantage.values.abs().max(),
            "clip_fraction": advantage.clip_fraction,
            "unique_4gram": _unique(d, pairs),
            **d.start_metrics(step),
        }


# First act: texts, and the discriminator's view of them


@torch.no_grad()
def make_pair(d: Distillation, batch: MicroBatch, student_texts: StudentTexts) -> Pair:
    """Roll the student out, take reference texts, corrupt both to the same time."""
    didi, noise = d.config.didi, batch.noise
    tau = _times(d, noise, 0)  # τ ~ π
    reference = _references(d, batch)
    texts = student_texts(d, batch, tau, reference if d.config.prompt else None)
    reference = sent(reference, d.world.device)
    time = tau if didi.coupled_time else _times(d, noise, 1)
    # Texts that share a state are corrupted alike; those that share a prompt have one reference.
    shared = didi.group_size if didi.grouping == "state" else 1
    group = sent(torch.arange(len(tau)) // shared, d.world.device)
    coins = noise.of_groups(shared).uniforms(d.length, Purpose.REMASK, 0)[group]
    first_of_prompt = torch.arange(len(reference)) * _texts_per_reference(d)
    of_reference = replace(noise, indices=noise.indices[first_of_prompt])
    other = of_reference.uniforms(d.length, Purpose.REMASK, 1)
    t, t_reference = (sent(host, d.world.device) for host in (time, time[first_of_prompt]))
    written = d.starts.open(reference)
    return Pair(
        batch,
        texts,
        t,
        _corrupt(d, texts.x, texts.written, t, coins),
        t_reference,
        _corrupt(d, reference, written, t_reference, other),
        written,
    )


def write_texts(d: Distillation, batch: MicroBatch, tau: Tensor, prompts: Tensor | None) -> Rollout:
    """Texts of the student that go through z_τ."""
    didi = d.config.didi
    shared = didi.group_size if didi.grouping == "state" else 1
    rows = None if prompts is None else prompts.cpu()
    start, state = d.starts(batch.noise.on_host, rows, shared)
    return rollout(
        d.student.replica.logits,
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


def _times(d: Distillation, noise: Noise, which: int) -> Tensor:
    """Times ~ π (B,) for each text, or one for each group, on the host."""
    didi, (a, b) = d.config.didi, d.config.didi.pi
    size = 1 if didi.grouping == "batch" else didi.group_size
    uniforms = noise.on_host.of_groups(size).uniforms(a + b - 1, Purpose.START, which)
    return beta_times(a, b, uniforms).repeat_interleave(size)


def _texts_per_reference(d: Distillation) -> int:
    """A reference text for each text of the student; with prompts, for each group of one prompt."""
    return d.config.didi.group_size if d.config.prompt else 1


def _references(d: Distillation, batch: MicroBatch) -> Tensor:
    """Reference texts of a part (R, L), wherever they come from."""
    each = _texts_per_reference(d)
    total = d.config.train.batch_size // each
    number = batch.step * d.config.discriminator.steps + batch.turn
    first = number * total + int(batch.indices[0]) // each
    return d.references(first, len(batch.indices) // each)


def _corrupt(d: Distillation, x: Tensor, written: Tensor, t: Tensor, coins: Tensor) -> Tensor:
    """Corrupt text to time t; what was given stays."""
    z = mask(x, d.schedule.alpha(t)[:, None], d.mask_id, coins)
    return torch.where(written, z, x)


def normalise(config: DistillConfig, reward: Tensor) -> Advantages:
    """Advantages of the rewards (B,) of a whole batch, Eq. (7)."""
    didi = config.didi
    return advantages(
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
    """Policy gradient with KL and entropy terms; advantage (B,) of this process's texts."""
    didi, batch = d.config.didi, d.config.train.batch_size
    totals = Totals()
    for pair, own in zip(pairs, torch.split(advantage, [len(p.z) for p in pairs]), strict=True):
        score = path_score(d, pair)
        policy = -(time_weight(d, pair.t) * own * score.log_prob).sum() / batch
        kl, entropy = score.kl.sum() / batch, score.entropy.sum() / batch
        loss = policy
        if didi.regularisation:
            loss = loss + didi.kl_weight * kl - didi.entropy_weight * entropy
        d.student.backward(loss, sync=pair.batch.last)
        totals.add(loss=loss, policy_loss=policy, kl=kl, entropy=entropy)
    return d.summed(totals) | d.update_student(step)


def score_texts(d: Distillation, pair: Pair) -> PathScore:
    """Score the student's texts along their path, or its last jump alone, Eq. (9)."""
    didi, x = d.config.didi, pair.rollout.x
    jumps = pair.rollout.jumps if didi.score_steps == "all" else pair.rollout.jumps[-1:]
    teacher: list[Tensor | None] = [None] * len(jumps)
    if didi.regularisation:
        first = pair.rollout.jumps[0]
        teacher = [_teacher_logits(d, jump, at_start=jump is first) for jump in jumps]

    def forward(network: Any) -> PathScore:
        return score_path(network, d.schedule, jumps, x, teacher, didi.kl)

    score: PathScore = d.student.replica.run(forward, sync=pair.batch.last)
    return mean_log_prob(score, jumps) if didi.log_prob == "mean" else score


def mean_log_prob(score: PathScore, jumps: Sequence[Jump]) -> PathScore:
    """The same with `log_prob` per drawn token."""
    tokens = torch.stack([jump.writes.sum(1) for jump in jumps]).sum(0).clamp(min=1)
    return score._replace(log_prob=score.log_prob / sent(tokens, score.log_prob.device))


def time_weight(d: Distillation, t: Tensor) -> Tensor:
    """ω(t), or ω(t) / π(t), of the time at which a text is compared (Theorem 3.1)."""
    didi = d.config.didi
    weight = omega(d.schedule, t, didi.omega, didi.omega_min_time)
    return weight / beta_density(*didi.pi, t) if didi.importance_weighting else weight


@torch.no_grad()
def _teacher_logits(d: Distillation, jump: Jump, *, at_start: bool) -> Tensor:
    """Teacher's logits at the masks of a jump's states; kept where all texts start."""
    if at_start and d.starts.shared:
        return d.teacher_at_start()
    return d.teacher_logits(jump.z, jump.t, masks_of(jump))


def _unique(d: Distillation, pairs: Sequence[Pair]) -> Tensor:
    """Share of distinct 4-grams of the written tokens, one text for each prompt or z_τ."""
    didi = d.config.didi
    each = didi.group_size if didi.grouping == "state" or d.config.prompt else 1
    x = torch.cat([pair.rollout.x[::each] for pair in pairs])
    written = torch.cat([pair.rollout.written[::each] for pair in pairs])
    return unique_ngrams(d.world.gather(x), d.world.gather(written))


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
