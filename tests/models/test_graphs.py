"""Captured passes give what plain ones give. Without a GPU all but the capture itself is tested."""

import logging
from types import SimpleNamespace

import pytest
import torch
from didi_instruct.models.graphs import (
    GraphedDiT,
    capture,
    pad_output,
    round_up,
    why_not,
)
from didi_instruct.sampling.chunks import draw_by_chunks
from didi_instruct.sampling.network import selected_logits
from tests.devices import DEVICES

from didi_instruct.config.model import ModelConfig, ScheduleConfig
from didi_instruct.models import compile as remarks
from didi_instruct.models import graphs
from didi_instruct.models.dit import DiT

from .buffered import Buffered

KINDS = {
    "plain": {},
    "timed": {"time_conditioning": True},
    "positions": {"learned_positions": True},
    "windows": {"end_id": 3, "lengths": (0, *[1] * 16)},
    "codes": {"masks": 4},
}


def uncompiled(monkeypatch):
    """Capture functions as they are: compiling takes most of the time, and a few tests do it."""
    monkeypatch.setattr(graphs, "compiled", lambda function, dynamic=None: function)


def make(device="cpu", dtype=torch.float64, **changes):
    config = ModelConfig(
        layers=3, hidden=32, heads=2, cond_dim=8, vocab_size=70, length=16,
        schedule=ScheduleConfig(eps=1e-3), **changes,
    )  # fmt: skip
    torch.manual_seed(0)
    network = DiT(config)
    for parameter in network.parameters():  # modulations and the output layer start at zero
        torch.nn.init.normal_(parameter, std=0.3)
    return network.to(device, dtype).eval()


