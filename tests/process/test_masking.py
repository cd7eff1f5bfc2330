"""Truths of the masked process, by enumeration over a vocabulary of three."""

import math

import pytest
import torch
from numpy.polynomial.legendre import leggauss
from torch import Tensor

from didi_instruct.process.masking import (
    mask,
    nelbo,
    posterior,
    reveal_probability,
    stratified_times,
    subs,
)
from didi_instruct.process.schedule import Cosine, LogLinear, Schedule

V = 3
MASK = 7  # neither V nor a token: the id is free
LEVELS = [(0.9, 0.2), (0.5, 0.5 - 1e-6), (1.0, 0.3), (0.6, 0.0), (1.0, 0.0)]

every_level = pytest.mark.parametrize(("alpha_s", "alpha_t"), LEVELS)


def level(alpha: float) -> Tensor:
    return torch.tensor([[alpha]], dtype=torch.float64)


def texts(length: int) -> Tensor:
    """All V^L texts, (V^L, L)."""
    return torch.cartesian_prod(*[torch.arange(V)] * length).view(-1, length)


def mask_sets(length: int) -> Tensor:
    """All 2^L sets of masked positions, (2^L, L) bool."""
    return torch.cartesian_prod(*[torch.tensor([False, True])] * length).view(-1, length)


def random_joint(length: int, seed: int = 0) -> Tensor:
    """Probabilities of all V^L texts, correlated and far from uniform."""
    generator = torch.Generator().manual_seed(seed)
    logits = 1.5 * torch.randn(V**length, generator=generator, dtype=torch.float64)
    return logits.softmax(0)


def text_posterior(z: Tensor, joint: Tensor) -> Tensor:
    """q(x | z) for each row of z, (N, V^L)."""
    agrees = (z[:, None] == texts(z.shape[1])) | (z[:, None] == MASK)
    weights = agrees.all(-1) * joint
    return weights / weights.sum(-1, keepdim=True)


def exact_denoiser(z: Tensor, joint: Tensor) -> Tensor:
    """q(x^l | z), (N, L, V)."""
    one_hot = torch.nn.functional.one_hot(texts(z.shape[1]), V).double()
    return torch.einsum("nx,xlv->nlv", text_posterior(z, joint), one_hot)


def forward_marginal(x: Tensor, alpha: float) -> Tensor:
    """q(z_t | x) by Eq. (1), (..., V + 1), mask last."""
    clean = torch.nn.functional.one_hot(x, V + 1).double()
    noise = torch.nn.functional.one_hot(torch.tensor(V), V + 1).double()
    return alpha * clean + (1 - alpha) * noise


def forward_step(alpha_s: float, alpha_t: float) -> Tensor:
    """q(z_t | z_s) as a matrix, rows z_s: the mask absorbs."""
    keep = alpha_t / alpha_s
    matrix = keep * torch.eye(V + 1, dtype=torch.float64)
    matrix[:, V] += 1 - keep
    return matrix


def posterior_matrix(x: int, alpha_s: float, alpha_t: float) -> Tensor:
    """Return the library's q(z_s | z_t, x) for every z_t, (V + 1, V + 1), rows z_t."""
    z_t = torch.tensor([[0, 1, 2, MASK]])
    p_x = torch.nn.functional.one_hot(torch.tensor(x), V).double().expand(1, V + 1, V)
    return posterior(z_t, p_x, level(alpha_s), level(alpha_t), MASK)[0]


@every_level
@pytest.mark.parametrize("x", range(V))
def test_posterior_is_bayes_rule(x: int, alpha_s: float, alpha_t: float):
    """Eq. (2): q(z_s | z_t, x) = q(z_t | z_s) q(z_s | x) / q(z_t | x)."""
    found = posterior_matrix(x, alpha_s, alpha_t)
    q_s = forward_marginal(torch.tensor(x), alpha_s)
    q_t = forward_marginal(torch.tensor(x), alpha_t)
    for z_t in range(V + 1):
        if q_t[z_t] > 0:
            expected = forward_step(alpha_s, alpha_t)[:, z_t] * q_s / q_t[z_t]
            assert torch.allclose(found[z_t], expected, atol=1e-12)


@every_level
@pytest.mark.parametrize("x", range(V))
def test_posterior_leads_from_q_t_to_q_s(x: int, alpha_s: float, alpha_t: float):
    """q(z_s | x) = sum over z_t of q(z_s | z_t, x) q(z_t | x)."""
    q_t = forward_marginal(torch.tensor(x), alpha_t)
    q_s = q_t @ posterior_matrix(x, alpha_s, alpha_t)
    assert torch.allclose(q_s, forward_marginal(torch.tensor(x), alpha_s), atol=1e-12)


