"""Settings of DiDi-Instruct: the sections `didi` and `discriminator` of a recipe."""

from dataclasses import dataclass
from typing import Literal

from didi_instruct.config.bounds import at_least, positive
from didi_instruct.errors import UserError

Grouping = Literal["batch", "tau", "state"]
KL = Literal["forward", "backward", "jeffreys"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DidiConfig:
    """Algorithm 1 of the paper and its variants: the student's side."""

    pi: tuple[int, int] = (1, 1)
    """Parameters of the Beta law of τ; (2, 5) prefers small times, (5, 2) large ones."""
    omega: Literal["constant", "schedule"] = "constant"
    """Weight of a time: 1, or -α'/(1 - α), which is 1/τ for the log-linear schedule."""
    omega_min_time: float = 0.05
    """Times below it weigh no more than it does: 1/τ has no bound."""
    importance_weighting: bool = False
    """Divide the weight by the density of τ, so that `pi` changes the noise alone. It has no bound
    where `pi` falls to 0."""
    score_decomposition: bool = True
    """Go through z_τ; without it, one step from all masks to text."""
    coupled_time: bool = True
    """Compare texts at the τ the student passed through; without it, at a time of their own."""
    rollout_steps: int = 1
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
    advantage_eps: float = 1e-6
    advantage_clip: float = 5.0
    """Largest advantage; 0 does not clip."""
    regularisation: bool = True
    """The two terms below."""
    kl: KL = "forward"
    """KL(teacher ‖ student), KL(student ‖ teacher), or their mean."""
    kl_weight: float = 0.05
    """Of the KL per masked position, summed over the scored steps."""
    entropy_weight: float = 0.0005

    def __post_init__(self) -> None:
        """Refuse settings that mean nothing."""
        if len(self.pi) != 2 or min(self.pi) < 1:
            raise UserError(f"didi.pi is {list(self.pi)}: two whole numbers, 1 or more.")
        if self.group_size < 2:
            raise UserError(
                f"didi.group_size is {self.group_size}, but an advantage compares rollouts within "
                "a group: use 2 or more."
            )
        if not 0 < self.omega_min_time < 1:
            raise UserError(f"didi.omega_min_time is {self.omega_min_time}: between 0 and 1.")
        at_least("didi", self, 1, ["rollout_steps"])
        at_least("didi", self, 0, ["advantage_clip", "kl_weight", "entropy_weight"])
        positive("didi", self, ["advantage_eps"])
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

    lr: float = 1e-6
    lr_warmup: int = 0
    """Updates in which its learning rate rises to `lr`."""
    weight_decay: float | None = None
    """Of its matrices; null: `optim.weight_decay`, the student's."""
    dropout: float = 0.0
    """Share of the head's hidden units that its updates leave out; rewards see all of them."""
    trainable_blocks: int | None = 4
    """Last blocks that train beside the head; null: the whole network."""
    label_smoothing: float = 0.1
    """Targets are 1 - this and this."""
    positions: Literal["all", "masked"] = "all"
    """Where the cross-entropy is taken; re-ranking by `sum` needs all."""
    steps: int = 1
    """Updates per iteration, each on fresh text."""
    warmup: int = 0
    """Iterations before the student begins to learn: among `train.steps`, or `warmup_on_top`."""
    chance: float | None = 0.52
    """Share of texts told apart below which the student waits: its reward is noise. null: it never
    waits, as in the paper."""
    saturation: float | None = 0.95
    """Share of positions told apart above which the discriminator waits for the student. null: it
    never waits, as in the paper."""

    def __post_init__(self) -> None:
        """Refuse settings that cannot train."""
        positive("discriminator", self, ["lr"])
        if not 0 <= self.label_smoothing < 0.5:
            raise UserError(
                f"discriminator.label_smoothing is {self.label_smoothing}: 0 or more, below 0.5."
            )
        if self.trainable_blocks is not None:
            at_least("discriminator", self, 0, ["trainable_blocks"])
        at_least("discriminator", self, 1, ["steps"])
        at_least("discriminator", self, 0, ["warmup", "lr_warmup"])
        if self.weight_decay is not None:
            at_least("discriminator", self, 0, ["weight_decay"])
        if not 0 <= self.dropout < 1:
            raise UserError(
                f"discriminator.dropout is {self.dropout}: use 0 or more and less than 1."
            )
        low = 0.0 if self.chance is None else self.chance
        high = 1.0 if self.saturation is None else self.saturation
        if not 0 <= low < high <= 1:
            raise UserError(
                f"discriminator.chance is {self.chance} and discriminator.saturation "
                f"{self.saturation}: accuracies from 0 to 1, chance the smaller; null is off."
            )
