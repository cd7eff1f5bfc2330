"""Losses against their definitions: divergences, terms and their gradient, rewards, times."""

import math
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch.distributions import Categorical, kl_divergence

from didi_instruct.distillation import losses as module
from didi_instruct.distillation.losses import (
    MARGIN,
    advantages,
    beta_density,
    beta_times,
    divergence,
    entropy,
    kl,
    omega,
    rewards,
    smooth_bce,
    terms,
)
from didi_instruct.models import compile as fused
from didi_instruct.models.layers import NEVER
from didi_instruct.process.schedule import Cosine, LogLinear

from .small import law

KINDS = ["forward", "backward", "jeffreys"]
every_kind = pytest.mark.parametrize("kind", KINDS)
numbers = st.floats(-20, 20, width=32)


def normal(*shape, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(shape, generator=generator, dtype=torch.float64)


def uniforms(rows, columns, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(rows, columns, generator=generator, dtype=torch.float64)


# Divergences


def plainly(kind, student, teacher):
    """Entropy of the student and its divergence from a teacher, by torch's distributions."""
    p, q = Categorical(logits=teacher), Categorical(logits=student)
    sides = kl_divergence(p, q), kl_divergence(q, p)
    return q.entropy(), dict(zip(KINDS, (*sides, sum(sides) / 2), strict=True))[kind]


@law
@every_kind
@given(st.integers(1, 9), st.integers(0, 2**20), st.sampled_from([0.1, 1.0, 9.0]))
def test_divergences_are_torchs(kind, num, seed, scale):
    """Forward is KL(teacher ‖ student); a divergence is 0 at the teacher, and nowhere below."""
    student, teacher = normal(2, 5, 3, num, seed=seed, scale=scale)
    log_p, log_q = teacher.log_softmax(-1), student.log_softmax(-1)
    own, distance = plainly(kind, student, teacher)
    torch.testing.assert_close(kl(log_p, log_q), plainly("forward", student, teacher)[1])
    torch.testing.assert_close(entropy(log_q), own)
    torch.testing.assert_close(divergence(kind, log_p, log_q), distance)
    assert (divergence(kind, log_p, log_q) > -1e-12).all()
    nothing = torch.zeros(5, 3).double()
    torch.testing.assert_close(divergence(kind, log_p, log_p), nothing, rtol=0, atol=1e-14)


def test_another_name_is_refused():
    with pytest.raises(ValueError, match="`sideways` is not a divergence"):
        divergence("sideways", normal(1, 2), normal(1, 2))


# Terms in one pass, with the closed form of their gradient

DRAWN = torch.tensor([0, 3, 3, 3, 5, 0]), torch.tensor([6, 2, 2, 4, 0, 1])
"""Row 3 gives one token twice, and another one; rows 1, 2 and 4 give none."""
NONE = torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.long)


def weighted(found):
    """A loss in which every number counts in its own way."""
    weights = [torch.linspace(-1, k + 1, len(values)).double() for k, values in enumerate(found)]
    return sum((w * values).sum() for w, values in zip(weights, found, strict=True))


@pytest.mark.parametrize("columns", [0, 3])
@pytest.mark.parametrize("drawn", [DRAWN, NONE], ids=["drawn", "none"])
@pytest.mark.parametrize("kind", [*KINDS, None])
def test_terms_and_their_gradients_are_those_of_torchs_distributions(kind, drawn, columns):
    """Logits need not be normalised; columns of probability 0 make no difference."""
    student, teacher = normal(2, 6, 7)
    student = student.clone().requires_grad_()
    wide = [torch.nn.functional.pad(x, (0, columns), value=NEVER) for x in (student, teacher + 5)]
    found = terms(wide[0], wide[1] if kind else None, kind or "forward", drawn)
    own, distance = plainly(kind or "forward", student, teacher)
    distance = distance if kind else 0 * own
    expected = own, distance, student.log_softmax(-1)[drawn]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    one, other = (torch.autograd.grad(weighted(each), student)[0] for each in (found, expected))
    torch.testing.assert_close(one, other)


@pytest.mark.parametrize("sure", [0.5, 0.99, 0.9999])
def test_a_token_that_is_nearly_certain_keeps_its_gradient_in_bfloat16(sure):
    """1 - p at the token, -p at the others: rounded once, so within 2^-8 of each number."""
    others = torch.full((1, 50), (1 - sure) / 50).log()
    logits = torch.cat([torch.tensor([[sure]]).log(), others], 1).bfloat16().requires_grad_()
    drawn = torch.tensor([0]), torch.tensor([0])
    (found,) = torch.autograd.grad(terms(logits, drawn=drawn).drawn.sum(), logits)
    exact = logits.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(exact.log_softmax(-1)[drawn].sum(), exact)
    torch.testing.assert_close(found.double(), expected, rtol=2**-7, atol=0)


def test_gradients_are_compiled_in_their_own_thread(monkeypatch):
    """Those of a GPU have one, which knows nothing of what was set in ours."""
    told, slopes = [], module._slopes
    monkeypatch.setattr(module, "fuses", lambda tensor: True)
    monkeypatch.setattr(
        module, "_fused_slopes", lambda *given: told.append(fused._allowed.get()) or slopes(*given)
    )
    logits = normal(6, 7).requires_grad_()
    thread = threading.Thread(target=terms(logits).entropy.sum().backward)
    thread.start()
    thread.join()
    assert told == [True]
    assert logits.grad is not None


# The discriminator's loss, rewards, advantages


@law
@given(st.integers(0, 2**20), st.sampled_from([0.0, 0.1, 0.9, 1.0]))
def test_the_loss_is_a_mean_over_the_selected_positions(seed, target):
    """Cross-entropy against the target at each one; 0 where nothing is selected."""
    logits, where = normal(4, 5, seed=seed, scale=3.0), uniforms(4, 5, seed) < 0.4
    p = logits.sigmoid()
    each = -(target * p.log() + (1 - target) * (1 - p).log())
    expected = [row[chosen].mean() if chosen.any() else torch.zeros(()).double()
                for row, chosen in zip(each, where, strict=True)]  # fmt: skip
    torch.testing.assert_close(smooth_bce(logits, where, target), torch.stack(expected))


@law
@given(st.integers(0, 2**20), st.sampled_from([0.0, 0.3, 1.0]))
def test_a_reward_is_the_mean_over_masks_or_over_what_was_written(seed, share):
    """What counts for nothing cannot touch it, not even if it is not a number."""
    log_ratio, written = normal(6, 5, seed=seed), uniforms(6, 5, seed) < 0.7
    masked = written & (uniforms(6, 5, seed + 1) < share)
    expected = []
    for n, row in enumerate(log_ratio):
        where = masked[n] if masked[n].any() else written[n]
        expected.append(row[where].mean() if where.any() else torch.zeros(()).double())
        row[~where] = torch.nan
    torch.testing.assert_close(rewards(log_ratio, masked, written), torch.stack(expected))


groups = st.integers(2, 5).flatmap(
    lambda size: st.lists(st.lists(numbers, min_size=size, max_size=size), min_size=1, max_size=4)
)


@law
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("baseline", ["mean", "leave-one-out"])
@given(groups, st.floats(0.1, 3.0))
def test_advantages_are_rewards_compared_within_groups(baseline, scale, rows, eps):
    """With the mean, or with the others' mean, over the spread (population variance), Eq. (7)."""
    reward = torch.tensor(rows, dtype=torch.float64)
    size = reward.shape[1]
    given_scale = {"baseline": baseline, "scale": scale, "eps": eps}
    found = advantages(reward.flatten(), size, **given_scale)
    centred = reward - reward.mean(1, keepdim=True)
    spread = {
        "group": reward.std(1, correction=0)[:, None] + eps,
        "batch": centred.square().mean().sqrt() + eps,
        "none": torch.ones(()).double(),
    }[scale]
    if baseline == "leave-one-out":
        others = (reward.sum(1, keepdim=True) - reward) / (size - 1)
        centred = reward - others
    torch.testing.assert_close(found.values.view_as(reward), centred / spread)
    assert found.clip_fraction.item() == 0
    clipped = advantages(reward.flatten(), size, **given_scale, clip=0.7)
    torch.testing.assert_close(clipped.values, found.values.clamp(-0.7, 0.7))
    share = (found.values.abs() > 0.7).double().mean()
    assert clipped.clip_fraction.item() == pytest.approx(share.item())


@law
@given(groups, st.lists(numbers, min_size=5, max_size=5), st.floats(0.1, 10))
def test_advantages_know_neither_level_nor_unit_of_a_group(rows, levels, unit):
    """A group's level is nothing to it, nor is a common unit where rewards are standardised."""
    reward = torch.tensor(rows, dtype=torch.float64)
    size, given_scale = reward.shape[1], {"eps": 1e-9}
    found = advantages(reward.flatten(), size, **given_scale).values
    moved = reward + torch.tensor(levels[: len(reward)], dtype=torch.float64)[:, None]
    kept = (reward.std(1, correction=0) > 1e-3).repeat_interleave(size)
    for other in (moved, unit * reward):
        same = advantages(other.flatten(), size, **given_scale).values
        torch.testing.assert_close(same[kept], found[kept], rtol=1e-4, atol=1e-6)
    assert torch.equal(advantages(torch.full((8,), 0.3), 4).values, torch.zeros(8).double())


# Times

BETAS = [(1, 1), (2, 5), (5, 2), (3, 1)]
SCHEDULES = [LogLinear(0.0), LogLinear(1e-3), Cosine(0.0), Cosine(1e-3)]
every_schedule = pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
TIMES = torch.linspace(0.002, 0.998, 250, dtype=torch.float64)


def integral(function, low=0.0, high=1.0):
    """Gauss-Legendre with 64 nodes: exact for polynomials."""
    nodes, weights = np.polynomial.legendre.leggauss(64)
    t = torch.from_numpy((nodes + 1) / 2 * (high - low) + low)
    return float((torch.from_numpy(weights) / 2 * (high - low) * function(t)).sum())


@pytest.mark.parametrize(("a", "b"), BETAS)
def test_times_follow_the_beta_law(a, b):
    """Kolmogorov-Smirnov with 20,000 draws; a correct law fails each with probability 1e-5."""
    times = beta_times(a, b, uniforms(20_000, a + b - 1, seed=3))
    assert stats.kstest(times.numpy(), stats.beta(a, b).cdf).pvalue > 1e-5


@law
@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 2**20))
def test_a_time_is_an_order_statistic_of_its_own_uniforms_and_its_density_has_mass_one(a, b, seed):
    drawn = uniforms(5, a + b + 2, seed)
    times = beta_times(a, b, drawn)
    assert torch.equal(times, drawn[:, : a + b - 1].sort(1).values[:, a - 1])
    assert torch.equal(times[3:4], beta_times(a, b, drawn[3:4]))
    density = torch.from_numpy(stats.beta(a, b).pdf(TIMES))
    torch.testing.assert_close(beta_density(a, b, TIMES), density)
    assert integral(lambda t: beta_density(a, b, t)) == pytest.approx(1, abs=1e-11)


def test_times_stay_off_the_ends_even_in_float32():
    times = beta_times(1, 1, torch.tensor([[0.0], [1 - 2.0**-53]], dtype=torch.float64))
    assert times.tolist() == [MARGIN, 1 - MARGIN]
    for each in (times, 1 - times):
        assert ((each.float() > 0) & (each.float() < 1)).all()


@every_schedule
@pytest.mark.parametrize("least", [1e-3, 0.2])
def test_omega_is_minus_alpha_prime_over_one_minus_alpha(schedule, least):
    """1/t, or its like of a cosine; held below the least time."""
    weight = omega(schedule, TIMES, "schedule", least)
    held = TIMES.clamp(min=least)
    expected = -schedule.alpha_prime(held) / (1 - schedule.alpha(held))
    torch.testing.assert_close(weight, expected, rtol=1e-9, atol=0)
    closed = 1 / held
    if isinstance(schedule, Cosine):
        closed = math.pi / 2 / torch.tan(math.pi / 2 * held)
    torch.testing.assert_close(weight, closed, rtol=1e-9, atol=0)
    assert torch.equal(omega(schedule, TIMES, "constant", least), torch.ones_like(TIMES))
