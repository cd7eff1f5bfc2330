"""Settings of training: the model, the data, the optimizer and the loop of a recipe."""

import math
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

from didi_instruct.config.model import Kind, ModelConfig, ScheduleConfig, architecture
from didi_instruct.config.schema import (
    Bound,
    Count,
    Fraction,
    Natural,
    NonNegative,
    Positive,
    Share,
    at_least,
)
from didi_instruct.errors import UserError

Family = Literal["dit", "esm"]
Compile = Literal["auto", "on", "off", "graphs"]
SHAPE = (
    "layers", "hidden", "heads", "cond_dim", "length", "dropout", "time_conditioning",
    "learned_positions",
)  # fmt: skip
"""Settings of `ModelConfig` that a recipe may leave to its architecture."""
TEMPERATURES = Bound(
    lambda v: len(v) == 2 and all(0 < t < math.inf for t in v), "two finite numbers above 0"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelRecipe:
    """Model of a recipe: a named architecture and changes to it.

    What is null comes from the architecture, so that a recipe keeps what it says.
    """

    family: Family = "dit"
    """`esm`: a masked LM of transformers with the shape of ESM-2 and DPLM (`kind: mdlm`)."""
    arch: str | None = None
    """Architecture to start from (`small`, `medium`); by default `small`."""
    kind: Kind = "mdlm"
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    cond_dim: int | None = None
    vocab_size: int | None = None
    """Rows of the embedding, the mask's included; by default what the tokenizer needs."""
    length: int | None = None
    dropout: float | None = None
    time_conditioning: bool | None = None
    """By default false for `mdlm` and true for `duo`, as the reference checkpoints."""
    learned_positions: bool | None = None
    own_window: bool = False
    """Give each text a window of its own (`data.rows: document`): its end and the fill behind it
    are given, not learnt, and a masked model draws a text's length first."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)

    def __post_init__(self) -> None:
        """Refuse settings that the family does not have."""
        if self.family == "dit":
            return
        if self.kind != "mdlm" or not self.own_window:
            raise UserError(
                f"model.family is {self.family}: use model.kind=mdlm and model.own_window=true, "
                "since it has learnt nothing but masked tokens of one text."
            )
        for name in ("cond_dim", "vocab_size", "time_conditioning", "learned_positions"):
            if getattr(self, name) not in (None, False):
                raise UserError(f"model.{name} is set, but model.family {self.family} has none.")

    @property
    def reads_fill(self) -> bool:
        """True if the network reads the fill of a window behind its text."""
        return self.family == "dit" and self.kind != "ar"

    @property
    def base(self) -> ModelConfig:
        """The architecture that these settings change."""
        return architecture(self.arch) if self.arch else ModelConfig()

    @property
    def row_length(self) -> int:
        """Tokens of a row, the model's window."""
        return self.base.length if self.length is None else self.length

    def resolve(self, num_tokens: int) -> ModelConfig:
        """Return the model's shape for a tokenizer of `num_tokens` ids."""
        needed = num_tokens if self.kind == "duo" else num_tokens + 1
        vocab_size = needed if self.vocab_size is None else self.vocab_size
        if vocab_size < needed:
            extra = "" if self.kind == "duo" else " and the mask"
            raise UserError(
                f"model.vocab_size is {vocab_size}, but the tokenizer has {num_tokens} ids: "
                f"no room for all of them{extra}. Use {needed} or more, or leave it out."
            )
        given: dict[str, Any] = {"time_conditioning": self.kind == "duo"}
        given |= {name: value for name in SHAPE if (value := getattr(self, name)) is not None}
        given |= {"kind": self.kind, "vocab_size": vocab_size, "schedule": self.schedule}
        return replace(self.base, **given)


@dataclass(frozen=True, kw_only=True, slots=True)
class TextConfig:
    """How text becomes rows of tokens."""

    field: str = "text"
    """Field that holds the text of a record."""
    documents: Literal["file", "line", "paragraph"] = "file"
    """Unit of plain text that is one document."""
    rows: Literal["stream", "document"] = "stream"
    """Content of a row: a stretch of all documents joined, or one document and its end."""
    long: Literal["drop", "cut", "split"] = "drop"
    """A document too long for a row of its own is left out, cut, or split into several."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig(TextConfig):
    """Text to train on."""

    source: str | None = None
    """A prepared folder, a text file or folder, `hf:NAME[:split]`, or `oracle`."""
    tokenizer: str = "bpe:8192"
    """Tokenizer of a source that is not prepared yet, as `didi data prepare --tokenizer`."""
    valid: int | None = None
    """Documents held out from the end; by default 1% of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimConfig:
    """AdamW and its learning-rate schedule."""

    lr: Positive = 3e-4
    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    eps: Positive = 1e-8
    weight_decay: NonNegative = 0.05
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup: Natural = 0
    """Steps of linear warm-up."""
    final: Share = 0.0
    """Learning rate at the end, as a fraction of `lr`."""
    clip: NonNegative = 1.0
    """Largest gradient norm; 0 does not clip."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """The training loop: length, batches, precision, and intervals of logs and checkpoints."""

    steps: Count = 1000
    batch_size: Count = 64
    """Sequences per optimizer step, over all processes."""
    micro_batch: Count | None = None
    """Sequences per forward pass of one process; by default its whole share of the batch."""
    seed: int = 0
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """`auto`: bf16 autocast on a GPU, fp32 elsewhere."""
    compile: Compile = "auto"
    """torch.compile: `auto` on a GPU only. With `graphs` a distillation on one GPU also launches
    each pass as one CUDA graph. `auto` does so where the passes of an iteration are few and always
    of the same sizes (method didi with a bank or data, a batch of one pass, one step to τ, no
    windows)."""
    strategy: Literal["ddp", "fsdp"] = "ddp"
    """With several processes: replicate the model (`ddp`) or shard it (`fsdp`, FSDP2)."""
    checkpoints: Literal["full", "sharded"] = "full"
    """`sharded`: each process writes its own part."""
    ema: Fraction = 0.9999
    """Decay of the averaged weights; 0 keeps no average."""
    ema_warmup: bool = True
    """The decay of update n is (1 + n) / (10 + n) until that exceeds `ema`. If false it is `ema`
    throughout: with 0.9999, a third of the average is still the start after 10,000 updates."""
    log_every: Count = 10
    eval_every: Natural = 0
    """Steps between evaluations on held-out data; 0 evaluates at the end alone."""
    eval_sequences: Count = 512
    save_every: Count = 1000
    keep: Count = 2
    """Checkpoints kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainTrainConfig(TrainConfig):
    """The training loop of a pretraining, which can batch rows of similar length."""

    pass_tokens: Count | None = None
    """Most tokens of a forward pass of one process: rows of similar length together, cropped to
    the longest. For `model.own_window` and a network that does not read the fill of a window."""

    def __post_init__(self) -> None:
        """Refuse two sizes of a pass."""
        if self.pass_tokens is not None and self.micro_batch is not None:
            raise UserError(
                "train.pass_tokens and train.micro_batch both say how much a forward pass reads: "
                "leave one out."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class CurriculumConfig:
    """DUO's curriculum: a uniform-state model first learns from softened tokens."""

    steps: Natural = 0
    """Training steps of the curriculum, from the first; 0 for none."""
    temperature: Annotated[tuple[float, float], TEMPERATURES] = (1e-3, 1e-3)
    """Temperature of the softmax of the Gaussian latent, at its beginning and its end."""
    tokens: Annotated[int, at_least(2)] = 16
    """Most tokens in a mixture: the clean one and those of the largest weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainConfig:
    """One pretraining run."""

    reproduces: str = ""
    """Published result that the recipe reproduces."""
    expect: str = ""
    """Number to expect."""
    model: ModelRecipe = field(default_factory=ModelRecipe)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    train: PretrainTrainConfig = field(default_factory=PretrainTrainConfig)

    unread: ClassVar[frozenset[str]] = frozenset()
    """Sections that have no effect: none."""

    @property
    def iterations(self) -> int:
        """Iterations of the training loop."""
        return self.train.steps

    def __post_init__(self) -> None:
        """Refuse sections that contradict each other."""
        if self.curriculum.steps and self.model.kind != "duo":
            raise UserError(
                f"curriculum.steps is {self.curriculum.steps}, but model.kind is "
                f"{self.model.kind}: the curriculum is that of uniform-state models (`duo`)."
            )
        if self.train.pass_tokens is not None:
            self._check_passes(self.train.pass_tokens)

    def _check_passes(self, tokens: int) -> None:
        if not self.model.own_window or self.model.reads_fill:
            raise UserError(
                "train.pass_tokens crops what fills windows of their own (model.own_window), and "
                "a DiT reads that: use model.family=esm or model.kind=ar, or leave it out."
            )
        if tokens < self.model.row_length:
            raise UserError(
                f"train.pass_tokens is {tokens}, less than the longest row: use model.length "
                f"({self.model.row_length}) or more."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraConfig:
    """Low-rank adapters (LoRA) on the blocks of a frozen network, in place of its weights."""

    rank: Natural = 0
    """Rank of each adapter; 0 for none, so that all weights learn."""
    alpha: Positive | None = None
    """Adapters' outputs are multiplied by alpha / rank; by default alpha is twice the rank."""
    targets: tuple[str, ...] = ()
    """Linear layers of each block that get an adapter, by the last part of their names
    (`q_proj`); by default all."""
    checkpointing: bool = True
    """Keep only the inputs of blocks for the backward pass and recompute the rest."""

    def __post_init__(self) -> None:
        """Refuse targets without a rank."""
        if self.targets and not self.rank:
            raise UserError("lora.targets are set, but lora.rank is 0: give a rank.")

    @property
    def scale(self) -> float:
        """Factor of an adapter's output."""
        return 2.0 if self.alpha is None else self.alpha / self.rank
