"""Data by SOURCE, as the command line and recipes name it."""

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch

from didi_instruct.config.model import ModelConfig
from didi_instruct.config.train import DataConfig
from didi_instruct.data.dataset import TokenSource, open_data
from didi_instruct.data.manifest import Manifest, is_prepared
from didi_instruct.data.oracle import OracleLanguage, OracleSource
from didi_instruct.data.prepare import PrepareSettings, Report, prepare
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import UserError
from didi_instruct.process.masking import before_end, goes_on
from didi_instruct.training.distributed import World
from didi_instruct.training.run_dir import is_begun

T = TypeVar("T")
ROWS_AT_ONCE = 4096
"""Rows whose lengths are counted together."""
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


def open_data_together(
    config: DataConfig,
    folder: Path,
    world: World,
    progress: PrepareBar,
    *,
    length: int,
    seed: int,
    tokenizer: Tokenizer | None = None,
) -> tuple[TokenSource, TokenSource | None]:
    """Open the data in every process; the main one goes first, since it may have to prepare it.

    `tokenizer` stands in place of the one that the settings name.
    """
    prepared, source = folder / "data", config
    if is_prepared(prepared) and is_begun(folder):
        # A run that goes on needs its tokens, not the corpus they were made from.
        source = replace(source, source=str(prepared))

    def open_now(is_first: bool) -> tuple[TokenSource, TokenSource | None]:
        bar: PrepareBar = progress if is_first else nullcontext
        return open_training_data(
            source, length=length, seed=seed, prepared=prepared, progress=bar, tokenizer=tokenizer
        )

    return main_first(world, open_now)


def main_first(world: World, open_now: Callable[[bool], T]) -> T:
    """Open something in every process, first in the main one (True), which may have to make it."""
    opened: T | None = None
    error: Exception | None = None
    if world.is_main:
        try:
            opened = open_now(True)
        except Exception as problem:
            error = problem
    if world.any(error is not None):
        raise error or SystemExit(2)  # the main process says what is wrong
    return open_now(False) if opened is None else opened


def with_lengths(model: ModelConfig, data: TokenSource, end_id: int) -> ModelConfig:
    """The model for texts that have windows of their own, with the law of their lengths."""
    counts = torch.zeros(model.length + 1, dtype=torch.long)
    assert data.num_sequences is not None
    for first in range(0, data.num_sequences, ROWS_AT_ONCE):
        rows = data.ordered(first, min(ROWS_AT_ONCE, data.num_sequences - first))
        if goes_on(rows, end_id):
            raise UserError(
                "model.own_window needs rows of one text each: prepare the data with --rows "
                "document (data.rows=document), or leave it out."
            )
        counts += before_end(rows, end_id).sum(1).bincount(minlength=len(counts))
    lengths = tuple(counts.tolist()) if model.kind == "mdlm" else ()  # an AR model ends by itself
    return replace(model, end_id=end_id, lengths=lengths)
