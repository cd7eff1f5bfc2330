import math

import pytest
import torch

from didi_instruct.config.model import ModelConfig, ScheduleConfig
from didi_instruct.data.oracle import OracleLanguage, OracleSource
from didi_instruct.errors import UserError
from didi_instruct.training.likelihood import check_data, evaluation_config, likelihood


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
