import itertools

import pytest
import torch
from scipy.stats import kstest

from didi_instruct.config.model import ModelConfig, ScheduleConfig
from didi_instruct.data.oracle import OracleLanguage
from didi_instruct.models.dit import DiT
from didi_instruct.process.schedule import Cosine, LogLinear
from didi_instruct.sampling.chain import PAD, Canvas, Draw
from didi_instruct.sampling.first_hitting import first_hitting
from didi_instruct.sampling.network import NetworkDenoiser

from .enumeration import FALSE_ALARM, all_states, assert_follows

V, L = 3, 4


def test_the_samples_follow_the_language_itself():
    language = OracleLanguage.tiny()
    canvas = Canvas.blank(50_000, L, V)
    result = first_hitting(language.denoiser, LogLinear(0.0), canvas, settings=Draw(seed=8))
    assert_follows(result.tokens, language.log_prob(all_states(V, L)).exp(), V)
    torch.testing.assert_close(result.log_prob, language.log_prob(result.tokens))
    assert result.nfe == L


def test_given_tokens_condition_the_rest_exactly():
    language = OracleLanguage.tiny()
    tokens = torch.tensor([[3, 1, 3, 2]]).expand(20_000, L)
    canvas = Canvas(tokens, V, torch.arange(20_000))
    result = first_hitting(language.denoiser, LogLinear(0.0), canvas, settings=Draw(seed=9))
    every = all_states(V, L)
    law = language.log_prob(every).exp() * ((every[:, 1] == 1) & (every[:, 3] == 2))
    assert_follows(result.tokens, law / law.sum(), V)
    assert result.nfe == 2


@pytest.mark.parametrize("schedule", [LogLinear(0.0), LogLinear(0.1), Cosine(0.0)])
def test_times_and_orders_are_those_of_the_reverse_process(schedule):
    """The next of n masks comes at m' = m u^(1/n) with u uniform (Kolmogorov-Smirnov), and is any.

    The state the denoiser sees is the one before the token is revealed.
    """
    num = 4000
    language = OracleLanguage.tiny()
    masks, times = [], []

    def denoiser(z, t):
        masks.append((z == V).sum(1))
        times.append(t.double())
        return language.denoiser(z)

    seen = []
    first_hitting(denoiser, schedule, Canvas.blank(num, L, V), callback=seen.append)
    assert [set(m.tolist()) for m in masks] == [{4}, {3}, {2}, {1}]
    levels = [torch.full((num,), 1 - schedule.eps, dtype=torch.float64)]
    levels += [1 - schedule.alpha(t) for t in times]
    for n, (m, following) in enumerate(itertools.pairwise(levels)):
        u = (following / m) ** (L - n)
        assert kstest(u, "uniform").pvalue > FALSE_ALARM
    for step in seen:
        assert torch.equal(step.revealed.sum(1), torch.ones(num, dtype=torch.long))
        share = step.revealed.double().mean(0)
        # 5 standard errors of a quarter among 4000.
        assert bool(((share - 0.25).abs() < 5 * (0.1875 / num) ** 0.5).all())


def test_each_sample_takes_as_many_passes_as_it_has_masks():
    language = OracleLanguage.tiny()
    tokens = torch.tensor([[3, 3, 3, 3], [3, 1, 3, 2], [0, 1, 2, 0]])
    result = first_hitting(language.denoiser, LogLinear(0.0), Canvas(tokens, V, torch.arange(3)))
    assert result.nfe == 4
    assert result.passes == pytest.approx((4 + 2 + 0) / 3)


@torch.no_grad()
def test_a_network_that_reads_the_time_gets_that_of_each_sample():
    """Sparse and dense output layers agree in a batch, and with each sample alone."""
    config = ModelConfig(
        layers=1,
        hidden=8,
        heads=1,
        cond_dim=4,
        vocab_size=6,
        length=5,
        time_conditioning=True,
        schedule=ScheduleConfig(eps=1e-3),
    )
    network = DiT(config).double().eval()
    generator = torch.Generator().manual_seed(0)
    for p in network.parameters():
        p.data = torch.randn(p.shape, generator=generator, dtype=torch.float64)
    schedule = LogLinear(1e-3)
    sparse = NetworkDenoiser(network, schedule)

    def dense(z, t):
        return sparse(z, t)

    tokens = torch.tensor([[5, 5, 1, 5, 5], [5, 2, 5, 3, PAD], [5, 5, 5, 5, 5]])
    canvas = Canvas(tokens, 5, torch.arange(3))
    results = [first_hitting(d, schedule, canvas) for d in (sparse, dense)]
    for row in range(3):
        alone = Canvas(tokens[row : row + 1], 5, torch.tensor([row]))
        results.append(first_hitting(sparse, schedule, alone))
    assert torch.equal(results[0].tokens, results[1].tokens)
    assert torch.equal(results[0].tokens, torch.cat([r.tokens for r in results[2:]]))
    log_prob = torch.cat([r.log_prob for r in results[2:]])
    torch.testing.assert_close(results[0].log_prob, results[1].log_prob)
    torch.testing.assert_close(results[0].log_prob, log_prob)
