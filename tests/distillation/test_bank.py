"""A bank is drawn once: whatever stopped it, its rows are those of one drawing."""

import errno
import io
import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from didi_instruct.data.dataset import TokenDataset
from didi_instruct.data.files import AtomicFile
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.distillation import bank as module
from didi_instruct.distillation.bank import DRAWN, BankSettings, drawing_seconds, open_bank
from didi_instruct.errors import UserError
from didi_instruct.training.distributed import World

CPU = torch.device("cpu")
TOKENIZER = Tokenizer.load("bytes")
SETTINGS = BankSettings(
    teacher="3fa9" * 16, steps=128, rows=20, length=4, num_tokens=TOKENIZER.size, seed=7
)


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch):
    """Twenty rows are shards of 8, 8 and 4, each drawn three rows at a time."""
    monkeypatch.setattr(module, "ROWS_PER_SHARD", 8)
    monkeypatch.setattr(module, "DRAW_ROWS", 3)


def true_rows(first, count):
    """Row i is a function of i."""
    positions = torch.arange(first * 4, (first + count) * 4)
    return (positions * 7919 + 13).remainder(SETTINGS.num_tokens).view(count, 4)


class Teacher:
    """Remembers the rows that were drawn, and can be stopped at a row."""

    def __init__(self, stop_at=10**9):
        self.stop_at, self.drawn = stop_at, []

    def __call__(self, first, count):
        if first + count > self.stop_at:
            raise KeyboardInterrupt
        self.drawn += range(first, first + count)
        return true_rows(first, count)


def open_as(folder, draw, settings=SETTINGS, *, world=None, **options):
    return open_bank(folder, settings, draw, TOKENIZER, world=world or World(CPU), **options)


def drawn_for(folder, settings=SETTINGS):
    """Open a bank, see that its rows are right, and return those that had to be drawn."""
    teacher = Teacher()
    data = open_as(folder, teacher, settings)
    assert data.num_sequences == settings.rows
    assert torch.equal(data.ordered(0, settings.rows), true_rows(0, settings.rows))
    return teacher.drawn


def forbidden(first, count):
    raise AssertionError("nothing is missing")


def content(folder):
    """All files but the one whose content is a time."""
    files = (path for path in sorted(folder.iterdir()) if path.name != DRAWN)
    return {path.name: path.read_bytes() for path in files}


def touched(folder):
    stats = {path.name: path.stat() for path in [folder, *folder.iterdir()]}
    return {name: (stat.st_mtime_ns, stat.st_ino) for name, stat in stats.items()}


def test_a_bank_is_drawn_once_and_then_not_touched(tmp_path):
    folder, calls = tmp_path / "a" / "bank", []
    assert drawn_for(folder) == list(range(20))
    rows = ["rows-00000.npy", "rows-00001.npy", "rows-00002.npy"]
    assert sorted(path.name for path in folder.iterdir()) == ["bank.json", DRAWN, *rows]
    before = touched(folder)
    open_as(folder, forbidden, progress=lambda *call: calls.append(call))
    assert touched(folder) == before
    assert calls == []


def test_the_stream_is_shuffled_and_endless(tmp_path):
    data = open_as(tmp_path / "bank", Teacher(), seed=3)
    plain = TokenDataset([true_rows(0, 20).numpy()], TOKENIZER, seed=3)
    assert torch.equal(data.rows(5, 70), plain.rows(5, 70))
    assert not torch.equal(data.rows(0, 20), data.ordered(0, 20))
    assert str(tmp_path / "bank") in repr(data)


def test_a_bank_says_how_long_it_was_drawn(tmp_path, monkeypatch):
    clock = iter([10.0, 13.0, 20.0, 25.0, 90.0])
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    assert drawing_seconds(tmp_path) is None
    drawn_for(tmp_path, replace(SETTINGS, rows=8))
    assert drawing_seconds(tmp_path) == 3.0
    drawn_for(tmp_path)
    assert drawing_seconds(tmp_path) == 8.0, "one that grows took both times"
    drawn_for(tmp_path)
    assert drawing_seconds(tmp_path) == 8.0
    (tmp_path / DRAWN).write_text("{}")
    assert drawing_seconds(tmp_path) is None


