"""Settings of a distillation run, a recipe for `didi distill`."""

from dataclasses import dataclass, field
from typing import Annotated, Literal, get_args

from didi_instruct.config.methods import (
    DidiConfig,
    DimoConfig,
    DiscriminatorConfig,
    DuoConfig,
    MixtureConfig,
    PromptsConfig,
    ReferenceConfig,
    Rounds,
    SdttConfig,
    TokenMatchingConfig,
)
from didi_instruct.config.model import DATA_LENGTHS, Order, read_lengths
from didi_instruct.config.schema import (
    Fraction,
    NonNegative,
    Positive,
    StepCounts,
    at_least,
)
from didi_instruct.config.train import DataConfig, LoraConfig, OptimConfig, TrainConfig
from didi_instruct.errors import Setting, UserError

Method = Literal["didi", "token-matching", "mixture", "sdtt", "dimo", "duo"]


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchConfig:
    """Quick evaluations during the run, and when to stop it."""

    budgets: StepCounts = (4, 8)
    """Step counts of the quick evaluation, every `train.eval_every` iterations and at the end."""
    samples: Annotated[int, at_least(2)] = 256
    min_entropy: Fraction = 0.5
    """Stop when the entropy of the student's draws falls below this share of its initial value; 0
    never stops. For DiMO, whose randomness is in its start, the share of distinct 4-grams."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StudentOptimConfig(OptimConfig):
    """The student's optimizer, by default the paper's."""

    lr: Positive = 1e-6
    beta2: Fraction = 0.999
    weight_decay: NonNegative = 0.01
    schedule: Literal["cosine", "linear", "constant"] = "linear"


@dataclass(frozen=True, kw_only=True, slots=True)
class DistillConfig:
    """One distillation run."""

    reproduces: str = ""
    """Published result that the recipe reproduces."""
    expect: str = ""
    """Number to expect."""
    method: Method = "didi"
    order: Order = "random"
    """Order in which the student reveals positions, in training and when it is sampled
    (`process.masking`); for the methods didi, token-matching and mixture."""
    student: str | None = None
    """Model to start from; by default a copy of the teacher."""
    lengths: str = ""
    """Lengths of texts that have windows of their own, drawn evenly: `100-500`, `100,200,300`, or
    `data`, those of the texts of `data`. Empty: the teacher's own law. Masked LMs of transformers
    have none: without it, their texts fill all that they read."""
    prompt: int = 0
    """First tokens of every text that are given, from `data`; 0: nothing is given."""
    prompts: PromptsConfig = field(default_factory=PromptsConfig)
    """Prompts of any length, each with an answer of its own to write."""
    warmup_on_top: bool = False
    """Count the warm-up of the second network on top of `train.steps`, as in the paper; by default
    it is among them."""
    didi: DidiConfig = field(default_factory=DidiConfig)
    discriminator: DiscriminatorConfig = field(default_factory=DiscriminatorConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    token_matching: TokenMatchingConfig = field(default_factory=TokenMatchingConfig)
    mixture: MixtureConfig = field(default_factory=MixtureConfig)
    sdtt: SdttConfig = field(default_factory=SdttConfig)
    dimo: DimoConfig = field(default_factory=DimoConfig)
    duo: DuoConfig = field(default_factory=DuoConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Adapters on the teacher's frozen weights, one for each network that learns."""
    data: DataConfig = field(default_factory=DataConfig)
    """Text for prompts, for `reference.source=data` and for held-out likelihood."""
    optim: StudentOptimConfig = field(default_factory=StudentOptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    watch: WatchConfig = field(default_factory=WatchConfig)

    def __post_init__(self) -> None:
        """Refuse sections that contradict each other."""
        if self.prompt < 0:
            raise UserError(f"prompt is {self.prompt}: use 0 (nothing given) or more.")
        needs = [
            (self.prompt > 0, "prompt gives the first tokens of real text"),
            (
                self.reads_data and not self.prompts.source,
                "reference.source=data takes real text",
            ),
        ]
        for needed, why in needs:
            if needed and not self.data.source:
                raise UserError("{}: name it with {}.", why, Setting("data.source"))
        if self.lora.rank and self.student is not None:
            raise UserError(
                f"student is {self.student}, but with lora.rank the student is the teacher with an "
                "adapter: leave one of them out."
            )
        self._check_lengths()
        self._check_prompts()
        self._check_method()
        if self.warmup >= self.iterations:
            raise UserError(
                f"train.steps is {self.train.steps} and {self._part}.warmup takes {self.warmup} of "
                "them: the student would not learn."
            )
        if self.method == "didi" and self.train.batch_size < 2:
            raise UserError(
                f"train.batch_size is {self.train.batch_size}, but an advantage compares texts: "
                "use 2 or more."
            )
        if self.train.batch_size % self.group_size:
            raise UserError(
                f"train.batch_size is {self.train.batch_size}, which is not a multiple of "
                f"{self.group_setting}, {self.group_size}."
            )

    def _check_lengths(self) -> None:
        """Refuse lengths that cannot be, or that reference texts would not have."""
        if not self.lengths:
            return
        if self.method == "duo":
            raise UserError(
                f"lengths is {self.lengths}, but texts of method=duo fill their windows: leave it "
                "out."
            )
        if self.lengths != DATA_LENGTHS:
            read_lengths(self.lengths)
            if self.method == "didi" and self.reference.source == "data":
                raise UserError(
                    f"lengths is {self.lengths}, but reference.source=data compares with texts of "
                    f"the data's lengths: use lengths={DATA_LENGTHS}, or reference.source=bank."
                )
        elif not self.data.source:
            raise UserError(
                "lengths={} takes those of real text: name it with {}.",
                DATA_LENGTHS,
                Setting("data.source"),
            )

    def _check_prompts(self) -> None:
        """Refuse prompts beside others, and where a method does not know them."""
        if not self.prompts.source:
            return
        given = {"prompt": self.prompt, "lengths": self.lengths, "data.source": self.data.source}
        for name, value in given.items():
            if value:
                raise UserError(
                    f"{name} is {value}, but prompts.source says what is given and how much is "
                    "written: leave one of them out."
                )
        if self.method in ("dimo", "duo"):
            raise UserError(
                f"prompts.source is set, which method={self.method} does not know: use didi, "
                "token-matching, mixture or sdtt."
            )

    @property
    def continues(self) -> bool:
        """True if texts continue something that is given."""
        return bool(self.prompt or self.prompts.source)

    @property
    def reads_data(self) -> bool:
        """True if real text stands in for the teacher's."""
        return self.method not in ("token-matching", "dimo") and self.reference.source == "data"

    @property
    def reads_bank(self) -> bool:
        """True if the student reads texts that its teacher drew beforehand."""
        return self.method in ("didi", "sdtt", "mixture") and self.reference.source == "bank"

    def _check_method(self) -> None:
        """Refuse what a method does not know."""
        if self.order != "random" and self.method in ("sdtt", "dimo", "duo"):
            raise UserError(
                f"order is {self.order}, which method={self.method} does not know: use didi, "
                "token-matching or mixture, or sample its student with --option order=streams."
            )
        if self.order != "random" and self.method == "didi":
            self._check_streams()
        if self.method == "sdtt":
            self.sdtt.rounds(self.train.steps)
        if self.method == "duo":
            self.duo.rounds(self.train.steps)
            if self.prompt:
                raise UserError(
                    f"prompt is {self.prompt}, but method=duo learns whole texts: leave it out."
                )

    def _check_streams(self) -> None:
        """Refuse settings of didi that mean nothing on a path of fixed steps."""
        if self.didi.rollout_steps < 2:
            raise UserError(
                f"didi.rollout_steps is {self.didi.rollout_steps}, but order={self.order} stops on "
                "the way of a path of that many steps: use 2 or more (8, if 8 are to be sampled)."
            )
        if self.didi.score_steps != "last":
            raise UserError(
                f"didi.score_steps is {self.didi.score_steps}, but in order={self.order} only the "
                "jump from the stop to text is scored: use last."
            )

    @property
    def unread(self) -> set[str]:
        """Sections of other methods: whatever they say, it is not read."""
        return {name.replace("-", "_") for name in get_args(Method) if name != self.method}

    @property
    def rounds(self) -> Rounds | None:
        """Those of a method that has rounds."""
        if self.method not in ("sdtt", "duo"):
            return None
        settings = self.sdtt if self.method == "sdtt" else self.duo
        return settings.rounds(self.train.steps)

    @property
    def _part(self) -> str:
        """The section of the second network."""
        return {"token-matching": "token_matching", "dimo": "dimo"}.get(
            self.method, "discriminator"
        )

    @property
    def group_setting(self) -> str:
        """The setting that is `group_size`."""
        return "token_matching.contexts" if self.method == "token-matching" else "didi.group_size"

    @property
    def group_size(self) -> int:
        """Texts that belong together: they must not be split over processes or passes."""
        if self.method == "token-matching":
            return self.token_matching.contexts
        if self.method != "didi":
            return 1
        return self.didi.group_size if self.didi.grouping != "batch" or self.continues else 1

    @property
    def aux_lr(self) -> float:
        """Learning rate of the auxiliary denoiser, where a method has one."""
        return self.dimo.aux_lr if self.method == "dimo" else self.token_matching.aux_lr

    @property
    def iterations(self) -> int:
        """Turns of the training loop, those of the warm-up included."""
        return self.train.steps + (self.warmup if self.warmup_on_top else 0)

    @property
    def updates(self) -> int:
        """Iterations in which the student may learn."""
        return self.iterations - self.warmup

    @property
    def warmup(self) -> int:
        """Iterations before the student begins to learn."""
        if self.method == "token-matching":
            return self.token_matching.warmup
        if self.method == "dimo":
            return self.dimo.warmup
        return self.discriminator.warmup if self.method == "didi" else 0
