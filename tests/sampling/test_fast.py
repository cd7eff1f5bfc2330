"""Sampling on the fast path: the same law, by enumeration, and the same tokens."""

import warnings

import pytest
import torch
from didi_instruct.models.graphs import GraphedDiT
from didi_instruct.sampling.chain import Canvas, Chain, Draw, Purpose
from didi_instruct.sampling.chunks import draw_compiled
from didi_instruct.sampling.first_hitting import first_hitting
from didi_instruct.sampling.guidance import Guidance
from didi_instruct.sampling.network import Guide, NetworkDenoiser
from tests.devices import DEVICES

from didi_instruct.api.model import Model
from didi_instruct.config.model import ModelConfig, ScheduleConfig
from didi_instruct.models import graphs
from didi_instruct.models.compile import warn_once
from didi_instruct.models.discriminator import build_discriminator
from didi_instruct.models.dit import DiT
from didi_instruct.process.schedule import make_schedule
from didi_instruct.sampling import network as networks
from didi_instruct.sampling import planned
from didi_instruct.sampling.ancestral import ancestral
from didi_instruct.sampling.guided import rgas

from ..models.buffered import Buffered  # noqa: TID252
from .enumeration import all_masked, assert_follows, index, masked_step, p_value, texts_of

fast_devices = pytest.mark.parametrize("device", DEVICES)
"""On a CPU the same code runs uncompiled."""
V, L = 3, 4


def make(device, kind=DiT, **changes):
    """3 tokens, 4 positions, weights that matter, in float64."""
    settings = {"layers": 2, "hidden": 16, "heads": 2, "cond_dim": 8, "vocab_size": V + 1}
    config = ModelConfig(**(settings | {"length": L} | changes), schedule=ScheduleConfig(eps=1e-3))
    torch.manual_seed(1)
    network = kind(config)
    for name, parameter in network.named_parameters():
        torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.3)
    network = network.double().to(device).eval()
    return network, make_schedule(config.schedule)


def denoisers(device, **changes):
    """Plain and fast."""
    network, schedule = make(device, **changes)
    fast = NetworkDenoiser(network, schedule, GraphedDiT(network, draw_compiled))
    return NetworkDenoiser(network, schedule), fast, schedule


class Spelled:
    """A network as the language that enumeration asks."""

    num_tokens, length = V, L

    def __init__(self, plain, device):
        self.plain, self.device = plain, device

    def denoiser(self, z):
        logits = self.plain(z.to(self.device), torch.ones(len(z), device=self.device))
        return logits.log_softmax(-1).cpu()


@fast_devices
@pytest.mark.parametrize("steps", [1, 3])
def test_samples_follow_the_enumerated_law(steps, device):
    """Chi-square over 81 texts, false alarm 1e-5; the law of other steps must fail it."""
    plain, fast, schedule = denoisers(device)

    def law(steps):
        alphas = schedule.alpha(torch.linspace(1, 0, steps + 1, dtype=torch.float64)).tolist()
        mass = all_masked(Spelled)
        for before, after in zip(alphas[:-1], [*alphas[1:-1], 1.0], strict=True):
            mass = masked_step(Spelled(plain, device), mass, (after - before) / (1 - before))
        return texts_of(mass, V, L)

    canvas = Canvas.blank(20_000, L, V, device=device)
    found = ancestral(fast, schedule, canvas, steps=steps, settings=Draw(seed=2)).tokens.cpu()
    assert_follows(found, law(steps), V)
    assert p_value(index(found, V), law(4 - steps)) < 1e-5


@fast_devices
@pytest.mark.parametrize("changes", [{}, {"time_conditioning": True}, {"masks": 2}])
@pytest.mark.parametrize("settings", [Draw(), Draw(temperature=0.7), Draw(top_p=0.8)])
def test_tokens_and_paths_are_those_of_the_plain_path(settings, changes, device, monkeypatch):
    """In float64, so that rounding changes no draw; given tokens, a sample at rest, padding."""
    if changes or not settings.as_it_is:  # compiling takes most of the time
        monkeypatch.setattr(graphs, "compiled", lambda function, dynamic=None: function)
    changes = {"length": 12, "vocab_size": 300, **changes}
    if device == "cpu":
        monkeypatch.setattr(graphs, "capture", Buffered)
    plain, fast, schedule = denoisers(device, **changes)
    mask = plain.network.config.mask_id
    tokens = torch.full((6, 12), mask)
    tokens[1, 3:6] = 7
    tokens[2] = 5
    padded = tokens.index_fill(1, torch.tensor([10, 11]), -1)
    samples, masks = torch.arange(6, device=device), changes.get("masks", 1)
    canvases = [
        Canvas(rows.to(device), mask, samples, masks=masks)
        for rows in (torch.full((6, 12), mask), tokens, padded)
    ]
    for canvas in canvases:
        samplers = (
            lambda d, c=canvas: ancestral(d, schedule, c, steps=5, settings=settings),
            lambda d, c=canvas: first_hitting(d, schedule, c, settings=settings),
        )
        for sampler in samplers:
            expected, found = sampler(plain), sampler(fast)
            assert torch.equal(found.tokens, expected.tokens)
            torch.testing.assert_close(found.log_prob, expected.log_prob)
            assert (found.nfe, found.passes) == (expected.nfe, expected.passes)


