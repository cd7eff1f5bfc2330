"""Truths of uniform-state diffusion, by enumeration over a tiny vocabulary."""

import math

import pytest
import torch
import torch.nn.functional as F
from numpy.polynomial.legendre import leggauss
from torch import Tensor

from didi_instruct.process import uniform
from didi_instruct.process.schedule import Cosine, LogLinear, Schedule
from didi_instruct.process.uniform import (
    corrupt,
    discrete_to_gaussian,
    gaussian_to_discrete,
    marginal,
    nelbo_integrand,
    posterior,
)

V = 3
LEVELS = [(0.9, 0.2), (0.5, 0.5 - 1e-6), (1.0, 0.3), (0.6, 0.0), (1.0, 0.0)]

every_level = pytest.mark.parametrize(("alpha_s", "alpha_t"), LEVELS)


def level(alpha: float) -> Tensor:
    return torch.tensor([[alpha]], dtype=torch.float64)


def texts(length: int, num_tokens: int = V) -> Tensor:
    """All V^L texts, (V^L, L)."""
    return torch.cartesian_prod(*[torch.arange(num_tokens)] * length).view(-1, length)


def random_joint(length: int) -> Tensor:
    """Probabilities of all V^L texts, correlated and far from uniform."""
    generator = torch.Generator().manual_seed(0)
    return (1.5 * torch.randn(V**length, generator=generator, dtype=torch.float64)).softmax(0)


def entropy(p: Tensor) -> float:
    return torch.special.entr(p).sum().item()


def likelihoods(length: int, alpha: Tensor) -> Tensor:
    """q(z^l | x^l) for every text z, every text x and every l: (Z, X, L)."""
    x = texts(length)
    q = marginal(x, alpha, V)
    z = texts(length)[:, None].expand(len(x), len(x), length)
    return q.expand(len(x), -1, -1, -1).gather(-1, z[..., None]).squeeze(-1)


def denoiser(joint: Tensor, length: int, alpha: Tensor, *, leave_one_out: bool = True) -> Tensor:
    """p(x^l | z^{-l}), or p(x^l | z) if nothing is left out, for every text z: (Z, L, V)."""
    q = likelihoods(length, alpha)
    everything = q.prod(-1, keepdim=True).expand_as(q)
    evidence = everything / q if leave_one_out else everything
    weights = evidence * joint[:, None]
    weights = weights / weights.sum(1, keepdim=True)
    return torch.einsum("zxl,xlv->zlv", weights, F.one_hot(texts(length), V).double())


def forward_step(alpha_s: float, alpha_t: float) -> Tensor:
    """q(z_t | z_s) as a (V, V) matrix, rows z_s."""
    keep = alpha_t / alpha_s
    return keep * torch.eye(V, dtype=torch.float64) + (1 - keep) / V


def posterior_matrix(x: int, alpha_s: float, alpha_t: float) -> Tensor:
    """Return the library's q(z_s | z_t, x) for every z_t, (V, V), rows z_t."""
    p_x = F.one_hot(torch.tensor(x), V).double().expand(1, V, V)
    return posterior(torch.arange(V)[None], p_x, level(alpha_s), level(alpha_t))[0]


@pytest.mark.parametrize("alpha", [0.0, 0.25, 1.0])
def test_marginal_is_its_definition(alpha: float):
    """q(z_t | x) = alpha x + (1 - alpha) / V."""
    expected = alpha * torch.eye(V, dtype=torch.float64) + (1 - alpha) / V
    found = marginal(torch.arange(V)[:, None], level(alpha), V)
    assert torch.allclose(found[:, 0], expected, atol=1e-15)


@pytest.mark.parametrize("alpha", [0.1, 0.7])
def test_corrupt_draws_from_the_marginal(alpha: float):
    """Shares of each z among 60,000 draws are within 5 standard errors; false alarm 2e-6 in all."""
    generator = torch.Generator().manual_seed(1)
    x = torch.full((60, 1000), 2)
    uniforms = torch.rand(x.shape, generator=generator)
    noise = torch.randint(V, x.shape, generator=generator)
    z = corrupt(x, torch.full((60, 1), alpha), V, uniforms, noise)
    p = marginal(x[:1, :1], level(alpha), V)[0, 0]
    share = z.flatten().bincount(minlength=V) / z.numel()
    assert ((share - p).abs() < 5 * (p * (1 - p) / z.numel()).sqrt()).all()


