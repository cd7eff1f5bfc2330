"""Captured passes give what plain ones give. Without a GPU all but the capture itself is tested."""

import gc
import warnings
import weakref

import pytest
import torch
from tests.devices import DEVICES
from tests.pretend_gpu import pretended
from torch.utils._python_dispatch import TorchDispatchMode

from didi_instruct.model import Model
from didi_instruct.models import compile as remarks
from didi_instruct.models.discriminator import Discriminator
from didi_instruct.sampling.ancestral import ancestral
from didi_instruct.sampling.denoiser import CachedDenoiser, network_denoiser
from didi_instruct.sampling.draw import PLAIN, draw_by_chunks
from didi_instruct.sampling.engines import cuda, cuda_graphs
from didi_instruct.sampling.engines.cuda import GraphDenoiser, pad_output, why_not
from didi_instruct.sampling.engines.cuda_graphs import Captured
from didi_instruct.sampling.guide import DiscriminatorGuide, Guidance
from didi_instruct.sampling.guided import rgas
from didi_instruct.sampling.state import Canvas

from ..toys import blank, start  # noqa: TID252
from .small import KINDS, SCHEDULE, Buffered, make, questions, step_of, uncompiled

devices = pytest.mark.parametrize("device", DEVICES)
"""On a CPU the same code runs uncompiled."""


@pytest.fixture
def buffered(monkeypatch):
    """Stand-ins for graphs; what was asked of each."""
    asked = []

    def capture(function, inputs, pool=None, dynamic=False):
        asked.append((function.__name__, dynamic))
        return Buffered(function, inputs, pool, dynamic)

    monkeypatch.setattr(cuda, "capture", capture)
    return asked


def both(device="cpu", **changes):
    """Plain and fast denoisers of one network."""
    network = make(device, **changes)
    return network_denoiser(network, SCHEDULE), GraphDenoiser(network, SCHEDULE)


def same(found, expected):
    assert torch.equal(found.tokens, expected.tokens)
    torch.testing.assert_close(found.log_prob, expected.log_prob)
    assert (found.nfe, found.passes) == (expected.nfe, expected.passes)


# Logits and draws of a pass


@devices
@pytest.mark.parametrize("kind", list(KINDS))
def test_logits_are_those_of_plain_passes(kind, device, monkeypatch):
    """In float64; batches share graphs: buffers keep old rows, results are overwritten."""
    if device == "cpu":
        monkeypatch.setattr(cuda, "capture", Buffered)
    if kind not in ("plain", "timed"):
        monkeypatch.setattr(cuda_graphs, "compiled", uncompiled)
    monkeypatch.setattr(cuda, "ROWS_AT_ONCE", 7)
    plain, fast = both(device, **KINDS[kind])
    found, expected = [], []
    for seed, (rows, length) in enumerate([(5, 16), (1, 16), (4, 16), (5, 9), (7, 16), (6, 16)]):
        given = questions(fast.network, rows, length, seed)[:3]
        found.append(fast.logits(*given))
        expected.append(plain.logits(*given))
        assert expected[-1].std() > 0.1
    torch.testing.assert_close(found, expected)
    assert sorted(fast._trunks) == [(1, 16), (6, 9), (6, 16), (8, 16)]


@pytest.mark.parametrize("kind", list(KINDS))
def test_tokens_are_drawn_from_the_logits_part_by_part(kind, buffered, monkeypatch):
    """At most 12 rows at a time, in buffers that the next part overwrites."""
    plain, fast = both(**KINDS[kind])
    monkeypatch.setattr(cuda, "LOGITS_AT_ONCE", 12 * fast.num_tokens)
    for seed, rows in enumerate((9, 1, 2, 7)):
        reads, t, at, u = questions(fast.network, rows, seed=seed)
        row = torch.arange(len(at)).flip(0) if rows == 2 else None
        expected = draw_by_chunks(plain.logits(reads, t, at), u, row=row)
        token, log_p = fast.draw(reads, step_of(t, at, u, row), PLAIN)
        assert torch.equal(token, expected[0])
        torch.testing.assert_close(log_p, expected[1])
    assert max(fast._draws) == 12
    assert len(fast._draws) <= 5


