"""A bank of the teacher's samples: drawn once with many steps, kept on disk, read many times.

`bank.json` has the settings and is written first; `rows-00000.npy` and so on have the rows, each
file whole or not at all, so a drawing that was stopped goes on with the files that are missing.
`drawn.json` has the seconds that it took.
"""

import hashlib
import io
import json
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from didi_instruct.config.distill import DistillConfig
from didi_instruct.config.model import ModelConfig
from didi_instruct.data import files
from didi_instruct.data.dataset import TokenDataset, TokenSource
from didi_instruct.data.manifest import write_json
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.distillation.rollout import References, Starts
from didi_instruct.distillation.run import Teacher
from didi_instruct.errors import UserError
from didi_instruct.models.network import window_of
from didi_instruct.process.schedule import make_schedule
from didi_instruct.sampling.ancestral import ancestral
from didi_instruct.sampling.denoiser import network_denoiser
from didi_instruct.sampling.draw import DrawOptions, Noise
from didi_instruct.sampling.state import PAD, Canvas, State
from didi_instruct.seeding import mix
from didi_instruct.training.distributed import World, uses_bf16
from didi_instruct.training.run_dir import Run

BANK_FILE, DRAWN = "bank.json", "drawn.json"
ROWS_PER_SHARD = 1024
DRAW_ROWS = 256  # rows of one call of `draw`, after which the progress moves

_FORMAT, _VERSION = "didi-bank", 1
_REMEDY = "choose another reference.bank folder, or delete it"
_OTHER_FINGERPRINT = {
    "teacher": "holds samples of another teacher",
    "prompts": "was drawn with prompts of other data",
    "lengths": "holds texts of other lengths",
}
_WORDS = {"num_tokens": "vocabulary size", "prompt": "prompt length"}

Draw = Callable[[int, int], Tensor]
"""(first, count) -> (count, length), int64, on the CPU; row i depends on i alone."""
Progress = Callable[[int, int], None]
"""Called with (rows done, rows in all)."""
BankBar = Callable[[], Any]
"""Opens a progress display (`Progress`) for as long as a bank is being drawn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BankSettings:
    """Settings that determine the rows of a bank: equal settings, equal rows."""

    teacher: str  # fingerprint of its weights
    steps: int  # of the teacher's sampler
    rows: int
    length: int
    num_tokens: int  # V: all ids are below
    seed: int
    prompt: int = 0  # first tokens of each row that were given
    prompts: str = ""  # fingerprint of the data that they come from
    lengths: str = ""  # fingerprint of the law of lengths, if texts have windows of their own

    def to_json(self) -> dict[str, Any]:
        """Return the settings by name, as bank.json keeps them; older files have no lengths."""
        return {n: v for n, v in asdict(self).items() if n != "lengths" or v}

    @property
    def dtype(self) -> np.dtype[Any]:
        """Smallest little-endian type that holds every id."""
        return np.dtype("<u2" if self.num_tokens <= 1 << 16 else "<u4")


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

    A bank of more rows than `settings` asks for gives the first ones; one of fewer grows. `seed`
    orders the rows for reading. `progress` is called only if something is drawn; each of several
    processes takes its own share to stand for all. Runs that share a bank draw it once: the others
    wait.
    """
    with files.one_at_a_time(folder.parent) if world.size == 1 else nullcontext():
        # Every process looks before any writes: all see the same, so one that refuses is not alone.
        recorded = _recorded_rows(folder, settings)
        there = sum(path.stat().st_size for path in folder.glob("rows-*.npy"))
        row_bytes = settings.length * settings.dtype.itemsize
        files.require_space(folder, max(0, settings.rows * row_bytes - there))
        shards = {
            folder / f"rows-{number:05d}.npy": range(settings.rows)[first : first + ROWS_PER_SHARD]
            for number, first in enumerate(range(0, settings.rows, ROWS_PER_SHARD))
        }
        missing = {p: rows for p, rows in shards.items() if _mapped(p, rows, settings) is None}
        world.wait()
        if world.is_main and recorded < settings.rows:
            with files.no_space_as_user_error(folder):
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
        arrays = []
        for path, rows in shards.items():
            if (array := _mapped(path, rows, settings)) is None:
                raise UserError(
                    f"{path} was drawn, but cannot be read here: give all processes one "
                    "reference.bank folder that they share."
                )
            arrays.append(array)
    identity = json.dumps([_FORMAT, _VERSION, seed, settings.to_json()])
    fingerprint = hashlib.sha256(identity.encode()).hexdigest()[:16]
    data = TokenDataset(arrays, tokenizer, seed, str(folder), fingerprint)
    data.num_tokens = settings.num_tokens  # a teacher's vocabulary may be larger than its tokenizer
    return data


