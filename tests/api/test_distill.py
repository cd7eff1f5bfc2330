"""Distillation runs from a recipe and a teacher to a folder: what they write, refuse and resume."""

import hashlib
import json
import os
import shutil
import signal
import sys
from contextlib import nullcontext
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from tests.random_models import save_random
from tests.runs import SPEEDS, STATE, contents, entries, same_tensors

import didi_instruct as didi
from didi_instruct.api import distill as module
from didi_instruct.api import distill_parts
from didi_instruct.api.open import fingerprint
from didi_instruct.api.runs import only_run, write_recipe
from didi_instruct.config.distill import DistillConfig
from didi_instruct.config.model import ScheduleConfig
from didi_instruct.config.parse import parse, read_yaml
from didi_instruct.data.dataset import open_data
from didi_instruct.data.oracle import OracleLanguage, OracleSource
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.distillation.didi import DidiTask
from didi_instruct.distillation.token_matching import TokenMatchingTask
from didi_instruct.errors import TrainingError, UserError
from didi_instruct.evaluation.paths import path_kl
from didi_instruct.evaluation.quick import QuickTest, oracle_judge
from didi_instruct.models.checkpoint import load_model
from didi_instruct.models.foreign.writing import write_foreign
from didi_instruct.models.manifest import read_manifest
from didi_instruct.seeding import mix
from didi_instruct.training.reporting import SilentReporter
from didi_instruct.training.world import World

METHODS = ["didi", "token-matching"]
GATES = {"chance": 0.55, "saturation": 0.56}
"""Accuracies so close together that now one network waits and now the other."""


