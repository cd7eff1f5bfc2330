"""When a run goes wrong, is stopped or has ended already: what it says, and what stays."""

import os
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.runs import contents, entries, same_tensors

import didi_instruct as didi
from didi_instruct.config.schema import read_yaml
from didi_instruct.errors import TrainingError, UserError
from didi_instruct.evaluation.quick_eval import QuickTest
from didi_instruct.models.checkpoint import read_manifest
from didi_instruct.training import run_dir
from didi_instruct.training.distributed import World

from .small import METHODS, Heard, recipe


@pytest.mark.parametrize("method", METHODS)
def test_an_entropy_collapse_stops_with_cause_and_last_checkpoint(run, tmp_path, method):
    wild = {"lr": 0.3, "schedule": "constant", "clip": 0.0}
    watch, train = {"min_entropy": 0.9}, {"save_every": 1, "keep": 9, "steps": 100}
    # Of 8 texts each, 32 iterations tell where it began.
    warmup = {"discriminator": {"warmup": 32}, "token_matching": {"warmup": 32}}
    config = recipe(method, optim=wild, watch=watch, train=train, **warmup)
    with pytest.raises(TrainingError) as stop:
        run(config)
    checkpoints = sorted((tmp_path / "run" / "checkpoints").iterdir())
    step, last = int(entries(tmp_path / "run")[-1]["step"]), checkpoints[-1]
    assert last.name == f"step-{step - 1:08d}"
    message = str(stop.value)
    assert message.startswith(f"Stopped at step {step}: entropy collapse, ")
    assert message.endswith(f"Last good checkpoint: {last}.")
    entropies = [e["path_entropy"] for e in entries(tmp_path / "run")[1:]]
    enough = -(-256 // config.train.batch_size)
    assert step >= enough, "an average over fewer texts says nothing"
    assert np.mean(entropies[-enough:]) < 0.95 * entropies[0]
    assert not (tmp_path / "run" / "config.json").exists()
    assert didi.load(last, device="cpu").sample(num=1, steps=2).shape == (1, 32)
    patient = replace(
        config,
        watch=replace(config.watch, min_entropy=0.0),
        train=replace(config.train, steps=step + 1),
    )
    assert run(patient, resume=True).outcome.step == step + 1


def test_a_saturated_discriminator_waits_and_is_named_once(run, tmp_path):
    heard = Heard()
    discriminator = {"chance": 0.0, "saturation": 1e-9}
    run(recipe(discriminator=discriminator, train={"steps": 4}), reporter=heard)
    said = [line for line in heard.lines if "saturated" in line]
    assert len(said) == 1
    assert "discriminator.lr" in said[0]
    for entry in (e for e in entries(tmp_path / "run") if "loss" in e):
        assert (entry["disc_waits"], entry["disc_grad_norm"], entry["student_waits"]) == (1, 0, 0)
        assert entry["grad_norm"] > 0


def test_a_discriminator_at_chance_makes_the_student_wait_and_is_named_once(run, models, tmp_path):
    heard = Heard()
    discriminator = {"chance": 0.98, "saturation": 0.99, "warmup": 1}
    run(recipe(discriminator=discriminator, train={"steps": 4}), reporter=heard)
    said = [line for line in heard.lines if "at chance" in line]
    assert len(said) == 1
    assert said[0].startswith("step 2: "), "waiting in warm-up is no trouble"
    assert "discriminator.trainable_blocks" in said[0]
    for entry in (e for e in entries(tmp_path / "run") if "loss" in e):
        assert (entry["student_waits"], entry["grad_norm"], entry["disc_waits"]) == (1, 0, 0)
        assert entry["disc_grad_norm"] > 0
    student, teacher = tmp_path / "run" / "model.safetensors", models / "teacher"
    assert same_tensors(student, teacher / "model.safetensors")


def test_a_healthy_run_says_nothing(run):
    heard = Heard()
    run(recipe(watch={"min_entropy": 0.5}), reporter=heard)
    assert heard.lines == ["Measuring the teacher at 2 steps"]


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        pytest.param(
            "token-matching",
            {"token_matching": {"budgets": [16], "warmup": 20}},
            marks=pytest.mark.slow,
        ),
        ("token-matching", {"token_matching": {"warmup": 0}, "prompt": 28}),
        ("didi", {"prompt": 28, "didi": {"group_size": 4}}),
    ],
)
def test_few_texts_do_not_look_like_a_collapse(run, method, changes):
    """Four texts of few tokens: their entropy swings by more than half; the average does not."""
    config = recipe(
        method,
        **changes,
        optim={"lr": 1e-9},
        data={"source": "oracle"},
        train={"batch_size": 4, "steps": 90, "save_every": 90, "eval_every": 0},
        watch={"min_entropy": 0.7, "budgets": []},
    )
    assert run(config).finished


