"""DiDi-Instruct: Algorithm 1 of the paper, with the switches of its ablations and beyond.

An iteration has two acts. First, without gradient, the student writes texts and they are corrupted
beside the teacher's; the discriminator takes a step, and its log-ratios become advantages over the
whole batch. Then the student scores the same tokens with gradient, part by part.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from didi_instruct.config.didi import DidiConfig
from didi_instruct.config.distill import DistillConfig
from didi_instruct.config.model import ModelConfig
from didi_instruct.distillation import losses
from didi_instruct.distillation.losses import PathScore
from didi_instruct.distillation.rollout import Jump, Rollout, rollout
from didi_instruct.distillation.run import USUAL_STEPS, Distillation, Loss, MethodEntry, MicroBatch
from didi_instruct.distillation.watch import RunningMean, unique_ngrams
from didi_instruct.errors import UserError
from didi_instruct.models.discriminator import Discriminator
from didi_instruct.process.masking import mask
from didi_instruct.sampling.ancestral import plain
from didi_instruct.sampling.denoiser import LogitsDenoiser
from didi_instruct.sampling.draw import Noise, Purpose
from didi_instruct.sampling.plan import flat_positions
from didi_instruct.sampling.state import Reads
from didi_instruct.seeding import mix
from didi_instruct.training.loop import Metrics
from didi_instruct.transfer import Later, sent


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
    texts = student_texts(d, batch, tau, reference if d.config.prompt else None)  # x ~ p_ν
    reference = sent(reference, device)
    time = tau if didi.coupled_time else _times(didi, noise, 1)
    # Texts that share a state are corrupted alike; those that share a prompt have one reference.
    shared = _texts_per_state(didi)
    group = sent(torch.arange(len(tau)) // shared, device)
    coins = noise.of_groups(shared).uniforms(d.length, Purpose.REMASK, 0)[group]
    fake = _corrupt(d, texts.x, texts.written, time, coins)  # z
    time = time[:: _texts_per_reference(d)]
    coins = _of_references(d, noise).uniforms(d.length, Purpose.REMASK, 1)
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


def _texts_per_reference(d: Distillation) -> int:
    return d.config.didi.group_size if d.config.prompt else 1


def _of_references(d: Distillation, noise: Noise) -> Noise:
    return replace(noise, samples=noise.samples[:: _texts_per_reference(d)])


def _references(d: Distillation, batch: MicroBatch) -> Tensor:
    """Reference texts of a part (R, L), wherever they come from."""
    each = _texts_per_reference(d)
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
    each = max(_texts_per_state(d.config.didi), _texts_per_reference(d))
    x = torch.cat([pair.rollout.x[::each] for pair in pairs])
    written = torch.cat([pair.rollout.written[::each] for pair in pairs])
    return unique_ngrams(d.world.gather(x), d.world.gather(written))


# The discriminator: it learns to tell texts apart, and rewards them

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
        self.learner = d.learner(discriminator, settings.lr, settings.weight_decay)
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
        z = torch.cat([pair.fake.z, pair.real.z])
        sigma = self.d.schedule.sigma(torch.cat([pair.fake.t, pair.real.t]))
        dropout = self._dropout(pair)

        def forward(network: Discriminator) -> tuple[Tensor, Tensor | None]:
            if first:  # a power iteration once per update, however many passes
                network.iterate()
            if not (self.keep_states and network.frozen):
                return network(z, sigma, dropout=dropout).clone(), None  # FSDP mistrusts views
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
        texts = enumerate((noise, _of_references(self.d, noise)))
        units = torch.cat([each.uniforms(count, Purpose.DROPOUT, kind) for kind, each in texts])
        return ((units >= share).float() / (1 - share)).view(len(units), self.d.length, -1)

    @torch.no_grad()
    def reward(self, pair: Pair, below: Tensor | None = None) -> Tensor:
        """Rewards of the student's texts under the discriminator as it is now, Eq. (6): (B,).

        `below` are the states of its frozen blocks, if they are known.
        """
        z, sigma = pair.fake.z, self.d.schedule.sigma(pair.fake.t)

        def forward(network: Discriminator) -> Tensor:
            return network(z, sigma) if below is None else network.above(below, sigma)

        ratio = self.learner.run(forward)
        return losses.rewards(ratio, z == self.d.mask_id, pair.fake.written)


def num_correct(margin: Tensor, written: Tensor) -> Tensor:
    """Correctly classified texts, margin (B,) above 0; empty ones count one half."""
    return torch.where(written.any(1), (margin > 0).float(), 0.5).sum()


def share_correct(log_ratio: Tensor, where: Tensor) -> Tensor:
    """Sum over texts of the share of positions (B, L) classified correctly, log-ratio above 0."""
    shares = (where & (log_ratio > 0)).sum(1) / where.sum(1).clamp(min=1)
    return torch.where(where.any(1), shares, 0.5).sum()


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

    def teacher_logits(jump: Jump) -> Tensor | None:
        if not didi.regularisation:
            return None
        if jump is path[0] and d.starts.shared:
            return d.teacher_at_start
        return d.teacher_logits(Reads(jump.z), jump.t, flat_positions(jump.masked))

    teacher = [teacher_logits(jump) for jump in jumps]

    def forward(network: Any) -> PathScore:
        return losses.score_path(network, d.schedule, jumps, x, teacher, didi.kl)

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
