"""The README's animation: drawn from two models, or one line that says what is missing."""

import importlib
import sys

import pytest

from didi_instruct.hub import sources

from .test_demo import EXAMPLES, ignorant

pytestmark = pytest.mark.skipif(not EXAMPLES.is_dir(), reason="examples/ is not here")


@pytest.fixture
def animation(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sources, "root", lambda: tmp_path / "shipped")
    module = importlib.import_module("animation")

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["animation.py", *map(str, arguments)])
        module.main()

    return run


def test_both_are_drawn_step_by_step(animation, tmp_path):
    image = pytest.importorskip("PIL.Image")
    for part in ("student", "teacher"):
        ignorant().save(tmp_path / "shipped" / "stories" / part)
    animation("--steps", 3, "--teacher-steps", 5, "--length", 9, "--out", tmp_path / "x.gif")
    picture = image.open(tmp_path / "x.gif")
    assert picture.n_frames == 6
    assert picture.width <= 800


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "`stories` ships with didi, but is not in"),
        (["--out", "x.mp4"], "x.mp4: a trace is written as one of"),
    ],
)
def test_a_mistake_is_one_line(animation, tmp_path, monkeypatch, capsys, arguments, message):
    (tmp_path / "docs").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        animation(*arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
