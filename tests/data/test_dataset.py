"""Rows come in a shuffled order that is a pure function, and damage is noticed."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from didi_instruct.data.dataset import TokenDataset, TokenSource, open_data
from didi_instruct.data.prepare import PrepareSettings, prepare
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import UserError

LENGTH = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    texts = (json.dumps({"text": f"document number {i}"}) + "\n" for i in range(50))
    (root / "a.jsonl").write_text("".join(texts))
    settings = PrepareSettings(
        src=str(root / "a.jsonl"), out=root / "out", tokenizer="bytes", length=LENGTH, valid=5,
        shard_rows=11,
    )  # fmt: skip
    prepare(settings)
    return root / "out"


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    """A folder that may be damaged."""
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def as_set(rows: torch.Tensor) -> set[tuple[int, ...]]:
    return {tuple(row) for row in rows.tolist()}


def test_ordered_rows_are_the_shards(folder: Path) -> None:
    data = open_data(folder)
    raw = b"".join(path.read_bytes() for path in sorted(folder.glob("train*.bin")))
    expected = np.frombuffer(raw, "<u2").reshape(-1, LENGTH)
    assert len(list(folder.glob("train*.bin"))) > 3
    assert data.num_sequences == len(expected)
    assert data.ordered(0, 10**6).tolist() == expected.tolist()
    assert data.ordered(9, 5).tolist() == expected[9:14].tolist()
    assert data.ordered(data.num_sequences, 5).shape == (0, LENGTH)
    assert data.ordered(0, 1).dtype == torch.int64


def test_it_is_what_training_reads(folder: Path) -> None:
    source: TokenSource = open_data(folder, "valid")
    assert (source.length, source.num_tokens) == (LENGTH, 257)
    assert source.tokenizer.decode(source.rows(0, 1)[0])


def test_the_held_out_rows_are_others(folder: Path) -> None:
    valid = open_data(folder, "valid").ordered(0, 1000)
    text = Tokenizer.load("bytes").decode(valid.flatten())
    assert text.startswith("document number 45")


def test_each_epoch_has_every_row_once_in_another_order(folder: Path) -> None:
    data = open_data(folder, seed=3)
    size = data.num_sequences
    numbered = TokenDataset([np.arange(size, dtype=np.uint16)[:, None]], data.tokenizer, seed=3)
    numbered.num_tokens = size
    epochs = [numbered.rows(epoch * size, size).flatten().tolist() for epoch in range(4)]
    assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    ordered = data.ordered(0, size)
    assert data.rows(size, size).tolist() == ordered[epochs[1]].tolist()


def test_rows_are_a_pure_function_of_seed_and_position(folder: Path) -> None:
    data = open_data(folder, seed=1)
    size = data.num_sequences
    whole = data.rows(0, 3 * size)
    for start, count in ((0, 1), (size - 3, 7), (5, 2 * size), (2 * size + 1, 4), (7, 0)):
        assert torch.equal(data.rows(start, count), whole[start : start + count])
    assert torch.equal(open_data(folder, seed=1).rows(100, 20), data.rows(100, 20))
    assert not torch.equal(open_data(folder, seed=2).rows(0, size), whole[:size])
    far = data.rows(10**12, 4)
    assert torch.equal(far, data.rows(10**12, 4))
    assert as_set(far) <= as_set(whole)


def test_the_stream_does_not_depend_on_how_rows_are_spread_over_shards(folder: Path) -> None:
    data = open_data(folder)
    one = TokenDataset([data.ordered(0, data.num_sequences).numpy()], data.tokenizer)
    assert torch.equal(one.rows(3, 200), data.rows(3, 200))


def test_positions_are_not_negative(folder: Path) -> None:
    data = open_data(folder)
    for call in (data.rows, data.ordered):
        for arguments in ((-1, 1), (1, -1)):
            with pytest.raises(ValueError, match="negative"):
                call(*arguments)


def test_a_missing_or_cut_shard_is_named(copy: Path) -> None:
    shard = copy / "train-00001.bin"
    content = shard.read_bytes()
    shard.write_bytes(content[:-2])
    with pytest.raises(UserError, match=r"train-00001.bin: has \d+ bytes instead of"):
        open_data(copy)
    shard.unlink()
    with pytest.raises(UserError, match=r"train-00001.bin: this shard is missing"):
        open_data(copy)
    open_data(copy, "valid")


def test_changed_content_is_found_on_request(copy: Path) -> None:
    shard = copy / "train-00001.bin"
    content = bytearray(shard.read_bytes())
    content[0] ^= 1
    shard.write_bytes(content)
    open_data(copy)
    with pytest.raises(UserError, match=r"train-00001.bin: its content"):
        open_data(copy, verify=True)
    open_data(copy, "valid", verify=True)


def test_a_token_that_the_tokenizer_does_not_know_is_an_error(copy: Path) -> None:
    shard = copy / "train-00000.bin"
    content = bytearray(shard.read_bytes())
    content[:2] = (257).to_bytes(2, "little")
    shard.write_bytes(content)
    data = open_data(copy)
    with pytest.raises(UserError, match=r"has token 257, but its tokenizer only 257 ids"):
        data.ordered(0, 1)


def test_what_is_not_prepared_data_is_refused(copy: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        open_data(copy / "gone")
    (copy / "sub").mkdir()
    with pytest.raises(UserError, match="has no manifest.json"):
        open_data(copy / "sub")
    manifest = (copy / "manifest.json").read_text()
    for content, message in (
        ("{", "is damaged"),
        ("{}", "is damaged"),
        ('{"format": "other"}', "not written by"),
        (manifest.replace('"version": 1', '"version": 9'), "version 9"),
        (manifest.replace('"rows"', '"rings"'), "is damaged"),
    ):
        (copy / "manifest.json").write_text(content)
        with pytest.raises(UserError, match=f"manifest.json: .*{message}"):
            open_data(copy)
    (copy / "manifest.json").write_text(manifest)
    Tokenizer.from_words(["a", "</s>"]).save(copy)
    with pytest.raises(UserError, match=r"tokenizer.json: is not the tokenizer"):
        open_data(copy)
    (copy / "unfinished").mkdir()
    (copy / "manifest.json").rename(copy / "unfinished" / "progress.json")
    with pytest.raises(UserError, match="is not finished: run its `didi data prepare` again"):
        open_data(copy)


def test_a_split_that_is_not_there_is_named(copy: Path, tmp_path: Path) -> None:
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["splits"]["valid"] = {
        "documents": 0, "tokens": 0, "rows": 0, "dropped_tokens": 0, "shards": [],
    }  # fmt: skip
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=r"has no valid rows, only train.*`valid`"):
        open_data(copy, "valid")
