"""The memory of a run with adapters: told before it starts, and held against the device."""

import pytest
from tests.hub.test_memory import of_shape, peak
from tests.models.causal_folders import BIDIRECTIONAL
from typer.testing import CliRunner

import didi_instruct as didi
from didi_instruct.adapters.lora import adapt
from didi_instruct.cli.main import app
from didi_instruct.config.recipes import recipe_names
from didi_instruct.config.train import LoraConfig
from didi_instruct.distill import plan
from didi_instruct.errors import UserError
from didi_instruct.hub import memory, run_budget

RECIPES = [name for name in recipe_names() if name.startswith("llada-")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llada")
    BIDIRECTIONAL["llada"](path, max_sequence_length=512)
    return path


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_dry_run_tells_the_memory_and_writes_nothing(recipe, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = ["distill", recipe, "--teacher", str(folder), "--dry-run", "--device", "cpu"]
    result = CliRunner().invoke(app, given, catch_exceptions=False)
    assert result.exit_code == 0
    assert "adapters of rank 32 on 14 layers" in result.output
    assert "4 texts of 512 tokens in a pass" in result.output
    assert "Nothing was started." in result.output
    assert not list(tmp_path.iterdir())


def test_parts_add_up_and_follow_the_settings(folder):
    """Twice the rank is twice the adapters; twice the texts twice the checkpoints."""
    one = plan("llada-didi", teacher=folder, device="cpu")[1]
    rank = plan("llada-didi", teacher=folder, device="cpu", overrides=["lora.rank=64"])[1]
    texts = plan("llada-didi", teacher=folder, device="cpu", overrides=["train.micro_batch=8"])[1]
    assert rank.parts["adapters"] == 2 * one.parts["adapters"] == 2 * one.numbers * 36
    assert texts.parts["checkpoints"] == 2 * one.parts["checkpoints"]
    learning = one.parts["checkpoints"] + max(one.parts["block"], one.parts["logits"])
    kept = one.parts["base"] + one.parts["adapters"] + one.parts["discriminator_head"]
    assert one.parts["total"] == kept + max(learning, one.parts["drawing"])


def test_a_device_that_is_too_small_is_refused_with_what_would_fit(folder, monkeypatch, tmp_path):
    needed = plan("llada-didi", teacher=folder, device="cpu", overrides=["train.micro_batch=16"])[1]
    monkeypatch.setattr(run_budget, "_memory_of", lambda device: needed.parts["total"] - 1)
    budget = plan("llada-didi", teacher=folder, device="cpu", overrides=["train.micro_batch=16"])[1]
    assert not budget.enough
    assert budget.fits.startswith("train.micro_batch=8 (")
    with pytest.raises(UserError, match="train.micro_batch=8 .* would fit") as refused:
        budget.check()
    assert "\n" not in str(refused.value)
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "w1 w2"}\n')
    source = f"prompts.source={prompts}"
    monkeypatch.setattr(run_budget, "_memory_of", lambda device: 1)
    with pytest.raises(UserError, match="does not help"):
        didi.distill(
            "llada-didi", teacher=folder, out=tmp_path / "r", overrides=[source], device="cpu"
        )
    assert not (tmp_path / "r").exists()


def test_recipes_refuse_to_start_without_prompts(folder, tmp_path):
    with pytest.raises(UserError, match="name prompts with prompts.source"):
        didi.distill("llada-didi", teacher=folder, out=tmp_path / "r", device="cpu")


@pytest.mark.parametrize(
    ("width", "inner", "layers", "batch"),
    [(256, 768, 6, 2), (256, 768, 2, 2), (512, 1536, 2, 2), (512, 2048, 4, 4)],
)
def test_the_peak_of_a_roles_pass_is_within_a_tenth_of_its_budget(width, inner, layers, batch):
    """Forward and backward through adapters on weights in 16 bits, blocks computed anew."""
    network, shape, text = of_shape(width, inner, 100, layers, batch=batch)
    role = adapt(network, LoraConfig(rank=2)).requires_grad_(True).eval()
    x = network.embed(text)

    def run():
        role.zero_grad(set_to_none=True)
        role.trunk(x).sum().backward()

    parts = memory.with_adapters(shape, batch=batch, length=64, rank=2)
    assert peak(run) == pytest.approx(parts["checkpoints"] + parts["block"], rel=0.1)
