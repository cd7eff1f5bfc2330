"""Algorithm 2: laws by enumeration, gradients in closed form, costs.

That every token and path is that of a plain loop is in `test_every_sampler`.
"""

import warnings

import pytest
import torch
from tests.devices import DEVICES
from tests.random_models import randomise

from didi_instruct.config.model import ModelConfig, ScheduleConfig
from didi_instruct.data.oracle import OracleLanguage
from didi_instruct.errors import UserError
from didi_instruct.models import compile as fused
from didi_instruct.models.compile import Fused
from didi_instruct.models.discriminator import Discriminator
from didi_instruct.models.dit import DiT
from didi_instruct.process.schedule import LogLinear
from didi_instruct.sampling import guide as guides
from didi_instruct.sampling import guided
from didi_instruct.sampling.ancestral import ancestral
from didi_instruct.sampling.denoiser import network_denoiser
from didi_instruct.sampling.draw import DrawOptions
from didi_instruct.sampling.engines import cuda, cuda_graphs
from didi_instruct.sampling.engines.cuda import GraphDenoiser
from didi_instruct.sampling.guide import (
    DiscriminatorGuide,
    Guidance,
    mixed_vectors,
    slopes,
    tilted,
)
from didi_instruct.sampling.guided import rgas
from didi_instruct.sampling.state import PAD, Canvas

from .enumeration import assert_follows, follows, law_of_reranking, law_of_tilting
from .toys import LINEAR, MASK, TINY, Forbidden, L, LinearGuide, Toy, ToyGuide, toy_of

SHORT = OracleLanguage.tiny(slots=2, sentences=1)
BLANK = Canvas.blank(20_000, 4, 3)
SCHEDULE = LogLinear(1e-3)


def numbers(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def scalars(*values):
    return [torch.tensor(value, dtype=torch.float64) for value in values]


# The arithmetic of tilting


@pytest.mark.parametrize("clamp", [0.01, float("inf")])
def test_a_tilt_is_a_step_along_the_gradient_of_the_mixture(clamp):
    """Its closed form is the chain rule; columns of -inf beside rows of 0 change nothing."""
    logits, table, gradient = numbers(6, 9), numbers(9, 4, seed=1), numbers(6, 4, seed=2)
    leaf = logits.clone().requires_grad_()
    (chain_rule,) = torch.autograd.grad((mixed_vectors(leaf, table) * gradient).sum(), leaf)
    wide = torch.nn.functional.pad(logits, (0, 7), value=-torch.inf)
    padded = torch.nn.functional.pad(table, (0, 0, 0, 7))
    torch.testing.assert_close(mixed_vectors(wide, padded), mixed_vectors(logits, table))
    found = tilted(wide, slopes(gradient, padded, torch.float64), *scalars(3.0, clamp))
    torch.testing.assert_close(found[:, :9], logits + 3 * chain_rule.clamp(-clamp, clamp))
    assert bool((found[:, 9:] == -torch.inf).all())


def test_mixtures_of_16_bits_are_those_of_32():
    """Up to the rounding of what is mixed, 8 bits."""
    logits, table = numbers(384, 7).bfloat16(), numbers(7, 5, seed=1)
    wide = logits.double().softmax(-1) @ table
    torch.testing.assert_close(mixed_vectors(logits, table).double(), wide, rtol=0, atol=1e-6)
    narrow = mixed_vectors(logits, table.bfloat16())
    assert (narrow.double() - wide).abs().max() < 0.02 * wide.abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_slopes_of_narrow_numbers_are_summed_in_wide_ones(dtype):
    """As in float64 up to float32 rounding, where 16-bit results would be off by a thousandth."""
    gradient, table = (numbers(5, 768).to("cuda", dtype), numbers(640, 768).to("cuda", dtype))
    found = slopes(gradient, table, torch.float32)
    expected = gradient.double() @ table.double().T
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, atol=1e-3, rtol=1e-5)
    assert (found.to(dtype).double() - expected).abs().max() > 1e-2