def test_runs_that_share_a_bank_draw_it_once(tmp_path):
    """Begun at the same moment: one draws, the others wait and read."""
    begin = Barrier(3)

    def run(_):
        teacher = Teacher()

        def slowly(first, count):
            time.sleep(0.02)
            return teacher(first, count)

        begin.wait()
        return teacher.drawn, open_as(tmp_path / "bank", slowly).ordered(0, 20)

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(run, range(3)))
    assert sorted(row for drawn, _ in found for row in drawn) == list(range(20))
    assert all(torch.equal(rows, true_rows(0, 20)) for _, rows in found)


@pytest.mark.parametrize(("stop_at", "kept"), [(0, 0), (7, 0), (8, 8), (15, 8), (19, 16)])
def test_an_interrupted_bank_goes_on_where_it_stopped(tmp_path, stop_at, kept):
    drawn_for(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        open_as(tmp_path / "bank", Teacher(stop_at))
    assert drawn_for(tmp_path / "bank") == list(range(kept, 20))
    assert content(tmp_path / "bank") == content(tmp_path / "whole")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("teacher", "77ab" * 16, r"holds samples of another teacher \(3fa93fa9…, now 77ab77ab…\)"),
        ("steps", 64, "was drawn with steps 128, now it is 64"),
        ("num_tokens", 300, "was drawn with vocabulary size 257, now it is 300"),
        ("prompt", 2, "was drawn with prompt length 0, now it is 2"),
        ("prompts", "77ab" * 16, r"was drawn with prompts of other data \(none, now 77ab77ab…\)"),
        ("lengths", "77ab" * 4, r"holds texts of other lengths \(none, now 77ab77ab…\)"),
    ],
)
@pytest.mark.parametrize("rows", [10, 30])
def test_a_bank_of_other_settings_is_refused_and_kept(tmp_path, field, value, message, rows):
    drawn_for(tmp_path / "bank")
    (tmp_path / "bank" / "rows-00001.npy").unlink()
    before = touched(tmp_path / "bank")
    remedy = "choose another reference.bank folder, or delete it"
    with pytest.raises(UserError, match=rf"/bank {message}: {remedy}\.$"):
        open_as(tmp_path / "bank", forbidden, replace(SETTINGS, rows=rows, **{field: value}))
    assert touched(tmp_path / "bank") == before


def test_a_folder_that_is_no_bank_is_refused(tmp_path):
    """But not what a killed writer of bank.json left."""
    (tmp_path / ".bank.json.123.tmp").write_bytes(b"{")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"not a teacher bank: .*`notes.txt`.* choose another"):
        open_as(tmp_path, forbidden)
    with pytest.raises(UserError, match=r"notes.txt is a file, but reference.bank names a folder"):
        open_as(tmp_path / "notes.txt", forbidden)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    (tmp_path / "notes.txt").unlink()
    assert drawn_for(tmp_path) == list(range(20))


def changed(**entries):
    return lambda text: json.dumps(json.loads(text) | entries)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[:20], r"is damaged \("),
        (lambda text: "[]", "does not describe a teacher bank"),
        (changed(format="didi-tokens"), "does not describe a teacher bank"),
        (changed(version=9), "has version 9 of the format, but only 1"),
        (changed(steps="128"), r"is damaged \(`steps`"),
        (lambda text: text.replace("seed", "seeds"), r"is damaged \(`seed`"),
    ],
)
def test_a_malformed_description_is_named(tmp_path, damage, message):
    drawn_for(tmp_path)
    path = tmp_path / "bank.json"
    path.write_text(damage(path.read_text()))
    before = content(tmp_path)
    with pytest.raises(UserError, match=f"bank.json {message}.*choose another reference.bank"):
        open_as(tmp_path, forbidden)
    assert content(tmp_path) == before


