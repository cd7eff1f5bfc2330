"""What a judge says of samples, and what every judge must be able to do."""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from didi_instruct.errors import UserError
from didi_instruct.evaluation.samples import SampleSet
from didi_instruct.evaluation.stats import bootstrap
from didi_instruct.training.likelihood import perplexity

Progress = Callable[[int, int], None]
"""Called with how many samples are done, and of how many."""


@dataclass(frozen=True, slots=True)
class Scores:
    """What a judge says of each sample."""

    nats: Tensor
    """(N,) float64: -log p of each sample, summed over its scored tokens."""
    tokens: Tensor
    """(N,) int64: how many tokens that are, the judge's own."""
    cut: int = 0
    """Samples that were longer than what the judge reads: only their beginning is scored."""

    def perplexity(self) -> float:
        """Exponential of the mean over all tokens: a long sample weighs more than a short one."""
        return perplexity(float(self.nats.sum() / self.tokens.sum()))

    def interval(self, seed: int = 0) -> tuple[float, float]:
        """95% bootstrap interval of the perplexity over samples; one sample says nothing."""
        table = torch.stack([self.nats, self.tokens.double()], 1)[self.tokens > 0].numpy()
        if len(table) < 2:
            return 0.0, math.inf
        low, high = bootstrap(table, statistic=_nats_per_token, seed=seed)
        return perplexity(low), perplexity(high)


class Judge(Protocol):
    """Anything that can tell how probable samples are."""

    name: str
    fingerprint: str
    """Tells judges and their settings apart: perplexities of two are not comparable."""
    exact: bool
    """Whether -log p is that of the whole sequence of tokens, as the path KL needs it."""

    def score(
        self, samples: SampleSet, progress: Progress | None = None, *, ending: bool = False
    ) -> Scores:
        """Score each sample; with `ending`, the end of those that end before their window too."""


@runtime_checkable
class ReadsOn(Protocol):
    """A judge from left to right: what it says of a text and of its end is one reading."""

    def score_both(
        self, samples: SampleSet, progress: Progress | None = None
    ) -> tuple[Scores, Scores]:
        """Both that `score` may give, without and with ends, of one pass; not yet `checked`."""


def checked(name: str, scores: Scores) -> Scores:
    """Refuse scores that mean nothing."""
    if bool(scores.nats.isnan().any()):
        raise UserError(f"The judge {name} answers with NaN: its weights are damaged.")
    if int(scores.tokens.sum()) == 0:
        raise UserError(
            "All samples are empty, or too short for this judge: nothing can be scored."
        )
    return scores


def _nats_per_token(resamples: NDArray[np.float64]) -> NDArray[np.float64]:
    nats, tokens = resamples.sum(axis=1).T
    ratio: NDArray[np.float64] = nats / tokens
    return ratio


def digest(*parts: object) -> str:
    """Hash of values, bytes as they are."""
    total = hashlib.sha256()
    for part in parts:
        content = part if isinstance(part, bytes) else repr(part).encode()
        total.update(hashlib.sha256(content).digest())
    return total.hexdigest()[:16]


def check_settings(batch_size: int, temperature: float) -> None:
    """Refuse what no judge can work with."""
    if batch_size < 1:
        raise UserError(f"The judge's batch_size is {batch_size}: use 1 or more.")
    if not (temperature > 0 and math.isfinite(temperature)):
        raise UserError(f"The judge's temperature is {temperature}: use more than 0.")


def told_apart(
    name: str,
    temperature: float,
    collapse_spaces: bool = False,
    end: str | None = None,
    uniform_after: int | None = None,
) -> str:
    """A judge's name with the settings that change what it says.

    `end` is what ends a text, where that is not the usual token; after `uniform_after` tokens all
    are equally likely.
    """
    told = [f"temperature {temperature:g}"] if temperature != 1 else []
    told += ["spaces collapsed"] if collapse_spaces else []
    told += [f"end {end}"] if end is not None else []
    told += [f"uniform after {uniform_after} tokens"] if uniform_after is not None else []
    return f"{name} ({', '.join(told)})" if told else name
