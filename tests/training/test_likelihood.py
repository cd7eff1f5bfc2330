import itertools
import math

import pytest
import torch
from tests.random_models import add_noise

from didi_instruct.config.model import ModelConfig, ScheduleConfig
from didi_instruct.data.oracle import OracleLanguage, OracleSource
from didi_instruct.errors import UserError
from didi_instruct.models.dit import build_model
from didi_instruct.training.likelihood import (
    check_data,
    evaluation_config,
    likelihood,
    nelbo_judge,
)
from didi_instruct.training.objectives import make_objective

V, L, MASK = 3, 4, 3
TEXTS = torch.cartesian_prod(*[torch.arange(V)] * L)
SUBSETS = torch.cartesian_prod(*[torch.tensor([False, True])] * L)


@pytest.mark.parametrize("eps", [0.0, 1e-3])
def test_the_exact_denoisers_nelbo_is_the_entropy(eps):
    """The Bayes-optimal denoiser of the oracle language; 4 standard errors (6e-5 false alarms)."""
    language = OracleLanguage.default()
    config = ModelConfig(vocab_size=65, length=32, schedule=ScheduleConfig(eps=eps))

    def loss(batch):
        log_p = language.denoiser(batch["z"]).flatten(0, 1)[batch["rows"]]
        nll = -log_p.gather(-1, batch["targets"][:, None]).squeeze(-1)
        zeros = nll.new_zeros(len(batch["z"]))
        return zeros.index_add(0, batch["sequence"], batch["weight"].double() * nll)

    source = OracleSource(language, split="valid")
    result = likelihood(loss, config, source.ordered, sequences=2000, draws=2, batch_size=500)
    entropy, error = language.entropy()
    half = (result.ci95[1] - result.ci95[0]) / 2 / 1.96
    assert abs(result.nats_per_token - entropy / 32) < 4 * math.hypot(half, error / 32)
    assert result.ppl == pytest.approx(math.exp(result.nats_per_token))
    assert (result.sequences, result.draws, result.bound) == (2000, 2, True)


def test_eps_is_dropped_only_where_the_network_cannot_tell():
    eps = ScheduleConfig(eps=1e-3)
    assert evaluation_config(ModelConfig(schedule=eps)).schedule.eps == 0
    assert evaluation_config(ModelConfig(schedule=eps, time_conditioning=True)).schedule == eps
    assert evaluation_config(ModelConfig(schedule=eps, kind="duo")).schedule == eps


def test_the_batch_size_changes_nothing():
    config = ModelConfig(vocab_size=65, length=32)
    source = OracleSource(OracleLanguage.default())

    def loss(batch):
        weights = batch["weight"] * batch["targets"]
        return torch.zeros(len(batch["z"])).index_add(0, batch["sequence"], weights)

    a, b = (
        likelihood(loss, config, source.ordered, sequences=300, draws=2, batch_size=size)
        for size in (7, 256)
    )
    assert a == b


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


def test_one_sequence_has_no_interval():
    config = ModelConfig(kind="ar", vocab_size=65, length=32)
    source = OracleSource(OracleLanguage.default())
    result = likelihood(lambda batch: torch.tensor([1e3]), config, source.ordered, sequences=1)
    assert result.ci95 == (-math.inf, math.inf)
    assert result.ppl == math.inf


def test_data_of_another_tokenizer_or_length_is_refused():
    source = OracleSource(OracleLanguage.default())
    with pytest.raises(UserError, match="another tokenizer"):
        check_data(ModelConfig(length=32), "0" * 64, source)
    with pytest.raises(UserError, match="at most 16"):
        check_data(ModelConfig(length=16), source.tokenizer.hash, source)
    with pytest.raises(UserError, match="64 token ids, but the model knows 9"):
        check_data(ModelConfig(length=32, vocab_size=10), None, source)