def array_file(rows, length=4, dtype="<u2"):
    buffer = io.BytesIO()
    np.save(buffer, np.zeros((rows, length), dtype))
    return buffer.getvalue()


DAMAGED = {
    "empty": b"",
    "text": b"not an array",
    "zip": b"PK\x03\x04" + bytes(100),
    "cut": array_file(8)[:-1],
    "header cut": array_file(8)[:40],
    "header": array_file(8).replace(b"{'descr'", b"_'descr'"),
    "short": array_file(7),
    "long": array_file(9),
    "wide": array_file(8, length=5),
    "type": array_file(8, dtype="<i2"),
}


@pytest.mark.parametrize("damaged", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_shard_is_drawn_again(tmp_path, damaged):
    drawn_for(tmp_path)
    before = content(tmp_path)
    (tmp_path / "rows-00001.npy").write_bytes(damaged)
    assert drawn_for(tmp_path) == list(range(8, 16))
    assert content(tmp_path) == before


def test_rows_of_full_shards_serve_a_longer_bank_and_a_shorter_one(tmp_path):
    """Stopped while growing from 20 to 30: the 20 are still there, and growing goes on."""
    drawn_for(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        open_as(tmp_path, Teacher(stop_at=17), replace(SETTINGS, rows=30))
    assert drawn_for(tmp_path) == []
    assert json.loads((tmp_path / "bank.json").read_text())["rows"] == 30
    assert drawn_for(tmp_path, replace(SETTINGS, rows=30)) == list(range(16, 30))


@pytest.mark.parametrize(("num_tokens", "dtype"), [(1 << 16, "uint16"), ((1 << 16) + 1, "uint32")])
def test_ids_are_kept_in_the_smallest_type_that_holds_them(tmp_path, num_tokens, dtype):
    """The largest id survives, even where the tokenizer is smaller than the teacher's head."""

    def draw(first, count):
        return torch.full((count, 4), num_tokens - 1)

    data = open_as(tmp_path, draw, replace(SETTINGS, num_tokens=num_tokens))
    assert data.ordered(0, 20).unique().tolist() == [num_tokens - 1]
    assert data.num_tokens == num_tokens
    assert np.load(tmp_path / "rows-00000.npy").dtype == dtype


def test_progress_climbs_to_the_total_from_what_is_there(tmp_path):
    calls = []

    def progress(*call):
        calls.append(call)

    with pytest.raises(KeyboardInterrupt):
        open_as(tmp_path, Teacher(stop_at=14), progress=progress)
    assert calls == [(done, 20) for done in (0, 3, 6, 8, 11, 14)]
    calls.clear()
    open_as(tmp_path, Teacher(), progress=progress)
    assert calls == [(done, 20) for done in (8, 11, 14, 16, 19, 20)]


@pytest.mark.parametrize("odd", [SETTINGS.num_tokens, -1], ids=["mask", "padding"])
def test_an_id_that_is_no_token_is_never_written(tmp_path, odd):
    def draw(first, count):
        rows = true_rows(first, count)
        rows[:, 2][torch.arange(first, first + count) == 13] = odd
        return rows

    with pytest.raises(AssertionError, match=r"left ids .* in rows 11 to 13, .* below 257"):
        open_as(tmp_path, draw)
    assert sorted(content(tmp_path)) == ["bank.json", "rows-00000.npy"]


def test_only_what_is_missing_needs_room(tmp_path, monkeypatch):
    """All 20 rows of 4 tokens are 160 bytes, the last 4 rows 32."""
    room = SimpleNamespace(free=100)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: room)
    with pytest.raises(UserError, match="needs about 160 bytes, but the disk has 100 bytes free"):
        open_as(tmp_path / "bank", forbidden)
    assert not (tmp_path / "bank").exists()
    room.free = 160
    drawn_for(tmp_path / "bank")
    room.free = 100
    (tmp_path / "bank" / "rows-00002.npy").unlink()
    assert drawn_for(tmp_path / "bank") == list(range(16, 20))


@pytest.mark.parametrize("file", ["bank.json", "rows-00001.npy"])
def test_a_full_disk_is_one_clear_line(tmp_path, monkeypatch, file):
    write = AtomicFile.write

    def full(self, data):
        if self.path.name == file:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, data)

    with monkeypatch.context() as broken:
        broken.setattr(AtomicFile, "write", full)
        with pytest.raises(UserError, match="/bank: the disk is full"):
            drawn_for(tmp_path / "bank")
    drawn_for(tmp_path / "bank")


