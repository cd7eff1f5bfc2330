"""Functions captured as CUDA graphs: one launch for all their kernels.

A graph runs at one shape, on buffers of its own; its result is to be used before the next run.
"""

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from didi_instruct.errors import first_line
from didi_instruct.models.compile import compiled, warn_once

K = TypeVar("K")
V = TypeVar("V")
WARM_UP = 3
"""Passes before a capture: the first ones compile and choose kernels, which no graph may hold."""


@functools.cache
def side_stream(device: torch.device) -> Any:
    """CUDA stream of warm-ups and captures: one, since cuBLAS keeps memory for each."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


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
            warn_once(f"A pass cannot be {name} here, so it runs slower: {first_line(error)}")
            pool = None if begun else pool  # a capture that broke off may still hold it
    return function


def keep_few(there: dict[K, V], key: K, make: Callable[[], V], most: int) -> V:
    """What is there by a key, or made; of more than `most`, what was not used for longest goes."""
    if key not in there:
        if len(there) >= most:
            del there[next(iter(there))]
        there[key] = make()
    there[key] = there.pop(key)
    return there[key]


def grown(tensor: Tensor, rows: int) -> Tensor:
    """The tensor with its first row repeated until there are so many rows."""
    return torch.cat([tensor, tensor[:1].expand(rows - len(tensor), *tensor.shape[1:])])


def round_up(rows: int, parts: int = 2) -> int:
    """The next of few sizes, none much too large: 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, ....

    There are so many sizes from each power of 2 to the next.
    """
    step = max(1, (1 << (rows - 1).bit_length()) // (2 * parts))
    return -(-rows // step) * step
