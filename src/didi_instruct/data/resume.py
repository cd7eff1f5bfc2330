"""An unfinished preparation: how far it has come, and whether a command is the same as before."""

import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from didi_instruct.data.files import remove_temporaries, sha256_file, sync_folder
from didi_instruct.data.manifest import (
    MANIFEST_FILE,
    Manifest,
    SourceScan,
    TokenizerInfo,
    read_json,
    write_json,
)
from didi_instruct.data.sources import Source
from didi_instruct.errors import Argument, UserError

WORK = "unfinished"
"""Folder, inside that of the data, of what is not finished."""
PROGRESS_FILE = f"{WORK}/progress.json"
_FORMAT = "didi-tokens-progress"
_VERSION = 2


@dataclass(slots=True)
class PrepareState:
    """How far a run has come: it goes on behind the pieces that are recorded here."""

    settings: dict[str, Any]
    tokenizer: TokenizerInfo
    sources: list[tuple[str, int, int | None]]
    """Name, size and modification time of each source when the run began."""
    scans: list[SourceScan] = field(default_factory=list)
    """Sources that were read to their end."""
    skip: int = 0
    """Pieces of the next source whose tokens are written."""
    hashes: list[str] = field(default_factory=list)
    """SHA-256 of each full shard."""
    manifest: Manifest | None = None
    """The finished data, of which only the place is not the final one."""

    @property
    def pieces(self) -> int:
        """Pieces of the corpus whose tokens are written."""
        return sum(scan.pieces for scan in self.scans) + self.skip

    def write(self, folder: Path) -> None:
        """Record the state beside the shards."""
        content = {"format": _FORMAT, "version": _VERSION, **asdict(self)}
        write_json(folder / PROGRESS_FILE, content)

    @classmethod
    def read(cls, folder: Path) -> "PrepareState":
        """Read the state."""
        return read_json(folder / PROGRESS_FILE, _FORMAT, _VERSION, cls._parse)

    @classmethod
    def _parse(cls, content: dict[str, Any]) -> "PrepareState":
        finished = content["manifest"]
        return cls(
            settings=dict(content["settings"]),
            tokenizer=TokenizerInfo(**content["tokenizer"]),
            sources=[(str(name), size, modified) for name, size, modified in content["sources"]],
            scans=[SourceScan(**scan) for scan in content["scans"]],
            skip=int(content["skip"]),
            hashes=list(content["hashes"]),
            manifest=Manifest.parse(finished) if finished else None,
        )


