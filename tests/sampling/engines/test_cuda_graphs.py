"""A captured graph owns what it replays; where torch cannot compile or capture, plain code runs.

A GPU that only writes down what it is told stands in for a real one.
"""

import contextlib
import gc
import sys
import types
import weakref

import pytest
import torch

from didi_instruct.models import compile as remarks
from didi_instruct.sampling.engines import cuda_graphs as graphs
from didi_instruct.sampling.engines.cuda_graphs import (
    Captured,
    capture,
    grown,
    loaded_code,
    round_up,
    side_stream,
)

from .small import uncompiled


@pytest.fixture
def gpu(monkeypatch):
    """Torch with a GPU that only writes down what it is told, in order."""
    told = []

    @contextlib.contextmanager
    def recording(graph, *, pool, stream, capture_error_mode):
        assert capture_error_mode == "thread_local"
        told.append("begin")
        yield
        told.append("end")

    class Graph:
        def pool(self):
            return "its own"

        def replay(self):
            told.append("replay")

    nothing = contextlib.nullcontext
    monkeypatch.setattr(torch.cuda, "device", lambda device: nothing())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nothing())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", recording)
    monkeypatch.setattr(graphs, "side_stream", lambda device: None)
    monkeypatch.setattr(
        torch._C, "_cuda_clearCublasWorkspaces", lambda: told.append("clear"), raising=False
    )
    return told


def test_working_memory_is_taken_inside_of_the_capture(gpu):
    """None is there when it begins, and none of its own is left to others when it ends."""
    graph = Captured(lambda x: gpu.append("run") or 2 * x, (torch.ones(2),))
    assert gpu == ["clear", "begin", "run", "end", "clear"]
    graph(torch.ones(1))
    assert gpu[-1] == "replay"


def test_a_capture_that_fails_leaves_no_working_memory_behind(gpu):
    with pytest.raises(RuntimeError, match="There is no compiler"):
        Captured(refuse, (torch.ones(2),))
    assert gpu == ["clear", "begin", "clear"]


def test_values_of_fewer_rows_are_copied_to_the_buffers(gpu):
    """The result has as many rows."""
    graph = Captured(double, (torch.zeros(3), torch.zeros(3)))
    found = graph(torch.ones(2), torch.full((2,), 5.0))
    assert [buffer.tolist() for buffer in graph.buffers] == [[1, 1, 0], [5, 5, 0]]
    assert len(found) == 2
    with pytest.raises(ValueError, match="shorter"):
        graph(torch.ones(2))


def test_code_lives_as_long_as_a_graph_that_runs_it(gpu, monkeypatch):
    """Although inductor has forgotten it."""
    code = types.ModuleType("generated")
    there = weakref.ref(code)
    cache = types.SimpleNamespace(PyCodeCache=types.SimpleNamespace(modules=[code]))
    monkeypatch.setitem(sys.modules, "torch._inductor.codecache", cache)
    graph = Captured(lambda x: x, (torch.ones(2),))
    cache.PyCodeCache.modules.clear()
    del code
    gc.collect()
    assert there() is not None
    del graph
    gc.collect()
    assert there() is None


def test_code_is_found_where_inductor_keeps_it(monkeypatch):
    from torch._inductor.codecache import PyCodeCache

    code = types.ModuleType("generated")
    monkeypatch.setattr(PyCodeCache, "modules", [code])
    assert loaded_code() == (code,)
    monkeypatch.delitem(sys.modules, "torch._inductor.codecache")
    assert loaded_code() == ()


# What `capture` makes of a function


def double(x, *others):
    return 2 * x


def refuse(*arguments, **settings):
    raise RuntimeError("There is no compiler.\nInstall one.")


class OnGPU:
    """An input to pretend with."""

    is_cuda = True

    def clone(self):
        return self

    def __rmul__(self, factor):
        return self


@pytest.fixture
def warm(monkeypatch):
    """A machine whose passes are warm after one."""
    monkeypatch.setattr(graphs, "_warm_up", lambda function, inputs: function(*inputs))
    remarks.warn_once.cache_clear()


def said(caplog):
    return [record.getMessage() for record in caplog.records]


def test_on_a_cpu_nothing_is_captured():
    assert capture(double, (torch.ones(2),)) is double


