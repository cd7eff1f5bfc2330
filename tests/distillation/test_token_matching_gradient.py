"""The gradient of token-matching by enumeration, section 8 of the method.

The student stands at a state z with some law, reveals a set of positions, shows a part of their
tokens and hides the rest: c. With q_ν(x | c) the law of a hidden token given c, the objective is

    J = E_c Σ_hidden KL(q_ν(x^l | c) ‖ p_θ(x^l | c)).

One side is autograd through the enumerated J, the other the expectation of what `student_loss`
computes, with an exact auxiliary denoiser. Nothing is sampled; tolerances are for float64 rounding.
"""

from types import SimpleNamespace

import pytest
import torch

from didi_instruct.config.distill import TokenMatchingConfig
from didi_instruct.distillation.auxiliary import Drawn, Plan
from didi_instruct.distillation.rollout import (
    Noise,
    as_denoiser,
    path_times,
    revealed_between,
    revealed_shares,
    walk,
)
from didi_instruct.distillation.token_matching import (
    completion_term,
    matching_loss,
    student_loss,
)
from didi_instruct.process.schedule import Cosine, LogLinear
from didi_instruct.sampling.ancestral import plain
from didi_instruct.sampling.draw import Purpose

from .tables import (
    HIDDEN,
    MASK,
    SHOWN,
    STATES,
    L,
    Outcomes,
    V,
    any_step,
    conditionals,
    correlated_law,
    factorised_law,
    first_step,
    one_token,
    random_logits,
    state_index,
)

TEACHER = correlated_law()


# The exact side


def joint_tables(log_p, law, hidden=None):
    """Law of (c, l, token at l) and of (c, l), for l hidden: (64, L, V) and (64, L).

    `hidden`: the student's law at hidden positions, if it is another object than log_p.
    """
    hidden = log_p if hidden is None else hidden
    outcomes = Outcomes.enumerate()
    weight = law(outcomes) * outcomes.tokens_chance(log_p)
    u, position = (outcomes.role == HIDDEN).nonzero().unbind(1)
    place = state_index(outcomes.context[:, 0])[u], position
    p = hidden.exp()[state_index(outcomes.z)[u], position]
    tokens = torch.zeros(len(STATES), L, V, dtype=torch.float64)
    contexts = torch.zeros(len(STATES), L, dtype=torch.float64)
    return (
        tokens.index_put(place, weight[u, None] * p, accumulate=True),
        contexts.index_put(place, weight[u], accumulate=True),
    )


def exact_auxiliary(log_p, law):
    """Log q_ν(x^l | c) for every context and hidden position, (64, L, V); 0 where there is none."""
    tokens, contexts = joint_tables(log_p, law)
    return (tokens / contexts.clamp(min=1e-300)[..., None]).where(tokens > 0, 1.0).log().detach()


def objective(log_p, law, log_teacher, hidden=None):
    """J, as a function of the student's table."""
    tokens, contexts = joint_tables(log_p, law, hidden)
    there = contexts > 0
    q = tokens[there] / contexts[there][:, None]
    return (tokens[there] * (q.log() - log_teacher[there])).sum()


# The estimator's side


def inputs(outcomes, log_p, log_phi):
    """Plan, drawn tokens and auxiliary rows of all outcomes as one batch; log_p may be a leaf."""
    contexts = outcomes.context.shape[1]
    state = torch.arange(len(outcomes.z)).repeat_interleave(contexts)
    revealed = (outcomes.role == SHOWN) | (outcomes.role == HIDDEN)
    context = outcomes.context.flatten(0, 1)
    time = torch.ones(len(outcomes.z))
    plan = Plan(
        batch=None,
        start=outcomes.z,
        owner=torch.arange(len(outcomes.z)),
        path=SimpleNamespace(t=time),
        revealed=revealed,
        state=state,
        hidden=(outcomes.role == HIDDEN)[state],
        t_context=time[state],
    )
    rows = log_p[state_index(outcomes.z)][revealed].detach().requires_grad_()
    drawn = Drawn(outcomes.z, time, context, context, plan.t_context, rows, torch.zeros(()))
    return plan, drawn, log_phi[state_index(context)][plan.hidden]


def expected_gradient(logits, outcomes, law, term):
    """Expected gradient of a term (plan, drawn, auxiliary rows) -> loss, per context: (64, L, V).

    The term is a sum over states that share no row of the student's law, so each row's gradient is
    weighted afterwards with the chance of its state and tokens.
    """
    logits = logits.clone().requires_grad_()
    log_p = logits.log_softmax(-1)
    plan, drawn, log_phi = inputs(outcomes, log_p.detach(), exact_auxiliary(log_p, law))
    weight = (law(outcomes) * outcomes.tokens_chance(log_p)).detach()
    (slope,) = torch.autograd.grad(term(plan, drawn, log_phi), drawn.log_p)
    rows = log_p[state_index(outcomes.z)][plan.revealed]
    weighted = weight[plan.revealed.nonzero()[:, 0], None] * slope * rows
    return torch.autograd.grad(weighted.sum() / outcomes.context.shape[1], logits)[0]


