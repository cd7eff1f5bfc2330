"""Two processes on the CPU (gloo) distil as one does, number by number.

One launch of `torchrun` runs all the commands one after the other: this file is its program too.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from tests.random_models import DUO, save_random
from tests.runs import distilling, entries

import didi_instruct as didi
from didi_instruct.cli.main import main

ROOT = Path(__file__).parents[2]
PROGRAM = "tests.distillation.test_processes"
RECIPE = """
method: didi
reference: {source: online, steps: 2}
discriminator: {lr: 1e-3, trainable_blocks: 1, warmup: 1, chance: 0.0, saturation: 1.0}
token_matching: {warmup: 1, aux_lr: 1e-3, budgets: [2, 4], contexts: 2, completion: 0.5}
optim: {lr: 1e-3, schedule: linear}
train: {steps: 5, batch_size: 16, ema: 0.9, log_every: 1, save_every: 3, eval_sequences: 32}
watch: {budgets: [2], samples: 16, min_entropy: 0.0}
"""
METHODS = {
    "batch": "didi.rollout_steps=2 reference.source=bank reference.rows=1100",
    "tau": "didi.grouping=tau didi.scale=batch discriminator.steps=2",
    "state": "didi.grouping=state didi.score_steps=last reference.source=data data.source=oracle "
    "discriminator.trainable_blocks=null",
    "prompt": "prompt=8 data.source=oracle",
    "matching": "method=token-matching token_matching.anchor=0.1",
    "sdtt": "method=sdtt sdtt.steps=64 sdtt.iterations=1",
    "mixture": "method=mixture mixture.codes=3 mixture.budgets=[2,4]",
    "dimo": "method=dimo dimo.warmup=1 dimo.budgets=[1,3]",
    "duo": "method=duo duo.steps=32 duo.iterations=1 data.source=oracle",
}
WAYS = {
    "ddp": "",
    "ddp-parts": "train.micro_batch=4",
    "fsdp": "train.strategy=fsdp",
    "fsdp-parts-sharded": "train.strategy=fsdp train.micro_batch=3 train.checkpoints=sharded",
}
RUNS = [
    *(("batch", way) for way in ("ddp", "fsdp-parts-sharded")),
    ("tau", "ddp-parts"),
    ("state", "fsdp"),
    ("prompt", "ddp"),
    *(("matching", way) for way in ("ddp-parts", "fsdp-parts-sharded")),
    ("sdtt", "fsdp-parts-sharded"),
    ("mixture", "fsdp"),
    ("dimo", "ddp-parts"),
    *(("duo", way) for way in ("ddp-parts", "fsdp-parts-sharded")),
]


def no_curves(*_: object, **__: object) -> bool:
    """A picture takes longer than a run."""
    return False


def run_commands(commands: list[list[str]]) -> None:
    """Be one of the processes: run `didi` once for each command."""
    join, distilling.draw_curves = dist.init_process_group, no_curves
    for number, command in enumerate(commands):

        def join_anew(backend: str, number: int = number) -> None:
            # The addresses of the last group are still in the store, so each has its own corner.
            store, rank, size = next(dist.rendezvous("env://"))
            store = dist.PrefixStore(f"run-{number}", store)
            join(backend, store=store, rank=rank, world_size=size)

        dist.init_process_group = join_anew
        sys.argv = ["didi", *command]
        try:
            main()
        except SystemExit as stop:
            if stop.code:
                raise


@pytest.fixture(autouse=True, scope="module")
def _no_curves():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distilling, "draw_curves", no_curves)
        yield


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with teachers of random weights, all of which matter, and the recipe."""
    folder = tmp_path_factory.mktemp("processes")
    save_random(folder / "teacher", learned_positions=True)
    save_random(folder / "uniform", **DUO)
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder


@pytest.fixture(scope="module")
def alone(place):
    """One process runs each method."""
    for method in METHODS:
        distil_alone(place, method, place / method)
    return place


