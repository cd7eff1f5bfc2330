"""The Gaussian latent of uniform-state diffusion against Gaussians drawn in full."""

from itertools import permutations

import pytest
import torch
from scipy.stats import chisquare, ks_2samp

from didi_instruct.process.uniform import (
    discrete_to_gaussian,
    gaussian_to_discrete,
    level_of_gamma,
    marginal,
    soft_state,
    state,
)

V = 4
FALSE_ALARM = 1e-6
"""Of each comparison of draws; there are 14, seeded."""


def level(alpha):
    return torch.tensor([[alpha]], dtype=torch.float64)


def path_law(alpha_t, alpha_s):
    """P(z_t, z_s | x = 0) of one noise: clean at both, clean at s alone, or the same other token.

    (V, V), rows z_t.
    """
    clean_t, clean_s = (a + (1 - a) / V for a in (alpha_t, alpha_s))
    law = torch.diag(torch.full((V,), (1 - clean_s) / (V - 1), dtype=torch.float64))
    law[:, 0] = (clean_s - clean_t) / (V - 1)
    law[0, 0] = clean_t
    return law


def follows(z_t, z_s, law):
    """Whether pairs of states follow a law (V, V), by a chi-square test."""
    counts = torch.bincount(z_t * V + z_s, minlength=V * V).double()
    law = law.flatten()
    assert not counts[law == 0].any(), "something impossible was drawn"
    expected = law[law > 0] * len(z_t)
    return chisquare(counts[law > 0], expected).pvalue > FALSE_ALARM


def gaussian_path(alphas, draws, seed):
    """Argmax of alpha_tilde x + sigma_tilde eps at several levels, x = 0, one eps for all."""
    eps = torch.randn(draws, V, generator=torch.Generator().manual_seed(seed)).double()
    states = []
    for alpha in alphas:
        tilde = discrete_to_gaussian(alpha, V)
        w = (1 - tilde.square()).sqrt() * eps
        w[:, 0] += tilde
        states.append(w.argmax(-1))
    return states


@pytest.mark.parametrize(("alpha_t", "alpha_s"), [(0.05, 0.3), (0.3, 0.9), (0.6, 0.7)])
def test_the_path_of_one_noise_has_the_law_of_the_gaussian_one(alpha_t, alpha_s):
    """100,000 paths of either kind against the enumerated law; impossible pairs never come."""
    law = path_law(alpha_t, alpha_s)
    assert follows(*gaussian_path((alpha_t, alpha_s), 100_000, seed=0), law)
    generator = torch.Generator().manual_seed(1)
    uniforms = torch.rand(1, 100_000, generator=generator, dtype=torch.float64)
    others = torch.randint(V - 1, uniforms.shape, generator=generator)
    x = torch.zeros_like(others)
    z_t, z_s = (state(x, level(a), V, uniforms, others)[0] for a in (alpha_t, alpha_s))
    assert follows(z_t, z_s, law)


