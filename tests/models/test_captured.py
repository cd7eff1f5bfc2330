"""A captured graph owns what it replays, whatever others do in the same process."""

import contextlib
import gc
import sys
import types
import weakref

import pytest
import torch

from didi_instruct.models import graphs
from didi_instruct.models.graphs import Captured, capture, loaded_code


@pytest.fixture
def gpu(monkeypatch):
    """Torch with a GPU that only writes down what it is told, in order."""
    told = []

    @contextlib.contextmanager
    def recording(graph, *, pool, stream, capture_error_mode):
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
    def fail(x):
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        Captured(fail, (torch.ones(2),))
    assert gpu == ["clear", "begin", "clear"]


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


class OnGPU:
    """An input to pretend with."""

    is_cuda = True

    def clone(self):
        return self


def test_a_function_of_compiled_parts_is_not_compiled_as_a_whole(monkeypatch):
    """And where its parts cannot be compiled it is captured as it is."""
    made = []
    monkeypatch.setattr(graphs, "_warm_up", lambda function, inputs: function(*inputs))
    monkeypatch.setattr(graphs, "compiled", None)
    monkeypatch.setattr(graphs, "Captured", lambda f, *a: made.append(f) or types.SimpleNamespace())

    def plain(x):
        return x

    def faster(x):
        return x

    assert capture(plain, (OnGPU(),), faster=lambda: faster).is_compiled
    assert not capture(plain, (OnGPU(),), faster=lambda: 1 / 0).is_compiled
    assert made == [faster, plain]


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
