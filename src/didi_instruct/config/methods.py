"""Settings of the methods of distillation, a section of a recipe each."""

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
    """Iterations shared among rounds, evenly: none has more than one iteration above another."""

    count: int
    iterations: int
    """Of all rounds."""

    def of(self, step: int) -> int:
        """Which round an iteration belongs to, from 0."""
        return step * self.count // self.iterations

    def begins(self, step: int) -> bool:
        """Whether an iteration is the first of a round that follows another."""
        return step > 0 and self.of(step) != self.of(step - 1)


def share(section: str, total: int, iterations: int | None, usual: int, most: int) -> Rounds:
    """Whole rounds of so many iterations; where nobody says how many, the `usual` rounds.

    Those are fewer where there are fewer iterations, or where no more than `most` are possible.
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
    """Algorithm 1 of the paper and its variants: the student's side."""

    pi: Annotated[tuple[int, int], BETA] = (1, 1)
    """Parameters of the Beta law of τ; (2, 5) prefers small times, (5, 2) large ones."""
    omega: Literal["constant", "schedule"] = "constant"
    """Weight of a time: 1, or -α'/(1 - α), which is 1/τ for the log-linear schedule."""
    omega_min_time: Inside = 0.05
    """Times below it weigh no more than it does: 1/τ has no bound."""
    importance_weighting: bool = False
    """Divide the weight by the density of τ, so that `pi` changes the noise alone. It has no bound
    where `pi` falls to 0."""
    score_decomposition: bool = True
    """Go through z_τ; without it, one step from all masks to text."""
    coupled_time: bool = True
    """Compare texts at the τ the student passed through; without it, at a time of their own."""
    rollout_steps: Count = 1
    """Student steps from all masks to z_τ; K = 1 in the paper. In `order=streams`, those of the
    whole path, on which z_τ is the last stop before τ."""
    score_steps: Literal["all", "last"] = "all"
    """Steps whose log-probability is trained: all, or only the jump from z_τ to text."""
    log_prob: Literal["mean", "sum"] = "mean"
    """Log-probability of a text as a mean over its scored tokens, or as their sum."""
    grouping: Grouping = "batch"
    """Texts that share a baseline: the batch, each with a τ of its own (the paper); `group_size`
    with the same τ; `group_size` with the same z_τ and the same corruption mask."""
    group_size: int = 4
    """G of the groupings `tau` and `state`, and texts per prompt."""
    baseline: Literal["mean", "leave-one-out"] = "mean"
    scale: Literal["group", "batch", "none"] = "group"
    """Whose standard deviation divides the centred rewards."""
    advantage_eps: Positive = 1e-6
    advantage_clip: NonNegative = 5.0
    """Largest advantage; 0 does not clip."""
    regularisation: bool = True
    """The two terms below."""
    kl: KL = "forward"
    """KL(teacher ‖ student), KL(student ‖ teacher), or their mean."""
    kl_weight: NonNegative = 0.05
    """Of the KL per masked position, summed over the scored steps."""
    entropy_weight: NonNegative = 0.0005

    def __post_init__(self) -> None:
        """Refuse settings that mean nothing."""
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
    """The network that tells the teacher's text from the student's."""

    lr: Positive = 1e-6
    lr_warmup: Natural = 0
    """Updates in which its learning rate rises to `lr`."""
    weight_decay: NonNegative | None = None
    """Of its matrices; null: `optim.weight_decay`, the student's."""
    dropout: Fraction = 0.0
    """Share of the head's hidden units that its updates leave out; rewards see all of them."""
    trainable_blocks: Natural | None = 4
    """Last blocks that train beside the head; null: the whole network."""
    label_smoothing: Annotated[float, SMOOTHING] = 0.1
    """Targets are 1 - this and this."""
    positions: Literal["all", "masked"] = "all"
    """Where the cross-entropy is taken; re-ranking by `sum` needs all."""
    steps: Count = 1
    """Updates per iteration, each on fresh text."""
    warmup: Natural = 0
    """Iterations before the student begins to learn: among `train.steps`, or `warmup_on_top`."""
    chance: float | None = 0.52
    """Share of texts told apart below which the student waits: its reward is noise. null: it never
    waits, as in the paper."""
    saturation: float | None = 0.95
    """Share of positions told apart above which the discriminator waits for the student. null: it
    never waits, as in the paper."""

    def __post_init__(self) -> None:
        """Refuse settings that cannot train."""
        low = 0.0 if self.chance is None else self.chance
        high = 1.0 if self.saturation is None else self.saturation
        if not 0 <= low < high <= 1:
            raise UserError(
                f"discriminator.chance is {self.chance} and discriminator.saturation "
                f"{self.saturation}: accuracies from 0 to 1, chance the smaller; null is off."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptsConfig:
    """Prompts whose answers are distilled: they are given, and never compared."""

    source: str | None = None
    """JSON lines with `prompt`, and for `reference.source=data` an `answer`."""
    length: int = 128
    """Tokens that are written after each prompt. An answer that ends earlier is filled with ends of
    text, as far as the teacher has learnt that."""
    longest: int | None = None
    """Tokens of a prompt at most: longer ones are left out. By default as many as fit the teacher
    with `length`."""
    chat: bool = True
    """Write each prompt as a message of a user, where the teacher's tokenizer has a template."""

    def __post_init__(self) -> None:
        """Refuse sizes below the least."""
        for name in ("length", "longest"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"prompts.{name} is {value}: use 1 or more.")


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceConfig:
    """Where the teacher's text comes from."""

    source: Literal["bank", "online", "data"] = "bank"
    """Teacher samples drawn once and kept; drawn for every iteration; or training text."""
    steps: Count = 128
    """Steps of the teacher's sampler; with `online` 1 is the paper's literal algorithm."""
    rows: Count = 8192
    """Texts of a bank."""
    bank: str | None = None
    """Folder of the bank, to share it between runs; by default inside the run's own."""
    seed: int = 0
    """Of the bank's texts; `train.seed` decides their order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenMatchingConfig:
    """Token-level matching: an auxiliary denoiser learns what the student would write."""

    budgets: SomeStepCounts = (4, 8)
    """Step counts N whose paths the student learns on."""
    contexts: Count = 1
    """Draws of the next tokens that share a state."""
    aux_lr: Positive = 5e-4
    aux_steps: Count = 2
    """Updates of the auxiliary denoiser per iteration, each on fresh text."""
    warmup: Natural = 100
    """Iterations in which the auxiliary denoiser alone learns."""
    ratio_clip: NonNegative = 5.0
    """Largest log-ratio of auxiliary over teacher; 0 does not clip."""
    anchor: NonNegative = 0.0
    """Weight of the KL to the teacher at the states the student sees."""
    kl: KL = "forward"
    completion: NonNegative = 0.0
    """Weight of the REINFORCE term for what shown tokens do to the hidden ones."""

    def __post_init__(self) -> None:
        """Refuse settings that cannot train."""
        if self.completion and self.contexts < 2:
            raise UserError(
                f"token_matching.contexts is {self.contexts}, but the completion term compares "
                "draws that share a state: use 2 or more."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class MixtureConfig:
    """Mixture steps: a code that all tokens of a step share, learnt by likelihood."""

    codes: Count = 16
    """K: the masks of the student. A step may gain up to log K nats; 1 is plain likelihood of what
    each step reveals."""
    budgets: SomeStepCounts = (4, 8)
    """Step counts N whose steps the student learns."""
    random: Share = 0.0
    """Share of the texts that are revealed in random order whatever `order` is, as in pretraining:
    keeps the likelihood of a student that learns another order."""
    learning: Count = 2
    """Codes of each text that learn, drawn from their posterior."""
    spread: NonNegative = 3.0
    """How far apart the new masks begin, in standard deviations of the embeddings."""


SDTT_ROUNDS = 7
"""The published number: from 1,024 steps to 8."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SdttConfig:
    """Self-distillation through time: rounds in which one step learns to be worth two."""

    steps: Annotated[int, at_least(2)] = 1024
    """Steps of the teacher in the first round; half as many in each that follows."""
    iterations: Count | None = None
    """Of a round, after which the student is the teacher; `train.steps` are whole rounds. None:
    `train.steps` are shared evenly among the published 7 rounds."""
    divergence: Literal["backward", "forward", "mse", "tv"] = "backward"
    """KL(student ‖ target), KL(target ‖ student), the mean squared difference of log-probabilities,
    or the total variation."""
    grid: Literal["even", "published"] = "even"
    """Times of the teacher's two steps: t and t - dt, as the paper describes them, or those of the
    released code, where a slip makes the first step reveal less."""

    def rounds(self, total: int) -> Rounds:
        """The rounds of so many iterations; refuses what is not whole rounds, or too many."""
        most = self.steps.bit_length() - 1
        rounds = share("sdtt", total, self.iterations, SDTT_ROUNDS, most)
        if rounds.count > most:
            raise UserError(
                f"sdtt.steps is {self.steps}, which {rounds.count} rounds cannot all halve: use "
                f"{most} rounds at most (train.steps / sdtt.iterations)."
            )
        return rounds


DIMO_RANDOM, DIMO_NOISE = 0.4, 0.1
"""The published start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DimoConfig:
    """DiMO, adapted to text: a generator of few steps from a start that is partly random."""

    random: Fraction = DIMO_RANDOM
    """Share of the start's masks that are random tokens instead."""
    noise: Fraction = DIMO_NOISE
    """Share of Gaussian noise in the embeddings of the start, by standard deviation."""
    budgets: SomeStepCounts = (1,)
    """Step counts that the student learns."""
    beta: Annotated[float, FINITE] = 0.0
    """Weight of the reverse KL in the token gradient, 1 - beta that of the forward KL: 0 is the
    difference of both predictions, 1 seeks modes, below 0 spreads."""
    remask: Literal["arccos", "uniform"] = "arccos"
    """Law of the share of a text that is hidden again: `arccos` hides much (the published one)."""
    aux_lr: Positive = 1e-5
    aux_steps: Count = 1
    """Updates of the auxiliary denoiser per iteration, each on fresh text."""
    warmup: Natural = 0
    """Iterations in which the auxiliary denoiser alone learns."""


DUO_ROUNDS = 5
"""The published number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DuoConfig:
    """Rounds in which a uniform-state student learns to say at t what is said at t - Δ."""

    steps: Annotated[int, at_least(2)] = 512
    """Δ of the first round is one over this; it doubles in each that follows."""
    iterations: Count | None = None
    """Of a round, after which the student is its own target; `train.steps` are whole rounds. None:
    `train.steps` are shared evenly among the published 5 rounds."""
    target: Literal["average", "student"] = "average"
    """What the next round's target is: the average of the student's weights, or those themselves.
    Without `train.ema` there is no average, and it is the student."""
    kl: Literal["forward", "backward", "jeffreys"] = "backward"
    """KL(target ‖ student), KL(student ‖ target), or their mean."""
    clock: Literal["schedule", "gaussian"] = "schedule"
    """What Δ is a difference of: the schedule's time, in which samplers take even steps, or the
    log noise-to-signal ratio of the Gaussian latent between the bounds `gamma` (the published one).
    """
    gamma: Annotated[tuple[float, float], GAMMA] = (-4.0, -1.0)
    """Of the clock `gaussian`: the ratio at times 0 and 1. The bounds that leave nothing out depend
    on the vocabulary; these are for some 50,000 tokens."""

    def rounds(self, total: int) -> Rounds:
        """The rounds of so many iterations; refuses what is not whole rounds, or too many."""
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
