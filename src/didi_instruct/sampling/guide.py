"""Guides of guided sampling: a discriminator's log-ratios, their gradient, and the settings.

Eq. (10) tilts logits along the gradient of the reward, through the average embedding that each mask
shows the discriminator: with respect to logits that is p * (E g - p . E g), g the gradient at the
embedding. The vocabulary may be padded to a width W that GPUs like: added columns have probability
0, slope 0 and tilt 0.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from didi_instruct.errors import UserError, first_line
from didi_instruct.models.compile import Fused, compiled, warn_once
from didi_instruct.models.discriminator import Discriminator
from didi_instruct.models.network import Mixture, Modulations, WeightsStamp
from didi_instruct.process.schedule import Schedule
from didi_instruct.sampling.denoiser import times_of
from didi_instruct.sampling.state import Reads

Score = Literal["sum", "mean"]

FORWARD, FORWARD_AND_BACKWARD = 1, 3  # costs in forward passes


@dataclass(frozen=True, kw_only=True, slots=True)
class Guidance:
    """Settings of Algorithm 2; h = 0 and one candidate leave ancestral sampling as it is."""

    h_start: float = 30.0
    """Tilting scale h of the first step. A negative h is the control: it must do harm."""
    h_end: float = 40.0  # h of the last tilting step, with a straight line between the two
    candidates: int = 4  # M, the states among which a re-ranking step chooses
    split: float = 0.5  # fraction of the steps that tilt, rounded down; the others re-rank
    reward: Score = "sum"
    """Tilt along the gradient of the log-ratios summed over masks, or averaged over them as in Eq.
    (6): a gradient smaller by their number."""
    score: Score = "sum"
    """Re-rank by log-ratios summed over all written positions, or averaged over masked ones."""
    select: Literal["sample", "best"] = "sample"
    """Take a candidate with probability softmax(score), or the one of the best score."""
    clamp: float = 1.0  # largest entry of the reward's gradient with respect to the logits

    def __post_init__(self) -> None:
        for name, value in (("h_start", self.h_start), ("h_end", self.h_end)):
            if not math.isfinite(value):
                raise UserError(f"guidance.{name} is {value}: use a finite number.")
        if self.candidates < 1:
            raise UserError(
                f"guidance.candidates is {self.candidates}: use 1 (no re-ranking) or more."
            )
        if not 0 <= self.split <= 1:
            raise UserError(f"guidance.split is {self.split}: use 0 (no tilting) to 1 (all steps).")
        if not self.clamp > 0:
            raise UserError(f"guidance.clamp is {self.clamp}: use more than 0.")

    def scales(self, steps: int) -> list[float]:
        """The h of each tilting step."""
        # The margin keeps 0.29 * 100 = 28.999... from losing a step.
        tilting = math.floor(self.split * steps + 1e-9)
        slope = (self.h_end - self.h_start) / max(tilting - 1, 1)
        return [self.h_start + slope * n for n in range(tilting)]


class Guide(Protocol):
    """Log-ratios of teacher over student."""

    num_tokens: int  # V, the real tokens it knows

    def vectors(self, columns: int) -> Tensor:
        """(W, d) embeddings of the real tokens, and rows of 0 up to the number of columns."""

    def log_ratio(self, reads: Reads, t: float) -> Tensor:
        """Log-ratio (U, L) at every position."""

    def gradient(self, reads: Reads, t: float, mixture: Mixture, counted: Tensor) -> Tensor:
        """Gradient (R, d) at the vectors of a mixture of the log-ratios, weighed by `counted`.

        `counted` (U, L) are weights, or true where a log-ratio counts.
        """


class DiscriminatorGuide:
    """A discriminator as a guide. `fast` compiles it; its weights then take no gradients."""

    def __init__(
        self, discriminator: Discriminator, schedule: Schedule, *, fast: bool = False
    ) -> None:
        self.discriminator, self.schedule = discriminator.eval(), schedule
        self.num_tokens = discriminator.config.num_tokens
        if fast:
            discriminator.requires_grad_(False)
        self._compiles = fast
        self._compiled: Any = None
        self._vectors: tuple[WeightsStamp, Tensor] | None = None

    def vectors(self, columns: int) -> Tensor:
        stamp = WeightsStamp([self.discriminator.vectors])
        if self._vectors is None or self._vectors[0] != stamp or len(self._vectors[1]) != columns:
            own = self.discriminator.vectors[: self.num_tokens].detach()
            self._vectors = stamp, F.pad(own, (0, 0, 0, columns - len(own)))
        return self._vectors[1]

    @torch.no_grad()
    def log_ratio(self, reads: Reads, t: float) -> Tensor:
        return self._attempt(self._log_ratio, reads, t)

    @torch.no_grad()
    def gradient(self, reads: Reads, t: float, mixture: Mixture, counted: Tensor) -> Tensor:
        return self._attempt(self._gradient, reads, t, mixture, counted)

    def _attempt(self, function: Callable[..., Tensor], *given: Any) -> Tensor:
        """Call a function; where the compiler fails, once more without it."""
        try:
            return function(*given)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of the compiler, which may meet gradients last
            if not self._compiles:
                raise
            reason = first_line(error)
            warn_once(f"A discriminator cannot be compiled here, so it runs slower: {reason}")
            self._compiles, self._compiled = False, None
            return function(*given)

    def _gradient(self, reads: Reads, t: float, mixture: Mixture, counted: Tensor) -> Tensor:
        with torch.enable_grad():
            vectors = mixture.vectors.detach().to(self.discriminator.vectors.dtype)
            vectors.requires_grad_()
            ratio = self._log_ratio(reads, t, Mixture(mixture.at, vectors))
            (gradient,) = torch.autograd.grad(ratio, vectors, counted.to(ratio.dtype))
        return gradient

    def _log_ratio(self, reads: Reads, t: float, mixture: Mixture | None = None) -> Tensor:
        trunk, rows = self.discriminator.trunk, len(reads)
        attended = trunk.attention(reads.tokens, reads.attended)
        x = trunk.embed(reads.tokens, attended, mixture)
        timed = self.discriminator.config.time_conditioning
        sigma = self.schedule.sigma(times_of(t, reads)) if timed else None
        if not self._compiles:
            return self._score(x, trunk.modulations(sigma), attended)
        if self._compiled is None:
            self._compiled = compiled(self._score)
        if rows == 1:  # would be compiled anew, as would rows that are one in memory
            x = torch.cat([x, x])
            sigma, attended = (v if v is None else torch.cat([v, v]) for v in (sigma, attended))
        mods = trunk.modulations(sigma)
        for tensor in (x, None if mods is None else mods.c, attended):
            if tensor is not None and len(tensor) > 1:
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        ratio: Tensor = self._compiled(x, mods, attended)
        return ratio[:rows]

    def _score(self, x: Tensor, mods: Modulations | None, attended: Tensor | None) -> Tensor:
        """Log-ratios (U, L) of embedded texts (U, L, d)."""
        return self.discriminator.log_ratio(self.discriminator.trunk.trunk(x, mods, attended))


def mixed_vectors(logits: Tensor, vectors: Tensor) -> Tensor:
    """Average embedding softmax(logits) @ E: (R, W), (W, d) -> (R, d).

    Where both are of one type, what is summed is rounded to it; the sums are in 32 bits at least.
    """
    if logits.dtype != vectors.dtype:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        logits, vectors = logits.to(dtype), vectors.to(dtype)
    return logits.softmax(-1) @ vectors


def slopes(gradient: Tensor, vectors: Tensor, dtype: torch.dtype) -> Tensor:
    """E g in a type, for gradients g (R, d) and embeddings E (W, d): (R, W).

    Products of 16-bit numbers are exact in 32 bits, in which a GPU's 16-bit units add them up.
    """
    narrow = gradient.dtype == vectors.dtype and gradient.dtype in (torch.bfloat16, torch.float16)
    if narrow and gradient.is_cuda and dtype == torch.float32:
        return torch.mm(gradient, vectors.T, out_dtype=dtype)
    return gradient.to(dtype) @ vectors.T.to(dtype)


def tilted(logits: Tensor, slope: Tensor, h: Tensor, clamp: Tensor) -> Tensor:
    """Logits + h * gradient of the reward, clamped: (R, W), (R, W) -> (R, W) in the slopes' type.

    h and clamp are tensors without dimensions: other numbers would be compiled anew.
    """
    wide = logits.to(slope.dtype)
    p = wide.softmax(-1)
    gradient = p * (slope - (p * slope).sum(-1, keepdim=True))
    return wide + h * gradient.clamp(-clamp, clamp)


fused_tilt: Fused[[Tensor, Tensor, Tensor, Tensor], Tensor] = Fused(tilted, "A tilt")