def recipe(method="didi", **changes):
    """Six iterations of eight texts in which both networks always learn; some settings changed."""
    values = {
        "method": method,
        "reference": {"source": "online", "steps": 2, "rows": 32},
        "discriminator": {"lr": 1e-3, "trainable_blocks": 1, "chance": 0.0, "saturation": 1.0},
        "token_matching": {"warmup": 0, "aux_lr": 1e-3, "aux_steps": 1, "budgets": [2, 4]},
        "optim": {"lr": 1e-3, "schedule": "linear"},
        "train": {"steps": 6, "batch_size": 8, "ema": 0.9, "log_every": 1, "save_every": 3},
        "watch": {"budgets": [2], "samples": 16, "min_entropy": 0.0},
    }
    for name, change in changes.items():
        values[name] = values.get(name, {}) | change if isinstance(change, dict) else change
    return parse(DistillConfig, values, where="test")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A teacher, and another model that could be one."""
    folder = tmp_path_factory.mktemp("models")
    save_random(folder / "teacher")
    save_random(folder / "other", seed=1)
    return folder


@pytest.fixture
def run(models, tmp_path, monkeypatch):
    """Distil the teacher into tmp_path / name; no picture, which takes longer than a run."""
    monkeypatch.setattr(module, "draw_curves", lambda *_, **__: False)

    def start(config, name="run", *, teacher="teacher", **options):
        options = {"device": "cpu"} | options
        teacher = models / teacher if isinstance(teacher, str) else teacher
        return module.distill(config, teacher=teacher, out=tmp_path / name, **options)

    return start


class Heard(SilentReporter):
    """Remembers what was said; may send a signal once a step is logged."""

    def __init__(self, stop_after=None):
        self.stop_after, self.lines = stop_after, []

    def say(self, text):
        self.lines.append(text)

    def advance(self, step, values):
        if step == self.stop_after:
            os.kill(os.getpid(), signal.SIGTERM)


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
    return config, module.distill(config, teacher=models / "teacher", out=out, device="cpu")


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
        found = path_kl(samples, judge)
        # Memory-mapped weights are aligned otherwise, so the last bit of a product may differ.
        assert told["path_kl_2"] == pytest.approx(found.path_kl, rel=1e-4)
        assert told["path_kl_2_se"] == pytest.approx(found.path_kl_se, rel=1e-4)


def test_evaluations_come_when_they_are_asked_for(finished):
    """Before the first step, every third one, and at the end once."""
    evaluated = [e["step"] for e in entries(finished[1].folder) if "path_kl_2" in e]
    assert evaluated == [0, 3, 6]
    assert [e["step"] for e in entries(finished[1].folder) if "lr" in e] == [1, 2, 3, 4, 5, 6]


COMMON = {"loss", "grad_norm", "entropy", "path_entropy", "unique_4gram", "kl", "kl_start", "lr"}
NUMBERS = {
    "didi": COMMON
    | {"policy_loss", "reward_student", "reward_reference", "disc_loss", "disc_accuracy"}
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
        shares = {"disc_accuracy", "clip_fraction", "unique_4gram", "ratio_clip_fraction"}
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
    result = module.distill(config, teacher=models / "teacher", out=tmp_path / "run", device="cpu")
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


# Resuming


@pytest.mark.parametrize(
    ("method", "changes", "stop_after"),
    [
        ("didi", {"reference": {"source": "bank"}, "discriminator": GATES}, 2),
        ("didi", {"train": {"eval_every": 3}}, 2),
        ("didi", {"discriminator": {"warmup": 4}}, 1),
        ("didi", {"prompt": 8, "data": {"source": "oracle"}, "didi": {"group_size": 2}}, 4),
        ("token-matching", {}, 3),
        ("token-matching", {"token_matching": {"warmup": 4}}, 1),
    ],
    ids=[
        "didi",
        "didi before an evaluation",
        "didi in warm-up",
        "didi with prompts",
        "matching",
        "matching in warm-up",
    ],
)
def test_a_stopped_and_resumed_run_is_bit_exact(run, models, tmp_path, method, changes, stop_after):
    """Both networks, average, moments, gates, noise, bank and data position all continue."""
    config = recipe(method, **changes)
    run(config, "whole")
    stopped = run(config, "parts", reporter=Heard(stop_after))
    assert not stopped.finished
    assert (stopped.outcome.step, stopped.outcome.signal) == (stop_after + 1, signal.SIGTERM)
    assert not (tmp_path / "parts" / "config.json").exists()
    assert run(config, "parts", resume=True).finished
    assert entries(tmp_path / "parts") == entries(tmp_path / "whole")
    files = [f"checkpoints/step-00000006/{STATE}", "model.safetensors"]
    for name in files + ["discriminator.safetensors"] * (method == "didi"):
        assert same_tensors(tmp_path / "whole" / name, tmp_path / "parts" / name), name
    student, teacher = tmp_path / "whole" / "model.safetensors", models / "teacher"
    assert not same_tensors(student, teacher / "model.safetensors"), "it learned something"


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"method": "token-matching"}, "method = didi, now it is token-matching"),
        ({"student": "elsewhere"}, "student = None, now it is elsewhere"),
        ({"didi": {"grouping": "tau"}}, "didi.grouping = batch, now it is tau"),
        ({"discriminator": {"steps": 2}}, "discriminator.steps = 1, now it is 2"),
        ({"reference": {"steps": 3}}, "reference.steps = 2, now it is 3"),
        ({"data": {"source": "oracle"}}, "data.source = None, now it is oracle"),
        ({"train": {"batch_size": 16}}, "train.batch_size = 8, now it is 16"),
        ({"train": {"seed": 1}}, "train.seed = 0, now it is 1"),
    ],
)
def test_a_run_is_not_resumed_with_other_settings(run, tmp_path, changes, name):
    write_recipe(tmp_path / "run", recipe())
    before = contents(tmp_path)
    with pytest.raises(UserError, match=f"was begun with {name}.*--teacher .*--resume"):
        run(recipe(**changes), resume=True)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("source", ["online", "bank"])
def test_a_run_is_not_resumed_with_another_teacher(run, tmp_path, source):
    config = recipe(reference={"source": source}, train={"steps": 3})
    run(config)
    before = contents(tmp_path)
    longer = replace(config, train=replace(config.train, steps=6))
    with pytest.raises(UserError, match="was begun with another teacher"):
        run(longer, resume=True, teacher="other")
    assert contents(tmp_path) == before


@pytest.mark.parametrize("method", METHODS)
def test_a_diverged_run_goes_on_with_a_lower_learning_rate(run, tmp_path, method):
    """NaN names its step and the last good checkpoint, which loads and can be resumed."""
    config = recipe(method, train={"steps": 3})
    run(config)
    longer = replace(config, train=replace(config.train, steps=6, log_every=2))
    wild = replace(config.optim, lr=1e30, clip=0.0)
    good = tmp_path / "run" / "checkpoints" / "step-00000003"
    before = contents(good)
    with pytest.raises(
        TrainingError, match=f"not a number at step 4.*Last good .*{good}.*optim.lr"
    ):
        run(replace(longer, optim=wild), resume=True)
    assert contents(good) == before
    assert didi.load(good, device="cpu").sample(num=1, steps=2).shape == (1, 32)
    calm = replace(longer, optim=replace(config.optim, lr=1e-4))
    assert run(calm, resume=True).outcome.step == 6


# The bank


@pytest.fixture
def draws(monkeypatch):
    """How many texts the bank's sampler is asked for, call by call."""
    asked, draw = [], distill_parts.ancestral

    def counted(denoiser, schedule, canvas, **options):
        asked.append(len(canvas.tokens))
        return draw(denoiser, schedule, canvas, **options)

    monkeypatch.setattr(distill_parts, "ancestral", counted)
    return asked


