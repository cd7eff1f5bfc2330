"""Adapters in folders: what peft makes of them, what opens them, and what is refused."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tests.models.causal_folders import BIDIRECTIONAL

import didi_instruct as didi
from didi_instruct.adapters.files import save_adapters
from didi_instruct.adapters.lora import adapt
from didi_instruct.config.train import LoraConfig
from didi_instruct.errors import UserError
from didi_instruct.hub.export import convert
from didi_instruct.hub.info import describe_source
from didi_instruct.hub.sources import find_source
from didi_instruct.models.discriminator import Discriminator
from didi_instruct.models.masked_lm import load_masked_lm

TOKENS = torch.tensor([[3, 4, 16, 6, 7], [16, 5, 16, 16, 8]])
LORA = LoraConfig(rank=3, alpha=4.5, targets=("q_proj", "down_proj"))


@pytest.fixture(params=BIDIRECTIONAL)
def base(request, tmp_path):
    folder = tmp_path / "base"
    folder.mkdir()
    BIDIRECTIONAL[request.param](folder)
    return folder


def randomised(network, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return network.eval()


def saved(folder, base, *, masks=0):
    """A random student and discriminator, written and as they were."""
    teacher = load_masked_lm(base)
    of = {"source": str(base), "fingerprint": find_source(base).fingerprint()}
    student = adapt(teacher.model, LORA, **of)
    if masks:
        student = student.with_masks(torch.zeros(masks, student.config.hidden))
    student = randomised(student, 1)
    critic = randomised(Discriminator.from_network(adapt(teacher.model, LORA)), 2)
    pair = critic.state_dict(), critic.config
    save_adapters(folder, student, student.state_dict(), {"of": "a test"}, pair)
    return student, critic


def test_what_is_saved_opens_as_it_was(base, tmp_path):
    student, critic = saved(tmp_path / "out", base)
    found = didi.load(tmp_path / "out")
    torch.testing.assert_close(found.network(TOKENS), student(TOKENS), atol=1e-5, rtol=0)
    torch.testing.assert_close(found.discriminator(TOKENS), critic(TOKENS), atol=1e-5, rtol=1e-5)
    assert found.config == student.config
    assert found.tokenizer.hash == didi.load(base).tokenizer.hash
    texts = found.generate(num=2, steps=4, length=6, seed=0)
    assert len(texts) == 2
    guided = found.sample(num=2, steps=4, length=6, seed=0, sampler="rgas")
    assert guided.shape == (2, 6)
    convert(tmp_path / "out", tmp_path / "merged", to="didi")
    merged = didi.load(tmp_path / "merged")
    assert torch.equal(merged.network(TOKENS), found.network(TOKENS))


def test_info_tells_base_and_adapters(base, tmp_path):
    student, _ = saved(tmp_path / "out", base)
    facts = describe_source(str(tmp_path / "out"))
    own = sum(p.numel() for p in student.parameters())
    assert (facts["base"], facts["rank"], facts["trainable_parameters"]) == (str(base), 3, own)
    assert facts["parameters"] == describe_source(str(base))["parameters"]


def test_codes_of_a_mixture_are_kept_beside_the_adapters(base, tmp_path):
    student, _ = saved(tmp_path / "out", base, masks=2)
    found = didi.load(tmp_path / "out")
    tokens = TOKENS.where(TOKENS != 16, student.config.num_tokens + 1)
    torch.testing.assert_close(found.network(tokens), student(tokens), atol=1e-5, rtol=0)


@pytest.mark.parametrize("role", ["student", "discriminator"])
def test_peft_reads_a_role_and_computes_the_same(base, tmp_path, role):
    peft = pytest.importorskip("peft", reason="pip install didi-instruct[adapters]")
    student, critic = saved(tmp_path / "out", base)
    folder = tmp_path / "out" / ("" if role == "student" else "discriminator")
    network = load_masked_lm(base).model
    theirs = peft.PeftModel.from_pretrained(network.network, folder)
    assert isinstance(theirs.get_base_model(), transformers.PreTrainedModel)
    if role == "student":
        logits = theirs(TOKENS.clamp(max=14)).logits
        ours = student._network.network(TOKENS.clamp(max=14)).logits
    else:
        logits = theirs.get_base_model().model(TOKENS.clamp(max=14))[0]
        ours = critic.trunk._network.network.model(TOKENS.clamp(max=14))[0]
    torch.testing.assert_close(logits, ours, atol=1e-6, rtol=0)
    theirs.save_pretrained(tmp_path / "theirs")
    one = load_file(tmp_path / "theirs/adapter_model.safetensors")
    other = load_file(folder / "adapter_model.safetensors")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_adapters_of_another_base_are_refused(base, tmp_path):
    saved(tmp_path / "out", base)
    file = base / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rms_norm_eps": 1e-5}))
    with pytest.raises(UserError, match="adapters of another base") as refused:
        didi.load(tmp_path / "out")
    assert "\n" not in str(refused.value)


def test_a_base_that_moved_is_asked_for(base, tmp_path):
    """And found once adapter_config.json says where it is, although that file was listed."""
    saved(tmp_path / "out", base)
    moved = base.rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="base_model_name_or_path"):
        didi.load(tmp_path / "out")
    settings = tmp_path / "out/adapter_config.json"
    text = settings.read_text().replace(str(base), str(moved))
    settings.write_text(text)
    didi.load(tmp_path / "out")


def test_damaged_and_foreign_tensors_are_refused(base, tmp_path):
    saved(tmp_path / "out", base)
    path = tmp_path / "out/adapter_model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(UserError, match="truncated"):
        didi.load(tmp_path / "out")
    path.write_bytes(whole)
    settings = tmp_path / "out/adapter_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"r": 2}))
    with pytest.raises(UserError, match="fit no layer of its base"):
        didi.load(tmp_path / "out")


def test_a_folder_holds_no_weights_of_the_base(base, tmp_path):
    student, _ = saved(tmp_path / "out", base)
    names = {p.relative_to(tmp_path / "out") for p in (tmp_path / "out").rglob("*") if p.is_file()}
    own = {"config.json", "adapter_config.json", "adapter_model.safetensors"}
    inner = {"adapter_config.json", "adapter_model.safetensors", "other.safetensors"}
    assert names == {Path(n) for n in own} | {Path("discriminator") / n for n in inner}
    kept = load_file(tmp_path / "out/adapter_model.safetensors")
    assert sum(t.numel() for t in kept.values()) == sum(p.numel() for p in student.parameters())