class PieceEnds:
    """A file with a line of numbers for each piece: documents, tokens and long documents so far.

    Where a split begins is known only when the corpus has been read, and this says at which token.
    """

    def __init__(self, path: Path, pieces: int = 0) -> None:
        """Open the file, cut back to the first `pieces` pieces."""
        self._path = path
        size = pieces * 3 * 8
        if pieces and (not path.is_file() or path.stat().st_size < size):
            raise UserError(
                "{}: is missing or damaged: start over ({}).", path, Argument("overwrite")
            )
        self._file = path.open("r+b" if pieces else "wb")
        self._file.truncate(size)
        self._file.seek(size)

    def add(self, ends: np.ndarray) -> None:
        """Append the numbers of more pieces: (pieces, 3)."""
        self._file.write(np.ascontiguousarray(ends, "<i8").data)

    def flush(self) -> None:
        """Put them on disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()

    def read(self) -> np.ndarray:
        """Return all of them, (pieces, 3), memory-mapped."""
        self._file.flush()
        if not self._path.stat().st_size:
            return np.empty((0, 3), "<i8")
        return np.memmap(self._path, "<i8", mode="r").reshape(-1, 3)


def inspect_folder(folder: Path, overwrite: bool) -> Manifest | PrepareState | None:
    """Tell what `folder` holds: an unfinished run, finished data, or nothing to keep.

    A folder with anything else in it is refused, whatever `overwrite` says.
    """
    if not folder.exists():
        return None
    if not folder.is_dir():
        raise UserError("{}: is a file, but {} names a folder.", folder, Argument("out"))
    names = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    if names and not names & {MANIFEST_FILE, WORK}:
        raise UserError(
            f"{folder}: has other files in it (`{min(names)}`, for one): choose a new folder."
        )
    if (folder / PROGRESS_FILE).is_file() and not overwrite:
        return PrepareState.read(folder)
    return Manifest.read(folder) if MANIFEST_FILE in names else None


def begin_work(folder: Path) -> Path:
    """Make an empty folder for work; finished data in `folder` stay until the new are complete."""
    discard_work(folder)
    (folder / WORK).mkdir(parents=True)
    return folder / WORK


def discard_work(folder: Path) -> None:
    """Remove unfinished work."""
    if (folder / WORK).is_dir():
        (folder / PROGRESS_FILE).unlink(missing_ok=True)  # first: it vouches for the rest
        shutil.rmtree(folder / WORK)


def publish(folder: Path, manifest: Manifest) -> None:
    """Put finished files in their places; killed at any point, it can be done again."""
    work = folder / WORK
    remove_temporaries(folder)
    (folder / MANIFEST_FILE).unlink(missing_ok=True)  # first: it vouches for the shards
    itemsize = np.dtype(manifest.tokenizer.dtype).itemsize
    wanted = {"tokenizer.json", "tokenizer_config.json"}
    for shard in (shard for split in manifest.splits.values() for shard in split.shards):
        wanted.add(shard.file)
        if (work / shard.file).is_file():
            size = shard.rows * manifest.length * itemsize
            os.truncate(work / shard.file, size)
    for name in wanted:
        if (work / name).is_file():
            (work / name).replace(folder / name)
    for pattern in ("train-*.bin", "valid-*.bin"):
        for path in folder.glob(pattern):
            if path.name not in wanted:
                path.unlink()
    sync_folder(folder)
    manifest.write(folder)
    discard_work(folder)


def check_settings(folder: Path, recorded: dict[str, Any], now: dict[str, Any], what: str) -> None:
    """Refuse to mix two settings in one folder; name those that differ."""
    keys = [key for key in {**recorded, **now} if recorded.get(key) != now.get(key)]
    if keys:
        named = ", ".join(
            f"{key} was {_said(recorded.get(key))}, is {_said(now.get(key))}" for key in keys
        )
        raise _refusal(folder, what, named)


def check_sources(
    folder: Path,
    what: str,
    sources: Sequence[Source],
    scans: Sequence[SourceScan],
    begun: Sequence[tuple[str, int, int | None]] = (),
) -> None:
    """Refuse sources that are not those of the run before; name one that differs.

    `begun` tells those of an unfinished run, of which `scans` has only the ones that were read.
    """
    before = [name for name, *_ in begun] or [scan.path for scan in scans]
    now = [source.name for source in sources]
    if before != now:
        odd = min(set(before) ^ set(now), default=now[0])
        came = "is new" if odd not in before else "is gone" if odd not in now else "moved"
        raise _refusal(folder, what, f"source `{odd}` {came}")
    read = {scan.path: scan for scan in scans}
    for index, source in enumerate(sources):
        if source.path is None or (begun and begun[index][1:] == (source.size, source.modified)):
            continue
        scan = read.get(source.name)  # of a file that was not read to its end there is no hash
        same = scan is not None and scan.bytes == source.size
        if not same or scan is None or sha256_file(source.path) != scan.sha256:
            raise _refusal(folder, what, f"source `{source.name}` changed")


def _refusal(folder: Path, what: str, difference: str) -> UserError:
    return UserError(
        "{}: holds {} ({}): repeat the command it was made with, choose another {}, or start over "
        "({}).",
        folder,
        what,
        difference,
        Argument("out"),
        Argument("overwrite"),
    )


def _said(value: object) -> str:
    """Write a setting as one would say it; a hash is long."""
    text = "the default" if value is None else str(value)
    return text if len(text) <= 40 else f"{text[:19]}…"