@fast_devices
@pytest.mark.parametrize(
    "options",
    [{"order": "streams"}, {"grid": "cosine", "greedy_tail": True}, {"steps": 60}],
)
def test_a_callback_sees_the_same_steps(options, device, monkeypatch):
    """Of every order and grid, and with more steps than tokens, most of which write nothing."""
    monkeypatch.setattr(graphs, "compiled", lambda function, dynamic=None: function)
    plain, fast, schedule = denoisers(device, length=12, vocab_size=300)
    tokens = torch.full((5, 12), 299)
    tokens[2, :9] = 4
    canvas = Canvas(tokens.to(device), 299, torch.arange(5, device=device))
    seen = []
    for denoiser in (plain, fast):
        steps = []
        run = {"steps": 6, **options, "callback": steps.append}
        seen.append((steps, ancestral(denoiser, schedule, canvas, **run)))
    (expected, by_chain), (found, by_plan) = seen
    # A chain also shares a pass among the samples that still have nothing after the first one.
    assert by_chain.passes - 1e-9 <= by_plan.passes <= 1.1 * by_chain.passes
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert (one.index, one.steps, one.time) == (other.index, other.steps, other.time)
        assert torch.equal(one.tokens, other.tokens)
        assert torch.equal(one.revealed, other.revealed)
        torch.testing.assert_close(one.confidence, other.confidence)


@pytest.mark.gpu
def test_nobody_waits_for_the_gpu_once_the_plan_is_made(monkeypatch):
    """At most twice: where random numbers are first made, and where the result is checked."""
    _, fast, schedule = denoisers("cuda", length=12, vocab_size=300)
    canvas = Canvas.blank(8, 12, 299, device="cuda")
    ancestral(fast, schedule, canvas, steps=6)
    make_plan = planned.make_plan

    def watched(*arguments, **options):
        plan = make_plan(*arguments, **options)
        torch.cuda.set_sync_debug_mode("warn")
        return plan

    monkeypatch.setattr(planned, "make_plan", watched)
    try:
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            ancestral(fast, schedule, canvas, steps=6)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [w for w in heard if "called a synchronizing" in str(w.message)]
    assert len(waits) <= 2, [str(w.message) for w in waits]


@pytest.mark.gpu
def test_a_compiled_guide_guides_alike():
    """Tilting, which differentiates, and re-ranking; in float64 the same tokens."""
    plain, fast, schedule = denoisers("cuda", length=12, vocab_size=300)
    critic, _ = make("cuda", build_discriminator, length=12, vocab_size=300)
    canvas = Canvas.blank(6, 12, 299, device="cuda")
    run = {"canvas": canvas, "steps": 6, "guidance": Guidance(h_start=3.0, h_end=4.0)}
    expected = rgas(plain, schedule, Guide(critic, schedule), **run)
    found = rgas(fast, schedule, Guide(critic, schedule, fast=True), **run)
    assert torch.equal(found.tokens, expected.tokens)
    assert all(p.grad is None for p in critic.parameters())


@pytest.mark.parametrize("at_once", [True, False], ids=["no-compiler", "compiling-fails"])
def test_a_guide_that_cannot_be_compiled_guides_plainly(at_once, monkeypatch, caplog):
    """Whether torch refuses when it is asked or in the first pass; said once, tried once."""
    tried = []

    def refuse(*arguments):
        tried.append(1)
        raise RuntimeError("There is no compiler.\nInstall one.")

    warn_once.cache_clear()
    monkeypatch.setattr(networks, "compiled", refuse if at_once else lambda function: refuse)
    plain, _, schedule = denoisers("cpu", length=12, vocab_size=300)
    critic, _ = make("cpu", build_discriminator, length=12, vocab_size=300)
    run = {"canvas": Canvas.blank(6, 12, 299), "steps": 6, "guidance": Guidance(h_start=3.0)}
    expected = rgas(plain, schedule, Guide(critic, schedule), **run)
    found = rgas(plain, schedule, Guide(critic, schedule, fast=True), **run)
    assert torch.equal(found.tokens, expected.tokens)
    assert tried == [1]
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "A discriminator cannot be compiled here, so it runs slower: There is no compiler"
    ]


