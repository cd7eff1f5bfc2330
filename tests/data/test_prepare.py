"""Prepared rows are the documents, and the held-out ones are the last."""

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from didi_instruct.data import corpus, packing, prepare, readers
from didi_instruct.data.files import sha256_file
from didi_instruct.data.manifest import Manifest
from didi_instruct.data.prepare import PrepareProgress, PrepareResult, PrepareSettings
from didi_instruct.data.readers import Piece
from didi_instruct.data.tokenizer import END_OF_TEXT, Tokenizer
from didi_instruct.errors import UserError

pytestmark = pytest.mark.usefixtures("fast_disk")

STORIES = [f"Story {i}: " + f"the cat saw {i} birds and ½ a dög. " * (1 + i % 5) for i in range(60)]


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture
def stories(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "stories.jsonl", STORIES)


def run(src: Path, out: Path, **options: Any) -> PrepareResult:
    settings: dict[str, Any] = {"tokenizer": "bytes", "length": 32, **options}
    return prepare.prepare(PrepareSettings(src=str(src), out=out, **settings))


def test_a_fingerprint_is_of_the_rows_not_of_the_files_they_came_from(
    stories: Path, tmp_path: Path
) -> None:
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


def tokens_of(folder: Path, split: str) -> np.ndarray:
    """Read a split's rows without the code under test."""
    manifest = json.loads((folder / "manifest.json").read_text())
    shards = manifest["splits"][split]["shards"]
    dtype = {"uint16": "<u2", "uint32": "<u4"}[manifest["dtype"]]
    arrays = [np.fromfile(folder / shard["file"], dtype) for shard in shards]
    for array, shard in zip(arrays, shards, strict=True):
        assert array.size == shard["rows"] * manifest["length"]
        assert sha256_file(folder / shard["file"]) == shard["sha256"]
    return np.concatenate(arrays)


def text_of(folder: Path, split: str) -> str:
    return Tokenizer.load(folder).decode(tokens_of(folder, split))


def content_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_rows_are_the_documents_joined_by_end_of_text(
    stories: Path, tmp_path: Path, tokenizer: str
) -> None:
    result = run(stories, tmp_path / "out", tokenizer=tokenizer, valid=20, shard_rows=5)
    model = Tokenizer.load(tmp_path / "out")
    for split, documents in {"train": STORIES[:40], "valid": STORIES[40:]}.items():
        joined = "".join(text + END_OF_TEXT for text in documents)
        tokens = tokens_of(tmp_path / "out", split)
        expected = model.encode([joined])[0]
        info = result.manifest.splits[split]
        assert tokens.tolist() == expected[: len(tokens)]
        assert info.dropped_tokens == len(expected) - len(tokens) < 32
        assert info.tokens == len(tokens) == info.rows * 32
        assert info.documents == len(documents)
        assert joined.encode().startswith(text_of(tmp_path / "out", split).encode()[:-3])


def test_a_stream_is_what_it_always_was(stories: Path, tmp_path: Path) -> None:
    """Checksums and settings as recorded before rows could hold anything else."""
    run(stories, tmp_path / "out", valid=20, shard_rows=50)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    expected = {
        "train": ["a44fc78ee27cb6c9", "d71c9af9a1b4eeb3", "3aed520c84fd9dad"],
        "valid": ["59f02b64f59df1a9", "f05b9abca288538f"],
    }
    for split, info in manifest["splits"].items():
        assert [shard["sha256"][:16] for shard in info["shards"]] == expected[split]
        assert list(info) == ["documents", "tokens", "rows", "dropped_tokens", "shards"]
        tokens_of(tmp_path / "out", split)  # the files are what the manifest says
    assert manifest["settings"] == {
        "length": 32,
        "tokenizer": f"sha256:{Tokenizer.load('bytes').hash}",
        "eot_id": 256,
        "field": "text",
        "documents": "file",
        "valid": 20,
        "shard_rows": 50,
        "piece_characters": 16384,
    }


def test_a_bpe_is_learned_from_the_training_documents_alone(tmp_path: Path) -> None:
    texts = ["plain words here " * 20] * 10
    for name, last in (("a", "plain"), ("b", "zzzz qqqq " * 50)):
        src = write_jsonl(tmp_path / f"{name}.jsonl", [*texts, last * 20])
        run(src, tmp_path / name, tokenizer="bpe:300", length=8, valid=1)
    assert Tokenizer.load(tmp_path / "a").hash == Tokenizer.load(tmp_path / "b").hash


