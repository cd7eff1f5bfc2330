"""What samplers and objectives of masked diffusion ask of a network, whoever wrote it."""

from typing import Protocol, runtime_checkable

from torch import Tensor

from didi_instruct.config.model import ModelConfig


@runtime_checkable
class Denoising(Protocol):
    """A denoiser in two parts, so that the output layer runs on chosen positions alone.

    `DiT` is one, and so is a masked LM of `transformers` (`MaskedLM`).
    """

    config: ModelConfig

    def condition(self, sigma: Tensor | float | None = None) -> Tensor:
        """Return what the layers are told of σ: one row per sequence, or one for all."""

    def trunk(
        self,
        tokens: Tensor,
        sigma: Tensor | float | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Return the last state (B, L, d); attention_mask (B, L) is True where attended."""

    def head(
        self,
        hidden: Tensor,
        c: Tensor | None = None,
        num: int | None = None,
        align: int | None = None,
    ) -> Tensor:
        """Map states (..., d) to logits of the first `num` ids; `align` may pad the columns."""

    def __call__(
        self,
        tokens: Tensor,
        sigma: Tensor | float | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Return logits (B, L, V) over the real tokens."""
