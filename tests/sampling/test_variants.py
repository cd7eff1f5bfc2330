"""First-hitting, re-masking and blocks: their laws, times and levels of noise."""

import itertools
from dataclasses import replace

import pytest
import torch
from scipy.stats import kstest

from didi_instruct.process.schedule import Cosine, LogLinear
from didi_instruct.sampling.ancestral import ancestral
from didi_instruct.sampling.plan import time_grid
from didi_instruct.sampling.state import PAD, Canvas
from didi_instruct.sampling.variants import blocks, first_hitting, remask_chances, remasking

from .enumeration import (
    FALSE_ALARM,
    all_masked,
    all_states,
    assert_follows,
    masked_step,
    texts_of,
)
from .toys import LINEAR, TINY, Toy, blank, start, toy_of

V, L = 3, 4
TOY = toy_of()
BLANK = Canvas.blank(20_000, L, V)
TRUE = TINY.log_prob(all_states(V, L)).exp()

every_schedule = pytest.mark.parametrize("schedule", [LINEAR, LogLinear(0.1), Cosine(0.0)])
every_strategy = pytest.mark.parametrize("strategy", ["cap", "rescale"])


# First-hitting


def test_first_hitting_samples_follow_the_language_itself():
    """Written at once, and with a first part given: exact conditional laws."""
    whole = first_hitting(TOY, LINEAR, start(BLANK, seed=9)).tokens
    begun = torch.where(torch.arange(L) < 2, whole, V)
    marginal = TRUE.view(V, V, -1).sum(-1).log()[begun[:, 0], begun[:, 1]]
    rest = replace(BLANK, tokens=begun, stream=(6, 1))
    for canvas, before in ((BLANK, 0.0), (rest, marginal)):
        result = first_hitting(TOY, LINEAR, start(canvas, seed=8))
        assert_follows(result.tokens, TRUE, V)
        torch.testing.assert_close(result.log_prob + before, TINY.log_prob(result.tokens))
        assert result.nfe == (L if canvas is BLANK else 2)


@every_schedule
def test_times_and_orders_are_those_of_the_reverse_process(schedule):
    """The next of n masks comes at m' = m u^(1/n) with u uniform (Kolmogorov-Smirnov), and is any.

    The state the denoiser sees is the one before the token is revealed.
    """
    num, seen, denoiser = 4000, [], toy_of()
    first_hitting(denoiser, schedule, blank(num, L, V, seen.append))
    assert [set((z == V).sum(1).tolist()) for z, _ in denoiser.asked] == [{4}, {3}, {2}, {1}]
    levels = [torch.full((num,), 1 - schedule.eps, dtype=torch.float64)]
    levels += [1 - schedule.alpha(t.double()) for _, t in denoiser.asked]
    for n, (m, following) in enumerate(itertools.pairwise(levels)):
        u = (following / m) ** (L - n)
        assert kstest(u, "uniform").pvalue > FALSE_ALARM
    for step in seen:
        assert torch.equal(step.revealed.sum(1), torch.ones(num, dtype=torch.long))
        share = step.revealed.double().mean(0)
        # 5 standard errors of a quarter among 4000.
        assert bool(((share - 0.25).abs() < 5 * (0.1875 / num) ** 0.5).all())


def test_each_sample_takes_as_many_passes_as_it_has_masks():
    tokens = torch.tensor([[3, 3, 3, 3], [3, 1, 3, 2], [0, 1, 2, 0]])
    result = first_hitting(TOY, LINEAR, start(Canvas(tokens, V, torch.arange(3))))
    assert (result.nfe, result.passes) == (4, pytest.approx((4 + 2 + 0) / 3))