def test_a_tilt_is_compiled_once(monkeypatch):
    """By dynamo itself, running the graph as it is: for all numbers of rows, all strengths."""
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    monkeypatch.setattr(fused, "compiled", lambda f: torch.compile(f, backend=counter))
    monkeypatch.setattr(fused, "fuses", lambda tensor: True)
    torch._dynamo.reset()
    tilt = Fused(tilted, "A tilt")
    for rows, h in ((5, 1.0), (1, 2.0), (3, 30.0), (8, 40.0)):
        given = numbers(rows, 192), numbers(rows, 192, seed=1), *scalars(h, 1.0)
        torch.testing.assert_close(tilt(*given), tilted(*given))
    assert counter.frame_count == 1


@pytest.mark.parametrize("device", DEVICES)
def test_the_gradient_of_a_mean_is_that_of_the_sum_over_the_masks(device, monkeypatch):
    """Text by text, whose numbers of masks differ: 12 where nothing is given, 9 and 1 elsewhere."""
    plain, _, guide = networks(device)
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
        rgas(plain, SCHEDULE, guide, canvas, steps=1, guidance=guidance)
    (total,), (mean,) = found["sum"], found["mean"]
    masks = torch.tensor([12.0] * 12 + [9.0] * 9 + [1.0], dtype=total.dtype, device=device)
    assert total.abs().max() > 1e-6
    torch.testing.assert_close(mean, total / masks[:, None])


# Laws


@pytest.mark.parametrize(
    ("steps", "h_start", "h_end", "reward"),
    [
        (1, 2.0, 2.0, "sum"),
        (1, -2.0, -2.0, "sum"),
        (2, 1.0, 4.0, "sum"),
        (3, -3.0, 3.0, "sum"),
        (1, 2.0, 2.0, "mean"),
        (2, 6.0, -4.0, "mean"),
    ],
)
def test_tilting_has_the_enumerated_law(steps, h_start, h_end, reward):
    """softmax(logits + h clamp(grad)) at t_n, h on a line; chi-square over 81 texts.

    The untilted sampler must fail the same test, or it would prove nothing.
    """
    guide, run = ToyGuide(3), {"steps": steps, "settings": DrawOptions(seed=1)}
    guidance = Guidance(h_start=h_start, h_end=h_end, split=1.0, clamp=0.3, reward=reward)
    assert guidance.scales(steps)[:: max(steps - 1, 1)] == [h_start, h_end][: min(steps, 2)]
    law = law_of_tilting(TINY, guide, guidance, steps)
    result = rgas(toy_of(), LINEAR, guide, BLANK, guidance=guidance, **run)
    assert result.log_prob is not None  # the tilted law is a function of the state: a path has one
    assert_follows(result.tokens, law, 3)
    assert not follows(ancestral(toy_of(), LINEAR, BLANK, **run).tokens, law, 3)


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("score", ["sum", "mean"])
@pytest.mark.parametrize("select", ["sample", "best"])
def test_reranking_has_the_enumerated_law(steps, score, select):
    """Two candidates, scored at t_{n-1}; chi-square over 9 texts, which ancestral samples fail."""
    guide, run = ToyGuide(3, scale=2.0), {"steps": steps, "settings": DrawOptions(seed=7)}
    guidance = Guidance(candidates=2, split=0.0, score=score, select=select)
    law, canvas = law_of_reranking(SHORT, guide, guidance, steps), Canvas.blank(20_000, 2, 3)
    result = rgas(toy_of(SHORT), LINEAR, guide, canvas, guidance=guidance, **run)
    assert result.log_prob is None
    assert_follows(result.tokens, law, 3)
    plain = ancestral(toy_of(SHORT), LINEAR, canvas, **run)
    # By the mean, the last step (here the only one) cannot tell candidates apart.
    assert follows(plain.tokens, law, 3) == (score == "mean" and steps == 1)


@pytest.mark.parametrize("split", [0.0, 0.5, 1.0])
def test_guidance_towards_a_known_reward_raises_it(split):
    """And h < 0 lowers it. Worth per token, 4,000 samples: 5 standard errors, 6e-7 at most."""
    guide = LinearGuide([0.0, 1.0, -1.0])

    def worths(h, candidates):
        guidance = Guidance(h_start=h, h_end=h, candidates=candidates, split=split)
        canvas = Canvas.blank(4000, 4, 3)
        result = rgas(toy_of(), LINEAR, guide, canvas, steps=4, guidance=guidance)
        worth = guide.worth[result.tokens].mean(1)
        return worth.mean(), worth.std() / len(worth) ** 0.5

    plain, error = worths(0.0, 1)
    assert worths(5.0, 4)[0] > plain + 5 * 2**0.5 * error
    if split > 0:
        assert worths(-5.0, 1)[0] < plain - 5 * 2**0.5 * error


