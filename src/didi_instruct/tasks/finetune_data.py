"""Data of a fine-tuning: text, or prompts with answers, in the tokens of the model."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import cast

import torch

from didi_instruct.config.finetune import FinetuneConfig
from didi_instruct.config.model import ModelConfig
from didi_instruct.config.train import DataConfig
from didi_instruct.data.dataset import TokenSource
from didi_instruct.data.manifest import is_prepared
from didi_instruct.data.readers import ReadOptions
from didi_instruct.errors import Setting, UserError
from didi_instruct.models.checkpoint import LoadedModel
from didi_instruct.models.network import Network, NetworkRecord
from didi_instruct.tasks.answer_files import open_answers
from didi_instruct.tasks.answers import Window
from didi_instruct.tasks.mmlu_data import examples, read_mmlu, split_by_hash
from didi_instruct.tasks.prompts import Example, read_examples, read_texts
from didi_instruct.tasks.statistics import mean_interval
from didi_instruct.training.answers import make_answer_objective
from didi_instruct.training.distributed import compiles
from didi_instruct.training.likelihood import check_data, evaluation_config, losses
from didi_instruct.training.loop import Evaluate, Tick
from didi_instruct.training.objectives import Objective, make_objective
from didi_instruct.training.pretrain_task import PretrainTask
from didi_instruct.training.run_data import (
    PREPARED,
    PrepareBar,
    main_first,
    open_run_data,
    with_lengths,
)
from didi_instruct.training.run_dir import Run, is_begun

Reader = Callable[[], Iterable[Example]]
"""Reads the examples of a run from the start."""
WANTED = {
    "text": "a prepared folder, a text file or folder",
    "answers": "JSON lines with `prompt` and `answer`",
    "mmlu": "a folder of MMLU",
}
"""Data of each task."""


@dataclass(frozen=True)
class FinetuneData:
    """Rows of a fine-tuning run, its objective, and the model's settings for them."""

    rows: TokenSource
    """Rows to learn."""
    valid: TokenSource | None
    """Rows held out."""
    model: ModelConfig
    """The model's settings; where texts have windows of their own, with the lengths of these."""
    objective: Objective
    measured: Objective | None
    """Measures held-out answers; None: text is measured by its likelihood."""
    notes: tuple[str, ...] = ()
    """Sentences to tell once."""


def open_finetune_data(
    run: Run,
    config: FinetuneConfig,
    loaded: LoadedModel,
    source: str,
    progress: PrepareBar = nullcontext,
) -> FinetuneData:
    """Open the data of a run in all processes; what is not tokenised yet is, in its folder."""
    if not config.data.source:
        raise UserError(
            "data.source is not set: give {}, as {}.", WANTED[config.task], Setting("data.source")
        )
    record = cast("Network", loaded.model).record
    if config.task != "text":
        read, window = _reader(config), _window(config, loaded, source, record)
    elif record is not None and (record.before or record.after):
        read, window = _framed_texts(config, loaded, source, record)
    else:
        return _open_text(run, config, loaded, source, progress)
    return _open_rows(run, config, loaded, read, window)


def _open_text(
    run: Run, config: FinetuneConfig, loaded: LoadedModel, source: str, progress: PrepareBar
) -> FinetuneData:
    given, model, tokenizer = config.data, loaded.config, loaded.tokenizer
    assert given.source is not None
    assert tokenizer is not None
    raw = given.source != "oracle" and not is_prepared(Path(given.source))
    if model.end_id is not None and raw and given.rows == "stream":
        raise UserError(
            "Each text of {} has a window of its own: learn one document a row, with {}.",
            source,
            Setting("data.rows", "document"),
        )
    settings = {name: value for name, value in asdict(given).items() if name != "length"}
    data, valid = open_run_data(
        run,
        DataConfig(**settings, tokenizer=source),
        length=given.length or model.length,
        progress=progress,
        tokenizer=tokenizer,
        length_setting="data.length",
    )
    check_data(model, tokenizer.hash, data)
    if model.end_id is not None:
        model = with_lengths(run, model, data, model.end_id)
    objective = make_objective(model, compile=compiles(config.train, run.world.device))
    return FinetuneData(data, valid, model, objective, None)