@every_level
def test_posterior_of_a_guess_is_a_distribution_and_keeps_visible_tokens(alpha_s, alpha_t):
    """Each row sums to 1 and is not negative; a visible token keeps probability 1 whatever p_x."""
    generator = torch.Generator().manual_seed(1)
    p_x = torch.rand(1, 4, V, generator=generator, dtype=torch.float64)
    p_x /= p_x.sum(-1, keepdim=True)
    z_t = torch.tensor([[0, 1, 2, MASK]])
    found = posterior(z_t, p_x, level(alpha_s), level(alpha_t), MASK)[0]
    assert torch.allclose(found.sum(-1), torch.ones(4, dtype=torch.float64))
    assert (found >= 0).all()
    assert torch.equal(found[:V], torch.eye(V + 1, dtype=torch.float64)[:V])
    reveal = (alpha_s - alpha_t) / (1 - alpha_t)
    assert torch.allclose(found[V, :V], reveal * p_x[0, 3])


@pytest.mark.parametrize("mask_id", [V, 50257])
def test_mask_id_is_free(mask_id: int):
    """The id of the mask does not change the enumerated posterior."""
    p_x = torch.full((1, 2, V), 1 / V)
    z_t = torch.tensor([[1, mask_id]])
    found = posterior(z_t, p_x, torch.tensor([[0.75]]), torch.tensor([[0.5]]), mask_id)
    expected = torch.tensor([[0, 1, 0, 0], [1 / 6, 1 / 6, 1 / 6, 1 / 2]])
    assert torch.allclose(found[0], expected)


def test_exact_denoiser_gives_the_true_reverse_step():
    """q(z_s^l | z_t) = E over x given z_t of q(z_s^l | z_t^l, x^l), for a correlated joint of x."""
    joint, alpha_s, alpha_t = random_joint(3), level(0.8), level(0.35)
    states = texts(3)[:, None].masked_fill(mask_sets(3), MASK).view(-1, 3).unique(dim=0)
    found = posterior(states, exact_denoiser(states, joint), alpha_s, alpha_t, MASK)
    expected = torch.zeros_like(found)
    for x, weight in zip(texts(3), text_posterior(states, joint).T, strict=True):
        one_hot = torch.nn.functional.one_hot(x, V).double().expand(len(states), 3, V)
        of_x = posterior(states, one_hot, alpha_s, alpha_t, MASK)
        expected += weight[:, None, None] * of_x
    assert torch.allclose(found, expected, atol=1e-12)


def test_reveal_probability_at_the_ends():
    """1 in the step to s = 0 (bit for bit), 0 for s = t, defined where nothing is masked."""
    alpha_t = torch.tensor([0.0, 0.3, 0.999, 1.0])
    assert reveal_probability(torch.ones(4), alpha_t).tolist() == [1.0] * 4
    assert reveal_probability(alpha_t, alpha_t).tolist()[:3] == [0.0] * 3


@pytest.mark.parametrize("alpha", [0.001, 0.3, 0.9])
def test_mask_keeps_tokens_with_probability_alpha(alpha: float):
    """Eq. (1): the kept share of 100,000 tokens is within 5 standard errors; false alarm 6e-7."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randint(V, (100, 1000), generator=generator)
    z = mask(x, torch.full((100, 1), alpha), MASK, torch.rand(100, 1000, generator=generator))
    kept = z != MASK
    assert torch.equal(z[kept], x[kept])
    assert abs(kept.double().mean() - alpha) < 5 * math.sqrt(alpha * (1 - alpha) / x.numel())


def test_mask_is_exact_at_the_ends_and_nested_between():
    """At alpha = 1 all stays, at 0 all is masked, and the same noise masks more at a lower."""
    generator = torch.Generator().manual_seed(3)
    uniforms = torch.rand(3, 50, generator=generator)
    uniforms[:, 0] = 0.0
    z = mask(torch.zeros(3, 50).long(), torch.tensor([[1.0], [0.5], [0.0]]), MASK, uniforms)
    assert (z[0] == 0).all()
    assert (z[2] == MASK).all()
    shared = [mask(z[:1], torch.tensor([[a]]), MASK, uniforms[:1]) == MASK for a in (0.7, 0.4)]
    assert (shared[0] <= shared[1]).all()


def test_subs_copies_visible_tokens_and_has_no_mask_column():
    """SUBS: probability 1 for a visible token, the softmax of the logits at a masked one."""
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(2, 3, V, generator=generator)
    z = torch.tensor([[0, MASK, 2], [MASK, MASK, 1]])
    p = subs(logits, z, MASK).exp()
    assert p.shape == logits.shape
    assert torch.allclose(p.sum(-1), torch.ones(2, 3))
    masked = z == MASK
    assert torch.allclose(p[masked], logits.softmax(-1)[masked])
    assert torch.equal(p[~masked], torch.eye(V)[z[~masked]])


def test_subs_gradient_is_that_of_cross_entropy_and_zero_where_visible():
    """d(-log p_x)/d logits = softmax - x at a masked position, 0 (not NaN) at a visible one."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(1, 2, V, generator=generator, requires_grad=True)
    x, z = torch.tensor([[2, 1]]), torch.tensor([[MASK, 1]])
    log_p = subs(logits, z, MASK).gather(-1, x[..., None]).squeeze(-1)
    nelbo(log_p, z == MASK, torch.ones(1, 1)).sum().backward()
    expected = (logits.detach().softmax(-1)[0, 0] - torch.eye(V)[2]) / 2
    assert torch.allclose(logits.grad[0, 0], expected, atol=1e-6)
    assert torch.equal(logits.grad[0, 1], torch.zeros(V))


