import json
import math
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from didi_instruct.api.pretrain import pretrain
from didi_instruct.config.model import ModelConfig
from didi_instruct.data.oracle import OracleLanguage, OracleSource
from didi_instruct.errors import TrainingError, UserError
from didi_instruct.training.distributed import World
from didi_instruct.training.loop import Interrupt, Loop
from didi_instruct.training.pretrain_task import PretrainTask
from didi_instruct.training.reporting import Reporter

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


class SignalAt(Reporter):
    def __init__(self, step):
        self.step = step

    def advance(self, step, values):
        if step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_stopped_and_resumed_run_is_bit_exact(recipe, tmp_path, dropout):
    """Weights, average, optimizer, noise, dropout and data position all continue."""
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


def test_weights_that_overflow_in_the_last_update_are_not_saved(recipe, tmp_path):
    """Loss and gradient of the step are finite; the step itself is not."""
    config = recipe(optim={"lr": 1e38, "warmup": 0, "schedule": "constant"}, steps=1, save_every=1)
    with pytest.raises(TrainingError, match="a weight is not a number at step 1"):
        pretrain(config, out=tmp_path)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_gradient_that_is_not_a_number_stops_although_the_loss_is_fine(recipe):
    """The loop must not wait for the next loss: a save could come first."""
    loop_of = Loop(NanGradient(), recipe(steps=3).train, Path("unused"), CPU)
    with pytest.raises(TrainingError, match="at step 2"):
        loop_of._train(0, Interrupt())


class NanGradient:
    """A task whose second step has a finite loss and a gradient that is not a number."""

    sharded = False

    def step(self, step):
        norm = torch.tensor(math.nan if step == 1 else 1.0)
        return {"loss": torch.tensor(1.0), "grad_norm": norm}

    def describe(self, step, seconds, steps):
        return {}


def test_a_diverged_run_can_be_resumed_with_a_lower_learning_rate(recipe, tmp_path):
    config = recipe()
    bad = replace(config.optim, lr=1e30, clip=0.0, schedule="constant", warmup=0)
    with pytest.raises(TrainingError):
        pretrain(replace(config, optim=bad), out=tmp_path)
    assert pretrain(config, out=tmp_path, resume=True).finished


def test_other_data_is_refused(recipe, tmp_path, monkeypatch):
    config = recipe(steps=3)
    pretrain(config, out=tmp_path)
    monkeypatch.setattr(OracleSource, "fingerprint", "0123")
    with pytest.raises(UserError, match="was trained with data .*, now it is 0123"):
        pretrain(replace(config, train=replace(config.train, steps=6)), out=tmp_path, resume=True)


def test_a_folder_with_other_things_in_it_is_refused(recipe, tmp_path):
    (tmp_path / "log.jsonl").write_text("mine")
    with pytest.raises(UserError, match="is not empty"):
        pretrain(recipe(), out=tmp_path)
    assert (tmp_path / "log.jsonl").read_text() == "mine"


def test_a_resumed_run_needs_its_tokens_not_the_corpus(recipe, tmp_path):
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("all work and no play makes jack a dull boy\n" * 2000)
    config = recipe(steps=3)
    data = replace(config.data, source=str(corpus), tokenizer="bytes")
    config = replace(config, data=data)
    pretrain(config, out=tmp_path / "run")
    corpus.unlink()
    longer = replace(config, train=replace(config.train, steps=6))
    assert pretrain(longer, out=tmp_path / "run", resume=True).outcome.step == 6


def test_another_architecture_or_setting_is_refused(recipe, tmp_path):
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
