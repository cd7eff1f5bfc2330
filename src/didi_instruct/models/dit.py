"""The DiT of the public MDLM and DUO checkpoints, and the cost of our networks."""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from didi_instruct.config.model import ModelConfig
from didi_instruct.models import layers
from didi_instruct.models.ar import ARModel
from didi_instruct.models.layers import upcast
from didi_instruct.models.network import Mixture, Modulations, NetworkRecord, all_logits


class DiT(nn.Module):
    """Denoiser: tokens and σ = −log α_t to logits of the clean tokens; a `Network`.

    Its tensors are named by the core keys (docs/foreign.md). Without `time_conditioning` σ is
    replaced by 0, and one row of modulation serves the whole batch. Without `head` it is the trunk
    of a discriminator.
    """

    align: int = 1
    splits: bool = True
    reads_fill: bool = True
    record: NetworkRecord | None = None
    output_layer: layers.OutputLayer  # absent without `head`

    def __init__(self, config: ModelConfig, *, head: bool = True) -> None:
        super().__init__()
        self.config = config
        self.vocab_embed = layers.Embedding(config.vocab_size, config.hidden)
        self.sigma_map = layers.TimeEmbedding(config.cond_dim)
        self.rotary_emb = layers.Rotary(config.hidden // config.heads, config.length)
        learned = config.learned_positions
        self.position_embed = layers.Embedding(config.length, config.hidden) if learned else None
        self.blocks = nn.ModuleList(
            layers.Block(config.hidden, config.heads, config.cond_dim, config.dropout)
            for _ in range(config.layers)
        )
        self.has_head = head
        if head:
            sizes = config.hidden, config.vocab_size, config.cond_dim
            self.output_layer = layers.OutputLayer(*sizes)

    @property
    def vectors(self) -> Tensor:
        return self.vocab_embed.embedding

    def embed(
        self, tokens: Tensor, attended: Tensor | None = None, mixture: Mixture | None = None
    ) -> Tensor:
        if mixture is None:
            x = upcast(self.vocab_embed(tokens))
        elif mixture.at is None:
            x = upcast(mixture.vectors).view(*tokens.shape, -1)
        else:
            x = upcast(self.vocab_embed(tokens))
            vectors = mixture.vectors.to(x.dtype)
            x = x.flatten(0, 1).index_copy(0, mixture.at, vectors).view_as(x)
        return x if self.position_embed is None else self.position_embed.add_to(x)

    def attention(self, tokens: Tensor, attended: Tensor | None = None) -> Tensor | None:
        """Return `attended` unchanged: the ends that fill a window are tokens like others."""
        return attended

    def modulations(self, sigma: Tensor | float | None = None) -> Modulations:
        """Compute c = silu(time embedding of σ); σ is (B,), (B, 1), or a number for all texts."""
        weight = layers.first_weight(self.sigma_map.mlp)
        dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        if not self.config.time_conditioning:
            sigma = torch.zeros(1, dtype=dtype, device=weight.device)
        elif sigma is None:
            raise ValueError("the model is time-conditioned: sigma is needed")
        else:
            sigma = torch.as_tensor(sigma, dtype=dtype, device=weight.device).reshape(-1)
        with layers.no_autocast(weight.device):
            return Modulations(F.silu(self.sigma_map(sigma)))

    @torch.no_grad()
    def constants(self) -> Modulations | None:
        if self.config.time_conditioning:
            return None
        c = self.modulations().c
        modulated = [*self.blocks, self.output_layer] if self.has_head else [*self.blocks]
        return Modulations(c, tuple(torch.stack(layer.affine(c, ndim=2)) for layer in modulated))

    def trunk(
        self,
        x: Tensor,
        mods: Modulations | None = None,
        attended: Tensor | None = None,
        start: int = 0,
        stop: int | None = None,
    ) -> Tensor:
        assert mods is not None, "blocks are modulated: give what `modulations` or `constants` give"
        cos, sin = self.rotary_emb(x.shape[1])
        mask = None if attended is None else attended[:, None, None, :]
        for number in range(len(self.blocks))[start:stop]:
            x = self.blocks[number](x, cos, sin, *mods.of_layer(number), mask)
        return x

    def head(self, hidden: Tensor, mods: Modulations | None = None) -> Tensor:
        """Logits (..., V) of states (..., d); c has one row, or one per leading index of hidden.

        What a model is given and never draws (`config.never_drawn`) has probability 0.
        """
        assert mods is not None, "the final norm is modulated: give what `modulations` gives"
        num, never = self.config.num_tokens, self.config.never_drawn
        layer = mods.of_layer(-1)
        return self.output_layer(hidden, *layer, num=num, align=self.align, never=never)

    def forward(
        self, tokens: Tensor, sigma: Tensor | float | None = None, attended: Tensor | None = None
    ) -> Tensor:
        return all_logits(self, tokens, sigma, attended)

    def without_head(self) -> "DiT":
        weight = self.vocab_embed.embedding
        with torch.device("meta"):
            trunk = DiT(self.config, head=False)
        trunk.to(weight.dtype).to_empty(device=weight.device)
        state = self.state_dict()
        trunk.load_state_dict({n: t for n, t in state.items() if not n.startswith("output_layer.")})
        return trunk

    def with_masks(self, offsets: Tensor) -> "DiT":
        """Copy with more masks, whose embeddings are the last one's plus offsets (K, d)."""
        config, more = self.config, len(offsets)
        grown = replace(config, masks=config.masks + more, vocab_size=config.vocab_size + more)
        network, state = DiT(grown).to(offsets.device), self.state_dict()
        words = state["vocab_embed.embedding"]
        state["vocab_embed.embedding"] = torch.cat([words, words[-1:] + offsets])
        for name in ("output_layer.linear.weight", "output_layer.linear.bias"):
            state[name] = torch.cat([state[name], state[name][-1:].repeat_interleave(more, 0)])
        network.load_state_dict(state)
        return network


def build_model(config: ModelConfig) -> DiT | ARModel:
    """Return a freshly initialised network: `DiT` for `mdlm` and `duo`, `ARModel` for `ar`."""
    return ARModel(config) if config.kind == "ar" else DiT(config)


def count_parameters(
    config: ModelConfig, build: Callable[[ModelConfig], nn.Module] = build_model
) -> int:
    """Return the number of parameters, buffers not counted, without allocating them."""
    with torch.device("meta"):
        return parameters_of(build(config))


def parameters_of(network: nn.Module) -> int:
    """Return the number of parameters, buffers not counted."""
    return sum(p.numel() for p in network.parameters())


def flops_per_token(
    config: ModelConfig, head_fraction: float = 1.0, length: int | None = None
) -> float:
    """Return the floating-point operations of matrix products in one forward pass, per token.

    Per block 24·d² (qkv 6, output 2, MLP 16) and 4·L·d for the attention, over (L + 1) / 2 keys on
    average in a causal model; the head costs 2·d·V on the `head_fraction` of positions that it is
    applied to. The modulation, which costs per sequence and not per token, is left out. A training
    step costs three times as much.
    """
    keys = float(config.length if length is None else length)
    if config.kind == "ar":
        keys = (keys + 1) / 2
    block = 24 * config.hidden**2 + 4 * keys * config.hidden
    return config.layers * block + 2 * config.hidden * config.num_tokens * head_fraction
