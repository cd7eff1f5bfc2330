"""Passes at the floor of the hardware: compiled, captured as CUDA graphs, replayed.

A graph is one launch for a whole pass, at one shape, on buffers of its own. So batches are rounded
up to few sizes, and what a pass gives is to be used before the next one. No number changes but by
rounding: every row is computed from itself alone, whatever stands beside it.
"""

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from didi_instruct.errors import first_line
from didi_instruct.models.ar import ARModel
from didi_instruct.models.compile import compiled, say_once
from didi_instruct.models.dit import DiT
from didi_instruct.models.halves import begin, finish
from didi_instruct.models.layers import ALIGN, NEVER, versions
from didi_instruct.models.streams import side_stream

K = TypeVar("K")
V = TypeVar("V")
Drawer = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
WARM_UP = 3
"""Passes before a capture: the first ones compile and choose kernels, which no graph may hold."""
MOST_GRAPHS = 48
"""Shapes that are kept: about as many as a sweep over budgets brings. Graphs share what they work
with; each keeps its inputs and its result, (B, L, d) at most."""
LOGITS_AT_ONCE = 1 << 26
"""Entries of the logits that tokens are drawn from at a time."""


class Chosen(NamedTuple):
    """Positions whose states are wanted, text by text."""

    positions: Tensor
    """(B, W) in each text, in any order; what is left over may be any of its positions."""
    spots: Tensor
    """(R,) where those that count stand in (B * W)."""


def why_not(network: nn.Module) -> str | None:
    """Why a network's passes cannot be captured; None: they can."""
    if not isinstance(network, (DiT, ARModel)):
        return "only networks of the DiT family, and ours from left to right, are compiled"
    if network.vocab_embed.embedding.device.type != "cuda":
        return "CUDA graphs need a GPU, and the model is on the CPU"
    return None


