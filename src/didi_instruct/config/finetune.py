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
    """Tokens per row of text; by default the model's window."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswersConfig:
    """Training on answers to prompts, which are never masked."""

    masking: Literal["count", "random"] = "count"
    """Masks of an answer in masked diffusion. `count`: their number is uniform, so that an answer
    of one token is always masked. `random`: each token with the probability of a random time, as in
    the paper, which has the same expectation and far more variance for short answers."""
    end: bool = False
    """Learn an end-of-text token after each answer, so that generation ends there."""
    long: Literal["cut", "refuse"] = "cut"
    """A prompt that does not fit the model's window with its answer is cut from the left, or
    refused."""
    share: Inside | None = None
    """Share of MMLU's test split to train on where it has no training split, chosen by a hash of
    the questions; `didi eval --task mmlu --sft-share` scores the others."""


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
    """Published result that the recipe reproduces."""
    expect: str = ""
    """Number to expect."""
    task: Task = "text"
    """Kind of data: text, prompts with answers, or the questions of MMLU."""
    bidirectional: bool = False
    """Turn a causal LM of transformers (llama, qwen2) into a masked diffusion model: attention goes
    both ways, and a mask is added to the vocabulary. Its window is `data.length`, by default 1024.
    """
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
        """Iterations of the training loop."""
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