def test_a_bank_is_drawn_once_and_shared(run, tmp_path, draws):
    config = recipe(reference={"source": "bank", "bank": str(tmp_path / "bank")})
    run(config, "one")
    assert sum(draws) == 32
    bank = {p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in (tmp_path / "bank").iterdir()}
    run(config, "two")
    run(replace(config, reference=replace(config.reference, rows=8)), "three")
    assert sum(draws) == 32
    assert {
        p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in (tmp_path / "bank").iterdir()
    } == bank
    assert entries(tmp_path / "one") == entries(tmp_path / "two")
    assert entries(tmp_path / "one") != entries(tmp_path / "three")
    assert not (tmp_path / "two" / "bank").exists()


def test_a_bank_holds_the_teachers_samples(run, models, tmp_path):
    """Row i is what the teacher draws under the bank's seed and index i."""
    run(recipe(reference={"source": "bank", "steps": 4, "seed": 3}, train={"steps": 1}))
    rows = np.load(tmp_path / "run" / "bank" / "rows-00000.npy")
    teacher = didi.load(models / "teacher", device="cpu")
    drawn = teacher.sample(num=32, steps=4, seed=mix(3, "bank"), sampler="ancestral")
    assert np.array_equal(rows, drawn.numpy())


def test_a_bank_of_another_teacher_is_refused_before_anything_is_written(run, tmp_path, draws):
    config = recipe(reference={"source": "bank", "bank": str(tmp_path / "bank")})
    run(config, "mine")
    before = contents(tmp_path)
    with pytest.raises(UserError, match="holds samples of another teacher.*reference.bank"):
        run(config, "theirs", teacher="other")
    assert contents(tmp_path) == before
    assert not (tmp_path / "theirs").exists()
    assert sum(draws) == 32


# Prompts


@pytest.mark.parametrize("source", ["bank", "online", "data"])
def test_didi_continues_the_prompts_of_the_data(run, tmp_path, monkeypatch, source):
    """Bank rows, references and the student's texts begin with rows of the data, and go on anew."""
    seen, compare = [], DidiTask.compare

    def watched(task, *inputs):
        seen.append(compare(task, *inputs))
        return seen[-1]

    monkeypatch.setattr(DidiTask, "compare", watched)
    settings = {"prompt": 8, "data": {"source": "oracle"}, "train": {"eval_sequences": 8}}
    run(recipe(reference={"source": source}, didi={"group_size": 2}, **settings))
    data = OracleSource(OracleLanguage.default(), seed=0).rows(0, 32)
    if source == "bank":
        rows = torch.from_numpy(np.load(tmp_path / "run" / "bank" / "rows-00000.npy").astype(int))
        assert torch.equal(rows[:, :8], data[:, :8])
        assert not torch.equal(rows[:, 8:], data[:, 8:])
    prompts = {tuple(row) for row in data[:, :8].tolist()}
    texts = torch.cat([part.rollout.x for part in seen])
    assert len(texts) == 6 * 8
    assert {tuple(row) for row in texts[:, :8].tolist()} <= prompts
    for part in seen:
        assert not part.rollout.written[:, :8].any()
        assert part.rollout.written[:, 8:].all()
        given = part.z_reference[:, :8].repeat_interleave(2, 0)
        assert torch.equal(part.rollout.x[:, :8], given)
        assert torch.equal(part.z[:, :8], given)
    assert len({tuple(row) for row in texts.tolist()}) == len(texts)
    assert "path_entropy_2" in entries(tmp_path / "run")[-1]
    assert "path_kl_2" not in entries(tmp_path / "run")[-1]


def test_token_matching_continues_the_prompts_of_the_data(run, monkeypatch):
    texts, draw = [], TokenMatchingTask._draw

    def watched(task, *inputs, **options):
        drawn = draw(task, *inputs, **options)
        texts.append(drawn.x)
        return drawn

    monkeypatch.setattr(TokenMatchingTask, "_draw", watched)
    monkeypatch.setattr(TokenMatchingTask, "drawn_entropy", lambda *_: torch.ones(()))
    matching = {"contexts": 2, "aux_steps": 2}
    run(recipe("token-matching", prompt=8, data={"source": "oracle"}, token_matching=matching))
    # A prompt for each state, two contexts of each; every one is used once.
    data = OracleSource(OracleLanguage.default(), seed=0).rows(0, 6 * 2 * 4)
    assert torch.equal(torch.cat(texts)[:, :8], data[:, :8].repeat_interleave(2, 0))
    assert not torch.equal(torch.cat(texts)[:, 8:], data[:, 8:].repeat_interleave(2, 0))


