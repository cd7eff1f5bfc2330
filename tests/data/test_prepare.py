"""Prepared rows are the documents, and the held-out ones are the last."""

import errno
import json
import os
import shutil
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data.corpora import (
    EOT,
    STORIES,
    content_of,
    prepared_plainly,
    rows_of,
    run,
    write_jsonl,
)
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers, pre_tokenizers

from didi_instruct.data import corpus, packing, prepare, readers
from didi_instruct.data.dataset import open_data
from didi_instruct.data.files import sha256_file
from didi_instruct.data.manifest import Layout, Manifest
from didi_instruct.data.packing import arrange, batches, encode_ahead
from didi_instruct.data.readers import Piece
from didi_instruct.data.tokenizer import END_OF_TEXT, Tokenizer
from didi_instruct.errors import UserError

if TYPE_CHECKING:
    from didi_instruct.data.prepare import PrepareProgress

LAYOUTS = [("stream", "drop"), ("document", "drop"), ("document", "cut"), ("document", "split")]


@pytest.fixture
def stories(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "stories.jsonl", STORIES)


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(st.text(st.characters(codec="utf-8"), max_size=40), min_size=2, max_size=30),
    length=st.integers(1, 50),
    layout=st.sampled_from(LAYOUTS),
    held_out=st.integers(0, 10),
    shard_rows=st.integers(1, 9),
    batch=st.integers(1, 600),
    piece=st.integers(2, 60),
)
def test_rows_are_those_of_a_plain_preparation(
    tmp_path_factory, texts, length, layout, held_out, shard_rows, batch, piece
) -> None:
    folder = tmp_path_factory.mktemp("plain")
    src = write_jsonl(folder / "a.jsonl", texts)
    texts = [text for text in texts if text.strip()]  # blank ones are no documents
    parts = {"train": texts[: len(texts) - held_out], "valid": texts[len(texts) - held_out :]}
    wanted = {name: prepared_plainly(part, length, *layout) for name, part in parts.items()}
    options = dict(zip(("rows", "long"), layout, strict=True))
    options |= {"length": length, "valid": held_out, "shard_rows": shard_rows}
    possible = len(texts) > held_out and wanted["train"][0] and (not held_out or wanted["valid"][0])
    if len(texts) == held_out == 1:
        return  # a document on its own is held out by pieces
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "PIECE_CHARACTERS", piece)
        if not possible:
            with pytest.raises(UserError):
                run(src, folder / "out", batch_characters=batch, **options)
            assert not (folder / "out").exists()
            return
        result = run(src, folder / "out", batch_characters=batch, **options)
    for name, (rows, dropped, long) in wanted.items():
        info = result.manifest.splits[name]
        assert rows_of(folder / "out", name) == rows
        assert [shard.rows for shard in info.shards[:-1]] == [shard_rows] * (len(info.shards) - 1)
        assert (info.rows, info.tokens) == (len(rows), len(rows) * length)
        assert (info.documents, info.dropped_tokens) == (len(parts[name]), dropped)
        assert info.long_documents == (None if layout[0] == "stream" else long)


