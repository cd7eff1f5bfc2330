"""A bank of the teacher's samples: drawn once with many steps, kept on disk, read many times.

`bank.json` has the settings and is written first; `rows-00000.npy` and so on hold
them. A shard is there whole or not at all, so a drawing that was stopped goes on with those that
are missing. `drawn.json` has the seconds it took.
"""

import hashlib
import io
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from didi_instruct.data.dataset import TokenDataset
from didi_instruct.data.files import (
    no_space_as_user_error,
    one_at_a_time,
    require_space,
    write_atomic,
)
from didi_instruct.data.manifest import write_json
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import UserError
from didi_instruct.training.distributed import World

BANK_FILE, DRAWN = "bank.json", "drawn.json"
ROWS_PER_SHARD = 1024
DRAW_ROWS = 256
"""Rows of one call of `draw`, after which the progress moves."""

_FORMAT = "didi-bank"
_VERSION = 1
_REMEDY = "choose another reference.bank folder, or delete it"
_WORDS = {"num_tokens": "vocabulary size", "prompt": "prompt length"}

Draw = Callable[[int, int], Tensor]
"""(first, count) -> (count, length), int64, on the CPU; row i depends on i alone."""
Progress = Callable[[int, int], None]
"""Called with (rows done, rows in all)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BankSettings:
    """Settings that determine the rows of a bank: equal settings, equal rows."""

    teacher: str
    """Fingerprint of the teacher's weights."""
    steps: int
    """Of the teacher's sampler."""
    rows: int
    length: int
    num_tokens: int
    """Real tokens, V: no id of a row is V or more."""
    seed: int
    prompt: int = 0
    """First tokens of each row that were given, from `prompts`."""
    prompts: str = ""
    """Fingerprint of the data that the prompts come from."""
    lengths: str = ""
    """Where texts have windows of their own: fingerprint of how they end and how long they are."""

    def to_json(self) -> dict[str, Any]:
        """The settings by name, as bank.json keeps them; older files have no lengths."""
        return {n: v for n, v in asdict(self).items() if n != "lengths" or v}

    @property
    def dtype(self) -> np.dtype[Any]:
        """Smallest little-endian type that holds every id."""
        return np.dtype("<u2" if self.num_tokens <= 1 << 16 else "<u4")


@dataclass(frozen=True, slots=True)
class _Shard:
    """A file of the bank and the rows that are wanted of it."""

    index: int
    path: Path
    first: int
    rows: int


def open_bank(
    folder: Path,
    settings: BankSettings,
    draw: Draw,
    tokenizer: Tokenizer,
    *,
    world: World,
    seed: int = 0,
    progress: Progress | None = None,
) -> TokenDataset:
    """Return the bank in `folder`, after drawing what is missing of it; all processes call.

    A bank may have more rows than `settings` asks for: the first ones are taken. If it has fewer,
    it grows. `seed` is of the order in which the rows are read. `progress` is called only if
    something is drawn; of several processes, each takes its own share to stand for all. Runs that
    share a bank draw it once: the others wait.
    """
    assert settings.rows > 0, "a bank has rows"
    with one_at_a_time(folder.parent) if world.size == 1 else nullcontext():
        return _open_bank(folder, settings, draw, tokenizer, world, seed, progress)


def _open_bank(
    folder: Path,
    settings: BankSettings,
    draw: Draw,
    tokenizer: Tokenizer,
    world: World,
    seed: int,
    progress: Progress | None,
) -> TokenDataset:
    # Every process looks before any writes: all see the same, so one that refuses is not alone.
    recorded = _recorded_rows(folder, settings)
    row_bytes = settings.length * settings.dtype.itemsize
    there = sum(path.stat().st_size for path in folder.glob("rows-*.npy"))
    require_space(folder, max(0, settings.rows * row_bytes - there))  # before shards are listed
    shards = _shards(folder, settings.rows)
    missing = [shard for shard in shards if _mapped(shard, settings) is None]
    require_space(folder, _rows(missing) * row_bytes)
    world.wait()
    if world.is_main and recorded < settings.rows:
        with no_space_as_user_error(folder):
            folder.mkdir(parents=True, exist_ok=True)
            content = {"format": _FORMAT, "version": _VERSION, **settings.to_json()}
            write_json(folder / BANK_FILE, content)
    world.wait()
    started = time.monotonic()
    if missing:
        _draw_missing(missing, settings, draw, world, progress)
    world.wait()
    if missing and world.is_main:
        seconds = (drawing_seconds(folder) or 0.0) + time.monotonic() - started
        write_json(folder / DRAWN, {"seconds": seconds})
    return _dataset(folder, shards, settings, tokenizer, seed)


