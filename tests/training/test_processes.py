"""Other processes, started as people start them: two on the CPU (gloo), or one that is killed."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from didi_instruct.training.run_dir import write_recipe

from .small import logged, tiny_recipe

pytestmark = pytest.mark.slow

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


def start(out, *settings, processes=1, resume=False):
    """Start `didi pretrain` of a tiny recipe, some settings changed."""
    write_recipe(out.parent, tiny_recipe(eval_sequences=64))
    recipe = out.parent / "recipe.yaml"
    launcher = [*TORCHRUN, f"--nproc-per-node={processes}"] if processes > 1 else [sys.executable]
    command = [*launcher, "-m", "didi_instruct", "pretrain", str(recipe), "--out", str(out)]
    command += [part for each in settings for part in ("--set", each)] + ["--resume"] * resume
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def run(out, *settings, **how):
    process = start(out, *settings, **how)
    output = process.communicate()[0]
    assert process.returncode == 0, output
    return out


def latest(out):
    """The step of the newest checkpoint."""
    steps = [int(path.name[5:]) for path in (out / "checkpoints").glob("step-*")]
    return max(steps, default=0)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return run(tmp_path_factory.mktemp("alone") / "run")


@pytest.mark.parametrize(
    "settings",
    [
        ["train.strategy=ddp"],
        ["train.strategy=ddp", "train.micro_batch=1"],
        ["train.strategy=fsdp"],
        ["train.strategy=fsdp", "train.micro_batch=3", "train.checkpoints=sharded"],
    ],
    ids=["ddp", "ddp-accumulated", "fsdp", "fsdp-accumulated-sharded"],
)
def test_two_processes_have_the_loss_curve_of_one(alone, tmp_path, settings):
    out = run(tmp_path / "run", *settings, processes=2)
    for name in ("loss", "valid_nats_per_token"):
        torch.testing.assert_close(logged(out, name), logged(alone, name), atol=1e-5, rtol=1e-5)
    ours, theirs = load_file(out / "model.safetensors"), load_file(alone / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, atol=1e-4, rtol=1e-3)


def test_a_signal_to_one_process_stops_all_and_saves_once(alone, tmp_path):
    """SIGTERM to the second worker alone: no result is written, --resume reaches the same end."""
    out = tmp_path / "run"
    process = start(out, "train.steps=100000", "train.save_every=100000", processes=2)
    log = out / "log.jsonl"
    while process.poll() is None and not (log.exists() and log.stat().st_size > 2000):
        time.sleep(0.05)
    workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    ranks = {
        Path(f"/proc/{pid}/environ").read_text().partition("\0RANK=")[2][:1]: pid for pid in workers
    }
    os.kill(int(ranks["1"]), signal.SIGTERM)
    output = process.communicate(timeout=60)[0]
    assert process.returncode != 0
    assert not (out / "config.json").exists()
    assert len(list((out / "checkpoints").iterdir())) == 1, output
    step = latest(out)
    assert f"Stopped at step {step}" in output
    run(out, f"train.steps={step + 2}", resume=True)
    torch.testing.assert_close(logged(out)[:3], logged(alone)[:3], atol=1e-3, rtol=0)


def test_sharded_checkpoints_resume_in_any_number_of_processes(alone, tmp_path):
    """Two processes stop at step 3 (as if killed), one process goes on."""
    sharded = ["train.strategy=fsdp", "train.checkpoints=sharded"]
    out = run(tmp_path / "run", *sharded, processes=2)
    (out / "model.safetensors").unlink()
    shutil.rmtree(out / "checkpoints" / "step-00000006")
    run(out, resume=True)
    torch.testing.assert_close(logged(out), logged(alone), atol=1e-5, rtol=1e-5)


def test_a_killed_run_resumes_to_the_same_end(tmp_path):
    """Saving every step makes most kills hit a save; the end must not depend on them."""
    settings = ["train.steps=60", "train.save_every=1", "train.log_every=5"]
    whole = run(tmp_path / "whole", *settings)
    out = tmp_path / "killed"
    for wanted in (7, 23, 41):
        process = start(out, *settings, resume=(out / "recipe.yaml").exists())
        while process.poll() is None and latest(out) < wanted:
            time.sleep(0.003)
        process.kill()
        process.communicate()
        assert latest(out) < 60
    run(out, *settings, resume=True)
    for name in ("model.safetensors", "config.json"):
        assert (out / name).read_bytes() == (whole / name).read_bytes()
    steps = logged(out, "step")
    assert sorted(set(steps)) == steps[: len(set(steps))]
    assert steps.count(30) == 1