@pytest.mark.parametrize("rows", ["stream", "document"])
def test_a_learned_tokenizer_reads_its_own_rows(tmp_path, monkeypatch, rows: str) -> None:
    """Documents of up to 30 pieces, over many batches, as if each were tokenised at once."""
    monkeypatch.setattr(readers, "PIECE_CHARACTERS", 50)
    texts = [" ".join(f"bird {i}" for i in range(1 + 29 * n % 120)) for n in range(40)]
    src = write_jsonl(tmp_path / "a.jsonl", texts)
    options = {"length": 250, "batch_characters": 100, "rows": rows}
    result = run(src, tmp_path / "out", tokenizer="bpe:300", valid=10, **options)
    model = Tokenizer.load(tmp_path / "out")
    assert model.eot_id is not None
    documents = model.encode(texts[:30])
    if rows == "document":
        whole = [ids for ids in documents if len(ids) < 250]
        assert 0 < len(whole) < len(documents)
        expected = [ids + [model.eot_id] * (250 - len(ids)) for ids in whole]
    else:
        joined = [token for ids in documents for token in [*ids, model.eot_id]]
        expected = np.reshape(joined[: len(joined) // 250 * 250], (-1, 250)).tolist()
    assert rows_of(tmp_path / "out", "train") == expected
    assert result.manifest.sources[0].pieces > 200


def test_a_stream_is_what_it_always_was(stories: Path, tmp_path: Path) -> None:
    """Checksums and settings as recorded before rows could hold anything else."""
    run(stories, tmp_path / "out", valid=20, shard_rows=50)
    text = (tmp_path / "out" / "manifest.json").read_text()
    assert str(tmp_path) not in text, "a manifest names no place on its maker's machine"
    manifest = json.loads(text)
    expected = {
        "train": ["a44fc78ee27cb6c9", "d71c9af9a1b4eeb3", "3aed520c84fd9dad"],
        "valid": ["59f02b64f59df1a9", "f05b9abca288538f"],
    }
    for split, info in manifest["splits"].items():
        assert [shard["sha256"][:16] for shard in info["shards"]] == expected[split]
        assert list(info) == ["documents", "tokens", "rows", "dropped_tokens", "shards"]
        rows_of(tmp_path / "out", split)  # the files are what the manifest says
    tokenizer = Tokenizer.load("bytes")
    assert manifest["settings"] == {
        "length": 32,
        "tokenizer": f"sha256:{tokenizer.hash}",
        "eot_id": 256,
        "field": "text",
        "documents": "file",
        "valid": 20,
        "shard_rows": 50,
        "piece_characters": 16384,
    }
    (source,) = manifest["sources"]
    assert (source["path"], source["documents"]) == ("stories.jsonl", 60)
    assert source["sha256"] == sha256_file(stories)
    assert (manifest["tokenizer"]["hash"], manifest["dtype"]) == (tokenizer.hash, "uint16")
    names = {"manifest.json", "tokenizer.json", "tokenizer_config.json"}
    shards = {f"train-0000{i}.bin" for i in range(3)} | {f"valid-0000{i}.bin" for i in range(2)}
    assert set(content_of(tmp_path / "out")) == names | shards


def test_the_manifest_tells_the_layout(stories: Path, tmp_path: Path) -> None:
    run(stories, tmp_path / "out", rows="document", length=100, long="cut", valid=5)
    assert Manifest.read(tmp_path / "out").layout == Layout("document", "cut")


def test_a_fingerprint_is_of_the_rows_not_of_the_files_they_came_from(stories, tmp_path) -> None:
    other = write_jsonl(tmp_path / "other.jsonl", STORIES)
    changed = write_jsonl(tmp_path / "changed.jsonl", [*STORIES[:-1], STORIES[-1] + "!"])
    folders = {
        "one": run(stories, tmp_path / "one"),
        "again": run(other, tmp_path / "again"),
        "changed": run(changed, tmp_path / "text"),
        "shorter": run(stories, tmp_path / "shorter", length=16),
        "words": run(stories, tmp_path / "words", tokenizer="bpe:300"),
        "documents": run(stories, tmp_path / "documents", length=256, rows="document"),
    }
    found = {name: Manifest.read(result.folder).fingerprint for name, result in folders.items()}
    assert found.pop("again") == found["one"]
    assert len(set(found.values())) == len(found)


# Which part is held out, and what a tokenizer learns from


@given(documents=st.integers(1, 10**7), valid=st.none() | st.integers(0, 10**6))
def test_no_longer_corpus_holds_out_what_a_shorter_one_trains_on(documents, valid) -> None:
    """So a tokenizer can begin to learn before the corpus has been read to its end."""
    for more in (1, 100, documents):
        shorter = corpus.split_at_end(documents, documents, valid)
        longer = corpus.split_at_end(documents + more, documents + more, valid)
        number = longer.boundary - (shorter.by == "document" != longer.by)
        assert shorter.by == "piece" or shorter.boundary <= number


@pytest.mark.parametrize("valid", [None, 0, 1, 9])
@pytest.mark.parametrize("most", [10**9, 1000])
def test_a_tokenizer_learns_from_the_training_part(tmp_path, monkeypatch, valid, most) -> None:
    """From all of it in one reading, or from every so manieth piece of a large one in two."""
    monkeypatch.setattr(prepare, "TOKENIZER_CHARACTERS", most)
    seen: list[list[str]] = []
    learn = corpus.train_tokenizer

    def spy(documents: Any, size: int) -> Tokenizer:
        seen.append([])
        return learn((seen[-1].append(text) or text for text in documents), size)

    reads = []
    read_pieces = corpus.read_pieces
    monkeypatch.setattr(corpus, "train_tokenizer", spy)
    monkeypatch.setattr(corpus, "read_pieces", lambda *a: reads.append(1) or read_pieces(*a))
    src = write_jsonl(tmp_path / "a.jsonl", STORIES)
    run(src, tmp_path / "out", tokenizer="bpe:300", valid=valid, length=8)
    training = STORIES[: 60 - (1 if valid is None else valid)]
    stride = -(-sum(map(len, STORIES)) // most)
    assert seen[-1] == training[::stride]
    assert len(reads) == (2 if stride == 1 else 3)


def test_one_percent_is_held_out_by_default(tmp_path: Path) -> None:
    src = tmp_path / "lines.txt"
    src.write_text("".join(f"this is line number {i:04d}\n" for i in range(350)))
    result = run(src, tmp_path / "out", documents="line", length=8)
    assert {name: info.documents for name, info in result.manifest.splits.items()} == {
        "train": 347,
        "valid": 3,
    }


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_a_single_document_is_held_out_by_pieces(tmp_path, monkeypatch, tokenizer: str) -> None:
    monkeypatch.setattr(readers, "PIECE_CHARACTERS", 100)
    text = " ".join(f"number-{i}" for i in range(2000))
    (tmp_path / "book.txt").write_text(text)
    result = run(tmp_path / "book.txt", tmp_path / "out", length=16, tokenizer=tokenizer)
    model = Tokenizer.load(tmp_path / "out")
    parts = {
        name: [*chain.from_iterable(rows_of(tmp_path / "out", name))] for name in ("train", "valid")
    }
    train, valid = (model.decode(part) for part in parts.values())
    assert text.startswith(train)
    assert valid in text + END_OF_TEXT
    rest = len(model.encode([text + END_OF_TEXT])[0]) - len(parts["train"])
    dropped = [info.dropped_tokens for info in result.manifest.splits.values()]
    assert rest == dropped[0] + len(parts["valid"]) + dropped[1]
    assert 0.005 < len(valid) / len(text) < 0.015


# Tokens


def test_a_document_may_have_text_but_no_token(tmp_path: Path) -> None:
    backend = Backend(models.WordLevel({"a": 0, "b": 1, "<eos>": 2}))
    backend.normalizer = normalizers.Replace("zzz", "")
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    Tokenizer(backend).save(tmp_path / "tokenizer")
    src = write_jsonl(tmp_path / "a.jsonl", ["a", "", " ", "zzz", "b a", "a a a a"])
    options = {"rows": "document", "tokenizer": str(tmp_path / "tokenizer"), "valid": 0}
    result = run(src, tmp_path / "out", length=3, **options)
    assert rows_of(tmp_path / "out", "train") == [[0, 2, 2], [1, 0, 2]]
    info = result.manifest.splits["train"]
    assert (info.documents, info.long_documents) == (4, 1)


def test_a_large_vocabulary_takes_four_bytes(tmp_path: Path) -> None:
    words = [f"w{i}" for i in range(70_000)]
    Tokenizer.from_words([*words, "<eos>"]).save(tmp_path / "tokenizer")
    src = write_jsonl(tmp_path / "a.jsonl", [" ".join(words[i::7]) for i in range(7)])
    run(src, tmp_path / "out", tokenizer=str(tmp_path / "tokenizer"), valid=1)
    assert max(map(max, rows_of(tmp_path / "out", "train"))) == 70_000
    assert (tmp_path / "out" / "train-00000.bin").stat().st_size == 4 * 60_006 // 128 * 128


def test_a_tokenizer_needs_an_end_of_text_token(tmp_path: Path) -> None:
    Tokenizer.from_words(["a", "b"]).save(tmp_path / "tokenizer")
    src = write_jsonl(tmp_path / "a.jsonl", ["a a a"] * 30)
    options = {"tokenizer": str(tmp_path / "tokenizer"), "length": 4, "valid": 3}
    with pytest.raises(UserError, match="`eot`"):
        run(src, tmp_path / "out", **options)
    run(src, tmp_path / "out", eot="b", **options)
    assert rows_of(tmp_path / "out", "train") == [[0, 0, 0, 1]] * 27
    assert Tokenizer.load(tmp_path / "out").eot_id == 1


# Cores, memory, disk, progress


def test_the_result_does_not_depend_on_cores(stories: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from didi_instruct.data.prepare import *\n"
        "prepare(PrepareSettings(src=sys.argv[1], out=Path(sys.argv[2]), tokenizer='bpe:300',"
        " length=16, valid=9))\n"
        "assert 'torch' not in sys.modules"
    )
    for threads in ("1", "4"):
        subprocess.run(
            [sys.executable, "-c", code, str(stories), str(tmp_path / threads)],
            env={"RAYON_NUM_THREADS": threads, "PATH": "", "TOKENIZERS_PARALLELISM": "false"},
            check=True,
        )
    assert content_of(tmp_path / "1") == content_of(tmp_path / "4")


def test_text_is_consumed_as_it_is_written(tmp_path: Path, monkeypatch) -> None:
    """At most two batches and a piece lie between reading and writing, so memory is bounded."""
    monkeypatch.setattr(readers, "PIECE_CHARACTERS", 1000)
    (tmp_path / "big.txt").write_text("some words " * 100_000)
    read_pieces, add = corpus.read_pieces, packing.TokenFiles.add
    read = written = 0
    ahead = []

    def counting_read(*args: Any) -> Any:
        nonlocal read
        for piece in read_pieces(*args):
            read += len(piece.text)
            yield piece

    def counting_add(self: packing.TokenFiles, tokens: np.ndarray) -> None:
        nonlocal written
        ahead.append(read - written)
        written += len(tokens)
        add(self, tokens)

    monkeypatch.setattr(corpus, "read_pieces", counting_read)
    monkeypatch.setattr(packing.TokenFiles, "add", counting_add)
    run(tmp_path / "big.txt", tmp_path / "out", valid=0, batch_characters=8000)
    assert written > 1_000_000
    assert len(ahead) > 100
    assert max(ahead) <= 2 * 9000


def test_a_long_document_takes_no_more_memory_than_a_row() -> None:
    rows = arrange(Layout("document", "cut"), EOT, 10)
    for start in range(0, 300, 3):
        assert rows.place([start, start + 1, start + 2], last=False) == []
        assert len(rows._begun) <= 10
    assert rows.place([], last=True) == list(range(10))
    assert rows.place([5], last=True) == [5] + [EOT] * 9, "nothing is left of the one before"


def test_short_documents_in_long_rows_take_no_more_memory_than_a_batch() -> None:
    """Padding counts: a batch of 10,000 characters never becomes many more tokens."""
    rows = arrange(Layout("document"), EOT, 500)
    grouped = batches([Piece("a", last=True)] * 2000, 10_000, rows.piece_cost)
    encoded = encode_ahead(((batch, None) for batch in grouped), Tokenizer.load("bytes"))
    sizes = [sum(len(rows.place(ids, True)) for ids in found) for _, _, found in encoded]
    assert sum(sizes) == 2000 * 500
    assert max(sizes) <= 10_000


def test_too_little_room_is_noticed_before_writing(stories, tmp_path: Path, monkeypatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(UserError, match=r"needs about .* KiB, but the disk has 100 bytes free"):
        run(stories, tmp_path / "out", valid=5)
    assert not (tmp_path / "out").exists()


def test_a_disk_that_fills_up_is_one_clear_line_and_can_be_resumed(
    stories: Path, tmp_path: Path, monkeypatch
) -> None:
    options = {"valid": 5, "shard_rows": 5, "batch_characters": 500}
    run(stories, tmp_path / "whole", **options)
    calls = [0]

    def full(descriptor: int) -> None:
        calls[0] += 1
        if calls[0] > 40:
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(UserError, match="disk is full.*same command again"):
            run(stories, tmp_path / "out", **options)
    assert not list((tmp_path / "out").rglob(".*"))
    assert json.loads((tmp_path / "out/unfinished/progress.json").read_text())["skip"] > 0
    run(stories, tmp_path / "out", **options)
    assert content_of(tmp_path / "out") == content_of(tmp_path / "whole")


def test_progress_ends_at_its_total_in_every_stage(stories: Path, tmp_path: Path) -> None:
    seen: dict[str, list[PrepareProgress]] = {}
    run(
        stories,
        tmp_path / "out",
        lambda p: seen.setdefault(p.stage, []).append(p),
        tokenizer="bpe:300",
        batch_characters=500,
    )
    assert list(seen) == ["learn tokenizer", "tokenise"]
    for reports in seen.values():
        done = [progress.done for progress in reports]
        assert done == sorted(done)
        assert done[-1] == reports[-1].total == stories.stat().st_size


# What is refused

REFUSED = {
    "empty": (["", " "], {}, "corpus is empty"),
    "one short document": (["short"], {}, r"`documents=line` or paragraph.*`valid=0`"),
    "all held out": (STORIES[:3], {"valid": 3}, "leaves nothing to train on"),
    "more than there is": (STORIES[:1], {"valid": 2}, "leaves nothing to train on"),
    "short valid": ([*STORIES, "end"], {}, r"held-out part \(1 document\) has 4 tokens.*`valid`"),
    "short train": (["a", STORIES[4]], {}, r"training part \(1 document\) has 2 tokens"),
    "length": (STORIES, {"length": 0}, "`length` is 0"),
    "valid": (STORIES, {"valid": -1}, "`valid` is -1"),
    "shard rows": (STORIES, {"shard_rows": 0}, "`shard_rows` is 0"),
    "documents": (STORIES, {"documents": "page"}, "`documents` is `page`: use file, line"),
    "rows": (STORIES, {"rows": "page"}, "`rows` is `page`: use stream or document"),
    "long": (STORIES, {"rows": "document", "long": "keep"}, "`long` is `keep`: use drop or cut"),
    "long of a stream": (STORIES, {"long": "cut"}, "`long=cut` needs `rows=document`"),
    "all too long": (
        STORIES,
        {"rows": "document"},
        r"no document of the training part \(59 documents\) fits a row of 32 .*`long=cut`",
    ),
    "held-out ones too long": (
        ["short", "short", STORIES[0]],
        {"rows": "document"},
        r"no document of the held-out part \(1 document\) fits a row of 32 .*larger `length`",
    ),
    "one long document": (
        ["word " * 9000],
        {"rows": "document"},
        r"single document.*`documents=line`.*`valid=0`",
    ),
    "bpe": (STORIES, {"tokenizer": "bpe:100"}, "257 or more"),
    "bpe name": (STORIES, {"tokenizer": "bpe:many"}, "use bpe:N"),
    "bpe eot": (STORIES, {"tokenizer": "bpe:300", "eot": "<s>"}, "`eot` is `<s>`"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_leaves_nothing_behind(tmp_path: Path, case: str) -> None:
    texts, options, message = REFUSED[case]
    src = write_jsonl(tmp_path / "a.jsonl", texts)
    with pytest.raises(UserError, match=message) as caught:
        run(src, tmp_path / "out", **options)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("case", ["empty", "one short document", "all held out"])
def test_a_tokenizer_is_not_learnt_in_vain(tmp_path: Path, case: str) -> None:
    texts, options, message = REFUSED[case]
    src = write_jsonl(tmp_path / "a.jsonl", texts)
    with pytest.raises(UserError, match=message):
        run(src, tmp_path / "out", tokenizer="bpe:300", **options)
    assert not (tmp_path / "out").exists()


def test_a_bad_last_line_leaves_nothing_behind(stories: Path, tmp_path: Path) -> None:
    stories.write_text(stories.read_text() + "not json")
    with pytest.raises(UserError, match=r"stories.jsonl:61: not JSON"):
        run(stories, tmp_path / "out", batch_characters=300, shard_rows=2)
    assert not (tmp_path / "out").exists()


def test_a_folder_with_other_files_is_left_alone(stories: Path, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("dear")
    for overwrite in (False, True):
        with pytest.raises(UserError, match=r"other files in it \(`thesis.tex`"):
            run(stories, tmp_path / "home", valid=5, overwrite=overwrite)
    assert content_of(tmp_path / "home") == {"thesis.tex": b"dear"}
    (tmp_path / "manifest").mkdir()
    (tmp_path / "manifest" / "manifest.json").write_text('{"format": "of another program"}')
    with pytest.raises(UserError, match="not written by `didi data prepare`"):
        run(stories, tmp_path / "manifest", valid=5, overwrite=True)
    with pytest.raises(UserError, match="is a file"):
        run(stories, stories)


def test_rows_are_opened_as_they_were_written(stories: Path, tmp_path: Path) -> None:
    run(stories, tmp_path / "out", valid=20, shard_rows=7)
    data = open_data(tmp_path / "out", "valid", verify=True)
    assert data.ordered(0, 10**6).tolist() == rows_of(tmp_path / "out", "valid")
