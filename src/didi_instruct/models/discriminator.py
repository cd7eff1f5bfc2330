"""The discriminator: a denoiser's trunk and a spectrally normalised head."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from didi_instruct.config.model import ModelConfig
from didi_instruct.models.dit import DiT
from didi_instruct.models.layers import no_autocast, upcast
from didi_instruct.models.network import Mixture, Network, NetworkRecord

POWER_EPS = 1e-12
INITIAL_ITERATIONS = 15
PREFIX, HEAD = "trunk.", "output_layer."


class SpectralLinear(nn.Module):
    """Linear layer with weight `weight_orig / σ`, σ = u · weight_orig v its largest singular value.

    Keys and arithmetic of `torch.nn.utils.spectral_norm`, which the released discriminator has. A
    pass in training mode does one power iteration first; in evaluation mode u and v stay. Gradients
    flow through σ, not through u and v.
    """

    weight_u: Tensor
    weight_v: Tensor

    @torch.no_grad()
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(outputs))
        self.weight_orig = nn.Parameter(torch.empty(outputs, inputs))
        self.register_buffer("weight_u", torch.empty(outputs))
        self.register_buffer("weight_v", torch.empty(inputs))
        if self.weight_orig.is_meta:
            return  # there are no numbers to draw, and power iterations take time even so
        self.weight_orig.uniform_(-(inputs**-0.5), inputs**-0.5)
        self.bias.uniform_(-(inputs**-0.5), inputs**-0.5)
        for vector in (self.weight_u, self.weight_v):
            vector.copy_(F.normalize(vector.normal_(), dim=0, eps=POWER_EPS))
        for _ in range(INITIAL_ITERATIONS):
            self.iterate()

    @torch.no_grad()
    def iterate(self) -> None:
        """Do one power iteration."""
        weight = upcast(self.weight_orig)
        with no_autocast(weight.device):
            v = torch.mv(weight.t(), self.weight_u.to(weight.dtype))
            v = F.normalize(v, dim=0, eps=POWER_EPS)
            u = F.normalize(torch.mv(weight, v), dim=0, eps=POWER_EPS)
            self.weight_u.copy_(u)
            self.weight_v.copy_(v)

    def weight(self) -> Tensor:
        """Return the normalised weight (outputs, inputs), in float32."""
        if self.training:
            self.iterate()
        weight = upcast(self.weight_orig)
        with no_autocast(weight.device):
            # Clones: the next power iteration must not change what backward needs.
            u = self.weight_u.to(weight.dtype, copy=True)
            v = self.weight_v.to(weight.dtype, copy=True)
            return weight / torch.dot(u, torch.mv(weight, v))

    def forward(self, x: Tensor) -> Tensor:
        dtype = self.weight_orig.dtype
        return F.linear(x.to(dtype), self.weight().to(dtype), self.bias)


class DiscriminatorHead(nn.Module):
    """linear(d, d), SiLU, linear(d, 1), both spectrally normalised, without a norm before them.

    Dropout between SiLU and the last layer is an argument of a pass: what its hidden units are
    multiplied by.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        first, last = SpectralLinear(hidden, hidden), SpectralLinear(hidden, 1)
        self.main = nn.Sequential(first, nn.SiLU(), last)

    def forward(self, hidden: Tensor, dropout: Tensor | None = None) -> Tensor:
        """Map (..., d) to (..., 1), the last layer in float32: log-ratios are summed over a text.

        In 16 bits their rounding would add up to tenths of a nat. `dropout` (..., d) holds 0 where
        a unit is left out and 1 / (1 - share) elsewhere.
        """
        first, act, last = self.main
        assert isinstance(last, SpectralLinear)
        x = upcast(act(first(hidden)))
        if dropout is not None:
            x = x * dropout
        with no_autocast(x.device):
            return F.linear(x, last.weight().to(x.dtype), last.bias.to(x.dtype))


