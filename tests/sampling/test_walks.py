"""One text, whose steps are two graphs each, is the text of a chain of steps."""

import gc
import warnings
import weakref

import pytest
import torch
from didi_instruct.models.graphs import Captured, GraphedDiT
from didi_instruct.sampling.chain import Canvas, Draw
from didi_instruct.sampling.chunks import draw_by_chunks
from didi_instruct.sampling.network import NetworkDenoiser
from tests.devices import DEVICES
from torch.utils._python_dispatch import TorchDispatchMode

from didi_instruct.config.model import ModelConfig, ScheduleConfig
from didi_instruct.models.dit import DiT
from didi_instruct.process.schedule import make_schedule
from didi_instruct.sampling import ancestral as sampler
from didi_instruct.sampling import walks
from didi_instruct.sampling.ancestral import ancestral

from ..models.buffered import Buffered  # noqa: TID252

devices = pytest.mark.parametrize("device", DEVICES)
MASK = 99


def make(device="cpu", **changes):
    """Plain and fast denoisers of weights that matter, in float64."""
    settings = {"layers": 2, "hidden": 16, "heads": 2, "cond_dim": 8, "vocab_size": MASK + 1}
    config = ModelConfig(**(settings | {"length": 40} | changes), schedule=ScheduleConfig(eps=1e-3))
    torch.manual_seed(1)
    network = DiT(config)
    for name, parameter in network.named_parameters():
        torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.3)
    network = network.double().to(device).eval()
    schedule = make_schedule(config.schedule)
    fast = NetworkDenoiser(network, schedule, GraphedDiT(network, draw_by_chunks))
    return NetworkDenoiser(network, schedule), fast, schedule


@pytest.fixture
def walked(monkeypatch):
    """How often a text was written by whole steps; on a CPU by stand-ins for graphs."""
    counted, walk = [], walks.walk

    def watched(*arguments):
        done = walk(*arguments)
        counted.append(done is not None)
        return done

    monkeypatch.setattr(sampler, "walk", watched)
    monkeypatch.setattr(walks, "compiled", lambda function, dynamic=None: function)
    if not torch.cuda.is_available():
        monkeypatch.setattr(walks, "capture", Buffered)
    return counted


def same(found, expected):
    assert torch.equal(found.tokens, expected.tokens)
    torch.testing.assert_close(found.log_prob, expected.log_prob)
    assert (found.nfe, found.passes) == (expected.nfe, expected.passes)


@devices
@pytest.mark.parametrize(
    "options",
    [{"steps": 1}, {"steps": 7}, {"steps": 90}, {"steps": 9, "grid": "cosine"},
     {"steps": 6, "order": "streams"}],
)  # fmt: skip
def test_tokens_and_paths_are_those_of_a_chain(options, device, walked):
    """In float64; texts one after the other, given tokens, other samples, a text in parts."""
    plain, fast, schedule = make(device)
    blank = torch.full((1, 40), MASK)
    given, short = blank.clone(), blank[:, :11]
    given[0, 5:30] = 7
    allowed = torch.arange(40) < 25
    starts = [(blank, 0, (), None), (given, 4, (), None), (short, 1, (), None)]
    starts += [(blank, 2, (6, 1), None), (given, 3, (), allowed), (blank, 0, (), None)]
    for seed, (tokens, sample, stream, allowed) in enumerate(starts):
        canvas = Canvas(
            tokens.to(device), MASK, torch.tensor([sample], device=device), stream=stream,
            allowed=None if allowed is None else allowed.to(device),
        )  # fmt: skip
        run = {"canvas": canvas, "settings": Draw(seed=seed), **options}
        same(ancestral(fast, schedule, **run), ancestral(plain, schedule, **run))
    assert walked.count(True) == len(starts)
    assert set(fast.graphs.kept) == {40, 11}
    if device == "cuda":
        one = fast.graphs.kept[40]
        graphs = [one.read, *one._writing.values(), *one._settling.values()]
        assert all(isinstance(graph, Captured) for graph in graphs)


