"""Stopped anywhere, a preparation goes on, and ends as if it had never stopped."""

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data.corpora import content_of, run, write_jsonl

from didi_instruct.data import corpus as data_corpus
from didi_instruct.data import readers
from didi_instruct.data.prepare import PrepareProgress
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import UserError

SHARD_ROWS = 4
PROGRESS = "unfinished/progress.json"
OPTIONS = {"length": 16, "valid": 9, "shard_rows": SHARD_ROWS, "batch_characters": 300}
LAYOUTS: dict[str, dict[str, Any]] = {
    "stream": {},
    "learned tokenizer": {"tokenizer": "bpe:290"},
    "document": {"rows": "document", "length": 24},
    "document, cut": {"rows": "document", "length": 24, "long": "cut"},
    "document, split": {"rows": "document", "length": 24, "long": "split"},
}
"""In rows of 24, every third story is too long."""


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
        write_jsonl(folder / f"{name}.jsonl", part)
    return folder


def prepared(src: Path, out: Path, report: Any = None, **options: Any) -> Any:
    return run(src, out, report, **{**OPTIONS, **options})


def kill_at(src: Path, out: Path, report: int, **options: Any) -> bool:
    """Run until the given report of progress; tell whether it came to that."""
    count = 0

    def stop(progress: PrepareProgress) -> None:
        nonlocal count
        count += progress.stage == "tokenise"
        if count == report:
            raise Killed

    try:
        prepared(src, out, stop, **options)
    except Killed:
        return True
    return False


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_stopped_at_any_report_ends_the_same(corpus, tmp_path, layout: str) -> None:
    options = LAYOUTS[layout]
    prepared(corpus, tmp_path / "whole", **options)
    whole = content_of(tmp_path / "whole")
    for report in range(1, 100):
        out = tmp_path / str(report)
        stopped = kill_at(corpus, out, report, **options)
        if stopped:
            assert (out / PROGRESS).exists()
            assert not (out / "manifest.json").exists()
            prepared(corpus, out, **options)
        assert content_of(out) == whole
        if not stopped:
            break
    assert report > 5


@settings(max_examples=25, deadline=None)
@given(
    texts=st.lists(st.text("ab ½\n", min_size=1, max_size=90), min_size=8, max_size=30),
    layout=st.sampled_from(sorted(LAYOUTS)),
    sizes=st.lists(st.integers(1, 700), min_size=1, max_size=5),
    seed=st.integers(0, 99),
)
def test_a_run_stopped_again_and_again_ends_the_same(
    tmp_path_factory, texts, layout, sizes, seed
) -> None:
    """With other batches each time; a chain of documents of any kind."""
    folder, chance = tmp_path_factory.mktemp("again"), random.Random(seed)
    src = write_jsonl(folder / "a.jsonl", [f"no {i} {text}" for i, text in enumerate(texts)])
    options = {**LAYOUTS[layout], "valid": 3, "length": 5}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "PIECE_CHARACTERS", 20)
        try:
            prepared(src, folder / "whole", **options)
        except UserError:
            return  # no document fits
        for size in sizes:
            kill_at(src, folder / "out", chance.randint(1, 9), batch_characters=size, **options)
        prepared(src, folder / "out", **options)
    assert content_of(folder / "out") == content_of(folder / "whole")