@every_level
@pytest.mark.parametrize("x", range(V))
def test_posterior_is_bayes_rule(x: int, alpha_s: float, alpha_t: float):
    """q(z_s | z_t, x) = q(z_t | z_s) q(z_s | x) / q(z_t | x)."""
    q_s, q_t = (marginal(torch.tensor([[x]]), level(a), V)[0, 0] for a in (alpha_s, alpha_t))
    expected = (forward_step(alpha_s, alpha_t) * q_s[:, None] / q_t).T
    assert torch.allclose(posterior_matrix(x, alpha_s, alpha_t), expected, atol=1e-12)


@every_level
@pytest.mark.parametrize("x", range(V))
def test_posterior_leads_from_q_t_to_q_s(x: int, alpha_s: float, alpha_t: float):
    """q(z_s | x) = sum over z_t of q(z_s | z_t, x) q(z_t | x)."""
    q_s, q_t = (marginal(torch.tensor([[x]]), level(a), V)[0, 0] for a in (alpha_s, alpha_t))
    assert torch.allclose(q_t @ posterior_matrix(x, alpha_s, alpha_t), q_s, atol=1e-12)


@every_level
def test_posterior_of_a_guess_is_a_distribution(alpha_s: float, alpha_t: float):
    """Any p_x gives rows that sum to 1 and are not negative."""
    p_x = torch.randn(2, V, V, generator=torch.Generator().manual_seed(2)).double().softmax(-1)
    z_t = torch.arange(V).expand(2, V)
    found = posterior(z_t, p_x, level(alpha_s).expand(2, 1), level(alpha_t).expand(2, 1))
    assert torch.allclose(found.sum(-1), torch.ones(2, V, dtype=torch.float64))
    assert (found >= 0).all()


@pytest.mark.parametrize("length", [1, 2])
def test_posterior_of_the_leave_one_out_denoiser_is_the_true_reverse_step(length: int):
    """q(z_s^l | z_t) = E over x given z_t of q(z_s^l | z_t^l, x^l), if p_x = p(x^l | z_t^{-l}).

    With p(x^l | z_t) in its place the equation fails: z_t^l would be counted twice.
    """
    joint, alpha_s, alpha_t = random_joint(length), level(0.8), level(0.35)
    z = texts(length)
    weights = likelihoods(length, alpha_t).prod(-1) * joint
    weights /= weights.sum(1, keepdim=True)
    expected = torch.zeros(len(z), length, V, dtype=torch.float64)
    for x, weight in zip(texts(length), weights.T, strict=True):
        one_hot = F.one_hot(x, V).double().expand(len(z), length, V)
        expected += weight[:, None, None] * posterior(z, one_hot, alpha_s, alpha_t)
    right = denoiser(joint, length, alpha_t)
    wrong = denoiser(joint, length, alpha_t, leave_one_out=False)
    assert torch.allclose(posterior(z, right, alpha_s, alpha_t), expected, atol=1e-12)
    assert (posterior(z, wrong, alpha_s, alpha_t) - expected).abs().max() > 0.01


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
    pairs = texts(2, size)
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


def quadrature(nodes: int = 60) -> list[tuple[Tensor, float]]:
    """Return times on (0, 1), each (1, 1), and weights; t = u^3 tames the log(1 / t) at t = 0."""
    points, weights = leggauss(nodes)
    halves = [((u + 1) / 2, w / 2) for u, w in zip(points, weights, strict=True)]
    return [(level(u**3), w * 3 * u**2) for u, w in halves]