@pytest.mark.parametrize("masks", [1, 2])
@pytest.mark.parametrize("way", [{"grid": "cosine"}, {"order": "streams"}])
@pytest.mark.parametrize("guide", [Forbidden(), None], ids=["unasked", "none"])
def test_without_h_and_with_one_candidate_it_is_ancestral(masks, way, guide):
    """Bit for bit: tokens, log-probabilities, passes; no guide is asked."""
    canvas = Canvas(torch.full((9, L), MASK), MASK, torch.arange(9), masks=masks)
    run = {"steps": 5, "settings": DrawOptions(temperature=0.9, top_p=0.95), **way}
    expected = ancestral(Toy(), LINEAR, canvas, **run)
    guidance = Guidance(h_start=0.0, h_end=0.0, candidates=1)
    result = rgas(Toy(), LINEAR, guide, canvas, guidance=guidance, **run)
    assert torch.equal(result.tokens, expected.tokens)
    assert torch.equal(result.log_prob, expected.log_prob)
    assert (result.nfe, result.passes, result.disc_calls) == (5, expected.passes, 0)


def test_a_callback_sees_the_chosen_candidate():
    """With the probability that the denoiser gave to its tokens."""
    canvas, seen, guidance = Canvas.blank(30, 4, 3), [], Guidance(split=0.0)
    run = {"steps": 3, "guidance": guidance, "callback": seen.append}
    rgas(toy_of(), LINEAR, ToyGuide(3), canvas, **run)
    for before, step in zip([canvas.tokens, *(s.tokens for s in seen[:-1])], seen, strict=True):
        p = TINY.denoiser(before).exp().gather(-1, step.tokens.clamp(max=2)[..., None])
        torch.testing.assert_close(step.confidence[step.revealed], p[..., 0][step.revealed])


# Costs


@pytest.mark.parametrize(
    ("steps", "guidance", "disc_calls", "passes"),
    [
        (1, Guidance(split=1.0), 1, (1 + 3) / 64),
        (1, Guidance(), 4, 1 / 64 + 4),
        (2, Guidance(), 1 + 4, (1 + 3) / 64 + 1 + 4),
        (2, Guidance(candidates=1), 1, (1 + 3) / 64 + 1),
        (4, Guidance(candidates=3), 2 + 2 * 3, (1 + 3) / 64 + (1 + 3) + 2 * (1 + 3)),
        (3, Guidance(split=0.4, h_start=0.0, candidates=2), 2 * 2, 1 / 64 + 2 * (1 + 2)),
    ],
)
def test_counts_are_exact(steps, guidance, disc_calls, passes):
    """First steps are shared and a backward pass counts twice; 40 positions leave none at rest."""
    canvas = Canvas.blank(64, 40, 3)
    denoiser = Toy(lambda z, t: torch.zeros(*z.shape, 3), 3)
    result = rgas(denoiser, LINEAR, ToyGuide(3), canvas, steps=steps, guidance=guidance)
    found = result.nfe, result.disc_calls, result.passes
    assert found == (steps, disc_calls, pytest.approx(passes))


# Passes by an engine


class Overwritten:
    """What a graph is, on a CPU: buffers of one shape, a result that the next run overwrites."""

    def __init__(self, function, inputs, pool=None, **options):
        self.function, self.buffers = function, [tensor.clone() for tensor in inputs]
        self.output = function(*self.buffers).clone()

    @torch.no_grad()
    def __call__(self, *values):
        for buffer, value in zip(self.buffers, values, strict=True):
            buffer[: len(value)].copy_(value)
        return self.output.copy_(self.function(*self.buffers))[: len(values[0])]