@pytest.mark.parametrize("layout", ["stream", "document, split"])
@pytest.mark.parametrize("before", [False, True])
def test_a_run_killed_at_any_change_of_a_name_ends_the_same(
    corpus, tmp_path, monkeypatch, layout: str, before: bool
) -> None:
    """Before each file that gets its name or is cut or removed; over finished data as well."""
    options = {**LAYOUTS[layout], "shard_rows": 20}
    prepared(corpus, tmp_path / "whole", **options)
    whole = content_of(tmp_path / "whole")
    for change in range(1, 100):
        out, left = tmp_path / str(change), [change]
        if before:
            prepared(corpus, out, length=40)
        with monkeypatch.context() as patch:
            for place, name in ((Path, "replace"), (Path, "unlink"), (os, "truncate")):
                original = getattr(place, name)

                def stop(*args: Any, left=left, original=original, **more: Any) -> Any:
                    left[0] -= 1
                    if left[0] == 0:
                        raise Killed
                    return original(*args, **more)

                patch.setattr(place, name, stop)
            with contextlib.suppress(Killed):
                prepared(corpus, out, **options, overwrite=before)
        stopped = left[0] <= 0
        if stopped:
            # Until it has recorded anything, an overwrite leaves the data that were there.
            again = before and not (out / PROGRESS).exists()
            prepared(corpus, out, **options, overwrite=again)
        assert content_of(out) == whole
        if not stopped:
            break
    assert change > 12


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
        f"prepare(PrepareSettings(src=src, out=out, tokenizer='bytes', **{OPTIONS}), report)\n"
    )
    prepared(corpus, tmp_path / "whole")
    for left in ("2", "5"):
        out = tmp_path / left
        command = [sys.executable, "-c", code, str(corpus), str(out), left]
        assert subprocess.run(command, check=False).returncode == -9
        assert not (out / "manifest.json").exists()
        prepared(corpus, out)
        assert content_of(out) == content_of(tmp_path / "whole")


def test_what_is_recorded_is_not_tokenised_again(corpus, tmp_path: Path, monkeypatch) -> None:
    assert kill_at(corpus, tmp_path / "out", 6)
    record = json.loads((tmp_path / "out" / PROGRESS).read_text())
    encoded, read = [0], []
    encode, read_pieces = Tokenizer.encode, data_corpus.read_pieces

    def counting(self: Tokenizer, texts: list[str]) -> list[list[int]]:
        encoded[0] += sum(map(len, texts))
        return encode(self, texts)

    def reading(source: Any, *more: Any) -> Any:
        read.append(source.name)
        return read_pieces(source, *more)

    monkeypatch.setattr(Tokenizer, "encode", counting)
    monkeypatch.setattr(data_corpus, "read_pieces", reading)
    result = prepared(corpus, tmp_path / "out")
    total = sum(scan.characters for scan in result.manifest.sources)
    assert len(record["hashes"]) > 5
    assert encoded[0] <= total - len(record["hashes"]) * SHARD_ROWS * 16
    assert read == ["a.jsonl", "b.jsonl", "c.jsonl"][len(record["scans"]) :]


DIFFERENT = {
    "length was 16, is 8": {"length": 8},
    "documents was file, is line": {"documents": "line"},
    "valid was 9, is the default": {"valid": None},
    "shard_rows was 4, is 5": {"shard_rows": 5},
    "tokenizer was sha256:.*, is bpe:300": {"tokenizer": "bpe:300"},
    "eot_id was 256, is 65": {"eot": "A"},
    r"\(rows was the default, is document\)": {"rows": "document"},
}


@pytest.mark.parametrize("finished", [True, False])
def test_another_setting_is_refused_by_name(corpus, tmp_path, finished: bool) -> None:
    out = tmp_path / "out"
    if finished:
        prepared(corpus, out)
    else:
        assert kill_at(corpus, out, 4)
    before = content_of(out)
    for difference, options in DIFFERENT.items():
        with pytest.raises(UserError, match=f"{difference}.*`overwrite`") as caught:
            prepared(corpus, out, **options)
        assert ("unfinished" in str(caught.value)) is not finished
    assert content_of(out) == before


@pytest.mark.parametrize("finished", [True, False])
def test_rows_of_documents_are_not_taken_for_others(corpus, tmp_path, finished: bool) -> None:
    """A stream is the default, which no setting names: what is missing differs too."""
    out, options = tmp_path / "out", LAYOUTS["document"]
    if finished:
        prepared(corpus, out, **options)
    else:
        assert kill_at(corpus, out, 2, **options)
    with pytest.raises(UserError, match=r"\(rows was document, is the default\).*`overwrite`"):
        prepared(corpus, out, length=24)
    with pytest.raises(UserError, match=r"\(long was the default, is cut\).*`overwrite`"):
        prepared(corpus, out, **LAYOUTS["document, cut"])


