"""Every kind of file, as documents; and every kind of damage, as one clear line."""

import csv
import gzip
import io
import itertools
import json
import lzma
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from didi_instruct.data import readers
from didi_instruct.data.readers import Piece, ReadOptions, cut_into_pieces, read_pieces
from didi_instruct.data.sources import Meter, find_sources
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import MissingExtraError, UserError

TEXTS = ["first\ndocument, with a comma", 'second "quoted"', "drittes: ä ½ 🙂"]
GPT2 = Path(__file__).parents[3] / "shared" / "data" / "gpt2_tokenizer"


def documents_of(src: Path | str, **options: Any) -> list[str]:
    """Read all documents of a file or folder."""
    documents, parts = [], []
    for source in find_sources(str(src)):
        for piece in read_pieces(source, ReadOptions(**options), Meter()):
            parts.append(piece.text)
            if piece.last:
                documents.append("".join(parts))
                parts = []
        assert not parts, "a file ends with its last document"
    return documents


def written(path: Path, content: bytes | str) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def jsonl(texts: list[str], field: str = "text") -> bytes:
    return "".join(json.dumps({"id": 1, field: text}) + "\n" for text in texts).encode()


def parquet(texts: list[str | None]) -> bytes:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    buffer = io.BytesIO()
    table = pa.table({"id": list(range(len(texts))), "text": texts})
    pq.write_table(table, buffer, row_group_size=2)
    return buffer.getvalue()


def compressed(ending: str, data: bytes) -> bytes:
    if ending == ".zst":
        return pytest.importorskip("zstandard").ZstdCompressor().compress(data)
    return {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}[ending](data)


def csv_of(texts: list[str]) -> bytes:
    buffer = io.StringIO()
    csv.writer(buffer).writerows([("id", "text"), *enumerate(texts)])
    return buffer.getvalue().encode()


@pytest.mark.parametrize("ending", ["", ".gz", ".xz", ".zst"])
@pytest.mark.parametrize("kind", [".txt", ".jsonl", ".csv", ".parquet", ".fasta"])
def test_every_kind_of_file_gives_its_documents(tmp_path: Path, kind: str, ending: str) -> None:
    content, expected = {
        ".txt": (TEXTS[0].encode(), TEXTS[:1]),
        ".jsonl": (jsonl(TEXTS), TEXTS),
        ".csv": (csv_of(TEXTS), TEXTS),
        ".parquet": (parquet(TEXTS), TEXTS),
        ".fasta": (b">a one\nMKV\nLA\n>b\nGG\n", ["MKVLA", "GG"]),
    }[kind]
    path = written(tmp_path / f"corpus{kind}{ending}", compressed(ending, content))
    assert documents_of(path) == expected


def test_a_folder_is_read_in_the_order_of_its_paths(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".hidden").mkdir()
    written(tmp_path / "c.txt", "third")
    written(tmp_path / "b" / "2.jsonl", jsonl(["second"]))
    written(tmp_path / "a.txt.gz", gzip.compress(b"first"))
    written(tmp_path / "image.png", b"\xff")
    written(tmp_path / ".hidden" / "d.txt", "not this")
    assert documents_of(tmp_path) == ["first", "second", "third"]
    assert [source.name for source in find_sources(str(tmp_path))] == [
        "a.txt.gz", "b/2.jsonl", "c.txt",
    ]  # fmt: skip


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_text_by_file_line_and_paragraph(tmp_path: Path, newline: str, monkeypatch) -> None:
    monkeypatch.setattr(readers, "_CHUNK_BYTES", 3)  # every seam between chunks is tried
    text = newline.join(["", "  one", "two  ", " ", "", "three é", "", "", "four", "", ""])
    path = written(tmp_path / "a.txt", text)
    assert documents_of(path) == [text]
    lines = ["  one", "two  ", "three é", "four"]
    assert documents_of(path, documents="line") == lines
    paragraphs = ["  one\ntwo  ", "three é", "four"]
    assert documents_of(path, documents="paragraph") == paragraphs


