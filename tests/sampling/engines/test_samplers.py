"""Samplers over captured passes draw what they draw over plain ones."""

import warnings
from functools import partial

import pytest
import torch
from tests.devices import DEVICES
from tests.random_models import randomise

from didi_instruct.errors import UserError
from didi_instruct.models.discriminator import Discriminator
from didi_instruct.sampling import guide as guides
from didi_instruct.sampling import guided
from didi_instruct.sampling.ancestral import ancestral
from didi_instruct.sampling.denoiser import make_denoiser, network_denoiser
from didi_instruct.sampling.dplm import dplm
from didi_instruct.sampling.engines import cuda, cuda_graphs
from didi_instruct.sampling.engines.cuda import GraphDenoiser
from didi_instruct.sampling.engines.cuda_graphs import Captured
from didi_instruct.sampling.guide import DiscriminatorGuide, Guidance
from didi_instruct.sampling.guided import rgas
from didi_instruct.sampling.state import PAD, Canvas
from didi_instruct.sampling.variants import first_hitting

from ..enumeration import all_masked, assert_follows, index, masked_step, p_value, texts_of  # noqa: TID252
from ..toys import blank, start  # noqa: TID252
from .small import KINDS, SCHEDULE, Buffered, make, uncompiled

devices = pytest.mark.parametrize("device", DEVICES)
SHAPE = {"length": 12, "vocab_size": 300}


def parts(device, dtype=torch.float64, kind="plain"):
    """Plain and captured denoisers of a network, and a guide."""
    network = make(device, dtype, **SHAPE, **KINDS[kind])
    critic = randomise(Discriminator.from_network(make(**SHAPE, **KINDS[kind])), 2)
    guide = DiscriminatorGuide(critic.to(device, dtype), SCHEDULE)
    return network_denoiser(network, SCHEDULE), GraphDenoiser(network, SCHEDULE), guide


def canvases(config, device):
    """Nothing given, the same to all, something; padding for all, for some; single texts."""
    mask_id, columns = config.mask_id, torch.arange(12)
    blank = torch.full((6, 12), mask_id)
    given = blank.clone()
    given[1, 3:6], given[2], given[4, :11] = 7, 5, 3
    for_some = given.masked_fill(columns >= 10, PAD)
    for_some[0, 8:] = PAD
    rows = [
        (blank, ()), (blank.masked_fill(columns % 5 == 0, 9), ()), (given, ()),
        (blank.masked_fill(columns >= 8, PAD), (3,)), (for_some, ()), (blank[:1], ()),
        (given[1:2], (6, 1)), (blank[:1, :5], ()), (blank[:1], ()),
    ]  # fmt: skip
    for tokens, stream in rows:
        samples = torch.arange(len(tokens), device=device)
        yield Canvas(tokens.to(device), mask_id, samples, stream, config.masks)


def same(found, expected):
    assert torch.equal(found.tokens, expected.tokens)
    assert (found.log_prob is None) == (expected.log_prob is None)
    if found.log_prob is not None:
        torch.testing.assert_close(found.log_prob, expected.log_prob)
    assert (found.nfe, found.passes, found.disc_calls) == (
        expected.nfe, expected.passes, expected.disc_calls,
    )  # fmt: skip