@pytest.mark.parametrize("finished", [True, False])
def test_another_text_is_refused_by_name(corpus: Path, tmp_path: Path, finished: bool) -> None:
    out = tmp_path / "out"
    if finished:
        prepared(corpus, out)
    else:
        assert kill_at(corpus, out, 4)
    before = content_of(out)
    original = (corpus / "a.jsonl").read_bytes()

    (corpus / "a.jsonl").write_bytes(original.replace(b"bird", b"crow"))  # the same size
    os.utime(corpus / "a.jsonl", ns=(1, 1))
    with pytest.raises(UserError, match=r"source `a.jsonl` changed.*`overwrite`"):
        prepared(corpus, out)
    (corpus / "a.jsonl").write_bytes(original + b"\n")
    with pytest.raises(UserError, match=r"source `a.jsonl` changed.*`overwrite`"):
        prepared(corpus, out)
    (corpus / "a.jsonl").write_bytes(original)
    (corpus / "new.txt").write_text("new")
    with pytest.raises(UserError, match=r"source `new.txt` is new.*`overwrite`"):
        prepared(corpus, out)
    (corpus / "new.txt").unlink()
    (corpus / "b.jsonl").rename(corpus / ".b")
    with pytest.raises(UserError, match=r"source `b.jsonl` is gone.*`overwrite`"):
        prepared(corpus, out)
    (corpus / ".b").rename(corpus / "b.jsonl")
    assert content_of(out) == before

    os.utime(corpus / "a.jsonl")  # touched, but the same
    assert prepared(corpus, out).already_prepared is finished


def test_a_finished_folder_is_left_as_it_is(corpus: Path, tmp_path: Path) -> None:
    assert not prepared(corpus, tmp_path / "out").already_prepared
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    time.sleep(0.01)
    assert prepared(corpus, tmp_path / "out").already_prepared
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before


@pytest.mark.parametrize("finished", [True, False])
def test_overwrite_starts_over(corpus: Path, tmp_path: Path, finished: bool) -> None:
    out = tmp_path / "out"
    if finished:
        prepared(corpus, out)
    else:
        assert kill_at(corpus, out, 4)
    prepared(corpus, tmp_path / "whole", length=64, shard_rows=None)
    prepared(corpus, out, length=64, shard_rows=None, overwrite=True)
    assert content_of(out) == content_of(tmp_path / "whole")


def test_a_refused_overwrite_keeps_what_is_there(corpus: Path, tmp_path: Path) -> None:
    prepared(corpus, tmp_path / "out")
    before = content_of(tmp_path / "out")
    (corpus / "d.jsonl").write_text("not json")
    with pytest.raises(UserError, match=r"d.jsonl:1: not JSON"):
        prepared(corpus, tmp_path / "out", overwrite=True)
    assert content_of(tmp_path / "out") == before


def test_damage_to_an_unfinished_folder_is_noticed(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert kill_at(corpus, out, 4)
    work = out / "unfinished"
    for name in ("train-00001.bin", "ends.bin"):
        content = (work / name).read_bytes()
        (work / name).write_bytes(content[:1])
        with pytest.raises(UserError, match=rf"{name}: is missing or .*`overwrite`"):
            prepared(corpus, out)
        (work / name).write_bytes(content)
    tokenizer = (work / "tokenizer.json").read_bytes()
    Tokenizer.from_words(["a", "<eos>"]).save(work)
    with pytest.raises(UserError, match=r"tokenizer.json: changed.*`overwrite`"):
        prepared(corpus, out)
    (work / "tokenizer.json").write_bytes(tokenizer)
    (out / PROGRESS).write_text("{")
    with pytest.raises(UserError, match=r"progress.json: is damaged"):
        prepared(corpus, out)
    prepared(corpus, tmp_path / "whole")
    prepared(corpus, out, overwrite=True)
    assert content_of(out) == content_of(tmp_path / "whole")


def test_a_source_that_changes_during_the_run_is_noticed(corpus: Path, tmp_path: Path) -> None:
    def change(_: PrepareProgress) -> None:
        with (corpus / "c.jsonl").open("a") as file:
            file.write('{"text": "late"}\n')

    with pytest.raises(UserError, match=r"c.jsonl: changed while it was read"):
        prepared(corpus, tmp_path / "out", change)
    assert not (tmp_path / "out").exists()
