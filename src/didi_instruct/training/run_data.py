"""Data of a run: a source opened in all processes, prepared in the run's folder where needed."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TypeVar

import torch

from didi_instruct.config.model import ModelConfig
from didi_instruct.config.train import DataConfig
from didi_instruct.data.dataset import PreparedData, TokenSource
from didi_instruct.data.manifest import is_prepared
from didi_instruct.data.oracle import OracleLanguage, OracleSource
from didi_instruct.data.prepare import PrepareSettings, Report, prepare
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import Argument, Setting, UserError
from didi_instruct.models.checkpoint import read_manifest
from didi_instruct.process.masking import before_end, goes_on
from didi_instruct.training.distributed import World
from didi_instruct.training.run_dir import Run, is_begun

T = TypeVar("T")
PrepareBar = Callable[[], AbstractContextManager[Report | None]]
"""Opens a progress display for as long as data is being prepared."""
Splits = tuple[TokenSource, TokenSource | None]
"""The training stream, and the held-out rows if there are any."""

PREPARED = "data"
"""Folder of a run for what it tokenised."""
ROWS_AT_ONCE = 4096
"""Rows whose lengths are counted together."""


def open_run_data(
    run: Run,
    config: DataConfig,
    *,
    length: int,
    progress: PrepareBar = nullcontext,
    tokenizer: Tokenizer | None = None,
    length_setting: str = "model.length",
) -> Splits:
    """Open the data of a run; what is not prepared yet is, by the main process.

    `tokenizer` is the one that `data.tokenizer` names, where it is loaded already;
    `length_setting` is what errors call `length`.
    """
    if not config.source:
        raise UserError(
            "data.source is not set: give a prepared folder, a text file or `oracle`, as {}.",
            Setting("data.source"),
        )
    prepared, seed = run.folder / PREPARED, run.config.train.seed
    if config.source == "oracle":
        language = OracleLanguage.default()
        return OracleSource(language, seed=seed), OracleSource(language, seed=seed, split="valid")
    # A run that goes on needs its tokens, not the corpus they were made from.
    kept = is_prepared(prepared) and is_begun(run.folder)
    source = prepared if kept else Path(config.source)

    def open_now(is_first: bool) -> PreparedData:
        if is_prepared(source):
            return PreparedData(source)
        given = asdict(config)
        try:
            settings = PrepareSettings(
                src=given.pop("source"), length=length, out=prepared, **given
            )
            with progress() if is_first else nullcontext() as report:
                prepare(settings, report, tokenizer)
        except UserError as error:
            names = functools.partial(_in_a_recipe, prepared=prepared, length=length_setting)
            raise error.reworded(names) from error
        return PreparedData(prepared)

    data = main_first(run.world, open_now)
    if config.rows == "document" and data.manifest.layout.rows == "stream":
        raise UserError(
            f"{data.folder}: its rows are of a stream, but data.rows is document: prepare it again "
            "with `didi data prepare --rows document`, or leave out data.rows."
        )
    valid = data.open("valid", seed=seed) if "valid" in data.splits else None
    return data.open("train", seed=seed), valid


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


def with_lengths(run: Run, model: ModelConfig, data: TokenSource, end_id: int) -> ModelConfig:
    """`model` for texts that have windows of their own, with the law of their lengths.

    A run that goes on has it in its last checkpoint: all rows are read once, when it begins.
    """
    for step in sorted(run.folder.glob("checkpoints/step-*"), reverse=True) if run.resume else ():
        try:
            return replace(model, end_id=end_id, lengths=read_manifest(step).model.lengths)
        except UserError:
            continue  # a sharded one, which holds no model, or a damaged one
    return replace(model, end_id=end_id, lengths=count_lengths(model, data, end_id))


def count_lengths(model: ModelConfig, data: TokenSource, end_id: int) -> tuple[int, ...]:
    """Number of texts of each length, as `ModelConfig.lengths`; empty for an AR model."""
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
    return tuple(counts.tolist()) if model.kind == "mdlm" else ()  # an AR model ends by itself


def _in_a_recipe(named: Argument, *, prepared: Path, length: str) -> object:
    """The setting of a recipe in place of an argument of `prepare`."""
    if named.name == "overwrite":
        return f"delete {prepared}"
    if named.name == "eot":
        return "`didi data prepare --eot`, for a folder that data.source then names"
    if named.name == "length":
        return Setting(length)
    known = ("field", "documents", "rows", "long", "valid", "tokenizer")
    return Setting(f"data.{named.name}", named.value) if named.name in known else named
