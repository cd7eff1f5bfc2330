"""Guided sampling on the fast path: the same law, by enumeration, and the same tokens."""

import warnings

import pytest
import torch
from didi_instruct.sampling.chain import Canvas, Chain, Draw, Purpose
from didi_instruct.sampling.guidance import Guidance
from didi_instruct.sampling.network import Guide, NetworkDenoiser
from didi_instruct.sampling.throws import Throws
from torch.utils._python_dispatch import TorchDispatchMode

from didi_instruct.errors import UserError
from didi_instruct.models import graphs
from didi_instruct.models.discriminator import build_discriminator
from didi_instruct.models.network import Mixture
from didi_instruct.process.schedule import LogLinear
from didi_instruct.sampling import guided_planned
from didi_instruct.sampling.ancestral import ancestral
from didi_instruct.sampling.guided import rgas, tilted_logits

from ..models.buffered import Buffered  # noqa: TID252
from .test_fast import L, Spelled, V, denoisers, fast_devices, make
from .test_guided import chi_square, law_of_reranking, law_of_tilting

BOTH = Guidance(h_start=3.0, h_end=4.0)
SIZE = {"length": 12, "vocab_size": 300}
MASK = 299


def guided_pair(device, **changes):
    """Plain and fast: denoiser and guide of each, and the schedule."""
    plain, fast, schedule = denoisers(device, **changes)
    critic, _ = make(device, build_discriminator, **changes)
    guide = Guide(critic, schedule)
    return plain, fast, guide, schedule


def renewed(denoiser):
    """A denoiser of the weights as they are now."""
    return NetworkDenoiser(denoiser.network, denoiser.schedule, denoiser.graphs)


def some_tokens(device):
    """Given tokens, a sample at rest, and others."""
    tokens = torch.full((6, 12), MASK)
    tokens[1, 3:6] = 7
    tokens[2] = 5
    tokens[4, :11] = 3
    return tokens.to(device)


def canvases(device):
    """Nothing given, the same to all, something; positions that stay masks, for all, for some."""
    samples = torch.arange(6, device=device)
    blank, tokens = torch.full((6, 12), MASK, device=device), some_tokens(device)
    allowed = torch.ones(6, 12, dtype=torch.bool, device=device)
    allowed[:, 8:] = False
    for_some = allowed.clone()
    for_some[0, :3] = False
    return [
        Canvas(blank, MASK, samples),
        Canvas(blank.index_fill(1, torch.tensor([0, 5], device=device), 9), MASK, samples),
        Canvas(tokens, MASK, samples),
        Canvas(blank, MASK, samples, allowed=allowed[0], stream=(3,)),
        Canvas(blank, MASK, samples, allowed=for_some),
        Canvas(blank[:1], MASK, samples[:1]),
    ]


GUIDANCES = {
    "both": BOTH,
    "tilting": Guidance(h_start=-3.0, h_end=3.0, split=1.0, clamp=0.1),
    "tilting-then-nothing": Guidance(h_start=3.0, h_end=3.0, candidates=1),
    "tilting-from-nothing": Guidance(h_start=0.0, h_end=5.0, split=0.8, candidates=2),
    "re-ranking": Guidance(split=0.0, select="best", score="mean", candidates=3),
    "re-ranking-by-sums": Guidance(split=0.0, candidates=3),
}


