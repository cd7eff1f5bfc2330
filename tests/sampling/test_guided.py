"""Algorithm 2: laws by enumeration, gradients in closed form, costs.

That every token and path is that of a plain loop is in `test_every_sampler`.
"""

import pytest
import torch

from didi_instruct.data.oracle import OracleLanguage
from didi_instruct.errors import UserError
from didi_instruct.models import compile as fused
from didi_instruct.models.compile import Fused
from didi_instruct.sampling.ancestral import ancestral
from didi_instruct.sampling.guide import Guidance, mixed_vectors, slopes, tilted
from didi_instruct.sampling.guided import rgas
from didi_instruct.sampling.state import Canvas

from .enumeration import assert_follows, follows, law_of_reranking, law_of_tilting
from .toys import (
    LINEAR,
    MASK,
    TINY,
    Forbidden,
    L,
    Toy,
    ToyGuide,
    blank,
    start,
    toy_of,
)

SHORT = OracleLanguage.tiny(slots=2, sentences=1)
BLANK = Canvas.blank(20_000, 4, 3)


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
    guide = ToyGuide(3)
    guidance = Guidance(h_start=h_start, h_end=h_end, split=1.0, clamp=0.3, reward=reward)
    assert guidance.scales(steps)[:: max(steps - 1, 1)] == [h_start, h_end][: min(steps, 2)]
    law = law_of_tilting(TINY, guide, guidance, steps)
    result = rgas(toy_of(), LINEAR, guide, start(BLANK, seed=1), steps=steps, guidance=guidance)
    assert result.log_prob is not None  # the tilted law is a function of the state: a path has one
    assert_follows(result.tokens, law, 3)
    plain = ancestral(toy_of(), LINEAR, start(BLANK, seed=1), steps=steps)
    assert not follows(plain.tokens, law, 3)


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("score", ["sum", "mean"])
@pytest.mark.parametrize("select", ["sample", "best"])
def test_reranking_has_the_enumerated_law(steps, score, select):
    """Two candidates, scored at t_{n-1}; chi-square over 9 texts, which ancestral samples fail."""
    guide, given, run = ToyGuide(3, scale=2.0), (20_000, 2, 3), {"steps": steps}
    guidance = Guidance(candidates=2, split=0.0, score=score, select=select)
    law = law_of_reranking(SHORT, guide, guidance, steps)
    result = rgas(toy_of(SHORT), LINEAR, guide, blank(*given, seed=7), guidance=guidance, **run)
    assert result.log_prob is None
    assert_follows(result.tokens, law, 3)
    plain = ancestral(toy_of(SHORT), LINEAR, blank(*given, seed=7), **run)
    # By the mean, the last step (here the only one) cannot tell candidates apart.
    assert follows(plain.tokens, law, 3) == (score == "mean" and steps == 1)


@pytest.mark.parametrize("masks", [1, 2])
@pytest.mark.parametrize("way", [{"grid": "cosine"}, {"order": "streams"}])
@pytest.mark.parametrize("guide", [Forbidden(), None], ids=["unasked", "none"])
def test_without_h_and_with_one_candidate_it_is_ancestral(masks, way, guide):
    """Bit for bit: tokens, log-probabilities, passes; no guide is asked."""
    canvas = Canvas(torch.full((9, L), MASK), MASK, torch.arange(9), masks=masks)
    expected, result = (start(canvas, temperature=0.9, top_p=0.95) for _ in range(2))
    expected = ancestral(Toy(), LINEAR, expected, steps=5, **way)
    guidance = Guidance(h_start=0.0, h_end=0.0, candidates=1)
    result = rgas(Toy(), LINEAR, guide, result, guidance=guidance, steps=5, **way)
    assert torch.equal(result.tokens, expected.tokens)
    assert torch.equal(result.log_prob, expected.log_prob)
    assert (result.nfe, result.passes, result.disc_calls) == (5, expected.passes, 0)


def test_a_callback_sees_the_chosen_candidate():
    """With the probability that the denoiser gave to its tokens."""
    seen, masks = [], torch.full((30, 4), 3)
    state = blank(30, 4, 3, seen.append)
    rgas(toy_of(), LINEAR, ToyGuide(3), state, steps=3, guidance=Guidance(split=0.0))
    for before, step in zip([masks, *(s.tokens for s in seen[:-1])], seen, strict=True):
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
    state = blank(64, 40, 3)
    denoiser = Toy(lambda z, t: torch.zeros(*z.shape, 3), 3)
    result = rgas(denoiser, LINEAR, ToyGuide(3), state, steps=steps, guidance=guidance)
    found = result.nfe, result.disc_calls, result.passes
    assert found == (steps, disc_calls, pytest.approx(passes))


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
    ],
)
def test_bad_guidance_is_refused(settings, message):
    with pytest.raises(UserError, match=message):
        Guidance(**settings)
