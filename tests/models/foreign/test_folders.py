import os
from pathlib import Path

import pytest

from didi_instruct.errors import UserError
from didi_instruct.models.foreign.folders import new_folder


def fill(folder, failure=None):
    with new_folder(folder) as hidden:
        (hidden / "config.json").write_text("{}")
        if failure is not None:
            raise failure
        (hidden / "model").write_text("1")


def content(folder):
    return {path.name: path.read_text() for path in folder.iterdir()}


WANTED = {"config.json": "{}", "model": "1"}


def test_where_one_stands(tmp_path, monkeypatch):
    """`.` is filled, and stays the folder that the shell is in."""
    (tmp_path / "here").mkdir()
    before = (tmp_path / "here").stat().st_ino
    monkeypatch.chdir(tmp_path / "here")
    fill(Path())
    assert content(tmp_path / "here") == WANTED
    assert set(os.listdir()) == set(WANTED)  # noqa: PTH208 (of the folder itself, not by its name)
    assert (tmp_path / "here").stat().st_ino == before
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


def test_a_link_leads_to_the_folder(tmp_path):
    (tmp_path / "there").mkdir()
    for name, target in (("empty", tmp_path / "there"), ("new", tmp_path / "nowhere")):
        (tmp_path / name).symlink_to(target)
        fill(tmp_path / name)
        assert (tmp_path / name).is_symlink()
        assert content(target) == WANTED


def test_new_below_new(tmp_path):
    fill(tmp_path / "a" / "b")
    assert content(tmp_path / "a" / "b") == WANTED
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"]


@pytest.mark.parametrize("exists", [False, True])
def test_a_failure_leaves_nothing(tmp_path, exists):
    if exists:
        (tmp_path / "x").mkdir()
    with pytest.raises(KeyError):
        fill(tmp_path / "x", KeyError())
    assert list(tmp_path.rglob("*")) == ([tmp_path / "x"] if exists else [])


def test_places_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for place, message in (
        (tmp_path, "is not empty"),
        (tmp_path / "file", "is a file"),
        (tmp_path / "file" / "x", "cannot be written"),
        (tmp_path / "loop", "cannot be written"),
    ):
        with pytest.raises(UserError, match=message):
            fill(place)
