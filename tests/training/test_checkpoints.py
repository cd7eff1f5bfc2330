import errno
import json
import shutil

import pytest
import torch
from safetensors.torch import save_file
from tests.kills import kills

from didi_instruct.data.files import AtomicFile
from didi_instruct.errors import UserError
from didi_instruct.training.checkpoints import Checkpoint, Checkpoints, damage
from didi_instruct.training.distributed import World

STATE = "state-00000-of-00001.safetensors"


@pytest.fixture
def store(tmp_path):
    return Checkpoints(tmp_path / "checkpoints", keep=2, world=World(torch.device("cpu")))


def state(value):
    return {"a": torch.full((3, 2), float(value)), "step": torch.tensor(float(value))}


def save(store, step):
    def write_model(folder):
        (folder / "x").write_text("the product")

    return store.save({"step": step}, state(step), write_model=write_model)


def names(store):
    return sorted(path.name for path in store.folder.iterdir())


def test_what_was_saved_is_loaded_and_old_ones_go(store):
    """Copies that people make are left alone."""
    first = save(store, 1)
    shutil.copytree(first, store.folder / "step-00000001.bak")
    for step in (2, 3):
        folder = save(store, step)
    assert names(store) == ["step-00000001.bak", "step-00000002", "step-00000003"]
    found, target = store.latest(warn=pytest.fail), state(0)
    found.fill(target)
    assert found.info == {"step": 3}
    assert all(torch.equal(target[name], tensor) for name, tensor in state(3).items())
    assert set(json.loads((folder / "manifest.json").read_text())["files"]) == {STATE, "x"}
    assert damage(folder) is None


@pytest.mark.parametrize(
    ("name", "change"),
    [
        (STATE, lambda data: data[:-5]),
        (STATE, lambda data: data[:-1] + bytes([data[-1] ^ 1])),
        (STATE, None),
        ("x", lambda data: b""),
        ("manifest.json", lambda data: b"{"),
        ("manifest.json", lambda data: b"[" * 100_000),
        ("manifest.json", lambda data: data.replace(b'"step": 2', b'"step": 7')),
        ("", lambda folder: folder.rename(folder.with_name("step-00000007"))),
    ],
)
def test_a_damaged_checkpoint_is_named_and_passed_over(store, name, change):
    save(store, 1)
    bad = save(store, 2)
    if not name:
        bad = change(bad)
    elif change is None:
        (bad / name).unlink()
    else:
        (bad / name).write_bytes(change((bad / name).read_bytes()))
    warnings = []
    assert store.latest(warn=warnings.append).info["step"] == 1
    assert len(warnings) == 1
    assert str(bad / name) in warnings[0]
    save(store, 3)
    assert names(store) == [f"damaged-{bad.name}", "step-00000001", "step-00000003"]
    for folder in store.steps():
        (folder / STATE).unlink()
    with pytest.raises(UserError, match="every checkpoint is damaged"):
        store.latest(warn=lambda text: None)


def test_a_kill_at_any_moment_of_a_save_leaves_a_whole_checkpoint(store, monkeypatch):
    """The newest is the old one, or the new one; the next save tidies up."""

    def prepare():
        shutil.rmtree(store.folder, ignore_errors=True)
        save(store, 1)
        save(store, 2)

    found = []
    for _ in kills(monkeypatch, prepare, lambda: save(store, 3)):
        found.append(store.latest(warn=lambda text: None).info["step"])
        save(store, 4)
        assert store.latest(warn=pytest.fail).info["step"] == 4
        assert not list(store.folder.glob(".partial-*"))
    assert found == sorted(found)
    assert set(found) == {2, 3}


def test_another_model_is_refused_before_anything_is_copied(store):
    save(store, 1)
    found = store.latest(warn=pytest.fail)
    target = {"a": torch.zeros(3, 3), "step": torch.zeros(())}
    with pytest.raises(UserError, match=r"`a` has shape \[3, 2\], but this model needs \[3, 3\]"):
        found.fill(target)
    with pytest.raises(UserError, match="1 names differ, first `b`"):
        found.fill(state(0) | {"b": torch.zeros(1)})
    assert target["step"] == 0


def test_shards_of_any_number_of_processes_are_put_together(tmp_path):
    """Files of two processes, with an uneven first axis and a replicated scalar."""
    whole = torch.arange(6.0).view(3, 2)
    first = {"a": whole[:2], "step": torch.tensor(7.0)}
    save_file(first, tmp_path / "state-00000-of-00002.safetensors")
    save_file({"a": whole[2:].contiguous()}, tmp_path / "state-00001-of-00002.safetensors")
    target = state(0)
    Checkpoint(tmp_path, {"step": 1}).fill(target)
    assert torch.equal(target["a"], whole)
    assert target["step"] == 7


def test_a_full_disk_is_one_line_and_leaves_no_debris(store, monkeypatch):
    save(store, 1)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(AtomicFile, "write", full)
        with pytest.raises(UserError, match="the disk is full"):
            save(store, 2)
        usage = shutil.disk_usage("/")._replace(free=10)
        patch.setattr(shutil, "disk_usage", lambda path: usage)
        with pytest.raises(UserError, match="free"):
            save(store, 2)
    assert names(store) == ["step-00000001"]
