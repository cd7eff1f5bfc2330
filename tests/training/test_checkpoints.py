import errno
import json
import shutil
from pathlib import Path

import pytest
import torch

from didi_instruct.errors import UserError
from didi_instruct.training import checkpoints as module
from didi_instruct.training.checkpoints import Checkpoints, damage
from didi_instruct.training.distributed import World


@pytest.fixture
def store(tmp_path):
    return Checkpoints(tmp_path / "checkpoints", keep=2, world=World(torch.device("cpu")))


def state(value):
    return {"a": torch.full((3, 2), float(value)), "step": torch.tensor(float(value))}


def test_what_was_saved_is_loaded_and_old_ones_go(store):
    for step in (1, 2, 3):
        store.save({"step": step}, state(step))
    assert [p.name for p in store.steps()] == ["step-00000002", "step-00000003"]
    found = store.latest(warn=pytest.fail)
    target = state(0)
    found.fill(target)
    assert found.info == {"step": 3}
    assert torch.equal(target["a"], state(3)["a"])
    assert target["step"] == 3


@pytest.mark.parametrize("how", ["truncate", "flip", "remove", "manifest", "edit", "name"])
def test_a_damaged_checkpoint_is_named_and_passed_over(store, how):
    store.save({"step": 1}, state(1))
    bad = store.save({"step": 2}, state(2))
    file = bad / "state-00000-of-00001.safetensors"
    content = file.read_bytes()
    if how == "truncate":
        file.write_bytes(content[:-5])
    elif how == "flip":
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif how == "remove":
        file.unlink()
    elif how == "manifest":
        (bad / "manifest.json").write_text("{")
    elif how == "edit":
        text = (bad / "manifest.json").read_text()
        (bad / "manifest.json").write_text(text.replace('"step": 2', '"step": 7'))
    else:
        bad = bad.rename(bad.with_name("step-00000007"))
    warnings = []
    found = store.latest(warn=warnings.append)
    assert found.info["step"] == 1
    assert len(warnings) == 1
    assert str(bad) in warnings[0]
    assert [p.name for p in store.steps()] == ["step-00000001"]
    store.save({"step": 3}, state(3))
    assert [p.name for p in store.steps()] == ["step-00000001", "step-00000003"]
    assert bad.with_name(f"damaged-{bad.name}").is_dir()


def test_copies_that_people_make_are_left_alone(store):
    folder = store.save({"step": 1}, state(1))
    shutil.copytree(folder, folder.with_name("step-00000001.bak"))
    for step in (2, 3):
        store.save({"step": step}, state(step))
    assert store.latest(warn=pytest.fail).info["step"] == 3
    assert folder.with_name("step-00000001.bak").is_dir()


def test_only_damaged_checkpoints_is_an_error(store):
    bad = store.save({"step": 1}, state(1))
    (bad / "state-00000-of-00001.safetensors").unlink()
    with pytest.raises(UserError, match="every checkpoint is damaged"):
        store.latest(warn=lambda text: None)


@pytest.mark.parametrize("moment", ["write_tensors", "write_atomic", "rename"])
def test_a_kill_in_the_middle_of_a_save_leaves_the_last_good_one(store, monkeypatch, moment):
    """Whatever part of a save does not happen, the newest complete checkpoint is the old one."""
    store.save({"step": 1}, state(1))

    def killed(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(*((Path, "rename") if moment == "rename" else (module, moment)), killed)
        with pytest.raises(KeyboardInterrupt):
            store.save({"step": 2}, state(2))
    found = store.latest(warn=pytest.fail)
    assert found.info["step"] == 1
    store.save({"step": 2}, state(2))
    assert store.latest(warn=pytest.fail).info["step"] == 2
    assert not list(store.folder.glob(".partial-*"))


def test_another_model_is_refused_before_anything_is_copied(store):
    store.save({"step": 1}, state(1))
    found = store.latest(warn=pytest.fail)
    target = {"a": torch.zeros(3, 3), "step": torch.zeros(())}
    with pytest.raises(UserError, match=r"`a` has shape \[3, 2\], but this model needs \[3, 3\]"):
        found.fill(target)
    with pytest.raises(UserError, match="1 names differ, first `b`"):
        found.fill(state(0) | {"b": torch.zeros(1)})
    assert target["step"] == 0


def test_shards_of_any_number_of_processes_are_put_together(store):
    """Files of two processes, with an uneven first axis and a replicated scalar."""
    folder = store.save({"step": 1}, state(1))
    from safetensors.torch import save_file

    (folder / "state-00000-of-00001.safetensors").unlink()
    whole = torch.arange(6.0).view(3, 2)
    save_file(
        {"a": whole[:2], "step": torch.tensor(7.0)}, folder / "state-00000-of-00002.safetensors"
    )
    save_file({"a": whole[2:].contiguous()}, folder / "state-00001-of-00002.safetensors")
    target = state(0)
    module.Checkpoint(folder, {"step": 1}).fill(target)
    assert torch.equal(target["a"], whole)
    assert target["step"] == 7


def test_a_full_disk_is_said_before_writing(store, monkeypatch):
    usage = shutil.disk_usage("/")._replace(free=10)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(UserError, match="free"):
        store.save({"step": 1}, state(1))
    assert store.steps() == []


def test_a_disk_that_fills_while_writing_is_one_line_and_leaves_no_debris(store, monkeypatch):
    store.save({"step": 1}, state(1))

    def full(self, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module.AtomicFile, "write", full)
    with pytest.raises(UserError, match="the disk is full"):
        store.save({"step": 2}, state(2))
    assert [p.name for p in store.folder.iterdir()] == ["step-00000001"]


def test_the_manifest_lists_every_file(store):
    folder = store.save(
        {"step": 1}, state(1), write_model=lambda f: (f / "x").write_text("hi") and None
    )
    files = json.loads((folder / "manifest.json").read_text())["files"]
    assert set(files) == {"state-00000-of-00001.safetensors", "x"}
    assert damage(folder) is None