def drawing_seconds(folder: Path) -> float | None:
    """Return the seconds that drawing a bank took; None where they are not recorded.

    Those of a drawing that was stopped are not in, although its rows are.
    """
    try:
        return float(json.loads((folder / DRAWN).read_bytes())["seconds"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _recorded_rows(folder: Path, settings: BankSettings) -> int:
    """Return the rows asked of the bank in `folder`, 0 if there is none; refuse another bank."""
    if not (folder / BANK_FILE).exists():
        _refuse_foreign(folder)
        return 0
    found = _read(folder / BANK_FILE, settings)
    for name, now in asdict(settings).items():
        before = found[name]
        if name == "rows" or before == now:
            continue
        if name in _OTHER_FINGERPRINT:
            short = [f"{each[:8]}…" if each else "none" for each in (before, now)]
            difference = f"{_OTHER_FINGERPRINT[name]} ({short[0]}, now {short[1]})"
        else:
            difference = f"was drawn with {_WORDS.get(name, name)} {before}, now it is {now}"
        raise UserError(f"{folder} {difference}: {_REMEDY}.")
    return int(found["rows"])


def _refuse_foreign(folder: Path) -> None:
    """Refuse to begin a bank among files that are not its own."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file, but reference.bank names a folder: choose another.")
    # A hidden file may be what a writer of bank.json left when it was killed.
    if names := [path.name for path in folder.glob("[!.]*")]:
        raise UserError(
            f"{folder} is not a teacher bank: it has no {BANK_FILE}, but other files "
            f"(`{min(names)}`, for one): choose another reference.bank folder."
        )


def _read(path: Path, wanted: BankSettings) -> dict[str, Any]:
    """Read bank.json, whose settings must have the types of the `wanted` ones."""
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
    for name, value in asdict(wanted).items():
        if type(content.get(name)) is not type(value):
            raise UserError(f"{path} is damaged (`{name}` is missing or odd): {_REMEDY}.")
    return content


def _mapped(path: Path, rows: range, settings: BankSettings) -> np.ndarray | None:
    """Map rows of a shard into memory; None if it is missing, damaged or too short."""
    try:
        array: np.ndarray = np.lib.format.open_memmap(path, mode="r")
    except Exception:  # a damaged header can fail in any way
        return None
    alike = array.ndim == 2 and array.shape[1] == settings.length and array.dtype == settings.dtype
    return array[: len(rows)] if alike and len(rows) <= len(array) <= ROWS_PER_SHARD else None


def _draw_missing(
    missing: Mapping[Path, range],
    settings: BankSettings,
    draw: Draw,
    world: World,
    progress: Progress | None,
) -> None:
    """Draw and write this process's share of the missing shards."""
    own = dict(list(missing.items())[world.rank :: world.size])
    total, own_total = (sum(map(len, shards.values())) for shards in (missing, own))
    before, drawn = settings.rows - total, 0
    if progress is not None:
        progress(before, settings.rows)
    for path, rows in own.items():
        pieces = []
        for first in range(rows.start, rows.stop, DRAW_ROWS):
            piece = draw(first, min(DRAW_ROWS, rows.stop - first))
            low, high = int(piece.min()), int(piece.max())
            assert 0 <= low <= high < settings.num_tokens, (
                f"the teacher's sampler left ids {low} to {high} in rows {first} to "
                f"{first + len(piece) - 1}, but real ones are below {settings.num_tokens}"
            )
            pieces.append(piece.numpy().astype(settings.dtype))
            drawn += len(piece)
            if progress is not None:
                progress(before + total * drawn // own_total, settings.rows)
        buffer = io.BytesIO()
        np.save(buffer, np.concatenate(pieces), allow_pickle=False)
        with files.no_space_as_user_error(path.parent):
            files.write_atomic(path, buffer.getvalue())


def teacher_bank(
    run: Run,
    config: DistillConfig,
    teacher: Teacher,
    data: TokenSource | None,
    progress: BankBar = nullcontext,
) -> References:
    """Rows of a run's bank, in its folder or that of the settings; what is missing is drawn."""
    model, reference, device = teacher.network.config, config.reference, run.world.device
    length = window_of(teacher.network) if data is None else data.length
    padded = bool(config.prompts.source)  # which the file has as an id behind all others
    given = length - config.prompts.length if padded else config.prompt
    settings = BankSettings(
        teacher=teacher.fingerprint,
        steps=reference.steps,
        rows=reference.rows,
        length=length,
        num_tokens=model.num_tokens + padded,
        seed=reference.seed,
        prompt=given,
        prompts=data.fingerprint if data is not None and config.continues else "",
        lengths=_law_of(model),
    )
    schedule = make_schedule(model.schedule)
    denoiser = network_denoiser(teacher.network, schedule)
    seed, bf16 = mix(reference.seed, "bank"), uses_bf16(config.train, device)
    starts = Starts(model, length, given)
    if teacher.tokenizer is None:
        raise UserError("The teacher has no tokenizer: use reference.source=online or data.")

    def draw_pass(first: int, count: int) -> Tensor:
        indices, prompts = torch.arange(first, first + count), None
        if config.continues:
            assert data is not None
            prompts = data.rows(first, count)
        start, owner = starts(Noise(seed, indices), prompts)
        there, samples = (each.to(device) for each in (start[owner], indices))
        canvas = Canvas(there, starts.mask_id, samples)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16):
            state = State(canvas, DrawOptions(seed=seed))
            drawn = ancestral(denoiser, schedule, state, steps=reference.steps)
        return torch.where(drawn.tokens == PAD, model.num_tokens, drawn.tokens).cpu()

    def draw(first: int, count: int) -> Tensor:
        size, end = config.train.micro_batch or count, first + count  # the memory of a pass
        return torch.cat([draw_pass(i, min(size, end - i)) for i in range(first, end, size)])

    with progress() as bar:
        rows = open_bank(
            Path(reference.bank) if reference.bank else run.folder / "bank",
            settings,
            draw,
            teacher.tokenizer,
            world=run.world,
            seed=config.train.seed,
            progress=bar if run.world.is_main else None,
        ).rows

    def with_padding(first: int, count: int) -> Tensor:
        found = rows(first, count)
        return torch.where(found == model.num_tokens, PAD, found)

    return with_padding if padded else rows


def _law_of(model: ModelConfig) -> str:
    """Fingerprint of how texts end and how long they are; empty where they fill their windows."""
    if model.end_id is None:
        return ""
    return hashlib.sha256(json.dumps([model.end_id, model.lengths]).encode()).hexdigest()[:16]
