"""Two processes on the CPU (gloo) distil a uniform-state teacher as one does, over two rounds."""

import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from tests.random_models import DUO, save_random
from tests.runs import entries

from didi_instruct.api import distill as module

RECIPE = """
method: duo
data: {source: oracle}
duo: {steps: 8, iterations: 2}
optim: {lr: 1e-3, schedule: linear}
train: {steps: 4, batch_size: 8, ema: 0.9, log_every: 1, save_every: 3, eval_sequences: 32}
watch: {budgets: [2], samples: 16}
"""
WAYS = {
    "ddp": ["train.micro_batch=3"],
    "fsdp": ["train.strategy=fsdp", "train.checkpoints=sharded", "train.micro_batch=2"],
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a teacher of random weights, all of which matter, and the recipe."""
    folder = tmp_path_factory.mktemp("processes")
    save_random(folder / "teacher", **DUO)
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder


def distil(place, out, *, processes=1, settings=(), resume=False):
    """Run `didi distill` in as many processes."""
    start = [sys.executable]
    if processes > 1:
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    options = [part for s in settings for part in ("--set", s)] + ["--resume"] * resume
    files = ["--teacher", str(place / "teacher"), "--out", str(place / out), "--device", "cpu"]
    result = subprocess.run(
        [*start, "-m", "didi_instruct", "distill", str(place / "recipe.yaml"), *files, *options],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr


def check_same(ours, theirs):
    """Logs and weights, up to the order of additions (Adam makes a weight's noise 1e-4)."""
    logs = [entries(folder) for folder in (ours, theirs)]
    assert [e["step"] for e in logs[0]] == [e["step"] for e in logs[1]]
    for a, b in zip(*logs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    a, b = (load_file(folder / "model.safetensors") for folder in (ours, theirs))
    torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_two_processes_distil_as_one(place, way, monkeypatch):
    """And what two processes saved in shards within the second round, one takes up."""
    monkeypatch.setattr(module, "draw_curves", lambda *_, **__: False)
    if not (place / "alone").exists():
        module.distill(
            str(place / "recipe.yaml"), teacher=place / "teacher", out=place / "alone", device="cpu"
        )
    distil(place, way, processes=2, settings=WAYS[way])
    check_same(place / way, place / "alone")
    if way == "fsdp":
        saved = place / way / "checkpoints"
        assert len(list((saved / "step-00000003").glob("state-*"))) == 2
        (saved / "step-00000004").rename(place / "set-aside")
        for name in ("model.safetensors", "config.json"):
            (place / way / name).unlink()
        distil(place, way, resume=True)
        check_same(place / way, place / "alone")