def test_subs_of_half_precision_is_float32():
    """bfloat16 logits are normalised in float32."""
    log_p = subs(torch.randn(1, 1, 1000).bfloat16(), torch.tensor([[MASK]]), MASK)
    assert log_p.dtype == torch.float32
    assert log_p.exp().sum().item() == pytest.approx(1, abs=1e-5)


def surprises(joint: Tensor, length: int, error: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """Return log p(x | z), the mask set and p(x) for all pairs of a text and a mask set.

    `error` perturbs the exact denoiser's logits.
    """
    sets = mask_sets(length)
    x = texts(length).repeat_interleave(len(sets), 0)
    masked = sets.repeat(V**length, 1)
    z = mask(x, level(0.5), MASK, torch.where(masked, 0.75, 0.25))
    noise = torch.randn(len(x), length, V, generator=torch.Generator().manual_seed(6))
    logits = exact_denoiser(z, joint).log().clamp(min=-1e9) + error * noise
    log_p = subs(logits, z, MASK).gather(-1, x[..., None]).squeeze(-1)
    return log_p, masked, joint.repeat_interleave(len(sets))


def quadrature(nodes: int = 40) -> list[tuple[Tensor, float]]:
    """Gauss-Legendre times on (0, 1), each (1, 1), with their weights."""
    points, weights = leggauss(nodes)
    return [(level((u + 1) / 2), w / 2) for u, w in zip(points, weights, strict=True)]


def integrated_nelbo(joint: Tensor, length: int, schedule: Schedule, error: float = 0.0) -> float:
    """E over x, t and mask sets of the library's `nelbo`, in nats per sequence."""
    log_p, masked, p_x = surprises(joint, length, error)
    count = masked.sum(-1).double()
    total = 0.0
    for t, dt in quadrature():
        alpha = schedule.alpha(t).item()
        p_set = (1 - alpha) ** count * alpha ** (length - count)
        estimate = nelbo(log_p, masked, schedule.nelbo_weight(t))
        total += dt * (p_x * p_set * estimate).sum().item() * length
    return total


def entropy(p: Tensor) -> float:
    return torch.special.entr(p).sum().item()


@pytest.mark.parametrize("length", [2, 3])
@pytest.mark.parametrize("schedule", [LogLinear(), Cosine()], ids=str)
def test_nelbo_of_exact_denoiser_is_the_entropy(schedule: Schedule, length: int):
    """Eq. (3) with eps = 0 and p = q(x | z) is H(x), whatever the schedule (quadrature in t)."""
    joint = random_joint(length)
    assert integrated_nelbo(joint, length, schedule) == pytest.approx(entropy(joint), abs=1e-9)


@pytest.mark.parametrize("length", [2, 3])
def test_nelbo_weight_of_a_mask_set_is_a_beta_integral(length: int):
    """The weight of a set of m masks integrates to B(m, L - m + 1), and the sum over sets is H(x).

    int t^(m - 1) (1 - t)^(L - m) dt = (m - 1)! (L - m)! / L!.
    """
    joint = random_joint(length)
    log_p, masked, p_x = surprises(joint, length)
    count = masked.sum(-1)
    beta = [0.0] + [
        math.factorial(m - 1) * math.factorial(length - m) / math.factorial(length)
        for m in range(1, length + 1)
    ]
    weight = torch.tensor(beta, dtype=torch.float64)[count]
    total = (p_x * nelbo(log_p, masked, weight[:, None]) * length).sum().item()
    assert total == pytest.approx(entropy(joint), abs=1e-12)


@pytest.mark.parametrize("schedule", [LogLinear(), Cosine()], ids=str)
def test_nelbo_of_wrong_denoiser_is_more_and_the_same_for_all_schedules(schedule: Schedule):
    """Eq. (3) bounds from above, and a change of the time variable does not move it."""
    joint = random_joint(3)
    wrong = integrated_nelbo(joint, 3, schedule, error=0.5)
    assert wrong > entropy(joint) + 0.01
    assert wrong == pytest.approx(integrated_nelbo(joint, 3, LogLinear(), error=0.5), abs=1e-9)


@pytest.mark.parametrize("eps", [1e-3, 0.2])
@pytest.mark.parametrize("kind", [LogLinear, Cosine])
def test_nelbo_with_eps_leaves_out_what_z_1_shows(kind: type[Schedule], eps: float):
    """With eps > 0 an exact denoiser gives H(x | z_1), within eps * sum_l H(x^l) below H(x)."""
    length = 3
    joint = random_joint(length)
    grid = joint.view(V, V, V)
    shown = 0.0  # H(visible tokens of z_1 | which are visible)
    singles = 0.0
    for masked in mask_sets(length).tolist():
        hidden = [position for position in range(length) if masked[position]]
        visible = length - len(hidden)
        h = entropy(grid.sum(hidden)) if hidden else entropy(grid)
        shown += eps**visible * (1 - eps) ** len(hidden) * h
        singles += h if visible == 1 else 0.0
    found = integrated_nelbo(joint, length, kind(eps))
    assert found == pytest.approx(entropy(joint) - shown, abs=1e-9)
    assert entropy(joint) - eps * singles <= found < entropy(joint)


def test_nelbo_ignores_visible_positions_even_if_impossible():
    """A visible position with log-probability -inf adds nothing and makes no NaN."""
    log_p = torch.tensor([[-float("inf"), -2.0]])
    assert nelbo(log_p, torch.tensor([[False, True]]), torch.tensor([[3.0]])).tolist() == [3.0]


@pytest.mark.parametrize("count", [1, 2, 7, 64])
def test_stratified_times_fill_every_stratum_once(count: int):
    """Exactly one time in each [i / n, (i + 1) / n), float32, strictly inside (0, 1)."""
    generator = torch.Generator().manual_seed(7)
    for _ in range(20):
        t = stratified_times(count, generator)
        assert t.dtype == torch.float32
        assert ((t > 0) & (t < 1)).all()
        assert (t.double() * count).floor().long().sort().values.tolist() == list(range(count))


def test_stratified_times_are_each_uniform_and_in_random_order():
    """The first row's time is uniform: mean and variance within 5 standard errors (1e-6 each)."""
    generator = torch.Generator().manual_seed(8)
    first = torch.stack([stratified_times(8, generator)[0] for _ in range(4000)]).double()
    assert abs(first.mean() - 1 / 2) < 5 * math.sqrt(1 / 12 / 4000)
    assert abs(first.var() - 1 / 12) < 5 * math.sqrt(1 / 180 / 4000)


def test_stratified_times_lower_the_variance_of_a_mean():
    """Var of the mean of t^2 over 16 times: below a tenth of (4 / 45) / 16, that of 16 free draws.

    The stratified variance is about a 256th of it; 500 repeats estimate it to within 32% (5 sigma).
    """
    generator = torch.Generator().manual_seed(9)
    means = torch.stack([stratified_times(16, generator).square().mean() for _ in range(500)])
    assert means.var() < 0.1 * (4 / 45) / 16
    assert means.mean().item() == pytest.approx(1 / 3, abs=1e-3)


def test_stratified_times_depend_on_the_generator_alone():
    """The same seed gives the same times."""
    a, b = (stratified_times(5, torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(a, b)


def test_bad_arguments_are_refused():
    """Shapes that would broadcast into nonsense, and a batch of no times, are ValueErrors."""
    x, flat = torch.zeros(2, 2).long(), torch.tensor([0.5, 0.6])
    with pytest.raises(ValueError, match="uniforms"):
        mask(x, flat[:, None], MASK, torch.rand(2, 1))
    with pytest.raises(ValueError, match="alpha"):
        mask(x, flat, MASK, torch.rand(2, 2))
    with pytest.raises(ValueError, match="weight"):
        nelbo(torch.zeros(2, 2), x == 0, flat)
    with pytest.raises(ValueError, match="logits"):
        subs(torch.zeros(2, 3, V), x, MASK)
    with pytest.raises(ValueError, match="p_x"):
        posterior(x, torch.zeros(1, 2, V), flat[:, None], flat[:, None], MASK)
    with pytest.raises(ValueError, match="count"):
        stratified_times(0, torch.Generator())
