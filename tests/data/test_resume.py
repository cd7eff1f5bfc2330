"""Stopped anywhere, a preparation goes on, and ends as if it had never stopped."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from didi_instruct.data import files, packing, prepare, readers, resume
from didi_instruct.data.prepare import PrepareProgress, PrepareResult, PrepareSettings
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import UserError

pytestmark = pytest.mark.usefixtures("fast_disk")

SHARD_ROWS = 4


class Killed(BaseException):
    """Stands for Ctrl-C and for a kill: nothing may catch it."""


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch) -> Path:
    """Three files; documents longer than a piece, shorter ones, and one without white space."""
    monkeypatch.setattr(readers, "PIECE_CHARACTERS", 64)
    folder = tmp_path / "corpus"
    folder.mkdir()
    long = " ".join(f"{i} birds" for i in range(60))
    stories = (f"story {i} of a cat" + " and a dog" * (i % 3 == 0) for i in range(40))
    texts = [long, "a b c", "x" * 300, *stories]
    for name, part in (("a", texts[:2]), ("b", texts[2:20]), ("c", texts[20:])):
        lines = (json.dumps({"text": text}) + "\n" for text in part)
        (folder / f"{name}.jsonl").write_text("".join(lines))
    return folder


LAYOUTS = {
    "stream": {},
    "learned tokenizer": {"tokenizer": "bpe:290"},
    "document": {"rows": "document", "length": 24},
    "document, cut": {"rows": "document", "length": 24, "long": "cut"},
}
"""In rows of 24, every third story is too long."""


def settings_for(src: Path, out: Path, **options: Any) -> PrepareSettings:
    values: dict[str, Any] = {
        "tokenizer": "bytes", "length": 16, "valid": 9, "shard_rows": SHARD_ROWS,
        "batch_characters": 300, **options,
    }  # fmt: skip
    return PrepareSettings(src=str(src), out=out, **values)


def run(src: Path, out: Path, **options: Any) -> PrepareResult:
    return prepare.prepare(settings_for(src, out, **options))


def content_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def kill_at(src: Path, out: Path, report: int, **options: Any) -> bool:
    """Run until the given report of progress; tell whether it came to that."""
    count = 0

    def stop(progress: PrepareProgress) -> None:
        nonlocal count
        count += progress.stage == "tokenise"
        if count == report:
            raise Killed

    try:
        prepare.prepare(settings_for(src, out, **options), stop)
    except Killed:
        return True
    return False


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_stopped_at_any_report_ends_the_same(corpus, tmp_path, layout: str) -> None:
    options = LAYOUTS[layout]
    run(corpus, tmp_path / "whole", **options)
    whole = content_of(tmp_path / "whole")
    for report in range(1, 100):
        out = tmp_path / str(report)
        stopped = kill_at(corpus, out, report, **options)
        if stopped:
            assert (out / "progress.json").exists()
            assert not (out / "manifest.json").exists()
            run(corpus, out, **options)
        assert content_of(out) == whole
        if not stopped:
            break
    assert report > 5


@pytest.mark.parametrize("layout", ["stream", "document", "document, cut"])
def test_a_run_stopped_again_and_again_ends_the_same(corpus, tmp_path, layout: str) -> None:
    options = LAYOUTS[layout]
    run(corpus, tmp_path / "whole", **options)
    stops = 0
    for stops in range(100):
        size = 300 + 30 * stops  # a run that never finishes a shard begins anew for ever
        if not kill_at(corpus, tmp_path / "out", 2 + stops % 2, batch_characters=size, **options):
            break
    assert stops > 3
    assert content_of(tmp_path / "out") == content_of(tmp_path / "whole")


@pytest.mark.parametrize(
    "options", [{"shard_rows": 20}, {"rows": "document", "length": 24}], ids=["stream", "document"]
)
def test_a_run_killed_at_any_write_ends_the_same(corpus, tmp_path, monkeypatch, options) -> None:
    """Stop before each single file is given its name: the finest grain there is."""
    run(corpus, tmp_path / "whole", **options)
    whole = content_of(tmp_path / "whole")
    commit = files.AtomicFile.commit
    for write in range(1, 100):
        left = [write]

        def stop(self: files.AtomicFile, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise Killed
            commit(self)

        out, stopped = tmp_path / str(write), False
        with monkeypatch.context() as patch:
            patch.setattr(files.AtomicFile, "commit", stop)
            patch.setattr(files.AtomicFile, "discard", lambda self: None)  # as a kill would
            try:
                run(corpus, out, **options)
            except Killed:
                stopped = True
        if stopped:
            run(corpus, out, **options)
        assert content_of(out) == whole
        if not stopped:
            break
    assert write > 12


def test_a_process_killed_outright_ends_the_same(corpus: Path, tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from didi_instruct.data import readers\n"
        "readers.PIECE_CHARACTERS = 64\n"
        "from didi_instruct.data.prepare import *\n"
        "src, out, left = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])\n"
        "def report(progress):\n"
        "    global left\n"
        "    left -= progress.stage == 'tokenise'\n"
        "    if left == 0: os.kill(os.getpid(), signal.SIGKILL)\n"
        "prepare(PrepareSettings(src=src, out=out, tokenizer='bytes', length=16, valid=9,\n"
        f"    shard_rows={SHARD_ROWS}, batch_characters=300), report)\n"
    )
    run(corpus, tmp_path / "whole")
    for left in ("2", "5"):
        out = tmp_path / left
        command = [sys.executable, "-c", code, str(corpus), str(out), left]
        assert subprocess.run(command, check=False).returncode == -9
        assert not (out / "manifest.json").exists()
        run(corpus, out)
        assert content_of(out) == content_of(tmp_path / "whole")


def test_finished_shards_are_not_tokenised_again(corpus: Path, tmp_path: Path, monkeypatch) -> None:
    run(corpus, tmp_path / "whole")
    assert kill_at(corpus, tmp_path / "out", 6)
    finished = json.loads((tmp_path / "out" / "progress.json").read_text())["shards"]["train"]
    encoded = [0]
    encode = Tokenizer.encode

    def counting(self: Tokenizer, texts: list[str]) -> list[list[int]]:
        encoded[0] += sum(map(len, texts))
        return encode(self, texts)

    def no_scan(*_: object) -> None:
        raise AssertionError("the corpus is scanned again")

    monkeypatch.setattr(Tokenizer, "encode", counting)
    monkeypatch.setattr(prepare, "scan_sources", no_scan)
    result = run(corpus, tmp_path / "out")
    total = sum(scan.characters for scan in result.manifest.sources)
    in_finished = len(finished) * SHARD_ROWS * 16
    assert len(finished) > 5
    # At most the piece that reaches over the end of the last finished shard is not in it.
    assert encoded[0] <= total - in_finished + 64
    assert content_of(tmp_path / "out") == content_of(tmp_path / "whole")


DIFFERENT = {
    "length was 16, is 8": {"length": 8},
    "documents was file, is line": {"documents": "line"},
    "valid was 9, is the default": {"valid": None},
    "shard_rows was 4, is 5": {"shard_rows": 5},
    "tokenizer was sha256:.*, is bpe:300": {"tokenizer": "bpe:300"},
    "eot_id was 256, is 65": {"eot": "A"},
    "rows was the default, is document": {"rows": "document"},
}


@pytest.mark.parametrize("difference", DIFFERENT)
@pytest.mark.parametrize("finished", [True, False])
def test_another_setting_is_refused_by_name(corpus, tmp_path, difference, finished: bool) -> None:
    out = tmp_path / "out"
    if finished:
        run(corpus, out)
    else:
        assert kill_at(corpus, out, 4)
    before = content_of(out)
    with pytest.raises(UserError, match=f"{difference}.*`overwrite`") as caught:
        run(corpus, out, **DIFFERENT[difference])
    assert ("unfinished" in str(caught.value)) is not finished
    assert content_of(out) == before


@pytest.mark.parametrize("finished", [True, False])
def test_rows_of_documents_are_not_taken_for_others(corpus, tmp_path, finished: bool) -> None:
    """A stream is the default, which no setting names: what is missing differs too."""
    out, options = tmp_path / "out", LAYOUTS["document"]
    if finished:
        run(corpus, out, **options)
    else:
        assert kill_at(corpus, out, 2, **options)
    before = content_of(out)
    with pytest.raises(UserError, match=r"\(rows was document, is the default\).*`overwrite`"):
        run(corpus, out, length=24)
    with pytest.raises(UserError, match=r"\(long was the default, is cut\).*`overwrite`"):
        run(corpus, out, **LAYOUTS["document, cut"])
    assert content_of(out) == before


def test_a_run_begun_before_rows_had_a_choice_goes_on(corpus: Path, tmp_path: Path) -> None:
    run(corpus, tmp_path / "whole")
    out = tmp_path / "out"
    assert kill_at(corpus, out, 4)
    record = json.loads((out / "progress.json").read_text())
    del record["long"]
    (out / "progress.json").write_text(json.dumps(record))
    run(corpus, out)
    assert content_of(out) == content_of(tmp_path / "whole")


@pytest.mark.parametrize("finished", [True, False])
def test_another_text_is_refused_by_name(corpus: Path, tmp_path: Path, finished: bool) -> None:
    out = tmp_path / "out"
    if finished:
        run(corpus, out)
    else:
        assert kill_at(corpus, out, 4)
    before = content_of(out)
    original = (corpus / "b.jsonl").read_bytes()

    (corpus / "b.jsonl").write_bytes(original.replace(b"cat", b"dog"))  # the same size
    os.utime(corpus / "b.jsonl", ns=(1, 1))
    with pytest.raises(UserError, match=r"source `b.jsonl` changed.*`overwrite`"):
        run(corpus, out)
    (corpus / "b.jsonl").write_bytes(original + b"\n")
    with pytest.raises(UserError, match=r"source `b.jsonl` changed.*`overwrite`"):
        run(corpus, out)
    (corpus / "b.jsonl").write_bytes(original)
    (corpus / "new.txt").write_text("new")
    with pytest.raises(UserError, match=r"source `new.txt` is new.*`overwrite`"):
        run(corpus, out)
    (corpus / "new.txt").unlink()
    (corpus / "a.jsonl").rename(corpus / ".a")
    with pytest.raises(UserError, match=r"source `a.jsonl` is gone.*`overwrite`"):
        run(corpus, out)
    (corpus / ".a").rename(corpus / "a.jsonl")
    assert content_of(out) == before

    os.utime(corpus / "b.jsonl")  # touched, but the same
    assert run(corpus, out).already_prepared is finished


def test_a_finished_folder_is_left_as_it_is(corpus: Path, tmp_path: Path) -> None:
    assert not run(corpus, tmp_path / "out").already_prepared
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    time.sleep(0.01)
    assert run(corpus, tmp_path / "out").already_prepared
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before


@pytest.mark.parametrize("finished", [True, False])
def test_overwrite_starts_over(corpus: Path, tmp_path: Path, finished: bool) -> None:
    out = tmp_path / "out"
    if finished:
        run(corpus, out)
    else:
        assert kill_at(corpus, out, 4)
    run(corpus, tmp_path / "whole", length=64, shard_rows=None)
    run(corpus, out, length=64, shard_rows=None, overwrite=True)
    assert content_of(out) == content_of(tmp_path / "whole")


def test_an_overwrite_killed_while_clearing_can_be_repeated(corpus, tmp_path, monkeypatch) -> None:
    """Until the first file goes, the old data count; afterwards nothing does."""
    run(corpus, tmp_path / "whole", length=8)
    out = tmp_path / "out"
    run(corpus, out)

    def die(*_: object) -> None:
        raise Killed

    for place, still_there in (("write_json", True), ("remove_temporaries", False)):
        with monkeypatch.context() as patch:
            patch.setattr(resume, place, die)
            with pytest.raises(Killed):
                run(corpus, out, length=8, overwrite=True)
        assert (out / "manifest.json").exists() is still_there
    run(corpus, out, length=8)
    assert content_of(out) == content_of(tmp_path / "whole")


def test_a_refused_overwrite_keeps_what_is_there(corpus: Path, tmp_path: Path) -> None:
    run(corpus, tmp_path / "out")
    before = content_of(tmp_path / "out")
    (corpus / "d.jsonl").write_text("not json")
    with pytest.raises(UserError, match=r"d.jsonl:1: not JSON"):
        run(corpus, tmp_path / "out", overwrite=True)
    assert content_of(tmp_path / "out") == before


def test_a_run_killed_before_its_first_record_can_be_repeated(
    corpus, tmp_path, monkeypatch
) -> None:
    """Even with other settings: nothing of worth was there yet."""

    def die(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Tokenizer, "save", die)
        with pytest.raises(Killed):
            run(corpus, tmp_path / "out", length=8)
    run(corpus, tmp_path / "whole")
    run(corpus, tmp_path / "out")
    assert content_of(tmp_path / "out") == content_of(tmp_path / "whole")


def test_damage_to_an_unfinished_folder_is_noticed(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert kill_at(corpus, out, 4)
    shard = out / "train-00001.bin"
    content = shard.read_bytes()
    shard.write_bytes(content[:-1])
    with pytest.raises(UserError, match=r"train-00001.bin: is missing or has another size"):
        run(corpus, out)
    shard.write_bytes(content)
    tokenizer = (out / "tokenizer.json").read_bytes()
    Tokenizer.from_words(["a", "<eos>"]).save(out)
    with pytest.raises(UserError, match=r"tokenizer.json: changed.*`overwrite`"):
        run(corpus, out)
    (out / "tokenizer.json").write_bytes(tokenizer)
    (out / "progress.json").write_text("{")
    with pytest.raises(UserError, match=r"progress.json: is damaged"):
        run(corpus, out)
    run(corpus, tmp_path / "whole")
    run(corpus, out, overwrite=True)
    assert content_of(out) == content_of(tmp_path / "whole")


def test_a_source_that_changes_during_the_run_is_noticed(corpus, tmp_path, monkeypatch) -> None:
    original = packing.ShardWriter.add

    def add(self: packing.ShardWriter, tokens: Any) -> Any:
        with (corpus / "c.jsonl").open("a") as file:
            file.write('{"text": "late"}\n')
        return original(self, tokens)

    monkeypatch.setattr(packing.ShardWriter, "add", add)
    with pytest.raises(UserError, match=r"c.jsonl: changed while it was read"):
        run(corpus, tmp_path / "out")
    assert not (tmp_path / "out" / "manifest.json").exists()
