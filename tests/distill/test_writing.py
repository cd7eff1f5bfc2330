"""What a distillation run writes: a student, its provenance, its log; and all that on a GPU."""

import hashlib
import json
import sys
from dataclasses import asdict

import numpy as np
import pytest
from tests.random_models import save_random
from tests.runs import SPEEDS, entries, same_tensors

import didi_instruct as didi
from didi_instruct.config.distill import DistillConfig
from didi_instruct.config.schema import parse, read_yaml
from didi_instruct.data.oracle import OracleLanguage
from didi_instruct.evaluation.quick_eval import oracle_judge, path_gaps
from didi_instruct.evaluation.stats import mean_and_error
from didi_instruct.seeding import mix

from .small import METHODS, recipe

# What a run writes


@pytest.fixture(scope="module", params=METHODS)
def finished(request, models, tmp_path_factory):
    """A whole run with everything on: data, bank, warm-up, curves."""
    config = recipe(
        request.param,
        reference={"source": "bank"},
        data={"source": "oracle"},
        discriminator={"warmup": 2},
        token_matching={"warmup": 2, "anchor": 0.1},
        train={"eval_sequences": 32, "eval_every": 3},
    )
    out = tmp_path_factory.mktemp("finished") / "run"
    return config, didi.distill(config, teacher=models / "teacher", out=out, device="cpu")


def test_a_run_writes_a_student_that_loads(finished):
    config, result = finished
    out = result.folder
    names = {"model.safetensors", "config.json", "tokenizer.json", "recipe.yaml", "log.jsonl"}
    assert names <= {p.name for p in out.iterdir()}
    assert result.finished
    assert parse(DistillConfig, read_yaml(out / "recipe.yaml"), where="recipe") == config
    for folder in (out, out / "checkpoints" / "step-00000006"):
        model = didi.load(folder, device="cpu")
        assert (model.discriminator is not None) == (config.method == "didi")
        assert model.tokenizer.hash == OracleLanguage.default().tokenizer.hash
        tokens = model.sample(num=3, steps=2)
        assert tokens.shape == (3, 32)
        assert 0 <= int(tokens.min()) <= int(tokens.max()) < 64
        assert len(model.generate(num=1, steps=2)[0].split()) == 32
    assert same_tensors(out / "model.safetensors", folder / "model.safetensors")


def test_provenance_tells_recipe_teacher_and_quick_evaluation(finished, models):
    config, result = finished
    told = didi.load(result.folder, device="cpu").provenance
    digest = hashlib.sha256((models / "teacher" / "model.safetensors").read_bytes()).hexdigest()
    assert told["teacher"] == digest
    assert told["recipe"] == json.loads(json.dumps(asdict(config)))
    assert told["step"] == 6
    found = {"teacher": result.teacher, "student": result.student, "exact": True}
    assert told["quick_evaluation"] == found
    last = entries(result.folder)[-1]
    assert last == {"step": 6, **result.student}
    assert entries(result.folder)[0] == {"step": 0, **result.teacher}
    wanted = {f"{n}_2" for n in ("path_kl", "path_entropy", "unique_4gram")} | {"path_kl_2_se"}
    assert wanted <= result.teacher.keys()
    assert wanted | {"path_kl_2_raw", "valid_nats_per_token"} <= result.student.keys()


def test_the_quick_evaluation_is_of_the_student_that_was_written(finished, models):
    """Its samples, drawn again from the files, have its path KL under the oracle."""
    config, result = finished
    judge, seed = oracle_judge(OracleLanguage.default()), mix(config.train.seed, "quick")
    for folder, told in [(result.folder, result.student), (models / "teacher", result.teacher)]:
        model = didi.load(folder, device="cpu")
        samples = model.draw(16, steps=2, seed=seed, sampler="ancestral")
        mean, error = mean_and_error(path_gaps(samples, judge))
        # Memory-mapped weights are aligned otherwise, so the last bit of a product may differ.
        assert told["path_kl_2"] == pytest.approx(mean, rel=1e-4)
        assert told["path_kl_2_se"] == pytest.approx(error, rel=1e-4)


def test_evaluations_come_when_they_are_asked_for(finished):
    """Before the first step, every third one, and at the end once."""
    evaluated = [e["step"] for e in entries(finished[1].folder) if "path_kl_2" in e]
    assert evaluated == [0, 3, 6]
    assert [e["step"] for e in entries(finished[1].folder) if "lr" in e] == [1, 2, 3, 4, 5, 6]


COMMON = {"loss", "grad_norm", "entropy", "path_entropy", "unique_4gram", "kl", "kl_start", "lr"}
NUMBERS = {
    "didi": COMMON
    | {"policy_loss", "reward_student", "reward_reference", "disc_loss", "disc_accuracy"}
    | {"disc_sharpness"}
    | {"disc_grad_norm", "advantage_std", "advantage_max", "clip_fraction"}
    | {"student_waits", "disc_waits"},
    "token-matching": COMMON
    | {"aux_loss", "matching_loss", "aux_kl", "ratio_clip_fraction", "aux_grad_norm"},
}


