"""The same maths on a GPU: run there with `pytest -m gpu`."""

import shutil

import pytest
import torch

import didi_instruct as didi
from didi_instruct.pretrain import pretrain
from didi_instruct.sampling.draw import uniforms

from .small import logged, tiny_recipe

pytestmark = pytest.mark.gpu


def assert_close(folder, other, **tolerance):
    torch.testing.assert_close(
        torch.tensor(logged(folder)), torch.tensor(logged(other)), **tolerance
    )


@pytest.mark.parametrize("kind", ["mdlm", "duo", "ar"])
def test_float32_on_the_gpu_has_the_loss_curve_of_the_cpu(tmp_path, kind):
    config = tiny_recipe(kind, precision="fp32", compile="off")
    for device in ("cpu", "cuda"):
        pretrain(config, out=tmp_path / device, device=device)
    assert_close(tmp_path / "cuda", tmp_path / "cpu", atol=2e-4, rtol=0)


@pytest.mark.parametrize("kind", ["mdlm", "duo", "ar"])
def test_bf16_and_compile_keep_the_loss_curve(tmp_path, kind):
    """Within bf16 noise: 2% of the loss at every step."""
    pretrain(tiny_recipe(kind, precision="fp32", compile="off", steps=20), out=tmp_path / "plain")
    pretrain(tiny_recipe(kind, precision="bf16", compile="on", steps=20), out=tmp_path / "fast")
    assert_close(tmp_path / "fast", tmp_path / "plain", atol=0, rtol=0.02)
    model = didi.load(tmp_path / "fast")
    assert model.device.type == "cuda"
    if kind == "mdlm":
        assert model.sample(num=3, steps=4).shape == (3, 32)


def test_a_gpu_run_resumes_where_it_was(tmp_path):
    """Within float32 noise: the GPU adds in another order from run to run."""
    config = tiny_recipe(precision="fp32", compile="off")
    pretrain(config, out=tmp_path / "whole")
    pretrain(config, out=tmp_path / "parts")
    shutil.rmtree(tmp_path / "parts" / "checkpoints" / "step-00000006")
    for leftover in ("model.safetensors", "config.json"):
        (tmp_path / "parts" / leftover).unlink()
    pretrain(config, out=tmp_path / "parts", resume=True)
    assert_close(tmp_path / "parts", tmp_path / "whole", atol=1e-4, rtol=0)


def test_noise_is_the_same_on_every_device():
    a = uniforms(3, torch.arange(5), (2,), 100)
    b = uniforms(3, torch.arange(5, device="cuda"), (2,), 100)
    assert torch.equal(a, b.cpu())
