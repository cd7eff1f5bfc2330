"""The same distillation on a GPU: plain, in bfloat16, compiled."""

import copy

import pytest
import torch
from tests.random_models import add_noise

from didi_instruct.config.distill import DistillConfig
from didi_instruct.config.model import ModelConfig, ScheduleConfig
from didi_instruct.config.schema import parse
from didi_instruct.distillation.methods import make_task
from didi_instruct.distillation.run import Teacher
from didi_instruct.models.dit import DiT
from didi_instruct.training.distributed import World

pytestmark = pytest.mark.gpu

SHAPE = {"layers": 2, "hidden": 64, "heads": 2, "cond_dim": 16, "vocab_size": 33, "length": 32}
MODEL = ModelConfig(**SHAPE, schedule=ScheduleConfig(eps=0.0))
SETTINGS = {
    "optim": {"lr": 1e-4},
    "discriminator": {"lr": 1e-4, "trainable_blocks": 1, "chance": 0.0},
    "reference": {"source": "online", "steps": 4},
    "dimo": {"warmup": 0},
    "sdtt": {"steps": 16, "iterations": 1},
    "token_matching": {"warmup": 0, "contexts": 2, "completion": 0.5, "anchor": 0.1},
}
METHODS = ["didi", "token-matching", "dimo", "sdtt"]
PLAIN = {"precision": "fp32", "compile": "off"}


def numbers(method, device, steps=3, **train):
    """What some iterations log, from the same weights and noise."""
    torch.manual_seed(0)
    network = add_noise(DiT(MODEL), 0.05)
    values = {**SETTINGS, "method": method, "train": {"batch_size": 16, "steps": steps, **train}}
    config = parse(DistillConfig, values, where="test")
    teacher = Teacher(network=network.to(device), tokenizer=None, fingerprint="")
    student, world = copy.deepcopy(network), World(torch.device(device))
    task = make_task(config, teacher, student, world)
    return [{k: float(v) for k, v in task.step(step).items()} for step in range(steps)]


@pytest.mark.parametrize("method", METHODS)
def test_a_gpu_logs_what_a_cpu_logs(method):
    """In float32 the same texts are drawn and the same losses follow, to rounding."""
    found = zip(numbers(method, "cuda", **PLAIN), numbers(method, "cpu"), strict=True)
    for ours, theirs in found:
        assert ours == pytest.approx(theirs, rel=2e-3, abs=2e-4)


@pytest.mark.parametrize(
    ("method", "compiled"),
    [("didi", "off"), ("didi", "graphs"), *((method, "on") for method in METHODS)],
)
def test_bfloat16_and_compilation_stay_close(method, compiled):
    """Rounding changes some drawn tokens, so only numbers of the whole batch are compared."""
    plain = numbers(method, "cuda", **PLAIN)
    fast = numbers(method, "cuda", precision="bf16", compile=compiled)
    for ours, theirs in zip(fast, plain, strict=True):
        assert set(ours) == set(theirs)
        name = "entropy" if method == "sdtt" else "path_entropy"
        assert ours[name] == pytest.approx(theirs[name], rel=0.1)
        assert all(torch.isfinite(torch.tensor(list(ours.values()))))


@pytest.mark.parametrize("compiled", ["on", "graphs"])
def test_compiled_passes_in_float32_draw_and_learn_as_plain_ones(compiled):
    """The same noise, so the same texts and losses but for rounding."""
    plain = numbers("didi", "cuda", steps=5, **PLAIN)
    fast = numbers("didi", "cuda", steps=5, precision="fp32", compile=compiled)
    for ours, theirs in zip(fast, plain, strict=True):
        assert ours == pytest.approx(theirs, rel=2e-2, abs=2e-3)