@devices
@torch.no_grad()
def test_weights_that_change_are_noticed(device, monkeypatch):
    """In place, by loading, and by a move; the padded output layer and the modulations too."""
    monkeypatch.setattr(cuda_graphs, "compiled", uncompiled)
    network = make(device)
    cached = CachedDenoiser(network, SCHEDULE)
    assert not isinstance(cached.current(), GraphDenoiser)
    cached.accelerate()
    reads, t, at, u = questions(network, 4)
    before = cached.current().logits(reads, t, at)
    assert cached.current() is cached.current()
    changes = [
        lambda: network.output_layer.linear.weight.mul_(2),
        lambda: network.output_layer.linear.bias.add_(1),
        lambda: network.blocks[0].adaLN_modulation.bias.add_(0.5),
        lambda: network.blocks[1].attn_qkv.weight.mul_(1.5),
        lambda: network.load_state_dict({k: 1.1 * v for k, v in network.state_dict().items()}
                                        | {"rotary_emb.inv_freq": network.rotary_emb.inv_freq}),
        lambda: network.float(),
        lambda: network.rotary_emb._fill(network.rotary_emb.inv_freq / 2),
    ]  # fmt: skip
    for change in changes:
        change()
        fast = cached.current()
        assert isinstance(fast, GraphDenoiser)
        expected = network_denoiser(network, SCHEDULE).logits(reads, t, at)
        found = fast.logits(reads, t, at)
        torch.testing.assert_close(found, expected)
        drawn = fast.draw(reads, step_of(t, at, u), PLAIN)
        for one, other in zip(drawn, draw_by_chunks(expected, u), strict=True):
            torch.testing.assert_close(one, other)
        assert not torch.allclose(found.double(), before.double())
        before = found


# Which graphs there are


def test_a_graph_that_exists_serves_smaller_batches(buffered):
    """Up to half its size."""
    _, fast = both()
    used = []
    for rows, length in ((16, 8), (24, 8), (64, 9), (8, 8), (7, 8), (1, 8), (17, 8), (40, 8)):
        fast.logits(*questions(fast.network, rows, length)[:3])
        used.append(list(fast._trunks)[-1])
    assert used == [(16, 8), (24, 8), (64, 9), (16, 8), (8, 8), (1, 8), (24, 8), (48, 8)]


def test_only_so_many_graphs_are_kept(buffered, monkeypatch):
    """What was not used for longest goes first."""
    monkeypatch.setattr(cuda, "MOST_GRAPHS", 4)
    _, fast = both()
    for length in (1, 2, 3, 4, 5, 2):
        fast.logits(*questions(fast.network, 2, length)[:3])
    assert list(fast._trunks) == [(2, 3), (2, 4), (2, 5), (2, 2)]
    reads, t, _, _ = questions(fast.network, 15)
    for rows in (1, 15, 50, 1, 60, 30, 200, 49):
        at, u = torch.arange(rows), torch.full((rows,), 0.5, dtype=torch.float64)
        fast.draw(reads, step_of(t, at, u), PLAIN)
    assert list(fast._draws) == [8, 60, 208, 52]


@pytest.mark.parametrize("timed", [True, False])
def test_sizes_that_change_are_told_to_the_compiler(timed, buffered):
    """Numbers of tokens drawn; texts and their length are fixed."""
    _, fast = both(time_conditioning=timed)
    reads, *given = questions(fast.network, 4)
    fast.draw(reads, step_of(*given), PLAIN)
    assert buffered == [("_trunk", False), ("_draw", True)]
    (trunk,), (draw,) = fast._trunks.values(), fast._draws.values()
    assert len(trunk.buffers) == (2 if timed else 1)
    assert len(draw.buffers) == (3 if timed else 2)


def test_draws_are_compiled_once_for_all_sizes(monkeypatch):
    """By dynamo itself, with a backend that runs the graph as it is; the tokens are the same."""
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    torch._dynamo.reset()

    def capture(function, *given, **options):
        return Buffered(torch.compile(function, backend=counter, dynamic=False), *given, **options)

    monkeypatch.setattr(cuda, "capture", capture)
    plain, fast = both(length=40)
    for seed, steps in enumerate((9, 1, 2)):
        found, expected = (
            ancestral(denoiser, SCHEDULE, blank(1, 40, 69, seed=seed), steps=steps)
            for denoiser in (fast, plain)
        )
        same(found, expected)
    assert len(fast._draws) > 2
    assert counter.frame_count == 2


@pytest.mark.parametrize(("batch", "texts", "most"), [(1, 10, 8), (6, 2, 16)])
def test_few_graphs_serve_all_numbers_of_positions(batch, texts, most, buffered):
    """Of texts whose steps write more and more; what was used last is kept."""
    _, fast = both(length=400, hidden=8)
    for first in range(texts):
        canvas = Canvas.blank(batch, 400, 69, first=first * batch)
        ancestral(fast, SCHEDULE, start(canvas), steps=24, grid="cosine")
    assert len(buffered) <= most
    assert set(fast._trunks) == {(1, 400), (batch, 400)}


