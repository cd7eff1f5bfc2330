import math

import pytest
import torch

from didi_instruct.config.model import ScheduleConfig
from didi_instruct.process.schedule import Cosine, LogLinear, Schedule, make_schedule

SCHEDULES = [kind(eps) for kind in (LogLinear, Cosine) for eps in (0.0, 1e-3, 0.3)]
TIMES = torch.linspace(0.01, 0.99, 99, dtype=torch.float64)

every_schedule = pytest.mark.parametrize("schedule", SCHEDULES, ids=str)


@pytest.mark.parametrize("eps", [0.0, 1e-3])
@pytest.mark.parametrize("t", [0.0, 0.25, 0.5, 1.0])
def test_alpha_is_the_published_formula(eps: float, t: float):
    """alpha_t = 1 - (1 - eps) t, and 1 - alpha_t = (1 - eps) sin(pi t / 2)."""
    time = torch.tensor(t, dtype=torch.float64)
    assert LogLinear(eps).alpha(time).item() == pytest.approx(1 - (1 - eps) * t, abs=1e-15)
    expected = 1 - (1 - eps) * math.sin(math.pi * t / 2)
    assert Cosine(eps).alpha(time).item() == pytest.approx(expected, abs=1e-15)


@every_schedule
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ends_are_exact(schedule: Schedule, dtype: torch.dtype):
    """alpha_0 = 1 and alpha_1 = eps in the dtype given, with no sign slip at t = 1."""
    ends = torch.tensor([0.0, 1.0], dtype=dtype)
    alpha = schedule.alpha(ends)
    assert alpha.dtype == dtype
    assert torch.allclose(alpha, torch.tensor([1.0, schedule.eps], dtype=dtype), rtol=1e-6, atol=0)
    assert schedule.alpha_prime(ends)[1] <= 0
    assert schedule.nelbo_weight(ends)[1] >= 0


@every_schedule
def test_alpha_prime_is_the_derivative(schedule: Schedule):
    """alpha'_t against autograd of alpha_t."""
    t = TIMES.clone().requires_grad_()
    (derivative,) = torch.autograd.grad(schedule.alpha(t).sum(), t)
    assert torch.allclose(schedule.alpha_prime(TIMES), derivative, rtol=1e-10)


@every_schedule
def test_sigma_and_weight_follow_from_alpha(schedule: Schedule):
    """By definition sigma = -log alpha_t and weight = -alpha'_t / (1 - alpha_t)."""
    alpha = schedule.alpha(TIMES)
    assert torch.allclose(torch.exp(-schedule.sigma(TIMES)), alpha, rtol=1e-12)
    weight = -schedule.alpha_prime(TIMES) / (1 - alpha)
    assert torch.allclose(schedule.nelbo_weight(TIMES), weight, rtol=1e-9)


@every_schedule
def test_time_inverts_alpha(schedule: Schedule):
    """time(alpha_t) = t, ends included."""
    t = torch.linspace(0, 1, 101, dtype=torch.float64)
    assert torch.allclose(schedule.time(schedule.alpha(t)), t, atol=1e-7)
    assert torch.allclose(schedule.time(schedule.alpha(TIMES)), TIMES, atol=1e-12)
    outside = torch.tensor([-0.1, 1.1], dtype=torch.float64)
    assert schedule.time(outside).tolist() == [1.0, 0.0]


@every_schedule
def test_float32_agrees_with_float64(schedule: Schedule):
    """Each function in float32 has at most a few units of rounding, small alpha included."""
    t = torch.tensor([1e-6, 1e-3, 0.5, 0.999, 1 - 2.0**-20])
    for function in (schedule.alpha, schedule.alpha_prime, schedule.sigma, schedule.nelbo_weight):
        exact = function(t.double())
        assert torch.allclose(function(t).double(), exact, rtol=1e-5, atol=1e-7)


def test_make_schedule_reads_the_configuration():
    """Each name gives its class with the eps configured."""
    assert make_schedule(ScheduleConfig()) == LogLinear(1e-3)
    assert make_schedule(ScheduleConfig(name="cosine", eps=0.0)) == Cosine(0.0)
