"""One text at a time, each step two CUDA graphs.

A pass of one text takes less than a millisecond, so whatever is launched around it counts. Here
one graph reads the text, and another goes on from there: tokens of the positions that the step
writes, put where the next step reads them. What is particular to a step is a slice of one table,
which a third graph makes from the seed while the first pass runs. The noise, and so the tokens,
are those of a chain of steps.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from didi_instruct.models.compile import compiled
from didi_instruct.models.graphs import (
    LOGITS_AT_ONCE,
    Captured,
    GraphedDiT,
    capture,
    keep_few,
    round_up,
)
from didi_instruct.models.streams import beside
from didi_instruct.sampling.chain import NOISE_ELEMENTS, PAD, Chain, Denoiser, Purpose, Samples
from didi_instruct.sampling.noise import seed_key, uniforms
from didi_instruct.sampling.reveals import Reveals

MOST_KEPT = 8
"""Lengths, numbers of positions and numbers of steps for which graphs are kept, each."""
SMALLEST = 8
"""Positions that a graph draws at least."""


def walk(denoiser: Denoiser, chain: Chain, reveals: Reveals) -> Samples | None:
    """Take all steps of one text; None: it is not one, or not to be drawn as it is, or watched.

    Waits for the GPU twice: for the number of positions of each step, which is known before the
    first pass has run, and for the result.
    """
    graphs = getattr(denoiser, "graphs", None)
    if not isinstance(graphs, GraphedDiT) or graphs.draw is None or not _suits(chain):
        return None
    if not graphs.is_folded():
        return None
    length, device = chain.z.shape[1], chain.z.device
    one = keep_few(graphs.kept, length, partial(Walk, graphs, length, device), MOST_KEPT)
    if one.fails:
        return None
    torch.clamp(chain.z[0], min=0, out=one.tokens[:-1])  # padding has no embedding
    one.costs.zero_()
    with beside(one.read, device):
        counts, table = one.settle(chain, reveals)
    padded, first, *counts = counts
    if padded or max(counts) * graphs.network.config.num_tokens > LOGITS_AT_ONCE:
        return None
    for n, count in enumerate(filter(None, counts)):
        if n:
            one.read()
        one.write(graphs, table[:, first:], count)
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

    def __init__(self, graphs: GraphedDiT, length: int, device: torch.device) -> None:
        with torch.inference_mode(False):  # written later by who may not be in that mode
            self.costs = torch.zeros(length + 1, dtype=torch.float64, device=device)
            """Log-probabilities of the text's tokens; the last place counts for nothing."""
        blank = torch.zeros(1, length + 1, dtype=torch.long, device=device)
        self.read: Any = capture(
            partial(_read, graphs.begin),
            (blank,),
            faster=lambda: partial(_read, compiled(graphs.begin, dynamic=False)),
        )
        """Runs a pass on the text."""
        self.fails = not hasattr(self.read, "buffers")
        """Whether something could not be captured: others do better then."""
        self.tokens: Tensor = getattr(self.read, "buffers", (blank,))[0][0]
        """The text; the last place takes what counts for nothing."""
        self._writing: dict[int, Callable[..., Tensor]] = {}
        """By the number of positions that are drawn."""
        self._settling: dict[tuple[int, int], Callable[..., Tensor]] = {}

    def settle(self, chain: Chain, reveals: Reveals) -> tuple[list[int], Tensor]:
        """What each step writes: numbers, and the positions in order, as a table (3, 2 L).

        The numbers tell whether there is padding, then how many positions no step writes, then
        those of each step. The table's rows are the positions step by step, what their tokens are
        drawn by (the bits of float64), and their step + 2. After them is 0, so that slices may be
        longer than what a step writes.
        """
        z = chain.z[0]
        if reveals.turns is not None:
            numbers = chain.ahead(Purpose.TOKEN, 0)[:, 0]
            settled = _arranged(z, reveals.turns[0].masked_fill(~chain.masked[0], -1), numbers)
        else:
            chances = torch.tensor(reveals.chances, dtype=torch.float64)
            stream = [seed_key(chain.settings.seed), chain.canvas.mask_id, *chain.canvas.stream]
            given = z, chain.open[0], chain.canvas.samples, torch.tensor(stream), chances
            make = partial(_make_settling, *given)
            key = len(stream), chain.steps
            settled = keep_few(self._settling, key, make, MOST_KEPT)(*given)
        size = chain.steps + 2
        counts: list[int] = settled[0, :size].tolist()
        return counts, settled[0, size:].view(3, -1)

    def write(self, graphs: GraphedDiT, table: Tensor, count: int) -> None:
        """After a pass, write `count` positions, the first ones of the table."""
        there = [size for size in self._writing if count <= size <= 2 * count]
        usual = max(SMALLEST, round_up(count))
        size = min(there, default=min(usual, len(self.tokens) - 1))
        make = partial(self._make_writing, graphs, size)
        run = keep_few(self._writing, size, make, MOST_KEPT)
        run(table[:, :size])

    def _make_writing(self, graphs: GraphedDiT, size: int) -> Callable[..., Tensor]:
        blank = self.tokens.new_zeros(3, size)  # of no step: warm passes write nothing
        given = self.read.output, self.tokens, self.costs
        made = capture(
            partial(_write, graphs.end, *given),
            (blank,),
            getattr(self.read, "pool", None),
            faster=lambda: partial(
                _of_any_size, compiled(_write, dynamic=False), graphs.end, *given
            ),
        )
        self.fails |= blank.is_cuda and not isinstance(made, Captured)
        return made