def _open_rows(
    run: Run, config: FinetuneConfig, loaded: LoadedModel, read: Reader, window: Window
) -> FinetuneData:
    """Open rows of prompts with answers, or of texts that stand alone."""
    model, tokenizer, begun = loaded.config, loaded.tokenizer, is_begun(run.folder)
    assert tokenizer is not None
    # A run that goes on needs its tokens, not the file they were made from.
    missing = begun and not Path(str(config.data.source)).exists()
    data, valid, prepared = main_first(
        run.world,
        lambda _: open_answers(
            None if missing else read,
            run.folder / PREPARED,
            tokenizer,
            window,
            seed=config.train.seed,
            valid=config.data.valid,
            begun=begun,
        ),
    )
    if window.fill is not None:
        model = replace(model, lengths=data.lengths)
    objective = make_answer_objective(
        model, config.answers.masking, compile=compiles(config.train, run.world.device)
    )
    measured = make_answer_objective(evaluation_config(model))
    held_out = 0 if valid is None else valid.num_sequences
    what, named, side = "prompts", "prompts with answers", "left"
    if config.task == "text":
        what, named, side = "texts", "texts", "right"
    notes = [f"{data.num_sequences:,} {named} to learn, {held_out:,} held out."]
    reads = f"the {window.length} tokens that the model reads"
    if prepared.cut:
        whole = f"{prepared.cut:,} of {prepared.rows:,} {what}"
        notes.append(f"{whole} are cut from the {side}, to fit {reads}.")
    if prepared.dropped:
        notes.append(f"{prepared.dropped:,} texts are left out: they do not fit {reads}.")
    return FinetuneData(data, valid, model, objective, measured, tuple(notes))


def _framed_texts(
    config: FinetuneConfig, loaded: LoadedModel, source: str, record: NetworkRecord
) -> tuple[Reader, Window]:
    """Texts for a masked LM of transformers, which puts special tokens around each."""
    given = config.data
    if given.rows == "stream" or is_prepared(Path(str(given.source))):
        raise UserError(
            "{} puts special tokens around each text: learn one document a row from its file, with "
            "{}.",
            source,
            Setting("data.rows", "document"),
        )
    if given.long == "split":
        raise UserError(
            f"data.long is split, but texts for {source} are read one a row: use cut or drop."
        )
    options = ReadOptions(field=given.field, documents=given.documents)
    length = min(loaded.config.length, given.length or loaded.config.length)
    window = Window(length=length, long=given.long, banned=frozenset(record.banned), skips=True)
    return (lambda: read_texts(str(given.source), options)), window


def _reader(config: FinetuneConfig) -> Reader:
    source = str(config.data.source)
    if config.task == "answers":
        return lambda: read_examples(source)
    return lambda: _mmlu_examples(source, config.answers.share)


def _mmlu_examples(folder: str, share: float | None) -> list[Example]:
    """Questions to train on: the training split, or a share of the test split."""
    found = read_mmlu(folder)
    if share is not None and found.train:
        raise UserError(f"{folder}: has a training split: leave out answers.share.")
    if share is not None:
        taken, _ = split_by_hash(found.test, share)
        if not taken:
            raise UserError(
                f"{folder}: answers.share={share:g} takes none of its {len(found.test)} test "
                "questions: use a larger share."
            )
        return examples(taken)
    if not found.train:
        raise UserError(
            "{}: has no training split (auxiliary_train): add it, or take a share of the test "
            "split with {}, to be scored on the rest.",
            folder,
            Setting("answers.share", 0.5),
        )
    return examples(found.train)


def _window(
    config: FinetuneConfig, loaded: LoadedModel, source: str, record: NetworkRecord | None
) -> Window:
    """The window of a model, as the settings have it."""
    settings, model, tokenizer = config.answers, loaded.config, loaded.tokenizer
    assert tokenizer is not None
    if settings.masking == "random" and model.kind != "mdlm":
        raise UserError(
            f"answers.masking is random, but {source} is a model of kind `{model.kind}`, which has "
            "no masks: leave it out."
        )
    ends_itself = model.kind == "mdlm" and model.end_id is not None
    end = None
    if settings.end:
        end = tokenizer.eot_id if model.end_id is None else model.end_id
        if ends_itself or end is None:
            why = "is given where a text ends" if ends_itself else "has no end-of-text token"
            raise UserError(f"answers.end is true, but {source} {why}: leave it out.")
    fill = model.end_id if ends_itself else None
    banned = frozenset() if record is None else frozenset(record.banned)
    return Window(length=model.length, long=settings.long, end=end, fill=fill, banned=banned)


def held_out_answers(task: PretrainTask, valid: TokenSource, objective: Objective) -> Evaluate:
    """Held-out nats per token of an answer, each answer counting alike, of the averaged model.

    The noise is the same each time, and every process computes the same.
    """
    count = min(task.config.train.eval_sequences, valid.num_sequences or 0)

    def evaluate(step: int, tick: Tick) -> Mapping[str, float]:
        with task.averaged():
            measured = losses(
                task.losses,
                objective,
                valid.ordered,
                sequences=count,
                batch_size=task.rows_per_pass,
                device=task.world.device,
                progress=lambda _: tick(),
            )
            nats = torch.cat([loss for _, loss in measured])
        numbers = {"valid_answer_nats": nats.mean().item()}
        if interval := mean_interval(nats.numpy()):
            numbers["valid_ci95"] = (interval[1] - interval[0]) / 2
        return numbers

    return evaluate
