"""One text at a time, each step a single CUDA graph.

A pass of one text takes less than a millisecond, so whatever is launched around it counts. Here a
graph goes from the text to the text: trunk, states of the positions that the step writes, their
tokens, and these to where the next step reads them. What is particular to a step is a slice of one
table, which another graph makes from the seed. The noise, and so the tokens, are those of a chain
of steps.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from didi_instruct.models.compiling import compiled
from didi_instruct.models.graphs import LOGITS_AT_ONCE, Captured, GraphedDiT, capture, round_up
from didi_instruct.sampling.chain import NOISE_ELEMENTS, PAD, Chain, Denoiser, Purpose, Samples
from didi_instruct.sampling.noise import seed_key, uniforms
from didi_instruct.sampling.reveals import Reveals

MOST_KEPT = 8
"""Lengths, numbers of positions and numbers of steps for which graphs are kept, each."""
SMALLEST = 8
"""Positions that a graph draws at least."""


def walk(denoiser: Denoiser, chain: Chain, reveals: Reveals) -> Samples | None:
    """Take all steps of one text; None: it is not one, or not to be drawn as it is, or watched.

    Waits for the GPU twice: for the number of positions of each step, and for the result.
    """
    graphs = getattr(denoiser, "graphs", None)
    if not isinstance(graphs, GraphedDiT) or graphs.draw is None or not _suits(chain):
        return None
    if not graphs.is_folded():
        return None
    one = _kept(graphs.kept, chain.z.shape[1], partial(Walk, chain.z.shape[1], chain.z.device))
    if one.fails:
        return None
    one.tokens[:-1].copy_(chain.z[0])
    one.costs.zero_()
    counts, table = one.settle(chain, reveals)
    padded, first, *counts = counts
    if padded or max(counts) * graphs.network.config.num_tokens > LOGITS_AT_ONCE:
        return None
    for count in counts:
        if count:
            one.step(graphs, table, first, count)
            chain.passes += 1
            first += count
    chain.z = one.tokens[None, :-1].clone()
    chain.log_prob += one.costs[None, :-1].sum(1)
    return chain.samples(nfe=chain.steps)


def _suits(chain: Chain) -> bool:
    """Whether it is one text, drawn as it is, unwatched, with all noise made at once."""
    one = len(chain.z) == chain.canvas.masks == 1 and chain.settings.as_it_is
    return one and chain.callback is None and 2 * chain.z.numel() * chain.steps <= NOISE_ELEMENTS


class Walk:
    """Where texts of one length are written, and the graphs that do it."""

    def __init__(self, length: int, device: torch.device) -> None:
        self.length = length
        with torch.inference_mode(False):  # written later by who may not be in that mode
            self.tokens = torch.zeros(length + 1, dtype=torch.long, device=device)
            """The text; the last place takes what counts for nothing."""
            self.costs = torch.zeros(length + 1, dtype=torch.float64, device=device)
            """Log-probabilities of its tokens, likewise."""
        self._steps: dict[int, Callable[..., Tensor]] = {}
        """By the number of positions that are drawn."""
        self._settling: dict[tuple[int, ...], Callable[..., Tensor]] = {}
        self._pool: Any = None
        self.fails = False
        """Whether a step could not be captured: others do better then."""

    def settle(self, chain: Chain, reveals: Reveals) -> tuple[list[int], Tensor]:
        """What each step writes: numbers, and the positions in order, as a table (3, 2 L).

        The numbers tell whether there is padding, then how many positions no step writes, then
        those of each step. The table's rows are the positions step by step, what their tokens are
        drawn by (the bits of float64), and their step + 2. After them is 0, so that slices may be
        longer than what a step writes.
        """
        steps, masked = chain.steps, chain.masked[0]
        if reveals.turns is not None:
            numbers = chain.ahead(Purpose.TOKEN, 0)[:, 0]
            turns = reveals.turns[0].masked_fill(~masked, -1)
            settled = self._arranged(turns, numbers)
        else:
            chances = torch.tensor(reveals.chances, dtype=torch.float64).view(torch.int64)
            key = torch.tensor([seed_key(chain.settings.seed)])
            given = masked, chain.canvas.samples, torch.cat([key, chances])
            settled = self._by_chance(given, chain.canvas.stream)
        size = steps + 2
        counts: list[int] = settled[0, :size].tolist()
        return counts, settled[0, size:].view(3, -1)

    def _by_chance(self, given: tuple[Tensor, Tensor, Tensor], stream: tuple[int, ...]) -> Tensor:
        """`_thrown` by a graph that is kept; the last of the inputs comes from the CPU."""

        def make() -> Callable[..., Tensor]:
            function = partial(self._thrown, stream)
            inputs = tuple(tensor.to(self.tokens.device) for tensor in given)
            return capture(function, inputs, faster=lambda: function)  # small, so not compiled

        made: Tensor = _kept(self._settling, (len(given[2]), *stream), make)(*given)
        return made

    def _thrown(
        self, stream: tuple[int, ...], masked: Tensor, samples: Tensor, setting: Tensor
    ) -> Tensor:
        """`_arranged` by coins. `setting` holds the seed's key and the chances' bits.

        A position's step is the first of which its coin falls below the chance.
        """
        chances, device = setting[1:].view(torch.float64), setting.device
        purposes = torch.arange(Purpose.REVEAL, Purpose.TOKEN + 1, device=device)
        steps = torch.arange(len(chances), device=device)
        streams: tuple[int | Tensor, ...] = stream
        streams = (*streams, purposes[:, None, None], steps[:, None])
        coins, numbers = uniforms(setting[:1], samples, streams, self.length)[:, :, 0].unbind()
        falls = coins < chances[:, None]
        turns = falls.byte().argmax(0).masked_fill(~(masked & falls.any(0)), -1)
        return self._arranged(turns, numbers)

    def _arranged(self, turns: Tensor, numbers: Tensor) -> Tensor:
        """`settle`'s numbers and table as one row, from steps (L,) and noise (steps, L)."""
        own = numbers.gather(0, turns.clamp(min=0)[None])[0].view(torch.int64)
        counts = turns.new_zeros(len(numbers) + 1)
        counts.scatter_add_(0, turns + 1, torch.ones_like(turns))
        padded = (self.tokens[:-1] == PAD).any()[None]
        ranked, order = torch.sort(turns, stable=True)
        table = F.pad(torch.stack([order, own[order], ranked + 2]), (0, self.length))
        return torch.cat([padded, counts, table.flatten()])[None]

    def step(self, graphs: GraphedDiT, table: Tensor, first: int, count: int) -> None:
        """Write `count` positions, which stand in the table from `first` on."""
        there = [size for size in self._steps if count <= size <= 2 * count]
        usual = max(SMALLEST, round_up(count, 1))
        size = min(there, default=min(usual, self.length))
        run = _kept(self._steps, size, partial(self._make_step, graphs, size))
        run(table[:, first : first + size])

    def _make_step(self, graphs: GraphedDiT, size: int) -> Callable[..., Tensor]:
        blank = self.tokens.new_zeros(3, size)  # of no step: warm passes write nothing
        plain = partial(self._step, graphs.begin, graphs.end)

        def faster() -> Callable[..., Tensor]:
            begin, end = (compiled(each, dynamic=False) for each in (graphs.begin, graphs.end))
            return partial(self._step, begin, partial(_of_any_size, end))

        made = capture(plain, (blank,), self._pool, faster=faster)
        self._pool = made.pool if isinstance(made, Captured) else None
        self.fails = blank.is_cuda and self._pool is None
        return made

    def _step(
        self, begin: Callable[..., Tensor], end: Callable[..., Tensor], rows: Tensor
    ) -> Tensor:
        """Run a pass; draw at positions as in `settle`'s table (3, S), write those of one step."""
        source, bits, turn = rows.unbind()
        target = source.masked_fill(turn != turn[:1].clamp(min=1), self.length)
        hidden = begin(self.tokens[:-1][None])[0][source]
        numbers = bits.view(torch.float64).clone()
        drawn = end(hidden, numbers)
        self.tokens.scatter_(0, target, drawn[:, 0].long())
        self.costs.scatter_(0, target, drawn[:, 1])
        return drawn


def _of_any_size(function: Callable[..., Tensor], *values: Tensor) -> Tensor:
    """Run a compiled function, of which there is one code for all numbers of rows."""
    for value in values:
        torch._dynamo.maybe_mark_dynamic(value, 0)
    return function(*values)


def _kept(there: dict[Any, Any], key: object, make: Callable[[], Any]) -> Any:
    """What is there by a key, or made; what was not used for longest goes first."""
    if key not in there:
        if len(there) >= MOST_KEPT:
            del there[next(iter(there))]
        there[key] = make()
    there[key] = there.pop(key)
    return there[key]