def integrated_nelbo(joint: Tensor, length: int, schedule: Schedule, **options: bool) -> float:
    """E over x, z_t and t of the integrand, summed over positions, for an enumerated denoiser."""
    z = texts(length).repeat_interleave(V**length, 0)
    x = texts(length).repeat(V**length, 1)
    total = 0.0
    for t, dt in quadrature():
        alpha, alpha_prime = schedule.alpha(t), schedule.alpha_prime(t)
        logits = denoiser(joint, length, alpha, **options).log().repeat_interleave(V**length, 0)
        paid = nelbo_integrand(logits, x, z, alpha, alpha_prime).sum(-1)
        p_xz = likelihoods(length, alpha).prod(-1) * joint
        total += dt * (p_xz.flatten() * paid).sum().item()
    return total


@pytest.mark.parametrize("length", [1, 2])
@pytest.mark.parametrize("schedule", [LogLinear(), Cosine()], ids=str)
def test_nelbo_of_exact_denoiser_is_the_entropy(schedule: Schedule, length: int):
    """The NELBO of p(x^l | z^{-l}) with alpha_1 = 0 is H(x), whatever the schedule."""
    joint = random_joint(length)
    assert integrated_nelbo(joint, length, schedule) == pytest.approx(entropy(joint), abs=1e-6)


@pytest.mark.parametrize("length", [1, 2])
def test_nelbo_of_a_denoiser_that_has_seen_its_own_token_is_more(length: int):
    """p(x^l | z) is a wrong denoiser here, and so pays more than H(x)."""
    joint = random_joint(length)
    found = integrated_nelbo(joint, length, LogLinear(), leave_one_out=False)
    assert found > entropy(joint) + 0.01


def test_nelbo_with_eps_leaves_out_what_z_1_shows():
    """With alpha_1 = eps an exact denoiser gives H(x | z_1)."""
    joint, eps = random_joint(2), 0.2
    p_xz = likelihoods(2, level(eps)).prod(-1) * joint
    expected = entropy(p_xz) - entropy(p_xz.sum(1))
    assert integrated_nelbo(joint, 2, LogLinear(eps)) == pytest.approx(expected, abs=1e-6)


def expected_over_z(paid: Tensor, alpha: Tensor) -> Tensor:
    """E over x uniform and z ~ q(z | x) of a (Z, X) table."""
    return (marginal(torch.arange(V)[:, None], alpha, V)[:, 0].T * paid).sum() / V