def test_text_is_read_with_the_teachers_tokenizer_and_needed_once(run, tmp_path):
    """A resumed run has its tokens: it does not ask for the corpus again."""
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("all work and no play makes jack a dull boy\n" * 200)
    tokenizer = Tokenizer.load("bytes")
    teacher = save_random(tmp_path / "bytes", vocab_size=tokenizer.size + 1, tokenizer=tokenizer)
    data = {"source": str(corpus), "documents": "line", "valid": 20}
    config = recipe(prompt=4, data=data, reference={"source": "bank"}, train={"steps": 3})
    result = run(config, teacher=teacher)
    rows = np.load(tmp_path / "run" / "bank" / "rows-00000.npy")
    tokens = open_data(tmp_path / "run" / "data", seed=0)
    assert np.array_equal(rows[:, :4], tokens.rows(0, len(rows))[:, :4].numpy())
    assert "no play makes jack" in tokenizer.decode(tokens.ordered(0, 4).flatten().tolist())
    assert result.student["valid_nats_per_token"] > 0
    corpus.unlink()
    longer = replace(config, train=replace(config.train, steps=6))
    assert run(longer, teacher=teacher, resume=True).outcome.step == 6


# When it goes wrong


@pytest.mark.parametrize("method", METHODS)
def test_an_entropy_collapse_stops_with_cause_and_last_checkpoint(run, tmp_path, method):
    wild = {"lr": 0.3, "schedule": "constant", "clip": 0.0}
    watch, train = {"min_entropy": 0.9}, {"save_every": 1, "keep": 9, "steps": 40}
    config = recipe(method, optim=wild, watch=watch, train=train)
    with pytest.raises(TrainingError) as stop:
        run(config)
    checkpoints = sorted((tmp_path / "run" / "checkpoints").iterdir())
    step, last = int(entries(tmp_path / "run")[-1]["step"]), checkpoints[-1]
    assert last.name == f"step-{step - 1:08d}"
    message = str(stop.value)
    assert message.startswith(f"Stopped at step {step}: entropy collapse, ")
    assert message.endswith(f"Last good checkpoint: {last}.")
    entropies = [e["path_entropy"] for e in entries(tmp_path / "run")[1:]]
    enough = -(-256 // config.train.batch_size)
    assert step >= enough, "an average over fewer texts says nothing"
    assert np.mean(entropies[-enough:]) < 0.95 * entropies[0]
    assert not (tmp_path / "run" / "config.json").exists()
    assert didi.load(last, device="cpu").sample(num=1, steps=2).shape == (1, 32)
    patient = replace(
        config,
        watch=replace(config.watch, min_entropy=0.0),
        train=replace(config.train, steps=step + 1),
    )
    assert run(patient, resume=True).outcome.step == step + 1


def test_a_saturated_discriminator_waits_and_is_named_once(run, tmp_path):
    heard = Heard()
    discriminator = {"chance": 0.0, "saturation": 1e-9}
    run(recipe(discriminator=discriminator, train={"steps": 4}), reporter=heard)
    said = [line for line in heard.lines if "saturated" in line]
    assert len(said) == 1
    assert "discriminator.lr" in said[0]
    for entry in (e for e in entries(tmp_path / "run") if "loss" in e):
        assert (entry["disc_waits"], entry["disc_grad_norm"], entry["student_waits"]) == (1, 0, 0)
        assert entry["grad_norm"] > 0


def test_a_discriminator_at_chance_makes_the_student_wait_and_is_named_once(run, models, tmp_path):
    heard = Heard()
    discriminator = {"chance": 0.98, "saturation": 0.99, "warmup": 1}
    run(recipe(discriminator=discriminator, train={"steps": 4}), reporter=heard)
    said = [line for line in heard.lines if "at chance" in line]
    assert len(said) == 1
    assert said[0].startswith("step 2: "), "waiting in warm-up is no trouble"
    assert "discriminator.trainable_blocks" in said[0]
    for entry in (e for e in entries(tmp_path / "run") if "loss" in e):
        assert (entry["student_waits"], entry["grad_norm"], entry["disc_waits"]) == (1, 0, 0)
        assert entry["disc_grad_norm"] > 0
    student, teacher = tmp_path / "run" / "model.safetensors", models / "teacher"
    assert same_tensors(student, teacher / "model.safetensors")


def test_a_healthy_run_says_nothing(run):
    heard = Heard()
    run(recipe(watch={"min_entropy": 0.5}), reporter=heard)
    assert heard.lines == ["Measuring the teacher at 2 steps"]


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("token-matching", {"token_matching": {"budgets": [16], "warmup": 20}}),
        ("token-matching", {"token_matching": {"warmup": 0}, "prompt": 28}),
        ("didi", {"prompt": 28, "didi": {"group_size": 4}}),
    ],
)
def test_few_texts_do_not_look_like_a_collapse(run, method, changes):
    """Four texts of few tokens: their entropy swings by more than half; the average does not."""
    config = recipe(
        method,
        **changes,
        optim={"lr": 1e-9},
        data={"source": "oracle"},
        train={"batch_size": 4, "steps": 90, "save_every": 90, "eval_every": 0},
        watch={"min_entropy": 0.7, "budgets": []},
    )
    assert run(config).finished


