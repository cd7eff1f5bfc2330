"""The grid of the example runs and says what was chosen."""

import importlib
from dataclasses import replace
from pathlib import Path

import pytest

from didi_instruct.config.schema import read_yaml
from didi_instruct.reproduce.running import RUN, folder_of
from didi_instruct.reproduce.scale import Given
from didi_instruct.reproduce.scales import find_scale

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = pytest.mark.skipif(not EXAMPLES.is_dir(), reason="examples/ is not here")


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("grid")


def test_two_by_two_students_have_a_line_each_and_are_kept(example, monkeypatch, tmp_path, capsys):
    tiny = (
        "reference.rows=16",
        "reference.steps=2",
        "train.batch_size=8",
        "train.eval_sequences=8",
    )
    monkeypatch.setattr(example, "TOY_BANK", tiny)
    monkeypatch.setattr(example, "TOY_NETWORK", (*example.TOY_NETWORK, "model.hidden=16"))
    scale = replace(find_scale("toy", Given()), samples=8, budgets=(2,))
    table = example.run(tmp_path, scale, steps=12, teacher_steps=4)
    for job, row in zip(example.students(12, 4), table.rows, strict=True):
        made = read_yaml(folder_of(job, tmp_path) / RUN / "recipe.yaml")
        lr, steps = made["optim"]["lr"], made["didi"]["rollout_steps"]
        assert row["method"] == f"optim.lr={lr}, didi.rollout_steps={steps}"
    assert "9 jobs: 9 done" in capsys.readouterr().err
    again = example.run(tmp_path, scale, steps=12, teacher_steps=4)
    assert again.rows == table.rows
    assert "running" not in capsys.readouterr().err
