"""The protocol of denoiser networks.

A pass has four parts: `embed` tokens, `trunk`, choose positions, `head`. So the output layer runs
where it is needed, soft tokens can stand in place of tokens, and a discriminator is another head
on the same trunk.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from didi_instruct.config.model import ModelConfig


class Modulations(NamedTuple):
    """Condition of a pass, and what the layers compute from it if that was done beforehand."""

    c: Tensor  # (1 or B, cond_dim) silu(time embedding of σ)
    layers: tuple[Tensor, ...] | None = None  # one tensor per block, then the output layer's

    def of_positions(self, at: Tensor, length: int) -> "Modulations":
        """Modulations of flat positions (R,) in (B, length)."""
        return self if len(self.c) == 1 else Modulations(self.c[at // length])

    def of_layer(self, number: int) -> tuple[Tensor, Tensor | None]:
        """Return c and the tensor of a layer, -1 being the output layer."""
        return self.c, None if self.layers is None else self.layers[number]


class Mixture(NamedTuple):
    """Soft tokens: vectors shown at some positions in place of tokens."""

    at: Tensor | None  # (R,) flat positions in (B, L), each of them once; None: all, in order
    vectors: Tensor  # (R, d)


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkRecord:
    """Record of a network of transformers in config.json, beside its `ModelConfig`."""

    settings: dict[str, Any]
    """Its config.json as transformers writes it."""
    mask: int
    pad: int
    before: tuple[int, ...]
    after: tuple[int, ...]
    banned: tuple[int, ...]
    """Special ids, as `masked_network.SpecialIds` has them."""
    shifted: bool = False
    """Whether outputs are for the next position, as those of a causal LM."""


class Network(Protocol):
    """A denoiser network: a DiT, a masked LM of transformers, a bidirectional causal LM."""

    config: ModelConfig
    training: bool
    align: int  # `head` pads its columns to a multiple of it; those added have probability 0
    splits: bool  # `trunk` can be run in parts, from block `start` up to block `stop`
    reads_fill: bool  # what fills a window behind a text is tokens to it, not padding

    @property
    def record(self) -> NetworkRecord | None:
        """Record that a saved model needs beside weights and config; None if they suffice."""

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

    def attention(self, tokens: Tensor, attended: Tensor | None = None) -> Tensor | None:
        """Positions (B, L) that `trunk` may attend to, of those in `attended`; None: all."""

    def modulations(self, sigma: Tensor | float | None = None) -> Modulations | None:
        """Condition on σ (B,) or a number; None where the network knows no time."""

    def constants(self) -> Modulations | None:
        """Modulations computed once, for inference; None where they depend on time."""

    def trunk(
        self,
        x: Tensor,
        mods: Modulations | None = None,
        attended: Tensor | None = None,
        start: int = 0,
        stop: int | None = None,
    ) -> Tensor:
        """State after the last block, (B, L, d), in float32; `attended` as `attention` gives it."""

    def head(self, hidden: Tensor, mods: Modulations | None = None) -> Tensor:
        """Logits (..., V) of the real tokens from states (..., d)."""

    def without_head(self) -> "Network":
        """Copy all but the head: the trunk of a discriminator."""

    def with_masks(self, offsets: Tensor) -> "Network":
        """Copy with more masks, whose embeddings are the last one's plus offsets (K, d)."""

    def __call__(
        self, tokens: Tensor, sigma: Tensor | float | None = None, attended: Tensor | None = None
    ) -> Tensor:
        """Logits (B, L, V), exactly V columns."""

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def buffers(self) -> Iterator[Tensor]: ...


def all_logits(
    network: Network,
    tokens: Tensor,
    sigma: Tensor | float | None = None,
    attended: Tensor | None = None,
    *,
    mixture: Mixture | None = None,
    mods: Modulations | None = None,
) -> Tensor:
    """Logits (B, L, V) at every position of tokens (B, L); `mods` replaces what σ would give."""
    mods = network.modulations(sigma) if mods is None else mods
    attended = network.attention(tokens, attended)
    hidden = network.trunk(network.embed(tokens, attended, mixture), mods, attended)
    return network.head(hidden, mods)[..., : network.config.num_tokens]


def logits_at(
    network: Network,
    tokens: Tensor,
    sigma: Tensor | float | None,
    at: Tensor,
    attended: Tensor | None = None,
    *,
    mixture: Mixture | None = None,
    mods: Modulations | None = None,
) -> Tensor:
    """Logits (R, V) at flat positions `at` (R,) of tokens (B, L): the output layer runs on those.

    `Network.align` may add columns of probability 0. `mods` replaces what σ (B,) would give.
    """
    mods = network.modulations(sigma) if mods is None else mods
    hidden = states_at(network, tokens, at, attended, mixture=mixture, mods=mods)
    own = None if mods is None else mods.of_positions(at, tokens.shape[1])
    return network.head(hidden, own)


def states_at(
    network: Network,
    tokens: Tensor,
    at: Tensor,
    attended: Tensor | None = None,
    *,
    mixture: Mixture | None = None,
    mods: Modulations | None = None,
) -> Tensor:
    """States (R, d) after the last block at flat positions `at` (R,) of tokens (B, L)."""
    attended = network.attention(tokens, attended)
    x = network.embed(tokens, attended, mixture)
    return network.trunk(x, mods, attended).flatten(0, 1).index_select(0, at)


def window_of(network: Network) -> int:
    """Tokens of a window: as many as the network reads, or as the longest text that is drawn."""
    return network.config.length if network.reads_fill else network.config.longest


@contextmanager
def aligned(network: Network, align: int) -> Iterator[None]:
    """Set `Network.align` within the context."""
    before, network.align = network.align, align
    try:
        yield
    finally:
        network.align = before


class WeightsStamp:
    """Address of each weight and buffer, and how often torch has counted a change in place.

    Equal stamps mean equal weights, except after changes that torch does not count (fused
    optimizers). A stamp keeps the memory of its weights, so that no others can take their place.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = [tensor.detach() for tensor in tensors]
        changes = (0 if t.is_inference() else t._version for t in tensors)
        self._counts = (*(t.data_ptr() for t in tensors), *changes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WeightsStamp) and self._counts == other._counts


def weights_stamp(network: nn.Module | Network) -> WeightsStamp:
    """Return the stamp of all weights and buffers as they are now."""
    return WeightsStamp([*network.parameters(), *network.buffers()])