def test_a_finished_run_stays_as_it_is(run, tmp_path):
    """Nothing is left to train, so nothing may say that it was trained otherwise."""
    done = run(recipe())
    before = contents(tmp_path / "run")
    heard = Heard()
    again = run(recipe(didi={"kl_weight": 0.5}), resume=True, reporter=heard)
    assert contents(tmp_path / "run") == before
    assert (again.teacher, again.student) == (done.teacher, done.student)
    assert (again.outcome.step, again.outcome.signal, again.new) == (6, None, False)
    assert [line for line in heard.lines if "nothing to do" in line]


def test_a_finished_run_needs_neither_its_bank_nor_its_checkpoints(run, tmp_path, draws):
    config = recipe(reference={"source": "bank"})
    run(config)
    shutil.rmtree(tmp_path / "run" / "bank")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    before, drawn = contents(tmp_path / "run"), len(draws)
    assert not run(config, resume=True).new
    with pytest.raises(UserError, match="has made 6 steps, but its checkpoints are gone"):
        run(replace(config, train=replace(config.train, steps=9)), resume=True)
    assert (contents(tmp_path / "run"), len(draws)) == (before, drawn)


def test_a_model_of_fewer_steps_is_not_a_finished_run(run, tmp_path):
    """Lengthened and stopped at the new end: the folder still holds the model of the old one."""
    run(recipe())
    longer = recipe(train={"steps": 8})
    stopped = run(longer, resume=True, reporter=Heard(stop_after=8))
    assert (stopped.outcome.step, stopped.finished) == (8, False)
    assert read_manifest(tmp_path / "run").provenance["step"] == 6
    done = run(longer, resume=True)
    assert done.new
    assert read_manifest(tmp_path / "run").provenance["step"] == 8
    assert same_tensors(
        tmp_path / "run" / "model.safetensors",
        tmp_path / "run" / "checkpoints" / "step-00000008" / "model.safetensors",
    )


def test_a_run_does_not_go_back(run, tmp_path):
    run(recipe())
    before = contents(tmp_path / "run")
    with pytest.raises(UserError, match="has made 6 steps already, and train.steps is 4"):
        run(recipe(train={"steps": 4}), resume=True)
    assert contents(tmp_path / "run") == before


def test_what_a_resumed_run_changes_is_said(run, tmp_path):
    run(recipe())
    heard = Heard()
    run(recipe(train={"steps": 7}, didi={"kl_weight": 0.5}), resume=True, reporter=heard)
    assert "Changed: didi.kl_weight 0.05 -> 0.5" in heard.lines
    assert "Changed: train.steps 6 -> 7" in heard.lines
    assert read_yaml(tmp_path / "run" / "recipe.yaml")["didi"]["kl_weight"] == 0.5


def test_a_signal_ends_an_evaluation_at_once_and_resume_makes_it_again(run, tmp_path, monkeypatch):
    """Evaluations may take minutes: the step is saved, and the product is the same in the end."""
    run(recipe(train={"eval_every": 2}), "straight")
    draw, calls = QuickTest.draw, []

    def interrupted(test, rows, steps, *options):
        calls.append(steps)
        if len(calls) == 2:  # the teacher is measured first
            os.kill(os.getpid(), signal.SIGINT)
        return draw(test, rows, steps, *options)

    monkeypatch.setattr(QuickTest, "draw", interrupted)
    stopped = run(recipe(train={"eval_every": 2}))
    assert stopped.outcome.signal == signal.SIGINT
    assert stopped.outcome.checkpoint.name == "step-00000002"
    assert len(calls) == 2
    assert run(recipe(train={"eval_every": 2}), resume=True).finished
    assert entries(tmp_path / "run") == entries(tmp_path / "straight")
    files = [tmp_path / name / "model.safetensors" for name in ("run", "straight")]
    assert same_tensors(*files)


