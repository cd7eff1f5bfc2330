"""Steps that share a code: their law and their log-probability, by enumeration."""

import math

import pytest
import torch

from didi_instruct.sampling.ancestral import ancestral
from didi_instruct.sampling.infill import Gap, Template, gap_lengths
from didi_instruct.sampling.state import Canvas
from didi_instruct.sampling.variants import blocks, first_hitting

from .enumeration import all_masked, assert_follows, masked_step, texts_of
from .toys import LINEAR, Toy, random_function, start

V, L, K = 3, 3, 2
FUNCTION = random_function(V, L, seed=5)


class Coded:
    """A language as enumeration asks it: the laws of one code."""

    num_tokens, length = V, L

    def __init__(self, code=0, temperature=1.0):
        self.code, self.temperature = code, temperature

    def denoiser(self, z):
        shown = z.where(z != V, V + self.code)
        return (FUNCTION(shown, torch.ones(len(z))) / self.temperature).log_softmax(-1)


def timeless(z, t):
    return FUNCTION(z, torch.ones(len(z)))


def exact_law(steps):
    """Law of ancestral samples: each step is an even mixture over codes of independent draws."""
    mass = all_masked(Coded())
    for n in range(steps):
        each = [masked_step(Coded(code), mass, 1 / (steps - n)) for code in range(K)]
        mass = sum(each) / K
    return texts_of(mass, V, L)


def canvas_of(num, first=0):
    return Canvas(torch.full((num, L), V), V, torch.arange(first, first + num), masks=K)


def draw(num, steps, *, denoiser=None, callback=None, greedy_tail=False, **settings):
    denoiser, state = denoiser or Toy(timeless, V), start(canvas_of(num), callback, **settings)
    return ancestral(denoiser, LINEAR, state, steps=steps, greedy_tail=greedy_tail)


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_samples_follow_the_enumerated_mixture(steps):
    assert_follows(draw(20_000, steps, seed=3).tokens, exact_law(steps), V)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("greedy_tail", [False, True])
def test_the_path_knows_its_probability_under_the_mixture(steps, temperature, greedy_tail):
    """Step by step: the code is summed out, not the one that was drawn.

    The greedy last step takes the likeliest tokens of its code: of the codes, those that agree
    count.
    """
    seen = []
    drawn = draw(
        64, steps, seed=1, temperature=temperature, callback=seen.append, greedy_tail=greedy_tail
    )
    expected, before = torch.zeros(64, dtype=torch.float64), canvas_of(64).tokens
    for n, step in enumerate(seen):
        each = []
        for code in range(K):
            law = Coded(code, temperature).denoiser(before)
            if greedy_tail and n == steps - 1:
                law = torch.where(law == law.amax(-1, keepdim=True), 0.0, -math.inf)
            own = law.gather(-1, step.tokens.clamp(max=V - 1)[..., None]).squeeze(-1)
            each.append(torch.where(step.revealed, own, 0.0).sum(1))
        expected += torch.stack(each).logsumexp(0) - math.log(K)
        before = step.tokens
    torch.testing.assert_close(drawn.log_prob, expected)
    assert drawn.log_prob.isfinite().all()


def test_measuring_costs_no_counted_pass_and_changes_no_sample():
    """The first step costs a pass for each of the 2 codes that were drawn, of 64."""
    measured, plain = draw(64, 3, seed=1), draw(64, 3, seed=1, measure_path=False)
    assert torch.equal(measured.tokens, plain.tokens)
    assert measured.passes == plain.passes
    assert plain.log_prob is None
    denoiser = Toy(timeless, V)
    assert draw(64, 1, denoiser=denoiser, measure_path=False).passes == pytest.approx(2 / 64)
    assert [z.tolist() for z, _ in denoiser.asked] == [[[V] * L, [V + 1] * L]]


@pytest.mark.parametrize("sampler", ["first-hitting", "blocks"])
def test_codes_are_fair_and_drawn_anew_for_each_step(sampler):
    """Those of blocks too; 1,000 samples: shares of codes and of equal pairs, 4 standard errors."""
    denoiser, state = Toy(timeless, V), start(canvas_of(1000), seed=2, measure_path=False)
    if sampler == "blocks":
        blocks(denoiser, LINEAR, state, steps=1, block_length=1)
    else:
        first_hitting(denoiser, LINEAR, state)
    second, third = ((z.max(1).values - V).float() for z, _ in denoiser.asked[-2:])
    for share in (second.mean(), third.mean(), (second == third).float().mean()):
        assert abs(share - 0.5) < 4 * 0.5 / 1000**0.5


def test_a_gap_is_as_long_as_the_mixture_says():
    """p(length) is proportional to the mean over codes of the probability of what follows it."""
    function = random_function(V, 4)
    lengths, passes = gap_lengths(
        Template([[0], [1]], [Gap(1, 2, chosen=True)]),
        Toy(function, V),
        V,
        0,
        torch.arange(4000),
        masks=K,
    )
    scores = []
    for length in (1, 2):
        p = 0.0
        for code in range(K):
            z = torch.tensor([[0, *[V + code] * (length + 1), *[-1] * (2 - length)]])
            share = (z >= V).sum() / (z >= 0).sum()
            p += function(z, share[None])[0].softmax(-1)[length + 1, 1].item() / K
        scores.append(p)
    share, expected = sum(row[0] == 1 for row in lengths) / 4000, scores[0] / sum(scores)
    assert abs(share - expected) < 5 * math.sqrt(0.25 / 4000)
    assert passes == 2 * K