def test_blank_documents_are_left_out(tmp_path: Path) -> None:
    assert documents_of(written(tmp_path / "a.jsonl", jsonl(["", " \n", "a"]) + b"\n\n")) == ["a"]
    assert documents_of(written(tmp_path / "a.txt", " \n\n ")) == []
    assert documents_of(written(tmp_path / "b.txt", "")) == []
    assert documents_of(written(tmp_path / "a.csv", "text\n\na\n")) == ["a"]
    assert documents_of(written(tmp_path / "b.csv", "")) == []
    assert documents_of(written(tmp_path / "a.parquet", parquet([None, "a", ""]))) == ["a"]
    assert documents_of(written(tmp_path / "a.fasta", ">only\n>header\n\n>b\nA\n")) == ["A"]
    null = b'{"text": null}\n{"text": "a"}\n'
    assert documents_of(written(tmp_path / "b.jsonl", null)) == ["a"]


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    mark = b"\xef\xbb\xbf"
    assert documents_of(written(tmp_path / "a.txt", mark + b"hi")) == ["hi"]
    assert documents_of(written(tmp_path / "a.jsonl", mark + jsonl(["hi"]))) == ["hi"]
    assert documents_of(written(tmp_path / "a.csv", mark + b"text\nhi\n")) == ["hi"]