def test_a_second_run_in_one_folder_waits_its_turn(run, tmp_path):
    world = World(torch.device("cpu"), 0, 1)
    with only_run(tmp_path / "run", world), pytest.raises(UserError, match="in use by another"):
        run(recipe())
    assert not (tmp_path / "run").exists()
    assert run(recipe()).finished


# What is refused, and leaves no trace


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["ar", "duo"])
def test_only_masked_models_are_distilled(run, models, tmp_path, kind, method):
    shape = {"vocab_size": 65} if kind == "ar" else {"vocab_size": 64, "time_conditioning": True}
    save_random(tmp_path / kind, kind=kind, **shape, schedule=ScheduleConfig(eps=1e-3))
    with pytest.raises(UserError, match=f"{kind} is a model of kind `{kind}`.*mdlm"):
        run(recipe(method), teacher=tmp_path / kind)
    with pytest.raises(UserError, match=f"{kind} is a model of kind `{kind}`.*mdlm"):
        run(recipe(method, student=str(tmp_path / kind)))
    assert not (tmp_path / "run").exists()


def test_a_student_must_speak_the_teachers_tokens_and_read_its_texts(run, tmp_path):
    words = [f"w{i}" for i in range(64)]
    save_random(tmp_path / "foreign", tokenizer=Tokenizer.from_words(words))
    save_random(tmp_path / "short", length=16)
    for name, message in [
        ("foreign", "foreign .the student. and .*teacher.* have different tokenizers"),
        ("short", "reads at most 16 tokens, the teacher 32"),
    ]:
        with pytest.raises(UserError, match=message):
            run(recipe(student=str(tmp_path / name)))
    assert not (tmp_path / "run").exists()


def test_data_of_another_tokenizer_is_refused(run, tmp_path):
    save_random(tmp_path / "foreign", tokenizer=Tokenizer.from_words([f"w{i}" for i in range(64)]))
    config = recipe(reference={"source": "data"}, data={"source": "oracle"})
    with pytest.raises(UserError, match="another tokenizer"):
        run(config, teacher=tmp_path / "foreign")
    assert not (tmp_path / "run").exists()


def test_a_missing_model_is_named(run, tmp_path):
    with pytest.raises(UserError, match="nowhere: no such file or folder"):
        run(recipe(), teacher="nowhere")
    with pytest.raises(UserError, match="`elsewhere` is no file or folder here"):
        run(recipe(student="elsewhere"))
    assert not (tmp_path / "run").exists()


def test_bad_input_touches_nothing(run, models, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "log.jsonl").write_text("mine")
    (tmp_path / "file").write_text("mine too")
    before = contents(tmp_path)
    for config, name, options, message in [
        (recipe(), "run", {}, "is not empty"),
        (recipe(), "file", {}, "is a file"),
        (recipe(), "new", {"resume": True}, "holds no run to resume"),
        ("oracle-didi", "new", {"overrides": ["didi.group_sise=2"]}, "Did you mean `group_size`"),
        ("oracle-didi", "new", {"method": "magic"}, "choose one of didi, token-matching"),
        ("oracle-didi", "new", {"method": "sdtt"}, "not a whole number of rounds"),
        ("oracle-dido", "new", {}, "neither a recipe file nor a shipped recipe"),
        (recipe(), "new", {"device": "cuda:77x"}, "not a device"),
        (recipe(data={"source": "nowhere.txt"}), "new", {}, "nowhere.txt"),
        (DistillConfig(method="magic"), "new", {}, "choose one of didi, token-matching"),
        ({"method": "magic"}, "new", {}, "choose one of didi, token-matching"),
        (17, "new", {}, "A recipe is a name"),
        ("oracle-didi", "new", {"overrides": "train.steps=3"}, "give a list"),
        (recipe(), "new", {"teacher": didi.load(models / "teacher")}, "teacher is a Model"),
        (
            recipe(reference={"source": "bank", "rows": 10**13}),
            "new",
            {},
            "the disk has .* free: make room",
        ),
    ]:
        with pytest.raises(UserError, match=message):
            run(config, name, **options)
        assert contents(tmp_path) == before, message
        assert not (tmp_path / "new").exists(), message


def test_a_run_is_not_begun_over_another(run, tmp_path):
    run(recipe(train={"steps": 1}, token_matching={"warmup": 0}, discriminator={"warmup": 0}))
    before = contents(tmp_path)
    with pytest.raises(UserError, match="already holds a run: add --resume"):
        run(recipe())
    assert contents(tmp_path) == before