def test_a_finished_run_stays_as_it_is(run, tmp_path):
    """Nothing is left to train, so nothing may say that it was trained otherwise."""
    done = run(recipe())
    before = contents(tmp_path / "run")
    heard = Heard()
    again = run(recipe(didi={"kl_weight": 0.5}), resume=True, reporter=heard)
    assert contents(tmp_path / "run") == before
    assert (again.teacher, again.student) == (done.teacher, done.student)
    assert (again.outcome.step, again.outcome.signal, again.new) == (6, None, False)
    assert [line for line in heard.lines if "nothing to do" in line]


def test_a_finished_run_needs_neither_its_bank_nor_its_checkpoints(run, tmp_path, draws):
    config = recipe(reference={"source": "bank"})
    run(config)
    shutil.rmtree(tmp_path / "run" / "bank")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    before, drawn = contents(tmp_path / "run"), len(draws)
    assert not run(config, resume=True).new
    with pytest.raises(UserError, match="has made 6 steps, but its checkpoints are gone"):
        run(replace(config, train=replace(config.train, steps=9)), resume=True)
    assert (contents(tmp_path / "run"), len(draws)) == (before, drawn)


def test_a_model_of_fewer_steps_is_not_a_finished_run(run, tmp_path):
    """Lengthened and stopped at the new end: the folder still holds the model of the old one."""
    run(recipe())
    longer = recipe(train={"steps": 8})
    stopped = run(longer, resume=True, reporter=Heard(stop_after=8))
    assert (stopped.outcome.step, stopped.finished) == (8, False)
    assert read_manifest(tmp_path / "run").provenance["step"] == 6
    done = run(longer, resume=True)
    assert done.new
    assert read_manifest(tmp_path / "run").provenance["step"] == 8
    assert same_tensors(
        tmp_path / "run" / "model.safetensors",
        tmp_path / "run" / "checkpoints" / "step-00000008" / "model.safetensors",
    )


def test_a_run_does_not_go_back(run, tmp_path):
    run(recipe())
    before = contents(tmp_path / "run")
    with pytest.raises(UserError, match="has made 6 steps already, and train.steps asks for 4"):
        run(recipe(train={"steps": 4}), resume=True)
    assert contents(tmp_path / "run") == before


def test_what_a_resumed_run_changes_is_said(run, tmp_path):
    run(recipe())
    heard = Heard()
    run(recipe(train={"steps": 7}, didi={"kl_weight": 0.5}), resume=True, reporter=heard)
    assert "Changed: didi.kl_weight 0.05 -> 0.5" in heard.lines
    assert "Changed: train.steps 6 -> 7" in heard.lines
    assert read_yaml(tmp_path / "run" / "recipe.yaml")["didi"]["kl_weight"] == 0.5


def test_a_signal_ends_an_evaluation_at_once_and_resume_makes_it_again(run, tmp_path, monkeypatch):
    """Evaluations may take minutes: the step is saved, and the product is the same in the end."""
    run(recipe(train={"eval_every": 2}), "straight")
    draw, calls = QuickTest.draw, []

    def interrupted(test, rows, steps, *options):
        calls.append(steps)
        if len(calls) == 2:  # the teacher is measured first
            os.kill(os.getpid(), signal.SIGINT)
        return draw(test, rows, steps, *options)

    monkeypatch.setattr(QuickTest, "draw", interrupted)
    stopped = run(recipe(train={"eval_every": 2}))
    assert stopped.outcome.signal == signal.SIGINT
    assert stopped.outcome.checkpoint.name == "step-00000002"
    assert len(calls) == 2
    assert run(recipe(train={"eval_every": 2}), resume=True).finished
    assert entries(tmp_path / "run") == entries(tmp_path / "straight")
    files = [tmp_path / name / "model.safetensors" for name in ("run", "straight")]
    assert same_tensors(*files)


def test_a_second_run_in_one_folder_waits_its_turn(run, tmp_path):
    held = run_dir.open_run(tmp_path / "run", recipe(), resume=False, device="cpu", reporter=None)
    with held, pytest.raises(UserError, match="in use by another"):
        run(recipe())
    assert not (tmp_path / "run").exists()
    assert run(recipe()).finished


def test_no_process_writes_before_all_have_looked(tmp_path, monkeypatch):
    """The second one comes late: it would find what the first has written meanwhile."""
    folder, meet = tmp_path / "run", threading.Barrier(2, timeout=20)

    class Both(World):
        def wait(self):
            meet.wait()

        def any(self, flag):
            meet.wait()
            return flag

    def world_of(rank):
        return nullcontext(Both(torch.device("cpu"), rank, 2))

    monkeypatch.setattr(run_dir, "open_world", world_of)

    def first():
        with run_dir.open_run(folder, recipe(), resume=False, device=0, reporter=None):
            (folder / "curves.png").touch()

    def second():
        time.sleep(0.2)
        with run_dir.open_run(folder, recipe(), resume=False, device=1, reporter=None):
            pass

    with ThreadPoolExecutor(2) as pool:
        for found in [pool.submit(first), pool.submit(second)]:
            found.result()