def _read(begin: Callable[..., Tensor], tokens: Tensor) -> Tensor:
    """States (1, L, d) of a text whose last place counts for nothing."""
    return begin(tokens[0, :-1][None])  # laid out as a text of its own: compiled once for both


def _write(
    end: Callable[..., Tensor], states: Tensor, tokens: Tensor, costs: Tensor, rows: Tensor
) -> Tensor:
    """Draw at positions as in `settle`'s table (3, S), write those of its first step."""
    source, bits, turn = rows.unbind()
    drawn = end(states[0][source], bits.view(torch.float64))
    target = source.masked_fill(turn != turn[:1].clamp(min=1), states.shape[1])
    tokens[target] = drawn[:, 0].long()
    costs[target] = drawn[:, 1]
    return drawn


def _of_any_size(function: Callable[..., Tensor], *values: Any) -> Tensor:
    """Run compiled `_write`, of which there is one code for all texts and numbers of positions."""
    _, states, tokens, costs, rows = values
    for tensor, dim in ((states, 1), (tokens, 0), (costs, 0), (rows, 1)):
        torch._dynamo.maybe_mark_dynamic(tensor, dim)
    return function(*values)


def _make_settling(z: Tensor, *given: Tensor) -> Callable[..., Tensor]:
    """`_thrown` as a graph, not compiled: inductor would let products of indices overflow."""
    inputs = z, *(tensor.to(z.device) for tensor in given)
    return capture(_thrown, inputs, faster=lambda: _thrown)


def _thrown(z: Tensor, opened: Tensor, samples: Tensor, stream: Tensor, chances: Tensor) -> Tensor:
    """`_arranged` by coins: a position's step is the first whose chance its coin falls below.

    `stream` holds the seed's key, the mask's id and the first numbers of the random streams. The
    last of the chances is 1.
    """
    key, mask_id, *before = stream[:, None].unbind()
    purposes = torch.arange(Purpose.REVEAL, Purpose.TOKEN + 1, device=z.device)
    steps = torch.arange(len(chances), device=z.device)
    streams = (*before, purposes[:, None, None], steps[:, None])
    coins, numbers = uniforms(key, samples, streams, len(z))[:, :, 0].unbind()
    turns = torch.where(coins < chances[:, None], steps[:, None], len(steps)).amin(0)
    return _arranged(z, turns.masked_fill(~(opened & (z == mask_id)), -1), numbers)


def _arranged(z: Tensor, turns: Tensor, numbers: Tensor) -> Tensor:
    """`settle`'s numbers and table as one row, from a text, steps (L,) and noise (steps, L)."""
    own = numbers.gather(0, turns.clamp(min=0)[None])[0].view(torch.int64)
    each = torch.arange(-1, len(numbers), device=z.device)
    counts = (turns == each[:, None]).sum(1)
    padded = (z == PAD).any()[None]
    ranked, order = torch.sort(turns, stable=True)
    table = F.pad(torch.stack([order, own[order], ranked + 2]), (0, len(z)))
    return torch.cat([padded, counts, table.flatten()])[None]
