"""DUO's NELBO and its Gaussian latent; the process itself is in `test_processes`."""

import math
from itertools import permutations

import pytest
import torch
import torch.nn.functional as F
from scipy import integrate, special
from scipy.stats import ks_2samp
from tests.sampling.enumeration import all_states, p_value
from torch import Tensor

from didi_instruct.process import uniform
from didi_instruct.process.schedule import LogLinear
from didi_instruct.process.uniform import (
    discrete_to_gaussian,
    gaussian_to_discrete,
    level_of_gamma,
    nelbo_integrand,
    posterior,
    soft_state,
    state,
)

from .reference import V, level, marginal, quadrature


def literal_integrand(p: Tensor, x: int, z: int, alpha: float, alpha_prime: float) -> Tensor:
    """DUO's formula as printed, alpha' / (V alpha) [V / xbar_i - V / xbar_theta_i - sum_j ...]."""
    size = len(p)
    xbar = size * alpha * F.one_hot(torch.tensor(x), size).double() + 1 - alpha
    theta = size * alpha * p + 1 - alpha
    jumps = xbar / xbar[z] * (theta[z] * xbar / (theta * xbar[z])).log()
    return alpha_prime / (size * alpha) * (size / xbar[z] - size / theta[z] - jumps.sum())


@pytest.mark.parametrize("alpha", [1e-3, 0.4, 0.999])
def test_integrand_is_the_printed_formula(alpha: float):
    """nelbo_integrand equals DUO's expression summed over the whole vocabulary, and is >= 0."""
    size = 5
    generator = torch.Generator().manual_seed(3)
    logits = 3 * torch.randn(1, size * size, size, generator=generator, dtype=torch.float64)
    pairs = all_states(size, 2)
    x, z = pairs[None, :, 0], pairs[None, :, 1]
    found = nelbo_integrand(logits, x, z, level(alpha), level(-0.7))[0]
    expected = torch.stack(
        [
            literal_integrand(logits[0, n].softmax(-1), int(x[0, n]), int(z[0, n]), alpha, -0.7)
            for n in range(size * size)
        ]
    )
    assert torch.allclose(found, expected, rtol=1e-7, atol=1e-11)
    assert (found >= 0).all()


def test_integrand_of_the_true_token_is_zero():
    """A denoiser certain of x has nothing left to pay, at any level of noise."""
    x = torch.tensor([[0, 1, 2]])
    logits = 200.0 * F.one_hot(x, V).double()
    for z in (x, torch.tensor([[1, 1, 0]])):
        paid = nelbo_integrand(logits, x, z, level(0.6), level(-1.0))
        assert torch.allclose(paid, torch.zeros_like(paid), atol=1e-12)


def expected_over_z(paid: Tensor, alpha: Tensor) -> Tensor:
    """E over x uniform and z ~ q(z | x) of a (Z, X) table."""
    return (marginal(torch.arange(V)[:, None], alpha, V)[:, 0].T * paid).sum() / V


def discrete_nelbo(logits: Tensor, steps: int) -> float:
    """Sum over s < t on a grid of E KL(q(z_s | z_t, x) || q(z_s | z_t, p)); the last s is 0."""
    schedule = LogLinear()
    pairs = all_states(V, 2)  # (z, x), z outermost
    z, x = pairs[:, :1], F.one_hot(pairs[:, 1:], V).double()
    p = logits.softmax(-1).repeat_interleave(V, 0)[:, None]
    total = 0.0
    for n in range(steps):
        alpha_s, alpha_t = (schedule.alpha(level(m / steps)) for m in (n, n + 1))
        q, p_s = (posterior(z, guess, alpha_s, alpha_t) for guess in (x, p))
        kl = (torch.special.xlogy(q, q) - torch.special.xlogy(q, p_s)).sum(-1)
        total += expected_over_z(kl.view(V, V), alpha_t).item()
    return total


