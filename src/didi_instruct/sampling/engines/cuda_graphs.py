"""Functions captured as CUDA graphs: one launch for all their kernels.

A graph runs at one shape, on buffers of its own; its result is to be used before the next run.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from didi_instruct.errors import first_line
from didi_instruct.models.compile import compiled, warn_once

WARM_UP = 3
"""Passes before a capture: the first ones compile and choose kernels, which a capture must not."""


@functools.cache
def side_stream(device: torch.device) -> Any:
    """CUDA stream of warm-ups and captures: one, since cuBLAS keeps memory for each."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _warm_up(function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> None:
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

    Torch keeps such memory for each stream, outside of any pool, and frees it at every capture of
    `reduce-overhead`, and in newer versions when a graph of the stream is deleted (pytorch issue
    193402). A graph that has recorded its address would then write to memory of others.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


def loaded_code() -> tuple[Any, ...]:
    """Modules that inductor has loaded; kernels are unloaded with the last reference to them."""
    codecache = sys.modules.get("torch._inductor.codecache")
    return tuple(getattr(getattr(codecache, "PyCodeCache", None), "modules", ()))


class Captured:
    """A warm function as one CUDA graph; inputs may have fewer rows than the graph's buffers.

    It owns all that it replays but the tensors that the function closes over: buffers, result,
    working memory (the graph's pool), the kernels' code. So it survives whatever others do with
    compiled code and caches of memory.
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
        """Memory to share with graphs that only run while no result of this one is needed."""

    def __call__(self, *values: Tensor) -> Tensor:
        """Run; the next call overwrites the result."""
        for buffer, value in zip(self.buffers, values, strict=True):
            buffer[: len(value)].copy_(value, non_blocking=True)  # from the CPU, too
        self.graph.replay()
        return self.output[: len(values[0])]


def capture(
    function: Callable[..., Tensor],
    inputs: tuple[Tensor, ...],
    pool: Any = None,
    *,
    dynamic: bool = False,
) -> Callable[..., Tensor]:
    """Return a function at the shapes of these inputs, as fast as this machine runs it.

    Compiled and captured, or captured alone, or as it is: on a CPU, and where torch cannot, of
    which the user is told once. Gradients are off. `dynamic`: code is compiled once for any number
    of rows.
    """
    if not inputs[0].is_cuda:
        return function
    # Warm passes read what the graph will: an input laid out otherwise would compile anew in it.
    with torch.inference_mode(False):  # else nobody outside of that mode could write to them
        buffers = tuple(tensor.clone() for tensor in inputs)
    if dynamic:
        for tensor in buffers:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
    for name in ("compiled", "captured"):
        begun = False
        try:
            with torch.no_grad():
                attempt = compiled(function, dynamic=False) if name == "compiled" else function
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


def grown(tensor: Tensor, rows: int) -> Tensor:
    """Repeat the first row of a tensor until it has so many rows."""
    return torch.cat([tensor, tensor[:1].expand(rows - len(tensor), *tensor.shape[1:])])


def round_up(rows: int, parts: int = 2) -> int:
    """Round up to one of `parts` sizes per power of 2: 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, ...."""
    step = max(1, (1 << (rows - 1).bit_length()) // (2 * parts))
    return -(-rows // step) * step
