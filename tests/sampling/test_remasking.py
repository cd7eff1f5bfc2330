import itertools

import pytest
import torch
from scipy.stats import chisquare

from didi_instruct.data.oracle import OracleLanguage
from didi_instruct.errors import UserError
from didi_instruct.process.schedule import Cosine, LogLinear
from didi_instruct.sampling.ancestral import ancestral
from didi_instruct.sampling.chain import PAD, Canvas, Draw
from didi_instruct.sampling.grids import time_grid
from didi_instruct.sampling.remasking import remask_chances, remasking

from .enumeration import FALSE_ALARM, all_masked, assert_follows, masked_step, texts_of

V, L = 3, 4

every_schedule = pytest.mark.parametrize("schedule", [LogLinear(0.0), LogLinear(0.1), Cosine(0.0)])
every_strategy = pytest.mark.parametrize("strategy", ["cap", "rescale"])


@every_schedule
@every_strategy
@pytest.mark.parametrize("eta", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_a_step_leads_from_q_t_to_q_s(schedule, strategy, eta, steps):
    """q(z_s | x) = sum over z_t of p(z_s | z_t, x) q(z_t | x), states (x, mask), a denoiser of x.

    q is the forward process that is all mask at t = 1: alpha = (alpha_t - eps) / (1 - eps).
    """
    times = time_grid("cosine", steps)
    alphas = schedule.alpha(torch.tensor(times, dtype=torch.float64))
    alphas = (alphas - schedule.eps) / (1 - schedule.eps)
    chances = remask_chances(schedule, times, eta, strategy)
    assert len(chances) == steps
    for (alpha_t, alpha_s), (reveal, sigma) in zip(
        itertools.pairwise(alphas.tolist()), chances, strict=True
    ):
        assert 0 <= sigma <= 1
        assert 0 <= reveal <= 1 + 1e-12
        most = 0.0 if alpha_s > 1 - 1e-12 else min(1.0, (1 - alpha_s) / max(alpha_t, 1e-12))
        wanted = min(eta, most) if strategy == "cap" else eta * most
        assert sigma == pytest.approx(wanted, abs=1e-12)
        q_t = torch.tensor([alpha_t, 1 - alpha_t], dtype=torch.float64)
        kernel = torch.tensor([[1 - sigma, sigma], [reveal, 1 - reveal]], dtype=torch.float64)
        q_s = torch.tensor([alpha_s, 1 - alpha_s], dtype=torch.float64)
        torch.testing.assert_close(q_t @ kernel, q_s, rtol=0, atol=1e-12)
    assert chances[-1] == (1.0, 0.0)


@every_strategy
def test_the_number_of_masks_is_that_of_the_forward_process(strategy):
    """Chi-square of the masks after every step against Binomial(L, 1 - alpha_s)."""
    schedule, num, steps = LogLinear(0.0), 20_000, 5
    seen = []
    remasking(
        lambda z, t: torch.zeros(*z.shape, 2),
        schedule,
        Canvas.blank(num, L, 2),
        steps=steps,
        eta=0.5,
        strategy=strategy,
        callback=seen.append,
    )
    k = torch.arange(L + 1, dtype=torch.float64)
    for step in seen[:-1]:
        masked = torch.tensor(1 - (step.index + 1) / steps, dtype=torch.float64)
        law = torch.distributions.Binomial(L, masked).log_prob(k).exp()
        counts = torch.bincount((step.tokens == 2).sum(1), minlength=L + 1)
        assert chisquare(counts, num * law).pvalue > FALSE_ALARM
    assert any(
        bool((step.tokens == 2)[before.tokens != 2].any())
        for before, step in itertools.pairwise(seen)
    )


@every_strategy
@pytest.mark.parametrize("steps", [2, 4])
@pytest.mark.parametrize("schedule", [LogLinear(0.0), LogLinear(0.1)])
def test_the_samples_follow_the_enumerated_law(strategy, steps, schedule):
    language = OracleLanguage.tiny()
    canvas = Canvas.blank(20_000, L, V)
    result = remasking(
        language.denoiser,
        schedule,
        canvas,
        steps=steps,
        eta=0.6,
        strategy=strategy,
        settings=Draw(seed=6),
    )
    mass = all_masked(language)
    visible = [n / steps for n in range(steps + 1)]
    for alpha_t, alpha_s in itertools.pairwise(visible):
        most = min(1.0, (1 - alpha_s) / alpha_t) if alpha_t else 1.0
        sigma = min(0.6, most) if strategy == "cap" else 0.6 * most
        reveal = (alpha_s - (1 - sigma) * alpha_t) / (1 - alpha_t)
        mass = masked_step(language, mass, reveal, sigma)
    assert_follows(result.tokens, texts_of(mass, V, L), V)
    assert result.log_prob is None
    assert result.nfe == steps


@every_schedule
@every_strategy
@pytest.mark.parametrize("greedy_tail", [False, True])
def test_without_remasking_it_is_ancestral_bit_for_bit(schedule, strategy, greedy_tail):
    language = OracleLanguage.tiny()
    tokens = torch.tensor([[3, 1, 3, 3], [3, 3, 3, PAD]]).repeat(10, 1)
    canvas = Canvas(tokens, V, torch.arange(20))
    common = {"steps": 5, "grid": "cosine", "settings": Draw(seed=4), "greedy_tail": greedy_tail}
    plain = ancestral(language.denoiser, schedule, canvas, **common)
    same = remasking(language.denoiser, schedule, canvas, eta=0.0, strategy=strategy, **common)
    assert torch.equal(same.tokens, plain.tokens)
    assert torch.equal(same.log_prob, plain.log_prob)
    assert (same.nfe, same.passes) == (plain.nfe, plain.passes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"eta": -0.1}, "eta is -0.1"),
        ({"eta": 1.1}, "eta is 1.1"),
        ({"eta": 0.1, "strategy": "loop"}, "`loop` is not a re-masking strategy"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        remasking(None, LogLinear(0.0), Canvas.blank(1, L, V), steps=2, **arguments)