# Re-masking


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
@pytest.mark.parametrize("steps", [2, 4])
@pytest.mark.parametrize("schedule", [LINEAR, LogLinear(0.1)])
def test_remasked_samples_follow_the_enumerated_law(strategy, steps, schedule):
    state = start(BLANK, seed=6)
    result = remasking(TOY, schedule, state, steps=steps, eta=0.6, strategy=strategy)
    mass = all_masked(TINY)
    for n in range(steps):
        alpha_t, alpha_s = n / steps, (n + 1) / steps
        most = min(1.0, (1 - alpha_s) / alpha_t) if alpha_t else 1.0
        sigma = min(0.6, most) if strategy == "cap" else 0.6 * most
        reveal = (alpha_s - (1 - sigma) * alpha_t) / (1 - alpha_t)
        mass = masked_step(TINY, mass, reveal, sigma)
    assert_follows(result.tokens, texts_of(mass, V, L), V)
    assert (result.log_prob, result.nfe) == (None, steps)


@every_schedule
@every_strategy
@pytest.mark.parametrize("greedy_tail", [False, True])
def test_without_remasking_it_is_ancestral_bit_for_bit(schedule, strategy, greedy_tail):
    tokens = torch.tensor([[3, 1, 3, 3], [3, 3, 3, PAD]]).repeat(10, 1)
    canvas = Canvas(tokens, V, torch.arange(20))
    common = {"steps": 5, "grid": "cosine", "greedy_tail": greedy_tail}
    plain = ancestral(TOY, schedule, start(canvas, seed=4), **common)
    same = remasking(TOY, schedule, start(canvas, seed=4), eta=0.0, strategy=strategy, **common)
    assert torch.equal(same.tokens, plain.tokens)
    assert torch.equal(same.log_prob, plain.log_prob)
    assert (same.nfe, same.passes) == (plain.nfe, plain.passes)


# Blocks


@pytest.mark.parametrize("block_length", [1, 2, 3])
@pytest.mark.parametrize("steps", [1, 2])
def test_samples_in_blocks_follow_the_enumerated_law(block_length, steps):
    state = start(BLANK, seed=7)
    result = blocks(TOY, LINEAR, state, steps=steps, block_length=block_length)
    mass, starts, columns = all_masked(TINY), range(0, L, block_length), torch.arange(L)
    for first, n in itertools.product(starts, range(steps)):
        block = (columns >= first) & (columns < first + block_length)
        mass = masked_step(TINY, mass, 1 / (steps - n), positions=block)
    assert_follows(result.tokens, texts_of(mass, V, L), V)
    assert result.nfe == steps * len(starts)
    if block_length == 1:
        torch.testing.assert_close(result.log_prob, TINY.log_prob(result.tokens))


@pytest.mark.parametrize("block_length", [4, 9])
@pytest.mark.parametrize("order", ["random", "streams"])
def test_a_single_block_is_the_sampler_itself(block_length, order):
    run = {"steps": 3, "order": order}
    whole = ancestral(TOY, LINEAR, blank(9, L, V), **run)
    block = blocks(TOY, LINEAR, blank(9, L, V), block_length=block_length, **run)
    assert torch.equal(block.tokens, whole.tokens)
    assert torch.equal(block.log_prob, whole.log_prob)
    assert (block.nfe, block.passes) == (whole.nfe, whole.passes)


@pytest.mark.parametrize("inner", ["ancestral", "confidence", "entropy"])
def test_a_block_is_finished_before_the_next_begins(inner):
    """And one without anything to write takes no steps: the second of three."""
    tokens = torch.full((3, 6), V)
    tokens[1, [1, 5]], tokens[:, 2:4] = 1, 2
    seen = []
    denoiser = Toy(lambda z, t: TINY.denoiser(z[:, [0, 1, 4, 5]])[:, [0, 1, 0, 1, 2, 3]], V)
    state = start(Canvas(tokens, V, torch.arange(3)), seen.append)
    result = blocks(denoiser, LINEAR, state, steps=3, block_length=2, inner=inner)
    assert (len(seen), result.nfe) == (6, 6)
    assert [step.steps for step in seen] == [6] * 6
    assert (result.log_prob is None) == (inner != "ancestral")
    for step in seen:
        later_begun = (step.tokens[:, 4:] != tokens[:, 4:]).any()
        assert not (later_begun and (step.tokens[:, :2] == V).any())
