"""The protocol every denoiser network meets, whoever wrote it.

A pass has four parts: `embed` tokens, `trunk`, choose positions, `head`. So the output layer runs
where it is needed, soft tokens can stand in place of tokens, and a discriminator is another head
on the same trunk.
"""

from typing import NamedTuple, Protocol

from torch import Tensor, nn

from didi_instruct.config.model import ModelConfig
from didi_instruct.models.layers import versions


class Modulations(NamedTuple):
    """Condition of a pass, and what each layer makes of it where that is known beforehand."""

    c: Tensor
    """(1 or B, cond_dim) silu(time embedding of σ)."""
    layers: tuple[Tensor, ...] | None = None
    """One tensor per block, then the output layer's; None: each layer computes its own."""

    def of_rows(self, row: Tensor) -> "Modulations":
        """Modulations of positions that belong to the texts `row` (R,)."""
        return self if len(self.c) == 1 else Modulations(self.c[row])


class Mixture(NamedTuple):
    """Soft tokens: vectors shown at some positions in place of tokens."""

    at: Tensor
    """(R,) flat positions in (B, L)."""
    vectors: Tensor
    """(R, d)."""


class Network(Protocol):
    """A denoiser network: our DiT, or a masked LM of transformers."""

    config: ModelConfig
    align: int
    """Columns of `head` are a multiple of it; those added have probability 0."""

    @property
    def blocks(self) -> nn.ModuleList:
        """Transformer blocks, first to last."""

    @property
    def vectors(self) -> Tensor:
        """(vocab_size, d) embedding of every id, the mask's last."""

    def embed(
        self, tokens: Tensor, attended: Tensor | None = None, mixture: Mixture | None = None
    ) -> Tensor:
        """Embed tokens (B, L), with soft tokens in place of some, for `trunk`."""

    def modulations(self, sigma: Tensor | float | None = None) -> Modulations | None:
        """Condition on σ (B,) or a number; None where the network knows no time."""

    def constants(self) -> Modulations | None:
        """Modulations computed once, for inference; None where they depend on time."""

    def trunk(
        self, x: Tensor, mods: Modulations | None = None, attended: Tensor | None = None
    ) -> Tensor:
        """State after the last block, (B, L, d), in float32; attended (B, L), None: all."""

    def head(self, hidden: Tensor, mods: Modulations | None = None) -> Tensor:
        """Logits (..., V) of the real tokens from states (..., d)."""

    def __call__(
        self, tokens: Tensor, sigma: Tensor | float | None = None, attended: Tensor | None = None
    ) -> Tensor:
        """Logits (B, L, V), exactly V columns."""


def logits_at(
    network: Network,
    tokens: Tensor,
    sigma: Tensor | None,
    at: Tensor,
    attended: Tensor | None = None,
    *,
    mixture: Mixture | None = None,
    mods: Modulations | None = None,
) -> Tensor:
    """Logits (R, V) at flat positions `at` (R,) of tokens (B, L).

    The output layer runs on those alone. There may be more than V columns (`Network.align`), of
    probability 0. `mods` replaces what σ (B,) would give.
    """
    mods = network.modulations(sigma) if mods is None else mods
    x = network.embed(tokens, attended, mixture)
    hidden = network.trunk(x, mods, attended).flatten(0, 1).index_select(0, at)
    rows = None if mods is None else mods.of_rows(at // tokens.shape[1])
    return network.head(hidden, rows)


def weights_stamp(network: nn.Module) -> tuple[object, ...]:
    """Where each weight and buffer lies and how often it was changed in place.

    Two equal stamps mean equal weights, as far as torch can tell.
    """
    tensors = [*network.parameters(), *network.buffers()]
    return (*(t.data_ptr() for t in tensors), *versions(tensors))