def networks(device, dtype=torch.float64, **changes):
    """Plain and captured denoisers of a network of 299 tokens, and a guide."""
    shape = {"layers": 2, "hidden": 16, "heads": 2, "cond_dim": 8, "vocab_size": 300, "length": 12}
    config = ModelConfig(**shape, **changes, schedule=ScheduleConfig(eps=1e-3))
    network, other = (randomise(DiT(config), seed).to(device, dtype).eval() for seed in (0, 1))
    critic = randomise(Discriminator.from_network(other), 2).to(device, dtype).eval()
    fast = GraphDenoiser(network, SCHEDULE)
    return network_denoiser(network, SCHEDULE), fast, DiscriminatorGuide(critic, SCHEDULE)


def starts(device):
    """Nothing given, the same to all, something; padding, for all, for some."""
    blank, columns = torch.full((6, 12), 299), torch.arange(12)
    given = blank.clone()
    given[1, 3:6], given[2], given[4, :11] = 7, 5, 3
    for_some = blank.masked_fill(columns >= 8, PAD)
    for_some[0, :3] = 7
    canvases = [
        (blank, ()), (blank.masked_fill(columns % 5 == 0, 9), ()), (given, ()),
        (blank.masked_fill(columns >= 8, PAD), (3,)), (for_some, ()), (blank[:1], ()),
    ]  # fmt: skip
    for tokens, stream in canvases:
        samples = torch.arange(len(tokens), device=device)
        yield Canvas(tokens.to(device), 299, samples, stream)


ENGINE_RUNS = {
    "plain": ({}, {}),
    "timed": ({"time_conditioning": True}, {"settings": DrawOptions(seed=4), "grid": "cosine"}),
    "restricted": ({}, {"settings": DrawOptions(temperature=0.7, top_p=0.9)}),
    "streams": ({}, {"order": "streams"}),
    "many steps": ({}, {"steps": 40}),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ENGINE_RUNS)
@pytest.mark.parametrize(
    "guidance",
    [
        Guidance(h_start=3.0, h_end=4.0),
        Guidance(h_start=-3.0, h_end=3.0, split=1.0, clamp=0.1),
        Guidance(h_start=3.0, h_end=3.0, candidates=1),
        Guidance(h_start=30.0, h_end=30.0, candidates=1, reward="mean"),
        Guidance(h_start=0.0, h_end=5.0, split=0.8, candidates=2),
        Guidance(split=0.0, select="best", score="mean", candidates=3),
        Guidance(split=0.0, candidates=3),
    ],
    ids=["both", "tilting", "tilting then nothing", "means", "from nothing", "best", "re-ranking"],
)
def test_captured_passes_guide_alike(name, guidance, device, monkeypatch):
    """Tokens, paths, counts and what a callback sees; in float64, so rounding changes no draw."""
    monkeypatch.setattr(cuda_graphs, "compiled", lambda function, **options: function)
    monkeypatch.setattr(cuda, "ROWS_AT_ONCE", 17)
    if device == "cpu":
        monkeypatch.setattr(cuda, "capture", Overwritten)
    changes, options = ENGINE_RUNS[name]
    plain, fast, guide = networks(device, **changes)
    for canvas in starts(device):
        run = {"canvas": canvas, "steps": 6, "guidance": guidance} | options
        found, expected = [], []
        ours = rgas(fast, SCHEDULE, guide, callback=found.append, **run)
        theirs = rgas(plain, SCHEDULE, guide, callback=expected.append, **run)
        assert torch.equal(ours.tokens, theirs.tokens)
        assert torch.equal(rgas(fast, SCHEDULE, guide, **run).tokens, theirs.tokens)
        assert (ours.nfe, ours.passes, ours.disc_calls) == (
            theirs.nfe, theirs.passes, theirs.disc_calls,
        )  # fmt: skip
        assert (ours.log_prob is None) == (theirs.log_prob is None)
        if theirs.log_prob is not None:
            torch.testing.assert_close(ours.log_prob, theirs.log_prob)
        for one, other in zip(found, expected, strict=True):
            assert (one.index, one.steps, one.time) == (other.index, other.steps, other.time)
            assert torch.equal(one.tokens, other.tokens)
            assert torch.equal(one.revealed, other.revealed)
            torch.testing.assert_close(one.confidence, other.confidence)