def test_a_tokenizer_learns_from_a_sample_of_a_large_corpus(stories, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(prepare, "_TOKENIZER_CHARACTERS", 1000)
    seen: list[str] = []
    train = prepare.train_tokenizer

    def spy(documents: Any, size: int) -> Tokenizer:
        seen.extend(documents)
        return train(seen, size)

    monkeypatch.setattr(prepare, "train_tokenizer", spy)
    run(stories, tmp_path / "out", tokenizer="bpe:300", valid=5)
    positions = [STORIES.index(text) for text in seen]
    assert sum(map(len, seen)) <= 1100
    assert len(set(np.diff(positions))) == 1
    assert positions[-1] > 40


def test_one_percent_is_held_out_by_default(tmp_path: Path) -> None:
    src = tmp_path / "lines.txt"
    src.write_text("".join(f"this is line number {i:04d}\n" for i in range(350)))
    run(src, tmp_path / "out", documents="line", length=8)
    valid = "".join(f"this is line number {i:04d}{END_OF_TEXT}" for i in (347, 348, 349))
    assert valid.startswith(text_of(tmp_path / "out", "valid"))
    assert "0345" in text_of(tmp_path / "out", "train")


def test_a_single_document_is_held_out_by_pieces(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(readers, "PIECE_CHARACTERS", 100)
    text = " ".join(f"number-{i}" for i in range(2000))
    (tmp_path / "book.txt").write_text(text)
    result = run(tmp_path / "book.txt", tmp_path / "out", length=16)
    train, valid = text_of(tmp_path / "out", "train"), text_of(tmp_path / "out", "valid")
    dropped = result.manifest.splits["train"].dropped_tokens
    assert text.startswith(train)
    assert (text + END_OF_TEXT)[len(train) + dropped :].startswith(valid)
    assert 0.005 < len(valid) / len(text) < 0.015


def test_nothing_is_held_out_on_request(stories: Path, tmp_path: Path) -> None:
    result = run(stories, tmp_path / "out", valid=0)
    assert result.manifest.splits["valid"].rows == 0
    assert not list((tmp_path / "out").glob("valid*"))
    joined = "".join(text + END_OF_TEXT for text in STORIES)
    assert joined.startswith(text_of(tmp_path / "out", "train")[:-1])


def test_the_manifest_tells_where_the_rows_come_from(stories: Path, tmp_path: Path) -> None:
    run(stories, tmp_path / "out", valid=5, shard_rows=7)
    text = (tmp_path / "out" / "manifest.json").read_text()
    assert str(tmp_path) not in text, "a manifest names no place on its maker's machine"
    manifest = json.loads(text)
    (source,) = manifest["sources"]
    assert source["path"] == "stories.jsonl"
    assert source["sha256"] == sha256_file(stories)
    assert source["documents"] == 60
    assert manifest["tokenizer"]["hash"] == Tokenizer.load("bytes").hash
    assert manifest["tokenizer"]["eot_id"] == 256
    assert manifest["dtype"] == "uint16"
    assert Manifest.read(tmp_path / "out").length == 32
    assert not (tmp_path / "out" / "progress.json").exists()


def test_a_large_vocabulary_takes_four_bytes(tmp_path: Path) -> None:
    words = [f"w{i}" for i in range(70_000)]
    Tokenizer.from_words([*words, "<eos>"]).save(tmp_path / "tokenizer")
    src = write_jsonl(tmp_path / "a.jsonl", [" ".join(words[i::7]) for i in range(7)])
    run(src, tmp_path / "out", tokenizer=str(tmp_path / "tokenizer"), valid=1)
    assert tokens_of(tmp_path / "out", "train").max() == 70_000
    assert (tmp_path / "out" / "train-00000.bin").stat().st_size == 4 * 60_006 // 128 * 128


def test_a_tokenizer_needs_an_end_of_text_token(stories: Path, tmp_path: Path) -> None:
    Tokenizer.from_words(["a", "b"]).save(tmp_path / "tokenizer")
    src = write_jsonl(tmp_path / "a.jsonl", ["a a a"] * 30)
    with pytest.raises(UserError, match="`eot`"):
        run(src, tmp_path / "out", tokenizer=str(tmp_path / "tokenizer"), length=4)
    run(src, tmp_path / "out", tokenizer=str(tmp_path / "tokenizer"), length=4, valid=3, eot="b")
    assert tokens_of(tmp_path / "out", "train").tolist() == [0, 0, 0, 1] * 27
    assert Tokenizer.load(tmp_path / "out").eot_id == 1


def test_the_result_does_not_depend_on_batches(stories: Path, tmp_path: Path) -> None:
    for batch in (1, 777, 1 << 20):
        run(stories, tmp_path / str(batch), valid=9, shard_rows=3, batch_characters=batch)
    first, *others = (content_of(tmp_path / str(batch)) for batch in (1, 777, 1 << 20))
    assert all(other == first for other in others)


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
    """At most a batch and a piece lie between reading and writing, so memory is bounded."""
    monkeypatch.setattr(readers, "PIECE_CHARACTERS", 1000)
    monkeypatch.setattr(readers, "_CHUNK_BYTES", 4000)
    (tmp_path / "big.txt").write_text("some words " * 100_000)
    read_pieces, add = corpus.read_pieces, packing.ShardWriter.add
    read = written = 0
    ahead = []

    def counting_read(*args: Any) -> Iterator[Piece]:
        nonlocal read
        read = 0
        for piece in read_pieces(*args):
            read += len(piece.text)
            yield piece

    def counting_add(self: packing.ShardWriter, tokens: np.ndarray) -> Iterator[int]:
        nonlocal written
        ahead.append(read - written)
        written += len(tokens)
        return add(self, tokens)

    monkeypatch.setattr(corpus, "read_pieces", counting_read)
    monkeypatch.setattr(packing.ShardWriter, "add", counting_add)
    run(tmp_path / "big.txt", tmp_path / "out", valid=0, batch_characters=8000)
    assert written > 1_000_000
    assert len(ahead) > 100
    assert max(ahead) <= 9000


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
def test_what_cannot_work_is_refused_before_anything_is_written(tmp_path: Path, case: str) -> None:
    texts, options, message = REFUSED[case]
    src = write_jsonl(tmp_path / "a.jsonl", texts)
    with pytest.raises(UserError, match=message) as caught:
        run(src, tmp_path / "out", **options)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_bad_last_line_is_refused_before_anything_is_written(stories, tmp_path: Path) -> None:
    stories.write_text(stories.read_text() + "not json")
    with pytest.raises(UserError, match=r"stories.jsonl:61: not JSON"):
        run(stories, tmp_path / "out")
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


def test_too_little_room_is_noticed_before_writing(stories, tmp_path: Path, monkeypatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(UserError, match=r"needs about .* KiB, but the disk has 100 bytes free"):
        run(stories, tmp_path / "out", valid=5)
    assert not (tmp_path / "out").exists()


def test_a_disk_that_fills_up_is_one_clear_line_and_can_be_resumed(
    stories: Path, tmp_path: Path, monkeypatch
) -> None:
    run(stories, tmp_path / "whole", valid=5, shard_rows=5)
    fsync, calls = os.fsync, [0]

    def full(descriptor: int) -> None:
        calls[0] += 1
        if calls[0] > 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(UserError, match="disk is full.*same command again"):
            run(stories, tmp_path / "out", valid=5, shard_rows=5)
    assert not list((tmp_path / "out").glob(".*"))
    run(stories, tmp_path / "out", valid=5, shard_rows=5)
    assert content_of(tmp_path / "out") == content_of(tmp_path / "whole")


def test_progress_ends_at_its_total_in_every_stage(stories: Path, tmp_path: Path) -> None:
    seen: dict[str, list[PrepareProgress]] = {}
    settings = PrepareSettings(
        src=str(stories), out=tmp_path / "out", tokenizer="bpe:300", length=16, valid=5,
        batch_characters=500,
    )  # fmt: skip
    prepare.prepare(settings, lambda p: seen.setdefault(p.stage, []).append(p))
    assert list(seen) == ["read", "learn tokenizer", "tokenise"]
    for stage in ("read", "tokenise"):
        done = [progress.done for progress in seen[stage]]
        assert done == sorted(done)
        assert done[-1] == seen[stage][-1].total
    assert seen["read"][-1].total == stories.stat().st_size
    assert seen["tokenise"][-1].total == sum(map(len, STORIES))
