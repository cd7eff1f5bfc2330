import itertools
import math

import numpy as np
import pytest
import torch
from tests.random_models import add_noise

from didi_instruct.config.model import ModelConfig, ScheduleConfig
from didi_instruct.data.oracle import OracleLanguage
from didi_instruct.errors import UserError
from didi_instruct.evaluation.compare import (
    gap_closed,
    gap_closed_resampled,
    nelbo_judge,
    paired_difference,
    path_gaps,
    path_kl,
)
from didi_instruct.models.dit import build_model
from didi_instruct.process.schedule import Cosine, LogLinear
from didi_instruct.sampling.ancestral import ancestral
from didi_instruct.sampling.denoiser import function_denoiser
from didi_instruct.sampling.draw import DrawOptions
from didi_instruct.sampling.state import Canvas, Samples, State
from didi_instruct.sampling.variants import first_hitting
from didi_instruct.training.likelihood import likelihood
from didi_instruct.training.objectives import make_objective

V, L, MASK = 3, 4, 3
TEXTS = torch.cartesian_prod(*[torch.arange(V)] * L)
SUBSETS = torch.cartesian_prod(*[torch.tensor([False, True])] * L)


@pytest.fixture(scope="module")
def language():
    return OracleLanguage.tiny()


def wrong_denoiser(language, sharpness=0.5):
    """Log-probabilities that are too flat or too sharp, and prefer later words at later places."""
    slant = 0.3 * torch.arange(L)[:, None] * torch.arange(V)

    def denoiser(z, t=None):
        return (sharpness * language.denoiser(z) + slant).log_softmax(-1)

    return denoiser


def two_step_paths(denoiser, chance):
    """Weight of every set of positions that the first step reveals, and log q(text | that set).

    Shapes: (16,), (16, 81). One step is the case of chance 1.
    """
    count = SUBSETS.sum(1)
    weights = chance**count * (1 - chance) ** (L - count)
    rows = []
    for shown in SUBSETS:
        first = denoiser(torch.full_like(TEXTS, MASK))
        second = denoiser(TEXTS.masked_fill(~shown, MASK))
        log_p = torch.where(shown[:, None], first, second)
        rows.append(log_p.gather(-1, TEXTS[..., None]).squeeze(-1).sum(1))
    return weights.double(), torch.stack(rows)


STEPS = [
    (1, LogLinear(0.0), 1.0),
    (2, LogLinear(0.0), 0.5),
    (2, Cosine(0.0), 1 - math.sin(math.pi / 4)),
]


@pytest.mark.parametrize(("steps", "schedule", "chance"), STEPS)
def test_the_estimate_has_the_enumerated_mean(language, steps, schedule, chance):
    """Path KL, its standard error and the path entropy; |z| < 4 (6e-5 false alarms each)."""
    denoiser, n = wrong_denoiser(language), 20_000
    weights, log_q = two_step_paths(denoiser, chance)
    mass = weights[:, None] * log_q.exp()
    assert mass.sum().item() == pytest.approx(1)
    gaps = log_q - language.log_prob(TEXTS)
    mean = (mass * gaps).sum().item()
    deviation = (mass * (gaps - mean) ** 2).sum().sqrt().item()
    entropy = -(mass * log_q).sum().item()
    entropy_deviation = (mass * (log_q + entropy) ** 2).sum().sqrt().item()

    state = State(Canvas.blank(n, L, MASK), DrawOptions(seed=3))
    drawn = ancestral(function_denoiser(denoiser, V), schedule, state, steps=steps)
    result = path_kl(drawn, language.log_prob)
    assert abs(result.path_kl - mean) < 4 * deviation / math.sqrt(n)
    assert abs(result.path_entropy - entropy) < 4 * entropy_deviation / math.sqrt(n)
    assert result.path_kl_se == pytest.approx(deviation / math.sqrt(n), rel=0.05)
    assert result.path_kl == pytest.approx(result.judge_nats - result.path_entropy)
    assert result.judge_nats == pytest.approx(-language.log_prob(drawn.tokens).mean().item())
    assert result.samples == n


