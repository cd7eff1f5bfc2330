"""Two processes on the CPU (gloo) train adapters as one does, number by number.

This file is also the program that `torchrun` starts.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.distillation.test_processes import run_commands
from tests.models.causal_folders import BIDIRECTIONAL
from tests.runs import entries

import didi_instruct as didi

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
PROGRAM = "tests.adapters.test_processes"
RECIPE = """
lora: {rank: 2}
prompts: {length: 4}
didi: {group_size: 2}
reference: {source: online, steps: 2}
discriminator: {lr: 1e-3, trainable_blocks: null, warmup: 1, chance: 0.0, saturation: 1.0}
token_matching: {warmup: 1, aux_lr: 1e-3, budgets: [2], anchor: 0.1}
optim: {lr: 1e-3, schedule: constant}
train: {steps: 4, batch_size: 8, ema: 0.9, log_every: 1, save_every: 2}
watch: {budgets: [2], samples: 8, min_entropy: 0.0}
"""
TEACHERS = {"didi": torch.float32, "token-matching": torch.bfloat16}
CLOSE = {"didi": 1e-4, "token-matching": 2e-2}
"""In 16 bits a pass of half of the texts rounds in other places."""
WAYS = {"ddp": "train.strategy=ddp", "fsdp": "train.strategy=fsdp"}
CASES = [("didi", "ddp"), ("didi", "fsdp"), ("token-matching", "fsdp")]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """One process and two have distilled and fine-tuned; those of two were resumed half-way."""
    folder = tmp_path_factory.mktemp("adapters")
    for method, dtype in TEACHERS.items():
        (folder / f"teacher-{method}").mkdir()
        BIDIRECTIONAL["llada"](folder / f"teacher-{method}", dtype=dtype)
    rows = [{"prompt": "w1 w2", "answer": " w3"}, {"prompt": "w4", "answer": " w5 w6"}]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows * 4))
    (folder / "recipe.yaml").write_text(RECIPE)
    source = f"prompts.source={folder / 'prompts.jsonl'}"
    commands = []
    for method, way in CASES:
        out = folder / f"{method}-{way}"
        teacher = str(folder / f"teacher-{method}")
        given = ["distill", str(folder / "recipe.yaml"), "--teacher", teacher]
        given += ["--method", method, "--device", "cpu", "--out", str(out)]
        for setting in (source, WAYS[way]):
            given += ["--set", setting]
        commands += [[*given, "--set", "train.steps=2"], [*given, "--resume"]]
        if not (folder / method).exists():
            didi.distill(
                str(folder / "recipe.yaml"),
                teacher=teacher,
                method=method,
                out=folder / method,
                device="cpu",
                overrides=[source],
            )
    tune = {
        "task": "answers", "lora": {"rank": 2}, "optim": {"lr": 1e-3},
        "data": {"source": str(folder / "prompts.jsonl"), "valid": 0},
        "train": {"steps": 3, "batch_size": 4, "ema": 0.5, "log_every": 1, "save_every": 3},
    }  # fmt: skip
    didi.finetune(tune, model=folder / "teacher-didi", out=folder / "tuned", device="cpu")
    (folder / "tune.yaml").write_text(json.dumps(tune))
    given = ["finetune", str(folder / "tune.yaml"), "--model", str(folder / "teacher-didi")]
    given += ["--device", "cpu", "--out", str(folder / "tuned-fsdp")]
    commands.append([*given, "--set", WAYS["fsdp"]])
    (folder / "commands.json").write_text(json.dumps(commands))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launch, "-m", PROGRAM, str(folder / "commands.json")],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.mark.parametrize(("method", "way"), CASES)
def test_two_processes_have_the_losses_of_one(place, method, way):
    """Whose base is whole or sharded; the adapters are gathered, and saved once."""
    one, two = (losses(place / name) for name in (method, f"{method}-{way}"))
    assert one.keys() == two.keys() == {1, 2, 3, 4}
    for step, mine in one.items():
        assert mine == pytest.approx(two[step], rel=CLOSE[method], abs=CLOSE[method]), step


def test_two_processes_fine_tune_an_adapter_as_one(place):
    """On a sharded base."""
    one, two = (losses(place / name) for name in ("tuned", "tuned-fsdp"))
    assert one.keys() == two.keys() == {1, 2, 3}
    for step, mine in one.items():
        for name in ("loss", "grad_norm"):
            assert mine[name] == pytest.approx(two[step][name], rel=1e-4), (step, name)
    mine, theirs = (didi.load(place / name).network for name in ("tuned", "tuned-fsdp"))
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=0)


def losses(folder):
    """Numbers of training by step, without those of evaluations."""
    found = [entry for entry in entries(folder) if "lr" in entry]
    return {entry["step"]: entry for entry in found}


@pytest.mark.parametrize(("method", "way"), CASES)
def test_the_adapters_of_two_processes_open_and_are_those_of_one(place, method, way):
    mine = load_file(place / method / "adapter_model.safetensors")
    theirs = load_file(place / f"{method}-{way}" / "adapter_model.safetensors")
    assert mine.keys() == theirs.keys()
    assert max((mine[n] - theirs[n]).abs().max() for n in mine) < 3e-3
    model = didi.load(place / f"{method}-{way}")
    assert model.generate(num=1, steps=2, prompt="w1 w2", length=6)
    state = list((place / f"{method}-{way}").glob("checkpoints/step-00000004/state-*"))
    assert len(state) == 1
    assert not any("embed_tokens" in name for name in load_file(state[0]))


if __name__ == "__main__":
    run_commands(json.loads(Path(sys.argv[1]).read_text()))