@fast_devices
@pytest.mark.parametrize("guidance", GUIDANCES.values(), ids=GUIDANCES)
@pytest.mark.parametrize(
    ("changes", "settings", "options"),
    [
        ({}, Draw(), {}),
        ({"time_conditioning": True}, Draw(seed=4), {"grid": "cosine"}),
        ({}, Draw(temperature=0.7, top_p=0.9), {}),
        ({}, Draw(), {"order": "streams"}),
        ({}, Draw(), {"steps": 40}),
    ],
    ids=["plain", "timed", "restricted", "streams", "many-steps"],
)
def test_tokens_paths_and_counts_are_those_of_the_plain_path(
    guidance, changes, settings, options, device, monkeypatch
):
    """In float64, so that rounding changes no draw; a callback sees the same, too."""
    monkeypatch.setattr(graphs, "compiled", lambda function, dynamic=None: function)
    monkeypatch.setattr(guided_planned, "ROWS_AT_ONCE", 17)
    if device == "cpu":
        monkeypatch.setattr(graphs, "capture", Buffered)
    plain, fast, guide, schedule = guided_pair(device, **SIZE, **changes)
    for canvas in canvases(device):
        run = {"canvas": canvas, "steps": 6, "settings": settings, "guidance": guidance} | options
        found, expected = [], []
        ours = rgas(fast, schedule, guide, callback=found.append, **run)
        theirs = rgas(plain, schedule, guide, callback=expected.append, **run)
        unseen = rgas(fast, schedule, guide, **run)
        assert torch.equal(ours.tokens, theirs.tokens)
        assert torch.equal(unseen.tokens, theirs.tokens)
        assert (ours.nfe, ours.disc_calls) == (theirs.nfe, theirs.disc_calls)
        assert (ours.log_prob is None) == (theirs.log_prob is None)
        if theirs.log_prob is not None:
            torch.testing.assert_close(ours.log_prob, theirs.log_prob)
        # A chain also shares a pass among samples that are alike after the first one.
        assert theirs.passes - 1e-9 <= ours.passes <= 1.5 * theirs.passes
        for one, other in zip(found, expected, strict=True):
            assert (one.index, one.steps, one.time) == (other.index, other.steps, other.time)
            assert torch.equal(one.tokens, other.tokens)
            assert torch.equal(one.revealed, other.revealed)
            torch.testing.assert_close(one.confidence, other.confidence)


def test_passes_count_what_ran():
    """A first step of one row for all, forward and backward; then all rows, and four candidates."""
    _, fast, guide, schedule = guided_pair("cpu", **SIZE)
    result = rgas(fast, schedule, guide, Canvas.blank(6, 12, MASK), steps=3, guidance=BOTH)
    assert result.passes == pytest.approx((1 + 3) / 6 + 2 * (1 + 4))
    assert result.disc_calls == 1 + 2 * 4


class Told(Spelled):
    """A language for the enumerations of `test_guided`, which name a time."""

    def denoiser(self, z, t=None):
        return super().denoiser(z)


class Near:
    """A guide on a device for tensors of the CPU."""

    def __init__(self, guide, device):
        self.guide, self.device = guide, device
        self.embedding = guide.embedding.detach().cpu()

    def embed(self, z):
        return self.guide.discriminator.vectors.detach()[z.to(self.device)].cpu()

    def score(self, embeddings, attended, t):
        z = attended.long().to(self.device)
        sigma = self.guide.schedule.sigma(t.to(self.device))
        mixture = Mixture(None, embeddings.to(self.device))
        return self.guide.discriminator(z, sigma, mixture=mixture).cpu()


@fast_devices
@pytest.mark.parametrize("steps", [1, 3])
def test_tilting_has_the_enumerated_law(steps, device):
    """Chi-square over 81 texts, 80 degrees, 6e-5; without tilting it must fail."""
    plain, fast, guide, _ = guided_pair(device)
    schedule = LogLinear(0.0)
    guidance = Guidance(h_start=3.0, h_end=9.0, split=1.0, clamp=0.3)
    law = law_of_tilting(Told(plain, device), Near(guide, device), guidance, steps)
    run = {"canvas": Canvas.blank(20_000, L, V, device=device), "steps": steps}
    found = rgas(fast, schedule, guide, guidance=guidance, **run)
    assert chi_square(found.tokens.cpu(), law, V) < 138
    untilted = ancestral(fast, schedule, **run)
    assert chi_square(untilted.tokens.cpu(), law, V) > 138


