"""Writing files so that a crash, a full disk or Ctrl-C never leaves half of one behind."""

import contextlib
import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from didi_instruct.errors import UserError

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class AtomicFile:
    """A file that appears under its name, whole and on disk, only when `commit` is called."""

    def __init__(self, path: Path) -> None:
        refuse_target(path)
        self.path = path
        # The process id keeps two writers of one file apart; open() honours the umask, which
        # tempfile would not.
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        self._file = self._temporary.open("wb")

    def write(self, data: bytes | memoryview) -> None:
        """Append `data`."""
        self._file.write(data)

    def commit(self) -> None:
        """Put the file on disk and give it its name, replacing what had that name."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._temporary.replace(self.path)
        sync_folder(self.path.parent)

    def discard(self) -> None:
        """Forget what was written; harmless after `commit`."""
        with contextlib.suppress(OSError):  # closing flushes, which a full disk refuses
            self._file.close()
        self._temporary.unlink(missing_ok=True)


def refuse_target(path: Path) -> None:
    """Refuse to replace what is no file: a folder, a device, a pipe."""
    if path.exists() and not path.is_file():
        what = "a folder" if path.is_dir() else "a device or a pipe"
        raise UserError(f"{path} is {what}, which a file would replace: choose another name.")


def write_atomic(path: Path, data: bytes) -> None:
    """Write `data` to `path`: afterwards it is there whole, or what was there before still is."""
    file = AtomicFile(path)
    try:
        file.write(data)
        file.commit()
    finally:
        file.discard()


def remove_temporaries(folder: Path) -> None:
    """Remove the temporary files that killed writers left in `folder`."""
    for path in folder.glob(".*.tmp"):
        path.unlink(missing_ok=True)


def sha256_file(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's content, read in blocks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def require_space(folder: Path, num_bytes: int) -> None:
    """Refuse to start writing `num_bytes` below `folder` (it may not exist yet) without room."""
    existing = next(
        place for place in (folder.absolute(), *folder.absolute().parents) if place.exists()
    )
    free = shutil.disk_usage(existing).free
    if free < num_bytes:
        raise UserError(
            f"{folder}: needs about {_readable(num_bytes)}, but the disk has {_readable(free)} "
            "free: make room or choose another folder."
        )


@contextlib.contextmanager
def no_space_as_user_error(folder: Path) -> Iterator[None]:
    """Turn a full disk (or quota) met while writing to `folder` into one clear line."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_SPACE:
            raise
        raise UserError(
            f"{folder}: the disk is full. Make room and run the same command again, "
            "or choose another folder."
        ) from error


def _readable(num_bytes: int) -> str:
    size = float(num_bytes)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


@contextlib.contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Let one process of a machine in at a time; the others wait.

    Where there is nothing to lock, such as a folder that is not there, all come in at once.
    """
    try:
        import fcntl

        place = os.open(folder, os.O_RDONLY)
    except (ImportError, OSError):
        yield
        return
    try:
        with contextlib.suppress(OSError):  # some network disks have no locks
            fcntl.flock(place, fcntl.LOCK_EX)
        yield
    finally:
        os.close(place)


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Let one process of a machine at a time make the file `path`; the others wait.

    The lock is a hidden file beside it, removed afterwards, so whoever waited has to look again
    whether `path` is there.
    """
    lock = path.with_name(f".{path.name}.lock")
    lock.touch()
    try:
        with one_at_a_time(lock):
            yield
    finally:
        lock.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Make a rename durable, where the platform can open a folder at all."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