def drawing_seconds(folder: Path) -> float | None:
    """Seconds that drawing a bank took, all in all; None where they are not recorded.

    Of a drawing that was stopped, what it had drawn is in the bank and its seconds are not.
    """
    try:
        return float(json.loads((folder / DRAWN).read_bytes())["seconds"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _recorded_rows(folder: Path, settings: BankSettings) -> int:
    """Rows that were asked of the bank in `folder`, 0 where none is; refuse any other bank."""
    path = folder / BANK_FILE
    if not path.exists():
        _refuse_foreign(folder)
        return 0
    found = _read(path, asdict(settings))
    for name, now in asdict(settings).items():
        if name != "rows" and found[name] != now:
            raise UserError(f"{folder} {_difference(name, found[name], now)}: {_REMEDY}.")
    return int(found["rows"])


def _refuse_foreign(folder: Path) -> None:
    """Refuse to begin a bank among files that are not its own."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise UserError(f"{folder} is a file, but reference.bank names a folder: choose another.")
    # A hidden file may be what a writer of bank.json left when it was killed.
    names = [path.name for path in folder.iterdir() if not path.name.startswith(".")]
    if names:
        raise UserError(
            f"{folder} is not a teacher bank: it has no {BANK_FILE}, but other files "
            f"(`{min(names)}`, for one): choose another reference.bank folder."
        )


def _read(path: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    """Read bank.json, whose settings must have the names and types of the `wanted` ones."""
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}).") from error
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}): {_REMEDY}.") from error
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise UserError(f"{path} does not describe a teacher bank: {_REMEDY}.")
    if content.get("version") != _VERSION:
        raise UserError(
            f"{path} has version {content.get('version')} of the format, but only {_VERSION} is "
            f"known: {_REMEDY}."
        )
    content.setdefault("lengths", "")
    for name, value in wanted.items():
        if type(content.get(name)) is not type(value):
            raise UserError(f"{path} is damaged (`{name}` is missing or odd): {_REMEDY}.")
    return content


def _difference(name: str, before: Any, now: Any) -> str:
    """Say how a bank differs from the one that is asked for."""
    if name == "teacher":
        return f"holds samples of another teacher ({_short(before)}, now {_short(now)})"
    if name == "prompts":
        return f"was drawn with prompts of other data ({_short(before)}, now {_short(now)})"
    if name == "lengths":
        return f"holds texts of other lengths ({_short(before)}, now {_short(now)})"
    return f"was drawn with {_WORDS.get(name, name)} {before}, now it is {now}"


def _short(fingerprint: str) -> str:
    return f"{fingerprint[:8]}…" if fingerprint else "none"


def _shards(folder: Path, rows: int) -> list[_Shard]:
    """Files that hold the first `rows` rows."""
    return [
        _Shard(index, folder / f"rows-{index:05d}.npy", first, min(ROWS_PER_SHARD, rows - first))
        for index, first in enumerate(range(0, rows, ROWS_PER_SHARD))
    ]


def _rows(shards: Sequence[_Shard]) -> int:
    return sum(shard.rows for shard in shards)


def _mapped(shard: _Shard, settings: BankSettings) -> np.ndarray | None:
    """Map the wanted rows of a shard into memory; None if it is missing, damaged or too short."""
    try:
        rows: np.ndarray = np.lib.format.open_memmap(shard.path, mode="r")
    except Exception:  # a damaged header can fail in any way
        return None
    fits = rows.ndim == 2 and shard.rows <= len(rows) <= ROWS_PER_SHARD
    if not fits or rows.shape[1] != settings.length or rows.dtype != settings.dtype:
        return None
    return rows[: shard.rows]


def _draw_missing(
    missing: Sequence[_Shard],
    settings: BankSettings,
    draw: Draw,
    world: World,
    progress: Progress | None,
) -> None:
    """Draw and write this process's share of the missing shards."""
    own = [shard for shard in missing if shard.index % world.size == world.rank]
    before, drawn = settings.rows - _rows(missing), 0
    if progress is not None:
        progress(before, settings.rows)
    for shard in own:
        pieces = []
        for piece in _pieces(shard, settings, draw):
            pieces.append(piece)
            drawn += len(piece)
            if progress is not None:
                progress(before + _rows(missing) * drawn // _rows(own), settings.rows)
        buffer = io.BytesIO()
        np.save(buffer, np.concatenate(pieces), allow_pickle=False)
        with no_space_as_user_error(shard.path.parent):
            write_atomic(shard.path, buffer.getvalue())


def _pieces(shard: _Shard, settings: BankSettings, draw: Draw) -> Iterator[np.ndarray]:
    """Draw a shard's rows, a few at a time."""
    end = shard.first + shard.rows
    for first in range(shard.first, end, DRAW_ROWS):
        count = min(DRAW_ROWS, end - first)
        rows = draw(first, count)
        assert rows.shape == (count, settings.length), f"draw gave {tuple(rows.shape)}"
        low, high = int(rows.min()), int(rows.max())
        assert 0 <= low <= high < settings.num_tokens, (
            f"the teacher's sampler left ids {low} to {high} in rows {first} to "
            f"{first + count - 1}, but real ones are below {settings.num_tokens}"
        )
        yield rows.numpy().astype(settings.dtype)


def _dataset(
    folder: Path,
    shards: Sequence[_Shard],
    settings: BankSettings,
    tokenizer: Tokenizer,
    seed: int,
) -> TokenDataset:
    """Open the shards, which are all there now."""
    arrays = []
    for shard in shards:
        rows = _mapped(shard, settings)
        if rows is None:
            raise UserError(
                f"{shard.path} was drawn, but cannot be read here: give all processes one "
                "reference.bank folder that they share."
            )
        arrays.append(rows)
    identity = json.dumps([_FORMAT, _VERSION, seed, settings.to_json()])
    fingerprint = hashlib.sha256(identity.encode()).hexdigest()[:16]
    data = TokenDataset(arrays, tokenizer, seed, str(folder), fingerprint)
    data.num_tokens = settings.num_tokens  # a teacher's vocabulary may be larger than its tokenizer
    return data
