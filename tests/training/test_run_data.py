"""A recipe's data settings are those of `didi data prepare`, in its own words."""

from pathlib import Path

import pytest

from didi_instruct.config.train import DataConfig
from didi_instruct.data.prepare import PrepareSettings, prepare
from didi_instruct.errors import UserError
from didi_instruct.training.run_data import open_training_data


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "lines.txt"
    path.write_text("".join(f"line {i}\n" for i in range(100, 150)))
    return path


def settings(corpus: Path, **options) -> DataConfig:
    return DataConfig(source=str(corpus), tokenizer="bytes", documents="line", **options)


def test_rows_may_hold_one_document(corpus: Path, tmp_path: Path) -> None:
    config = settings(corpus, rows="document", valid=5)
    train, valid = open_training_data(config, length=12, seed=0, prepared=tmp_path / "data")
    assert (train.num_sequences, valid and valid.num_sequences) == (45, 5)
    assert train.ordered(3, 1).tolist() == [[*b"line 103", 256, 256, 256, 256]]
    cut = settings(corpus, rows="document", long="cut", valid=5)
    train, _ = open_training_data(cut, length=6, seed=0, prepared=tmp_path / "cut")
    assert train.ordered(3, 1).tolist() == [[*b"line 1"]]


def test_what_cannot_work_is_told_in_words_of_a_recipe(corpus: Path, tmp_path: Path) -> None:
    """No advice names a flag that `didi pretrain` does not have."""
    for options, message in (
        ({"rows": "document"}, r"no document .* or cut documents with `data\.long=cut`"),
        ({"long": "cut"}, r"`data\.long=cut` needs `data\.rows=document`"),
    ):
        config = settings(corpus, **options)
        with pytest.raises(UserError, match=message):
            open_training_data(config, length=8, seed=0, prepared=tmp_path / "data")
        assert not (tmp_path / "data").exists()


def test_a_prepared_stream_is_not_taken_for_rows_of_documents(corpus, tmp_path: Path) -> None:
    for rows in ("stream", "document"):
        options = PrepareSettings(
            src=str(corpus), out=tmp_path / rows, tokenizer="bytes", length=12, documents="line",
            rows=rows, valid=5,
        )  # fmt: skip
        prepare(options)
    stream = settings(tmp_path / "stream", rows="document")
    with pytest.raises(UserError, match=r"stream: its rows .*--rows document"):
        open_training_data(stream, length=12, seed=0, prepared=tmp_path / "data")
    for rows in ("stream", "document"):  # the default asks for nothing
        config = settings(tmp_path / "document", rows=rows)
        train, _ = open_training_data(config, length=12, seed=0, prepared=tmp_path / "data")
        assert train.num_sequences == 45
