"""Theorem 3.1 by enumeration: the policy gradient is the gradient of the integral KL.

One side is autograd through enumerated marginals, q_ν(z, t) = Σ_x p_ν(x) Q_t(z | x). The other is
the expectation of what `didi` computes: `score_path` on every path that `rollout` may take,
`rewards` of the exact log-ratio, the weight of time. Nothing is sampled: noise is chosen so that
each path is there once. Tolerances are for float64 rounding.
"""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import stats

from didi_instruct.distillation.losses import (
    advantages,
    beta_density,
    omega,
    rewards,
    score_path,
)
from didi_instruct.distillation.rollout import rollout
from didi_instruct.process.masking import revealed_shares
from didi_instruct.process.schedule import Cosine, LogLinear
from didi_instruct.sampling.ancestral import plain
from didi_instruct.sampling.denoiser import LogitsDenoiser
from didi_instruct.sampling.draw import Noise, Purpose

from .tables import (
    CONSISTENT,
    MASK,
    MASKED,
    STATES,
    TEXTS,
    L,
    TableNetwork,
    V,
    conditionals,
    correlated_law,
    corrupted,
    noise_kernel,
    random_logits,
    sampled_law,
    text_index,
)

SCHEDULE = LogLinear(1e-3)
TEACHER = correlated_law()
PIS = [(1, 1), (2, 5), (5, 2)]


