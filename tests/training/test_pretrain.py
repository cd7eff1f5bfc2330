import json
import os
import signal

import pytest
import torch
from safetensors.torch import load_file

from didi_instruct.api.pretrain import pretrain
from didi_instruct.config.model import ModelConfig
from didi_instruct.data.oracle import OracleLanguage, OracleSource
from didi_instruct.errors import TrainingError, UserError
from didi_instruct.training.pretrain import PretrainTask
from didi_instruct.training.reporting import SilentReporter
from didi_instruct.training.world import World

CPU = World(torch.device("cpu"))


def losses(folder):
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def task_of(config):
    source = OracleSource(OracleLanguage.default(), seed=config.train.seed)
    return PretrainTask(config, config.model.resolve(source.num_tokens), source, CPU)


@pytest.mark.parametrize("kind", ["mdlm", "duo", "ar"])
def test_eight_micro_batches_are_one_batch(recipe, kind):
    """1 x 8 equals 8 x 1: same losses and same weights, up to the order of additions."""
    whole, parts = task_of(recipe(kind)), task_of(recipe(kind, micro_batch=1))
    for step in range(3):
        a, b = whole.step(step), parts.step(step)
        torch.testing.assert_close(a["loss"], b["loss"], atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(a["grad_norm"], b["grad_norm"], atol=1e-6, rtol=1e-4)
    for p, q in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=2e-4, rtol=1e-3)


class SignalAt(SilentReporter):
    def __init__(self, step):
        self.step = step

    def advance(self, step, values):
        if step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_stopped_and_resumed_run_is_bit_exact(recipe, tmp_path, dropout):
    """Weights, average, optimizer, noise, dropout and data position all continue."""
    from dataclasses import replace

    config = recipe()
    config = replace(config, model=replace(config.model, dropout=dropout))
    pretrain(config, out=tmp_path / "whole")
    stopped = pretrain(config, out=tmp_path / "parts", reporter=SignalAt(4))
    assert not stopped.finished
    assert stopped.outcome.signal == signal.SIGTERM
    assert stopped.outcome.step < 6
    resumed = pretrain(config, out=tmp_path / "parts", resume=True)
    assert resumed.finished
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    last = "checkpoints/step-00000006/state-00000-of-00001.safetensors"
    whole, parts = load_file(tmp_path / "whole" / last), load_file(tmp_path / "parts" / last)
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    product = [load_file(tmp_path / d / "model.safetensors") for d in ("whole", "parts")]
    assert all(torch.equal(product[0][name], product[1][name]) for name in product[0])


def test_a_loss_that_is_not_a_number_stops_and_saves_nothing(recipe, tmp_path):
    """An absurd learning rate: the step, the last good checkpoint and a hint; good weights stay."""
    config = recipe(optim={"lr": 1e30, "clip": 0.0, "schedule": "constant"}, save_every=1, keep=9)
    with pytest.raises(TrainingError, match=r"not a number at step \d.*Last good .*optim.lr"):
        pretrain(config, out=tmp_path)
    for folder in (tmp_path / "checkpoints").iterdir():
        state = load_file(folder / "state-00000-of-00001.safetensors")
        assert all(torch.isfinite(t).all() for n, t in state.items() if n.startswith("model/"))
    assert not (tmp_path / "model.safetensors").exists()


def test_another_architecture_or_setting_is_refused(recipe, tmp_path):
    from dataclasses import replace

    config = recipe()
    pretrain(config, out=tmp_path)
    with pytest.raises(UserError, match="already holds a run"):
        pretrain(config, out=tmp_path)
    wider = replace(config, model=replace(config.model, hidden=64))
    before = (tmp_path / "model.safetensors").read_bytes()
    with pytest.raises(UserError, match="begun with model.hidden = 32, now it is 64"):
        pretrain(wider, out=tmp_path, resume=True)
    assert (tmp_path / "model.safetensors").read_bytes() == before
    with pytest.raises(UserError, match="holds no run to resume"):
        pretrain(config, out=tmp_path / "other", resume=True)
    longer = replace(config, train=replace(config.train, steps=8))
    assert pretrain(longer, out=tmp_path, resume=True).outcome.step == 8


def test_rows_longer_than_the_model_are_refused(recipe):
    source = OracleSource(OracleLanguage.default())
    config = ModelConfig(layers=1, hidden=16, heads=2, vocab_size=65, length=16)
    with pytest.raises(UserError, match="rows of 32 tokens, but model.length is 16"):
        PretrainTask(recipe(), config, source, CPU)


def test_a_batch_that_processes_cannot_share_is_refused(recipe):
    source = OracleSource(OracleLanguage.default())
    config = recipe()
    with pytest.raises(UserError, match="3 processes"):
        PretrainTask(config, config.model.resolve(64), source, World(torch.device("cpu"), 0, 3))
