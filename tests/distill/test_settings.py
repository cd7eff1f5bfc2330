"""Recipes carried over to other methods, and how students are sampled afterwards."""

from typing import get_args

import pytest
import torch
from tests.runs import distilling

import didi_instruct as didi
from didi_instruct.config.distill import DistillConfig, Method
from didi_instruct.config.model import ModelConfig, ScheduleConfig
from didi_instruct.config.recipes import recipe_names
from didi_instruct.config.schema import parse
from didi_instruct.data.oracle import OracleLanguage
from didi_instruct.distillation.methods import METHODS
from didi_instruct.distillation.settings import settings_for
from didi_instruct.errors import UserError
from didi_instruct.models.checkpoint import save_model
from didi_instruct.models.dit import build_model
from didi_instruct.training.reporting import Reporter
from didi_instruct.training.run_dir import write_recipe

OTHERS = [n for n in recipe_names() if n.startswith("finetune-") or n.endswith(("-teacher", "-ar"))]
DISTILLATIONS = [n for n in recipe_names() if n not in OTHERS]
TEXT = ["data.source=some.txt"]
"""What recipes that learn from real text ask for, and what DUO always does."""
TINY = [
    "train.steps=3", "train.batch_size=8", "train.eval_sequences=8", "reference.rows=16",
    "reference.steps=2", "watch.samples=8", "discriminator.warmup=0", "token_matching.warmup=0",
]  # fmt: skip


def flags_of(config):
    return METHODS[config.method].sampling_flags(config)


class Told(Reporter):
    """Keeps what is said."""

    def __init__(self):
        self.lines = []

    def say(self, text):
        self.lines.append(text)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Distil a random teacher, of the kind that a method needs."""
    monkeypatch.setattr(distilling, "draw_curves", lambda *_, **__: False)

    def start(method, *more, **options):
        kind = "duo" if method == "duo" else "mdlm"
        own = {"vocab_size": 64, "time_conditioning": True} if kind == "duo" else {"vocab_size": 65}
        config = ModelConfig(
            kind=kind, layers=2, hidden=32, heads=2, cond_dim=16, length=32,
            schedule=ScheduleConfig(eps=1e-3), **own,
        )  # fmt: skip
        torch.manual_seed(0)
        if not (tmp_path / kind).exists():
            tokenizer = OracleLanguage.default().tokenizer
            save_model(tmp_path / kind, build_model(config), config, tokenizer)
        return didi.distill(
            "oracle-didi", teacher=tmp_path / kind, out=tmp_path / "run", method=method,
            overrides=[*TINY, *more], device="cpu", **options,
        )  # fmt: skip

    return start


@pytest.mark.parametrize("method", get_args(Method))
@pytest.mark.parametrize("recipe", DISTILLATIONS)
def test_any_recipe_is_carried_over_to_any_method(recipe, method):
    config, said = settings_for(recipe, TEXT, method)
    assert config.method == method
    given = settings_for(recipe, TEXT)[0].lengths
    assert config.lengths == ("" if method == "duo" else given)
    assert ("lengths=" in " ".join(said)) == (method == "duo" and bool(given))
    flags = flags_of(config)
    assert ("--sampler dimo" in flags) == (method == "dimo")
    assert int(flags.split("--steps ")[1].split()[0]) >= 1


@pytest.mark.parametrize("method", get_args(Method))
def test_a_recipe_of_didi_runs_with_any_method(run, method):
    told = Told()
    result = run(method, reporter=told)
    assert result.finished
    assert result.outcome.step == 3
    left_out = [line for line in told.lines if "watch.budgets=[4, 8] is left out" in line]
    assert len(left_out) == (method == "dimo")
    assert result.student
    assert bool(result.teacher) == (method != "dimo")


@pytest.mark.parametrize(
    ("recipe", "flags"),
    [
        ("owt-169m-didi", "--steps 8"),
        ("oracle-token-matching", "--steps 8"),
        ("stories-path", "--steps 8"),
        ("oracle-sdtt", "--steps 4"),
        ("owt-169m-sdtt", "--steps 8"),
        ("oracle-duo", "--steps 4"),
        ("owt-169m-duo", "--steps 32"),
        ("oracle-dimo", "--sampler dimo --steps 4"),
    ],
)
def test_a_student_is_sampled_in_steps_that_it_has_learnt(recipe, flags):
    assert flags_of(settings_for(recipe, TEXT)[0]) == flags


def test_the_start_of_dimo_is_told_where_it_is_not_the_published_one():
    config = parse(DistillConfig, {"method": "dimo", "dimo": {"random": 0.5}}, where="test")
    assert flags_of(config) == "--sampler dimo --steps 1 --option random=0.5"


def test_an_order_is_left_out_where_a_method_may_not_know_it_but_refused_where_it_is_asked_for():
    config, said = settings_for("stories-token-matching", method="sdtt")
    assert (config.order, len(said)) == ("random", 2)
    assert "order=streams is left out" in said[1]
    assert settings_for("stories-token-matching", TEXT, "mixture")[0].order == "streams"
    with pytest.raises(UserError, match="order is streams, which method=sdtt does not know"):
        settings_for("stories-token-matching", ["order=streams"], "sdtt")


def test_what_stays_of_a_recipe_for_another_method_is_told_and_what_it_reproduces_does_not():
    config, said = settings_for("stories-didi", method="sdtt")
    assert (config.reproduces, config.expect) == ("", "")
    assert said[0].startswith("optim.lr, train.batch_size, train.steps are those of a recipe for")
    _, said = settings_for("stories-didi", ["optim.lr=1e-4", "train.steps=70"], "sdtt")
    assert said[0].startswith("train.batch_size are those of a recipe for didi, not for")
    given = ["optim.lr=1e-4", "train.steps=70", "train.batch_size=8"]
    assert settings_for("stories-didi", given, "sdtt")[1] == [], "all of them were given"
    own, said = settings_for("stories-sdtt", method="sdtt")
    assert (own, said) == (settings_for("stories-sdtt")[0], [])
    assert own.reproduces
    named, _ = settings_for("stories-didi", ["expect=a number"], "sdtt")
    assert named.expect == "a number"


def test_rounds_that_follow_from_the_steps_stay_with_them(run):
    """Lengthened, the rounds that were made would have been others."""
    run("sdtt")
    with pytest.raises(UserError, match="shares 3 steps evenly.*train.steps is 6"):
        run("sdtt", "train.steps=6", resume=True)


def test_what_another_method_would_read_does_not_hinder_resuming(run, tmp_path):
    """A run of before, when rounds had 10,000 iterations where nobody said so."""
    run("didi")
    old, _ = settings_for("oracle-didi", [*TINY, "sdtt.iterations=10000"], "didi")
    write_recipe(tmp_path / "run", old)
    assert run("didi", "train.steps=4", resume=True).outcome.step == 4


def test_one_round_of_duo_ends_at_the_steps_it_began_with():
    values = {"method": "duo", "duo": {"steps": 93, "iterations": 10}, "train": {"steps": 10}}
    config = parse(DistillConfig, values | {"data": {"source": "text"}}, where="test")
    assert flags_of(config) == "--steps 93", "1 / (1 / 93) is a little less"
