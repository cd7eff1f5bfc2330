"""An unfinished folder: where its run stopped, and whether a command is the same as before."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from didi_instruct.data.corpus import Cursor
from didi_instruct.data.files import remove_temporaries, sha256_file
from didi_instruct.data.manifest import (
    MANIFEST_FILE,
    Manifest,
    Shard,
    SourceScan,
    Split,
    TokenizerInfo,
    read_json,
    write_json,
)
from didi_instruct.data.sources import Source
from didi_instruct.errors import Argument, UserError

PROGRESS_FILE = "progress.json"
_FORMAT = "didi-tokens-progress"
_VERSION = 1
_OURS = ("tokenizer.json", "tokenizer_config.json", "train-*.bin", "valid-*.bin")


@dataclass(slots=True)
class PrepareState:
    """What a run needs to go on after its last finished shard."""

    tokenizer: TokenizerInfo
    settings: dict[str, Any]
    sources: list[SourceScan]
    modified: list[int | None]
    """Modification times of the sources: where they are the same, nothing is read again."""
    split: Split | None = "train"
    """The split being written; None when only the manifest is missing."""
    cursor: Cursor = field(default_factory=Cursor)
    """The next piece to tokenise."""
    leftover: list[int] = field(default_factory=list)
    """Tokens of pieces before it that are in no finished shard."""
    shards: dict[Split, list[Shard]] = field(default_factory=lambda: {"train": [], "valid": []})
    dropped: dict[Split, int] = field(default_factory=lambda: {"train": 0, "valid": 0})
    long: dict[Split, int] = field(default_factory=lambda: {"train": 0, "valid": 0})
    """Documents before `cursor` that were too long for a row."""

    def write(self, folder: Path) -> None:
        """Record the state beside the shards."""
        content = {"format": _FORMAT, "version": _VERSION, "begun": True, **asdict(self)}
        write_json(folder / PROGRESS_FILE, content)

    @classmethod
    def read(cls, folder: Path) -> "PrepareState | None":
        """Read the state; None where the run had written nothing of worth yet."""
        return read_json(folder / PROGRESS_FILE, _FORMAT, _VERSION, cls._parse)

    @classmethod
    def _parse(cls, content: dict[str, Any]) -> "PrepareState | None":
        if not content["begun"]:
            return None
        return cls(
            tokenizer=TokenizerInfo(**content["tokenizer"]),
            settings=dict(content["settings"]),
            sources=[SourceScan(**source) for source in content["sources"]],
            modified=list(content["modified"]),
            split=content["split"],
            cursor=Cursor(**content["cursor"]),
            leftover=list(content["leftover"]),
            shards={
                split: [Shard(**shard) for shard in shards]
                for split, shards in content["shards"].items()
            },
            dropped=dict(content["dropped"]),
            long=dict(content.get("long", {"train": 0, "valid": 0})),  # absent in older runs
        )


def inspect_folder(folder: Path, overwrite: bool) -> Manifest | PrepareState | None:
    """Tell what `folder` holds: finished data, an unfinished run, or nothing to keep.

    A folder with anything else in it is refused, whatever `overwrite` says.
    """
    if not folder.exists():
        return None
    if not folder.is_dir():
        raise UserError("{}: is a file, but {} names a folder.", folder, Argument("out"))
    names = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    if names and not names & {MANIFEST_FILE, PROGRESS_FILE}:
        raise UserError(
            f"{folder}: has other files in it (`{min(names)}`, for one): choose a new folder."
        )
    try:
        if MANIFEST_FILE in names:
            return Manifest.read(folder)
        return PrepareState.read(folder) if PROGRESS_FILE in names else None
    except UserError:
        if overwrite and PROGRESS_FILE in names and MANIFEST_FILE not in names:
            return None  # a damaged record of an unfinished run: nothing to keep
        raise


def clear_folder(folder: Path) -> None:
    """Make `folder` an empty unfinished one. Killed at any point, it stays recognisable."""
    folder.mkdir(parents=True, exist_ok=True)
    marker = {"format": _FORMAT, "version": _VERSION, "begun": False}
    write_json(folder / PROGRESS_FILE, marker)
    (folder / MANIFEST_FILE).unlink(missing_ok=True)  # first: it vouches for the shards
    for pattern in _OURS:
        for path in folder.glob(pattern):
            path.unlink()
    remove_temporaries(folder)


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
    recorded: Sequence[SourceScan],
    sources: Sequence[Source],
    what: str,
    modified: Sequence[int | None] | None = None,
) -> None:
    """Refuse sources that are not those of the run before; name one that differs."""
    before, now = [scan.path for scan in recorded], [source.name for source in sources]
    if before != now:
        odd = min(set(before) ^ set(now), default=now[0])
        came = "is new" if odd not in before else "is gone" if odd not in now else "moved"
        raise _refusal(folder, what, f"source `{odd}` {came}")
    times = modified or [None] * len(recorded)
    for scan, source, time in zip(recorded, sources, times, strict=True):
        if source.path is None:
            continue
        same = scan.bytes == source.size
        if same and (time is None or time != source.path.stat().st_mtime_ns):
            same = sha256_file(source.path) == scan.sha256
        if not same:
            raise _refusal(folder, what, f"source `{source.name}` changed")


def check_shards(folder: Path, state: PrepareState, row_bytes: int) -> None:
    """Make sure that the shards an unfinished run had finished are still there."""
    for shard in (shard for shards in state.shards.values() for shard in shards):
        path = folder / shard.file
        if not path.is_file() or path.stat().st_size != shard.rows * row_bytes:
            raise UserError(
                "{}: is missing or has another size than when the unfinished run wrote it: start "
                "over ({}).",
                path,
                Argument("overwrite"),
            )


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