def discrete_nelbo(logits: Tensor, steps: int) -> float:
    """Sum over s < t on a grid of E KL(q(z_s | z_t, x) || q(z_s | z_t, p)); the last s is 0."""
    schedule = LogLinear()
    z = texts(2)[:, :1]  # all pairs (z, x), z outermost
    x = F.one_hot(texts(2)[:, 1:], V).double()
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
    z, x = texts(2)[:, :1], texts(2)[:, 1:]
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
    """Chunked and recomputed, values and gradients are those of one piece, and gradcheck agrees."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(2, 3, V, generator=generator, dtype=torch.float64, requires_grad=True)
    x, z = torch.randint(V, (2, 2, 3), generator=generator)
    alpha, alpha_prime = torch.tensor([[0.3], [0.9]]), torch.tensor([[-1.0], [-0.5]])

    def loss(values: Tensor) -> Tensor:
        return nelbo_integrand(values, x, z, alpha, alpha_prime)

    whole = loss(logits)
    (gradient,) = torch.autograd.grad(whole.sum(), logits)
    monkeypatch.setattr(uniform, "CHUNK_ELEMENTS", 2 * V)
    pieces = loss(logits)
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


def test_integrand_allows_forbidden_tokens():
    """A logit of -inf (padding) leaves value and gradient finite, even where z is that token."""
    logits = torch.tensor([[[0.3, -0.2, -math.inf]] * 2], dtype=torch.float64, requires_grad=True)
    x, z = torch.tensor([[0, 1]]), torch.tensor([[2, 1]])
    paid = nelbo_integrand(logits, x, z, level(0.5), level(-1.0))
    expected = literal_integrand(logits[0, 0].detach().softmax(-1), 0, 2, 0.5, -1.0)
    assert torch.allclose(paid[0, 0], expected)
    (gradient,) = torch.autograd.grad(paid.sum(), logits)
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("shift", [0.0, 0.1, 1.0, 4.0, 9.0])
def test_gaussian_relation_has_its_closed_form_at_two_tokens(shift: float):
    """V = 2: P(argmax = x) = Phi(shift / sqrt 2), so alpha = erf(shift / 2)."""
    alpha_tilde = shift / math.sqrt(1 + shift**2)
    assert gaussian_to_discrete(alpha_tilde, 2).item() == pytest.approx(
        math.erf(shift / 2), abs=1e-14
    )


@pytest.mark.parametrize("alpha_tilde", [0.2, 0.6, 0.9])
def test_argmax_of_gaussian_latent_is_the_uniform_state(alpha_tilde: float):
    """Argmax of alpha_tilde x + sigma_tilde eps ~ Cat(alpha x + (1 - alpha) / V), V = 5.

    200,000 draws, each of 5 shares within 5 standard errors (at most 0.0056); false alarm 3e-6.
    """
    size, draws = 5, 200_000
    generator = torch.Generator().manual_seed(7)
    w = math.sqrt(1 - alpha_tilde**2) * torch.randn(draws, size, generator=generator)
    w[:, 3] += alpha_tilde
    share = w.argmax(-1).bincount(minlength=size) / draws
    alpha = gaussian_to_discrete(torch.tensor([[alpha_tilde]], dtype=torch.float64), size)
    p = marginal(torch.tensor([[3]]), alpha, size)[0, 0]
    assert ((share - p).abs() < 5 * (p * (1 - p) / draws).sqrt()).all()


@pytest.mark.parametrize("shift", [1.0, 4.0, 6.0])
def test_gaussian_relation_at_a_real_vocabulary(shift: float):
    """V = 50,258: P(argmax = x) against adaptive quadrature, to 1e-12."""
    integrate = pytest.importorskip("scipy.integrate")
    special = pytest.importorskip("scipy.special")
    size = 50_258

    def density(u: float) -> float:
        phi = math.exp(-((u - shift) ** 2) / 2) / math.sqrt(2 * math.pi)
        return phi * math.exp((size - 1) * special.log_ndtr(u))

    win, _ = integrate.quad(density, shift - 9, shift + 9, points=[4.3], epsabs=1e-14)
    alpha = gaussian_to_discrete(shift / math.sqrt(1 + shift**2), size)
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


def test_gaussian_relation_keeps_shape_and_dtype():
    """A float32 tensor comes back as float32, a float as a scalar."""
    assert gaussian_to_discrete(torch.full((2, 1), 0.9), 10).dtype == torch.float32
    assert discrete_to_gaussian(torch.full((2, 1), 0.9), 10).shape == (2, 1)
    assert discrete_to_gaussian(0.5, 10).shape == ()


def test_bad_arguments_are_refused():
    """Impossible levels, vocabularies and noise are ValueErrors."""
    x = torch.zeros(2, 2).long()
    alpha, uniforms = torch.full((2, 1), 0.5), torch.rand(2, 2)
    for value in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="alpha"):
            discrete_to_gaussian(value, 5)
        with pytest.raises(ValueError, match="alpha_tilde"):
            gaussian_to_discrete(value, 5)
    with pytest.raises(ValueError, match="num_tokens"):
        gaussian_to_discrete(0.5, 1)
    with pytest.raises(ValueError, match="random_tokens"):
        corrupt(x, alpha, V, uniforms, x + V)
    with pytest.raises(ValueError, match="uniforms"):
        corrupt(x, alpha, V, uniforms[:1], x)
    with pytest.raises(ValueError, match="alpha"):
        corrupt(x, alpha[:, 0], V, uniforms, x)
    with pytest.raises(ValueError, match="p_x"):
        posterior(x, torch.zeros(2, 3, V), alpha, alpha)
    with pytest.raises(ValueError, match="logits"):
        nelbo_integrand(torch.zeros(2, 3, V), x, x, alpha, -alpha)