@pytest.mark.parametrize("device", DEVICES)
def test_narrow_numbers_tilt_alike(device, monkeypatch):
    """Of 16-bit networks, up to the rounding of their results; columns of padding stay -inf."""
    plain, fast, guide = networks(device, torch.bfloat16)
    tilts, fused_tilt = [], guides.fused_tilt

    def listen(logits, *given):
        tilts.append((logits, fused_tilt(logits, *given)))
        return tilts[-1][1]

    monkeypatch.setattr(guides, "fused_tilt", listen)
    canvas = list(starts(device))[2]
    for denoiser in (plain, fast):
        run = {"steps": 1, "guidance": Guidance(h_start=30.0, split=1.0)}
        assert rgas(denoiser, SCHEDULE, guide, canvas, **run).disc_calls == 1
    (untilted, expected), (_, found) = tilts
    assert found.dtype == expected.dtype == torch.float32
    assert found.shape == (len(expected), 320)
    assert bool((found[:, 299:] == -torch.inf).all())
    difference = (found[:, :299] - expected).abs().max()
    assert difference < 0.1 * (expected - untilted).abs().max()


@pytest.mark.parametrize("device", DEVICES)
def test_a_captured_pass_of_damaged_weights_is_noticed(device):
    _, fast, guide = networks(device)
    with torch.no_grad():
        fast.network.output_layer.linear.bias[3] = torch.nan
    damaged = GraphDenoiser(fast.network, SCHEDULE)
    with pytest.raises(UserError, match="not numbers"):
        rgas(damaged, SCHEDULE, guide, Canvas.blank(2, 12, 299, device=device), steps=4)


@pytest.mark.gpu
@pytest.mark.parametrize("fast_guide", [False, True])
def test_nobody_waits_for_the_gpu_but_once_a_reranking_step(fast_guide, monkeypatch):
    """Torch's own count, from the first step on; the result is read twice."""
    _, fast, guide = networks("cuda")
    guide = DiscriminatorGuide(guide.discriminator, SCHEDULE, fast=fast_guide)
    run = {"canvas": Canvas.blank(8, 12, 299, device="cuda"), "steps": 6}
    rgas(fast, SCHEDULE, guide, **run)

    def watched(*given):
        torch.cuda.set_sync_debug_mode("warn")
        return run_plan(*given)

    run_plan = guided.run
    monkeypatch.setattr(guided, "run", watched)
    try:
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            rgas(fast, SCHEDULE, guide, **run)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [str(w.message) for w in heard if "called a synchronizing" in str(w.message)]
    assert len(waits) <= 3 + 2, waits


# Settings


@pytest.mark.parametrize(("split", "steps", "tilting"), [(0.5, 5, 2), (0.29, 100, 29), (1, 3, 3)])
def test_the_first_steps_tilt(split, steps, tilting):
    """floor(split * steps) of them, unspoilt by rounding, with h on a line."""
    scales = Guidance(split=split, h_start=1.0, h_end=2.0).scales(steps)
    assert scales == pytest.approx(torch.linspace(1, 2, tilting).tolist())


def test_without_settings_it_is_that_of_the_paper():
    """Half of the steps tilt with h from 30 to 40, the others choose among four."""
    assert Guidance().scales(4) == [30.0, 40.0]
    assert Guidance().candidates == 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"candidates": 0}, "candidates is 0: use 1"),
        ({"split": 1.5}, "split is 1.5"),
        ({"split": -0.1}, "split is -0.1"),
        ({"split": float("nan")}, "split is nan"),
        ({"h_start": float("inf")}, "h_start is inf"),
        ({"h_end": float("nan")}, "h_end is nan"),
        ({"clamp": 0.0}, "clamp is 0.0"),
        ({"score": "total"}, "`total` is not a guidance.score. Known: sum, mean."),
        ({"reward": "most"}, "`most` is not a guidance.reward. Known: sum, mean."),
        ({"select": "worst"}, "`worst` is not a guidance.select. Known: sample, best."),
    ],
)
def test_bad_guidance_is_refused(settings, message):
    with pytest.raises(UserError, match=message):
        Guidance(**settings)