def test_another_field_can_be_named(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", jsonl(["x"], field="abstract"))
    assert documents_of(path, field="abstract") == ["x"]


@pytest.mark.parametrize("kind", [".jsonl", ".csv", ".parquet"])
def test_a_missing_field_lists_those_there_are(tmp_path: Path, kind: str) -> None:
    content = {".jsonl": jsonl(["x"]), ".csv": csv_of(["x"]), ".parquet": parquet(["x"])}[kind]
    path = written(tmp_path / f"a{kind}", content)
    with pytest.raises(UserError, match=r"^a.*no field `body`, only `id`, `text`.*`field`"):
        documents_of(path, field="body")


def test_a_fasta_sequence_may_be_one_long_line(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(readers, "_CHUNK_BYTES", 7)
    path = written(tmp_path / "a.fa", ">chr1 a>b\n" + "ACGT" * 50 + "\nAC GT\r\n\n>chr2\nTT")
    assert documents_of(path) == ["ACGT" * 51, "TT"]


BAD = {
    "latin.txt": (b"caf\xe9 au lait", r"latin.txt: not UTF-8 at byte 3"),
    "late.txt": (b"a" * 1_048_575 + "é".encode() + b"\xff", r"not UTF-8 at byte 1048577"),
    "cut.txt": (b"ab\xf0\x9f", r"cut.txt: not UTF-8 at byte 2 \(unexpected end"),
    "utf16.jsonl": ('{"text": "a"}\n'.encode("utf-16"), r"utf16.jsonl:1: not UTF-8"),
    "bad.jsonl": (jsonl(["a", "b"]) + b'{"text": "c"\n', r"bad.jsonl:3: not JSON"),
    "list.jsonl": (b'["text"]\n', r"list.jsonl:1: not a JSON object"),
    "deep.jsonl": (b'{"text": ' + b"[" * 100_000, r"deep.jsonl:1: not JSON"),
    "number.jsonl": (b'{"text": "a"}\n\n{"text": 5}', r"number.jsonl:3: `text` is int, not text"),
    "half.jsonl": (b'{"text": "\\ud83d"}', r"half.jsonl:1: `text` is not valid Unicode"),
    "open.csv": (b'text\na\n"never closed\nb\n', r"open.csv:4: not CSV"),
    "short.csv": (b"id,text\n1,a\n2\n", r"short.csv:3: has 1 columns, the header 2"),
    "latin.csv": (b"text\ncaf\xe9\n", r"latin.csv:2: not UTF-8"),
    "text.fasta": (b"MKV\n>a\nMKV\n", r"text.fasta:1: a sequence before the first `>`"),
    "junk.parquet": (b"PAR1 junk", r"junk.parquet: not a readable Parquet file"),
    "junk.txt.gz": (b"not gzip", r"junk.txt.gz: cannot be decompressed"),
    "junk.txt.xz": (b"not xz", r"junk.txt.xz: cannot be decompressed"),
    "junk.txt.zst": (b"not zstd", r"junk.txt.zst: cannot be decompressed"),
    "cut.txt.gz": (gzip.compress(b"some text")[:-9], r"cut.txt.gz: cannot be decompressed"),
    "cut.txt.xz": (lzma.compress(b"some text")[:-9], r"cut.txt.xz: cannot be decompressed"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named_with_its_place(tmp_path: Path, name: str) -> None:
    pytest.importorskip("pyarrow")
    pytest.importorskip("zstandard")
    content, message = BAD[name]
    with pytest.raises(UserError, match=message) as caught:
        documents_of(written(tmp_path / name, content))
    assert "\n" not in str(caught.value)


def test_an_incomplete_zst_file_is_noticed(tmp_path: Path) -> None:
    two_frames = compressed(".zst", b"first ") + compressed(".zst", b"second")
    assert documents_of(written(tmp_path / "a.txt.zst", two_frames)) == ["first second"]
    with pytest.raises(UserError, match=r"a.txt.zst: cannot be decompressed"):
        documents_of(written(tmp_path / "a.txt.zst", two_frames[:-2]))


def test_a_column_that_is_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"`id` holds int64, not text"):
        documents_of(written(tmp_path / "a.parquet", parquet(["x"])), field="id")


def test_what_cannot_be_found_or_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file or folder"):
        find_sources(str(tmp_path / "gone.txt"))
    with pytest.raises(UserError, match=r"folder has no file to read; use \.txt, \.jsonl"):
        find_sources(str(tmp_path))
    with pytest.raises(UserError, match=r"a.pdf: this kind of file cannot be read; use \.txt"):
        find_sources(str(written(tmp_path / "a.pdf", "")))
    with pytest.raises(UserError, match="hf:NAME"):
        find_sources("hf:")


@pytest.mark.parametrize(
    ("name", "module"), [("a.parquet", "pyarrow"), ("a.txt.zst", "zstandard"), ("hf:x", "datasets")]
)
def test_a_missing_library_is_named_with_its_extra(
    tmp_path: Path, name: str, module: str, monkeypatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    src = name if name.startswith("hf:") else str(written(tmp_path / name, b"any"))
    with pytest.raises(MissingExtraError, match=r"didi-instruct\[data\]"):
        documents_of(src)


def test_a_hub_dataset_is_streamed(monkeypatch) -> None:
    asked = []

    def load_dataset(name: str, split: str, streaming: bool) -> Iterator[dict[str, str]]:
        asked.append((name, split, streaming))
        if name == "user/gone":
            raise ConnectionError("cannot reach the hub.\nmore")
        return iter({"text": text} for text in TEXTS)

    fake = types.SimpleNamespace(load_dataset=load_dataset)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    assert documents_of("hf:user/name") == TEXTS
    assert documents_of("hf:user/name:test") == TEXTS
    assert asked == [("user/name", "train", True), ("user/name", "test", True)]
    with pytest.raises(UserError, match=r"hf:user/name \(record 1\): has no field `body`"):
        documents_of("hf:user/name", field="body")
    with pytest.raises(UserError, match=r"hf:user/gone.*\(cannot reach the hub\)\.$"):
        documents_of("hf:user/gone")


def test_pieces_are_bounded_and_join_to_the_document() -> None:
    text = "".join(f"word{i}{' ' if i % 7 else chr(10)}" for i in range(20_000)) + "x" * 50_000
    pieces = list(cut_into_pieces([(text, True)]))
    assert "".join(piece.text for piece in pieces) == text
    assert max(len(piece.text) for piece in pieces) <= readers.PIECE_CHARACTERS
    assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    # As long as there is white space, a piece ends before it.
    assert all(piece.text[0].isspace() for piece in pieces[1:8])


def test_pieces_do_not_depend_on_the_portions_they_arrive_in() -> None:
    text = "".join(f"{i} " for i in range(15_000))
    whole = list(cut_into_pieces([(text, True), ("next", True)]))
    for size in (1000, 16_384, 16_385, 70_001):
        portions = [(text[i : i + size], False) for i in range(0, len(text), size)]
        assert list(cut_into_pieces([*portions, ("", True), ("next", True)])) == whole


def test_pieces_are_read_lazily() -> None:
    """An endless document: a reader that collected it would never return."""
    endless = (("some words " * 100, False) for _ in itertools.count())
    pieces = list(itertools.islice(cut_into_pieces(endless), 50))
    assert len(pieces) == 50
    assert all(isinstance(piece, Piece) and not piece.last for piece in pieces)


@pytest.mark.skipif(
    not GPT2.is_dir(), reason="needs GPT-2's vocab.json and merges.txt beside the repository"
)
def test_cutting_a_document_does_not_change_its_gpt2_tokens() -> None:
    tokenizer = Tokenizer.load(GPT2)
    line = "Once, it's said -- in 1984! -- a   dog\n\n\n  barked \t at\tme.\n"
    text = "".join(line * (1 + i % 3) + "ab " * (i % 11) for i in range(500))
    pieces = [piece.text for piece in cut_into_pieces([(text, True)])]
    assert len(pieces) > 3
    assert list(itertools.chain(*tokenizer.encode(pieces))) == tokenizer.encode([text])[0]


def test_the_meter_counts_the_bytes_on_disk(tmp_path: Path) -> None:
    path = written(tmp_path / "a.txt.gz", gzip.compress(b"some text" * 1000))
    meter = Meter()
    (source,) = find_sources(str(path))
    list(read_pieces(source, ReadOptions(), meter))
    assert meter.read == source.size == path.stat().st_size