def test_discrete_time_kl_converges_to_the_integral():
    """The discrete NELBO of any denoiser tends to the integral of nelbo_integrand, as 1 / steps."""
    logits = torch.randn(V, V, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    z, x = all_states(V, 2).split(1, 1)
    rows = logits.repeat_interleave(V, 0)[:, None]
    integral = 0.0
    for t, dt in quadrature():
        alpha = 1 - t
        paid = nelbo_integrand(rows, x, z, alpha, level(-1.0)).view(V, V)
        integral += dt * expected_over_z(paid, alpha).item()
    gaps = [abs(discrete_nelbo(logits, steps) - integral) for steps in (25, 100, 400)]
    assert gaps[1] < gaps[0] / 3.5
    assert gaps[2] < gaps[1] / 3.5
    assert gaps[2] < 5e-4


def test_integrand_gradient_survives_chunks(monkeypatch: pytest.MonkeyPatch):
    """In small chunks, recomputed, values and gradients are those of one; gradcheck agrees."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(2, 3, V, generator=generator, dtype=torch.float64, requires_grad=True)
    x, z = torch.randint(V, (2, 2, 3), generator=generator)
    alpha, alpha_prime = torch.tensor([[0.3], [0.9]]), torch.tensor([[-1.0], [-0.5]])

    def loss(values: Tensor) -> Tensor:
        return nelbo_integrand(values, x, z, alpha, alpha_prime)

    sizes, recomputed = [], uniform.checkpoint

    def counted(function, chunk, *rest, **options):
        sizes.append(chunk.numel())
        return recomputed(function, chunk, *rest, **options)

    monkeypatch.setattr(uniform, "checkpoint", counted)
    whole = loss(logits)
    (gradient,) = torch.autograd.grad(whole.sum(), logits)
    monkeypatch.setattr(uniform, "CHUNK_ELEMENTS", 2 * V)
    pieces = loss(logits)
    assert sizes[0] == 6 * V
    assert max(sizes[1:]) <= 2 * V
    assert torch.allclose(pieces, whole)
    assert torch.allclose(torch.autograd.grad(pieces.sum(), logits)[0], gradient)
    assert torch.autograd.gradcheck(loss, (logits,))


@pytest.mark.parametrize("t", [2.0**-24, 1e-3, 0.5, 0.999, 1 - 2.0**-24])
def test_integrand_in_float32_at_a_real_vocabulary(t: float):
    """V = 50,258: float32 is within 0.1% (or 1e-4 nats) of float64 up to the ends of time.

    Nats are counted as the loss counts them: z != x comes with probability 1 - alpha.
    """
    size = 50_258
    generator = torch.Generator().manual_seed(6)
    logits = 4 * torch.randn(1, 6, size, generator=generator)
    x = torch.tensor([[0, 1, 2, 3, 4, 5]])
    z = torch.tensor([[0, 1, 2, 7, 8, 9]])
    logits[0, 1, 1] = logits[0, 4, 4] = 40.0  # nearly certain of x
    logits[0, 5, 9] = 40.0  # certain of z, wrongly
    alpha = 1 - torch.tensor([[t]])
    exact = nelbo_integrand(logits.double(), x, z, alpha.double(), level(-1.0))
    found = nelbo_integrand(logits, x, z, alpha, torch.tensor([[-1.0]]))
    assert found.dtype == torch.float32
    assert torch.isfinite(found).all()
    share = torch.where(z == x, 1.0, 1 - alpha).double()
    assert torch.allclose(share * found, share * exact, rtol=1e-3, atol=1e-4)


def test_integrand_of_half_precision_is_taken_in_float32():
    """As if the same logits were given in float32, to the last bit."""
    logits = torch.randn(1, 4, 1000, generator=torch.Generator().manual_seed(7)).bfloat16()
    x, z = torch.tensor([[0, 1, 2, 3]]), torch.tensor([[0, 1, 7, 8]])
    levels = torch.tensor([[0.7]]), torch.tensor([[-1.0]])
    found = nelbo_integrand(logits, x, z, *levels)
    assert found.dtype == torch.float32
    assert torch.equal(found, nelbo_integrand(logits.float(), x, z, *levels))


def test_integrand_allows_forbidden_tokens():
    """A logit of -inf (padding) leaves value and gradient finite, even where z is that token."""
    logits = torch.tensor([[[0.3, -0.2, -math.inf]] * 2], dtype=torch.float64, requires_grad=True)
    x, z = torch.tensor([[0, 1]]), torch.tensor([[2, 1]])
    paid = nelbo_integrand(logits, x, z, level(0.5), level(-1.0))
    expected = literal_integrand(logits[0, 0].detach().softmax(-1), 0, 2, 0.5, -1.0)
    assert torch.allclose(paid[0, 0], expected)
    (gradient,) = torch.autograd.grad(paid.sum(), logits)
    assert torch.isfinite(gradient).all()


def alpha_tilde_of(shift: float) -> Tensor:
    return torch.tensor(shift / math.sqrt(1 + shift**2), dtype=torch.float64)


@pytest.mark.parametrize("shift", [0.0, 0.1, 1.0, 4.0, 9.0])
def test_gaussian_relation_has_its_closed_form_at_two_tokens(shift: float):
    """V = 2: P(argmax = x) = Phi(shift / sqrt 2), so alpha = erf(shift / 2)."""
    found = gaussian_to_discrete(alpha_tilde_of(shift), 2).item()
    assert found == pytest.approx(math.erf(shift / 2), abs=1e-14)


@pytest.mark.parametrize("shift", [1.0, 4.0, 6.0])
def test_gaussian_relation_at_a_real_vocabulary(shift: float):
    """V = 50,258: P(argmax = x) against adaptive quadrature, to 1e-12."""
    size = 50_258

    def density(u: float) -> float:
        phi = math.exp(-((u - shift) ** 2) / 2) / math.sqrt(2 * math.pi)
        return phi * math.exp((size - 1) * special.log_ndtr(u))

    win, _ = integrate.quad(density, shift - 9, shift + 9, points=[4.3], epsabs=1e-14)
    alpha = gaussian_to_discrete(alpha_tilde_of(shift), size)
    assert alpha.item() == pytest.approx(size / (size - 1) * (win - 1 / size), abs=1e-12)


@pytest.mark.parametrize("size", [2, 3, 50_258, 100_000])
def test_gaussian_relation_is_monotone_and_inverted(size: int):
    """T runs from 0 to 1 without falling; T^-1 undoes it to 1e-6 on either side."""
    alpha = torch.tensor([0, 1e-9, 1e-4, 0.1, 0.5, 0.9, 0.999, 1 - 1e-9, 1], dtype=torch.float64)
    alpha_tilde = discrete_to_gaussian(alpha, size)
    assert torch.allclose(gaussian_to_discrete(alpha_tilde, size), alpha, rtol=1e-6, atol=1e-12)
    assert (alpha_tilde.diff() > 0).all()
    assert alpha_tilde[0].item() == pytest.approx(0, abs=1e-15)
    assert alpha_tilde[-1].item() == 1
    grid = torch.linspace(0, 0.99, 100, dtype=torch.float64).view(10, 10)
    alpha = gaussian_to_discrete(grid, size)
    assert (alpha.flatten().diff() > 0).all()
    assert torch.allclose(discrete_to_gaussian(alpha, size), grid, rtol=0, atol=1e-6)


@pytest.mark.parametrize("size", [10, 50_258])
def test_a_level_never_exceeds_one_by_rounding(size: int):
    """Large leads of the clean token, whose integral is 1 up to the last bit."""
    alpha = gaussian_to_discrete(1 - torch.logspace(-8, -2, 50, dtype=torch.float64), size)
    assert (alpha <= 1).all()
    assert (alpha > 0.999).any()


# The latent, against Gaussians drawn in full

SIZE = 4
FALSE_ALARM = 1e-6
"""Of each comparison of draws; there are 15, seeded."""


def latent(tilde: Tensor | float, draws: int, seed: int, x: int = 0) -> Tensor:
    """alpha_tilde x + sigma_tilde eps: (draws, SIZE)."""
    generator = torch.Generator().manual_seed(seed)
    eps = torch.randn(draws, SIZE, generator=generator, dtype=torch.float64)
    tilde = torch.as_tensor(tilde, dtype=torch.float64)
    return tilde * F.one_hot(torch.tensor(x), SIZE) + (1 - tilde.square()).sqrt() * eps


def path_law(alpha_t: float, alpha_s: float) -> Tensor:
    """P(z_t, z_s | x = 0) of one noise: clean at both, clean at s alone, or the same other token.

    (V, V), rows z_t.
    """
    clean_t, clean_s = (a + (1 - a) / SIZE for a in (alpha_t, alpha_s))
    law = torch.diag(torch.full((SIZE,), (1 - clean_s) / (SIZE - 1), dtype=torch.float64))
    law[:, 0] = (clean_s - clean_t) / (SIZE - 1)
    law[0, 0] = clean_t
    return law


@pytest.mark.parametrize("levels", [(0.05, 0.3), (0.3, 0.9), (0.6, 0.7)])
def test_the_path_of_one_noise_has_the_law_of_the_gaussian_one(levels: tuple[float, float]):
    """100,000 paths of either kind against the enumerated law; impossible pairs never come."""
    draws, law = 100_000, path_law(*levels).flatten()
    tilde = (discrete_to_gaussian(level(alpha), SIZE)[0] for alpha in levels)
    z_t, z_s = (latent(t, draws, seed=0).argmax(-1) for t in tilde)
    assert p_value(z_t * SIZE + z_s, law) > FALSE_ALARM
    generator = torch.Generator().manual_seed(1)
    uniforms = torch.rand(1, draws, generator=generator, dtype=torch.float64)
    others = torch.randint(SIZE - 1, uniforms.shape, generator=generator)
    x = torch.zeros_like(others)
    z_t, z_s = (state(x, level(alpha), SIZE, uniforms, others)[0] for alpha in levels)
    assert p_value(z_t * SIZE + z_s, law) > FALSE_ALARM


def soft(
    alpha: float, temperature: float, kept: int, draws: int, num_tokens: int = SIZE, x: int = 0
) -> tuple[Tensor, Tensor]:
    """Tokens and weights of many softened tokens."""
    generator = torch.Generator().manual_seed(2)
    numbers = torch.rand(1, draws, 2 * kept + 1, generator=generator, dtype=torch.float64)
    noise = numbers.split([kept + 1, kept], -1)
    text = torch.full((1, draws), x)
    tokens, weights = soft_state(text, level(alpha), num_tokens, temperature, *noise)
    return tokens[0], weights[0]


@pytest.mark.parametrize("alpha", [0.1, 0.7])
def test_softened_tokens_have_the_law_of_the_softmax_of_the_latent(alpha: float):
    """All V entries: weights of the clean token, of the largest and of the smallest other one.

    Kolmogorov-Smirnov between 20,000 draws and as many softmaxes of Gaussians in full.
    """
    draws, temperature = 20_000, 0.3
    _, weights = soft(alpha, temperature, SIZE - 1, draws)
    full = latent(discrete_to_gaussian(level(alpha), SIZE)[0], draws, seed=3)
    clean, others = (full / temperature).softmax(-1).split([1, SIZE - 1], -1)
    full = torch.cat([clean, others.sort(-1, descending=True).values], -1)
    for entry in (0, 1, -1):
        found, expected = weights[:, entry].numpy(), full[:, entry].numpy()
        assert ks_2samp(found, expected).pvalue > FALSE_ALARM


def test_every_choice_of_different_tokens_has_its_own_share_of_the_numbers():
    """All 5 x 4 x 3 ranks of picks give all ordered triples of the 5 other tokens, each once."""
    ranks = torch.cartesian_prod(torch.arange(5), torch.arange(4), torch.arange(3))
    picks = (ranks + 0.5) / torch.tensor([5, 4, 3], dtype=torch.float64)
    text = torch.full((1, len(ranks)), 2)
    uniforms = torch.full((1, len(ranks), 4), 0.5, dtype=torch.float64)
    tokens, _ = soft_state(text, level(0.5), 6, 1.0, uniforms, picks[None])
    assert bool((tokens[..., 0] == 2).all())
    found = sorted(tuple(row) for row in tokens[0, :, 1:].tolist())
    assert found == sorted(permutations((0, 1, 3, 4, 5), 3))


@pytest.mark.parametrize("alpha", [0.4, 1.0])
def test_extreme_numbers_give_weights_of_a_state(alpha: float):
    """Uniforms of 0 and next to 1 stand for the most extreme Gaussians, not for infinite ones."""
    edges = torch.tensor([0, 1 - 2.0**-53], dtype=torch.float64)
    numbers = torch.cartesian_prod(*[edges] * 5)[None]
    x = torch.zeros(1, numbers.shape[1], dtype=torch.long)
    tokens, weights = soft_state(x, level(alpha), V, 0.5, *numbers.split([3, 2], -1))
    assert weights.isfinite().all()
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
    assert torch.equal(tokens.sort(-1).values, torch.arange(V).expand_as(tokens))


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