@devices
def test_the_next_text_leaves_the_last_one_alone(device, walked):
    plain, fast, schedule = make(device)
    canvas = Canvas.blank(1, 40, MASK, device=device)
    runs = [{"canvas": canvas, "steps": 5, "settings": Draw(seed=seed)} for seed in range(3)]
    found = [ancestral(fast, schedule, **run) for run in runs]
    for one, run in zip(found, runs, strict=True):
        same(one, ancestral(plain, schedule, **run))
    assert torch.equal(canvas.tokens, torch.full_like(canvas.tokens, MASK))


@pytest.mark.parametrize("case", ["two", "warmer", "greedy", "watched", "padded", "timed", "large"])
def test_what_is_not_one_plain_text_takes_the_other_way(case, walked, monkeypatch):
    """And is drawn as it was."""
    plain, fast, schedule = make(time_conditioning=case == "timed")
    canvas = Canvas.blank(2 if case == "two" else 1, 40, MASK)
    run = {"steps": 4}
    if case == "warmer":
        run["settings"] = Draw(temperature=0.8)
    elif case == "greedy":
        run["greedy_tail"] = True
    elif case == "watched":
        run["callback"] = lambda step: None
    elif case == "padded":
        canvas.tokens[0, 30:] = -1
    elif case == "large":
        monkeypatch.setattr(walks, "LOGITS_AT_ONCE", 8 * MASK)
    found = ancestral(fast, schedule, canvas, **run)
    expected = ancestral(plain, schedule, canvas, **run)
    assert torch.equal(found.tokens, expected.tokens)
    torch.testing.assert_close(found.log_prob, expected.log_prob)
    assert not any(walked)


@devices
@torch.no_grad()
def test_weights_that_change_are_noticed(device, walked):
    plain, fast, schedule = make(device)
    network = plain.network
    run = {"canvas": Canvas.blank(1, 40, MASK, device=device), "steps": 4}
    changes = [
        lambda: network.output_layer.linear.weight.mul_(-1),
        lambda: network.blocks[0].adaLN_modulation.bias.add_(0.5),
        lambda: network.load_state_dict({k: -1.1 * v for k, v in network.state_dict().items()}
                                        | {"rotary_emb.inv_freq": network.rotary_emb.inv_freq}),
    ]  # fmt: skip
    before = ancestral(fast, schedule, **run).tokens
    for change in changes:
        change()
        plain = NetworkDenoiser(network, schedule)
        fast = NetworkDenoiser(network, schedule, fast.graphs)
        found = ancestral(fast, schedule, **run)
        same(found, ancestral(plain, schedule, **run))
        assert not torch.equal(found.tokens, before)
        before = found.tokens


def test_graphs_are_few(walked):
    """Steps of nearby sizes share one; of many sizes and lengths the oldest go."""
    _, fast, schedule = make(length=80)
    for seed in range(6):
        ancestral(fast, schedule, Canvas.blank(1, 80, MASK), steps=5, settings=Draw(seed=seed))
    one = fast.graphs.kept[80]
    assert len(one._writing) <= 4
    assert all(size <= 80 for size in one._writing)
    assert len(one._settling) == 1
    for length in range(1, 13):
        ancestral(fast, schedule, Canvas.blank(1, length, MASK), steps=2)
    assert len(fast.graphs.kept) == walks.MOST_KEPT
    assert 80 not in fast.graphs.kept


@torch.no_grad()
def test_parts_are_compiled_once_for_all_sizes(monkeypatch):
    """By dynamo itself, with a backend that runs the graph as it is; the tokens are the same."""
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    torch._dynamo.reset()
    monkeypatch.setattr(
        walks, "compiled", lambda f, dynamic: torch.compile(f, backend=counter, dynamic=dynamic)
    )
    monkeypatch.setattr(
        walks, "capture", lambda f, inputs, pool=None, faster=None: Buffered(faster(), inputs)
    )
    plain, fast, schedule = make()
    for seed, steps in enumerate((9, 1, 2)):
        run = {"canvas": Canvas.blank(1, 40, MASK), "steps": steps, "settings": Draw(seed=seed)}
        same(ancestral(fast, schedule, **run), ancestral(plain, schedule, **run))
    assert len(fast.graphs.kept[40]._writing) > 2
    assert counter.frame_count == 2


