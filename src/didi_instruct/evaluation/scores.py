"""Scores of a judge, its settings, and what every judge must be able to do."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from didi_instruct.errors import UserError
from didi_instruct.evaluation.samples import SampleSet
from didi_instruct.evaluation.stats import bootstrap
from didi_instruct.hub.sources import ModelInfo
from didi_instruct.training.likelihood import perplexity

Progress = Callable[[int, int], None]
"""Called with the number of samples done, and of all."""
Bos = Literal["auto", "always", "never"]
Beyond = Literal["cut", "uniform"]
Ends = Literal["apart", "included", "unknown"]


@dataclass(frozen=True, slots=True)
class Scores:
    """-log p of each sample."""

    nats: Tensor
    """(N,) float64, summed over the scored tokens."""
    tokens: Tensor
    """(N,) int64: scored tokens, the judge's own."""
    cut: int = 0
    """Samples longer than the judge's context, of which only the beginning is scored."""
    ended: "Scores | None" = None
    """The same with the token that ends each text before its window; None where no end is priced
    apart."""

    def perplexity(self) -> float:
        """Exponential of the mean over all tokens: a long sample weighs more than a short one."""
        return perplexity(float(self.nats.sum() / self.tokens.sum()))

    def interval(self, seed: int = 0) -> tuple[float, float]:
        """95% bootstrap interval of the perplexity over samples; (0, inf) of a single one."""
        table = torch.stack([self.nats, self.tokens.double()], 1)[self.tokens > 0].numpy()
        if len(table) < 2:
            return 0.0, math.inf
        low, high = bootstrap(table, statistic=_nats_per_token, seed=seed)
        return perplexity(low), perplexity(high)


class Judge(Protocol):
    """A law of texts or of tokens that samples are measured by."""

    name: str
    fingerprint: str
    """Hash of its weights and settings: perplexities of two judges are not comparable."""
    exact: bool
    """It knows -log p of the whole sequence of tokens, as a path KL needs it."""
    bound: bool
    """It knows an upper bound of -log p only."""
    reads_texts: bool
    """It reads texts with a tokenizer of its own, so any sampler can be judged, and has features
    for MAUVE."""

    @property
    def ends(self) -> Ends:
        """The price of a text's end: reported `apart`, always `included`, or `unknown`."""

    @property
    def max_length(self) -> int | None:
        """Tokens that it reads of a sample; None: all."""

    def check(self, model: ModelInfo) -> None:
        """Refuse a model whose samples it cannot score."""

    def score(self, samples: SampleSet, progress: Progress | None = None) -> Scores:
        """Score each sample up to its end and, where ends are priced apart, with its end."""

    def features(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Hidden state of the last token of each text, (N, d); of judges of texts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgeConfig:
    """How a judge reads."""

    batch_size: int | None = None
    """Texts read at once, as many as fit in any case; None: what suits the device."""
    temperature: float = 1.0
    """Divides the logits of a left-to-right judge."""
    max_length: int | None = None
    """Tokens that a causal LM reads of a text; None: its context."""
    bos: Bos = "auto"
    """Start token before every text, without which the first token is not scored: `auto` does what
    the judge's tokenizer does (Llama has one; GPT-2, as everyone scores with it, has none)."""
    collapse_spaces: bool = False
    """Make one space of several first. Some causal LMs were trained on such text alone, and have
    tokens for runs of spaces that they never saw; nothing in their files tells."""
    end: str | int | None = None
    """Token that ends a text for a causal LM, by name or id; None: its tokenizer's own."""
    beyond: Beyond = "cut"
    """Tokens after a causal LM's context: not read, or `uniform`, log V nats each. With a start
    token that is a proper law of texts of any length, which flatters none."""
    draws: int = 8
    """Noise levels per text of a diffusion model's bound."""
    seed: int = 0
    """Of that noise."""
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if self.batch_size is not None and self.batch_size < 1:
            raise UserError(f"The judge's batch_size is {self.batch_size}: use 1 or more.")
        if not (self.temperature > 0 and math.isfinite(self.temperature)):
            raise UserError(f"The judge's temperature is {self.temperature}: use more than 0.")
        if self.max_length is not None and self.max_length < 2:
            raise UserError(f"The judge's max_length is {self.max_length}: use 2 or more.")
        if self.bos not in get_args(Bos):
            raise UserError(f"bos is {self.bos!r}: use auto, always or never.")
        if self.beyond not in get_args(Beyond):
            raise UserError(f"The judge's beyond is {self.beyond!r}: use cut or uniform.")


def checked(name: str, scores: Scores) -> Scores:
    """Refuse scores that are not numbers."""
    if bool(scores.nats.isnan().any()):
        raise UserError(f"The judge {name} answers with NaN: its weights are damaged.")
    return scores


def display_name(name: str, *settings: str | None) -> str:
    """Name of a judge with the settings that change its scores."""
    told = [setting for setting in settings if setting is not None]
    return f"{name} ({', '.join(told)})" if told else name


def temperature_setting(temperature: float) -> str | None:
    """A temperature as part of a judge's name; None for 1."""
    return f"temperature {temperature:g}" if temperature != 1 else None


def _nats_per_token(resamples: NDArray[np.float64]) -> NDArray[np.float64]:
    nats, tokens = resamples.sum(axis=1).T
    ratio: NDArray[np.float64] = nats / tokens
    return ratio
