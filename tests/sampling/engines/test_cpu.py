"""The layout for the CPU: the same logits, the same samples, never those of old weights."""

import copy
import gc
import math
import pickle
import weakref
from dataclasses import replace

import pytest
import torch
from tests.random_models import randomise

import didi_instruct as didi
from didi_instruct.config.model import ModelConfig, ScheduleConfig
from didi_instruct.models.dit import DiT
from didi_instruct.process.schedule import make_schedule
from didi_instruct.sampling.denoiser import CachedDenoiser, make_denoiser, network_denoiser
from didi_instruct.sampling.engines import cpu
from didi_instruct.sampling.engines.cpu import PackedDiT, PackedLinear, fits, packs
from didi_instruct.sampling.generate import Request, generate
from didi_instruct.sampling.state import Reads

TINY = {"layers": 2, "hidden": 24, "heads": 2, "cond_dim": 8, "vocab_size": 11, "length": 40}
SCHEDULE = make_schedule(ScheduleConfig(eps=1e-3))
LENGTHS = (0, *[1] * 40)
PACKED = "PackedDiT.logits"


def network(seed=0, **changes):
    return randomise(DiT(ModelConfig(**(TINY | changes))), seed).eval()


def text(rows=3, length=37, seed=1):
    """Tokens and masks, without the id 0."""
    return torch.randint(1, 11, (rows, length), generator=torch.Generator().manual_seed(seed))


def all_logits(dit, tokens, attended=None):
    """Logits (B, L, V), by the layout."""
    at = torch.arange(tokens.numel())
    return PackedDiT(dit).logits(Reads(tokens, attended), 0.5, at).view(*tokens.shape, -1)


def engine(denoiser):
    """What makes a denoiser's logits."""
    return denoiser.logits.__qualname__


@pytest.fixture(params=[True, False], ids=["packed", "plain"])
def one_dnn(request, monkeypatch):
    if not request.param:
        monkeypatch.setattr(cpu, "packs", lambda dtype: False)