def inputs(network, rows, length=16, seed=0):
    """Texts, one time for each, and some positions of each."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(network.config.vocab_size, (rows, length), generator=generator)
    sigma = torch.rand(rows, generator=generator, dtype=torch.float64) * 3
    where = torch.rand(rows, length, generator=generator) < 0.3
    device = next(network.parameters()).device
    return tokens.to(device), sigma.to(device), where.to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", list(KINDS))
@torch.no_grad()
def test_logits_are_those_of_plain_passes(kind, device, monkeypatch):
    """In float64; other batches in between, larger and smaller than the graphs that exist."""
    if kind not in ("plain", "timed"):
        uncompiled(monkeypatch)
    network = make(device, **KINDS[kind])
    fast = GraphedDiT(network)
    for seed, (rows, length) in enumerate([(5, 16), (1, 16), (4, 16), (5, 9), (7, 16), (5, 16)]):
        tokens, sigma, where = inputs(network, rows, length, seed)
        expected = selected_logits(network, tokens, sigma, where)
        assert expected.std() > 0.1
        torch.testing.assert_close(fast.logits(tokens, sigma, where), expected)


@pytest.mark.parametrize("kind", list(KINDS))
@torch.no_grad()
def test_batches_that_share_a_graph_do_not_disturb_each_other(kind, monkeypatch):
    """Rows that are left over in a buffer, and results that the next pass overwrites."""
    monkeypatch.setattr(graphs, "capture", Buffered)
    network = make(**KINDS[kind])
    fast = GraphedDiT(network)
    found, expected = [], []
    for seed, (rows, length) in enumerate([(5, 16), (1, 16), (4, 16), (5, 9), (7, 16), (6, 16)]):
        tokens, sigma, where = inputs(network, rows, length, seed)
        found.append(fast.logits(tokens, sigma, where))
        expected.append(selected_logits(network, tokens, sigma, where))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    assert sorted(fast._graphs) == [(1, 16), (6, 9), (6, 16), (8, 16)]


@torch.no_grad()
def test_only_so_many_graphs_are_kept(monkeypatch):
    """What was not used for longest goes first."""
    monkeypatch.setattr(graphs, "capture", Buffered)
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 16)
    network = make()
    fast = GraphedDiT(network)
    for length in (*range(1, 17), 1):
        fast.logits(*inputs(network, 2, length))
    assert len(fast._graphs) == 16
    fast.logits(*inputs(network, 4, 16))
    assert len(fast._graphs) == 16
    assert (2, 1) in fast._graphs
    assert (2, 2) not in fast._graphs


@torch.no_grad()
def test_only_so_many_ends_are_kept(monkeypatch):
    monkeypatch.setattr(graphs, "capture", Buffered)
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 2)
    network = make()
    fast = GraphedDiT(network, draw_by_chunks)
    tokens, sigma, _ = inputs(network, 4)
    for rows in (1, 5, 30, 1, 30):
        place, numbers = torch.arange(rows), torch.full((rows,), 0.5, dtype=torch.float64)
        fast.drawn_at(tokens, sigma, place, numbers)
    assert sorted(fast._ends) == [1, 30]


@pytest.mark.gpu
@torch.no_grad()
def test_graphs_are_replayed_and_few():
    """Captured for real; batches of nearby sizes share one, and nothing is captured twice."""
    network = make("cuda", torch.bfloat16)
    fast = GraphedDiT(network)
    for _ in range(2):
        for rows in (1, 16, 12, 9, 16, 1):
            tokens, sigma, where = inputs(network, rows)
            plain = selected_logits(network, tokens, sigma, where).float()
            gap = (fast.logits(tokens, sigma, where).float() - plain).abs().mean()
            assert gap < 0.05 * plain.std()
    assert sorted(fast._graphs) == [(1, 16), (16, 16)]
    assert all(isinstance(graph, graphs.Captured) for graph in fast._graphs.values())


@pytest.mark.parametrize("device", DEVICES)
@torch.no_grad()
def test_weights_that_change_are_noticed(device, monkeypatch):
    """In place, by loading, and by a move; the padded output layer and the modulations too."""
    uncompiled(monkeypatch)
    network = make(device)
    fast = GraphedDiT(network, draw_by_chunks)
    tokens, sigma, where = inputs(network, 4)
    before = fast.logits(tokens, sigma, where)
    place = where.flatten().nonzero().squeeze(1)
    numbers = torch.linspace(0.01, 0.99, len(place), dtype=torch.float64, device=device)
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
        fast.refresh()
        after = fast.logits(tokens, sigma, where)
        expected = selected_logits(network, tokens, sigma, where)
        torch.testing.assert_close(after, expected)
        drawn = fast.drawn_at(tokens, sigma, place, numbers)
        for one, other in zip(drawn, draw_by_chunks(expected, numbers), strict=True):
            torch.testing.assert_close(one, other)
    assert not torch.allclose(after.double(), before)


@pytest.mark.parametrize("kind", list(KINDS))
@torch.no_grad()
def test_tokens_are_drawn_from_the_logits_part_by_part(kind, monkeypatch):
    """At most 12 rows at a time, in buffers that the next part overwrites."""
    network = make(**KINDS[kind])
    monkeypatch.setattr(graphs, "capture", Buffered)
    monkeypatch.setattr(graphs, "LOGITS_AT_ONCE", 12 * network.config.num_tokens)
    fast = GraphedDiT(network, draw_by_chunks)
    for seed, rows in enumerate((9, 1, 2, 7)):
        tokens, sigma, where = inputs(network, rows, seed=seed)
        place = where.flatten().nonzero().squeeze(1)
        numbers = torch.rand(len(place), dtype=torch.float64)
        expected = draw_by_chunks(selected_logits(network, tokens, sigma, where), numbers)
        found = fast.drawn_at(tokens, sigma, place, numbers)
        assert torch.equal(found[0], expected[0])
        torch.testing.assert_close(found[1], expected[1])
    assert max(fast._ends) == 12
    assert len(fast._ends) <= 5


@pytest.mark.gpu
@torch.no_grad()
def test_draws_in_bfloat16_are_compiled_and_captured():
    """As it runs for real; nothing had to be remarked."""
    network = make("cuda", torch.bfloat16)
    fast, before = GraphedDiT(network, draw_by_chunks), list(remarks.remarks)
    for rows in (16, 9, 1):
        tokens, sigma, where = inputs(network, rows)
        place = where.flatten().nonzero().squeeze(1)
        numbers = torch.linspace(0.01, 0.99, len(place), dtype=torch.float64, device="cuda")
        log_p = selected_logits(network, tokens, sigma, where).double().log_softmax(-1)
        token, own = fast.drawn_at(tokens, sigma, place, numbers)
        expected = log_p.gather(1, token[:, None]).squeeze(1)
        assert (own - expected).abs().mean() < 0.05
    for graph in (*fast._graphs.values(), *fast._ends.values()):
        assert isinstance(graph, graphs.Captured)
        assert graph.is_compiled
    assert list(remarks.remarks) == before


@pytest.mark.parametrize("timed", [True, False])
@torch.no_grad()
def test_sizes_that_change_are_told_to_the_compiler(timed, monkeypatch):
    """Rows of the end of a step; texts and their length are fixed."""
    asked = {}

    def recorded(function, inputs, pool=None, dynamic=()):
        asked[function.__name__] = list(dynamic)
        return function

    monkeypatch.setattr(graphs, "capture", recorded)
    network = make(time_conditioning=timed)
    fast = GraphedDiT(network, draw_by_chunks)
    tokens, sigma, where = inputs(network, 4)
    place = where.flatten().nonzero().squeeze(1)
    fast.drawn_at(tokens, sigma, place, torch.rand(len(place)).double())
    assert asked == {"begin": [], "end": [0, 0, 0] if timed else [0, 0]}


def test_a_capture_marks_the_sizes_that_change(warm, monkeypatch):
    uncompiled(monkeypatch)
    marked = []
    monkeypatch.setattr(graphs, "Captured", lambda *a: SimpleNamespace())
    monkeypatch.setattr(
        torch._dynamo, "maybe_mark_dynamic", lambda tensor, dim: marked.append((tensor, dim))
    )
    first, second = OnGPU(), OnGPU()
    assert capture(lambda one, _: one, (first, second), dynamic=[None, 1]).is_compiled
    assert marked == [(second, 1)]


def test_sizes_are_few_and_close():
    sizes = [round_up(rows) for rows in range(1, 300)]
    assert sorted(set(sizes)) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384]
    assert all(rows <= size < 1.5 * rows or size == rows for rows, size in enumerate(sizes, 1))


def test_a_graph_that_exists_serves_smaller_batches():
    fast = GraphedDiT(make())
    fast._graphs = {(16, 8): None, (24, 8): None, (64, 9): None}
    assert [fast._size(rows, 8) for rows in (1, 7, 8, 16, 17, 24, 40)] == [1, 8, 16, 16, 24, 24, 48]


def test_a_padded_output_layer_never_writes_the_padding():
    weight, bias = torch.randn(70, 4), torch.randn(70)
    wide, biases = pad_output(weight, bias, 69, never=3)
    assert wide.shape == (128, 4)
    p = torch.nn.functional.linear(torch.randn(5, 4), wide, biases).softmax(-1)
    assert not p[:, 69:].any()
    assert not p[:, 3].any()
    assert torch.equal(biases[:3], bias[:3])


def test_on_a_cpu_nothing_is_captured():
    assert capture(double, (torch.ones(2),)) is double
    assert "on the CPU" in why_not(make())
    assert "DiT family" in why_not(torch.nn.Linear(2, 2))


def double(x):
    return 2 * x


def refuse(*arguments, **settings):
    raise RuntimeError("There is no compiler.\nInstall one.")


@pytest.fixture
def warm(monkeypatch):
    """A machine whose passes are warm after one."""
    monkeypatch.setattr(graphs, "_warm_up", lambda function, inputs: function(*inputs))
    remarks.warn_once.cache_clear()


class OnGPU:
    """An input to pretend with."""

    is_cuda = True

    def clone(self):
        return self

    def __rmul__(self, factor):
        return self


def said(caplog):
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("when", ["asked", "first pass", "capture"])
def test_what_cannot_be_compiled_is_captured_as_it_is(when, warm, monkeypatch, caplog):
    """Whenever torch refuses; a pool that a broken capture may hold is left alone."""
    tried = []

    def slow(x):
        return x

    def captured(function, inputs, pool):
        tried.append((function, pool))
        return SimpleNamespace(function=function) if function is double else refuse()

    result = refuse if when == "first pass" else slow
    compiling = refuse if when == "asked" else lambda function, dynamic: result
    monkeypatch.setattr(graphs, "compiled", compiling)
    monkeypatch.setattr(graphs, "Captured", captured)
    for _ in range(2):
        assert capture(double, (OnGPU(),), "shared").function is double
    late = [(slow, "shared"), (double, None)]
    assert tried == 2 * (late if when == "capture" else [(double, "shared")])
    reason = "There is no compiler"
    assert said(caplog) == [f"A pass cannot be compiled here, so it runs slower: {reason}"]


def test_what_cannot_be_captured_runs_as_it_is(warm, monkeypatch, caplog):
    uncompiled(monkeypatch)
    monkeypatch.setattr(graphs, "Captured", refuse)
    assert capture(double, (OnGPU(),)) is double
    assert [text[:25] for text in said(caplog)] == [
        "A pass cannot be compiled", "A pass cannot be captured",
    ]  # fmt: skip


def test_a_lack_of_memory_is_no_reason_to_go_on_plainly(warm, monkeypatch):
    def full(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    uncompiled(monkeypatch)
    monkeypatch.setattr(graphs, "Captured", full)
    with pytest.raises(torch.OutOfMemoryError):
        capture(double, (OnGPU(),))


@torch.no_grad()
def test_graphs_share_the_memory_of_the_last_that_was_captured(monkeypatch):
    """And none where a capture failed: what it leaves behind would fail the next one too."""
    pools, failing = [], [False, False, True, False, False, False, True, False]

    class Pooled(Buffered):
        pool = "its own"

    def captured(function, inputs, pool=None, dynamic=()):
        pools.append(pool)
        return function if failing.pop(0) else Pooled(function, inputs)

    monkeypatch.setattr(graphs, "Captured", Pooled)
    monkeypatch.setattr(graphs, "capture", captured)
    network = make()
    fast = GraphedDiT(network, draw_by_chunks)
    for length in range(1, 6):
        fast.logits(*inputs(network, 2, length))
    assert pools == [None, "its own", "its own", None, "its own"]
    pools.clear()
    tokens, sigma, _ = inputs(network, 2, 6)
    fast.drawn_at(tokens, sigma, torch.tensor([0, 7]), torch.rand(2).double())
    fast.logits(*inputs(network, 2, 7))
    assert pools == ["its own", "its own", None]


@pytest.mark.gpu
def test_captures_warm_up_on_one_stream():
    """For each device: a stream of its own would keep a workspace of its own."""
    device = torch.device("cuda", torch.cuda.current_device())
    assert graphs.side_stream(device) is graphs.side_stream(device)
    x = torch.ones(2, device=device)
    first, second = (capture(double, (x,)) for _ in range(2))
    assert torch.equal(first(x), second(x))


def test_a_remark_is_made_once(caplog):
    remarks.warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="didi_instruct"):
        remarks.warn_once("It is slow.")
        remarks.warn_once("It is slow.")
    assert [record.getMessage() for record in caplog.records] == ["It is slow."]