@pytest.mark.parametrize("alpha", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("x", range(V))
def test_at_one_level_the_state_is_the_uniform_one(x, alpha):
    """Every number of a fine grid with every other token: the shares are those of `marginal`."""
    steps = 4_000
    uniforms = ((torch.arange(steps, dtype=torch.float64) + 0.5) / steps).repeat(V - 1)[None]
    others = torch.arange(V - 1).repeat_interleave(steps)[None]
    z = state(torch.full_like(others, x), level(alpha), V, uniforms, others)
    share = z.flatten().bincount(minlength=V).double() / z.numel()
    expected = marginal(torch.tensor([[x]]), level(alpha), V)[0, 0]
    assert torch.allclose(share, expected, atol=1 / steps)


def soft(alpha, temperature, kept, draws, seed=2, num_tokens=V, x=0):
    """Tokens and weights of many softened tokens."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.rand(1, draws, 2 * kept + 1, generator=generator, dtype=torch.float64)
    text = torch.full((1, draws), x)
    uniforms, picks = numbers[..., : kept + 1], numbers[..., kept + 1 :]
    found = soft_state(text, level(alpha), num_tokens, temperature, uniforms, picks)
    return found[0][0], found[1][0]


@pytest.mark.parametrize("alpha", [0.1, 0.7])
def test_softened_tokens_have_the_law_of_the_softmax_of_the_latent(alpha):
    """All V entries: weights of the clean token, of the largest and of the smallest other one.

    Kolmogorov-Smirnov between 20,000 draws and as many softmaxes of Gaussians in full.
    """
    draws, temperature = 20_000, 0.3
    _, weights = soft(alpha, temperature, V - 1, draws)
    tilde = discrete_to_gaussian(alpha, V)
    generator = torch.Generator().manual_seed(3)
    eps = torch.randn(draws, V, generator=generator, dtype=torch.float64)
    w = (1 - tilde.square()).sqrt() * eps
    w[:, 0] += tilde
    full = (w / temperature).softmax(-1)
    others = full[:, 1:].sort(-1, descending=True).values
    for found, expected in (
        (weights[:, 0], full[:, 0]),
        (weights[:, 1], others[:, 0]),
        (weights[:, -1], others[:, -1]),
    ):
        assert ks_2samp(found.numpy(), expected.numpy()).pvalue > FALSE_ALARM


def test_the_other_tokens_are_different_ones_in_random_order():
    """Ordered pairs of the V - 1 tokens other than x: each as often, 60,000 draws."""
    tokens, _ = soft(0.5, 1.0, V - 1, 60_000, x=2)
    assert bool((tokens[:, 0] == 2).all())
    assert torch.equal(tokens.sort(-1).values, torch.arange(V).expand_as(tokens))
    pairs = torch.bincount(tokens[:, 1] * V + tokens[:, 2], minlength=V * V)
    possible = [a * V + b for a in (0, 1, 3) for b in (0, 1, 3) if a != b]
    assert int(pairs[possible].sum()) == 60_000
    assert chisquare(pairs[possible].numpy()).pvalue > FALSE_ALARM


def test_every_choice_of_different_tokens_has_its_own_share_of_the_numbers():
    """All 5 x 4 x 3 ranks of picks give all ordered triples of the 5 other tokens, each once."""
    ranks = torch.cartesian_prod(torch.arange(5), torch.arange(4), torch.arange(3))
    picks = (ranks + 0.5) / torch.tensor([5, 4, 3], dtype=torch.float64)
    text = torch.full((1, len(ranks)), 5)
    uniforms = torch.full((1, len(ranks), 4), 0.5, dtype=torch.float64)
    tokens, _ = soft_state(text, level(0.5), 6, 1.0, uniforms, picks[None])
    found = {tuple(row) for row in tokens[0, :, 1:].tolist()}
    assert found == set(permutations(range(5), 3))


def test_fewer_tokens_share_the_weight_among_themselves():
    """The first entries are those of all, renormalised; the state is the same token."""
    generator = torch.Generator().manual_seed(4)
    size, kept, x = 9, 3, torch.full((5, 7), 8)
    uniforms = torch.rand(5, 7, size, generator=generator, dtype=torch.float64)
    picks = torch.rand(5, 7, size - 1, generator=generator, dtype=torch.float64)
    alpha = torch.linspace(0.05, 0.95, 5, dtype=torch.float64)[:, None]
    tokens, weights = soft_state(x, alpha, size, 0.2, uniforms, picks)
    few = soft_state(x, alpha, size, 0.2, uniforms[..., : kept + 1], picks[..., :kept])
    assert torch.equal(few[0], tokens[..., : kept + 1])
    part = weights[..., : kept + 1]
    assert torch.allclose(few[1], part / part.sum(-1, keepdim=True))
    assert torch.equal(few[1].argmax(-1), weights.argmax(-1))


def test_a_falling_temperature_leaves_one_token():
    """The largest weight tends to 1, at the token that has it at any temperature."""
    hot, cold = (soft(0.4, temperature, V - 1, 500) for temperature in (1.0, 1e-9))
    assert torch.equal(hot[0], cold[0])
    assert torch.equal(hot[1].argmax(-1), cold[1].argmax(-1))
    assert torch.equal(cold[1].max(-1).values, torch.ones(500, dtype=torch.float64))


def test_the_softened_state_is_the_uniform_one_at_a_real_vocabulary():
    """V = 50,258: P(argmax = x) = alpha + (1 - alpha) / V; 40,000 draws, 5 errors: 6e-7."""
    draws, alpha, size = 40_000, 0.35, 50_258
    tokens, weights = soft(alpha, 1e-3, 4, draws, num_tokens=size, x=7)
    z = tokens.gather(-1, weights.argmax(-1, keepdim=True))
    expected = alpha + (1 - alpha) / size
    error = (expected * (1 - expected) / draws) ** 0.5
    assert abs((z == 7).double().mean().item() - expected) < 5 * error


def test_the_ratio_is_that_of_noise_to_signal():
    """Log of sigma_tilde^2 over alpha_tilde^2; the published bounds are nearly all and nothing.

    Alpha = 0.995 or more at gamma = -4 and 0.01 or less at -1, for 50,258 tokens.
    """
    gamma = torch.tensor([-4.0, -1.0, 0.5], dtype=torch.float64)
    tilde = level_of_gamma(gamma)
    assert torch.allclose(((1 - tilde.square()) / tilde.square()).log(), gamma)
    alpha = gaussian_to_discrete(tilde, 50_258)
    assert alpha[0] > 0.995
    assert alpha[1] < 0.01
