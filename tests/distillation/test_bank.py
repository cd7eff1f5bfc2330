"""A bank is drawn once: whatever stopped it, its rows are those of one drawing."""

import errno
import io
import json
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from didi_instruct.data.dataset import TokenDataset, TokenSource
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.distillation import bank as module
from didi_instruct.distillation.bank import DRAWN, BankSettings, drawing_seconds, open_bank
from didi_instruct.errors import UserError
from didi_instruct.training.distributed import World

CPU = torch.device("cpu")
ALONE = World(CPU)
TOKENIZER = Tokenizer.load("bytes")
SETTINGS = BankSettings(
    teacher="3fa9" * 16, steps=128, rows=20, length=4, num_tokens=TOKENIZER.size, seed=7
)


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty rows are shards of 8, 8 and 4, each drawn three rows at a time."""
    monkeypatch.setattr(module, "ROWS_PER_SHARD", 8)
    monkeypatch.setattr(module, "DRAW_ROWS", 3)


class Teacher:
    """Row i is a function of i; remembers what was drawn, and can be stopped at a row."""

    def __init__(self, num_tokens: int = SETTINGS.num_tokens, stop_at: int = 10**9) -> None:
        self.num_tokens, self.stop_at = num_tokens, stop_at
        self.drawn: list[int] = []

    def __call__(self, first: int, count: int) -> torch.Tensor:
        if first + count > self.stop_at:
            raise KeyboardInterrupt
        self.drawn += range(first, first + count)
        return self.rows(first, count)

    def rows(self, first: int, count: int) -> torch.Tensor:
        positions = torch.arange(first * SETTINGS.length, (first + count) * SETTINGS.length)
        return (positions * 7919 + 13).remainder(self.num_tokens).view(count, SETTINGS.length)


def draw_bank(folder: Path, settings: BankSettings = SETTINGS, **options) -> TokenDataset:
    return open_bank(folder, settings, Teacher(), TOKENIZER, world=ALONE, **options)


def drawn_for(folder: Path, settings: BankSettings = SETTINGS) -> tuple[TokenDataset, list[int]]:
    """Open a bank, and tell which rows had to be drawn."""
    teacher = Teacher()
    return open_bank(folder, settings, teacher, TOKENIZER, world=ALONE), teacher.drawn


def forbidden(first: int, count: int) -> torch.Tensor:
    raise AssertionError("nothing is missing")


def content(folder: Path) -> dict[str, bytes]:
    """All files but the one whose content is a time."""
    files = (path for path in sorted(folder.iterdir()) if path.name != DRAWN)
    return {path.name: path.read_bytes() for path in files}


def touched(folder: Path) -> dict[str, tuple[int, int]]:
    stats = {path.name: path.stat() for path in [folder, *folder.iterdir()]}
    return {name: (stat.st_mtime_ns, stat.st_ino) for name, stat in stats.items()}


def test_rows_are_those_drawn(tmp_path: Path) -> None:
    teacher, folder = Teacher(), tmp_path / "a" / "bank"
    data: TokenSource = open_bank(folder, SETTINGS, teacher, TOKENIZER, world=ALONE)
    assert teacher.drawn == list(range(20))
    assert data.num_sequences == 20
    assert torch.equal(data.ordered(0, 20), teacher.rows(0, 20))
    assert data.ordered(0, 20).dtype == torch.int64
    files = sorted(path.name for path in folder.iterdir())
    rows = ["rows-00000.npy", "rows-00001.npy", "rows-00002.npy"]
    assert files == ["bank.json", DRAWN, *rows]


def test_a_bank_says_how_long_it_was_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 13.0, 20.0, 25.0, 90.0])
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    assert drawing_seconds(tmp_path) is None
    draw_bank(tmp_path, replace(SETTINGS, rows=8))
    assert drawing_seconds(tmp_path) == 3.0
    draw_bank(tmp_path)
    assert drawing_seconds(tmp_path) == 8.0, "one that grows took both times"
    draw_bank(tmp_path)
    assert drawing_seconds(tmp_path) == 8.0
    (tmp_path / DRAWN).write_text("{}")
    assert drawing_seconds(tmp_path) is None


def test_the_stream_is_shuffled_and_endless(tmp_path: Path) -> None:
    data = draw_bank(tmp_path / "bank", seed=3)
    plain = TokenDataset([Teacher().rows(0, 20).numpy()], TOKENIZER, seed=3)
    assert torch.equal(data.rows(5, 70), plain.rows(5, 70))
    assert not torch.equal(data.rows(0, 20), data.ordered(0, 20))
    assert str(tmp_path / "bank") in repr(data)


def test_runs_that_share_a_bank_draw_it_once(tmp_path: Path) -> None:
    """Begun at the same moment: one draws, the others wait and read."""
    together = Barrier(3)

    def run(_: int) -> tuple[list[int], torch.Tensor]:
        teacher = Teacher()

        def slowly(first: int, count: int) -> torch.Tensor:
            time.sleep(0.02)
            return teacher(first, count)

        together.wait()
        bank = open_bank(tmp_path / "bank", SETTINGS, slowly, TOKENIZER, world=ALONE)
        return teacher.drawn, bank.ordered(0, 20)

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(run, range(3)))
    assert sorted(row for drawn, _ in found for row in drawn) == list(range(20))
    for _, rows in found:
        assert torch.equal(rows, Teacher().rows(0, 20))


def test_a_finished_bank_is_neither_drawn_nor_touched(tmp_path: Path) -> None:
    draw_bank(tmp_path / "bank")
    before, calls = touched(tmp_path / "bank"), []
    data = open_bank(
        tmp_path / "bank", SETTINGS, forbidden, TOKENIZER, world=ALONE,
        progress=lambda *call: calls.append(call),
    )  # fmt: skip
    assert torch.equal(data.ordered(0, 20), Teacher().rows(0, 20))
    assert touched(tmp_path / "bank") == before
    assert calls == []


@pytest.mark.parametrize(("stop_at", "kept"), [(0, 0), (7, 0), (8, 8), (15, 8), (19, 16)])
def test_an_interrupted_bank_goes_on_where_it_stopped(
    tmp_path: Path, stop_at: int, kept: int
) -> None:
    draw_bank(tmp_path / "whole")
    teacher = Teacher(stop_at=stop_at)
    with pytest.raises(KeyboardInterrupt):
        open_bank(tmp_path / "bank", SETTINGS, teacher, TOKENIZER, world=ALONE)
    data, drawn = drawn_for(tmp_path / "bank")
    assert drawn == list(range(kept, 20))
    assert torch.equal(data.ordered(0, 20), Teacher().rows(0, 20))
    assert content(tmp_path / "bank") == content(tmp_path / "whole")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("teacher", "77ab" * 16, r"holds samples of another teacher \(3fa93fa9…, now 77ab77ab…\)"),
        ("steps", 64, "was drawn with steps 128, now it is 64"),
        ("length", 5, "was drawn with length 4, now it is 5"),
        ("num_tokens", 300, "was drawn with vocabulary size 257, now it is 300"),
        ("seed", 8, "was drawn with seed 7, now it is 8"),
        ("prompt", 2, "was drawn with prompt length 0, now it is 2"),
        ("prompts", "77ab" * 16, r"was drawn with prompts of other data \(none, now 77ab77ab…\)"),
    ],
)
@pytest.mark.parametrize("rows", [10, 20, 30])
def test_a_bank_of_other_settings_is_refused_and_kept(
    tmp_path: Path, field: str, value: int | str, message: str, rows: int
) -> None:
    draw_bank(tmp_path / "bank")
    (tmp_path / "bank" / "rows-00001.npy").unlink()
    before = touched(tmp_path / "bank")
    settings = replace(SETTINGS, rows=rows, **{field: value})
    remedy = "choose another reference.bank folder, or delete it"
    with pytest.raises(UserError, match=rf"/bank {message}: {remedy}\.$") as error:
        open_bank(tmp_path / "bank", settings, forbidden, TOKENIZER, world=ALONE)
    assert "\n" not in str(error.value)
    assert touched(tmp_path / "bank") == before


def test_a_folder_that_is_no_bank_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"not a teacher bank: .*`notes.txt`.* choose another"):
        open_bank(tmp_path, SETTINGS, forbidden, TOKENIZER, world=ALONE)
    assert content(tmp_path) == {"notes.txt": b"mine"}
    with pytest.raises(UserError, match=r"notes.txt is a file, but reference.bank names a folder"):
        open_bank(tmp_path / "notes.txt", SETTINGS, forbidden, TOKENIZER, world=ALONE)


def test_an_empty_folder_and_what_a_killed_writer_left_are_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / ".bank.json.123.tmp").write_bytes(b"{")
    assert draw_bank(tmp_path).num_sequences == 20


def changed(**entries: object) -> Callable[[str], str]:
    return lambda text: json.dumps(json.loads(text) | entries)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[:20], r"is damaged \("),
        (lambda text: "", r"is damaged \("),
        (lambda text: "[]", "does not describe a teacher bank"),
        (changed(format="didi-tokens"), "does not describe a teacher bank"),
        (changed(version=9), "has version 9 of the format, but only 1"),
        (changed(steps="128"), r"is damaged \(`steps`"),
        (changed(rows=None), r"is damaged \(`rows`"),
        (lambda text: text.replace("seed", "seeds"), r"is damaged \(`seed`"),
    ],
)
def test_a_malformed_description_is_named(
    tmp_path: Path, damage: Callable[[str], str], message: str
) -> None:
    draw_bank(tmp_path)
    path = tmp_path / "bank.json"
    path.write_text(damage(path.read_text()))
    before = content(tmp_path)
    with pytest.raises(UserError, match=f"bank.json {message}.*choose another reference.bank"):
        open_bank(tmp_path, SETTINGS, forbidden, TOKENIZER, world=ALONE)
    assert content(tmp_path) == before


def array_file(rows: int, length: int = 4, dtype: str = "<u2") -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.zeros((rows, length), dtype))
    return buffer.getvalue()


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        b"not an array",
        b"PK\x03\x04" + bytes(100),
        array_file(8)[:-1],
        array_file(8)[:40],
        array_file(8).replace(b"{'descr'", b"_'descr'"),
        array_file(7),
        array_file(9),
        array_file(8, length=5),
        array_file(8, dtype="<u4"),
        array_file(8, dtype="<i2"),
    ],
    ids=[
        "empty",
        "text",
        "zip",
        "cut",
        "header cut",
        "header",
        "short",
        "long",
        "wide",
        "u4",
        "i2",
    ],
)
def test_a_damaged_shard_is_drawn_again(tmp_path: Path, damaged: bytes) -> None:
    draw_bank(tmp_path)
    before = content(tmp_path)
    (tmp_path / "rows-00001.npy").write_bytes(damaged)
    data, drawn = drawn_for(tmp_path)
    assert drawn == list(range(8, 16))
    assert torch.equal(data.ordered(0, 20), Teacher().rows(0, 20))
    assert content(tmp_path) == before


def test_rows_of_full_shards_serve_a_longer_bank_and_a_shorter_one(tmp_path: Path) -> None:
    """Stopped while growing from 20 to 30: the 20 are still there, and growing goes on."""
    draw_bank(tmp_path)
    teacher = Teacher(stop_at=17)
    with pytest.raises(KeyboardInterrupt):
        open_bank(tmp_path, replace(SETTINGS, rows=30), teacher, TOKENIZER, world=ALONE)
    assert json.loads((tmp_path / "bank.json").read_text())["rows"] == 30
    data, drawn = drawn_for(tmp_path)
    assert drawn == []
    assert torch.equal(data.ordered(0, 100), Teacher().rows(0, 20))
    assert json.loads((tmp_path / "bank.json").read_text())["rows"] == 30
    assert drawn_for(tmp_path, replace(SETTINGS, rows=30))[1] == list(range(16, 30))


@pytest.mark.parametrize(("num_tokens", "dtype"), [(1 << 16, "uint16"), ((1 << 16) + 1, "uint32")])
def test_ids_are_kept_in_the_smallest_type_that_holds_them(
    tmp_path: Path, num_tokens: int, dtype: str
) -> None:
    """The largest id survives, even where the tokenizer is smaller than the teacher's head."""
    settings = replace(SETTINGS, num_tokens=num_tokens)

    def draw(first: int, count: int) -> torch.Tensor:
        return torch.full((count, 4), num_tokens - 1)

    data = open_bank(tmp_path, settings, draw, TOKENIZER, world=ALONE)
    assert data.ordered(0, 20).unique().tolist() == [num_tokens - 1]
    assert data.num_tokens == num_tokens
    shard = np.load(tmp_path / "rows-00000.npy", mmap_mode="r", allow_pickle=False)
    assert (shard.dtype, shard.shape) == (np.dtype(dtype), (8, 4))