class Discriminator(nn.Module):
    """Log-ratio of teacher over student at every position of a noisy text.

    A trunk without a head (`Network.without_head`) under a head of its own. In `state_dict`, files
    and checkpoints its tensors have flat names (`flat_name`).
    """

    def __init__(self, trunk: Network) -> None:
        super().__init__()
        self.trunk = trunk
        self.output_layer = DiscriminatorHead(trunk.config.hidden)
        self.register_state_dict_post_hook(_flatten)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_unflatten)  # type: ignore[no-untyped-call]

    @classmethod
    def from_network(cls, network: Network) -> "Discriminator":
        """Return a discriminator with a copy of a denoiser's trunk and a fresh head."""
        trunk = network.without_head()
        with torch.device("cpu"):  # where it is drawn: the same on every device
            discriminator = cls(trunk)
        weight = next(iter(trunk.parameters()))
        discriminator.output_layer.to(weight.device, weight.dtype)
        return discriminator

    @property
    def config(self) -> ModelConfig:
        return self.trunk.config

    @property
    def record(self) -> NetworkRecord | None:
        return self.trunk.record

    @property
    def blocks(self) -> nn.ModuleList:
        return self.trunk.blocks

    @property
    def vectors(self) -> Tensor:
        return self.trunk.vectors

    def freeze_lower(self, trainable_blocks: int) -> None:
        """Leave only the last `trainable_blocks` blocks and the head trainable."""
        if not 0 <= trainable_blocks <= len(self.blocks):
            raise ValueError(f"{trainable_blocks} trainable blocks of {len(self.blocks)}")
        self.requires_grad_(False)
        self.output_layer.requires_grad_(True)
        for block in self.blocks[len(self.blocks) - trainable_blocks :]:
            block.requires_grad_(True)

    @property
    def frozen(self) -> int:
        """Number of lowest blocks that do not learn; 0 if embeddings do, or trunks do not split."""
        if not self.trunk.splits:
            return 0
        learn = [any(p.requires_grad for p in block.parameters()) for block in self.blocks]
        count = learn.index(True) if True in learn else len(learn)
        inside = {id(p) for p in self.blocks.parameters()}
        others = (p for p in self.trunk.parameters() if id(p) not in inside)
        return 0 if any(weight.requires_grad for weight in others) else count

    @torch.no_grad()
    def below(self, tokens: Tensor, sigma: Tensor | float | None = None) -> Tensor:
        """Return the state (B, L, d) after the frozen blocks, of which there must be some."""
        assert self.frozen, "nothing is frozen"
        x, mods = self.trunk.embed(tokens), self.trunk.modulations(sigma)
        return self.trunk.trunk(x, mods, stop=self.frozen)

    def above(
        self,
        state: Tensor,
        sigma: Tensor | float | None = None,
        dropout: Tensor | None = None,
    ) -> Tensor:
        """Return logits (B, L) from the state after the frozen blocks."""
        mods = self.trunk.modulations(sigma)
        return self.log_ratio(self.trunk.trunk(state, mods, start=self.frozen), dropout)

    def iterate(self) -> None:
        """Do one power iteration in the head: for updates in evaluation mode, without dropout."""
        for layer in self.output_layer.main:
            if isinstance(layer, SpectralLinear):
                layer.iterate()

    def forward(
        self,
        tokens: Tensor,
        sigma: Tensor | float | None = None,
        attended: Tensor | None = None,
        mixture: Mixture | None = None,
        dropout: Tensor | None = None,
    ) -> Tensor:
        """Return logits (B, L), teacher over student; arguments as in `Network.embed`.

        `dropout` (B, L, d) is that of the head.
        """
        attended = self.trunk.attention(tokens, attended)
        x, mods = self.trunk.embed(tokens, attended, mixture), self.trunk.modulations(sigma)
        return self.log_ratio(self.trunk.trunk(x, mods, attended), dropout)

    def log_ratio(self, hidden: Tensor, dropout: Tensor | None = None) -> Tensor:
        """Return logits (B, L) from the states after the last block (B, L, d)."""
        return upcast(self.output_layer(hidden, dropout)).squeeze(-1)


def _headless_dit(config: ModelConfig) -> Network:
    return DiT(config, head=False)


def flat_name(name: str) -> str:
    """Return a tensor's name in files and checkpoints, where the trunk has no prefix."""
    return name.removeprefix(PREFIX)


def _flatten(module: nn.Module, state: dict[str, Tensor], prefix: str, *_: object) -> None:
    """Take the trunk's prefix off the names in a state dict, in place and in order."""
    for name in [name for name in state if name.startswith(prefix)]:
        state[prefix + flat_name(name.removeprefix(prefix))] = state.pop(name)


def _unflatten(module: nn.Module, state: dict[str, Tensor], prefix: str, *_: object) -> None:
    """Put the trunk's prefix back before a state dict is loaded."""
    for name in [name for name in state if name.startswith(prefix)]:
        if not name.startswith((prefix + PREFIX, prefix + HEAD)):
            state[prefix + PREFIX + name.removeprefix(prefix)] = state.pop(name)


def build_discriminator(
    config: ModelConfig, network: Callable[[ModelConfig], Network] = _headless_dit
) -> Discriminator:
    """Return a freshly initialised discriminator on the trunk that `network` builds."""
    return Discriminator(network(config))