def test_a_run_that_was_stopped_before_it_saved_starts_over(run, tmp_path):
    """A kill while the teacher was measured leaves a recipe: neither command stumbles over it."""
    write_recipe(tmp_path / "run", recipe(optim={"lr": 1e-5}))
    assert run(recipe()).finished
    write_recipe(tmp_path / "other", recipe())
    assert run(recipe(), "other", resume=True).finished


def test_settings_that_do_not_fit_the_teacher_are_refused_before_its_bank_is_drawn(run, tmp_path):
    """Drawing takes minutes on a real teacher, and bad input touches nothing."""
    for changes, message in [
        ({"discriminator": {"trainable_blocks": 3}}, "trainable_blocks is 3"),
        ({"prompt": 32, "data": {"source": "oracle"}}, "nothing would be left to write"),
    ]:
        with pytest.raises(UserError, match=message):
            run(recipe(reference={"source": "bank"}, **changes))
        assert not (tmp_path / "run").exists(), message


def test_a_batch_that_processes_cannot_share_is_refused_before_the_bank_is_drawn(
    run, tmp_path, monkeypatch, draws
):
    world = World(torch.device("cpu"), 0, 3)
    monkeypatch.setattr(module, "open_world", lambda _: nullcontext(world))
    monkeypatch.setattr(World, "wait", lambda _: None)
    with pytest.raises(UserError, match="batch_size is 8, which 3 processes cannot share"):
        run(recipe(reference={"source": "bank"}))
    assert draws == []
    assert not (tmp_path / "run").exists()


# Corners


@pytest.mark.parametrize("method", METHODS)
def test_a_student_may_have_another_shape(run, tmp_path, method):
    """One layer instead of two; the discriminator keeps the teacher's shape."""
    save_random(tmp_path / "small", seed=2, layers=1)
    run(recipe(method, student=str(tmp_path / "small")))
    model = didi.load(tmp_path / "run", device="cpu")
    assert model.config.layers == 1
    assert len(model.discriminator.blocks if model.discriminator else [1, 2]) == 2
    assert not same_tensors(
        tmp_path / "run" / "model.safetensors", tmp_path / "small" / "model.safetensors"
    )


@pytest.mark.parametrize("method", METHODS)
def test_a_student_may_read_longer_texts_than_the_teacher(run, tmp_path, method):
    """Then texts are as long as the teacher's."""
    save_random(tmp_path / "long", seed=2, length=64)
    assert run(recipe(method, student=str(tmp_path / "long"))).finished
    assert didi.load(tmp_path / "run", device="cpu").config.length == 64


@pytest.mark.parametrize("method", METHODS)
def test_a_teacher_may_have_more_ids_than_its_tokenizer(run, tmp_path, method):
    """An embedding padded to a round number: the oracle cannot judge ids it does not know."""
    save_random(tmp_path / "padded", vocab_size=80)
    assert run(recipe(method), teacher=tmp_path / "padded").finished


@pytest.mark.parametrize("method", METHODS)
def test_a_run_killed_in_its_last_evaluation_makes_up_for_it(run, tmp_path, method):
    """The last checkpoint is there, the student's numbers and the product are not."""
    config = recipe(method)
    whole = run(config)
    told = didi.load(tmp_path / "run", device="cpu").provenance
    for name in ("model.safetensors", "config.json"):
        (tmp_path / "run" / name).unlink()
    log = tmp_path / "run" / "log.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:-1]))
    resumed = run(config, resume=True)
    assert resumed.student == whole.student
    assert didi.load(tmp_path / "run", device="cpu").provenance == told
    assert entries(tmp_path / "run")[-1] == {"step": 6, **whole.student}


def test_one_setting_of_the_optimizer_leaves_the_others_at_the_papers():
    """A default is written once: naming the learning rate must not change the schedule."""
    named = parse(DistillConfig, {"optim": {"lr": 1e-6}}, where="test")
    assert named.optim == DistillConfig().optim


def test_settings_already_made_take_overrides_and_a_method(run, tmp_path):
    result = run(recipe(), overrides=["train.steps=2"], method="token-matching")
    assert result.outcome.step == 2
    assert didi.load(tmp_path / "run", device="cpu").discriminator is None
    with pytest.raises(UserError, match="choose one of didi, token-matching"):
        run(recipe(), "other", method="magic")


def test_a_bank_may_be_shared_between_seeds(run, tmp_path, draws):
    for seed in (0, 1):
        reference = {"source": "bank", "bank": str(tmp_path / "bank")}
        run(recipe(reference=reference, train={"seed": seed}), f"seed{seed}")
    assert sum(draws) == 32
    assert entries(tmp_path / "seed0") != entries(tmp_path / "seed1")


