"""Data of a fine-tuning: text, or prompts with answers, in the tokens of the model."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch

from didi_instruct.config.finetune import FinetuneConfig
from didi_instruct.config.model import ModelConfig
from didi_instruct.config.train import DataConfig
from didi_instruct.data.dataset import TokenSource
from didi_instruct.data.manifest import is_prepared
from didi_instruct.data.readers import ReadOptions
from didi_instruct.errors import UserError
from didi_instruct.models.checkpoint import LoadedModel
from didi_instruct.models.network import Network, NetworkRecord
from didi_instruct.tasks.answer_files import open_answers
from didi_instruct.tasks.answers import Window
from didi_instruct.tasks.mmlu_data import examples, read_mmlu, split_by_hash
from didi_instruct.tasks.prompts import Example, read_examples, read_texts
from didi_instruct.tasks.statistics import mean_interval
from didi_instruct.training.answers import make_answer_objective
from didi_instruct.training.distributed import World, compiles
from didi_instruct.training.likelihood import check_data, evaluation_config, losses
from didi_instruct.training.loop import Evaluate, Tick
from didi_instruct.training.objectives import Objective, make_objective
from didi_instruct.training.pretrain_task import PretrainTask
from didi_instruct.training.run_data import PrepareBar, main_first, open_data_together, with_lengths
from didi_instruct.training.run_dir import is_begun

Reader = Callable[[], Iterable[Example]]
"""Reads the examples of a run from the start."""
PREPARED = "data"
"""Folder of a run for what was tokenised."""


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
    config: FinetuneConfig,
    loaded: LoadedModel,
    source: str,
    folder: Path,
    world: World,
    progress: PrepareBar = nullcontext,
) -> FinetuneData:
    """Open the data of a run in all processes; what is not tokenised yet is, in its folder."""
    if not config.data.source:
        what = {
            "text": "a prepared folder, a text file or folder",
            "answers": "JSON lines with `prompt` and `answer`",
            "mmlu": "a folder of MMLU",
        }[config.task]
        raise UserError(f"data.source is not set: give {what}, as --set data.source=...")
    record = cast("Network", loaded.model).record
    framed = record is not None and (record.before or record.after)
    if config.task == "text" and not framed:
        return _open_text(config, loaded, source, folder, world, progress)
    if config.task != "text":
        window, read = _window(config, loaded, source, record), _reader(config)
        return _open_rows(config, loaded, read, window, folder, world)
    return _open_rows(config, loaded, *_framed_texts(config, loaded, source, record), folder, world)


def _open_text(
    config: FinetuneConfig,
    loaded: LoadedModel,
    source: str,
    folder: Path,
    world: World,
    progress: PrepareBar,
) -> FinetuneData:
    given, model, tokenizer = config.data, loaded.config, loaded.tokenizer
    assert given.source is not None
    assert tokenizer is not None
    raw = given.source != "oracle" and not is_prepared(Path(given.source))
    if model.end_id is not None and raw and given.rows == "stream":
        raise UserError(
            f"Each text of {source} has a window of its own: learn one document a row, with "
            "--set data.rows=document."
        )
    settings = DataConfig(
        source=given.source,
        tokenizer=source,
        field=given.field,
        documents=given.documents,
        rows=given.rows,
        long=given.long,
        valid=given.valid,
    )
    length = model.length if given.length is None else given.length
    try:
        data, valid = open_data_together(
            settings,
            folder,
            world,
            progress,
            length=length,
            seed=config.train.seed,
            tokenizer=tokenizer,
        )
    except UserError as error:
        raise UserError(str(error).replace("model.length", "data.length")) from error
    check_data(model, tokenizer.hash, data)
    if model.end_id is not None:
        model = with_lengths(model, data, model.end_id)
    objective = make_objective(model, compile=compiles(config.train, world.device))
    return FinetuneData(data, valid, model, objective, None)


def _open_rows(
    config: FinetuneConfig,
    loaded: LoadedModel,
    read: Reader | None,
    window: Window,
    folder: Path,
    world: World,
) -> FinetuneData:
    """Open rows of prompts with answers, or of texts that stand alone."""
    model, tokenizer, begun = loaded.config, loaded.tokenizer, is_begun(folder)
    assert tokenizer is not None
    if begun and not Path(str(config.data.source)).exists():
        read = None  # a run that goes on needs its tokens, not the file they were made from
    data, valid, prepared = main_first(
        world,
        lambda _: open_answers(
            read,
            folder / PREPARED,
            tokenizer,
            window,
            seed=config.train.seed,
            valid=config.data.valid,
            begun=begun,
        ),
    )
    if window.fill is not None:
        model = replace(model, lengths=data.lengths)
    masks = config.answers.masking
    objective = make_answer_objective(model, masks, compile=compiles(config.train, world.device))
    measured = make_answer_objective(evaluation_config(model))
    held_out = 0 if valid is None else valid.num_sequences
    what, side = ("texts", "right") if config.task == "text" else ("prompts", "left")
    named = "texts" if config.task == "text" else "prompts with answers"
    notes = [f"{data.num_sequences:,} {named} to learn, {held_out:,} held out."]
    reads = f"the {window.length} tokens that the model reads"
    if prepared.cut:
        whole = f"{prepared.cut:,} of {prepared.rows:,} {what}"
        notes.append(f"{whole} are cut from the {side}, to fit {reads}.")
    if prepared.dropped:
        notes.append(f"{prepared.dropped:,} texts are left out: they do not fit {reads}.")
    return FinetuneData(data, valid, model, objective, measured, tuple(notes))


def _framed_texts(
    config: FinetuneConfig, loaded: LoadedModel, source: str, record: NetworkRecord | None
) -> tuple[Reader, Window]:
    """Texts for a masked LM of transformers, which puts special tokens around each."""
    given = config.data
    assert record is not None
    if given.rows == "stream" or is_prepared(Path(str(given.source))):
        raise UserError(
            f"{source} puts special tokens around each text: learn one document a row from its "
            "file, with --set data.rows=document."
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
    """Return what reads the examples of the settings, anew each time."""
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
            f"{folder}: has no training split (auxiliary_train): add it, or take a share of the "
            "test split with --set answers.share=0.5, to be scored on the rest."
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