@pytest.mark.parametrize("sharpness", [0.5, 1.0, 2.0])
@pytest.mark.parametrize(("steps", "schedule", "chance"), STEPS)
def test_the_path_kl_bounds_the_kl_of_the_sampler(language, steps, schedule, chance, sharpness):
    """Both by enumeration; they differ by what a text tells of its order, nothing in one step."""
    weights, log_q = two_step_paths(wrong_denoiser(language, sharpness), chance)
    log_p, paths = language.log_prob(TEXTS), weights[:, None] * log_q.exp()
    law = paths.sum(0)
    bound = (paths * (log_q - log_p)).sum()
    exact = (law * (law.log() - log_p)).sum()
    told = (paths * (log_q - law.log())).sum()
    torch.testing.assert_close(bound, exact + told)
    if steps == 1:
        torch.testing.assert_close(bound, exact)
    else:
        assert told > 1e-3
    assert exact > 0


def test_the_exact_denoiser_one_token_at_a_time_has_no_path_kl(language):
    """Every path multiplies to p(x), in whatever order: each gap is zero, not their mean alone."""
    canvas, exact = Canvas.blank(50, L, MASK), function_denoiser(language.denoiser, V)
    for drawn in (
        first_hitting(exact, LogLinear(0.0), State(canvas)),
        ancestral(exact, LogLinear(0.0), State(canvas), steps=4000),
    ):
        gaps = path_gaps(drawn, language.log_prob)
        torch.testing.assert_close(gaps, torch.zeros(50, dtype=torch.float64))
        result = path_kl(drawn, language.log_prob)
        assert (result.path_kl, result.path_kl_se) == pytest.approx((0, 0), abs=1e-12)


def test_pairs_of_one_seed_are_compared_more_sharply(language):
    """The difference itself is exact; its error is below that of two separate estimates."""
    canvas = Canvas.blank(2000, L, MASK)
    wrong = (function_denoiser(wrong_denoiser(language, s), V) for s in (0.5, 0.6))
    drawn = [ancestral(denoiser, LogLinear(0.0), State(canvas), steps=2) for denoiser in wrong]
    one, two = (path_kl(d, language.log_prob) for d in drawn)
    mean, error = paired_difference(*(path_gaps(d, language.log_prob) for d in drawn))
    assert mean == pytest.approx(one.path_kl - two.path_kl)
    assert error < 0.5 * math.hypot(one.path_kl_se, two.path_kl_se)
    by_hand = paired_difference(torch.tensor([1.0, 4.0]), torch.tensor([0.0, 1.0]))
    assert by_hand == pytest.approx((2.0, 1.0))
    with pytest.raises(ValueError, match="draw equally many"):
        paired_difference(torch.zeros(2), torch.zeros(3))


def test_one_sample_has_no_standard_error(language):
    denoiser = function_denoiser(language.denoiser, V)
    drawn = first_hitting(denoiser, LogLinear(0.0), State(Canvas.blank(1, L, MASK)))
    assert path_kl(drawn, language.log_prob).path_kl_se == math.inf


def test_samples_without_a_path_and_judges_of_another_shape_are_refused(language):
    tokens = torch.zeros(3, L, dtype=torch.long)
    with pytest.raises(UserError, match="sampler `ancestral`"):
        path_kl(Samples(tokens, None, nfe=1, passes=1.0), language.log_prob)
    samples = Samples(tokens, torch.zeros(3, dtype=torch.float64), nfe=1, passes=1.0)
    with pytest.raises(ValueError, match=r"gave \(3, 1\) for 3 sequences"):
        path_kl(samples, lambda tokens: language.log_prob(tokens)[:, None])


