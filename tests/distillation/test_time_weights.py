import math

import numpy as np
import pytest
import torch

from didi_instruct.distillation.losses import MARGIN, beta_density, beta_times, omega
from didi_instruct.process.schedule import Cosine, LogLinear

BETAS = [(1, 1), (2, 5), (5, 2), (3, 1)]
SCHEDULES = [LogLinear(0.0), LogLinear(1e-3), Cosine(0.0), Cosine(1e-3)]
TIMES = torch.linspace(0.002, 0.998, 250, dtype=torch.float64)


def uniforms(rows, columns, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(rows, columns, generator=generator, dtype=torch.float64)


def integral(function, low=0.0, high=1.0):
    """Gauss-Legendre with 64 nodes: exact for polynomials."""
    nodes, weights = np.polynomial.legendre.leggauss(64)
    t = torch.from_numpy((nodes + 1) / 2 * (high - low) + low)
    return float((torch.from_numpy(weights) / 2 * (high - low) * function(t)).sum())


@pytest.mark.parametrize(("a", "b"), BETAS)
def test_times_follow_the_beta_law(a, b):
    """Kolmogorov-Smirnov with 20,000 draws; a correct law fails each with probability 1e-5."""
    stats = pytest.importorskip("scipy.stats")
    times = beta_times(a, b, uniforms(20_000, a + b - 1, seed=3))
    assert stats.kstest(times.numpy(), stats.beta(a, b).cdf).pvalue > 1e-5


def test_a_time_is_a_function_of_its_own_first_uniforms():
    numbers = uniforms(20, 9)
    times = beta_times(2, 5, numbers)
    assert torch.equal(times, beta_times(2, 5, numbers[:, :6]))
    assert torch.equal(times[3:4], beta_times(2, 5, numbers[3:4]))
    assert torch.equal(times, numbers[:, :6].sort(1).values[:, 1])


def test_times_stay_off_the_ends_even_in_float32():
    edges = torch.tensor([[0.0], [1 - 2.0**-53]], dtype=torch.float64)
    times = beta_times(1, 1, edges)
    assert times.tolist() == [MARGIN, 1 - MARGIN]
    assert ((times.float() > 0) & (times.float() < 1)).all()
    assert (((1 - times).float() > 0) & ((1 - times).float() < 1)).all()


@pytest.mark.parametrize(("a", "b"), BETAS)
def test_density_is_torchs_and_has_mass_one(a, b):
    law = torch.distributions.Beta(torch.tensor(float(a)).double(), torch.tensor(float(b)).double())
    torch.testing.assert_close(beta_density(a, b, TIMES), law.log_prob(TIMES).exp())
    assert integral(lambda t: beta_density(a, b, t)) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_omega_is_minus_alpha_prime_over_one_minus_alpha(schedule):
    weight = omega(schedule, TIMES, "schedule", 1e-3)
    expected = -schedule.alpha_prime(TIMES) / (1 - schedule.alpha(TIMES))
    torch.testing.assert_close(weight, expected, rtol=1e-9, atol=0)
    closed = 1 / TIMES
    if isinstance(schedule, Cosine):
        closed = math.pi / 2 / torch.tan(math.pi / 2 * TIMES)
    torch.testing.assert_close(weight, closed, rtol=1e-9, atol=0)
    assert (weight > 0).all()


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_omega_is_held_below_the_least_time(schedule):
    weight = omega(schedule, TIMES, "schedule", 0.2)
    low = TIMES < 0.2
    at_least_time = omega(schedule, torch.tensor([0.2], dtype=torch.float64), "schedule", 0.2)
    assert torch.equal(weight[low], at_least_time.expand(int(low.sum())))
    assert (weight[~low] <= at_least_time).all()
    assert torch.equal(weight[~low], omega(schedule, TIMES[~low], "schedule", 1e-3))


def test_a_constant_omega_is_one():
    assert torch.equal(omega(Cosine(0.0), TIMES, "constant", 0.05), torch.ones_like(TIMES))


@pytest.mark.parametrize("kind", ["constant", "schedule"])
@pytest.mark.parametrize(("a", "b"), [(1, 1), (2, 5), (5, 2)])
def test_importance_weights_leave_the_integral_alone(a, b, kind):
    """E_{t ~ π}[ω f / π] = ∫ ω f: 20,000 draws within 5 standard errors, false alarm 6e-7 each."""

    def f(t):
        return t**4 * (1 - t) ** 4 * (2 + (7 * t).sin())

    schedule, least = Cosine(0.0), 0.3
    t = beta_times(a, b, uniforms(20_000, a + b - 1, seed=5))
    terms = omega(schedule, t, kind, least) / beta_density(a, b, t) * f(t)

    def weighted(t):
        return omega(schedule, t, kind, least) * f(t)

    expected = integral(weighted, 0, least) + integral(weighted, least, 1)
    error = float(terms.std() / len(t) ** 0.5)
    assert abs(float(terms.mean()) - expected) < 5 * error
    assert error < 0.03 * expected
