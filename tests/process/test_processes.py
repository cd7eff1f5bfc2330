"""What is true of both noise processes, by enumeration over a vocabulary of three."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sampling.enumeration import all_states

from didi_instruct.process import masking, uniform
from didi_instruct.process.schedule import Cosine, LogLinear

from .reference import MASK, MASKED, UNIFORM, V, entropy, level, random_joint

LEVELS = [(0.9, 0.2), (0.5, 0.5 - 1e-6), (1.0, 0.3), (0.6, 0.0), (1.0, 0.0)]
EXACT = {"masked": 1e-9, "uniform": 1e-6}
"""Of integrals over time, by quadrature."""

every_process = pytest.mark.parametrize("process", [MASKED, UNIFORM], ids=lambda p: p.name)
every_level = pytest.mark.parametrize(("alpha_s", "alpha_t"), LEVELS)
every_schedule = pytest.mark.parametrize("schedule", [LogLinear(), Cosine()], ids=str)


def posterior_matrix(process, x, alpha_s, alpha_t):
    """Return the library's q(z_s | z_t, x) for every z_t: (S, S), rows z_t."""
    z = process.states(1).T
    p_x = F.one_hot(torch.tensor(x), V).double().expand(1, z.shape[1], V)
    return process.posterior(z, p_x, level(alpha_s), level(alpha_t))[0]


@every_process
@every_level
@pytest.mark.parametrize("x", range(V))
def test_posterior_is_bayes_rule(process, x, alpha_s, alpha_t):
    """Eq. (2): q(z_s | z_t, x) = q(z_t | z_s) q(z_s | x) / q(z_t | x)."""
    q_s, q_t = (process.marginal(torch.tensor([[x]]), level(a))[0, 0] for a in (alpha_s, alpha_t))
    found, possible = posterior_matrix(process, x, alpha_s, alpha_t), q_t > 0
    expected = (process.step(alpha_s, alpha_t) * q_s[:, None] / q_t).T
    assert torch.allclose(found[possible], expected[possible], atol=1e-12)
    assert torch.allclose(q_t @ found, q_s, atol=1e-12)  # and so leads from q_t to q_s


@every_process
@every_level
def test_posterior_of_a_guess_is_a_distribution(process, alpha_s, alpha_t):
    """Any p_x gives rows that sum to 1 and are not negative; what is not masked stays."""
    z = process.states(1).T
    p_x = torch.randn(2, z.shape[1], V, generator=torch.Generator().manual_seed(2))
    p_x = p_x.double().softmax(-1)
    found = process.posterior(z.expand(2, -1), p_x, level(alpha_s), level(alpha_t))
    assert torch.allclose(found.sum(-1), torch.ones(2, z.shape[1], dtype=torch.float64))
    assert bool((found >= 0).all())
    if process is MASKED:
        assert torch.equal(found[0, :V], torch.eye(V + 1, dtype=torch.float64)[:V])


@every_process
@pytest.mark.parametrize("length", [1, 2, 3])
def test_exact_denoiser_gives_the_true_reverse_step(process, length):
    """q(z_s^l | z_t) = E over x given z_t of q(z_s^l | z_t^l, x^l), for a correlated joint of x.

    Of uniform states p_x has to be p(x^l | z_t^{-l}). With p(x^l | z_t) in its place the equation
    fails: z_t^l would be counted twice.
    """
    joint, alpha_s, alpha_t = random_joint(length), level(0.8), level(0.35)
    z = process.states(length)
    found = process.posterior(z, process.denoiser(joint, length, alpha_t), alpha_s, alpha_t)
    expected = torch.zeros_like(found)
    weights = process.text_posterior(joint, length, alpha_t)
    for x, weight in zip(all_states(V, length), weights.T, strict=True):
        one_hot = F.one_hot(x, V).double().expand(len(z), length, V)
        expected += weight[:, None, None] * process.posterior(z, one_hot, alpha_s, alpha_t)
    assert torch.allclose(found, expected, atol=1e-12)
    if process is UNIFORM:
        wrong = process.denoiser(joint, length, alpha_t, has_seen_itself=True)
        assert (process.posterior(z, wrong, alpha_s, alpha_t) - expected).abs().max() > 0.01