class Counting(TorchDispatchMode):
    """Counts operations that are no views."""

    views = ("view", "slice", "select", "unsqueeze", "unbind", "expand", "detach")

    def __init__(self):
        super().__init__()
        self.names, self.inside = [], False

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        name = operation.__name__.split(".")[0]
        if not self.inside and name not in self.views:
            self.names.append(name)
        return operation(*arguments, **(options or {}))


def test_a_step_is_one_copy_and_two_graphs(monkeypatch):
    """Counted around the graphs: whatever the steps, only these copies grow."""
    counting = Counting()

    class Graph(Buffered):
        def __call__(self, *values):
            for buffer, value in zip(self.buffers, values, strict=bool(values)):
                buffer[: len(value)].copy_(value)
            counting.inside = True
            super().__call__()
            counting.inside = False
            return self.output

    monkeypatch.setattr(walks, "capture", Graph)
    _, fast, schedule = make()
    canvas = Canvas.blank(1, 40, MASK)
    around = {}
    for steps in (2, 4):
        run = {"steps": steps, "settings": Draw(seed=3)}
        passes = ancestral(fast, schedule, canvas, **run).passes
        assert passes == steps
        counting.names.clear()
        with counting:
            ancestral(fast, schedule, canvas, **run)
        around[steps] = list(counting.names)
    assert len(around[4]) == len(around[2]) + 2
    assert around[4].count("copy_") == around[2].count("copy_") + 2
    assert len(around[2]) < 40
    waits = ("nonzero", "_local_scalar_dense", "item", "masked_select")
    assert sum(name in waits for name in around[4]) == 1  # the result is checked


@pytest.mark.gpu
def test_the_gpu_is_waited_for_twice():
    """For the number of positions of each step, and for the result; compiled as for real."""
    _, fast, schedule = make("cuda")
    run = {"canvas": Canvas.blank(1, 40, MASK, device="cuda"), "steps": 6}
    expected = ancestral(fast, schedule, **run)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            found = ancestral(fast, schedule, **run)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [str(w.message) for w in heard if "called a synchronizing" in str(w.message)]
    assert len(waits) <= 2, waits
    assert torch.equal(found.tokens, expected.tokens)


def test_nothing_goes_round_in_a_circle(monkeypatch):
    """Who drops a model gets its memory back at once, not when garbage is next collected."""

    class Forgetful(Buffered):
        """Owns what it replays, but not what was captured, as graphs do."""

        def __call__(self, *values):
            self.function = None

    monkeypatch.setattr(walks, "capture", Forgetful)
    _, fast, _ = make()
    graphs, fast.graphs = fast.graphs, None
    graphs.kept[40] = one = walks.Walk(graphs, 40, torch.device("cpu"))
    one.read()
    one.write(graphs, torch.zeros(3, 80, dtype=torch.long), 5)
    there = weakref.ref(graphs)
    del fast
    gc.disable()
    try:
        del graphs
        assert there() is None
    finally:
        gc.enable()


def test_few_graphs_serve_all_numbers_of_positions(walked, monkeypatch):
    """Of texts whose steps write more and more; what was used last is kept."""
    made = []
    monkeypatch.setattr(walks, "capture", lambda *given, **how: made.append(1) or Buffered(*given))
    _, fast, schedule = make(length=400)
    for first in range(10):
        canvas = Canvas.blank(1, 400, MASK, first=first)
        ancestral(fast, schedule, canvas, steps=24, grid="cosine")
    assert all(walked)
    assert len(made) <= 8, "8, 12, 16, 24, 32, 48 positions, passes and plans"


def test_a_text_in_inference_mode_can_be_followed_by_one_that_is_not(walked):
    plain, fast, schedule = make()
    canvas = Canvas.blank(1, 40, MASK)
    with torch.inference_mode():
        ancestral(fast, schedule, canvas, steps=5)
    same(ancestral(fast, schedule, canvas, steps=5), ancestral(plain, schedule, canvas, steps=5))
    assert walked == [True, True, False]


def test_steps_that_cannot_be_captured_are_left_to_others(walked):
    plain, fast, schedule = make()
    canvas = Canvas.blank(1, 40, MASK)
    ancestral(fast, schedule, canvas, steps=5)
    (one,) = fast.graphs.kept.values()
    one.fails = True
    same(ancestral(fast, schedule, canvas, steps=5), ancestral(plain, schedule, canvas, steps=5))
    assert walked[:2] == [True, False]