@pytest.fixture
def _float64(monkeypatch):
    """`score_path` works in float32, where an identity could be checked to 1e-6 at best."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def times(*values):
    return torch.tensor(values, dtype=torch.float64)


# The exact side


def exact_gradient(logits, schedule, t, weights, chances=()):
    """Gradient of Σ_i weight_i KL(q_ν(., t_i) ‖ q_θ(., t_i)) by autograd: (64, L, V).

    `chances`: of each step before the last one to reveal a mask.
    """
    logits = logits.clone().requires_grad_()
    q = corrupted(sampled_law(logits.log_softmax(-1), chances), schedule.alpha(t))
    log_teacher = corrupted(TEACHER, schedule.alpha(t)).log()
    integral = (weights[:, None] * q * (q.log() - log_teacher)).sum()
    return torch.autograd.grad(integral, logits)[0]


def chances_before(schedule, tau, steps):
    """Chance of each of the equal steps from 1 to τ to reveal a mask, Eq. (2)."""
    alpha = schedule.alpha(torch.linspace(1, tau, steps + 1, dtype=torch.float64))
    return [float((s - t) / (1 - t)) for t, s in itertools.pairwise(alpha)]


# The estimator's side


class Chosen(Noise):
    """Noise that says when each position is revealed, and which third of [0, 1) draws its token."""

    def __init__(self, order, x):
        super().__init__(0, torch.arange(len(x)))
        object.__setattr__(self, "numbers", (order, (x + 0.5) / V))

    @property
    def planned(self):
        return self

    def uniforms(self, count, *stream):
        return self.numbers[stream[0] == Purpose.TOKEN]


def scored_paths(student, schedule, tau, steps):
    """Texts of all paths, their log-probability with its gradient, and the paths' law.

    Every order in which positions may be revealed, with every text; steps = 0 goes from all masks
    to text at once. Where a denoiser finds all tokens as likely, each has its third of [0, 1).
    """
    stops = torch.linspace(1, tau, steps + 1, dtype=torch.float64)
    share = torch.cat([revealed_shares(schedule, stops), times(1.0)])
    turn = torch.cartesian_prod(*[torch.arange(steps + 1)] * L).repeat_interleave(len(TEXTS), 0)
    x = TEXTS.repeat(len(turn) // len(TEXTS), 1)
    result = rollout(
        plain(LogitsDenoiser(lambda reads, t, at: torch.zeros(len(at), V), V)),
        schedule,
        torch.full((1, L), MASK),
        torch.zeros(len(x), dtype=torch.long),
        times(tau).expand(len(x)) if steps else None,
        Chosen(((share[1:] + share[:-1]) / 2)[turn], x),
        MASK,
        steps=max(1, steps),
    )
    assert torch.equal(result.x, x)
    jumps = result.jumps
    log_prob = score_path(student, schedule, jumps, x, [None] * len(jumps)).log_prob
    return x, log_prob, (share.diff()[turn].prod(-1) * log_prob.exp()).detach()


def exact_rewards(text_law, alpha):
    """Reward of every state when the discriminator is perfect at every position: (T, 64)."""
    ratio = corrupted(TEACHER, alpha).log() - corrupted(text_law, alpha).log()
    rows = ratio.reshape(-1, 1).expand(-1, L)
    masked = MASKED.repeat(len(alpha), 1)
    return rewards(rows, masked, torch.ones_like(masked)).view_as(ratio)


def estimator(logits, schedule, t, weights, tau=1.0, steps=0):
    """Gradient of the expected policy loss -E[weight · reward · log P(path)]: (64, L, V)."""
    student = TableNetwork(logits)
    x, log_prob, law = scored_paths(student, schedule, tau, steps)
    text_law = torch.zeros(len(TEXTS), dtype=law.dtype).index_add(0, text_index(x), law)
    alpha = schedule.alpha(t)
    of_state = weights[:, None] * exact_rewards(text_law, alpha)
    of_text = torch.einsum("txz,tz->x", noise_kernel(alpha), of_state)
    loss = -(law * of_text[text_index(x)] * log_prob).sum()
    return torch.autograd.grad(loss, student.logits)[0]


def weight_of(schedule, t, kind, pi=None):
    """ω(t), or ω(t) / π(t)."""
    weight = omega(schedule, t, kind, 0.05)
    return weight / beta_density(*pi, t) if pi else weight


def assert_same(actual, expected, tolerance=1e-9):
    assert expected.norm() > 1e-8, "nothing is compared"
    assert (actual - expected).norm() < tolerance * expected.norm()


def difference(actual, expected):
    """Relative norm of the difference, cosine."""
    cosine = (actual * expected).sum() / (actual.norm() * expected.norm())
    return float((actual - expected).norm() / expected.norm()), float(cosine)


# a. One step


@pytest.mark.usefixtures("_float64")
@pytest.mark.parametrize("pi", PIS)
@pytest.mark.parametrize("kind", ["constant", "schedule"])
@pytest.mark.parametrize("importance", [True, False])
@pytest.mark.parametrize("t", [0.02, 0.3, 0.9])
def test_one_step_gradient_at_every_time(pi, kind, importance, t):
    """π(t) w(t) E[...] = ω(t) ∇KL; without importance weighting, = ω(t) π(t) ∇KL."""
    t = times(t)
    density = torch.from_numpy(stats.beta(*pi).pdf(t))
    target = torch.ones(1) if kind == "constant" else 1 / t.clamp(min=0.05)
    weight = weight_of(SCHEDULE, t, kind, pi if importance else None)
    logits = random_logits(1)
    actual = estimator(logits, SCHEDULE, t, density * weight)
    target = target if importance else target * density
    assert_same(actual, exact_gradient(logits, SCHEDULE, t, target))


@pytest.mark.usefixtures("_float64")
@pytest.mark.parametrize("pi", PIS)
@pytest.mark.parametrize("kind", ["constant", "schedule"])
@pytest.mark.parametrize("schedule", [LogLinear(), Cosine()], ids=["log-linear", "cosine"])
def test_one_step_gradient_of_the_integral(pi, kind, schedule):
    """E_{t ~ π} with weight ω/π is the integral of Eq. (4) with weight ω, over 2,000 cells.

    The probability of a cell comes from the binomial law behind `beta_times` (the a-th smallest of
    a + b - 1 uniforms lies below t if a of them do), not from the density. The cells narrow towards
    the ends, where the density is far from constant; what the sum still errs by is below 3e-4.
    """
    a, b = pi
    edges = (1 - (math.pi * torch.linspace(0, 1, 2001, dtype=torch.float64)).cos()) / 2
    t = (edges[1:] + edges[:-1]) / 2
    below = torch.from_numpy(stats.binom(a + b - 1, edges.numpy()).sf(a - 1))
    weight = weight_of(schedule, t, kind, pi)
    logits = random_logits(2)
    actual = estimator(logits, schedule, t, below.diff() * weight)

    nodes, shares = np.polynomial.legendre.leggauss(40)
    # Two ranges, since ω has a kink where it is held.
    pieces = [(0, 0.05), (0.05, 1)]
    u = torch.cat([torch.from_numpy(lo + (hi - lo) * (nodes + 1) / 2) for lo, hi in pieces])
    du = torch.cat([torch.from_numpy((hi - lo) * shares / 2) for lo, hi in pieces])
    if kind == "schedule":
        held = u.clamp(min=0.05)
        du = du * -schedule.alpha_prime(held) / (1 - schedule.alpha(held))
    assert_same(actual, exact_gradient(logits, schedule, u, du), 3e-4)


# b, c. Through z_τ


@pytest.mark.usefixtures("_float64")
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("tau", [0.2, 0.7])
@pytest.mark.parametrize("coupled", [True, False])
@pytest.mark.parametrize("schedule", [SCHEDULE, Cosine()], ids=["log-linear", "cosine"])
def test_path_score_is_unbiased_for_the_student_that_takes_the_path(steps, tau, coupled, schedule):
    """At a fixed τ the law of texts is that of a (K + 1)-step student: its KL has this gradient.

    Many paths lead to one text, and E[∇log P(path) | x] = ∇log p_ν(x). So the decomposed score is
    no approximation for the student that is rolled out, whichever time its texts are compared at.
    """
    t = times(tau if coupled else 0.45)
    logits = random_logits(4)
    expected = exact_gradient(logits, schedule, t, times(1.0), chances_before(schedule, tau, steps))
    assert_same(estimator(logits, schedule, t, times(1.0), tau, steps), expected)


@pytest.mark.usefixtures("_float64")
@pytest.mark.parametrize(
    ("start", "error", "cosine", "cosine_at_masks"),
    [("teacher", 0.499, 0.983, 0.991), ("random", 0.473, 0.955, 0.970)],
)
def test_path_score_is_biased_for_the_one_step_student(start, error, cosine, cosine_at_masks):
    """Eq. (9) of the paper approximates the score of Theorem 3.1: how far off, with ω = π = 1.

    From the teacher's conditionals the decomposed gradient misses that of the one-step integral KL
    by 50% of its norm (cosine 0.983; 0.991 on the logits of the all-masked state, the only ones
    that a one-step student has); from random tables by 47% (cosine 0.955; 0.970). It is shorter:
    two steps leave less to correct.
    """
    logits = conditionals(TEACHER) if start == "teacher" else random_logits(5)
    nodes, shares = np.polynomial.legendre.leggauss(24)
    t, weights = torch.from_numpy((nodes + 1) / 2), torch.from_numpy(shares / 2)
    one_step = exact_gradient(logits, SCHEDULE, t, weights)
    decomposed = sum(
        estimator(logits, SCHEDULE, tau[None], weight[None], float(tau), 1)
        for tau, weight in zip(t, weights, strict=True)
    )
    assert difference(decomposed, one_step) == pytest.approx((error, cosine), abs=1e-3)
    at_masks = difference(decomposed[-1], one_step[-1])
    assert at_masks[1] == pytest.approx(cosine_at_masks, abs=1e-3)
    assert not one_step[:-1].any()


# Advantages instead of rewards


def expected_with_advantages(logits, t, **settings):
    """Expectation of the one-step estimator over every group of two texts and their corruptions."""
    student = TableNetwork(logits)
    x, log_prob, law = scored_paths(student, SCHEDULE, 1.0, 0)
    alpha = SCHEDULE.alpha(t)
    joint = (law[:, None] * noise_kernel(alpha)[0]).flatten()
    reward = exact_rewards(law, alpha)[0].expand(len(TEXTS), -1).flatten()
    text = text_index(x)[:, None].expand(-1, len(STATES)).flatten()
    possible = CONSISTENT.flatten() > 0
    joint, reward, text = joint[possible], reward[possible], text[possible]
    first, second = torch.cartesian_prod(*[torch.arange(len(joint))] * 2).unbind(1)
    group = torch.stack([first, second], 1)
    values = advantages(reward[group].flatten(), 2, **settings).values.view(-1, 2)
    per_member = joint[group].prod(1, keepdim=True) * values / 2
    of_text = torch.zeros(len(TEXTS), dtype=law.dtype)
    of_text.index_add_(0, text[group].flatten(), per_member.flatten())
    return torch.autograd.grad(-(of_text * log_prob).sum(), student.logits)[0]


@pytest.mark.usefixtures("_float64")
@pytest.mark.parametrize("t", [0.2, 0.6])
def test_leave_one_out_is_unbiased_and_the_group_mean_shrinks(t):
    """Two texts: against the other one exact; against the mean of both exactly half of it."""
    logits, t = random_logits(6), times(t)
    exact = exact_gradient(logits, SCHEDULE, t, times(1.0))
    left_out = expected_with_advantages(logits, t, baseline="leave-one-out", scale="none")
    assert_same(left_out, exact)
    centred = expected_with_advantages(logits, t, baseline="mean", scale="none")
    assert_same(centred, exact / 2)


@pytest.mark.usefixtures("_float64")
@pytest.mark.parametrize(
    ("start", "t", "error", "cosine"),
    [
        ("random", 0.6, 0.380, 0.993),
        ("teacher", 0.6, 1.192, 0.599),
        ("teacher", 0.9, 3.122, -0.105),
    ],
)
def test_division_by_the_group_deviation_is_biased(start, t, error, cosine):
    """Standardised rewards, Eq. (7), of two texts are ±1: which is better counts, not by how much.

    From random tables the expected gradient is off by 38% of its norm, mostly in length (cosine
    0.993). From the teacher's conditionals, where few states have a ratio at all, it is off by 119%
    at t = 0.6 (cosine 0.599), and at t = 0.9 it points the wrong way (312%, cosine -0.105). This is
    the worst case, G = 2: as a group grows its deviation becomes a constant.
    """
    logits = conditionals(TEACHER) if start == "teacher" else random_logits(6)
    exact = exact_gradient(logits, SCHEDULE, times(t), times(1.0))
    standardised = expected_with_advantages(logits, times(t), baseline="mean", scale="group")
    assert difference(standardised, exact) == pytest.approx((error, cosine), abs=1e-3)
