"""Path KL by enumeration of all paths, on the tiny oracle language."""

import math

import pytest
import torch

from didi_instruct.data.oracle import OracleLanguage
from didi_instruct.evaluation.quick_eval import path_gaps
from didi_instruct.evaluation.stats import mean_and_error
from didi_instruct.process.schedule import Cosine, LogLinear
from didi_instruct.sampling.ancestral import ancestral
from didi_instruct.sampling.denoiser import function_denoiser
from didi_instruct.sampling.draw import DrawOptions
from didi_instruct.sampling.state import Canvas, State
from didi_instruct.sampling.variants import first_hitting

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
    path_kl, error = mean_and_error(path_gaps(drawn, language.log_prob))
    assert abs(path_kl - mean) < 4 * deviation / math.sqrt(n)
    assert abs(-drawn.log_prob.mean().item() - entropy) < 4 * entropy_deviation / math.sqrt(n)
    assert error == pytest.approx(deviation / math.sqrt(n), rel=0.05)


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
        assert path_gaps(drawn, language.log_prob) == pytest.approx([0] * 50, abs=1e-6)


def test_pairs_of_one_seed_are_compared_more_sharply(language):
    """Samples of one seed share their order and uniforms, which cancel from the difference."""
    canvas = Canvas.blank(2000, L, MASK)
    wrong = (function_denoiser(wrong_denoiser(language, s), V) for s in (0.5, 0.6))
    drawn = [ancestral(denoiser, LogLinear(0.0), State(canvas), steps=2) for denoiser in wrong]
    one, two = (path_gaps(d, language.log_prob) for d in drawn)
    errors = [mean_and_error(gaps)[1] for gaps in (one - two, one, two)]
    assert errors[0] < 0.5 * math.hypot(*errors[1:])
