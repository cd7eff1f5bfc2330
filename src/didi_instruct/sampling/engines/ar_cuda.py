"""Left-to-right decoding at its best: static cache, one captured pass per token.

Every pass has one shape, attends to the whole cache behind a mask and draws its tokens exactly, so
that it is one CUDA graph. The numbers, and so the tokens, are those of `autoregressive`.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from didi_instruct.models.ar import ARModel
from didi_instruct.models.layers import Block, upcast, versions
from didi_instruct.sampling.draw import draw_by_chunks
from didi_instruct.sampling.engines.cuda import pad_output
from didi_instruct.sampling.engines.cuda_graphs import capture, grown, keep_few

MOST_KEPT = 4
"""Sizes of batches, and lengths, whose decoders are kept."""
LOOKS = 32
"""Tokens after which a decoder looks whether all texts are over, and waits for the GPU."""


def _drawn(logits: Tensor, numbers: Tensor) -> Tensor:
    return torch.stack([found.double() for found in draw_by_chunks(logits, numbers)], 1)


_draw: Callable[[Tensor, Tensor], Tensor] = torch.compiler.disable(_drawn)  # type: ignore[no-untyped-call]
"""Exact draws, few and small, as they are: inductor fails at long sums in float64."""


class StaticDecoder:
    """Draws sequences of one length in batches of one size."""

    def __init__(self, model: ARModel, batch: int, length: int) -> None:
        config = model.config
        self.model, self.batch, self.length = model, batch, length
        weight = model.output_layer.linear.weight
        shape = (batch, config.heads, length, config.hidden // config.heads)
        # A tensor each: compiled code that writes to a part of a tensor copies all of it.
        self._cache = [
            (weight.new_zeros(shape), weight.new_zeros(shape)) for _ in range(config.layers)
        ]
        self._columns = torch.arange(length, device=weight.device)
        with torch.no_grad():
            self._output = pad_output(weight, model.output_layer.linear.bias, config.num_tokens)
        tokens = torch.full((batch,), config.vocab_size - 1, device=weight.device)
        numbers = torch.zeros(batch, dtype=torch.float64, device=weight.device)
        self._begin = tokens.clone()
        position = self._columns[:1].clone()
        self._step = capture(self._next, (tokens, numbers, position))

    @torch.no_grad()
    def decode(self, numbers: Tensor, eot_id: int | None = None) -> tuple[Tensor, Tensor]:
        """Tokens and their log-probabilities, drawn by numbers (B, length): (B, L) each.

        B is the batch, or less. L is the length, or less where all texts have drawn `eot_id`
        before. What a text has drawn after it counts for nothing.
        """
        texts, numbers = len(numbers), grown(numbers, self.batch)
        tokens, drawn = self._begin, []
        over = torch.zeros_like(tokens, dtype=torch.bool)
        for column in range(self.length):
            # A copy: the next pass writes its result to the same place.
            position = self._columns[column : column + 1]
            drawn.append(self._step(tokens, numbers[:, column], position).clone())
            tokens = drawn[-1][:, 0].long()
            if eot_id is not None:
                over |= tokens == eot_id
                if column % LOOKS == LOOKS - 1 and bool(over.all()):
                    break
        token, log_p = torch.stack(drawn, 1)[:texts].unbind(2)
        return token.long(), log_p

    def _next(self, tokens: Tensor, numbers: Tensor, position: Tensor) -> Tensor:
        """What follows `tokens` (B,), which stand at `position` (1,), and its log-probability.

        As columns (B, 2) in float64.
        """
        return _draw(self._logits(tokens, position), numbers)

    def _logits(self, tokens: Tensor, position: Tensor) -> Tensor:
        """Logits (B, V) of the tokens after these."""
        model = self.model
        x = upcast(model.vocab_embed(tokens[:, None]))
        if model.position_embed is not None:
            x = x + upcast(model.position_embed.embedding[position])
        cos = model.rotary_emb.cos[position][:, None, None]
        sin = model.rotary_emb.sin[position][:, None, None]
        seen = (self._columns <= position)[None, None, None]
        for layer, block in enumerate(model.blocks):
            x = self._read(block, layer, x, cos, sin, seen, position)
        weight, bias = self._output
        x = model.output_layer.norm_final(x[:, 0]).to(weight.dtype)
        return F.linear(x, weight, bias)

    def _read(
        self,
        block: torch.nn.Module,
        layer: int,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        seen: Tensor,
        position: Tensor,
    ) -> Tensor:
        assert isinstance(block, Block)

        def extend(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            keys, values = self._cache[layer]
            keys.index_copy_(2, position, k)
            values.index_copy_(2, position, v)
            return keys, values

        out: Tensor = block(x, cos, sin, mask=seen, extend=extend)
        return out


class Decoders:
    """Decoders of a model, each made when it is asked for; dropped when weights have changed."""

    def __init__(self, model: ARModel) -> None:
        self.model = model
        self._made: dict[tuple[int, int], StaticDecoder] = {}
        self._state: tuple[object, ...] = ()
        self._rotary: Tensor | None = None

    def find(self, batch: int, length: int) -> StaticDecoder:
        """A decoder for so many texts, or up to twice as many, of one length."""
        self._forget_if_changed()
        there = [b for b, size in self._made if size == length and batch <= b <= 2 * batch]
        key = min(there, default=batch), length
        made: StaticDecoder = keep_few(
            self._made, key, partial(StaticDecoder, self.model, *key), MOST_KEPT
        )
        return made

    def _forget_if_changed(self) -> None:
        """Drop what reads weights where they no longer are, or has a copy of other ones."""
        model, layer = self.model, self.model.output_layer.linear
        places = [p.data_ptr() for p in (model.vocab_embed.embedding, *layer.parameters())]
        state = (*places, versions(layer.parameters()))
        if state != self._state or model.rotary_emb.cos is not self._rotary:
            self._made.clear()
            self._state, self._rotary = state, model.rotary_emb.cos