def test_a_fingerprint_tells_banks_and_orders_apart(tmp_path):
    changes = [
        {}, {"teacher": "1" * 64}, {"steps": 1}, {"rows": 19}, {"seed": 8}, {"prompt": 1},
        {"prompts": "2" * 64}, {"num_tokens": 300}, {"lengths": "3" * 16},
    ]  # fmt: skip
    settings = [replace(SETTINGS, **change) for change in changes]
    marks = [open_as(tmp_path / str(i), Teacher(), s).fingerprint for i, s in enumerate(settings)]
    marks.append(open_as(tmp_path / "0", forbidden, seed=1).fingerprint)
    assert len(set(marks)) == len(marks)
    assert open_as(tmp_path / "elsewhere", Teacher()).fingerprint == marks[0]


def together(monkeypatch, open_in, size):
    """Call in `size` threads that stand for processes; the barrier between them is a real one."""
    barrier = Barrier(size, timeout=10)
    monkeypatch.setattr(World, "wait", lambda world: barrier.wait())
    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(open_in, World(CPU, rank, size)) for rank in range(size)]
        return [future.exception() or future.result() for future in futures]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_processes_draw_disjoint_shards_of_one_bank(tmp_path, monkeypatch, size):
    settings = replace(SETTINGS, rows=35)
    drawn_for(tmp_path / "whole", settings)
    teachers, calls = [Teacher() for _ in range(size)], [[] for _ in range(size)]

    def open_in(world):
        return open_as(
            tmp_path / "bank", teachers[world.rank], settings, world=world,
            progress=lambda *call: calls[world.rank].append(call),
        )  # fmt: skip

    for data in together(monkeypatch, open_in, size):
        assert torch.equal(data.ordered(0, 35), true_rows(0, 35))
    for rank, teacher in enumerate(teachers):
        assert teacher.drawn == [row for row in range(35) if row // 8 % size == rank]
        done = [call[0] for call in calls[rank]]
        assert done == sorted(done)
        assert (done[0], done[-1]) == (0, 35)
    assert content(tmp_path / "bank") == content(tmp_path / "whole")


def test_every_process_refuses_so_that_none_waits(tmp_path, monkeypatch):
    drawn_for(tmp_path)
    other = replace(SETTINGS, steps=64)
    errors = together(
        monkeypatch, lambda world: open_as(tmp_path, forbidden, other, world=world), 2
    )
    assert [type(error) for error in errors] == [UserError, UserError]


def test_nothing_is_written_before_all_have_looked(tmp_path, monkeypatch):
    """The main process of two, seen wherever it waits; the other one writes somewhere else."""
    folder, seen = tmp_path / "bank", []

    def wait(world):
        seen.append(sorted(content(folder)) if folder.exists() else ["no folder"])

    monkeypatch.setattr(World, "wait", wait)
    with pytest.raises(UserError, match=r"rows-00001.npy was drawn, but cannot be read here"):
        open_as(folder, Teacher(), world=World(CPU, 0, 2))
    assert seen == [["no folder"], ["bank.json"], ["bank.json", "rows-00000.npy", "rows-00002.npy"]]
