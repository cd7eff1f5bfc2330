"""Networks on a GPU: passes and draws compiled and captured as CUDA graphs.

A graph runs at one shape, so batches are rounded up to few sizes. Results differ from the network's
by rounding alone: every row is computed from itself, whatever stands beside it.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from didi_instruct.models.ar import ARModel
from didi_instruct.models.compile import fusing
from didi_instruct.models.dit import DiT
from didi_instruct.models.layers import ALIGN, NEVER, upcast
from didi_instruct.models.network import Modulations, WeightsStamp, logits_at
from didi_instruct.process.schedule import Schedule
from didi_instruct.sampling.denoiser import times_of
from didi_instruct.sampling.draw import DrawOptions, draw_by_chunks, draw_tokens
from didi_instruct.sampling.engines import keep_few
from didi_instruct.sampling.engines.cuda_graphs import (
    Captured,
    capture,
    grown,
    round_up,
)
from didi_instruct.sampling.plan import Step
from didi_instruct.sampling.state import Reads

MOST_GRAPHS = 48
"""Shapes that are kept: about as many as a sweep over budgets brings. Graphs share their working
memory; each keeps its inputs and its result, (B, L, d) at most."""
SMALLEST = 8
"""Tokens that a graph draws at least."""
LOGITS_AT_ONCE = 1 << 26
"""Entries of the logits that tokens are drawn from at a time."""
ROWS_AT_ONCE = 4096
"""Rows of logits that `GraphDenoiser.logits_in_parts` gives at a time."""
MOST_DECODERS = 4
"""Batch sizes and lengths whose decoders are kept."""
LOOKS = 32
"""Tokens between two checks whether all texts have ended, which wait for the GPU."""


def why_not(network: nn.Module) -> str | None:
    """Reason why a network's passes cannot be captured; None: they can."""
    if not isinstance(network, (DiT, ARModel)):
        return "only networks of the DiT family, and ours from left to right, are compiled"
    if network.vocab_embed.embedding.device.type != "cuda":
        return "CUDA graphs need a GPU, and the model is on the CPU"
    return None


