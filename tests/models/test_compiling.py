"""A compiled trunk has the gradients of a plain one, and is compiled as often as it has to be."""

import copy

import pytest
import torch

from didi_instruct.config.model import ModelConfig
from didi_instruct.config.pretrain import TrainConfig
from didi_instruct.distillation import replica
from didi_instruct.models.compile import compiled
from didi_instruct.models.discriminator import build_discriminator
from didi_instruct.models.dit import DiT
from didi_instruct.training import distributed as parallel
from didi_instruct.training.distributed import World, compile_network, compiles


@pytest.mark.gpu
@pytest.mark.parametrize("by_block", [True, False])
@pytest.mark.parametrize(("batch", "length", "hidden"), [(128, 256, 256), (32, 1024, 128)])
def test_gradients_of_a_compiled_trunk(batch, length, hidden, by_block):
    """In float32. At these sizes inductor's mix-order reduction was wrong by orders of magnitude.

    Small models did not show it: the kernel is chosen where there are many rows.
    """
    torch.manual_seed(0)
    config = ModelConfig(
        layers=4, hidden=hidden, heads=2, cond_dim=8, vocab_size=65, length=length,
        learned_positions=True,
    )  # fmt: skip
    plain = DiT(config).cuda()
    for parameter in plain.parameters():  # modulations are zero at first
        torch.nn.init.normal_(parameter, std=0.05)
    fast = copy.deepcopy(plain)
    compile_network(fast, "on", sharded=by_block)
    tokens = torch.randint(64, (batch, length), device="cuda")
    weight = torch.randn(batch, length, hidden, device="cuda")
    for network in (plain, fast):
        (network.trunk(network.embed(tokens), network.modulations()) * weight).mean().backward()
    for (name, a), b in zip(plain.named_parameters(), fast.parameters(), strict=True):
        if a.grad is not None:
            gap = (a.grad - b.grad).norm() / a.grad.norm().clamp_min(1e-12)
            assert gap < 1e-2, f"{name}: {gap:.2g}"


def test_blocks_that_are_alike_are_compiled_once(monkeypatch):
    """By dynamo itself, with a backend that runs the graph as it is."""
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    monkeypatch.setattr(parallel, "compiled", lambda f: torch.compile(f, backend=counter))
    torch._dynamo.reset()
    plain = DiT(ModelConfig(layers=5, hidden=32, heads=2, cond_dim=8, vocab_size=65, length=16))
    fast = copy.deepcopy(plain)
    compile_network(fast, "on", sharded=True)
    tokens = torch.randint(64, (3, 16))
    for _ in range(2):
        given = plain.embed(tokens), plain.modulations()
        torch.testing.assert_close(fast.trunk(*given), plain.trunk(*given))
    assert counter.frame_count == 1


def test_a_trunk_is_compiled_as_one_graph_whatever_head_it_has(monkeypatch):
    """Also the two parts of a discriminator, whose lower blocks are frozen."""
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    monkeypatch.setattr(parallel, "compiled", lambda f, graphs: torch.compile(f, backend=counter))
    torch._dynamo.reset()
    config = ModelConfig(layers=5, hidden=32, heads=2, cond_dim=8, vocab_size=65, length=16)
    plain = build_discriminator(config).eval()
    plain.freeze_lower(2)
    fast = copy.deepcopy(plain)
    compile_network(fast, "on", sharded=False)
    tokens = torch.randint(64, (3, 16))
    for _ in range(2):
        torch.testing.assert_close(fast(tokens), plain(tokens))
    assert counter.frame_count == 1
    torch.testing.assert_close(fast.above(fast.below(tokens)), plain(tokens))
    assert counter.frame_count == 3


@pytest.mark.parametrize(
    ("setting", "on_cpu", "on_gpu"),
    [
        ("auto", False, True),
        ("graphs", False, True),
        ("on", True, True),
        ("off", False, False),
    ],
)
def test_what_is_compiled_where(setting, on_cpu, on_gpu):
    config = TrainConfig(compile=setting)
    assert compiles(config, torch.device("cpu")) == on_cpu
    assert compiles(config, torch.device("cuda")) == on_gpu


@pytest.mark.parametrize("setting", ["on", "graphs"])
@pytest.mark.parametrize("processes", [1, 2])
def test_passes_are_launched_whole_by_one_process_alone(setting, processes, monkeypatch):
    """A pass that exchanges gradients is none that can be captured."""
    asked = []
    monkeypatch.setattr(replica, "compiles", lambda *a: True)
    monkeypatch.setattr(replica, "parallelise", lambda module, *a, **k: module)
    monkeypatch.setattr(replica, "compile_network", lambda n, how, sharded: asked.append(how))
    network = DiT(ModelConfig(layers=1, hidden=32, heads=2, cond_dim=8, vocab_size=65, length=16))
    world = World(torch.device("cpu"), 0, processes)
    replica.Replica(network, TrainConfig(compile=setting), world)
    assert asked == ["on" if setting == "graphs" and processes > 1 else setting]


@pytest.mark.parametrize("graphs", [True, False])
def test_what_is_asked_of_the_compiler(graphs, monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "compile", lambda function, **how: asked.append(how) or function)
    compiled(len, graphs=graphs)
    options = asked[0]["options"] or {}
    assert ("triton.cudagraphs" in options) == graphs
