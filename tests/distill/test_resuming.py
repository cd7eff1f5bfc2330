"""A stopped run goes on where it was, with its own settings and its own teacher."""

import signal
from dataclasses import replace

import pytest
import yaml
from tests.runs import STATE, contents, entries, same_tensors

import didi_instruct as didi
from didi_instruct.errors import TrainingError, UserError
from didi_instruct.training.run_dir import write_recipe

from .small import METHODS, Heard, recipe

GATES = {"chance": 0.55, "saturation": 0.56}
"""Accuracies so close together that now one network waits and now the other."""
LETTER = {
    "discriminator": {"warmup": 2, "chance": None, "saturation": None, "dropout": 0.3},
    "warmup_on_top": True,
    "train": {"steps": 4, "ema_warmup": False},
}
"""As in the paper's recipes: six iterations, four of them updates of the student."""


@pytest.mark.parametrize(
    ("method", "changes", "stop_after"),
    [
        ("didi", {"reference": {"source": "bank"}, "discriminator": GATES}, 2),
        ("didi", {"train": {"eval_every": 3}}, 2),
        ("didi", {"discriminator": {"warmup": 4}}, 1),
        ("didi", LETTER, 1),
        ("didi", {"prompt": 8, "data": {"source": "oracle"}, "didi": {"group_size": 2}}, 4),
        ("token-matching", {}, 3),
        ("token-matching", {"token_matching": {"warmup": 4}}, 1),
    ],
    ids=[
        "didi",
        "didi before an evaluation",
        "didi in warm-up",
        "didi in a warm-up on top",
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
        ({"train": {"ema_warmup": False}}, "train.ema_warmup = True, now it is False"),
        ({"warmup_on_top": True}, "warmup_on_top = False, now it is True"),
    ],
)
def test_a_run_is_not_resumed_with_other_settings(run, tmp_path, changes, name):
    write_recipe(tmp_path / "run", recipe())
    before = contents(tmp_path)
    with pytest.raises(UserError, match=f"was begun with {name}.*its own recipe .*recipe.yaml"):
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


def test_a_run_of_a_version_without_later_settings_goes_on(run, tmp_path):
    """What its recipe does not name has the meaning that it had."""
    run(recipe(), "whole")
    run(recipe(), "parts", reporter=Heard(2))
    path = tmp_path / "parts" / "recipe.yaml"
    values = yaml.safe_load(path.read_text())
    del values["warmup_on_top"], values["train"]["ema_warmup"]
    del values["discriminator"]["weight_decay"], values["discriminator"]["dropout"]
    path.write_text(yaml.safe_dump(values))
    assert run(str(path), "parts", resume=True).finished
    assert entries(tmp_path / "parts") == entries(tmp_path / "whole")