@every_process
@every_schedule
@pytest.mark.parametrize("length", [1, 2])
def test_nelbo_of_exact_denoiser_is_the_entropy(process, schedule, length):
    """With eps = 0 it is H(x), whatever the schedule; of a wrong denoiser more, whatever it is."""
    joint, exact = random_joint(length), EXACT[process.name]
    found = process.integrated_nelbo(joint, length, schedule)
    assert found == pytest.approx(entropy(joint), abs=exact)
    wrong = {"error": 1.0} if process is MASKED else {"has_seen_itself": True}
    more = process.integrated_nelbo(joint, length, schedule, **wrong)
    assert more > entropy(joint) + 0.01
    if process is MASKED:  # its denoiser does not depend on time
        same = process.integrated_nelbo(joint, length, LogLinear(), **wrong)
        assert more == pytest.approx(same, abs=exact)


@every_process
@pytest.mark.parametrize("schedule", [LogLinear(1e-3), LogLinear(0.2), Cosine(0.2)], ids=str)
def test_nelbo_with_eps_leaves_out_what_z_1_shows(process, schedule):
    """With alpha_1 = eps an exact denoiser gives H(x | z_1)."""
    joint = random_joint(2)
    p_xz = process.likelihoods(2, level(schedule.eps)).prod(-1) * joint
    expected = entropy(p_xz) - entropy(p_xz.sum(1))
    found = process.integrated_nelbo(joint, 2, schedule)
    assert found == pytest.approx(expected, abs=EXACT[process.name])


STEPS = 4_000


@pytest.mark.parametrize("alpha", [0.0, 0.001, 0.25, 0.9, 1.0])
@pytest.mark.parametrize("x", range(V))
def test_noise_has_the_law_of_the_marginal(x, alpha):
    """Every number of a fine grid with every other noise, Eq. (1): `mask`, `corrupt`, `state`.

    The level itself is a number of the grid: a token stays below it, and not at it.
    """
    uniforms = (torch.arange(STEPS, dtype=torch.float64) / STEPS).repeat(V)[None]
    tokens = torch.arange(V).repeat_interleave(STEPS)[None]
    text, few = torch.full_like(tokens, x), slice((V - 1) * STEPS)
    masked = masking.mask(text, level(alpha), MASK, uniforms)
    others = uniform.state(text[:, few], level(alpha), V, uniforms[:, few], tokens[:, few])
    for process, z, error in [
        (MASKED, masked.masked_fill(masked == MASK, V), 1e-12),
        (UNIFORM, uniform.corrupt(text, level(alpha), uniforms, tokens), 1e-12),
        (UNIFORM, others, 1 / STEPS),
    ]:
        share = z.flatten().bincount(minlength=len(process.noise)).double() / z.numel()
        expected = process.marginal(torch.tensor([[x]]), level(alpha))[0, 0]
        assert torch.allclose(share, expected, atol=error)


@settings(deadline=None, derandomize=True, database=None, max_examples=50)
@given(st.integers(0, 9), st.floats(0, 1), st.floats(0, 1))
def test_the_same_noise_at_a_lower_level_changes_more(seed, alpha, other):
    """Of `mask`, `corrupt` and `state`: what is noise at a level is noise at all lower ones."""
    generator = torch.Generator().manual_seed(seed)
    x, tokens = torch.randint(V, (2, 3, 50), generator=generator)
    uniforms = torch.rand(3, 50, generator=generator)
    higher, lower = level(max(alpha, other)), level(min(alpha, other))
    for noisy in (
        lambda a: masking.mask(x, a, MASK, uniforms),
        lambda a: uniform.corrupt(x, a, uniforms, tokens),
        lambda a: uniform.state(x, a, V, uniforms, tokens.clamp(max=V - 2)),
    ):
        before, after = noisy(higher), noisy(lower)
        assert torch.equal(before[after == x], x[after == x])
        changed = before != x
        assert torch.equal(before[changed], after[changed])