@pytest.fixture(scope="module")
def together(place):
    """Two processes run each method in several ways."""
    commands = []
    for method, way in RUNS:
        out = place / f"{method}-{way}"
        settings = f"{METHODS[method]} {WAYS[way]}".split()
        flags = [part for setting in settings for part in ("--set", setting)]
        recipe, teacher = str(place / "recipe.yaml"), str(teacher_of(place, method))
        commands.append(["distill", recipe, "--teacher", teacher, "--out", str(out), *flags])
    (place / "commands.json").write_text(json.dumps(commands))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    result = subprocess.run(
        [*torchrun, "--nproc-per-node=2", "-m", PROGRAM, str(place / "commands.json")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    (place / "stderr.txt").write_text(result.stderr)
    assert result.stdout.count("Distilled 5 iterations") == len(RUNS), "one process reports"
    return place


def teacher_of(place, method):
    return place / ("uniform" if method == "duo" else "teacher")


def distil_alone(place, method, out, *, resume=False):
    recipe, teacher = str(place / "recipe.yaml"), teacher_of(place, method)
    options = {"overrides": METHODS[method].split(), "resume": resume, "device": "cpu"}
    didi.distill(recipe, teacher=teacher, out=out, **options)


def check_same(ours: Path, theirs: Path) -> None:
    """Compare logs and weights.

    Float32 sums in another order differ by some 1e-7 of their size, measured: 2e-7 in the log. Adam
    divides by the size of the gradient, so a weight whose gradient is rounding noise may differ by
    a part of the learning rate: 1e-4 is a tenth of one step.
    """
    one, another = entries(ours), entries(theirs)
    assert [entry["step"] for entry in one] == [entry["step"] for entry in another]
    for a, b in zip(one, another, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    files = ["model.safetensors", "discriminator.safetensors"]
    assert (ours / files[1]).exists() == (theirs / files[1]).exists()
    for file in [name for name in files if (theirs / name).exists()]:
        a, b = load_file(ours / file), load_file(theirs / file)
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "way"), RUNS, ids=lambda value: value)
def test_two_processes_distil_as_one(alone, together, method, way):
    check_same(together / f"{method}-{way}", alone / method)


@pytest.mark.slow
def test_the_students_learn_and_their_texts_differ(alone):
    """What is compared above moves: a run that did nothing would equal another."""
    for method in METHODS:
        teacher = load_file(teacher_of(alone, method) / "model.safetensors")
        student = load_file(alone / method / "model.safetensors")
        same = [n for n in teacher if student[n].shape == teacher[n].shape]  # codes are new rows
        assert max(float((student[n] - teacher[n]).abs().max()) for n in same) > 1e-3
        learning = [e for e in entries(alone / method) if e.get("lr", 0) > 0]
        waits = method not in ("sdtt", "mixture", "duo")
        assert len(learning) == 5 - waits
        assert len({e["loss"] for e in learning}) == len(learning)
        assert not waits or len({e["path_entropy"] for e in learning}) == len(learning)


@pytest.mark.slow
def test_nobody_is_warned(together):
    """A warning of torch is about our code, and nothing that its reader can mend."""
    lines = (together / "stderr.txt").read_text().splitlines()
    assert [line for line in lines if "UserWarning" in line] == []


@pytest.mark.slow
def test_two_processes_draw_the_bank_of_one(alone, together):
    """Two shards, one drawn by each."""
    folders = [alone / "batch" / "bank", together / "batch-ddp" / "bank"]
    for name in ("rows-00000.npy", "rows-00001.npy"):
        assert np.array_equal(*(np.load(folder / name) for folder in folders))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["batch", "matching", "sdtt", "duo"])
def test_sharded_checkpoints_resume_in_one_process(alone, together, method):
    """As if killed after step 3: what both processes wrote, one takes up."""
    out = together / f"{method}-fsdp-parts-sharded"
    assert len(list((out / "checkpoints" / "step-00000003").glob("state-*"))) == 2
    (out / "checkpoints" / "step-00000005").rename(out / "set-aside")
    (out / "model.safetensors").unlink()
    (out / "config.json").unlink()
    distil_alone(alone, method, out, resume=True)
    check_same(out, alone / method)


if __name__ == "__main__":
    run_commands(json.loads(Path(sys.argv[1]).read_text()))
