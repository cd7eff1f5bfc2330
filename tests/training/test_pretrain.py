import signal
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from didi_instruct.config.model import ModelConfig
from didi_instruct.config.train import CurriculumConfig
from didi_instruct.data.oracle import OracleLanguage, OracleSource
from didi_instruct.errors import TrainingError, UserError
from didi_instruct.pretrain import pretrain
from didi_instruct.training.distributed import World
from didi_instruct.training.pretrain_task import PretrainTask

from .small import CPU, STATE, Interrupted, logged, task_of, tiny_recipe


def longer(config, steps):
    return replace(config, train=replace(config.train, steps=steps))


@pytest.mark.parametrize("kind", ["mdlm", "duo", "ar"])
def test_eight_micro_batches_are_one_batch(kind):
    """1 x 8 equals 8 x 1: same losses and same weights, up to the order of additions."""
    whole, parts = task_of(tiny_recipe(kind)), task_of(tiny_recipe(kind, micro_batch=1))
    for step in range(3):
        a, b = whole.step(step), parts.step(step)
        torch.testing.assert_close(a["loss"], b["loss"], atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(a["grad_norm"], b["grad_norm"], atol=1e-6, rtol=1e-4)
    for p, q in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=2e-4, rtol=1e-3)


def test_training_is_plain_once_the_curriculum_is_over():
    """From its end on a step is that of a run without, bit by bit, given the same weights."""
    base = tiny_recipe("duo")
    soft = replace(base, curriculum=CurriculumConfig(steps=2, temperature=(1.0, 0.1)))
    plain, task = task_of(base), task_of(soft)
    losses = [(task.step(step)["loss"], plain.step(step)["loss"]) for step in range(2)]
    assert all(a != b for a, b in losses)
    for name, tensor in task.tensors().items():
        plain.tensors()[name].copy_(tensor)
    for step in (2, 3):
        assert torch.equal(task.step(step)["loss"], plain.step(step)["loss"])


@pytest.mark.parametrize(("kind", "dropout"), [("mdlm", 0.1), ("duo", 0.0), ("ar", 0.0)])
def test_a_stopped_and_resumed_run_is_bit_exact(tmp_path, kind, dropout):
    """Weights, average, optimizer, noise, dropout and data position all continue."""
    config = tiny_recipe(kind)
    config = replace(config, model=replace(config.model, dropout=dropout))
    pretrain(config, out=tmp_path / "whole")
    stopped = pretrain(config, out=tmp_path / "parts", reporter=Interrupted(4))
    assert not stopped.finished
    assert stopped.outcome.signal == signal.SIGTERM
    assert stopped.outcome.step < 6
    assert pretrain(config, out=tmp_path / "parts", resume=True).finished
    assert logged(tmp_path / "parts") == logged(tmp_path / "whole")
    for file in (f"checkpoints/step-00000006/{STATE}", "model.safetensors"):
        whole, parts = load_file(tmp_path / "whole" / file), load_file(tmp_path / "parts" / file)
        assert whole.keys() == parts.keys()
        assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_a_loss_that_is_not_a_number_stops_and_saves_nothing(tmp_path):
    """An absurd learning rate: the step, the last good checkpoint and a hint; good weights stay."""
    rates = {"lr": 1e30, "clip": 0.0, "schedule": "constant"}
    config = tiny_recipe(optim=rates, save_every=1, keep=9)
    with pytest.raises(TrainingError, match=r"not a number at step \d.*Last good .*optim.lr"):
        pretrain(config, out=tmp_path)
    for folder in (tmp_path / "checkpoints").iterdir():
        state = load_file(folder / STATE)
        assert all(torch.isfinite(t).all() for n, t in state.items() if n.startswith("model/"))
    assert not (tmp_path / "model.safetensors").exists()


def test_weights_that_overflow_in_the_last_update_are_not_saved(tmp_path):
    """Loss and gradient of the step are finite; the step itself is not. A lower rate goes on."""
    rates = {"lr": 1e38, "warmup": 0, "schedule": "constant"}
    with pytest.raises(TrainingError, match="a weight is not a number at step 1"):
        pretrain(tiny_recipe(optim=rates, steps=1, save_every=1), out=tmp_path)
    assert not list(tmp_path.rglob("*.safetensors"))
    assert pretrain(tiny_recipe(steps=1), out=tmp_path, resume=True).finished


def test_other_data_is_refused(tmp_path, monkeypatch):
    config = tiny_recipe(steps=3)
    pretrain(config, out=tmp_path)
    monkeypatch.setattr(OracleSource, "fingerprint", "0123")
    with pytest.raises(UserError, match="was trained with data .*, now it is 0123"):
        pretrain(longer(config, 6), out=tmp_path, resume=True)


def test_a_resumed_run_needs_its_tokens_not_the_corpus(tmp_path):
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("all work and no play makes jack a dull boy\n" * 2000)
    config = tiny_recipe(steps=3)
    data = replace(config.data, source=str(corpus), tokenizer="bytes")
    config = replace(config, data=data)
    pretrain(config, out=tmp_path / "run")
    corpus.unlink()
    assert pretrain(longer(config, 6), out=tmp_path / "run", resume=True).outcome.step == 6


def test_another_architecture_or_setting_is_refused(tmp_path):
    config = tiny_recipe()
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
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "log.jsonl").write_text("mine")
    with pytest.raises(UserError, match="is not empty"):
        pretrain(config, out=tmp_path / "mine")
    assert pretrain(longer(config, 8), out=tmp_path, resume=True).outcome.step == 8


def test_what_does_not_fit_is_refused():
    source = OracleSource(OracleLanguage.default())
    short = ModelConfig(layers=1, hidden=16, heads=2, vocab_size=65, length=16)
    with pytest.raises(UserError, match="rows of 32 tokens, but model.length is 16"):
        PretrainTask(tiny_recipe(), short, source, CPU)
    with pytest.raises(UserError, match="3 processes"):
        task_of(tiny_recipe(), World(torch.device("cpu"), 0, 3))


def test_a_single_held_out_row_has_no_interval_and_stops_nothing(tmp_path):
    assert pretrain(tiny_recipe(steps=2, eval_sequences=1), out=tmp_path).finished
    assert len(logged(tmp_path, "valid_nats_per_token")) == 1
    assert logged(tmp_path, "valid_ci95") == []