def test_the_log_holds_every_number(finished):
    config, result = finished
    lines = [json.loads(line) for line in (result.folder / "log.jsonl").read_text().splitlines()]
    for entry in (line for line in lines if line.get("lr", 0) > 0):
        assert NUMBERS[config.method] | SPEEDS | {"step"} <= entry.keys()
        assert entry["iterations_per_second"] > 0
        shares = {
            "disc_accuracy",
            "disc_sharpness",
            "clip_fraction",
            "unique_4gram",
            "ratio_clip_fraction",
        }
        assert all(0 <= entry[name] <= 1 for name in shares & entry.keys())
        assert 0 < entry["path_entropy"] < np.log(64)
    steps = [e for e in entries(result.folder) if "lr" in e]
    # Two iterations of warm-up, then a straight line from 1e-3 to 0 in four.
    assert [e["lr"] for e in steps] == pytest.approx([0, 0, 1e-3, 7.5e-4, 5e-4, 2.5e-4])
    assert ["grad_norm" in e for e in steps] == [False, False, True, True, True, True]
    if config.method == "didi":
        assert [e["student_waits"] for e in steps] == [1, 1, 0, 0, 0, 0]


def test_the_logged_loss_is_the_sum_of_its_terms(finished):
    config, result = finished
    steps = [e for e in entries(result.folder) if e.get("lr", 0) > 0]
    assert len({e["loss"] for e in steps}) == 4
    for e in steps:
        if config.method == "didi":
            parts = e["policy_loss"] + 0.05 * e["kl"] - 0.0005 * e["entropy"]
        else:
            parts = e["matching_loss"] + 0.1 * e["kl"]
        assert e["loss"] == pytest.approx(parts, abs=1e-6)


def test_curves_are_drawn_where_matplotlib_is(finished):
    pytest.importorskip("matplotlib")
    assert finished[1].curves == finished[1].folder / "curves.png"
    assert finished[1].curves.read_bytes().startswith(b"\x89PNG")


def test_a_run_needs_no_matplotlib(models, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    config = recipe("token-matching", train={"steps": 1})
    result = didi.distill(config, teacher=models / "teacher", out=tmp_path / "run", device="cpu")
    assert result.finished
    assert result.curves is None
    assert not (result.folder / "curves.png").exists()


@pytest.mark.parametrize("method", METHODS)
def test_a_student_may_start_from_another_model(run, models, tmp_path, method):
    """In warm-up nobody moves it: the first checkpoint is where it started."""
    warmup = {"discriminator": {"warmup": 1}, "token_matching": {"warmup": 1}}
    train = {"steps": 2, "save_every": 1}
    run(recipe(method, student=str(models / "other"), train=train, **warmup))
    first, last = (tmp_path / "run" / "checkpoints" / f"step-0000000{n}" for n in (1, 2))
    name = "model.safetensors"
    assert same_tensors(first / name, models / "other" / name)
    assert not same_tensors(first / name, models / "teacher" / name)
    assert not same_tensors(first / name, last / name)
    assert entries(tmp_path / "run")[0]["step"] == 1, "the teacher is not where it began"


# Whole runs on a GPU

BANK, ORACLE = {"source": "bank"}, {"source": "oracle"}
STREAMS = {"rollout_steps": 4, "score_steps": "last"}
ON_GPU = {
    "bank": ("didi", {"reference": BANK, "data": ORACLE}),
    "graphs": ("didi", {"train": {"compile": "graphs", "precision": "fp32"}}),
    "prompts": ("didi", {"prompt": 8, "data": ORACLE, "didi": {"group_size": 2}}),
    "streams": ("didi", {"order": "streams", "didi": STREAMS}),
    "windows": ("didi", {}),
    "matching": ("token-matching", {"token_matching": {"contexts": 2, "completion": 0.5}}),
    "matching with prompts": ("token-matching", {"prompt": 8, "data": ORACLE}),
    "matching windows": ("token-matching", {}),
    "sdtt": ("sdtt", {"reference": BANK, "sdtt": {"steps": 16, "iterations": 3}}),
    "dimo": ("dimo", {"dimo": {"warmup": 0}, "watch": {"budgets": []}}),
    "mixture": ("mixture", {"mixture": {"codes": 2}}),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_GPU)
def test_a_whole_run_on_a_gpu_is_that_on_a_cpu(run, tmp_path, name):
    """Evaluations, bank and checkpoints included: the log is the same, but for rounding."""
    method, changes = ON_GPU[name]
    train = {"precision": "fp32", "compile": "off", "steps": 3} | changes.get("train", {})
    config = recipe(method, **(changes | {"train": train, "sdtt": changes.get("sdtt", {})}))
    teacher = "teacher"
    if "windows" in name:
        teacher = save_random(tmp_path / "ends", end_id=0, lengths=(0,) * 9 + (3,) * 24)
    logs = []
    for device in ("cpu", "cuda"):
        run(config, device, teacher=teacher, device=device)
        logs.append(entries(tmp_path / device))
    assert len(logs[0]) == len(logs[1])
    for ours, theirs in zip(*logs, strict=True):
        # A draw at a border may fall on the other side, and its text goes another way then.
        assert ours.keys() == theirs.keys()
        assert ours.get("loss", 0.0) == pytest.approx(theirs.get("loss", 0.0), rel=0.1, abs=0.1)
