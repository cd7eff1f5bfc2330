"""The parts of a distillation, from its settings: student, texts, the teacher's bank, the task."""

import copy
import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from didi_instruct.api.distill_lengths import give_lengths
from didi_instruct.api.runs import open_data_together
from didi_instruct.api.sources import PrepareBar, is_prepared
from didi_instruct.config.distill import DistillConfig, Method
from didi_instruct.config.model import ModelConfig
from didi_instruct.data.dataset import TokenSource
from didi_instruct.distillation import methods
from didi_instruct.distillation.bank import BankSettings, Progress, open_bank
from didi_instruct.distillation.methods import METHODS, check_fit
from didi_instruct.distillation.rollout import Starts
from didi_instruct.distillation.run import DistillTask, Teacher
from didi_instruct.errors import UserError
from didi_instruct.hub.open import open_source
from didi_instruct.models.checkpoint import LoadedModel
from didi_instruct.models.network import Network, window_of
from didi_instruct.process.masking import goes_on
from didi_instruct.process.schedule import make_schedule
from didi_instruct.sampling.ancestral import ancestral
from didi_instruct.sampling.denoiser import network_denoiser
from didi_instruct.sampling.draw import DrawOptions, Noise
from didi_instruct.sampling.state import Canvas, State
from didi_instruct.seeding import mix
from didi_instruct.training.distributed import World, uses_bf16
from didi_instruct.training.likelihood import check_data

ROWS_LOOKED_AT = 4096
"""Rows of the data that tell whether it is a stream."""
BankBar = Callable[[], Any]
"""Opens a progress display (`Progress`) for as long as a bank is being drawn."""


def denoiser_of(loaded: LoadedModel, source: str, method: Method) -> Network:
    """The network of a model that a method can distil."""
    kind = METHODS[method].teacher_kind
    words = {"mdlm": "masked diffusion models", "duo": "uniform-state diffusion models"}[kind]
    if loaded.config.kind != kind:
        raise UserError(
            f"{source} is a model of kind `{loaded.config.kind}`: method={method} distils {words} "
            f"(`{kind}`)."
        )
    return cast("Network", loaded.model)


def open_student(config: DistillConfig, teacher: LoadedModel, source: str) -> Network:
    """Where the student starts: a copy of the teacher, or a model that speaks its tokens."""
    entry = METHODS[config.method]
    if entry.texts == "data" and not config.data.source:
        raise UserError(
            f"method={config.method} adds noise to real text: name it with --set data.source=..."
        )
    network = denoiser_of(teacher, source, config.method)
    if teacher.config.masks > 1:
        raise UserError(
            f"{source}: the teacher has {teacher.config.masks} masks (mixture steps): distil what "
            "it was distilled from."
        )
    # A teacher that is never asked to write a text may know one order alone.
    if teacher.config.order != "random" and not (entry.any_order and not entry.texts):
        raise UserError(
            f"{source}: the teacher reveals positions in {teacher.config.order}, as students do: "
            "distil what it was distilled from, and go on from it with --set student=..."
        )
    if teacher.config.order != config.order and teacher.config.order != "random":
        raise UserError(
            f"order is {config.order}, but {source} reveals positions in {teacher.config.order}: "
            f"add --set order={teacher.config.order}."
        )
    if config.student is not None:
        network = _other_student(config, config.student, teacher, source)
    # Copied tensors: those of a loaded model are views of its file.
    student = copy.deepcopy(network)
    # How long texts are is the teacher's to say.
    student.config = replace(student.config, lengths=teacher.config.lengths, order=config.order)
    return student


def _other_student(config: DistillConfig, other: str, teacher: LoadedModel, source: str) -> Network:
    """A student that is not a copy of the teacher, if the two fit."""
    loaded = give_lengths(open_source(other), config, other)
    student = denoiser_of(loaded, other, config.method)
    hashes = [m.tokenizer.hash if m.tokenizer else None for m in (teacher, loaded)]
    if hashes[0] != hashes[1] or loaded.config.num_tokens != teacher.config.num_tokens:
        raise UserError(
            f"{other} (the student) and {source} (the teacher) have different tokenizers: "
            "distillation compares them token by token."
        )
    if loaded.config.schedule != teacher.config.schedule:
        raise UserError(
            f"{other} (the student) and {source} (the teacher) have different noise schedules: "
            "their times would not mean the same."
        )
    if loaded.config.length < teacher.config.length:
        raise UserError(
            f"{other} (the student) reads at most {loaded.config.length} tokens, the teacher "
            f"{teacher.config.length}."
        )
    _check_ends(teacher.config, loaded.config, other, source)
    masks, codes = loaded.config.masks, config.mixture.codes
    if masks > 1 and (not METHODS[config.method].several_masks or masks > codes):
        raise UserError(
            f"{other} (the student) has {masks} masks: use method=mixture with mixture.codes "
            f"{masks} or more, or another student."
        )
    return student


