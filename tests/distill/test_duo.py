"""Distillation of a uniform-state teacher, from recipe to folder: numbers, resuming, refusals."""

import os
import signal

import pytest
import torch
from tests.random_models import DUO, save_random
from tests.runs import STATE, distilling, entries, same_tensors

import didi_instruct as didi
from didi_instruct.config.distill import DistillConfig
from didi_instruct.config.schema import parse
from didi_instruct.data.oracle import OracleLanguage
from didi_instruct.errors import UserError
from didi_instruct.evaluation.diversity import unigram_entropy
from didi_instruct.evaluation.quick_eval import QuickTest, oracle_judge
from didi_instruct.process.schedule import LogLinear
from didi_instruct.training.reporting import Reporter


def recipe(**changes):
    """Three rounds of two iterations."""
    values = {
        "method": "duo",
        "data": {"source": "oracle"},
        "duo": {"steps": 8, "iterations": 2},
        "optim": {"lr": 1e-3, "schedule": "linear"},
        "train": {"steps": 6, "batch_size": 8, "ema": 0.9, "log_every": 1, "save_every": 3,
                  "eval_sequences": 16},
        "watch": {"budgets": [2, 4], "samples": 16},
    }  # fmt: skip
    return parse(DistillConfig, values | changes, where="test")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return save_random(tmp_path_factory.mktemp("models") / "teacher", **DUO)


@pytest.fixture
def run(teacher, tmp_path, monkeypatch):
    monkeypatch.setattr(distilling, "draw_curves", lambda *_, **__: False)

    def start(config, name="run", **options):
        options = {"device": "cpu", "teacher": teacher} | options
        return didi.distill(config, out=tmp_path / name, **options)

    return start


class StopAt(Reporter):
    """Sends a signal once a step is logged."""

    def __init__(self, step):
        self.step = step

    def advance(self, step, values):
        if step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_stopped_and_resumed_run_is_bit_exact(run, tmp_path, step):
    """Before, at and after the end of a round: log, weights, moments and target."""
    run(recipe(), "whole")
    assert not run(recipe(), "parts", reporter=StopAt(step)).finished
    assert run(recipe(), "parts", resume=True).finished
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert entries(parts) == entries(whole)
    for file in (f"checkpoints/step-00000006/{STATE}", "model.safetensors"):
        assert same_tensors(parts / file, whole / file)
    deltas = [entry["delta"] for entry in entries(whole) if "delta" in entry]
    assert deltas == [1 / 8, 1 / 8, 1 / 4, 1 / 4, 1 / 2, 1 / 2]


def test_the_student_is_a_model_and_its_numbers_are_told(run, tmp_path):
    """Judge and entropy at every budget, no path KL; `didi.load` draws from the product."""
    result = run(recipe())
    measures = ("judge_nats", "judge_ppl", "entropy", "mistakes", "latent_share")
    for numbers in (result.teacher, result.student):
        assert not [name for name in numbers if name.startswith("path_")]
        assert {f"{name}_{steps}" for name in measures for steps in (2, 4)} <= numbers.keys()
    assert "valid_nats_per_token" in result.student
    assert result.exact
    assert len(didi.load(tmp_path / "run").generate(num=2, steps=2)) == 2


def test_quick_numbers_are_those_of_the_samples():
    """Minus the exact log-probability per token of what was drawn, and its unigram entropy."""
    language = OracleLanguage.default()
    table = torch.randn(64, generator=torch.Generator().manual_seed(0)).log_softmax(0)

    def rows(reads, t, at):
        return table.expand(len(at), -1)

    start = torch.full((12, language.length), 64)
    test = QuickTest(LogLinear(1e-3), start, 64, [3], oracle_judge(language), seed=5, uniform=True)
    tokens, found = test.draw(rows, 3).tokens, test.measure(rows)
    nats = -language.log_prob(tokens) / language.length
    assert found["judge_nats_3"] == pytest.approx(nats.mean().item())
    assert found["judge_nats_3_se"] == pytest.approx(nats.std().item() / 12**0.5)
    assert found["judge_ppl_3"] == pytest.approx(nats.mean().exp().item())
    assert found["entropy_3"] == pytest.approx(unigram_entropy(tokens).mean().item())


def test_what_cannot_be_distilled_is_refused(run, tmp_path):
    masked = save_random(tmp_path / "masked")
    with pytest.raises(UserError, match=r"kind `mdlm`: method=duo distils uniform-state .*`duo`"):
        run(recipe(), teacher=masked)
    with pytest.raises(UserError, match="kind `mdlm`: method=duo"):
        run(recipe(student=str(masked)))
    with pytest.raises(
        UserError, match="method=duo adds noise to real text: name it with `data.source`"
    ):
        run(recipe(data={}))
    assert not (tmp_path / "run").exists()
