"""Data by SOURCE, as the command line and recipes name it."""

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from didi_instruct.config.pretrain import DataConfig
from didi_instruct.data.dataset import TokenSource, open_data
from didi_instruct.data.manifest import Manifest
from didi_instruct.data.oracle import OracleLanguage, OracleSource
from didi_instruct.data.prepare import PrepareSettings, Report, prepare
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import UserError

PrepareBar = Callable[[], AbstractContextManager[Report | None]]
"""Opens a progress display for as long as data is being prepared."""


def open_training_data(
    config: DataConfig,
    *,
    length: int,
    seed: int,
    prepared: Path,
    progress: PrepareBar = nullcontext,
    tokenizer: Tokenizer | None = None,
) -> tuple[TokenSource, TokenSource | None]:
    """Return the training stream and the held-out rows (or None) of a source.

    What is not prepared yet is prepared into the folder `prepared`, with `tokenizer` in place of
    the one that the settings name.
    """
    if not config.source:
        raise UserError(
            "data.source is not set: give a prepared folder, a text file or `oracle`, "
            "as --set data.source=..."
        )
    if config.source == "oracle":
        language = OracleLanguage.default()
        return OracleSource(language, seed=seed), OracleSource(language, seed=seed, split="valid")
    folder = Path(config.source)
    if not is_prepared(folder):
        folder = prepared
        _prepare(config, length, folder, progress, tokenizer)
    train = open_data(folder, "train", seed=seed)
    manifest = Manifest.read(folder)
    if config.rows == "document" and manifest.layout.rows == "stream":
        raise UserError(
            f"{folder}: its rows are of a stream, but data.rows is document: prepare it again with "
            "`didi data prepare --rows document`, or leave out data.rows."
        )
    held_out = manifest.splits.get("valid")
    if held_out is None or not held_out.rows:
        return train, None
    return train, open_data(folder, "valid", seed=seed)


def _prepare(
    config: DataConfig,
    length: int,
    folder: Path,
    progress: PrepareBar,
    tokenizer: Tokenizer | None,
) -> None:
    """Prepare a source as `didi data prepare` would; what it refuses is told in other words."""
    assert config.source
    try:
        settings = PrepareSettings(
            src=config.source,
            tokenizer=config.tokenizer,
            length=length,
            out=folder,
            field=config.field,
            documents=config.documents,
            rows=config.rows,
            long=config.long,
            valid=config.valid,
        )
        with progress() as report:
            prepare(settings, report, tokenizer)
    except UserError as error:
        raise UserError(_in_words_of_a_recipe(str(error), folder)) from error


def _in_words_of_a_recipe(advice: str, folder: Path) -> str:
    """What `didi data prepare` would call a flag is a setting here."""
    advice = advice.replace("start over with --overwrite", f"delete {folder} to start over")
    advice = advice.replace(
        "with --eot", "with `didi data prepare --eot`, and give its folder as data.source"
    )
    for flag, setting in (
        ("field", "data.field"),
        ("documents", "data.documents"),
        ("rows", "data.rows"),
        ("long", "data.long"),
        ("valid", "data.valid"),
        ("tokenizer", "data.tokenizer"),
        ("length", "model.length"),
    ):
        advice = re.sub(rf"--{flag}\b ?", f"--set {setting}=", advice)
    return advice


def is_prepared(folder: Path) -> bool:
    """Whether a folder was written by `didi data prepare`."""
    return (folder / "manifest.json").is_file()
