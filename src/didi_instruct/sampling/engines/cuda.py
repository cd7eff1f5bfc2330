"""Denoiser of a DiT on a GPU: passes and draws compiled and captured as CUDA graphs.

A pass is one launch, at one shape: batches are rounded up to few sizes. No number changes but by
rounding: every row is computed from itself alone, whatever stands beside it.
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from didi_instruct.models.ar import ARModel
from didi_instruct.models.compile import fusing
from didi_instruct.models.dit import DiT
from didi_instruct.models.layers import ALIGN, NEVER
from didi_instruct.models.network import Modulations, logits_at
from didi_instruct.process.schedule import Schedule
from didi_instruct.sampling.denoiser import times_of
from didi_instruct.sampling.draw import DrawOptions, draw_by_chunks, draw_tokens
from didi_instruct.sampling.engines.cuda_graphs import (
    Captured,
    capture,
    grown,
    keep_few,
    round_up,
)
from didi_instruct.sampling.plan import Step
from didi_instruct.sampling.state import Reads

MOST_GRAPHS = 48
"""Shapes that are kept: about as many as a sweep over budgets brings. Graphs share what they work
with; each keeps its inputs and its result, (B, L, d) at most."""
LOGITS_AT_ONCE = 1 << 26
"""Entries of the logits that tokens are drawn from at a time."""
ROWS_AT_ONCE = 4096
"""Rows of logits of a part."""


def why_not(network: nn.Module) -> str | None:
    """Reason why a network's passes cannot be captured; None: they can."""
    if not isinstance(network, (DiT, ARModel)):
        return "only networks of the DiT family, and ours from left to right, are compiled"
    if network.vocab_embed.embedding.device.type != "cuda":
        return "CUDA graphs need a GPU, and the model is on the CPU"
    return None


class GraphDenoiser:
    """A DiT by CUDA graphs: one for the trunk, one from the states of positions to their tokens.

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
            end_id = network.config.end_id
            self._output = pad_output(linear.weight, linear.bias, self.num_tokens, end_id)
        self._trunks: dict[tuple[int, int], Callable[..., Tensor]] = {}
        """By texts and their length."""
        self._draws: dict[int, Callable[..., Tensor]] = {}
        """By tokens drawn."""
        self._pool: object = None

    def logits(self, reads: Reads, t: Tensor | float, at: Tensor) -> Tensor:
        """Logits (R, V) at flat positions (R,)."""
        return torch.cat(list(self.logits_in_parts(reads, t, at)))[:, : self.num_tokens]

    @torch.no_grad()
    def logits_in_parts(self, reads: Reads, t: Tensor | float, at: Tensor) -> Iterator[Tensor]:
        """Logits (R, W), W a multiple of `ALIGN`, some rows at a time."""
        if reads.attended is not None:
            yield self._with_padding(reads, t, at)
            return
        hidden, mods = self._states(reads.tokens, self._modulations(reads, t), at)
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
        for start in range(0, len(own), most):
            part = slice(start, start + most)
            values: tuple[Tensor, ...] = (hidden[part], u[part])
            if self._constants is None:
                values = (*values, mods.c.expand(len(own), -1)[part])
            found = self._drawn(values, most)
            # A copy if there is a next part, which is written to the same place.
            drawn.append(found.clone() if len(own) > most else found)
        token, log_p = (torch.cat(drawn) if len(drawn) > 1 else drawn[0]).unbind(1)
        return token.long(), log_p

    def _with_padding(self, reads: Reads, t: Tensor | float, at: Tensor) -> Tensor:
        """Logits of texts with padding, without graphs."""
        mods = self._modulations(reads, t)
        found = logits_at(self.network, reads.tokens, None, at, reads.attended, mods=mods)
        return found[:, : self.num_tokens]

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
        return hidden.flatten(0, 1)[at], mods.of_rows(at // length)

    def _trunk(self, tokens: Tensor, c: Tensor | None = None) -> Tensor:
        mods = self._constants if c is None else Modulations(c)
        return self.network.trunk(self.network.embed(tokens), mods)

    def _drawn(self, values: tuple[Tensor, ...], most: int) -> Tensor:
        """Tokens and log-probabilities by a graph of the next size, at most `most`."""
        rows = len(values[0])
        there = [size for size in self._draws if rows <= size <= 2 * rows]
        size = min(there, default=min(round_up(rows, 8), most))

        def make() -> Callable[..., Tensor]:
            inputs = tuple(grown(v, size) for v in values)
            graph = capture(self._draw, inputs, self._pool, dynamic=[0] * len(inputs))
            if not isinstance(graph, Captured) or graph.pool != self._pool:
                self._pool = None  # a capture that broke off may still hold it
            return graph

        return keep_few(self._draws, size, make, MOST_GRAPHS)(*values)

    def _draw(self, hidden: Tensor, u: Tensor, c: Tensor | None = None) -> Tensor:
        """Tokens and log-probabilities as columns (R, 2) in float64."""
        mods = self._constants if c is None else Modulations(c)
        assert mods is not None
        token, log_p = draw_by_chunks(self._head(hidden, mods)[:, : self.num_tokens], u)
        return torch.stack([token.double(), log_p.double()], 1)

    def _head(self, hidden: Tensor, mods: Modulations) -> Tensor:
        """Logits (R, W) of states (R, d), by the padded output layer."""
        normed = self.network.output_layer.normed(hidden, *mods.of_layer(-1))
        return F.linear(normed, *self._output)


def pad_output(
    weight: Tensor, bias: Tensor, num: int, never: int | None = None
) -> tuple[Tensor, Tensor]:
    """Weight and bias of an output layer for the first `num` ids, in a width that GPUs like.

    The columns that are added have probability 0, and so has the id `never`.
    """
    extra = -num % ALIGN
    bias = F.pad(bias[:num], (0, extra), value=-torch.inf).clone()  # never the layer's own
    if never is not None:
        bias[never] = NEVER
    return F.pad(weight[:num], (0, 0, 0, extra)), bias
