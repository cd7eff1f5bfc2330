"""The discriminator: the denoiser's trunk and a spectrally normalised head."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from didi_instruct.config.model import ModelConfig
from didi_instruct.models.dit import DiT, Trunk
from didi_instruct.models.layers import no_autocast, upcast

POWER_EPS = 1e-12
INITIAL_ITERATIONS = 15


class SpectralLinear(nn.Module):
    """Linear layer with weight `weight_orig / σ`, σ = u · weight_orig v its largest singular value.

    Keys as in the released DiDi-Instruct discriminator: `weight_orig`, `weight_u`, `weight_v`,
    `bias` (the layout and arithmetic of `torch.nn.utils.spectral_norm`). A forward pass in training
    mode does one power iteration first; in evaluation mode u and v stay. Gradients flow through σ,
    not through u and v.
    """

    weight_u: Tensor
    weight_v: Tensor

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(outputs))
        self.weight_orig = nn.Parameter(torch.empty(outputs, inputs))
        self.register_buffer("weight_u", torch.empty(outputs))
        self.register_buffer("weight_v", torch.empty(inputs))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the weights of a torch linear layer, and converge u and v from a random start."""
        if self.weight_orig.is_meta:
            return  # there are no numbers to draw, and power iterations take time even so
        bound = self.weight_orig.shape[1] ** -0.5
        self.weight_orig.uniform_(-bound, bound)
        self.bias.uniform_(-bound, bound)
        for vector in (self.weight_u, self.weight_v):
            vector.copy_(F.normalize(vector.normal_(), dim=0, eps=POWER_EPS))
        for _ in range(INITIAL_ITERATIONS):
            self._iterate(upcast(self.weight_orig))

    @torch.no_grad()
    def _iterate(self, weight: Tensor) -> None:
        v = F.normalize(torch.mv(weight.t(), self.weight_u.to(weight.dtype)), dim=0, eps=POWER_EPS)
        u = F.normalize(torch.mv(weight, v), dim=0, eps=POWER_EPS)
        self.weight_u.copy_(u)
        self.weight_v.copy_(v)

    def iterate(self) -> None:
        """Do one power iteration, as a forward pass in training mode does."""
        weight = upcast(self.weight_orig.detach())
        with no_autocast(weight.device):
            self._iterate(weight)

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
        """Map x (..., inputs) to (..., outputs)."""
        dtype = self.weight_orig.dtype
        return F.linear(x.to(dtype), self.weight().to(dtype), self.bias)


class DiscriminatorHead(nn.Module):
    """linear(d, d), SiLU, linear(d, 1), both spectrally normalised, without a norm before them."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.main = nn.Sequential(
            SpectralLinear(hidden, hidden), nn.SiLU(), SpectralLinear(hidden, 1)
        )

    def reset_parameters(self) -> None:
        """Draw new weights."""
        for layer in self.main:
            if isinstance(layer, SpectralLinear):
                layer.reset_parameters()

    def forward(self, hidden: Tensor) -> Tensor:
        """Map (..., d) to (..., 1), the last layer in float32.

        Log-ratios are added up over a text, and 8 bits of each would leave tenths of a nat to
        chance.
        """
        first, act, last = self.main
        assert isinstance(last, SpectralLinear)
        x = upcast(act(first(hidden)))
        with no_autocast(x.device):
            return F.linear(x, last.weight().to(x.dtype), last.bias.to(x.dtype))


class Discriminator(Trunk):
    """Log-ratio of teacher over student at every position of a noisy text."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.output_layer = DiscriminatorHead(config.hidden)

    @classmethod
    def from_denoiser(cls, dit: DiT) -> "Discriminator":
        """Return a discriminator with a copy of the denoiser's trunk and a fresh head."""
        weight = dit.vocab_embed.embedding
        with torch.device("meta"):
            discriminator = cls(dit.config)
        discriminator.to(weight.dtype).to_empty(device=weight.device)
        head = DiscriminatorHead(dit.config.hidden)  # drawn on the CPU: the same on every device
        discriminator.output_layer.load_state_dict(head.state_dict())
        trunk = {k: v for k, v in dit.state_dict().items() if not k.startswith("output_layer.")}
        result = discriminator.load_state_dict(trunk, strict=False)
        assert not result.unexpected_keys
        assert all(k.startswith("output_layer.") for k in result.missing_keys)
        return discriminator

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
        """Blocks that do not learn, nor does anything below them: what they give can be kept."""
        learn = [any(p.requires_grad for p in block.parameters()) for block in self.blocks]
        count = learn.index(True) if True in learn else len(learn)
        inputs = [self.vocab_embed, self.sigma_map, self.position_embed]
        weights = (p for part in inputs if part is not None for p in part.parameters())
        return 0 if any(weight.requires_grad for weight in weights) else count

    @torch.no_grad()
    def below(self, tokens: Tensor, sigma: Tensor | float | None = None) -> Tensor:
        """Return the state (B, L, d) after the frozen blocks, of which there must be some."""
        assert self.frozen, "nothing is frozen"
        return self.run_blocks(tokens, self.condition(sigma), None, None, stop=self.frozen)

    def above(self, state: Tensor, sigma: Tensor | float | None = None) -> Tensor:
        """Return logits (B, L) from the state after the frozen blocks."""
        hidden = self.run_blocks(None, self.condition(sigma), None, state, start=self.frozen)
        return self._ratio(hidden)

    def iterate(self) -> None:
        """Do one power iteration in the head: for updates in evaluation mode, without dropout."""
        for layer in self.output_layer.main:
            if isinstance(layer, SpectralLinear):
                layer.iterate()

    def forward(
        self,
        tokens: Tensor | None,
        sigma: Tensor | float | None = None,
        embeddings: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Return logits (B, L), teacher over student; arguments as in `Trunk.trunk`."""
        return self._ratio(self.trunk(tokens, sigma, attention_mask, embeddings))

    def _ratio(self, hidden: Tensor) -> Tensor:
        return upcast(self.output_layer(hidden)).squeeze(-1)