def _check_ends(teacher: ModelConfig, student: ModelConfig, other: str, source: str) -> None:
    """Refuse a student whose windows are not the teacher's."""
    if student.end_id != teacher.end_id:
        windows = [
            "fill their windows" if end is None else f"end with token {end} in windows of their own"
            for end in (student.end_id, teacher.end_id)
        ]
        raise UserError(
            f"Texts of {other} (the student) {windows[0]}, those of {source} (the teacher) "
            f"{windows[1]}: use a student that was made from such texts, or none."
        )
    if teacher.end_id is not None and student.length != teacher.length:
        raise UserError(
            f"{other} (the student) has windows of {student.length} tokens, {source} (the teacher) "
            f"of {teacher.length}: where each text has its own they must be alike."
        )


def open_texts(
    config: DistillConfig,
    teacher: LoadedModel,
    tokenizer: str,
    folder: Path,
    world: World,
    progress: PrepareBar,
) -> tuple[TokenSource | None, TokenSource | None]:
    """Training text and held-out text, if the recipe names any, in the teacher's tokens.

    `tokenizer` is where its tokenizer is.
    """
    if not config.data.source:
        return None, None
    source, end_id = config.data.source, teacher.config.end_id
    network = cast("Network", teacher.model)
    raw = source != "oracle" and not is_prepared(Path(source))
    if end_id is not None and raw and config.data.rows == "stream":
        raise UserError(_stream(source))  # before it is prepared
    settings = replace(config.data, tokenizer=tokenizer)
    data, valid = open_data_together(
        settings, folder, world, progress, length=window_of(network), seed=config.train.seed
    )
    check_data(teacher.config, teacher.tokenizer.hash if teacher.tokenizer else None, data)
    first = min(ROWS_LOOKED_AT, data.num_sequences or ROWS_LOOKED_AT)
    if end_id is not None and goes_on(data.ordered(0, first), end_id):
        raise UserError(_stream(source))
    return data, valid


def _stream(source: str) -> str:
    return (
        f"data.source is {source}, whose rows go on after the end of a text, but each text of the "
        "teacher has a window of its own: use data.rows=document (--rows document to prepare it)."
    )


def make_task(
    config: DistillConfig,
    teacher: Teacher,
    student: Network,
    world: World,
    data: TokenSource | None,
    folder: Path,
    progress: BankBar,
) -> DistillTask:
    """The task of the settings' method, with its bank of the teacher's texts if it reads one."""
    rows = None if data is None else data.length
    window = window_of(teacher.network)
    check_fit(config, teacher.network.config, rows=rows, window=window, processes=world.size)
    references = None
    if config.reads_bank:
        references = _bank(config, teacher, world, data, folder, progress).rows
    return methods.make_task(
        config,
        teacher,
        student,
        world,
        data=data,
        references=references,
    )


def _bank(
    config: DistillConfig,
    teacher: Teacher,
    world: World,
    data: TokenSource | None,
    folder: Path,
    progress: BankBar,
) -> TokenSource:
    """Teacher samples on disk, drawn now where they are missing."""
    model, reference = teacher.network.config, config.reference
    length = window_of(teacher.network) if data is None else data.length
    settings = BankSettings(
        teacher=teacher.fingerprint,
        steps=reference.steps,
        rows=reference.rows,
        length=length,
        num_tokens=model.num_tokens,
        seed=reference.seed,
        prompt=config.prompt,
        prompts=data.fingerprint if data is not None and config.prompt else "",
        lengths=_law_of(model),
    )
    schedule = make_schedule(model.schedule)
    denoiser = network_denoiser(teacher.network, schedule)
    seed, bf16 = mix(reference.seed, "bank"), uses_bf16(config.train, world.device)
    starts = Starts(model, length, config.prompt)
    if teacher.tokenizer is None:
        raise UserError("The teacher has no tokenizer: use reference.source=online or data.")

    def draw(first: int, count: int) -> Tensor:
        indices, prompts = torch.arange(first, first + count), None
        if config.prompt:
            assert data is not None
            prompts = data.rows(first, count)
        start, owner = starts(Noise(seed, indices), prompts)
        there, samples = (each.to(world.device) for each in (start[owner], indices))
        canvas = Canvas(there, starts.mask_id, samples)
        with torch.autocast(world.device.type, dtype=torch.bfloat16, enabled=bf16):
            state = State(canvas, DrawOptions(seed=seed))
            drawn = ancestral(denoiser, schedule, state, steps=reference.steps)
        return drawn.tokens.cpu()

    where = Path(reference.bank) if reference.bank else folder / "bank"
    with progress() as bar:
        report: Progress | None = bar if world.is_main else None
        return open_bank(
            where,
            settings,
            draw,
            teacher.tokenizer,
            world=world,
            seed=config.train.seed,
            progress=report,
        )


def _law_of(model: ModelConfig) -> str:
    """Fingerprint of how texts end and how long they are; empty where they fill their windows."""
    if model.end_id is None:
        return ""
    return hashlib.sha256(json.dumps([model.end_id, model.lengths]).encode()).hexdigest()[:16]