def test_a_guide_that_lacks_memory_says_so(monkeypatch):
    def full(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(networks, "compiled", lambda function: full)
    critic, schedule = make("cpu", build_discriminator)
    guide, z = Guide(critic, schedule, fast=True), torch.full((2, L), V)
    with pytest.raises(torch.OutOfMemoryError):
        guide.score_texts(z, 1.0)


@pytest.mark.parametrize(("own", "parts"), [(True, 1), (False, 3)])
def test_a_draw_of_the_denoisers_own_is_not_taken_apart(own, parts, monkeypatch):
    """It holds no float64 laws, so all rows fit; the others come two at a time."""
    monkeypatch.setattr("didi_instruct.sampling.chain.PART_ELEMENTS", 2 * 300)
    plain, fast, _ = denoisers("cpu", vocab_size=301)
    denoiser, seen = fast if own else plain, []
    name, holder = ("draw", denoiser) if own else ("law", Chain)
    inner = getattr(holder, name)

    def watched(*given):
        seen.append(len(given[-2 if own else -1]))
        return inner(*given)

    monkeypatch.setattr(holder, name, watched)
    chain = Chain(denoiser, Canvas.blank(2, L, 300), Draw(), steps=1)
    logits, numbers = torch.randn(5, 300), torch.linspace(0, 0.99, 5, dtype=torch.float64)
    token, _ = chain.draw(logits, numbers)
    assert len(seen) == parts
    assert sum(seen) == 5
    monkeypatch.undo()
    assert torch.equal(token, Chain.draw(chain, logits, numbers)[0])


def test_numbers_made_ahead_are_those_made_in_time():
    """Bit for bit, in any order of steps, for parts of a longer text too."""
    canvas = Canvas(torch.full((3, 5), V), V, torch.tensor([4, 0, 9]), stream=(7,))
    chain = Chain(lambda z, t: None, canvas, Draw(seed=5), steps=40)
    for purpose in (Purpose.REVEAL, Purpose.TOKEN):
        for step in (0, 1, 39, 40, 3, 2):
            expected = chain.uniforms(purpose, step)
            assert torch.equal(chain._one_of_many(purpose, step), expected)


def test_a_model_on_a_cpu_says_that_it_stays_plain(caplog):
    warn_once.cache_clear()
    network, _ = make("cpu")
    model = Model(network.float(), network.config)
    assert not model.accelerate()
    assert not model.is_accelerated
    assert "on the CPU" in caplog.text
    assert model.sample(2, steps=2).shape == (2, L)


@pytest.mark.gpu
def test_an_accelerated_model_draws_what_a_plain_one_draws():
    """Whatever the batch: float64 tokens are the same."""
    network, _ = make("cuda", length=12, vocab_size=300)
    model = Model(network, network.config)
    expected = model.sample(7, steps=5, seed=3)
    assert model.accelerate()
    assert torch.equal(model.sample(7, steps=5, seed=3), expected)
    assert torch.equal(model.sample(7, steps=5, seed=3, batch_size=2), expected)


@torch.no_grad()
def test_a_guide_is_compiled_once_for_all_numbers_of_texts(monkeypatch):
    """By dynamo itself, with a backend that runs the graph as it is: with gradients and without."""
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    monkeypatch.setattr(networks, "compiled", lambda f: torch.compile(f, backend=counter))
    torch._dynamo.reset()
    critic, schedule = make("cpu", build_discriminator, length=12, vocab_size=300)
    guide = Guide(critic, schedule, fast=True)
    plain = Guide(critic, schedule)
    for grad, count in ((False, 1), (True, 2)):
        for rows in (5, 1, 3, 1, 8):
            z, at = torch.full((rows, 12), 299), torch.arange(rows)
            given = z, 0.5, *((at, guide.embedding[at], z == 299) if grad else ())
            name = "gradient" if grad else "score_texts"
            found, expected = (getattr(each, name)(*given) for each in (guide, plain))
            torch.testing.assert_close(found, expected)
        assert counter.frame_count == count
