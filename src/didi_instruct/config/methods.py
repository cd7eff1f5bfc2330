"""Settings of the methods of distillation, one section of a recipe each."""

from dataclasses import dataclass
from typing import Annotated, Literal

from didi_instruct.config.schema import (
    FINITE,
    Bound,
    Count,
    Fraction,
    Inside,
    Natural,
    NonNegative,
    Positive,
    Share,
    SomeStepCounts,
    at_least,
)
from didi_instruct.errors import UserError


@dataclass(frozen=True, slots=True)
class Rounds:
    """Rounds of a training whose numbers of iterations differ by one at most."""

    count: int
    iterations: int
    """Iterations of all rounds."""

    def of(self, step: int) -> int:
        """Round of an iteration, from 0."""
        return step * self.count // self.iterations

    def begins(self, step: int) -> bool:
        """True for the first iteration of every round but the first."""
        return step > 0 and self.of(step) != self.of(step - 1)


def share(section: str, total: int, iterations: int | None, usual: int, most: int) -> Rounds:
    """Divide `total` iterations into rounds of `iterations`, or into the `usual` number of rounds.

    There are fewer than usual if there are fewer iterations, or if only `most` are possible.
    """
    if iterations is None:
        return Rounds(min(usual, most, total), total)
    rounds, rest = divmod(total, iterations)
    if rest:
        raise UserError(
            f"train.steps is {total}, which is not a whole number of rounds of "
            f"{section}.iterations, {iterations}: change one of the two, or use "
            f"{section}.iterations=null, which shares the steps evenly."
        )
    return Rounds(rounds, total)