def test_the_gap_closed_is_zero_for_the_teacher_and_one_for_all_its_steps():
    assert gap_closed(5.0, 5.0, 3.0) == 0
    assert gap_closed(5.0, 3.0, 3.0) == 1
    assert gap_closed(5.0, 4.5, 3.0) == 0.25
    assert gap_closed(5.0, 6.0, 3.0) == -0.5
    for many in (5.0, 6.0, math.nan):
        with pytest.raises(ValueError, match="no gap to close"):
            gap_closed(5.0, 4.0, many)


def test_the_gap_closed_in_resamples_is_that_of_each():
    few, own, many = np.random.default_rng(0).normal([[5], [4], [4]], 1.0, size=(3, 50))
    found = gap_closed_resampled(few, own, many)
    for value, *alone in zip(found, few, own, many, strict=True):
        if alone[0] > alone[2]:
            assert value == pytest.approx(gap_closed(*alone))
        else:
            assert math.isnan(value)
    assert 0 < np.isnan(found).sum() < 50


def random_network(kind):
    """A small network with weights far from zero, and the network's part of its loss."""
    torch.manual_seed(0)
    config = ModelConfig(
        kind=kind, layers=1, hidden=16, heads=2, cond_dim=8, vocab_size=V + 1, length=L,
        schedule=ScheduleConfig(eps=1e-3),
    )  # fmt: skip
    network = add_noise(build_model(config).eval(), 0.5)
    objective = make_objective(config)
    return config, network, lambda batch: objective.loss(network, batch)


@torch.no_grad()
def log_prob_by_order(network, text):
    """Log-probability of a text when a network reveals it one by one, in each of 4! orders."""
    log_p = network(text.masked_fill(~SUBSETS, MASK), torch.zeros(16)).double().log_softmax(-1)
    place = {tuple(shown): row for row, shown in enumerate(SUBSETS.tolist())}
    totals = []
    for order in itertools.permutations(range(L)):
        shown, total = [False] * L, 0.0
        for position in order:
            total += log_p[place[tuple(shown)], position, text[position]].item()
            shown[position] = True
        totals.append(total)
    return torch.tensor(totals, dtype=torch.float64)


def test_the_nelbo_judge_is_the_mean_over_orders_and_below_the_exact_log_prob():
    """A text judged 4,096 times, against 4! orders; |z| < 4 (6e-5, less for stratified times)."""
    config, network, loss = random_network("mdlm")
    text = torch.tensor([2, 0, 1, 1])
    by_order = log_prob_by_order(network, text)
    exact = by_order.logsumexp(0).item() - math.log(24)
    judge = nelbo_judge(loss, config, draws=8, batch_size=256)
    values = judge(text.expand(4096, L))
    error = values.std().item() / math.sqrt(4096)
    assert (values.shape, values.dtype) == ((4096,), torch.float64)
    assert abs(values.mean().item() - by_order.mean().item()) < 4 * error
    assert values.mean().item() + 4 * error < exact


def test_the_judge_of_an_ar_model_is_exact():
    config, network, loss = random_network("ar")
    values = nelbo_judge(loss, config, batch_size=7)(TEXTS)
    with torch.no_grad():
        torch.testing.assert_close(values, network.log_prob(TEXTS).double())
    assert values.exp().sum().item() == pytest.approx(1, abs=1e-5)


def test_the_judge_agrees_with_the_likelihood_whatever_the_batch():
    config, _, loss = random_network("mdlm")
    large, small = (
        nelbo_judge(loss, config, draws=3, batch_size=b, seed=5)(TEXTS) for b in (81, 10)
    )
    torch.testing.assert_close(large.float(), small.float())
    mean = likelihood(
        loss, config, lambda start, count: TEXTS[start : start + count],
        sequences=len(TEXTS), draws=3, batch_size=81, seed=5,
    ).nats_per_token  # fmt: skip
    assert -large.mean().item() / L == pytest.approx(mean)
