"""Two processes on the CPU (gloo), started as people start them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

RECIPE = """
model: {layers: 2, hidden: 32, heads: 2, cond_dim: 16, length: 32, schedule: {eps: 0.0}}
data: {source: oracle}
optim: {lr: 1e-2, warmup: 2}
train: {steps: 6, batch_size: 8, ema: 0.9, log_every: 1, save_every: 3, eval_sequences: 64}
"""


def run(out: Path, *settings: str, processes: int = 1, resume: bool = False) -> str:
    recipe = out.parent / "recipe.yaml"
    recipe.write_text(RECIPE)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, f"--nproc-per-node={processes}"] if processes > 1 else [sys.executable]
    command += ["-m", "didi_instruct", "pretrain", str(recipe), "--out", str(out)]
    command += [part for s in settings for part in ("--set", s)] + ["--resume"] * resume
    result = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def held_out(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [line["valid_nats_per_token"] for line in lines if "valid_nats_per_token" in line]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone") / "run"
    run(folder)
    return folder


@pytest.mark.slow
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
    out = tmp_path / "run"
    run(out, *settings, processes=2)
    torch.testing.assert_close(losses(out), losses(alone), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(held_out(out), held_out(alone), atol=1e-5, rtol=1e-5)
    ours, theirs = load_file(out / "model.safetensors"), load_file(alone / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, atol=1e-4, rtol=1e-3)


@pytest.mark.slow
def test_a_signal_to_one_process_stops_all_and_saves_once(alone, tmp_path):
    """SIGTERM to the second worker alone: no result is written, --resume reaches the same end."""
    out = tmp_path / "run"
    recipe = out.parent / "recipe.yaml"
    recipe.write_text(RECIPE)
    slow = ["--set", "train.steps=100000", "--set", "train.save_every=100000"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", "-m", "didi_instruct", "pretrain", str(recipe)]
    process = subprocess.Popen(
        [*command, "--out", str(out), *slow],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
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
    steps = [p.name for p in (out / "checkpoints").iterdir()]
    assert len(steps) == 1, output
    assert f"Stopped at step {int(steps[0][5:])}" in output
    run(out, f"train.steps={int(steps[0][5:]) + 2}", resume=True)
    torch.testing.assert_close(losses(out)[:3], losses(alone)[:3], atol=1e-3, rtol=0)


@pytest.mark.slow
def test_sharded_checkpoints_resume_in_any_number_of_processes(alone, tmp_path):
    """Two processes stop at step 3 (as if killed), one process goes on."""
    out = tmp_path / "run"
    sharded = ["train.strategy=fsdp", "train.checkpoints=sharded"]
    run(out, *sharded, "train.steps=6", "train.save_every=3", processes=2)
    (out / "model.safetensors").unlink()
    for leftover in (out / "checkpoints" / "step-00000006").iterdir():
        leftover.unlink()
    (out / "checkpoints" / "step-00000006").rmdir()
    run(out, resume=True)
    torch.testing.assert_close(losses(out), losses(alone), atol=1e-5, rtol=1e-5)
