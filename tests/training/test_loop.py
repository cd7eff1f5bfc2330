"""The loop with a task of two numbers: signals, NaN, what is logged, evaluated and saved."""

import math
import os
import signal

import pytest
import torch

from didi_instruct.config.train import TrainConfig
from didi_instruct.errors import TrainingError
from didi_instruct.training import loop as module
from didi_instruct.training.loop import Loop, interruptible

from .small import CPU, Interrupted, logged


class Counting:
    """A task that counts its steps; those in `bad` have a gradient that is not a number."""

    sharded = False

    def __init__(self, bad=()):
        self.bad, self.count = bad, torch.zeros(1)

    def step(self, step):
        self.count += 1
        found = {"loss": torch.tensor(float(step))}
        if step % 2:  # a number may be missing where it means nothing
            found["grad_norm"] = torch.tensor(math.nan if step in self.bad else 1.0)
        return found

    def describe(self, step, seconds, steps):
        return {"lr": 1.0, "steps": float(steps)}

    def tensors(self):
        return {"count": self.count}

    def write_model(self, folder):
        (folder / "product").write_text(str(self.count.item()))

    def checkpoint_bytes(self):
        return 4

    def identity(self):
        return {"data": "mine"}


def saved(folder):
    return sorted(path.name for path in (folder / "checkpoints").glob("*"))


def test_signals_are_a_wish_and_repeating_them_changes_nothing():
    before = signal.getsignal(signal.SIGINT)
    with interruptible(lambda text: None) as stop:
        assert stop() is None
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop() == signal.SIGTERM
    assert signal.getsignal(signal.SIGINT) is before


def test_a_later_ctrl_c_is_an_order(monkeypatch):
    monkeypatch.setattr(module, "PATIENCE", -1.0)
    with interruptible(lambda text: None) as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop() == signal.SIGINT
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_what_is_logged_and_saved_when(tmp_path):
    """Means over the steps since the last entry, of a number where it was told."""
    config = TrainConfig(steps=7, log_every=2, save_every=5, keep=9)
    loop = Loop(Counting(), config, tmp_path, CPU, first_save=1)
    outcome = loop.run(before={"loss": 9.0})
    assert (outcome.step, outcome.signal) == (7, None)
    assert logged(tmp_path, "step") == [0, 1, 2, 4, 5, 6, 7]
    assert logged(tmp_path) == [9.0, 0.0, 1.0, 2.5, 4.0, 5.0, 6.0]
    assert logged(tmp_path, "steps") == [1, 1, 2, 1, 1, 1]
    assert logged(tmp_path, "grad_norm") == [1.0, 1.0, 1.0]
    assert saved(tmp_path) == ["step-00000001", "step-00000005", "step-00000007"]
    assert (outcome.checkpoint / "product").read_text() == "7.0"


def test_a_gradient_that_is_not_a_number_stops_although_the_loss_is_fine(tmp_path):
    """The loop must not wait for the next loss: a save could come first."""
    config = TrainConfig(steps=9, log_every=9, save_every=3)
    with pytest.raises(TrainingError, match="not a number at step 6; .*step-00000003"):
        Loop(Counting(bad={5}), config, tmp_path, CPU).run()
    assert saved(tmp_path) == ["step-00000003"]


def test_an_evaluation_that_a_signal_cuts_off_is_made_again(tmp_path):
    """The step that it was of is saved, and logged once."""
    config, task = TrainConfig(steps=4, log_every=3, eval_every=2, save_every=9), Counting()
    asked = []

    def evaluate(step, tick):
        asked.append(step)
        tick()
        if len(asked) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            tick()
        return {"valid": float(step)}

    outcome = Loop(task, config, tmp_path, CPU, evaluate=evaluate).run()
    assert (outcome.step, outcome.signal) == (2, signal.SIGTERM)
    assert saved(tmp_path) == ["step-00000002"]
    again = Loop(Counting(), config, tmp_path, CPU, evaluate=evaluate)
    assert again.run(again.resume()).signal is None
    assert again.task.count == 4
    assert asked == [2, 2, 4]
    assert logged(tmp_path, "valid") == [2.0, 4.0]
    assert logged(tmp_path) == [0.5, 2.0, 3.0]


def test_a_watch_stops_a_run_by_its_reason(tmp_path):
    loop = Loop(
        Counting(), TrainConfig(steps=9, log_every=1, save_every=2), tmp_path, CPU,
        watch=lambda step, values: "It is enough." if values["loss"] == 4 else None,
    )  # fmt: skip
    with pytest.raises(TrainingError, match=r"Stopped at step 5: It is enough\. .*step-00000004"):
        loop.run()


def test_a_signal_stops_after_the_step_and_saves(tmp_path):
    config = TrainConfig(steps=9, log_every=2, save_every=9)
    outcome = Loop(Counting(), config, tmp_path, CPU, reporter=Interrupted(4)).run()
    assert (outcome.step, outcome.signal) == (5, signal.SIGTERM)
    assert outcome.checkpoint == tmp_path / "checkpoints" / "step-00000005"
