"""Where tensors of a distillation are, on a GPU that is not there: nothing mixes, nothing waits."""

import copy
from contextlib import nullcontext

import pytest
import torch
from tests.distill.small import recipe
from tests.pretend_gpu import GPU, on_gpu, pretended
from tests.random_models import save_random
from tests.runs import distilling as api

from didi_instruct.training import run_dir
from didi_instruct.training.distributed import World
from didi_instruct.transfer import Later, sent

from .small import STATE, Documents, Stream, make_task, windowed_network

PLAIN = {"precision": "fp32", "compile": "off"}
TEXTS = ["full", "prompts", "windows", "prompts in windows"]
LAST = {"rollout_steps": 4, "score_steps": "last"}
COMPLETED = {"token_matching": {"contexts": 3, "completion": 0.5}}
DIDI = {
    "base": {},
    "state": {"didi": STATE},
    "tau": {"didi": {"grouping": "tau"}},
    "whole paths": {"didi": {"score_decomposition": False}},
    "streams": {"order": "streams", "didi": LAST},
    "micro batches": {"train": {"micro_batch": 4}},
    "uncoupled times": {"didi": {"coupled_time": False}},
    "all blocks": {"discriminator": {"trainable_blocks": None}},
}


@pytest.fixture
def gpu(monkeypatch):
    with pretended(monkeypatch) as mode:
        yield mode


def task_of(method, changes, texts="full", **options):
    """A task of texts that are of full length, continue prompts, have windows of their own."""
    changes = changes | {"train": {"log_every": 2, **PLAIN, **changes.get("train", {})}}
    if "windows" in texts:
        options |= {"teacher": windowed_network(0), "student": windowed_network(1)}
    if "prompts" in texts:
        changes |= {"prompt": 3, "data": {"source": "stream"}}
        options |= {"data": Documents() if "windows" in texts else Stream()}
    return make_task(method, changes, world=World(GPU), **options)


def iterate(gpu, task):
    """Do three iterations; what the second and the third waited for."""
    waits = []
    for step in range(3):
        gpu.waits.clear()
        for name, number in task.step(step).items():
            assert on_gpu(number), name
        waits.append(list(gpu.waits))
    assert gpu.mixed == []
    return waits[1:]


# The pretended GPU itself


def test_mixed_operations_are_noted(gpu):
    here, there = torch.zeros(3), torch.zeros(3, device=GPU)
    number = torch.zeros(())
    faults = [
        lambda: here + there,
        lambda: torch.cat([here, there]),
        lambda: torch.where(there > 0, here, there),
        lambda: here[there.long()],
        lambda: here * there.sum(),
        lambda: torch.stack([number, there.sum()]),
        lambda: here.__setitem__(slice(2), there[:2]),
    ]
    for done, fault in enumerate(faults, start=1):
        fault()
        assert len(gpu.mixed) == done
    for fine in (there + number, there.to("cpu") + here, there[here.long()], here.to(GPU) + there):
        assert fine.shape == (3,)
    assert len(gpu.mixed) == len(faults)
    assert "test_devices.py" in gpu.mixed[0]


def test_waits_are_noted(gpu):
    here, there = torch.zeros(3), torch.zeros(3, device=GPU)
    waits = [
        lambda: there.sum().item(),
        lambda: float(there[0]),
        lambda: bool(there.any()),
        lambda: there.tolist(),
        lambda: there.nonzero(),
        lambda: there[there > 0],
        lambda: there[here.long()],
        lambda: here.to(GPU),
        lambda: here.to(GPU, non_blocking=True),
        lambda: there.cpu(),
        lambda: there.copy_(here),
        lambda: torch.tensor([1], device=GPU),
        lambda: there.repeat_interleave(there.long()),
        lambda: Later(there.sum()).read(),
    ]
    for done, wait in enumerate(waits, start=1):
        wait()
        assert len(gpu.waits) == done, gpu.waits
    assert on_gpu(sent(here, GPU))
    assert on_gpu(there.new_zeros(2) + torch.arange(2, device=GPU))
    here.tolist(), here[here > 0], Later(there.sum())
    assert len(gpu.waits) == len(waits)


def test_weights_gradients_and_copies_are_where_their_network_is(gpu):
    layer = torch.nn.Linear(3, 1)
    assert not on_gpu(layer.weight)
    layer.to(GPU)(torch.ones(2, 3, device=GPU)).sum().backward()
    assert on_gpu(layer.weight.grad)
    assert copy.deepcopy(layer).weight.device == GPU
    assert gpu.mixed == []
    layer(torch.ones(2, 3))
    assert len(gpu.mixed) == 1


# Iterations


@pytest.mark.parametrize("changes", DIDI.values(), ids=DIDI)
@pytest.mark.parametrize("texts", TEXTS)
def test_an_iteration_of_didi_waits_once(gpu, changes, texts):
    """For the discriminator's accuracy, logged or not, if texts to take prompts of are here.

    The variety at the start is tracked in all of them, and waits for nothing.
    """
    references = {"prompts": Stream().rows, "prompts in windows": Documents().rows}.get(texts)
    for waits in iterate(gpu, task_of("didi", changes, texts, references=references)):
        assert len(waits) == 1, waits
        assert "transfer.py" in waits[0]


@pytest.mark.parametrize("changes", [{}, COMPLETED], ids=["base", "completed"])
@pytest.mark.parametrize("texts", TEXTS)
def test_an_iteration_of_token_matching_never_waits(gpu, changes, texts):
    """Whatever decides is planned on the host."""
    assert iterate(gpu, task_of("token-matching", changes, texts)) == [[], []]


@pytest.mark.parametrize("texts", TEXTS)
@pytest.mark.parametrize("method", ["sdtt", "dimo", "mixture", "duo"])
def test_no_method_mixes_anything(gpu, method, texts):
    iterate(gpu, task_of(method, {}, "full" if method == "duo" else texts))


# A whole run


@pytest.mark.parametrize("method", ["didi", "token-matching"])
def test_a_run_with_bank_evaluations_and_checkpoints_mixes_nothing(
    gpu, monkeypatch, tmp_path, method
):
    monkeypatch.setattr(api, "draw_curves", lambda *_, **__: False)
    monkeypatch.setattr(run_dir, "open_world", lambda _: nullcontext(World(GPU)))
    train = {**PLAIN, "steps": 3, "save_every": 2, "eval_every": 2}
    config = recipe(method, reference={"source": "bank"}, train=train)
    teacher = save_random(tmp_path / "teacher")
    assert api.distill(config, teacher=teacher, out=tmp_path / "run").finished
    assert gpu.mixed == []
