"""The same maths on a GPU: run there with `pytest -m gpu`."""

import json
import shutil

import pytest
import torch

import didi_instruct as didi
from didi_instruct.api.pretrain import pretrain
from didi_instruct.sampling.draw import uniforms

pytestmark = pytest.mark.gpu


def curve(folder):
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return torch.tensor([line["loss"] for line in lines if "loss" in line])


@pytest.mark.parametrize("kind", ["mdlm", "duo", "ar"])
def test_float32_on_the_gpu_has_the_loss_curve_of_the_cpu(recipe, tmp_path, kind):
    config = recipe(kind, precision="fp32", compile="off")
    for device in ("cpu", "cuda"):
        pretrain(config, out=tmp_path / device, device=device)
    torch.testing.assert_close(curve(tmp_path / "cuda"), curve(tmp_path / "cpu"), atol=2e-4, rtol=0)


@pytest.mark.parametrize("kind", ["mdlm", "duo", "ar"])
def test_bf16_and_compile_keep_the_loss_curve(recipe, tmp_path, kind):
    """Within bf16 noise: 2% of the loss at every step."""
    pretrain(recipe(kind, precision="fp32", compile="off", steps=20), out=tmp_path / "plain")
    pretrain(recipe(kind, precision="bf16", compile="on", steps=20), out=tmp_path / "fast")
    fast, plain = curve(tmp_path / "fast"), curve(tmp_path / "plain")
    torch.testing.assert_close(fast, plain, atol=0, rtol=0.02)
    model = didi.load(tmp_path / "fast")
    assert model.device.type == "cuda"
    if kind == "mdlm":
        assert model.sample(num=3, steps=4).shape == (3, 32)


def test_a_gpu_run_resumes_where_it_was(recipe, tmp_path):
    """Within float32 noise: the GPU adds in another order from run to run."""
    config = recipe(precision="fp32", compile="off")
    pretrain(config, out=tmp_path / "whole")
    pretrain(config, out=tmp_path / "parts")
    for leftover in ("checkpoints/step-00000006", "model.safetensors", "config.json"):
        path = tmp_path / "parts" / leftover
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    pretrain(config, out=tmp_path / "parts", resume=True)
    torch.testing.assert_close(
        curve(tmp_path / "parts"), curve(tmp_path / "whole"), atol=1e-4, rtol=0
    )


def test_noise_is_the_same_on_every_device():
    a = uniforms(3, torch.arange(5), (2,), 100)
    b = uniforms(3, torch.arange(5, device="cuda"), (2,), 100)
    assert torch.equal(a, b.cpu())