Grouping = Literal["batch", "tau", "state"]
KL = Literal["forward", "backward", "jeffreys"]
BETA = Bound(lambda v: len(v) == 2 and min(v) >= 1, "two whole numbers, 1 or more")
SMOOTHING = Bound(lambda v: 0 <= v < 0.5, "0 or more, below 0.5")
GAMMA = Bound(
    lambda v: len(v) == 2 and -30 <= v[0] < v[1] <= 30,
    "two numbers from -30 to 30, the smaller first",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class DidiConfig:
    """DiDi-Instruct (Algorithm 1) and its variants: the student's side."""

    pi: Annotated[tuple[int, int], BETA] = (1, 1)
    """Parameters of the Beta distribution of τ: (2, 5) prefers small times, (5, 2) large ones."""
    omega: Literal["constant", "schedule"] = "constant"
    """Weight ω of a time: 1, or -α'/(1 - α), which is 1/τ for the log-linear schedule."""
    omega_min_time: Inside = 0.05
    """Smaller times get the weight of this one, since 1/τ is unbounded."""
    importance_weighting: bool = False
    """Divide the weight by the density of τ, so that `pi` changes only the variance. Unbounded
    where the density falls to 0."""
    score_decomposition: bool = True
    """Generate by way of z_τ; otherwise in one step from all masks to text."""
    coupled_time: bool = True
    """Compare texts at the τ of the student's path; otherwise at an independent time."""
    rollout_steps: Count = 1
    """K, the student's steps from all masks to z_τ; 1 in the paper. With `order=streams`, the steps
    of the whole path, of which z_τ is the last state before τ."""
    score_steps: Literal["all", "last"] = "all"
    """Steps whose log-probability is trained: all, or only the one from z_τ to text."""
    log_prob: Literal["mean", "sum"] = "mean"
    """Log-probability of a text: mean over its scored tokens, or their sum."""
    grouping: Grouping = "batch"
    """Texts that share a baseline: the batch, each with its own τ (the paper); `group_size` texts
    with the same τ; or `group_size` texts with the same z_τ and the same corruption mask."""
    group_size: int = 4
    """G, texts per group of the groupings `tau` and `state`, and per prompt."""
    baseline: Literal["mean", "leave-one-out"] = "mean"
    scale: Literal["group", "batch", "none"] = "group"
    """Rewards whose standard deviation divides the centred rewards."""
    advantage_eps: Positive = 1e-6
    advantage_clip: NonNegative = 5.0
    """Largest advantage; 0 does not clip."""
    regularisation: bool = True
    """Add the KL and entropy terms."""
    kl: KL = "forward"
    """KL(teacher ‖ student), KL(student ‖ teacher), or their mean."""
    kl_weight: NonNegative = 0.05
    """Weight of the KL per masked position, summed over the scored steps."""
    entropy_weight: NonNegative = 0.0005

    def __post_init__(self) -> None:
        """Refuse settings that contradict each other."""
        if self.group_size < 2:
            raise UserError(
                f"didi.group_size is {self.group_size}, but an advantage compares rollouts within "
                "a group: use 2 or more."
            )
        if self.grouping == "state" and not self.score_decomposition:
            raise UserError("didi.grouping=state shares z_τ: it needs didi.score_decomposition.")
        if self.grouping == "state" and self.score_steps == "all":
            raise UserError(
                "didi.grouping=state shares the steps before z_τ, so their advantages cancel: "
                "use didi.score_steps=last."
            )
        if not self.score_decomposition and self.score_steps == "last":
            raise UserError(
                "didi.score_steps=last scores the jump from z_τ: it needs didi.score_decomposition."
            )
        if not self.score_decomposition and self.rollout_steps > 1:
            raise UserError(
                f"didi.rollout_steps is {self.rollout_steps}, the steps to z_τ: it needs "
                "didi.score_decomposition."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class DiscriminatorConfig:
    """The discriminator between the teacher's and the student's texts."""

    lr: Positive = 1e-6
    lr_warmup: Natural = 0
    """Updates of linear warm-up."""
    weight_decay: NonNegative | None = None
    """Weight decay of its matrices; null takes the student's, `optim.weight_decay`."""
    dropout: Fraction = 0.0
    """Dropout of the head's hidden units in updates; rewards use all of them."""
    trainable_blocks: Natural | None = 4
    """Last blocks that are trained with the head; null trains the whole network."""
    label_smoothing: Annotated[float, SMOOTHING] = 0.1
    """ε of the targets 1 - ε and ε."""
    positions: Literal["all", "masked"] = "all"
    """Positions of the cross-entropy; re-ranking by `sum` needs all."""
    steps: Count = 1
    """Updates per iteration, each on new texts."""
    warmup: Natural = 0
    """Iterations before the student learns: among `train.steps`, or added (`warmup_on_top`)."""
    chance: float | None = 0.52
    """Accuracy on texts below which the student waits, as its reward is noise. With null it never
    waits, as in the paper."""
    saturation: float | None = 0.95
    """Accuracy on positions above which the discriminator waits for the student. With null it
    never waits, as in the paper."""

    def __post_init__(self) -> None:
        """Refuse gates that leave no room between them."""
        low = 0.0 if self.chance is None else self.chance
        high = 1.0 if self.saturation is None else self.saturation
        if not 0 <= low < high <= 1:
            raise UserError(
                f"discriminator.chance is {self.chance} and discriminator.saturation "
                f"{self.saturation}: accuracies from 0 to 1, chance the smaller; null is off."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptsConfig:
    """Prompts whose answers are distilled; the prompts themselves are given."""

    source: str | None = None
    """JSON lines with `prompt`, and for `reference.source=data` an `answer`."""
    length: Count = 128
    """Tokens written after each prompt. An answer that ends earlier is filled with end-of-text
    tokens, if the teacher has learnt that."""
    longest: Count | None = None
    """Most tokens of a prompt; longer prompts are left out. By default what fits the teacher's
    window beside `length`."""
    chat: bool = True
    """Format prompts as user messages if the teacher's tokenizer has a chat template."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceConfig:
    """Source of the teacher's texts."""

    source: Literal["bank", "online", "data"] = "bank"
    """The teacher's samples, drawn once (`bank`) or in every iteration (`online`), or real text."""
    steps: Count = 128
    """Steps of the teacher's sampler; 1 with `online` is the paper's algorithm to the letter."""
    rows: Count = 8192
    """Texts of a bank."""
    bank: str | None = None
    """Folder of the bank, to share it between runs; by default in the run's folder."""
    seed: int = 0
    """Seed of the bank's texts; `train.seed` decides their order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenMatchingConfig:
    """Token-level matching: an auxiliary denoiser learns the student's distribution."""

    budgets: SomeStepCounts = (4, 8)
    """Step counts N of the paths that the student learns on."""
    contexts: Count = 1
    """Draws of the next tokens from each state."""
    aux_lr: Positive = 5e-4
    aux_steps: Count = 2
    """Updates of the auxiliary denoiser per iteration, each on fresh text."""
    warmup: Natural = 100
    """Iterations in which only the auxiliary denoiser learns."""
    ratio_clip: NonNegative = 5.0
    """Largest log-ratio of auxiliary over teacher; 0 does not clip."""
    anchor: NonNegative = 0.0
    """Weight of the KL to the teacher at the student's states."""
    kl: KL = "forward"
    completion: NonNegative = 0.0
    """Weight of the REINFORCE term: the effect of revealed tokens on hidden ones."""

    def __post_init__(self) -> None:
        """Refuse a completion term without draws to compare."""
        if self.completion and self.contexts < 2:
            raise UserError(
                f"token_matching.contexts is {self.contexts}, but the completion term compares "
                "draws that share a state: use 2 or more."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class MixtureConfig:
    """Mixture steps: all tokens of a step share a code, learnt by likelihood."""

    codes: Count = 16
    """K, the student's masks. A step gains log K nats at most; 1 is the plain likelihood of what
    each step reveals."""
    budgets: SomeStepCounts = (4, 8)
    """Step counts N of the paths whose steps the student learns."""
    random: Share = 0.0
    """Share of the texts that are revealed in random order whatever `order` is: keeps the
    likelihood of a student that learns another order."""
    learning: Count = 2
    """Codes of each text that learn, drawn from their posterior."""
    spread: NonNegative = 3.0
    """Initial distance of the new masks, in standard deviations of the embeddings."""


SDTT_ROUNDS = 7
"""Published number of rounds, from 1,024 steps to 8."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SdttConfig:
    """Self-distillation through time: in each round one step learns to be worth two."""

    steps: Annotated[int, at_least(2)] = 1024
    """Steps of the teacher in the first round; half as many in each that follows."""
    iterations: Count | None = None
    """Iterations of a round, after which the student becomes the teacher; `train.steps` are whole
    rounds. By default `train.steps` are divided evenly into the published 7 rounds."""
    divergence: Literal["backward", "forward", "mse", "tv"] = "backward"
    """KL(student ‖ target), KL(target ‖ student), the mean squared difference of log-probabilities,
    or the total variation."""
    grid: Literal["even", "published"] = "even"
    """Times of the teacher's two steps: t and t - dt as in the paper, or those of the released
    code, where a slip makes the first step reveal less."""

    def rounds(self, total: int) -> Rounds:
        """Return the rounds of `total` iterations; refuse broken rounds, or too many."""
        most = self.steps.bit_length() - 1
        rounds = share("sdtt", total, self.iterations, SDTT_ROUNDS, most)
        if rounds.count > most:
            raise UserError(
                f"sdtt.steps is {self.steps}, which {rounds.count} rounds cannot all halve: use "
                f"{most} rounds at most (train.steps / sdtt.iterations)."
            )
        return rounds


DIMO_RANDOM, DIMO_NOISE = 0.4, 0.1
"""Published start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DimoConfig:
    """DiMO, adapted to text: a few-step generator from a partly random start."""

    random: Fraction = DIMO_RANDOM
    """Share of the start's masks that are replaced by random tokens."""
    noise: Fraction = DIMO_NOISE
    """Share of Gaussian noise in the embeddings of the start, by standard deviation."""
    budgets: SomeStepCounts = (1,)
    """Step counts that the student learns."""
    beta: Annotated[float, FINITE] = 0.0
    """Weight of the reverse KL in the token gradient; that of the forward KL is 1 - beta. 0 is the
    difference of the two predictions, 1 seeks modes, negative values spread."""
    remask: Literal["arccos", "uniform"] = "arccos"
    """Distribution of the share that is masked again; `arccos` (published) masks much."""
    aux_lr: Positive = 1e-5
    aux_steps: Count = 1
    """Updates of the auxiliary denoiser per iteration, each on fresh text."""
    warmup: Natural = 0
    """Iterations in which only the auxiliary denoiser learns."""


DUO_ROUNDS = 5
"""Published number of rounds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DuoConfig:
    """DUO: rounds in which a uniform-state student learns at t the prediction at t - Δ."""

    steps: Annotated[int, at_least(2)] = 512
    """1/Δ of the first round; Δ doubles in each round that follows."""
    iterations: Count | None = None
    """Iterations of a round, after which the student is its own target; `train.steps` are whole
    rounds. By default `train.steps` are divided evenly into the published 5 rounds."""
    target: Literal["average", "student"] = "average"
    """Target of the next round: the average of the student's weights, or the weights themselves
    (always so without `train.ema`)."""
    kl: Literal["forward", "backward", "jeffreys"] = "backward"
    """KL(target ‖ student), KL(student ‖ target), or their mean."""
    clock: Literal["schedule", "gaussian"] = "schedule"
    """Clock that Δ is measured by: the schedule's time, in which samplers take even steps, or the
    log noise-to-signal ratio of the Gaussian latent between the bounds `gamma` (published)."""
    gamma: Annotated[tuple[float, float], GAMMA] = (-4.0, -1.0)
    """Log ratio of the clock `gaussian` at times 0 and 1. Bounds that leave nothing out depend on
    the vocabulary; these are for about 50,000 tokens."""

    def rounds(self, total: int) -> Rounds:
        """Return the rounds of `total` iterations; refuse broken rounds, or too many."""
        most = self.steps.bit_length()
        rounds = share("duo", total, self.iterations, DUO_ROUNDS, most)
        if rounds.count > most:
            raise UserError(
                f"duo.steps is {self.steps}, so in the last of {rounds.count} rounds Δ would be "
                f"above 1: use {most} rounds at most (train.steps / duo.iterations)."
            )
        return rounds

    def delta(self, number: int) -> float:
        """Δ of a round, counted from 0."""
        return float(2**number / self.steps)