def same_steps(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert (one.index, one.steps, one.time) == (other.index, other.steps, other.time)
        assert torch.equal(one.tokens, other.tokens)
        assert torch.equal(one.revealed, other.revealed)
        torch.testing.assert_close(one.confidence, other.confidence)


GUIDANCE = {
    "both": Guidance(h_start=3.0, h_end=4.0),
    "tilting": Guidance(h_start=-3.0, h_end=3.0, split=1.0, clamp=0.1),
    "tilting then nothing": Guidance(h_start=3.0, h_end=3.0, candidates=1),
    "means": Guidance(h_start=30.0, h_end=30.0, candidates=1, reward="mean"),
    "from nothing": Guidance(h_start=0.0, h_end=5.0, split=0.8, candidates=2),
    "best": Guidance(split=0.0, select="best", score="mean", candidates=3),
    "re-ranking": Guidance(split=0.0, candidates=3),
}
WAYS = {
    "one step": ({"steps": 1}, {}),
    "seven": ({"steps": 7}, {}),
    "cosine": ({"steps": 9, "grid": "cosine"}, {"seed": 4}),
    "streams": ({"steps": 6, "order": "streams"}, {}),
    "restricted": ({"steps": 5}, {"temperature": 0.7, "top_p": 0.9}),
    "forty": ({"steps": 40}, {}),
}
EVERY = [
    (way, kind, None)
    for way in (*WAYS, "first-hitting", "dplm")
    for kind in ("plain", "timed", "codes")
]
EVERY += [(way, "timed" if way == "cosine" else "plain", name) for way in WAYS for name in GUIDANCE]


def sampler(way, guidance):
    """Of a denoiser, a guide and a state; options of its draws."""
    if way == "first-hitting":
        return (lambda denoiser, guide, state: first_hitting(denoiser, SCHEDULE, state)), {}
    if way == "dplm":
        return (lambda denoiser, guide, state: dplm(denoiser, state, steps=5, guard=0.2)), {}
    options, draws = WAYS[way]
    if guidance is not None:
        options = options | {"guidance": GUIDANCE[guidance]}
        run = lambda denoiser, *given: rgas(denoiser, SCHEDULE, *given, **options)  # noqa: E731
        return run, draws
    tail = {"greedy_tail": way == "cosine"}
    return (lambda denoiser, _, s: ancestral(denoiser, SCHEDULE, s, **options, **tail)), draws


@devices
@pytest.mark.parametrize(("way", "kind", "guidance"), EVERY)
def test_what_is_drawn_is_that_of_plain_passes(way, kind, guidance, device, monkeypatch):
    """Tokens, paths, counts, and what a callback sees; texts one after the other share graphs.

    In float64, so that rounding changes no draw.
    """
    compiles = (way, guidance) in (("seven", None), ("streams", None)) and kind == "plain"
    if not compiles:  # it takes most of the time
        monkeypatch.setattr(cuda_graphs, "compiled", uncompiled)
    monkeypatch.setattr(cuda, "ROWS_AT_ONCE", 17)
    if device == "cpu":
        monkeypatch.setattr(cuda, "capture", Buffered)
    plain, fast, guide = parts(device, kind=kind)
    draw, options = sampler(way, guidance)
    for canvas in canvases(fast.network.config, device):
        seen, expected_steps = [], []
        expected = draw(plain, guide, start(canvas, expected_steps.append, **options))
        same(draw(fast, guide, start(canvas, seen.append, **options)), expected)
        same_steps(seen, expected_steps)
        same(draw(fast, guide, start(canvas, **options)), expected)
    if device == "cuda" and compiles:
        assert all(isinstance(g, Captured) for g in (*fast._trunks.values(), *fast._draws.values()))


class Spelled:
    """A denoiser of 3 tokens, 4 positions as the language that enumeration asks."""

    num_tokens, length = 3, 4

    def __init__(self, network):
        self.network = network

    @torch.no_grad()
    def denoiser(self, z):
        device = self.network.vectors.device
        return self.network(z.to(device)).log_softmax(-1).cpu()


@devices
@pytest.mark.parametrize("steps", [1, 3])
def test_samples_follow_the_enumerated_law(steps, device):
    """Chi-square over 81 texts, false alarm 1e-5; the law of other steps must fail it."""
    network = make(device, vocab_size=4, length=4, hidden=16)

    def law(steps):
        alphas = SCHEDULE.alpha(torch.linspace(1, 0, steps + 1, dtype=torch.float64)).tolist()
        mass = all_masked(Spelled)
        for before, after in zip(alphas[:-1], [*alphas[1:-1], 1.0], strict=True):
            mass = masked_step(Spelled(network), mass, (after - before) / (1 - before))
        return texts_of(mass, 3, 4)

    state = start(Canvas.blank(20_000, 4, 3, device=device), seed=2)
    fast = make_denoiser(network, SCHEDULE, accelerate=True)
    found = ancestral(fast, SCHEDULE, state, steps=steps).tokens.cpu()
    assert_follows(found, law(steps), 3)
    assert p_value(index(found, 3), law(4 - steps)) < 1e-5


def test_a_text_in_inference_mode_can_be_followed_by_one_that_is_not(monkeypatch):
    monkeypatch.setattr(cuda, "capture", Buffered)
    plain, fast, _ = parts("cpu")
    draw = partial(ancestral, schedule=SCHEDULE, steps=5)
    with torch.inference_mode():
        draw(fast, state=blank(1, 12, 299))
    same(draw(fast, state=blank(1, 12, 299)), draw(plain, state=blank(1, 12, 299)))


@devices
def test_narrow_numbers_tilt_alike(device, monkeypatch):
    """Of 16-bit networks, up to the rounding of their results; columns of padding stay -inf."""
    plain, fast, guide = parts(device, torch.bfloat16)
    tilts, fused_tilt = [], guides.fused_tilt

    def listen(logits, *given):
        tilts.append((logits, fused_tilt(logits, *given)))
        return tilts[-1][1]

    monkeypatch.setattr(guides, "fused_tilt", listen)
    canvas = list(canvases(fast.network.config, device))[2]
    for denoiser in (plain, fast):
        run = {"steps": 1, "guidance": Guidance(h_start=30.0, split=1.0)}
        assert rgas(denoiser, SCHEDULE, guide, start(canvas), **run).disc_calls == 1
    (untilted, expected), (_, found) = tilts
    assert found.dtype == expected.dtype == torch.float32
    assert found.shape == (len(expected), 320)
    assert bool((found[:, 299:] == -torch.inf).all())
    difference = (found[:, :299] - expected).abs().max()
    assert difference < 0.1 * (expected - untilted).abs().max()


@devices
def test_the_gradient_of_a_mean_is_that_of_the_sum_over_the_masks(device, monkeypatch):
    """Text by text, whose numbers of masks differ: 12 where nothing is given, 9 and 1 elsewhere."""
    plain, _, guide = parts(device)
    tokens, found = torch.full((3, 12), 299), {}
    tokens[1, 3:6], tokens[2, :11] = 7, 3
    fused_tilt = guides.fused_tilt
    for reward in ("sum", "mean"):
        slopes_seen = found[reward] = []

        def listen(logits, slope, *given, seen=slopes_seen):
            seen.append(slope)
            return fused_tilt(logits, slope, *given)

        monkeypatch.setattr(guides, "fused_tilt", listen)
        guidance = Guidance(split=1.0, reward=reward, h_start=1e-9)
        canvas = Canvas(tokens.to(device), 299, torch.arange(3, device=device))
        rgas(plain, SCHEDULE, guide, start(canvas), steps=1, guidance=guidance)
    (total,), (mean,) = found["sum"], found["mean"]
    masks = torch.tensor([12.0] * 12 + [9.0] * 9 + [1.0], dtype=total.dtype, device=device)
    assert total.abs().max() > 1e-6
    torch.testing.assert_close(mean, total / masks[:, None])


@devices
def test_a_captured_pass_of_damaged_weights_is_noticed(device):
    _, fast, guide = parts(device)
    with torch.no_grad():
        fast.network.output_layer.linear.bias[3] = torch.nan
    damaged, canvas = GraphDenoiser(fast.network, SCHEDULE), Canvas.blank(2, 12, 299, device=device)
    with pytest.raises(UserError, match="not numbers"):
        rgas(damaged, SCHEDULE, guide, start(canvas), steps=4)


@pytest.mark.gpu
@pytest.mark.parametrize("fast_guide", [False, True])
def test_nobody_waits_for_the_gpu_but_once_a_reranking_step(fast_guide, monkeypatch):
    """Torch's own count, from the first step on; the result is read twice."""
    _, fast, guide = parts("cuda")
    guide = DiscriminatorGuide(guide.discriminator, SCHEDULE, fast=fast_guide)
    canvas = Canvas.blank(8, 12, 299, device="cuda")
    rgas(fast, SCHEDULE, guide, start(canvas), steps=6)

    def watched(*given):
        torch.cuda.set_sync_debug_mode("warn")
        return run_plan(*given)

    run_plan = guided.run
    monkeypatch.setattr(guided, "run", watched)
    try:
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            rgas(fast, SCHEDULE, guide, start(canvas), steps=6)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [str(w.message) for w in heard if "called a synchronizing" in str(w.message)]
    assert len(waits) <= 3 + 2, waits