class GraphDenoiser:
    """A DiT by two kinds of CUDA graphs: the trunk, and from states of positions to their tokens.

    It holds constant modulations and a padded copy of the output layer, so it is made anew when
    weights change (`sampling.denoiser.CachedDenoiser`).
    """

    compiled = True

    def __init__(self, network: DiT, schedule: Schedule) -> None:
        self.network, self.schedule = network, schedule
        self.num_tokens: int = network.config.num_tokens
        self._constants = network.constants()
        linear = network.output_layer.linear
        with torch.no_grad():
            never = network.config.never_drawn
            self._output = pad_output(linear.weight, linear.bias, self.num_tokens, never)
        self._trunks: dict[tuple[int, int], Callable[..., Tensor]] = {}
        """By number of texts and their length."""
        self._draws: dict[int, Callable[..., Tensor]] = {}
        """By number of tokens."""
        self._pool: object = None

    def logits(self, reads: Reads, t: Tensor | float, at: Tensor) -> Tensor:
        return torch.cat(list(self.logits_in_parts(reads, t, at)))[:, : self.num_tokens]

    @torch.no_grad()
    def logits_in_parts(self, reads: Reads, t: Tensor | float, at: Tensor) -> Iterator[Tensor]:
        """Logits (R, W) some rows at a time, W a multiple of `ALIGN`; without graphs if padded."""
        mods = self._modulations(reads, t)
        if reads.attended is not None:
            found = logits_at(self.network, reads.tokens, None, at, reads.attended, mods=mods)
            yield found[:, : self.num_tokens]
            return
        hidden, mods = self._states(reads.tokens, mods, at)
        for start in range(0, len(at), ROWS_AT_ONCE):
            here = slice(start, start + ROWS_AT_ONCE)
            own = mods if len(mods.c) == 1 else Modulations(mods.c[here])
            yield self._head(hidden[here], own)

    @torch.no_grad()
    def draw(self, reads: Reads, step: Step, options: DrawOptions) -> tuple[Tensor, Tensor]:
        """Draw by a second graph, from states to tokens; the next call overwrites the result."""
        t, at, u, row = step.t, step.reads, step.u, step.row
        if reads.attended is not None or options.restricted:
            with fusing(True):
                logits = self.logits(reads, t, at)
                return draw_tokens(logits, u, row, options)
        own = at if row is None else at[row]
        hidden, mods = self._states(reads.tokens, self._modulations(reads, t), own)
        most, drawn = max(1, LOGITS_AT_ONCE // self.num_tokens), []
        # Graphs share memory: keep a result from a next part, or from the passes of other codes.
        keep = len(own) > most or step.codes is not None
        for start in range(0, len(own), most):
            part = slice(start, start + most)
            values: tuple[Tensor, ...] = (hidden[part], u[part])
            if self._constants is None:
                values = (*values, mods.c.expand(len(own), -1)[part])
            found = self._replay_draw(values, most)
            drawn.append(found.clone() if keep else found)
        token, log_p = (torch.cat(drawn) if len(drawn) > 1 else drawn[0]).unbind(1)
        return token.long(), log_p

    def _modulations(self, reads: Reads, t: Tensor | float) -> Modulations:
        if self._constants is not None:
            return self._constants
        return self.network.modulations(self.schedule.sigma(times_of(t, reads)))

    def _states(self, tokens: Tensor, mods: Modulations, at: Tensor) -> tuple[Tensor, Modulations]:
        """States (R, d) after the trunk at flat positions, and their modulations."""
        rows, length = tokens.shape
        values = (tokens,) if self._constants is not None else (tokens, mods.c)
        there = [size for size, other in self._trunks if other == length]
        size = min((s for s in there if rows <= s <= 2 * rows), default=round_up(rows))

        def make() -> Callable[..., Tensor]:
            graph = capture(self._trunk, tuple(grown(v, size) for v in values), self._pool)
            self._pool = graph.pool if isinstance(graph, Captured) else None
            return graph

        hidden = keep_few(self._trunks, (size, length), make, MOST_GRAPHS)(*values)
        return hidden.flatten(0, 1)[at], mods.of_positions(at, length)

    def _trunk(self, tokens: Tensor, c: Tensor | None = None) -> Tensor:
        mods = self._constants if c is None else Modulations(c)
        return self.network.trunk(self.network.embed(tokens), mods)

    def _replay_draw(self, values: tuple[Tensor, ...], most: int) -> Tensor:
        """Draw by a graph of the next size, at most `most`."""
        rows = len(values[0])
        there = [size for size in self._draws if rows <= size <= 2 * rows]
        size = min(there, default=min(max(SMALLEST, round_up(rows, 8)), most))

        def make() -> Callable[..., Tensor]:
            inputs = tuple(grown(v, size) for v in values)
            graph = capture(self._draw, inputs, self._pool, dynamic=True)
            if not isinstance(graph, Captured) or graph.pool != self._pool:
                self._pool = None  # a capture that broke off may still hold it
            return graph

        return keep_few(self._draws, size, make, MOST_GRAPHS)(*values)

    def _draw(self, hidden: Tensor, u: Tensor, c: Tensor | None = None) -> Tensor:
        mods = self._constants if c is None else Modulations(c)
        assert mods is not None
        return draw_columns(self._head(hidden, mods)[:, : self.num_tokens], u)

    def _head(self, hidden: Tensor, mods: Modulations) -> Tensor:
        """Logits (R, W) of states (R, d), by the padded output layer."""
        normed = self.network.output_layer.normed(hidden, *mods.of_layer(-1))
        return F.linear(normed, *self._output)


def draw_columns(logits: Tensor, u: Tensor) -> Tensor:
    """Draw by u (R,): tokens and their log-probabilities as columns (R, 2) in float64."""
    return torch.stack([found.double() for found in draw_by_chunks(logits, u)], 1)


def pad_output(
    weight: Tensor, bias: Tensor, num: int, never: tuple[int, ...] = ()
) -> tuple[Tensor, Tensor]:
    """Weight and bias of an output layer for the first `num` ids, padded to a multiple of `ALIGN`.

    The columns that are added have probability 0, and so have the ids in `never`.
    """
    extra = -num % ALIGN
    bias = F.pad(bias[:num], (0, extra), value=-torch.inf).clone()  # never the layer's own
    bias[list(never)] = NEVER
    return F.pad(weight[:num], (0, 0, 0, extra)), bias


# Left-to-right models: a static cache, and one captured pass per token


draw_uncompiled: Callable[[Tensor, Tensor], Tensor]
draw_uncompiled = torch.compiler.disable(draw_columns)  # type: ignore[no-untyped-call]
"""Beside a pass of one token draws cost little, and inductor fails at long sums in float64."""


class StaticDecoder:
    """Draws sequences of one length in batches of one size, as `sampling.autoregressive` does.

    Every pass has one shape, attends to the whole cache behind a mask and draws its tokens, so that
    it is one CUDA graph.
    """

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
            bias = model.output_layer.linear.bias
            self._output = pad_output(weight, bias, config.num_tokens, config.never_drawn)
        tokens = torch.full((batch,), config.vocab_size - 1, device=weight.device)
        numbers = torch.zeros(batch, dtype=torch.float64, device=weight.device)
        self._begin = tokens.clone()
        position = self._columns[:1].clone()
        self._step = capture(self._next, (tokens, numbers, position))

    @torch.no_grad()
    def decode(self, u: Tensor, eot_id: int | None = None) -> tuple[Tensor, Tensor]:
        """Tokens and log-probabilities drawn by u (B, length): (B, L) each, B at most the batch.

        L is the length, or less where all texts have drawn `eot_id` before. What a text has drawn
        after it counts for nothing.
        """
        texts, u = len(u), grown(u, self.batch)
        tokens, drawn = self._begin, []
        over = torch.zeros_like(tokens, dtype=torch.bool)
        for column in range(self.length):
            # A copy: the next pass writes its result to the same place.
            position = self._columns[column : column + 1]
            drawn.append(self._step(tokens, u[:, column], position).clone())
            tokens = drawn[-1][:, 0].long()
            if eot_id is not None:
                over |= tokens == eot_id
                if column % LOOKS == LOOKS - 1 and bool(over.all()):
                    break
        token, log_p = torch.stack(drawn, 1)[:texts].unbind(2)
        return token.long(), log_p

    def _next(self, tokens: Tensor, u: Tensor, position: Tensor) -> Tensor:
        """Tokens after those (B,) at `position` (1,), and log-probabilities: (B, 2) in float64."""
        return draw_uncompiled(self._logits(tokens, position), u)

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
            x = block(x, cos, sin, mask=seen, extend=partial(self._extend, layer, position))
        weight, bias = self._output
        x = model.output_layer.norm_final(x[:, 0]).to(weight.dtype)
        return F.linear(x, weight, bias)

    def _extend(self, layer: int, position: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self._cache[layer]
        keys.index_copy_(2, position, k)
        values.index_copy_(2, position, v)
        return keys, values


class Decoders:
    """Decoders of a model, each made when it is asked for; dropped when weights have changed."""

    def __init__(self, model: ARModel) -> None:
        self.model = model
        self._made: dict[tuple[int, int], StaticDecoder] = {}
        self._stamp: WeightsStamp | None = None

    def find(self, batch: int, length: int) -> StaticDecoder:
        """A decoder for so many texts, or up to twice as many, of one length."""
        # Graphs read weights and tables where they lie; of the output layer they have a copy.
        model, layer = self.model, self.model.output_layer.linear
        embedding, tables = model.vocab_embed.embedding, model.rotary_emb
        stamp = WeightsStamp([embedding, *layer.parameters(), tables.cos, tables.sin])
        if stamp != self._stamp:
            self._made.clear()
            self._stamp = stamp
        there = [b for b, size in self._made if size == length and batch <= b <= 2 * batch]
        key = min(there, default=batch), length
        return keep_few(self._made, key, partial(StaticDecoder, model, *key), MOST_DECODERS)
