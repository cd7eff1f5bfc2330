"""What steers guided sampling: a guide, and the settings of Algorithm 2."""

import math
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from torch import Tensor

from didi_instruct.errors import UserError

Score = Literal["sum", "mean"]
Select = Literal["sample", "best"]

FORWARD = 1
FORWARD_AND_BACKWARD = 3
"""What a discriminator's part in a step costs, in forward passes."""


class Guide(Protocol):
    """Log-ratios of teacher over student, from embeddings that may be mixtures of tokens."""

    @property
    def embedding(self) -> Tensor:
        """(V, d) embeddings of the real tokens."""

    def embed(self, z: Tensor) -> Tensor:
        """Embeddings (B, L, d) of tokens and masks (B, L)."""

    def score(self, embeddings: Tensor, z: Tensor, t: Tensor) -> Tensor:
        """Log-ratio (B, L) at every position; z tells which ones are padding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Guidance:
    """How a guide steers; h = 0 and one candidate leave ancestral sampling as it is."""

    h_start: float = 30.0
    """Tilting scale h of the first step. A negative h is the control: it must do harm."""
    h_end: float = 40.0
    """h of the last tilting step, with a straight line between the two."""
    candidates: int = 4
    """M, the states among which a re-ranking step chooses."""
    split: float = 0.5
    """Fraction of the steps that tilt, rounded down; the others re-rank."""
    score: Score = "sum"
    """Re-rank by log-ratios summed over all written positions, or averaged over masked ones."""
    select: Select = "sample"
    """Take a candidate with probability softmax(score), or the one of the best score."""
    clamp: float = 1.0
    """Largest entry of the reward's gradient with respect to the logits."""

    def __post_init__(self) -> None:
        """Refuse what cannot guide."""
        for name in ("h_start", "h_end"):
            if not math.isfinite(getattr(self, name)):
                raise UserError(f"guidance.{name} is {getattr(self, name)}: use a finite number.")
        if self.candidates < 1:
            raise UserError(
                f"guidance.candidates is {self.candidates}: use 1 (no re-ranking) or more."
            )
        if not 0 <= self.split <= 1:
            raise UserError(f"guidance.split is {self.split}: use 0 (no tilting) to 1 (all steps).")
        if not self.clamp > 0:
            raise UserError(f"guidance.clamp is {self.clamp}: use more than 0.")
        for name, words in (("score", Score), ("select", Select)):
            if (word := getattr(self, name)) not in get_args(words):
                known = ", ".join(get_args(words))
                raise UserError(f"`{word}` is not a guidance.{name}. Known: {known}.")

    def scales(self, steps: int) -> list[float]:
        """The h of each tilting step."""
        # The margin keeps 0.29 * 100 = 28.999... from losing a step.
        tilting = math.floor(self.split * steps + 1e-9)
        slope = (self.h_end - self.h_start) / max(tilting - 1, 1)
        return [self.h_start + slope * n for n in range(tilting)]


def check_vocabularies(known: int, tokens: int) -> None:
    """Refuse a guide that knows other tokens than the denoiser has."""
    if known != tokens:
        raise UserError(
            f"The discriminator knows {known} tokens and the denoiser {tokens}: "
            "use one that was trained for this model."
        )


def total_score(
    log_ratio: Tensor, z: Tensor, written: Tensor, mask_id: int, score: Score
) -> Tensor:
    """Log-ratios, summed over written positions or averaged over masked ones (0 without any).

    Written are those that the sampler fills: what is given, and what fills a window behind the end
    of its text, a discriminator has not learnt to judge.

    Shapes: (B, L) each -> (B,) in float64.
    """
    counted = written if score == "sum" else written & (z == mask_id)
    total = log_ratio.double().masked_fill(~counted, 0.0).sum(1)
    return total if score == "sum" else total / counted.sum(1).clamp(min=1)
