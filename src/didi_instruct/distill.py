"""Distillation from a recipe and a teacher to a folder that `didi.load` opens."""

import copy
import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch

from didi_instruct import __version__
from didi_instruct.adapters.lora import shared
from didi_instruct.config.distill import DistillConfig, Method
from didi_instruct.config.model import ModelConfig
from didi_instruct.data.chat import find_chat_template
from didi_instruct.data.dataset import TokenSource
from didi_instruct.data.manifest import is_prepared
from didi_instruct.distillation import methods
from didi_instruct.distillation.bank import BankBar, padded_rows, teacher_bank
from didi_instruct.distillation.lengths import give_lengths, take_lengths
from didi_instruct.distillation.methods import METHODS, check_fit
from didi_instruct.distillation.run import DistillTask, Teacher
from didi_instruct.distillation.settings import check_rounds, sampling_flags, settings_for
from didi_instruct.distillation.watch import Watcher
from didi_instruct.errors import UserError
from didi_instruct.evaluation.quick import QuickTest
from didi_instruct.evaluation.quick_eval import evaluator, quick_test
from didi_instruct.evaluation.training_curves import draw_curves
from didi_instruct.hub.sources import LoadOptions, find_source, load_source
from didi_instruct.models.checkpoint import LoadedModel, read_manifest
from didi_instruct.models.network import Network, window_of
from didi_instruct.process.masking import goes_on
from didi_instruct.tasks.prompt_rows import PromptRows, open_prompts
from didi_instruct.training.distributed import World, open_world
from didi_instruct.training.likelihood import check_data
from didi_instruct.training.loop import Loop, Outcome
from didi_instruct.training.reporting import Reporter
from didi_instruct.training.run_data import PrepareBar, open_data_together
from didi_instruct.training.run_dir import (
    Change,
    check_folder,
    check_held,
    nothing_to_do,
    only_run,
    start_of,
)

CURVES = "curves.png"
ROWS_LOOKED_AT = 4096
"""Rows of the data that tell whether it is a stream."""


@dataclass(frozen=True, slots=True)
class DistillResult:
    """Where a run stands when it returns."""

    folder: Path
    outcome: Outcome
    is_main: bool
    """True in the process that reports."""
    teacher: Mapping[str, float] = field(default_factory=dict)
    """The teacher's quick evaluation."""
    student: Mapping[str, float] = field(default_factory=dict)
    """The student's last one, averaged weights and raw ones (`…_raw`)."""
    curves: Path | None = None
    exact: bool = True
    """The judge of path KL knows the likelihood; else it is the teacher's own bound."""
    prompt: bool = False
    """Texts continue something that was given."""
    averaged: bool = True
    """The student in the folder is the average."""
    new: bool = True
    """False where a resumed run had finished, so that nothing was trained."""
    sampling: str = ""
    """Flags of `didi generate` for what the student has learnt."""

    @property
    def finished(self) -> bool:
        """True once all steps are done and the student is in `folder`."""
        return self.outcome.signal is None


def distill(
    recipe: str | Mapping[str, Any] | DistillConfig,
    *,
    teacher: str | Path,
    out: str | Path,
    overrides: Sequence[str] = (),
    method: Method | None = None,
    tokenizer: str | Path | None = None,
    resume: bool = False,
    device: str | None = None,
    reporter: Reporter | None = None,
    data_progress: PrepareBar = nullcontext,
    bank_progress: BankBar = nullcontext,
) -> DistillResult:
    """Distil `teacher` (any SOURCE) as the recipe says, in `out`; under torchrun, all call this.

    `method` carries a recipe over to another method. `tokenizer` is for a foreign teacher that
    brings none.
    """
    if not isinstance(teacher, (str, Path)):
        raise UserError(f"teacher is a {type(teacher).__name__}: give its folder or name.")
    folder, source = Path(out), str(teacher)
    config, said = settings_for(recipe, overrides, method)
    verb = f"didi distill RECIPE --teacher {source}"
    check_rounds(config, check_folder(folder, config, resume, verb=verb), folder)
    loaded = load_source(source, LoadOptions(tokenizer=tokenizer))
    network = denoiser_of(loaded, source, config.method)
    give_lengths(loaded, config, source)
    student = open_student(config, loaded, source)
    with open_world(device) as world:
        check_fit(config, loaded.config, window=window_of(network), processes=world.size)
        with only_run(folder, world):
            shown = reporter if world.is_main and reporter else Reporter()
            changes = check_held(folder, config, resume, world, verb=verb)
            for line in said:
                shown.say(line)
            if nothing_to_do(folder, config.iterations, resume, shown.say):
                return _as_before(folder, config, world)
            words = str(tokenizer or find_source(source).path)
            data, valid = open_texts(config, loaded, words, folder, world, data_progress)
            if config.prompts.source:
                data = _prompts(config, loaded, words, shown)
            take_lengths(data, config, loaded, student)
            loaded.model.to(world.device)
            taught = Teacher(
                network=network,
                tokenizer=loaded.tokenizer,
                fingerprint=find_source(source).fingerprint(),
                source=source,
            )
            if resume:
                _check_teacher(folder, taught.fingerprint)
            task = make_task(config, taught, student, world, data, folder, bank_progress)
            test = quick_test(task, valid, loaded)
            run = _Run(config, taught, task, test, valid, folder, shown)
            return run(changes, resume)


