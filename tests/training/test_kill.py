"""SIGKILL at any moment, then --resume."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

RECIPE = """
model: {layers: 2, hidden: 32, heads: 2, cond_dim: 16, length: 32, schedule: {eps: 0.0}}
data: {source: oracle}
train: {steps: 60, batch_size: 8, ema: 0.9, log_every: 5, eval_sequences: 64, save_every: 1}
"""


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_end(tmp_path):
    """Saving every step makes most kills hit a save; the end must not depend on them."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    command = [sys.executable, "-m", "didi_instruct", "pretrain", str(recipe), "--out"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, str(tmp_path / "whole")], check=True, env=environment, **quiet)
    out = tmp_path / "killed"
    for wanted in (7, 23, 41):
        resume = ["--resume"] if (out / "recipe.yaml").exists() else []
        process = subprocess.Popen([*command, str(out), *resume], env=environment, **quiet)
        while process.poll() is None and _latest(out) < wanted:
            time.sleep(0.003)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert _latest(out) < 60
    subprocess.run([*command, str(out), "--resume"], check=True, env=environment, **quiet)
    for name in ("model.safetensors", "config.json"):
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    steps = [json.loads(line)["step"] for line in (out / "log.jsonl").read_text().splitlines()]
    assert sorted(set(steps)) == steps[: len(set(steps))]
    assert steps.count(30) == 1


def _latest(out):
    steps = [int(p.name[5:]) for p in (out / "checkpoints").glob("step-*")]
    return max(steps, default=0)