@fast_devices
@pytest.mark.parametrize("steps", [1, 3])
def test_reranking_has_the_enumerated_law(steps, device):
    """Two candidates, chi-square over 9 texts, 8 degrees, 3e-5; ancestral sampling must fail."""
    plain, fast, guide, _ = guided_pair(device, length=2)
    with torch.no_grad():
        guide.discriminator.output_layer.main[2].weight_orig.mul_(20)
        guide.discriminator.output_layer.main[2].weight_v.mul_(0.05)
    schedule = LogLinear(0.0)
    language = Told(plain, device)
    language.length = 2
    guidance = Guidance(split=0.0, candidates=2)
    law = law_of_reranking(language, Near(guide, device), guidance, steps)
    run = {"canvas": Canvas.blank(20_000, 2, V, device=device), "steps": steps}
    found = rgas(fast, schedule, guide, guidance=guidance, **run)
    assert chi_square(found.tokens.cpu(), law, V) < 35
    unguided = ancestral(fast, schedule, **run)
    assert chi_square(unguided.tokens.cpu(), law, V) > 35


@fast_devices
def test_narrow_numbers_tilt_alike(device, monkeypatch):
    """Of 16-bit networks the planned tilt is the plain one up to the rounding of its inputs."""
    plain, fast, guide, schedule = guided_pair(device, **SIZE)
    plain.network.bfloat16()
    plain, fast = renewed(plain), renewed(fast)
    guide.discriminator.bfloat16()
    drawn = []
    draw = Chain.draw

    def heard(chain, logits, numbers, **options):
        drawn.append(logits)
        return draw(chain, logits, numbers, **options)

    monkeypatch.setattr(Chain, "draw", heard)
    canvas = Canvas(some_tokens(device), MASK, torch.arange(6, device=device))
    guidance = Guidance(h_start=30.0, split=1.0)
    result = rgas(fast, schedule, guide, canvas, steps=1, guidance=guidance)
    chain = Chain(plain, canvas, Draw(), steps=1)
    expected = tilted_logits(chain, guide, 1.0, chain.masked, 30.0, 1.0)
    untilted = plain.rows(chain.z, torch.ones(6, device=device), chain.masked)
    assert result.disc_calls == 1
    assert drawn[0].dtype == torch.float32
    assert drawn[0].shape == (len(expected), 320)
    assert bool((drawn[0][:, MASK:] == -torch.inf).all())
    difference = (drawn[0][:, :MASK] - expected).abs()
    assert float(difference.max()) < 0.1 * float((expected - untilted).abs().max())


def test_padding_of_the_vocabulary_weighs_nothing():
    """-inf beside logits, 0 below embeddings; both follow the weights."""
    _, fast, guide, _ = guided_pair("cpu", **SIZE)
    z, place = torch.full((2, 12), MASK), torch.tensor([3, 0, 17])
    wide = fast.wide_logits(*fast.states_at(z, 0.5, place))
    assert wide.shape == (3, 320)
    assert wide.is_contiguous()
    torch.testing.assert_close(wide[:, :MASK], fast.at(z, 0.5, place))
    assert bool((wide[:, MASK:] == -torch.inf).all())
    before = guide.table
    assert guide.table is before
    with torch.no_grad():
        guide.discriminator.vectors.mul_(2)
    assert torch.equal(guide.table[:MASK], guide.embedding)
    assert torch.equal(guide.table[:MASK], 2 * before[:MASK])
    assert not guide.table[MASK:].any()
    assert len(guide.table) == 320


class Waits(TorchDispatchMode):
    """Counts what would make a CPU wait for a GPU."""

    def __init__(self):
        super().__init__()
        self.heard = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        chosen = args[1] if name.startswith(("aten.index.", "aten.index_put")) else ()
        waits = any(word in name for word in ("nonzero", "_local_scalar", "masked_sel", "unique"))
        if waits or any(index is not None and index.dtype == torch.bool for index in chosen):
            self.heard.append(name)
        return func(*args, **(kwargs or {}))


