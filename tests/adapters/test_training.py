"""Distillation and fine-tuning with adapters: every method, from the command to a folder."""

import json

import pytest
import torch
from tests.distill.small import Heard
from tests.distillation.small import make_task, networks_of, run, weights
from tests.models.causal_folders import BIDIRECTIONAL
from tests.runs import STATE, entries, same_tensors

import didi_instruct as didi
from didi_instruct.adapters.lora import shared
from didi_instruct.distillation.methods import METHODS
from didi_instruct.errors import UserError
from didi_instruct.models.discriminator import Discriminator
from didi_instruct.models.masked_lm import load_masked_lm

LORA = {"rank": 2}
CHANGES = {"discriminator": {"trainable_blocks": None}, "mixture": {"codes": 2}, "lora": LORA}
TOKENS = torch.tensor([[3, 4, 16, 6, 7], [16, 5, 16, 16, 8]])


@pytest.mark.parametrize("family", BIDIRECTIONAL)
@pytest.mark.parametrize("method", [method for method in METHODS if method != "duo"])
def test_every_method_moves_adapters_alone(method, family, tmp_path):
    """Those of student and second network; the one base stays bit by bit."""
    BIDIRECTIONAL[family](tmp_path)
    base = load_masked_lm(tmp_path).model
    kept = {name: t.clone() for name, t in base.state_dict().items()}
    before = base(TOKENS)
    student = shared(base)
    task = make_task(method, CHANGES, teacher=base, student=student)
    start = {name: weights(network) for name, network in networks_of(task).items()}
    run(task, 3)
    for name, network in networks_of(task).items():
        own = dict(network.named_parameters())
        assert sum(p.numel() for p in own.values()) < 0.8 * sum(
            p.numel() for p in base.parameters()
        )
        assert any(not torch.equal(own[n], v) for n, v in start[name].items() if n in own), name
    assert all(torch.equal(t, kept[name]) for name, t in base.state_dict().items())
    assert torch.equal(base(TOKENS), before)
    names = {name.split("/")[0] for name in task.tensors()}
    assert names >= {"student"}
    assert not any("embed_tokens" in name for name in task.tensors())


def test_a_method_takes_the_steps_of_merged_weights(tmp_path):
    """Losses of the first iteration are those of networks with weights of their own."""
    BIDIRECTIONAL["llada"](tmp_path)
    base = load_masked_lm(tmp_path).model
    task = make_task("token-matching", CHANGES, teacher=base, student=shared(base))
    student = networks_of(task)["student"]
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.add_(0.05)
    whole, one = student.merged(), run(task, 1)[0]
    changes = CHANGES | {"lora": {"rank": 0}}
    teacher = load_masked_lm(tmp_path).model
    other = run(make_task("token-matching", changes, teacher=teacher, student=whole), 1)[0]
    for name in ("loss", "aux_loss", "path_entropy", "entropy"):
        torch.testing.assert_close(one[name], other[name], atol=1e-4, rtol=1e-4)


def recipe(method, **changes):
    values = {
        "method": method,
        "lora": {"rank": 2, "targets": ["q_proj", "up_proj"]},
        "reference": {"source": "online", "steps": 2},
        "discriminator": {"lr": 1e-2, "trainable_blocks": None, "chance": 0.0, "saturation": 1.0},
        "token_matching": {"warmup": 0, "aux_lr": 1e-2, "aux_steps": 1, "budgets": [2, 4]},
        "mixture": {"codes": 2, "budgets": [2]},
        "sdtt": {"steps": 16, "iterations": 2},
        "optim": {"lr": 1e-2},
        "train": {"steps": 4, "batch_size": 4, "ema": 0.9, "log_every": 1, "save_every": 2},
        "watch": {"budgets": [], "samples": 16},
    }
    return values | changes


@pytest.fixture(scope="module")
def llada(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llada")
    BIDIRECTIONAL["llada"](folder)
    return folder


@pytest.mark.parametrize("method", ["didi", "mixture"])
def test_a_run_and_its_checkpoints_open_like_any_model(method, llada, tmp_path):
    didi.distill(recipe(method), teacher=llada, out=tmp_path / "whole", device="cpu")
    model = didi.load(tmp_path / "whole")
    assert (model.discriminator is not None) == (method == "didi")
    assert model.sample(num=2, steps=2, length=6, seed=0).shape == (2, 6)
    saved = didi.load(tmp_path / "whole/checkpoints/step-00000004")
    assert torch.equal(saved.network(TOKENS), model.network(TOKENS))
    config = json.loads((tmp_path / "whole/config.json").read_text())
    assert config["provenance"]["recipe"]["lora"]["rank"] == 2
    assert not (tmp_path / "whole/model.safetensors").exists()


def test_a_stopped_run_goes_on_as_if_it_had_not(llada, tmp_path):
    how = {"teacher": llada, "device": "cpu"}
    didi.distill(recipe("didi"), out=tmp_path / "whole", **how)
    stopped = didi.distill(recipe("didi"), out=tmp_path / "parts", reporter=Heard(2), **how)
    assert not stopped.finished
    didi.distill(recipe("didi"), out=tmp_path / "parts", resume=True, **how)
    assert entries(tmp_path / "parts") == entries(tmp_path / "whole")
    folders = [tmp_path / name / "checkpoints/step-00000004" for name in ("whole", "parts")]
    for file in (STATE, "adapter_model.safetensors", "discriminator/other.safetensors"):
        assert same_tensors(*(folder / file for folder in folders)), file
    again = didi.distill(recipe("didi"), out=tmp_path / "parts", resume=True, **how)
    assert not again.new


def test_finetuned_adapters_are_a_teacher_like_any(llada, tmp_path):
    """Fine-tuned with an adapter, distilled with adapters on top, and another discriminator."""
    source = tmp_path / "q.jsonl"
    source.write_text('{"prompt": "w1 w2", "answer": " w3 w4"}\n' * 8)
    settings = {
        "task": "answers", "data": {"source": str(source), "valid": 0}, "lora": {"rank": 2},
        "optim": {"lr": 1e-2}, "train": {"steps": 4, "batch_size": 4, "ema": 0.5},
    }  # fmt: skip
    tuned = tmp_path / "tuned"
    didi.finetune(settings, model=llada, out=tuned, device="cpu")
    model, base = didi.load(tuned), didi.load(llada)
    assert (tuned / "adapter_model.safetensors").exists()
    assert not torch.equal(model.network(TOKENS), base.network(TOKENS))
    out = tmp_path / "student"
    didi.distill(recipe("didi"), teacher=tuned, out=out, device="cpu")
    found = didi.load(out)
    assert isinstance(found.discriminator, Discriminator)
    assert found.generate(num=1, steps=2, length=4, seed=0)


def test_what_adapters_cannot_do_is_refused(llada, tmp_path):
    how = {"teacher": llada, "out": tmp_path / "run", "device": "cpu"}
    with pytest.raises(UserError, match="lora.targets names out_proj"):
        didi.distill(recipe("didi", lora={"rank": 2, "targets": ["q_proj", "out_proj"]}), **how)
    with pytest.raises(UserError, match="leave one of them out"):
        didi.distill(recipe("didi", student=str(llada)), **how)
    with pytest.raises(UserError, match="which takes all weights"):
        didi.finetune({"bidirectional": True, "lora": LORA}, model=llada, out=tmp_path / "f")
