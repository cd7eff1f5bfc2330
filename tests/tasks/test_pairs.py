import gzip
import lzma

import pytest

from didi_instruct.errors import UserError
from didi_instruct.tasks.pairs import Pair, read_pairs

HEADER = "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String"
ROWS = '1\t1\t2\tHe said "no.\tHe "said" no.\n0\t3\t4\tA\x85line.\tTwo lines. '


def write(folder, train=ROWS, test=ROWS, header=HEADER, end="\n"):
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", train), ("test", test)):
        text = f"{header}\n{rows}\n".replace("\n", end)
        (folder / f"msr_paraphrase_{name}.txt").write_bytes(text.encode())
    return folder


def pack(folder, name, opener, suffix):
    content = (folder / name).read_bytes()
    (folder / name).unlink()
    with opener(folder / f"{name}{suffix}", "wb") as file:
        file.write(content)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_tables_are_read_as_they_are(tmp_path, end):
    """Byte-order mark, quotation marks that do not close, and line ends inside of sentences."""
    found = read_pairs(write(tmp_path, end=end))
    pairs = [Pair('He said "no.', 'He "said" no.', 1), Pair("A\x85line.", "Two lines.", 0)]
    assert found == {"train": pairs, "test": pairs}


def test_compressed_tables(tmp_path):
    expected = read_pairs(write(tmp_path))
    pack(tmp_path, "msr_paraphrase_train.txt", lzma.open, ".xz")
    pack(tmp_path, "msr_paraphrase_test.txt", gzip.open, ".gz")
    (tmp_path / "README.txt").write_text("not a split")
    assert read_pairs(tmp_path) == expected


def write_parquet(folder, names=("train", "validation", "test"), labels=(1, 0), **changes):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    for name in names:
        columns = {"sentence1": ["a b", "c"], "sentence2": ["b a", "d"], "label": list(labels)}
        table = pa.table({k: v for k, v in (columns | changes).items() if v is not None})
        pq.write_table(table, folder / f"{name}.parquet")


def test_glue_s_parquet(tmp_path):
    write_parquet(tmp_path)
    found = read_pairs(tmp_path)
    assert list(found) == ["train", "validation", "test"]
    assert found["validation"] == [Pair("a b", "b a", 1), Pair("c", "d", 0)]


def test_shards_are_joined_in_order(tmp_path):
    write_parquet(tmp_path, ("train-00000-of-00002", "train-00001-of-00002", "test"))
    assert len(read_pairs(tmp_path)["train"]) == 4


@pytest.mark.parametrize(
    ("words", "spoil"),
    [
        ("train.txt:1: the columns are a, b", {"header": "a\tb"}),
        ("train.txt:2: has 4 columns instead of 5", {"train": "1\t1\t2\tOne."}),
        ("test.txt:3: the label is 2", {"test": "1\t1\t2\tA.\tB.\n2\t1\t2\tA.\tB."}),
        ("train.txt:2: the second sentence is empty", {"train": "1\t1\t2\tOne.\t "}),
    ],
)
def test_damaged_tables_are_refused_by_line(tmp_path, words, spoil):
    with pytest.raises(UserError, match=words):
        read_pairs(write(tmp_path, **spoil))


def test_damaged_files_are_refused_by_name(tmp_path):
    folder = write(tmp_path / "bytes")
    (folder / "msr_paraphrase_test.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"msr_paraphrase_test.txt: not UTF-8 at byte 0"):
        read_pairs(folder)
    folder = write(tmp_path / "xz")
    (folder / "msr_paraphrase_test.txt").rename(folder / "msr_paraphrase_test.txt.xz")
    with pytest.raises(UserError, match="cannot be decompressed"):
        read_pairs(folder)
    folder = write(tmp_path / "twice")
    pack(folder, "msr_paraphrase_test.txt", gzip.open, ".gz")
    write(folder)
    with pytest.raises(UserError, match="hold the same split, test: leave one"):
        read_pairs(folder)


def test_folders_without_the_files_are_refused(tmp_path):
    with pytest.raises(UserError, match="is no folder"):
        read_pairs(tmp_path / "absent")
    (tmp_path / "other.txt").write_text("x")
    with pytest.raises(UserError, match=r"has none of them, but MRPC is msr_paraphrase_train.txt"):
        read_pairs(tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"labels": (1, -1)}, r"row 1: the label is -1 \(a label that GLUE hides"),
        ({"sentence1": None}, "has no column sentence1, only sentence2, label"),
        ({"sentence1": ["a", None]}, "row 1: the first sentence is empty"),
    ],
)
def test_damaged_parquet_is_refused(tmp_path, changes, words):
    write_parquet(tmp_path, **changes)
    with pytest.raises(UserError, match=words):
        read_pairs(tmp_path)