def student_gradient(logits, law, log_teacher, contexts=1, completion=0.0):
    """Expected gradient of the whole student loss, before division by the hidden count."""
    settings = TokenMatchingConfig(ratio_clip=0.0, contexts=contexts, completion=completion)

    def term(plan, drawn, log_phi):
        log_theta = log_teacher[state_index(drawn.context)][plan.hidden]
        given = (plan, drawn, log_phi, log_theta, None, torch.ones(2), V)
        return student_loss(settings, *given)[0]

    return expected_gradient(logits, Outcomes.enumerate(contexts), law, term)


def gradient_of(function, logits):
    logits = logits.clone().requires_grad_()
    return torch.autograd.grad(function(logits.log_softmax(-1)), logits)[0]


def assert_same(actual, expected, tolerance=1e-9):
    assert expected.norm() > 1e-4, "nothing is compared"
    assert (actual - expected).norm() < tolerance * expected.norm()


def difference(actual, expected):
    """Relative norm of the difference, cosine."""
    cosine = (actual * expected).sum() / (actual.norm() * expected.norm())
    return float((actual - expected).norm() / expected.norm()), float(cosine)


# Matching

LAWS = {
    "all at once": lambda log_p: first_step(1.0),
    "half of all": lambda log_p: first_step(0.5),
    "walk of 2": lambda log_p: any_step(log_p, 2),
    "walk of 3": lambda log_p: any_step(log_p, 3),
    "one token": lambda log_p: one_token(),
}


@pytest.mark.parametrize("name", LAWS)
@pytest.mark.parametrize("contexts", [1, 2])
def test_outcomes_are_all_there_are(name, contexts):
    log_p = random_logits(1).log_softmax(-1)
    outcomes = Outcomes.enumerate(contexts)
    total = (LAWS[name](log_p)(outcomes) * outcomes.tokens_chance(log_p)).sum()
    assert float(total) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("name", LAWS)
@pytest.mark.parametrize("contexts", [1, 2])
def test_matching_is_the_partial_derivative(name, contexts):
    """∂J / ∂p_ν(. | z) at hidden positions, with the law of z and of the contexts held fixed."""
    logits, log_teacher = random_logits(1), conditionals(TEACHER)
    law = LAWS[name](logits.log_softmax(-1))
    expected = gradient_of(lambda p: objective(p.detach(), law, log_teacher, hidden=p), logits)
    assert_same(student_gradient(logits, law, log_teacher, contexts), expected)


@pytest.mark.parametrize("name", LAWS)
def test_matching_vanishes_at_a_factorised_teacher(name):
    """Tokens revealed together are independent: the student can equal such a teacher."""
    log_teacher = conditionals(factorised_law())
    law = LAWS[name](log_teacher)
    assert student_gradient(log_teacher, law, log_teacher).norm() < 1e-14


def test_matching_vanishes_where_one_token_is_revealed():
    """A hidden token's context is then the state itself, where student and teacher agree."""
    log_teacher = conditionals(TEACHER)
    assert student_gradient(log_teacher, one_token(), log_teacher).norm() < 1e-14


@pytest.mark.parametrize("name", ["all at once", "half of all", "walk of 2", "walk of 3"])
def test_matching_moves_away_from_a_correlated_teacher(name):
    """A few-step student cannot be its teacher: there is something better than a copy."""
    log_teacher = conditionals(TEACHER)
    law = LAWS[name](log_teacher)
    gradient = student_gradient(log_teacher, law, log_teacher)
    assert gradient.norm() > 3e-3
    after = (log_teacher - 0.1 * gradient / gradient.norm()).log_softmax(-1)

    def gap(log_p):
        return float(objective(log_teacher, law, log_teacher, hidden=log_p))

    assert gap(after) < gap(log_teacher)


# Completion


@pytest.mark.parametrize("start", ["random", "teacher"])
@pytest.mark.parametrize(
    "name",
    [
        "all at once",
        "half of all",
        "walk of 2",
        "walk of 3",
    ],
)
def test_matching_and_completion_are_the_whole_gradient(name, start):
    """∇J with the law of z held fixed: hidden tokens by matching, shown ones by REINFORCE.

    Expectation over all pairs of contexts of a state, each the other's baseline.
    """
    log_teacher = conditionals(TEACHER)
    logits = log_teacher if start == "teacher" else random_logits(1)
    law = LAWS[name](logits.log_softmax(-1))
    expected = gradient_of(lambda p: objective(p, law, log_teacher), logits)
    actual = student_gradient(logits, law, log_teacher, contexts=2, completion=1.0)
    assert_same(actual, expected)


def completion_gradient(logits, law, log_teacher, under):
    """Expected gradient of the completion term for a cost under the student or the auxiliary."""

    def term(plan, drawn, log_phi):
        ratio = log_phi - log_teacher[state_index(drawn.context)][plan.hidden]
        log_p = drawn.log_p[plan.rows_of(plan.hidden)].detach()
        gaps = matching_loss(log_p if under == "student" else log_phi, ratio)
        return completion_term(plan, drawn, gaps, 2)

    return expected_gradient(logits, Outcomes.enumerate(2), law, term)