def gelu(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


@pytest.mark.usefixtures("one_dnn")
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("rows", [1, 5, 300])
def test_products_are_those_of_float64(rows, dtype, rtol):
    """With a bias, through the tanh-GELU, added to a float32 residual; any number of rows."""
    generator = torch.Generator().manual_seed(rows)
    x, weight, bias, stream = (
        torch.randn(shape, generator=generator) for shape in ((2, rows, 24), (40, 24), 40, 40)
    )
    x, weight, bias = x.to(dtype), weight.to(dtype), bias.to(dtype)
    linear = PackedLinear(weight, bias)
    exact = x.double() @ weight.double().T + bias.double()
    stream = stream.expand(2, rows, 40).contiguous()
    added = linear.added(x, stream)
    assert added.dtype == torch.float32
    close = {"rtol": rtol, "atol": rtol}
    torch.testing.assert_close(linear(x).double(), exact, **close)
    torch.testing.assert_close(linear.gelu(x).double(), gelu(exact), **close)
    torch.testing.assert_close(added.double(), exact + stream.double(), rtol=rtol, atol=5 * rtol)
    without = PackedLinear(weight)(x)
    torch.testing.assert_close(without.double(), exact - bias.double(), rtol=rtol, atol=5 * rtol)


def test_only_what_one_dnn_multiplies_well_is_packed(monkeypatch):
    monkeypatch.setattr(cpu.platform, "machine", lambda: "x86_64")
    assert packs(torch.float32) == torch.backends.mkldnn.is_available()
    assert not packs(torch.float64)
    monkeypatch.setattr(cpu.platform, "machine", lambda: "arm64")
    assert not packs(torch.float32)
    assert not packs(torch.bfloat16)


@pytest.mark.usefixtures("one_dnn")
@pytest.mark.parametrize(
    "changes",
    [
        {"layers": 1},
        {"learned_positions": True},
        {"end_id": 0, "lengths": LENGTHS},
        {"masks": 3, "vocab_size": 13},
        {"kind": "duo"},
    ],
    ids=lambda changes: next(iter(changes)),
)
@torch.no_grad()
def test_every_kind_of_denoiser_has_its_own_logits(changes):
    dit = network(**changes)
    torch.testing.assert_close(all_logits(dit, text()), dit(text()), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("one_dnn")
@pytest.mark.parametrize("padded", [False, True])
@torch.no_grad()
def test_selected_rows_are_those_of_all_logits(padded):
    """Rows select many positions, few, none, in any order; one text alone gives the same."""
    dit, tokens = network(), text()
    attended = torch.arange(37) < torch.tensor([[37], [20], [9]]) if padded else None
    every, quick = dit(tokens, attended=attended).flatten(0, 1), PackedDiT(dit)
    at = torch.tensor([*range(1, 30), 77, 82])
    for places in (at, at.flip(0), at[torch.randperm(len(at))], at[:0]):
        found = quick.logits(Reads(tokens, attended), 0.5, places)
        torch.testing.assert_close(found, every[places], rtol=1e-4, atol=1e-4)
    alone = Reads(tokens[2:], None if attended is None else attended[2:])
    found = quick.logits(alone, 0.5, torch.tensor([3, 8]))
    torch.testing.assert_close(found, every[[77, 82]], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("small", [cpu.SMALL, 0], ids=["plain attention", "fused attention"])
@pytest.mark.parametrize("lengths", [(37, 37, 37), (37, 20, 9)], ids=str)
@torch.no_grad()
def test_bfloat16_is_as_near_as_the_network_in_bfloat16(small, lengths, monkeypatch):
    """Both round at other places: the mean error may be larger by half, as it is not by chance."""
    monkeypatch.setattr(cpu, "SMALL", small)
    there = torch.arange(37) < torch.tensor(lengths)[:, None]
    attended = None if there.all() else there
    exact, rounded = network()(text(), attended=attended)[there], network().bfloat16()
    allowed = 1.5 * (rounded(text(), attended=attended)[there].float() - exact).abs().mean()
    assert (all_logits(rounded, text(), attended)[there].float() - exact).abs().mean() < allowed


# Which network is laid out, and when anew


def test_networks_it_is_not_for():
    for suited in (network(), network().bfloat16()):
        assert fits(suited)
        assert engine(make_denoiser(suited, SCHEDULE)) == PACKED
    others = network(time_conditioning=True), network().double(), network().train()
    for other in (*others, network().to("meta")):
        assert not fits(other)
        assert engine(make_denoiser(other, SCHEDULE)) != PACKED


@torch.no_grad()
def test_new_weights_are_noticed():
    """And other modes; other ways to change weights are in `test_dit`."""
    dit = network()
    cached = CachedDenoiser(dit, SCHEDULE)
    for change in (lambda: dit.blocks[1].mlp[2].bias.add_(1), dit.train, dit.eval):
        before = cached.current()
        assert cached.current() is before
        change()
        assert cached.current() is not before


def make():
    config = ModelConfig(
        layers=2, hidden=32, heads=2, cond_dim=8, length=32, vocab_size=65, learned_positions=True,
        schedule=ScheduleConfig(eps=1e-3),
    )  # fmt: skip
    return didi.Model(randomise(DiT(config)), config)


@pytest.mark.parametrize(
    "sampler", ["ancestral", "confidence", "remasking", "first-hitting", "dplm"]
)
def test_samples_are_the_networks(sampler):
    """The same seed, and so the same tokens.

    Rounding moves a cumulative probability by about 1e-6, and so one of some hundred tokens in a
    run of thousands; the seed is fixed, so only other kernels can raise that alarm. Learned
    positions tell masks apart, so that confidence has no ties for rounding to break.
    """
    model = make()
    steps = None if sampler == "first-hitting" else 8
    wish = Request(num=6, steps=steps, sampler=sampler, measure_path=True)
    packed = model.sampled()
    assert engine(packed.denoiser) == PACKED
    ours = generate(wish, packed)
    plain = network_denoiser(model.network, model.schedule)
    expected = generate(wish, replace(packed, denoiser=plain))
    assert torch.equal(ours.tokens, expected.tokens)
    torch.testing.assert_close(ours.log_prob, expected.log_prob, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_model_that_has_sampled_can_be_copied(copied):
    """And samples of each follow its own weights."""
    model = make()
    expected = model.sample(4, steps=4)
    twin = copied(model)
    assert torch.equal(twin.sample(4, steps=4), expected)
    with torch.no_grad():
        model.network.output_layer.linear.bias[:32] -= 1e3
    assert bool((expected < 32).any())
    assert bool((model.sample(4, steps=4) >= 32).all())
    assert torch.equal(twin.sample(4, steps=4), expected)


def test_weights_that_are_laid_out_go_with_their_denoiser():
    """Without a wait for the garbage collector: a copy of large weights is gigabytes."""
    packed = PackedDiT(network())
    blank = torch.full((1, 30), 10)
    packed.logits(Reads(blank), 0.5, torch.arange(30))
    there, enabled = weakref.ref(packed), gc.isenabled()
    gc.disable()
    try:
        del packed
        assert there() is None
    finally:
        if enabled:
            gc.enable()


def test_blank_texts_are_read_once(monkeypatch):
    """Masks alone, and masks with ends behind, of one text; all else is read as it is."""
    config = ModelConfig(**TINY, end_id=3, lengths=LENGTHS)
    for dit in (network(), randomise(DiT(config)).eval()):
        packed, runs = PackedDiT(dit), []
        states = packed._states

        def counted(tokens, mask=None, states=states, runs=runs):
            runs.append(tokens.shape)
            return states(tokens, mask)

        monkeypatch.setattr(packed, "_states", counted)

        def logits(tokens, packed=packed):
            at = torch.arange(tokens.numel())
            return packed.logits(Reads(tokens), 0.5, at).view(*tokens.shape, -1)

        blank = torch.full((1, 30), 10)
        written = blank.index_fill(1, torch.tensor([4]), 7)
        texts = [blank, blank[:, :29], written, blank.expand(2, -1), blank]
        if dit.config.end_id is not None:
            texts.append(blank.index_fill(1, torch.arange(20, 30), 3))
        for tokens in [*texts, *texts]:
            torch.testing.assert_close(logits(tokens), dit(tokens).detach(), rtol=1e-4, atol=1e-4)
        once = 2 + (dit.config.end_id is not None)
        assert len(runs) == once + 2 * 2  # the written text and the pair, twice each


def test_logits_are_made_of_few_numbers_of_rows():
    """Each number is a kernel that stays in memory: beyond the first 16, multiples of 16 alone."""
    packed, tokens, seen = PackedDiT(network()), text(length=40), set()
    whole, head = packed.logits(Reads(tokens), 0.5, torch.arange(120)), packed._head
    packed._head = lambda x: seen.add(len(x)) or head(x)
    for count in range(1, 121):
        found = packed.logits(Reads(tokens), 0.5, torch.arange(count))
        torch.testing.assert_close(found, whole[:count], rtol=1e-5, atol=1e-5)
    assert seen == {*range(1, 17), *range(32, 129, 16)}
