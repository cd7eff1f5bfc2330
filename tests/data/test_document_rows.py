"""Rows of one document each: every document once, whole, and nothing after its end."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers, pre_tokenizers

from didi_instruct.data import packing, readers
from didi_instruct.data.corpus import Cursor, PlacedPiece
from didi_instruct.data.dataset import open_data
from didi_instruct.data.manifest import Layout, Manifest
from didi_instruct.data.packing import OneDocument, arrange, encode_pieces
from didi_instruct.data.prepare import PrepareResult, PrepareSettings, prepare
from didi_instruct.data.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("fast_disk")

EOT = 256  # of the tokenizer `bytes`
STORIES = [f"Story {i}: " + "the cat saw ½ a dög. " * (1 + i * 7 % 5) for i in range(60)]
"""Of 32 to 122 bytes."""


def run(folder: Path, texts: list[str], **options: Any) -> PrepareResult:
    src = folder / "texts.jsonl"
    src.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    settings: dict[str, Any] = {"tokenizer": "bytes", "length": 128, "valid": 0, **options}
    out = settings.pop("out", "out")
    return prepare(PrepareSettings(src=str(src), out=folder / out, rows="document", **settings))


def rows_of(folder: Path, split: str = "train") -> list[list[int]]:
    data = open_data(folder, split, verify=True)
    return data.ordered(0, data.num_sequences).tolist()


def padded(documents: list[list[int]], length: int, eot: int) -> list[list[int]]:
    return [ids + [eot] * (length - len(ids)) for ids in documents]


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_every_document_is_one_row(tmp_path: Path, tokenizer: str) -> None:
    result = run(tmp_path, STORIES, tokenizer=tokenizer, valid=20, shard_rows=7)
    model = Tokenizer.load(tmp_path / "out")
    assert model.eot_id is not None
    for split, texts in {"train": STORIES[:40], "valid": STORIES[40:]}.items():
        expected = padded(model.encode(texts), 128, model.eot_id)
        assert rows_of(tmp_path / "out", split) == expected
        rows = rows_of(tmp_path / "out", split)
        assert model.decode_batch(rows, stop_at_eot=True) == texts
        info = result.manifest.splits[split]
        assert (info.rows, info.documents) == (len(texts), len(texts))
        assert (info.tokens, info.dropped_tokens) == (128 * len(texts), 0)
        assert info.long_documents == 0


@pytest.mark.parametrize("long", ["drop", "cut"])
def test_a_document_fits_with_one_end_of_text(tmp_path: Path, long: str) -> None:
    """Of 1 to 11 tokens, those of 9 are the longest that fit a row of 10."""
    texts = ["abcdefghijklm"[:n] for n in range(1, 12)]
    result = run(tmp_path, texts, length=10, long=long)
    whole = padded([list(text.encode()) for text in texts[:9]], 10, EOT)
    cut = [list(b"abcdefghij")] * 2 if long == "cut" else []
    assert rows_of(tmp_path / "out") == whole + cut
    assert whole[8] == [*b"abcdefghi", EOT]
    info = result.manifest.splits["train"]
    assert (info.documents, info.rows, info.long_documents) == (11, 9 + len(cut), 2)


def test_empty_documents_have_no_row(tmp_path: Path) -> None:
    """Blank ones are no documents; one may also have text, but no token."""
    backend = Backend(models.WordLevel({"a": 0, "b": 1, "<eos>": 2}))
    backend.normalizer = normalizers.Replace("zzz", "")
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    Tokenizer(backend).save(tmp_path / "tokenizer")
    for long in ("drop", "cut"):
        result = run(
            tmp_path, ["a", "", " ", "zzz", "b a", "a a a a"], length=3, long=long,
            tokenizer=str(tmp_path / "tokenizer"), out=long,
        )  # fmt: skip
        expected = [[0, 2, 2], [1, 0, 2], *([[0, 0, 0]] if long == "cut" else [])]
        assert rows_of(tmp_path / long) == expected
        info = result.manifest.splits["train"]
        assert (info.documents, info.long_documents) == (4, 1)


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_the_pieces_of_a_document_are_joined(tmp_path, monkeypatch, tokenizer: str) -> None:
    """Documents of up to 30 pieces, over many batches, as if each were tokenised at once."""
    monkeypatch.setattr(readers, "PIECE_CHARACTERS", 50)
    texts = [" ".join(f"bird {i}" for i in range(1 + 29 * n % 120)) for n in range(40)]
    result = run(tmp_path, texts, tokenizer=tokenizer, length=250, batch_characters=100)
    model = Tokenizer.load(tmp_path / "out")
    assert model.eot_id is not None
    documents = model.encode(texts)
    whole = [ids for ids in documents if len(ids) < 250]
    assert rows_of(tmp_path / "out") == padded(whole, 250, model.eot_id)
    assert result.manifest.splits["train"].long_documents == len(documents) - len(whole)
    assert 0 < len(whole) < len(documents)
    assert result.manifest.sources[0].pieces > 200


def test_the_result_does_not_depend_on_batches(tmp_path: Path) -> None:
    contents = []
    for batch in (1, 777, 1 << 20):
        run(
            tmp_path, STORIES, length=100, valid=9, shard_rows=3, batch_characters=batch,
            out=str(batch),
        )  # fmt: skip
        folder = tmp_path / str(batch)
        contents.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert contents[0] == contents[1] == contents[2]
    assert len(contents[0]) > 10


def test_the_manifest_tells_the_layout(tmp_path: Path) -> None:
    run(tmp_path, STORIES, length=100, long="cut", valid=5)
    assert Manifest.read(tmp_path / "out").layout == Layout("document", "cut")
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    long = [len(text.encode()) > 99 for text in STORIES]
    counts = {name: split["long_documents"] for name, split in manifest["splits"].items()}
    assert counts == {"train": sum(long[:55]), "valid": sum(long[55:])}
    assert min(counts.values()) > 0


def test_a_long_document_takes_no_more_memory_than_a_row() -> None:
    rows = arrange(Layout("document", "cut"), EOT, 10)
    assert isinstance(rows, OneDocument)
    for start in range(0, 300, 3):
        assert rows.place([start, start + 1, start + 2], last=False) == []
        assert len(rows._begun) <= 10
    assert rows.place([], last=True) == list(range(10))
    assert rows.place([5], last=True) == [5] + [EOT] * 9, "nothing is left of the one before"


def test_short_documents_in_long_rows_take_no_more_memory_than_a_batch() -> None:
    """Padding counts: a batch of 10,000 characters never becomes many more tokens."""

    def pieces() -> Iterator[PlacedPiece]:
        for i in range(2000):
            yield PlacedPiece("a", True, i, i, i + 1, Cursor(0, i + 1))

    rows = arrange(Layout("document"), EOT, 500)
    sizes = [
        len(batch.tokens)
        for batch in encode_pieces(pieces(), Tokenizer.load("bytes"), rows, "<u2", 10_000)
    ]
    assert sum(sizes) == 2000 * 500
    assert max(sizes) <= 10_000


def test_a_shard_ends_with_a_document(tmp_path: Path, monkeypatch) -> None:
    """So an unfinished run keeps no tokens, and goes on with the next document."""
    split_at, left = packing.TokenBatch.split_at, []

    def spy(self: packing.TokenBatch, position: int) -> tuple[Cursor, np.ndarray, int]:
        place = split_at(self, position)
        left.append((place[0].pieces, len(place[1])))
        return place

    monkeypatch.setattr(packing.TokenBatch, "split_at", spy)
    run(tmp_path, STORIES, length=100, shard_rows=4)
    fits = [i for i, text in enumerate(STORIES, 1) if len(text.encode()) < 100]
    assert left == [(number, 0) for number in fits[3::4]]
