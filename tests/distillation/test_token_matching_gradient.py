"""The gradient of token-matching by enumeration, section 8 of the method.

The student stands at a state z with some law, reveals a set of positions, shows a part of their
tokens and hides the rest: c. With q_ν(x | c) the law of a hidden token given c, the objective is

    J = E_c Σ_hidden KL(q_ν(x^l | c) ‖ p_θ(x^l | c)).

One side is autograd through the enumerated J, the other the expectation of the loss, with an exact
auxiliary denoiser. Nothing is sampled; tolerances are for float64 rounding. That an iteration
computes this loss, on contexts of this law, is shown in `test_token_matching_step.py`.
"""

import pytest
import torch

from didi_instruct.distillation.losses import advantages
from didi_instruct.distillation.token_matching import matching_loss

from .tables import (
    HIDDEN,
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

TEACHER = conditionals(correlated_law())


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


def objective(log_p, law, log_teacher, hidden=None):
    """J, as a function of the student's table."""
    tokens, contexts = joint_tables(log_p, law, hidden)
    there = contexts > 0
    q = tokens[there] / contexts[there][:, None]
    return (tokens[there] * (q.log() - log_teacher[there])).sum()


def gradient_of(function, logits):
    logits = logits.clone().requires_grad_()
    return torch.autograd.grad(function(logits.log_softmax(-1)), logits)[0]


# The estimator's side


def student_gradient(logits, law, log_teacher, *, completion=False, cost="student"):
    """Expected gradient of the student's loss, as a sum over hidden positions: (64, L, V).

    Matching at hidden positions; with completion, REINFORCE at the shown ones of two contexts. Each
    outcome's gradient is weighted with its chance. A context's cost is its expected log-ratio under
    the student, or under the auxiliary denoiser: what it must not be.
    """
    logits = logits.clone().requires_grad_()
    log_p = logits.log_softmax(-1)
    tokens, contexts = joint_tables(log_p, law)
    exact = (tokens / contexts.clamp(min=1e-300)[..., None]).where(tokens > 0, 1.0).log().detach()
    outcomes = Outcomes.enumerate(2 if completion else 1)
    chance = (law(outcomes) * outcomes.tokens_chance(log_p)).detach()
    hidden, shown = ((outcomes.role == role)[:, None] for role in (HIDDEN, SHOWN))
    place, revealed = state_index(outcomes.context), (hidden | shown)[..., None]
    own = log_p[state_index(outcomes.z)][:, None].where(revealed, 0).expand(*place.shape, L, V)
    ratio = (exact[place] - log_teacher[place]).where(hidden[..., None], 0)
    loss = (matching_loss(own, ratio) * hidden).sum((1, 2))
    if completion:
        law_of_cost = own.detach() if cost == "student" else exact[place]
        costs = (matching_loss(law_of_cost, ratio) * hidden).sum(2)
        excess = advantages(costs.flatten(), 2, baseline="leave-one-out", scale="none").values
        token = outcomes.context.clamp(max=V - 1)[..., None]
        log_prob = (own.gather(-1, token).squeeze(-1) * shown).sum(2)
        loss = loss + (excess.view_as(costs) * log_prob).sum(1)
    return torch.autograd.grad((chance * loss).sum() / place.shape[1], logits)[0]


def assert_same(actual, expected, tolerance=1e-9):
    assert expected.norm() > 1e-4, "nothing is compared"
    assert (actual - expected).norm() < tolerance * expected.norm()


def difference(actual, expected):
    """Relative norm of the difference, cosine."""
    cosine = (actual * expected).sum() / (actual.norm() * expected.norm())
    return float((actual - expected).norm() / expected.norm()), float(cosine)


LAWS = {
    "all at once": lambda log_p: first_step(1.0),
    "half of all": lambda log_p: first_step(0.5),
    "walk of 2": lambda log_p: any_step(log_p, 2),
    "walk of 3": lambda log_p: any_step(log_p, 3),
    "one token": lambda log_p: one_token(),
}
every_law = pytest.mark.parametrize("name", LAWS)
several_tokens = pytest.mark.parametrize("name", [name for name in LAWS if name != "one token"])


@every_law
def test_matching_is_the_partial_derivative(name):
    """∂J / ∂p_ν(. | z) at hidden positions, with the law of z and of the contexts held fixed."""
    logits = random_logits(1)
    law = LAWS[name](logits.log_softmax(-1))
    for contexts in (1, 2):
        outcomes = Outcomes.enumerate(contexts)
        total = (law(outcomes) * outcomes.tokens_chance(logits.log_softmax(-1))).sum()
        assert float(total) == pytest.approx(1, abs=1e-12), "outcomes are all there are"
    expected = gradient_of(lambda p: objective(p.detach(), law, TEACHER, hidden=p), logits)
    assert_same(student_gradient(logits, law, TEACHER), expected)


@every_law
def test_matching_vanishes_at_a_factorised_teacher(name):
    """Tokens revealed together are independent: the student can equal such a teacher."""
    log_teacher = conditionals(factorised_law())
    law = LAWS[name](log_teacher)
    assert student_gradient(log_teacher, law, log_teacher).norm() < 1e-14


def test_matching_vanishes_where_one_token_is_revealed():
    """A hidden token's context is then the state itself, where student and teacher agree."""
    assert student_gradient(TEACHER, one_token(), TEACHER).norm() < 1e-14


@several_tokens
def test_matching_moves_away_from_a_correlated_teacher(name):
    """A few-step student cannot be its teacher: there is something better than a copy."""
    law = LAWS[name](TEACHER)
    gradient = student_gradient(TEACHER, law, TEACHER)
    assert gradient.norm() > 3e-3
    after = (TEACHER - 0.1 * gradient / gradient.norm()).log_softmax(-1)
    before, later = (objective(TEACHER, law, TEACHER, hidden=log_p) for log_p in (TEACHER, after))
    assert later < before


@pytest.mark.parametrize("start", ["random", "teacher"])
@several_tokens
def test_matching_and_completion_are_the_whole_gradient(name, start):
    """∇J with the law of z held fixed: hidden tokens by matching, shown ones by REINFORCE.

    Expectation over all pairs of contexts of a state, each the other's baseline.
    """
    logits = TEACHER if start == "teacher" else random_logits(1)
    law = LAWS[name](logits.log_softmax(-1))
    expected = gradient_of(lambda p: objective(p, law, TEACHER), logits)
    assert_same(student_gradient(logits, law, TEACHER, completion=True), expected)


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
    logits = TEACHER if start == "teacher" else random_logits(1)
    law = LAWS[name](logits.log_softmax(-1))
    expected = gradient_of(lambda p: objective(p, law, TEACHER), logits)
    matching = student_gradient(logits, law, TEACHER)
    assert difference(matching, expected) == pytest.approx(alone, abs=1e-3)
    with_kl = student_gradient(logits, law, TEACHER, completion=True, cost="auxiliary")
    assert difference(with_kl, expected) == pytest.approx(auxiliary, abs=1e-3)
