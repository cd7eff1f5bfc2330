"""A recipe's data settings are those of `didi data prepare`, in its own words."""

from pathlib import Path

import pytest
import torch

from didi_instruct.config.train import DataConfig, PretrainConfig
from didi_instruct.data.prepare import PrepareSettings, prepare
from didi_instruct.errors import UserError
from didi_instruct.training.distributed import World
from didi_instruct.training.reporting import Reporter
from didi_instruct.training.run_data import open_run_data
from didi_instruct.training.run_dir import Run


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "lines.txt"
    path.write_text("".join(f"line {i}\n" for i in range(100, 150)))
    return path


def settings(corpus: Path, **options) -> DataConfig:
    return DataConfig(source=str(corpus), tokenizer="bytes", documents="line", **options)


def opened(config: DataConfig, length: int, folder: Path):
    """The data of a run that is begun in a folder."""
    world = World(torch.device("cpu"))
    run = Run(folder, PretrainConfig(), world, Reporter(), resume=False, changes=())
    return open_run_data(run, config, length=length)


def test_rows_may_hold_one_document(corpus: Path, tmp_path: Path) -> None:
    config = settings(corpus, rows="document", valid=5)
    train, valid = opened(config, 12, tmp_path / "run-data")
    assert (train.num_sequences, valid and valid.num_sequences) == (45, 5)
    assert train.ordered(3, 1).tolist() == [[*b"line 103", 256, 256, 256, 256]]
    cut = settings(corpus, rows="document", long="cut", valid=5)
    train, _ = opened(cut, 6, tmp_path / "run-cut")
    assert train.ordered(3, 1).tolist() == [[*b"line 1"]]


def test_what_cannot_work_is_told_in_words_of_a_recipe(corpus: Path, tmp_path: Path) -> None:
    """No advice names a flag that `didi pretrain` does not have."""
    for options, message in (
        ({"rows": "document"}, r"no document .* or cut documents with `data\.long=cut`"),
        ({"long": "cut"}, r"`data\.long=cut` needs `data\.rows=document`"),
    ):
        config = settings(corpus, **options)
        with pytest.raises(UserError, match=message):
            opened(config, 8, tmp_path / "run-data")
        assert not (tmp_path / "run-data").exists()


def test_a_prepared_stream_is_not_taken_for_rows_of_documents(corpus, tmp_path: Path) -> None:
    for rows in ("stream", "document"):
        options = PrepareSettings(
            src=str(corpus), out=tmp_path / rows, tokenizer="bytes", length=12, documents="line",
            rows=rows, valid=5,
        )  # fmt: skip
        prepare(options)
    stream = settings(tmp_path / "stream", rows="document")
    with pytest.raises(UserError, match=r"stream: its rows .*--rows document"):
        opened(stream, 12, tmp_path / "run-data")
    for rows in ("stream", "document"):  # the default asks for nothing
        config = settings(tmp_path / "document", rows=rows)
        train, _ = opened(config, 12, tmp_path / "run-data")
        assert train.num_sequences == 45