def test_progress_climbs_to_the_total_from_what_is_there(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []

    def progress(*call: int) -> None:
        calls.append(call)

    teacher = Teacher(stop_at=14)
    with pytest.raises(KeyboardInterrupt):
        open_bank(tmp_path, SETTINGS, teacher, TOKENIZER, world=ALONE, progress=progress)
    assert calls == [(done, 20) for done in (0, 3, 6, 8, 11, 14)]
    calls.clear()
    draw_bank(tmp_path, progress=progress)
    assert calls == [(done, 20) for done in (8, 11, 14, 16, 19, 20)]


@pytest.mark.parametrize("odd", [SETTINGS.num_tokens, -1], ids=["mask", "padding"])
def test_an_id_that_is_no_token_is_never_written(tmp_path: Path, odd: int) -> None:
    def draw(first: int, count: int) -> torch.Tensor:
        rows = Teacher().rows(first, count)
        rows[:, 2][torch.arange(first, first + count) == 13] = odd
        return rows

    with pytest.raises(AssertionError, match=r"left ids .* in rows 11 to 13, .* below 257"):
        open_bank(tmp_path, SETTINGS, draw, TOKENIZER, world=ALONE)
    assert sorted(content(tmp_path)) == ["bank.json", "rows-00000.npy"]


def test_rows_of_another_shape_are_never_written(tmp_path: Path) -> None:
    def draw(first: int, count: int) -> torch.Tensor:
        return Teacher().rows(first, 1)

    with pytest.raises(AssertionError, match=r"draw gave \(1, 4\)"):
        open_bank(tmp_path, SETTINGS, draw, TOKENIZER, world=ALONE)
    assert sorted(content(tmp_path)) == ["bank.json"]


def test_only_what_is_missing_needs_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All 20 rows of 4 tokens are 160 bytes, the last 4 rows 32."""
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=100))
    with pytest.raises(UserError, match="needs about 160 bytes, but the disk has 100 bytes free"):
        open_bank(tmp_path / "bank", SETTINGS, forbidden, TOKENIZER, world=ALONE)
    assert not (tmp_path / "bank").exists()
    with monkeypatch.context() as roomy:
        roomy.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=160))
        draw_bank(tmp_path / "bank")
    (tmp_path / "bank" / "rows-00002.npy").unlink()
    assert drawn_for(tmp_path / "bank")[1] == list(range(16, 20))


@pytest.mark.parametrize("writer", ["write_json", "write_atomic"])
def test_a_full_disk_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: str
) -> None:
    def full(path: Path, data: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(module, writer, full)
        with pytest.raises(UserError, match="/bank: the disk is full"):
            draw_bank(tmp_path / "bank")
    assert draw_bank(tmp_path / "bank").num_sequences == 20


def test_a_fingerprint_tells_banks_and_orders_apart(tmp_path: Path) -> None:
    others = [
        replace(SETTINGS, teacher="1" * 64), replace(SETTINGS, steps=1), replace(SETTINGS, rows=19),
        replace(SETTINGS, seed=8), replace(SETTINGS, prompt=1),
        replace(SETTINGS, prompts="2" * 64), replace(SETTINGS, num_tokens=300),
    ]  # fmt: skip
    marks = [draw_bank(tmp_path / str(i), each).fingerprint for i, each in enumerate(others)]
    first = draw_bank(tmp_path / "bank").fingerprint
    assert first
    assert len({first, draw_bank(tmp_path / "bank", seed=1).fingerprint, *marks}) == len(marks) + 2
    assert draw_bank(tmp_path / "elsewhere").fingerprint == first


def together(
    monkeypatch: pytest.MonkeyPatch, open_as: Callable[[World], TokenDataset], size: int = 2
) -> list[TokenDataset | BaseException]:
    """Call in `size` threads that stand for processes; the barrier between them is a real one."""
    barrier = Barrier(size, timeout=10)
    monkeypatch.setattr(World, "wait", lambda world: barrier.wait())
    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(open_as, World(CPU, rank, size)) for rank in range(size)]
        return [future.exception() or future.result() for future in futures]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_processes_draw_disjoint_shards_of_one_bank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    settings = replace(SETTINGS, rows=35)
    draw_bank(tmp_path / "whole", settings)
    teachers = [Teacher() for _ in range(size)]
    calls: list[list[tuple[int, int]]] = [[] for _ in range(size)]

    def open_as(world: World) -> TokenDataset:
        return open_bank(
            tmp_path / "bank", settings, teachers[world.rank], TOKENIZER, world=world,
            progress=lambda *call: calls[world.rank].append(call),
        )  # fmt: skip

    for data in together(monkeypatch, open_as, size):
        assert isinstance(data, TokenDataset), data
        assert torch.equal(data.ordered(0, 35), Teacher().rows(0, 35))
    for rank, teacher in enumerate(teachers):
        assert teacher.drawn == [row for row in range(35) if row // 8 % size == rank]
        done = [call[0] for call in calls[rank]]
        assert done == sorted(done)
        assert (done[0], done[-1]) == (0, 35)
        assert {call[1] for call in calls[rank]} == {35}
    assert content(tmp_path / "bank") == content(tmp_path / "whole")


def test_every_process_refuses_so_that_none_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw_bank(tmp_path)
    errors = together(
        monkeypatch,
        lambda world: open_bank(
            tmp_path, replace(SETTINGS, steps=64), forbidden, TOKENIZER, world=world
        ),
    )
    assert [type(error) for error in errors] == [UserError, UserError]


def test_nothing_is_written_before_all_have_looked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The main process of two, seen wherever it waits; the other one writes somewhere else."""
    seen: list[list[str]] = []

    def wait(world: World) -> None:
        folder = tmp_path / "bank"
        seen.append(sorted(content(folder)) if folder.exists() else ["no folder"])

    monkeypatch.setattr(World, "wait", wait)

    with pytest.raises(UserError, match=r"rows-00001.npy was drawn, but cannot be read here"):
        open_bank(tmp_path / "bank", SETTINGS, Teacher(), TOKENIZER, world=World(CPU, 0, 2))
    assert seen == [["no folder"], ["bank.json"], ["bank.json", "rows-00000.npy", "rows-00002.npy"]]
