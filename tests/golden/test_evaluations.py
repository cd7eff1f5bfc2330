"""Rows of `didi eval`, and the names of the files it keeps, are those of an earlier version."""

import json

import pytest

from . import comparing, tiny
from .evaluations import CASES, FILE, MODELS, answer, machine

GOLDENS = json.loads(FILE.read_text())
ALIKE = GOLDENS["machine"] == machine()
"""Elsewhere matrix products round otherwise."""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    tiny.write_models(folder, MODELS)
    tiny.write_texts(folder / "lines.txt")
    return folder


@pytest.mark.parametrize("name", CASES)
def test_an_evaluation(home, name, monkeypatch):
    monkeypatch.setattr("sys.argv", [])
    golden, found = GOLDENS["cases"][name], answer(name, home)
    if not ALIKE:
        del golden["files"], found["files"]  # named by numbers too
    tolerance = 1e-10 if ALIKE else 1e-4
    apart = list(comparing.differences(golden, found, lambda _: (tolerance, 1.0)))
    assert not apart, "\n".join(f"{path}: {one} is now {two}" for path, one, two, _ in apart[:10])
