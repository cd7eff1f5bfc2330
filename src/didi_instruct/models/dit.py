"""The denoiser, the DiT of the public MDLM checkpoints, and the trunk of all diffusion models."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from didi_instruct.config.model import ModelConfig
from didi_instruct.models.compile import compiled
from didi_instruct.models.layers import (
    Block,
    Embedding,
    Modulated,
    OutputLayer,
    Positions,
    Rotary,
    TimeEmbedding,
    first_weight,
    no_autocast,
    upcast,
    versions,
)


class Trunk(nn.Module):
    """Embedding, time embedding and blocks, named by the core keys (docs/foreign.md).

    Without `time_conditioning` σ is replaced by 0, so the condition has a single row, broadcast to
    the batch (gradient included), and the modulation of every layer can be folded for inference.
    """

    folded_condition: Tensor | None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.vocab_embed = Embedding(config.vocab_size, config.hidden)
        self.sigma_map = TimeEmbedding(config.cond_dim)
        self.rotary_emb = Rotary(config.hidden // config.heads, config.length)
        self.position_embed = (
            Positions(config.length, config.hidden) if config.learned_positions else None
        )
        self.blocks = nn.ModuleList(
            Block(config.hidden, config.heads, config.cond_dim, config.dropout)
            for _ in range(config.layers)
        )
        self.register_buffer("folded_condition", None, persistent=False)
        self._folded_from: list[nn.Parameter] = []
        self._folded_versions: tuple[int, ...] = ()

    def embed(self, tokens: Tensor) -> Tensor:
        """Map tokens (B, L) to embeddings (B, L, d)."""
        embeddings: Tensor = self.vocab_embed(tokens)
        return embeddings

    def condition(self, sigma: Tensor | float | None = None) -> Tensor:
        """Return c = silu(time embedding of σ): (B, cond_dim), or (1, cond_dim) for one σ.

        σ may be (B,), (B, 1) or a number; without time conditioning it is ignored.
        """
        if self.folded_condition is not None and self._fold_is_current():
            return self.folded_condition
        weight = first_weight(self.sigma_map.mlp)
        dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        if not self.config.time_conditioning:
            sigma = torch.zeros(1, dtype=dtype, device=weight.device)
        elif sigma is None:
            raise ValueError("the model is time-conditioned: sigma is needed")
        else:
            sigma = torch.as_tensor(sigma, dtype=dtype, device=weight.device).reshape(-1)
        with no_autocast(weight.device):
            return F.silu(self.sigma_map(sigma))

    def trunk(
        self,
        tokens: Tensor | None,
        sigma: Tensor | float | None = None,
        attention_mask: Tensor | None = None,
        embeddings: Tensor | None = None,
    ) -> Tensor:
        """Return the state after the last block, (B, L, d), in float32.

        Shapes: tokens (B, L), σ (B,); attention_mask (B, L), True where a position is attended
        (None: all of them, the fast path); embeddings (B, L, d) replace those of the tokens.
        """
        return self.run_blocks(tokens, self.condition(sigma), attention_mask, embeddings)

    def run_blocks(
        self,
        tokens: Tensor | None,
        c: Tensor | None,
        attention_mask: Tensor | None,
        embeddings: Tensor | None,
        start: int = 0,
        stop: int | None = None,
    ) -> Tensor:
        """Blocks `start` to `stop`; from a later one than the first, of a state in `embeddings`."""
        if embeddings is None:
            assert tokens is not None, "tokens or embeddings are needed"
            embeddings = self.embed(tokens)
        x = upcast(embeddings)
        if self.position_embed is not None and start == 0:
            x = self.position_embed(x)
        cos, sin = self.rotary_emb(x.shape[1])
        mask = None if attention_mask is None else attention_mask[:, None, None, :]
        c = self._unless_folded(c)
        for block in list(self.blocks)[start:stop]:
            x = block(x, cos, sin, c, mask)
        return x

    def compile_trunk(self, *, graphs: bool = False) -> None:
        """Compile the blocks as one graph, for this instance and for good."""
        self.run_blocks = compiled(self.run_blocks, graphs=graphs)  # type: ignore[method-assign]

    @property
    def is_folded(self) -> bool:
        """Whether constant modulations are cached."""
        return self.folded_condition is not None

    def fold_modulation(self) -> bool:
        """Cache the modulation of every layer for inference; return whether that was possible.

        It needs a constant condition (no time conditioning) and evaluation mode. The cache is used
        only while gradients are off, and dropped by `train()`, by loading weights, and when a
        weight changed in place (a compiled trunk cannot notice the last: call `unfold` there).
        """
        if self.config.time_conditioning or self.training:
            return False
        self.unfold()
        with torch.no_grad():
            c = self.condition()
            for layer in self._modulated():
                layer.fold(c)
        self.folded_condition = c
        self._folded_from = [
            p
            for n, p in self.named_parameters()
            if re.search(r"sigma_map|adaLN_modulation|norm", n)
        ]
        self._folded_versions = versions(self._folded_from)
        return True

    def unfold(self) -> None:
        """Drop the cached modulations."""
        self.folded_condition = None
        for layer in self._modulated():
            layer.unfold()

    @contextmanager
    def folded(self) -> Iterator[None]:
        """Fold for the duration of a block of inference."""
        before = self.is_folded
        self.fold_modulation()
        try:
            yield
        finally:
            if not before:
                self.unfold()

    def _modulated(self) -> list[Modulated]:
        return [m for m in self.modules() if isinstance(m, Modulated)]

    def _fold_is_current(self) -> bool:
        """Whether the folded modulations may be used: no gradients, and weights as they were."""
        if torch.is_grad_enabled():
            return False
        if not torch.compiler.is_compiling() and self._folded_versions != versions(
            self._folded_from
        ):
            self.unfold()
            return False
        return True

    def _unless_folded(self, c: Tensor | None) -> Tensor | None:
        """Return None, which makes layers use their folded modulation, if c is what they folded."""
        return None if c is self.folded_condition and not torch.is_grad_enabled() else c

    def train(self, mode: bool = True) -> "Trunk":
        """Set training or evaluation mode; training drops the folded modulations."""
        if mode:
            self.unfold()
        return super().train(mode)

    def _load_from_state_dict(self, *args: object, **kwargs: object) -> None:
        self.unfold()
        super()._load_from_state_dict(*args, **kwargs)


class DiT(Trunk):
    """Denoiser: tokens and σ = −log α_t to logits of the clean tokens."""

    align: int = 1
    """What the number of the head's columns is a multiple of, unless it is told otherwise."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.output_layer = OutputLayer(config.hidden, config.vocab_size, config.cond_dim)

    def head(
        self,
        hidden: Tensor,
        c: Tensor | None = None,
        num: int | None = None,
        align: int | None = None,
    ) -> Tensor:
        """Map trunk states (..., d) to logits (..., vocab_size), or of the first `num` ids alone.

        c comes from `condition`: (1, cond_dim), or one row per leading index of hidden, so both
        (B, L, d) with (B, cond_dim) and selected rows (R, d) with (R, cond_dim) work. Without time
        conditioning it may be left out. `align` as in `OutputLayer`. The end of a text is given,
        where texts have windows of their own, and so never predicted.
        """
        c = self.condition() if c is None else c
        never, align = self.config.end_id, align or self.align
        logits: Tensor = self.output_layer(hidden, self._unless_folded(c), num, align, never)
        return logits

    def forward(
        self,
        tokens: Tensor,
        sigma: Tensor | float | None = None,
        attention_mask: Tensor | None = None,
        embeddings: Tensor | None = None,
    ) -> Tensor:
        """Return logits (B, L, num_tokens) over the real tokens; arguments as in `trunk`."""
        c = self.condition(sigma)
        hidden = self.run_blocks(tokens, c, attention_mask, embeddings)
        return self.head(hidden, c, self.config.num_tokens, align=1)
