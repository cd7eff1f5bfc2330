"""The left-to-right model: the same blocks, causal and without modulation."""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from didi_instruct.config.model import ModelConfig
from didi_instruct.models.layers import Block, Embedding, OutputLayer, Rotary, constant_ids, upcast
from didi_instruct.models.network import Modulations, NetworkRecord

INIT_STD = 0.02


class KVCache:
    """Keys and values of the `position` positions read so far, with room for `length`.

    Two tensors (layers, B, H, length, D), made at the first use in the type that is stored.
    """

    def __init__(self, config: ModelConfig, batch: int, length: int | None = None) -> None:
        self.length = config.length if length is None else length
        width = config.hidden // config.heads
        self.shape = (config.layers, batch, config.heads, self.length, width)
        self.position = 0
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k and v (B, H, L, D) at `position`; return all so far, (B, H, position + L, D)."""
        if self.keys is None or self.values is None:
            self.keys, self.values = k.new_empty(self.shape), v.new_empty(self.shape)
        end = self.position + k.shape[2]
        self.keys[layer, :, :, self.position : end] = k
        self.values[layer, :, :, self.position : end] = v
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]


class ARModel(nn.Module):
    """Causal language model; the extra id, the last, is the start symbol.

    Its tensors have the core keys (docs/foreign.md), without `sigma_map` and `adaLN_modulation`. A
    sequence of L tokens is predicted from the start symbol and its first L - 1 tokens.
    """

    record: NetworkRecord | None = None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.vocab_embed = Embedding(config.vocab_size, config.hidden)
        self.rotary_emb = Rotary(config.hidden // config.heads, config.length)
        learned = config.learned_positions
        self.position_embed = Embedding(config.length, config.hidden) if learned else None
        self.blocks = nn.ModuleList(
            Block(config.hidden, config.heads, None, config.dropout) for _ in range(config.layers)
        )
        self.output_layer = OutputLayer(config.hidden, config.vocab_size, None)
        self._draw_weights()

    @torch.no_grad()
    def _draw_weights(self) -> None:
        """Normal(0, 0.02), residual outputs over √(2·layers); the head stays at zero."""
        for name, parameter in self.blocks.named_parameters():
            if name.endswith(("attn_out.weight", "mlp.2.weight")):
                parameter.normal_(0, INIT_STD / (2 * self.config.layers) ** 0.5)
            elif name.endswith("bias"):
                parameter.zero_()
            elif parameter.ndim == 2:
                parameter.normal_(0, INIT_STD)
        self.vocab_embed.embedding.normal_(0, INIT_STD)
        if self.position_embed is not None:
            self.position_embed.embedding.normal_(0, INIT_STD)

    def forward(
        self,
        tokens: Tensor,
        cache: KVCache | None = None,
        *,
        last_only: bool = False,
        at: Tensor | None = None,
    ) -> Tensor:
        """Return logits of the token after each of `tokens`, (B, L) -> (B, L, num_tokens).

        `last_only`: of the token after the last alone, (B, 1, num_tokens). `at`: of those after
        flat positions (R,) alone, (R, num_tokens). With a cache the tokens continue those read
        before, and are added to it, without gradients.
        """
        length = tokens.shape[1]
        start = 0 if cache is None else cache.position
        if cache is not None and start + length > cache.length:
            raise ValueError(f"{start + length} positions, but the cache has {cache.length}")
        x = upcast(self.vocab_embed(tokens))
        if self.position_embed is not None:
            x = self.position_embed.add_to(x, start)
        cos, sin = self.rotary_emb(length, start)
        mask = None
        if start > 0 and length > 1:
            shape = (length, start + length)
            mask = torch.ones(shape, dtype=torch.bool, device=tokens.device).tril(start)
        causal = start == 0 and length > 1
        for layer, block in enumerate(self.blocks):
            extend = None if cache is None else functools.partial(cache.append, layer)
            x = block(x, cos, sin, mask=mask, causal=causal, extend=extend)
        if cache is not None:
            cache.position += length
        x = x[:, -1:] if last_only else x
        x = x if at is None else x.flatten(0, 1).index_select(0, at)
        return self.output_layer(x, num=self.config.num_tokens, never=self.config.never_drawn)

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed the start symbol and tokens, for `trunk`: (B, L) -> (B, L + 1, d)."""
        start = torch.full_like(tokens[:, :1], self.config.vocab_size - 1)
        x = upcast(self.vocab_embed(torch.cat((start, tokens), dim=1)))
        return x if self.position_embed is None else self.position_embed.add_to(x)

    def modulations(self, sigma: Tensor | float | None = None) -> None:
        """Return None: nothing modulates it."""

    def trunk(
        self, x: Tensor, mods: Modulations | None = None, attended: Tensor | None = None
    ) -> Tensor:
        """State after the last block at each token, having read it: (B, L + 1, d) -> (B, L, d).

        What is not `attended` has to come last, where no token sees it.
        """
        cos, sin = self.rotary_emb(x.shape[1])
        for block in self.blocks:
            x = block(x, cos, sin, causal=True)
        return x[:, 1:]

    def log_prob(self, tokens: Tensor, count: Tensor | None = None) -> Tensor:
        """Log-probability (B,) of sequences (B, L), or of the first `count` (B,) tokens of each.

        Banned tokens are given where a text has them, and count as certain.
        """
        logits = self(self._shifted(tokens))
        nll = self._nll(logits.flatten(0, 1), tokens.flatten()).view_as(tokens)
        if count is not None:
            nll = nll * (torch.arange(tokens.shape[1], device=tokens.device) < count[:, None])
        return -nll.sum(dim=1)

    def nll_at(self, tokens: Tensor, at: Tensor) -> Tensor:
        """-log p of the tokens at flat positions `at` (R,), each given all before it: (R,)."""
        logits = self(self._shifted(tokens), at=at)
        return self._nll(logits, tokens.flatten()[at])

    def _nll(self, logits: Tensor, targets: Tensor) -> Tensor:
        """-log p of targets (R,) under logits (R, V), 0 of those that are banned: (R,)."""
        nll = F.cross_entropy(upcast(logits), targets, reduction="none")
        if not self.config.banned:
            return nll
        return nll.masked_fill(torch.isin(targets, constant_ids(self.config.banned, nll.device)), 0)

    def _shifted(self, tokens: Tensor) -> Tensor:
        """Inputs that predict `tokens`: the start symbol and all but the last, (B, L)."""
        start = torch.full_like(tokens[:, :1], self.config.vocab_size - 1)
        return torch.cat((start, tokens[:, :-1]), dim=1)