def test_a_student_with_another_schedule_is_refused(run, tmp_path):
    save_random(tmp_path / "cosine", seed=2, schedule=ScheduleConfig(name="cosine", eps=0.0))
    with pytest.raises(UserError, match="different noise schedules"):
        run(recipe(student=str(tmp_path / "cosine")))


def test_a_damaged_manifest_does_not_keep_a_run_from_resuming(run, tmp_path):
    config = recipe(train={"steps": 6, "save_every": 2, "keep": 3})
    run(config)
    newest = sorted((tmp_path / "run" / "checkpoints").iterdir())[-1]
    (newest / "manifest.json").write_text('{"info": ')
    assert run(config, resume=True).finished


def test_a_public_checkpoint_is_a_teacher(run, models, tmp_path):
    """Of another layout, without a tokenizer: the student is ours, and says where it comes from."""
    write_foreign(load_model(models / "teacher"), tmp_path / "hub", "mdlm-hub")
    words = tmp_path / "words"
    OracleLanguage.default().tokenizer.save(words)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "hub" / name).unlink()
    config = recipe(reference={"source": "bank"}, data={"source": "oracle"}, prompt=4)
    result = run(config, teacher=tmp_path / "hub", tokenizer=words)
    assert result.finished
    student = didi.load(result.folder, device="cpu")
    assert student.tokenizer.hash == OracleLanguage.default().tokenizer.hash
    assert student.provenance["teacher_source"] == str(tmp_path / "hub")
    assert student.provenance["teacher"] == fingerprint(tmp_path / "hub")


# Mixture steps


def mixture(**changes):
    settings = {"codes": 3, "budgets": [2], "learning": 1} | changes.pop("mixture", {})
    return recipe("mixture", mixture=settings, reference={"source": "bank"}, **changes)


def test_a_mixture_student_is_trained_measured_saved_and_sampled(run, tmp_path):
    """Its masks come along; the path KL of the table is that of the mixture."""
    result = run(mixture())
    student = didi.load(result.folder, device="cpu")
    assert (student.config.masks, student.config.mask_id, student.config.vocab_size) == (3, 64, 67)
    drawn = student.draw(num=16, steps=2, seed=mix(0, "quick"))
    judge = oracle_judge(OracleLanguage.default())
    assert path_kl(drawn, judge).path_kl == pytest.approx(result.student["path_kl_2"], abs=1e-3)
    assert int(drawn.tokens.max()) < 64
    plain = student.draw(num=16, steps=2, seed=mix(0, "quick"), measure_path=False)
    assert torch.equal(plain.tokens, student.sample(num=16, steps=2, seed=mix(0, "quick")))
    assert plain.log_prob is None, "summing the code out costs passes: only for who asks"
    assert not (result.folder / "discriminator.safetensors").exists()
    log = [e for e in entries(result.folder) if "lr" in e]
    assert all(0 <= e["code_information"] <= np.log(3) for e in log)
    assert all(e["component_loss"] > 0 for e in log)
    bound = student.nelbo(OracleSource(OracleLanguage.default(), seed=0).ordered(0, 32))
    assert 1 < float(bound) < 20


def test_a_mixture_run_resumes_bit_for_bit(run, tmp_path):
    run(mixture(), "whole")
    assert not run(mixture(), "parts", reporter=Heard(stop_after=2)).finished
    assert run(mixture(), "parts", resume=True).finished
    assert entries(tmp_path / "parts") == entries(tmp_path / "whole")
    files = [tmp_path / name / "model.safetensors" for name in ("parts", "whole")]
    assert same_tensors(*files)


def test_a_mixture_student_can_go_on_learning_and_is_not_written_as_what_it_is_not(run, tmp_path):
    first = run(mixture(), "first").folder
    again = run(mixture(student=str(first)), "again")
    assert didi.load(again.folder, device="cpu").config.masks == 3
    with pytest.raises(UserError, match="has one mask, and the model 3"):
        write_foreign(load_model(first), tmp_path / "hub", "mdlm-hub")
    with pytest.raises(UserError, match="the teacher has 3 masks"):
        run(recipe("didi"), "other", teacher=first)
    for other in (
        recipe("didi", student=str(first)),
        mixture(mixture={"codes": 2}, student=str(first)),
    ):
        with pytest.raises(UserError, match="the student. has 3 masks: use method=mixture"):
            run(other, "other")
    assert not (tmp_path / "other").exists()