def test_graphs_share_the_memory_of_the_last_that_was_captured(monkeypatch):
    """And none where a capture failed: what it leaves behind would fail the next one too."""
    pools, failing = [], [False, False, True, False, False, False, True, False]

    class Pooled(Buffered):
        pool = "its own"

    def captured(function, inputs, pool=None, dynamic=False):
        pools.append(pool)
        return function if failing.pop(0) else Pooled(function, inputs)

    monkeypatch.setattr(cuda, "Captured", Pooled)
    monkeypatch.setattr(cuda, "capture", captured)
    _, fast = both()
    for length in range(1, 6):
        fast.logits(*questions(fast.network, 2, length)[:3])
    assert pools == [None, "its own", "its own", None, "its own"]
    pools.clear()
    reads, *given = questions(fast.network, 2, 6)
    fast.draw(reads, step_of(*given), PLAIN)
    fast.logits(*questions(fast.network, 2, 7)[:3])
    assert pools == ["its own", "its own", None]


def test_nothing_goes_round_in_a_circle(monkeypatch):
    """Who drops a model gets its memory back at once, not when garbage is next collected."""

    class Forgetful(Buffered):
        """Owns what it replays, but not what was captured, as graphs do."""

        def __init__(self, *given, **options):
            super().__init__(*given, **options)
            self.function = None

        def __call__(self, *values):
            return self.output[: len(values[0])]

    monkeypatch.setattr(cuda, "capture", Forgetful)
    _, fast = both()
    ancestral(fast, SCHEDULE, blank(2, 16, 69), steps=3)
    there = weakref.ref(fast)
    gc.disable()
    try:
        del fast
        assert there() is None
    finally:
        gc.enable()


def test_a_padded_output_layer_never_writes_the_padding():
    weight, bias = torch.randn(70, 4), torch.randn(70)
    wide, biases = pad_output(weight, bias, 69, never=(3,))
    assert wide.shape == (128, 4)
    p = torch.nn.functional.linear(torch.randn(5, 4), wide, biases).softmax(-1)
    assert not p[:, 69:].any()
    assert not p[:, 3].any()
    assert torch.equal(biases[:3], bias[:3])


# What is launched, and what the host waits for


class Counting(TorchDispatchMode):
    """Names of the operations outside of graphs that are no views."""

    views = ("view", "slice", "select", "unsqueeze", "unbind", "expand", "detach", "split")

    def __init__(self):
        super().__init__()
        self.names, self.inside = [], False

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        name = operation.__name__.split(".")[0]
        if not self.inside and name not in self.views:
            self.names.append(name)
        return operation(*arguments, **(options or {}))


@pytest.mark.parametrize("batch", [1, 16])
def test_a_step_is_two_graphs_and_seven_operations(batch, monkeypatch):
    """Counted around the graphs: whatever the steps, only these grow."""
    counting = Counting()

    class Graph(Buffered):
        def __call__(self, *values):
            for buffer, value in zip(self.buffers, values, strict=True):
                buffer[: len(value)].copy_(value)
            counting.inside = True
            self.output.copy_(self.function(*self.buffers))
            counting.inside = False
            return self.output[: len(values[0])]

    monkeypatch.setattr(cuda, "capture", Graph)
    _, fast = both(length=40)
    around = {}
    for steps in (2, 3, 5):
        canvas = Canvas.blank(batch, 40, 69)
        ancestral(fast, SCHEDULE, start(canvas), steps=steps)
        counting.names.clear()
        with counting:
            ancestral(fast, SCHEDULE, start(canvas), steps=steps)
        around[steps] = list(counting.names)
    # From 3 on: in the first step a blank batch is read as one text.
    more = sorted(around[5])
    for name in around[3]:
        more.remove(name)
    each = ["_to_copy", "copy_", "copy_", "copy_", "index", "scatter_", "scatter_"]
    assert more == sorted(2 * each)
    assert len(around[2]) <= 220
    waits = ("nonzero", "_local_scalar_dense", "item", "masked_select")
    assert sum(name in waits for name in around[5]) == 1  # the result is checked