def test_a_capture_marks_the_sizes_that_change(warm, monkeypatch):
    monkeypatch.setattr(graphs, "compiled", uncompiled)
    marked = []
    monkeypatch.setattr(graphs, "Captured", lambda *a: types.SimpleNamespace())
    monkeypatch.setattr(
        torch._dynamo, "maybe_mark_dynamic", lambda tensor, dim: marked.append((tensor, dim))
    )
    first, second = OnGPU(), OnGPU()
    assert capture(double, (first, second)).is_compiled
    assert marked == []
    assert capture(double, (first, second), dynamic=True).is_compiled
    assert marked == [(first, 0), (second, 0)]


@pytest.mark.parametrize("when", ["asked", "first pass", "capture"])
def test_what_cannot_be_compiled_is_captured_as_it_is(when, warm, monkeypatch, caplog):
    """Whenever torch refuses; a pool that a broken capture may hold is left alone."""
    tried = []

    def slow(x):
        return x

    def captured(function, inputs, pool):
        tried.append((function, pool))
        return types.SimpleNamespace(function=function) if function is double else refuse()

    result = refuse if when == "first pass" else slow
    compiling = refuse if when == "asked" else lambda function, dynamic: result
    monkeypatch.setattr(graphs, "compiled", compiling)
    monkeypatch.setattr(graphs, "Captured", captured)
    for _ in range(2):
        found = capture(double, (OnGPU(),), "shared")
        assert found.function is double
        assert not found.is_compiled
    late = [(slow, "shared"), (double, None)]
    assert tried == 2 * (late if when == "capture" else [(double, "shared")])
    reason = "There is no compiler"
    assert said(caplog) == [f"A pass cannot be compiled here, so it runs slower: {reason}"]


def test_what_cannot_be_captured_runs_as_it_is(warm, monkeypatch, caplog):
    monkeypatch.setattr(graphs, "compiled", uncompiled)
    monkeypatch.setattr(graphs, "Captured", refuse)
    assert capture(double, (OnGPU(),)) is double
    assert [text[:25] for text in said(caplog)] == [
        "A pass cannot be compiled", "A pass cannot be captured",
    ]  # fmt: skip


def test_a_lack_of_memory_is_no_reason_to_go_on_plainly(warm, monkeypatch):
    def full(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(graphs, "compiled", uncompiled)
    monkeypatch.setattr(graphs, "Captured", full)
    with pytest.raises(torch.OutOfMemoryError):
        capture(double, (OnGPU(),))


def test_sizes_are_few_and_close():
    sizes = [round_up(rows) for rows in range(1, 300)]
    assert sorted(set(sizes)) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384]
    assert all(rows <= size < 1.5 * rows or size == rows for rows, size in enumerate(sizes, 1))
    assert grown(torch.tensor([3, 5]), 4).tolist() == [3, 5, 3, 3]


# On a GPU


@pytest.mark.gpu
def test_captures_warm_up_on_one_stream():
    """For each device: a stream of its own would keep a workspace of its own."""
    device = torch.device("cuda", torch.cuda.current_device())
    assert side_stream(device) is side_stream(device)
    x = torch.ones(2, device=device)
    first, second = (capture(double, (x,)) for _ in range(2))
    assert torch.equal(first(x), second(x))


@pytest.mark.gpu
@torch.no_grad()
def test_a_graph_survives_what_others_do():
    """Compiled code forgotten, caches emptied, their memory written to by another's graphs."""
    torch.manual_seed(0)
    layers = torch.nn.Sequential(
        torch.nn.Linear(768, 3072), torch.nn.GELU(approximate="tanh"), torch.nn.Linear(3072, 768)
    ).to("cuda", torch.bfloat16)  # fmt: skip
    x = torch.randn(4, 768, device="cuda", dtype=torch.bfloat16)
    ours = capture(lambda x: layers(x).float().softmax(-1), (x,))
    assert isinstance(ours, Captured)
    expected = ours(x).clone()

    other = torch.compile(torch.nn.Linear(768, 768).to("cuda", x.dtype), mode="reduce-overhead")
    for _ in range(4):
        other(x).clone()
    torch._dynamo.reset()
    del other
    torch._C._cuda_clearCublasWorkspaces()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    filled = [torch.full((2**20,), 7, device="cuda") for _ in range(16)]
    for _ in range(3):
        assert torch.equal(ours(x), expected)
    torch.cuda.synchronize()
    assert all(bool((tensor == 7).all()) for tensor in filled)