def _warm_up(function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> None:
    """Let a function compile and choose its kernels."""
    with torch.cuda.device(inputs[0].device):
        stream = side_stream(inputs[0].device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                function(*inputs)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()


@contextmanager
def own_workspaces() -> Iterator[None]:
    """Let a capture take the working memory of cuBLAS from the pool of its graph.

    Torch keeps such memory for each stream, outside of any pool, and a graph remembers where it
    lay. Whoever clears it, as `reduce-overhead` does at every capture, and newer versions of torch
    where a graph of the same stream is deleted (pytorch issue 193402), would leave graphs behind
    that write to memory of others, or to none.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


def loaded_code() -> tuple[Any, ...]:
    """What inductor has loaded so far; kernels are unloaded with the last reference to it."""
    codecache = sys.modules.get("torch._inductor.codecache")
    return tuple(getattr(getattr(codecache, "PyCodeCache", None), "modules", ()))


class Captured:
    """A warm function as one CUDA graph; inputs may have fewer rows than the graph's buffers.

    It owns what it replays but the tensors that the function closes over: buffers, result, memory
    between them (the graph's pool), the kernels' code. So nothing that others do with compiled
    code or caches of memory reaches it.
    """

    is_compiled = False

    def __init__(
        self, function: Callable[..., Tensor], buffers: tuple[Tensor, ...], pool: Any = None
    ) -> None:
        self.buffers = buffers
        with torch.cuda.device(buffers[0].device):
            self.graph = torch.cuda.CUDAGraph()
            side = side_stream(buffers[0].device)
            recording = torch.cuda.graph(
                self.graph, pool=pool, stream=side, capture_error_mode="thread_local"
            )
            # Whatever fails, the stream is the old one again; to compile would spoil the capture.
            with (
                own_workspaces(),
                torch.cuda.stream(torch.cuda.current_stream()),
                torch.compiler.set_stance("fail_on_recompile"),
                recording,
            ):
                self.output = function(*buffers)
        self.code = loaded_code()
        self.pool = self.graph.pool()
        """Memory that other graphs may share, if none runs while the result of another counts."""

    def __call__(self, *values: Tensor) -> Tensor:
        """Run, without values on what is in the buffers; the next call overwrites the result."""
        for buffer, value in zip(self.buffers, values, strict=bool(values)):
            buffer[: len(value)].copy_(value, non_blocking=True)  # from the CPU, too
        self.graph.replay()
        return self.output[: len(values[0])] if values else self.output


def capture(
    function: Callable[..., Tensor],
    inputs: tuple[Tensor, ...],
    pool: Any = None,
    *,
    dynamic: Sequence[int | None] = (),
    faster: Callable[[], Callable[..., Tensor]] | None = None,
) -> Callable[..., Tensor]:
    """Return a function at the shapes of these inputs, as fast as this machine runs it.

    Compiled and captured, or captured alone, or as it is: on a CPU, and where torch cannot, which
    is said once. Gradients are off. `dynamic` names a dimension of each input, or none, for all
    sizes of which code is compiled once. `faster` makes the function of compiled parts, where it
    is not to be compiled as a whole.
    """
    if not inputs[0].is_cuda:
        return function
    # Warm passes read what the graph will: an input laid out otherwise would compile anew in it.
    with torch.inference_mode(False):  # written later by who may not be in that mode
        buffers = tuple(tensor.clone() for tensor in inputs)
    for tensor, dim in zip(buffers, dynamic or [None] * len(buffers), strict=True):
        if dim is not None:
            torch._dynamo.maybe_mark_dynamic(tensor, dim)
    faster = faster or functools.partial(compiled, function, dynamic=False)
    for name in ("compiled", "captured"):
        begun = False
        try:
            with torch.no_grad():
                attempt = faster() if name == "compiled" else function
                _warm_up(attempt, buffers)
                begun = True
                graph = Captured(attempt, buffers, pool)
                graph.is_compiled = name == "compiled"
                return graph
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever the compiler, the driver or its libraries raise
            say_once(f"A pass cannot be {name} here, so it runs slower: {first_line(error)}")
            pool = None if begun else pool  # a capture that broke off may still hold it
    return function


class GraphedDiT:
    """A denoiser whose trunk is replayed; its output layer sees the chosen positions alone.

    So does the MLP of the last block, and, where they are told text by text (`Chosen`), its
    attention. Modulations are folded where they are constant. With `draw` (logits (R, V), numbers
    (R,)) -> tokens (R,), log-probabilities (R,), a second graph goes on from the states of chosen
    positions to their tokens.
    """

    def __init__(self, network: DiT, draw: Drawer | None = None) -> None:
        self.network, self.draw = network, draw
        self._graphs: dict[tuple[int, int, int], Callable[..., Tensor]] = {}
        """By texts, their length, and how many positions of each are chosen; 0: all."""
        self._ends: dict[int, Callable[..., Tensor]] = {}
        self._pool: Any = None
        self._narrows = True
        """Until that cannot be compiled: a whole last block costs less than the compiler saves."""
        self._folded: Tensor | None = None
        self._weights_at = 0
        self._rotary: Tensor | None = None
        self._output: tuple[Tensor, Tensor] | None = None
        self._output_state: tuple[int, tuple[int, ...]] = (0, ())
        self.kept: dict[Any, Any] = {}
        """What others capture of this network: goes when the graphs do."""

    @torch.no_grad()
    def logits(self, tokens: Tensor, sigma: Tensor, where: Tensor) -> Tensor:
        """Logits (R, V) of the selected positions: tokens (B, L), sigma (B,), where (B, L)."""
        return self.logits_at(tokens, sigma, where.flatten().nonzero().squeeze(1))

    @torch.no_grad()
    def logits_at(self, tokens: Tensor, sigma: Tensor | None, place: Tensor) -> Tensor:
        """The same of positions by their numbers (R,) in (B * L): no wait for the GPU.

        sigma is not needed without time conditioning.
        """
        hidden, c = self.states_at(tokens, sigma, place)
        return self._logits(hidden, c)

    @torch.no_grad()
    def drawn_at(
        self,
        tokens: Tensor,
        sigma: Tensor | None,
        place: Tensor,
        numbers: Tensor,
        chosen: Chosen | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Tokens (R,) and their log-probabilities (R,) at positions by their numbers in (B * L).

        `numbers` (R,) are what they are drawn by, `chosen` the same positions text by text. The
        next call overwrites the log-probabilities.
        """
        hidden, c = self.states_at(tokens, sigma, place, chosen)
        most = max(1, LOGITS_AT_ONCE // self.network.config.num_tokens)
        drawn = []
        for start in range(0, len(place), most):
            part = slice(start, start + most)
            values: tuple[Tensor, ...] = (hidden[part], numbers[part])
            if c is not self.network.folded_condition:
                values = (*values, c.expand(len(hidden), -1)[part])
            own = self._end_at(values, most)
            # A copy if there is a next part, which is written to the same place.
            drawn.append(own.clone() if len(place) > most else own)
        token, log_p = (torch.cat(drawn) if len(drawn) > 1 else drawn[0]).unbind(1)
        return token.long(), log_p

    @torch.no_grad()
    def states_at(
        self, tokens: Tensor, sigma: Tensor | None, place: Tensor, chosen: Chosen | None = None
    ) -> tuple[Tensor, Tensor]:
        """States (R, d) before the last MLP, and their condition: (R, c) or (1, c) for all."""
        c = self.network.condition(sigma)
        self._forget_if_changed()
        if chosen is None or not self._narrows:
            hidden = self._read(tokens, c).flatten(0, 1)[place]
        else:
            hidden = self._read(tokens, c, chosen.positions).flatten(0, 1)[chosen.spots]
        return hidden, c[place // tokens.shape[1]] if len(c) > 1 else c

    def _logits(self, hidden: Tensor, c: Tensor) -> Tensor:
        """Logits (R, V) of states (R, d)."""
        return self.wide_logits(hidden, c)[:, : self.network.config.num_tokens]

    @torch.no_grad()
    def wide_logits(self, hidden: Tensor, c: Tensor) -> Tensor:
        """Logits (R, W), W a multiple of `ALIGN`, by an output layer that is cut and padded once.

        What is beyond the real tokens has probability 0.
        """
        network = self.network
        assert self._output is not None
        layer, hidden = network.output_layer, finish(network, hidden, c)
        own = layer.folded if c is network.folded_condition else None
        affine = layer.affine(c, hidden.ndim) if own is None else own.unbind()
        x = layer.norm_final(hidden, *affine).to(layer.linear.weight.dtype)
        return F.linear(x, *self._output)

    def _end_at(self, values: tuple[Tensor, ...], most: int) -> Tensor:
        """`end` by a graph of the next size, of which there is none above `most`."""
        rows = len(values[0])
        there = [s for s in self._ends if rows <= s <= 2 * rows]
        size = min(there, default=min(round_up(rows, 8), most))

        def make() -> Callable[..., Tensor]:
            inputs = tuple(grown(v, size) for v in values)
            graph = capture(self.end, inputs, self._pool, dynamic=[0] * len(inputs))
            if not isinstance(graph, Captured) or graph.pool != self._pool:
                self._pool = None  # a capture that broke off may still hold it
            return graph

        return keep_few(self._ends, size, make, MOST_GRAPHS)(*values)

    def end(self, hidden: Tensor, numbers: Tensor, c: Tensor | None = None) -> Tensor:
        """Draw: tokens and log-probabilities as columns (R, 2) in float64."""
        c = self.network.folded_condition if c is None else c
        assert c is not None
        assert self.draw is not None
        token, log_p = self.draw(self._logits(hidden, c), numbers)
        return torch.stack([token.double(), log_p.double()], 1)

    def _read(self, tokens: Tensor, c: Tensor, positions: Tensor | None = None) -> Tensor:
        """State (B, L, d), or that at some positions (B, W), before the last MLP, by a graph."""
        (rows, length), width = tokens.shape, 0 if positions is None else positions.shape[1]
        key = self._size(rows, length, width), length, width
        values = (tokens,) if positions is None else (tokens, positions)
        if c is not self.network.folded_condition:
            values = (*values, c)

        def make() -> Callable[..., Tensor]:
            inputs = tuple(grown(v, key[0]) if len(v) == rows else v for v in values)
            if positions is None:
                graph = capture(self.begin, inputs, self._pool)
            else:  # what is compiled for one number of positions serves all numbers
                dynamic = [None, 1, None][: len(inputs)]
                graph = capture(self.begin_at, inputs, self._pool, dynamic=dynamic)
                self._narrows = not tokens.is_cuda or getattr(graph, "is_compiled", False)
            self._pool = graph.pool if isinstance(graph, Captured) else None
            return graph

        return keep_few(self._graphs, key, make, MOST_GRAPHS)(*values)

    def begin(self, tokens: Tensor, c: Tensor | None = None) -> Tensor:
        """State (B, L, d) before the last MLP; without c as folded."""
        return begin(self.network, tokens, c)

    def begin_at(self, tokens: Tensor, positions: Tensor, c: Tensor | None = None) -> Tensor:
        """The same at some positions (B, W): (B, W, d)."""
        return begin(self.network, tokens, c, positions)

    def is_folded(self) -> bool:
        """Whether passes need no condition; drops what is no longer valid."""
        c = self.network.condition() if not self.network.config.time_conditioning else None
        self._forget_if_changed()
        return c is not None and c is self.network.folded_condition

    def _size(self, rows: int, length: int, width: int = 0) -> int:
        """Rows of the graph to use: one that is there and not much too large, or a new one."""
        there = [s for s, *rest in self._graphs if rest == [length, width]]
        return min((s for s in there if rows <= s <= 2 * rows), default=round_up(rows))

    def _forget_if_changed(self) -> None:
        """Drop graphs that hold other modulations, or what lay somewhere else.

        Weights are elsewhere after a move, the tables of the positions also after a loading. The
        output layer is a copy, so it is made again after any change.
        """
        network, weights_at = self.network, self.network.vocab_embed.embedding.data_ptr()
        config, layer = network.config, network.output_layer.linear
        state = (layer.weight.data_ptr(), versions(layer.parameters()))
        if self._output is None or state != self._output_state:
            self._ends.clear()
            self.kept.clear()
            self._output = pad_output(layer.weight, layer.bias, config.num_tokens, config.end_id)
            self._output_state = state
        if (
            network.folded_condition is not self._folded
            or network.rotary_emb.cos is not self._rotary
            or weights_at != self._weights_at
        ):
            self._graphs.clear()
            self._ends.clear()
            self.kept.clear()
            self._folded, self._rotary = network.folded_condition, network.rotary_emb.cos
            self._weights_at, self._pool = weights_at, None


def keep_few(there: dict[K, V], key: K, make: Callable[[], V], most: int) -> V:
    """What is there by a key, or made; of more than `most`, what was not used for longest goes."""
    if key not in there:
        if len(there) >= most:
            del there[next(iter(there))]
        there[key] = make()
    there[key] = there.pop(key)
    return there[key]


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


def grown(tensor: Tensor, rows: int) -> Tensor:
    """The tensor with its first row repeated until there are so many rows."""
    return torch.cat([tensor, tensor[:1].expand(rows - len(tensor), *tensor.shape[1:])])


def round_up(rows: int, parts: int = 2) -> int:
    """The next of few sizes, none much too large: 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, ....

    There are so many sizes from each power of 2 to the next.
    """
    step = max(1, (1 << (rows - 1).bit_length()) // (2 * parts))
    return -(-rows // step) * step
