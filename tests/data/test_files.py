"""Files appear whole or not at all."""

import errno
import hashlib
import os
from pathlib import Path

import pytest

from didi_instruct.data import files
from didi_instruct.errors import UserError


def test_write_atomic_replaces_the_content_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    files.write_atomic(path, b"old")
    files.write_atomic(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_keeps_the_old_content(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "a.json"
    files.write_atomic(path, b"old")

    def broken(descriptor: int) -> None:
        raise OSError(errno.EIO, "broken disk")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="broken disk"):
        files.write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_written_files_honour_the_umask(tmp_path: Path) -> None:
    files.write_atomic(tmp_path / "a", b"")
    (tmp_path / "b").write_bytes(b"")
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode


def test_remove_temporaries_takes_only_what_a_killed_writer_left(tmp_path: Path) -> None:
    files.write_atomic(tmp_path / "a.bin", b"x")
    files.AtomicFile(tmp_path / "b.bin").write(b"half")
    assert len(list(tmp_path.iterdir())) == 2
    files.remove_temporaries(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["a.bin"]


def test_sha256_file_is_the_hash_of_the_content(tmp_path: Path) -> None:
    content = bytes(range(256)) * 5000
    (tmp_path / "a").write_bytes(content)
    assert files.sha256_file(tmp_path / "a") == hashlib.sha256(content).hexdigest()


def test_require_space_names_what_is_needed_and_what_is_free(tmp_path: Path) -> None:
    files.require_space(tmp_path / "not" / "there", 1)
    with pytest.raises(UserError, match=r"not/there: needs about 1024.0 TiB, but .* free"):
        files.require_space(tmp_path / "not" / "there", 1 << 50)


def test_a_full_disk_is_one_clear_line_and_other_errors_stay(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="disk is full"), files.no_space_as_user_error(tmp_path):
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(PermissionError), files.no_space_as_user_error(tmp_path):
        raise PermissionError(errno.EACCES, "no")


def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name, what in (("folder", "a folder"), ("pipe", "a device or a pipe")):
        with pytest.raises(UserError, match=f"is {what}, which a file would replace"):
            files.write_atomic(tmp_path / name, b"new")
    assert (tmp_path / "folder").is_dir()
    assert (tmp_path / "pipe").is_fifo()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "pipe"]