@pytest.mark.parametrize(
    ("name", "start", "alone", "auxiliary"),
    [
        ("all at once", "teacher", (0.631, 0.973), (0.0, 1.0)),
        ("walk of 2", "teacher", (0.533, 0.895), (0.362, 0.964)),
        ("walk of 3", "teacher", (0.408, 0.931), (0.329, 0.960)),
        ("walk of 2", "random", (0.167, 0.988), (0.081, 0.997)),
        ("walk of 3", "random", (0.115, 0.994), (0.058, 0.998)),
    ],
)
def test_cost_of_a_context_is_the_gap_under_the_student(name, start, alone, auxiliary):
    """J = Σ_c Σ_v N(c, v) [log q(v | c) - log p_θ(v | c)], N(c, v) = Σ_z P(z, c) p_ν(v | z).

    The bracket has no derivative of its own, so P(z, c) moves J by Σ_v p_ν(v | z) [...]: the gap
    under the student at z, not KL(q ‖ p_θ), its mean over the states that may lead to c. The two
    agree where c tells z, as on the first step. On a walk the KL leaves out that shown tokens also
    tell which state they came from.

    Off the whole gradient by (relative norm, cosine), at the teacher on walks of 2: matching alone
    (0.533, 0.895), with the KL as cost (0.362, 0.964); of 3: (0.408, 0.931) and (0.329, 0.960).
    """
    log_teacher = conditionals(TEACHER)
    logits = log_teacher if start == "teacher" else random_logits(1)
    law = LAWS[name](logits.log_softmax(-1))
    expected = gradient_of(lambda p: objective(p, law, log_teacher), logits)
    matching = student_gradient(logits, law, log_teacher)
    completion = {
        under: completion_gradient(logits, law, log_teacher, under)
        for under in ("student", "auxiliary")
    }
    assert_same(matching + completion["student"], expected)
    assert difference(matching, expected) == pytest.approx(alone, abs=1e-3)
    with_kl = difference(matching + completion["auxiliary"], expected)
    assert with_kl == pytest.approx(auxiliary, abs=1e-3)


# Paths

BUDGETS = (4, 3, 8)


def test_path_times_are_uniform_over_budgets_and_their_steps():
    """Step k of the i-th of n budgets N has [i + k / N, i + (k + 1) / N) / n of the unit interval.

    The walk takes the first k steps of N equal ones and then stands still, so that all walks have
    as many times.
    """
    for i, budget in enumerate(BUDGETS):
        for k in range(budget):
            where = (i + (k + torch.tensor([0.001, 0.5, 0.999]).double()) / budget) / len(BUDGETS)
            times, t, after, _ = path_times(BUDGETS, where)
            expected = [1 - min(step, k) / budget for step in range(max(BUDGETS))]
            assert times.tolist() == [expected] * 3
            assert t.tolist() == [expected[-1]] * 3
            assert after.tolist() == [1 - (k + 1) / budget] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_path_times_at_the_ends(dtype):
    """The smallest and the largest number of `dtype` in [0, 1)."""
    where = torch.tensor([0.0, 1 - torch.finfo(dtype).eps / 2], dtype=dtype)
    times, t, after, _ = path_times(BUDGETS, where)
    assert (times.dtype, t.dtype, after.dtype) == (torch.float64,) * 3
    assert times.tolist() == [[1.0] * 8, [1 - k / 8 for k in range(8)]]
    assert t.tolist() == [1.0, 1 / 8]
    assert after.tolist() == [3 / 4, 0.0]


@pytest.mark.parametrize("schedule", [LogLinear(1e-3), Cosine()], ids=["log-linear", "cosine"])
def test_every_position_is_revealed_by_one_step_of_a_budget(schedule):
    """What is masked after the walk, and what the next step reveals, follow the same order."""
    budget, texts = 5, 200
    where = (torch.arange(budget) + 0.5).double() / budget
    times, t, after, _ = path_times((budget,), where)
    start = torch.full((1, 16), MASK)
    noise = Noise(0, torch.arange(texts))
    order = noise.uniforms(16, Purpose.REVEAL)
    turns = torch.zeros(texts, 16, dtype=torch.long)
    for k in range(budget):
        walked = walk(
            plain(as_denoiser(lambda z, t, where: torch.zeros(int(where.sum()), V))),
            schedule,
            start,
            torch.zeros(texts, dtype=torch.long),
            times[k].expand(texts, -1),
            noise,
            MASK,
        )
        low, high = revealed_shares(schedule, torch.stack([t[k], after[k]]))
        revealed = revealed_between(order, low.expand(texts), high.expand(texts))
        assert torch.equal(walked.z == MASK, order >= low)
        assert (walked.z[revealed] == MASK).all()
        turns += revealed
    assert (turns == 1).all()
