"""A folder that appears whole or not at all."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from didi_instruct.data.files import sync_folder
from didi_instruct.errors import UserError
from didi_instruct.models.checkpoint import CONFIG


def refuse_full(folder: Path) -> None:
    """Refuse to write where something is already."""
    try:
        free = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    except OSError as error:
        raise _no_place(folder, error) from error
    if not free:
        full = "not empty" if folder.is_dir() else "a file"
        raise UserError(f"{folder} is {full}: choose another folder.")


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a hidden folder to fill, which becomes `folder`: one that is new, or empty.

    An empty one stays the folder it was (someone may stand in it, it may be a mount point or lead
    elsewhere by a link), and gets the files one after the other, config.json last.
    """
    refuse_full(folder)
    try:
        target = folder.resolve()
        exists = target.exists()
        name = f".{target.name}.{os.getpid()}.tmp"
        hidden = target / name if exists else target.with_name(name)
        shutil.rmtree(hidden, ignore_errors=True)
        hidden.mkdir(parents=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: a link to itself
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise _no_place(folder, error) from error
    try:
        yield hidden
        if exists:
            for path in sorted(hidden.iterdir(), key=lambda path: path.name == CONFIG):
                path.rename(target / path.name)
        else:
            hidden.rename(target)
        sync_folder(target if exists else target.parent)
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def _no_place(folder: Path, error: Exception) -> UserError:
    reason = getattr(error, "strerror", None) or "it is a link to itself"
    return UserError(f"{folder} cannot be written ({reason}): choose another folder.")
