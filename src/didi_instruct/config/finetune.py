"""Settings of a fine-tuning run, a recipe for `didi finetune`."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from didi_instruct.config.schema import (
    Count,
    Fraction,
    Inside,
    Natural,
    NonNegative,
    Positive,
)
from didi_instruct.config.train import LoraConfig, OptimConfig, TextConfig, TrainConfig
from didi_instruct.errors import UserError

Task = Literal["text", "answers", "mmlu"]


@dataclass(frozen=True, kw_only=True, slots=True)
class FinetuneDataConfig(TextConfig):
    """Data to learn from, tokenised with the model's tokenizer."""

    source: str | None = None
    """Text as `data.source` of a pretraining, JSON lines with `prompt` and `answer`, or a folder of
    MMLU, as `task` says."""
    valid: Natural | None = None
    """Documents held out from the end, or rows with answers by a hash of their prompts; by default
    1% of them."""
    length: Count | None = None
    """Tokens of a row of text; by default what the model reads at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswersConfig:
    """Learning of answers from their prompts, which are never noise."""

    masking: Literal["count", "random"] = "count"
    """Of masked diffusion. `count`: how many tokens of an answer are masked is uniform, so an
    answer of one token always is. `random`: each with the probability of a random time, as in the
    paper: the same expectation, and for short answers far more variance."""
    end: bool = False
    """Learn the end-of-text token as the last one of each answer, so that generation ends there."""
    long: Literal["cut", "refuse"] = "cut"
    """A prompt that does not fit the model's window with its answer is cut from the left, or
    refused."""
    share: Inside | None = None
    """Of MMLU without a training split: the share of the test split to train on, by a hash of the
    questions; `didi eval --task mmlu --sft-share` then scores the others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FinetuneOptimConfig(OptimConfig):
    """AdamW at a constant rate, torch's defaults for the rest."""

    lr: Positive = 1e-5
    beta2: Fraction = 0.999
    weight_decay: NonNegative = 0.01
    schedule: Literal["cosine", "linear", "constant"] = "constant"


@dataclass(frozen=True, kw_only=True, slots=True)
class FinetuneConfig:
    """One fine-tuning run."""

    reproduces: str = ""
    """The result that this recipe reproduces, and where that is published."""
    expect: str = ""
    """The number to expect."""
    task: Task = "text"
    """Kind of data: text, prompts with answers, or the questions of MMLU."""
    bidirectional: bool = False
    """The model is a causal LM of transformers (llama, qwen2), which becomes a masked diffusion
    model: its attention goes both ways, and a mask is added to its vocabulary. It reads
    `data.length` tokens at once, 1024 by default."""
    data: FinetuneDataConfig = field(default_factory=FinetuneDataConfig)
    answers: AnswersConfig = field(default_factory=AnswersConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    """An adapter on the model's frozen weights."""
    optim: FinetuneOptimConfig = field(default_factory=FinetuneOptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    unread: ClassVar[frozenset[str]] = frozenset()
    """Sections that have no effect: none."""

    @property
    def iterations(self) -> int:
        """Turns of the training loop."""
        return self.train.steps

    def __post_init__(self) -> None:
        """Refuse sections that contradict each other."""
        if self.bidirectional and self.lora.rank:
            raise UserError(
                f"lora.rank is {self.lora.rank}, but with bidirectional=true the model learns a "
                "mask and to read both ways, which takes all weights: leave out lora.rank, and use "
                "it on what comes out."
            )
        if self.answers.share is not None and self.task != "mmlu":
            raise UserError(
                f"answers.share is {self.answers.share}, but task is {self.task}: it divides the "
                "test split of mmlu. Use data.valid to hold rows out."
            )