class _Run:
    """A task in its folder, from the first step or the last checkpoint to the product."""

    def __init__(
        self,
        config: DistillConfig,
        teacher: Teacher,
        task: DistillTask,
        test: QuickTest,
        valid: TokenSource | None,
        folder: Path,
        reporter: Reporter,
    ) -> None:
        self.config, self.teacher, self.task, self.test = config, teacher, task, test
        self.world, self.folder, self.reporter = task.world, folder, reporter
        self.found: dict[str, float] = {}
        """The student's last quick evaluation."""
        self.loop = Loop(
            task,
            replace(config.train, steps=config.iterations),
            folder,
            task.world,
            reporter=reporter,
            evaluate=evaluator(task, test, valid, self.found),
            watch=Watcher(task, reporter.say),
            remedy=task.entry.lr_setting_names,
            first_save=max(1, config.warmup),
        )

    def __call__(self, changes: Sequence[Change], resume: bool) -> DistillResult:
        start = start_of(self.loop, self.config, changes, resume)
        before: dict[str, float] = {}
        order = self.teacher.network.config.order
        if self.config.watch.budgets:
            budgets = ", ".join(map(str, self.config.watch.budgets))
            self.reporter.say(f"Measuring the teacher at {budgets} steps")
            before = self.test.measure(self.task.distillation.teacher_log_probs, order=order)
        # The first point of the student's curve, if it begins as the teacher and is drawn alike.
        model = self.task.distillation.model_config
        alike = self.config.student is None and (model.masks, model.order) == (1, order)
        outcome = self.loop.run(start, before if alike else None)
        curves = None
        if outcome.signal is None:
            facts = _provenance(self.config, self.teacher, outcome, before, self.found)
            facts["quick_evaluation"]["exact"] = self.test.exact
            self.task.write_model(self.folder, facts)
            curves = _draw(self.folder, self.config) if self.world.is_main else None
            self.world.wait()
        return DistillResult(
            self.folder,
            outcome,
            self.world.is_main,
            before,
            self.found,
            curves,
            self.test.exact,
            self.config.continues,
            self.config.train.ema > 0,
            sampling=sampling_flags(self.config),
        )


def _draw(folder: Path, config: DistillConfig) -> Path | None:
    """The numbers of a run as a picture; None where matplotlib is missing."""
    title = f"{config.method}: {folder.name}"
    drawn = draw_curves(folder / "log.jsonl", folder / CURVES, title=title)
    return folder / CURVES if drawn else None


def _as_before(folder: Path, config: DistillConfig, world: World) -> DistillResult:
    """The result of a run that had finished."""
    found = read_manifest(folder).provenance.get("quick_evaluation", {})
    curves = folder / CURVES if (folder / CURVES).exists() else None
    if curves is None and world.is_main:
        curves = _draw(folder, config)
    return DistillResult(
        folder,
        Outcome(config.iterations, None, None),
        world.is_main,
        found.get("teacher", {}),
        found.get("student", {}),
        curves,
        found.get("exact", True),
        config.continues,
        config.train.ema > 0,
        new=False,
        sampling=sampling_flags(config),
    )


def _check_teacher(folder: Path, fingerprint: str) -> None:
    """Refuse another teacher before its bank is asked for; the loop compares once more."""
    for manifest in (folder / "checkpoints").glob("step-*/manifest.json"):
        try:
            began = json.loads(manifest.read_text())["info"]["teacher"]
        except (OSError, ValueError, KeyError, TypeError):
            continue  # a damaged one: the loop sets it aside
        if began != fingerprint:
            raise UserError(
                f"{folder} was begun with another teacher ({began[:8]}…, now {fingerprint[:8]}…): "
                "resume with what it began with, or choose another --out."
            )


def _provenance(
    config: DistillConfig,
    teacher: Teacher,
    outcome: Outcome,
    before: Mapping[str, float],
    after: Mapping[str, float],
) -> dict[str, Any]:
    return {
        "recipe": asdict(config),
        "teacher": teacher.fingerprint,
        "teacher_source": teacher.source,
        "step": outcome.step,
        "quick_evaluation": {"teacher": dict(before), "student": dict(after)},
        "didi_instruct": __version__,
        "torch": torch.__version__,
    }


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
    # Tensors of a loaded model are views of its file. Adapters leave them as they are.
    student = copy.deepcopy(network) if not config.lora.rank else shared(network)
    # How long texts are is the teacher's to say.
    student.config = replace(student.config, lengths=teacher.config.lengths, order=config.order)
    return student


def _other_student(config: DistillConfig, other: str, teacher: LoadedModel, source: str) -> Network:
    """A student that is not a copy of the teacher, if the two fit."""
    loaded = give_lengths(load_source(other), config, other)
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


def _prompts(
    config: DistillConfig, teacher: LoadedModel, folder: str, shown: Reporter
) -> PromptRows:
    """Prompts in the tokens of a teacher, whose template is in a folder."""
    rows, notes = open_prompts(
        config.prompts,
        teacher,
        folder,
        answers=config.reads_data,
        seed=config.train.seed,
        template=find_chat_template(folder) if config.prompts.chat else None,
    )
    for note in notes:
        shown.say(note)
    return rows


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
        pad = teacher.network.config.num_tokens
        drawn = teacher_bank(config, teacher, world, data, folder, progress).rows
        references = padded_rows(drawn, pad) if config.prompts.source else drawn
    return methods.make_task(
        config,
        teacher,
        student,
        world,
        data=data,
        references=references,
    )