@pytest.mark.parametrize("batch", [1, 8])
def test_no_step_waits_for_the_gpu(batch, monkeypatch, buffered):
    """On a GPU that is pretended: for the plan, and for the result, however many steps."""
    found = {}
    for steps in (4, 9):
        with pretended(monkeypatch) as gpu:
            _, fast = both("cuda", length=12)
            canvas = Canvas.blank(batch, 12, 69, device="cuda")
            ancestral(fast, SCHEDULE, start(canvas), steps=steps)
            gpu.waits.clear()
            ancestral(fast, SCHEDULE, start(canvas), steps=steps)
            assert gpu.mixed == []
            found[steps] = list(gpu.waits)
    assert len(found[4]) == len(found[9]) == 2, found


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 8])
def test_the_gpu_is_waited_for_twice(batch):
    """For the sizes of the plan, and for the result; compiled as for real."""
    _, fast = both("cuda", length=40)
    canvas = Canvas.blank(batch, 40, 69, device="cuda")
    expected = ancestral(fast, SCHEDULE, start(canvas), steps=6)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            found = ancestral(fast, SCHEDULE, start(canvas), steps=6)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [str(w.message) for w in heard if "called a synchronizing" in str(w.message)]
    assert len(waits) <= 2, waits
    assert torch.equal(found.tokens, expected.tokens)


# On a GPU, in bfloat16 as it runs for real


@pytest.mark.gpu
def test_graphs_are_replayed_and_few():
    """Captured for real; batches of nearby sizes share one, and nothing is captured twice."""
    network = make("cuda", torch.bfloat16)
    plain, fast = network_denoiser(network, SCHEDULE), GraphDenoiser(network, SCHEDULE)
    for _ in range(2):
        for rows in (1, 16, 12, 9, 16, 1):
            given = questions(network, rows)[:3]
            expected = plain.logits(*given).float()
            gap = (fast.logits(*given).float() - expected).abs().mean()
            assert gap < 0.05 * expected.std()
    assert sorted(fast._trunks) == [(1, 16), (16, 16)]
    assert all(isinstance(graph, Captured) for graph in fast._trunks.values())


@pytest.mark.gpu
def test_draws_in_bfloat16_are_compiled_and_captured():
    """Nothing had to be remarked."""
    network = make("cuda", torch.bfloat16)
    fast, before = GraphDenoiser(network, SCHEDULE), list(remarks.remarks)
    for rows in (16, 9, 1):
        reads, t, at, u = questions(network, rows)
        log_p = network_denoiser(network, SCHEDULE).logits(reads, t, at).double().log_softmax(-1)
        token, own = fast.draw(reads, step_of(t, at, u), PLAIN)
        expected = log_p.gather(1, token[:, None]).squeeze(1)
        assert (own - expected).abs().mean() < 0.05
    for graph in (*fast._trunks.values(), *fast._draws.values()):
        assert isinstance(graph, Captured)
        assert graph.is_compiled
    assert list(remarks.remarks) == before


@pytest.mark.gpu
def test_a_compiled_guide_guides_alike():
    """Tilting, which differentiates, and re-ranking; in float64 the same tokens."""
    plain, fast = both("cuda", length=12, vocab_size=300)
    critic = Discriminator.from_network(make("cuda", length=12, vocab_size=300)).double().eval()
    canvas = Canvas.blank(6, 12, 299, device="cuda")
    run = {"steps": 6, "guidance": Guidance(h_start=3.0, h_end=4.0)}
    expected = rgas(plain, SCHEDULE, DiscriminatorGuide(critic, SCHEDULE), start(canvas), **run)
    fast_guide = DiscriminatorGuide(critic, SCHEDULE, fast=True)
    found = rgas(fast, SCHEDULE, fast_guide, start(canvas), **run)
    assert torch.equal(found.tokens, expected.tokens)
    assert all(p.grad is None for p in critic.parameters())


# Models


def test_what_cannot_be_captured_is_told():
    assert "on the CPU" in why_not(make())
    assert "DiT family" in why_not(torch.nn.Linear(2, 2))


def test_a_model_on_a_cpu_says_that_it_stays_plain(caplog):
    remarks.warn_once.cache_clear()
    network = make(dtype=torch.float32)
    model = Model(network, network.config)
    assert not model.accelerate()
    assert not model.is_accelerated
    assert "on the CPU" in caplog.text
    assert model.sample(2, steps=2).shape == (2, 16)


@pytest.mark.gpu
def test_an_accelerated_model_draws_what_a_plain_one_draws():
    """Whatever the batch: float64 tokens are the same."""
    network = make("cuda", length=12, vocab_size=300)
    model = Model(network, network.config)
    expected = model.sample(7, steps=5, seed=3)
    assert model.accelerate()
    assert torch.equal(model.sample(7, steps=5, seed=3), expected)
    assert torch.equal(model.sample(7, steps=5, seed=3, batch_size=2), expected)