def test_only_reranking_waits_and_once(monkeypatch):
    """No wait in a tilting step; the numbers that re-ranking reads are two."""
    _, fast, guide, schedule = guided_pair("cpu", **SIZE)
    read, waits = [], {}
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: read.append(x.shape) or tolist(x))
    for name in ("known_step", "rerank"):
        step = getattr(guided_planned, name)

        def watched(*given, step=step, name=name):
            read.clear()
            with Waits() as count:
                result = step(*given)
            waits.setdefault(name, []).append((count.heard, list(read)))
            return result

        monkeypatch.setattr(guided_planned, name, watched)
    canvas = Canvas(some_tokens("cpu"), MASK, torch.arange(6))
    rgas(fast, schedule, guide, canvas, steps=6, guidance=BOTH)
    assert waits["known_step"] == [([], [])] * 3
    assert waits["rerank"] == [([], [(2,)])] * 3


@pytest.mark.gpu
@pytest.mark.parametrize("fast_guide", [False, True])
def test_nobody_waits_for_the_gpu_but_once_a_reranking_step(fast_guide, monkeypatch):
    """Torch's own count, from the first step on; the result is read twice."""
    _, fast, guide, schedule = guided_pair("cuda", **SIZE)
    guide = Guide(guide.discriminator, schedule, fast=fast_guide)
    run = {"canvas": Canvas.blank(8, 12, MASK, device="cuda"), "steps": 6, "guidance": BOTH}
    rgas(fast, schedule, guide, **run)
    known_step = guided_planned.known_step

    def watched(*given):
        torch.cuda.set_sync_debug_mode("warn")
        return known_step(*given)

    monkeypatch.setattr(guided_planned, "known_step", watched)
    try:
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            rgas(fast, schedule, guide, **run)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [str(w.message) for w in heard if "called a synchronizing" in str(w.message)]
    assert len(waits) <= 3 + 2, waits


@pytest.mark.parametrize("num", [1, 2, 4])
def test_numbers_of_candidates_are_those_made_in_time(num, monkeypatch):
    """Bit for bit, in any order of steps, made ahead for few steps or for many."""
    canvas = Canvas(torch.full((3, 5), V), V, torch.tensor([4, 0, 9]), stream=(7,))
    for room in (1, 100, 2**21):
        monkeypatch.setattr("didi_instruct.sampling.throws.NOISE_ELEMENTS", room)
        chain = Chain(lambda z, t: None, canvas, Draw(seed=5), steps=9)
        throws = Throws(chain, num)
        for purpose in (Purpose.REVEAL, Purpose.TOKEN):
            for step in (0, 1, 8, 3, 2):
                streams = [(purpose, step), *((purpose, step, m) for m in range(1, num))]
                expected = torch.stack([chain.uniforms(*stream) for stream in streams])
                assert torch.equal(throws(purpose, step), expected)
        for step in (0, 8):
            assert torch.equal(throws.select(step), chain.uniforms(Purpose.SELECT, step)[:, 0])


def test_a_guide_of_other_tokens_is_refused():
    _, fast, _, schedule = guided_pair("cpu", **SIZE)
    critic, _ = make(
        "cpu", build_discriminator, length=12, vocab_size=303
    )  # both are padded to 320
    guide, canvas = Guide(critic, schedule), Canvas.blank(2, 12, MASK)
    with pytest.raises(UserError, match="knows 302 tokens and the denoiser 299"):
        rgas(fast, schedule, guide, canvas, steps=2)


@fast_devices
def test_damaged_weights_are_noticed(device):
    _, fast, guide, schedule = guided_pair(device, **SIZE)
    with torch.no_grad():
        fast.network.output_layer.linear.bias[3] = torch.nan
    fast = renewed(fast)
    with pytest.raises(UserError, match="not numbers"):
        rgas(fast, schedule, guide, Canvas.blank(2, 12, MASK, device=device), steps=4)
