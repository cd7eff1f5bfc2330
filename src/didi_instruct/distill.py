"""Distillation from a recipe and a teacher to a folder that `didi.load` opens."""

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from didi_instruct.adapters.files import base_of
from didi_instruct.config.distill import DistillConfig, Method
from didi_instruct.config.model import DATA_LENGTHS
from didi_instruct.data.dataset import TokenSource
from didi_instruct.data.manifest import is_prepared
from didi_instruct.distillation.bank import BankBar, teacher_bank
from didi_instruct.distillation.methods import check_fit, make_task
from didi_instruct.distillation.networks import make_student, prepare_teacher, take_lengths
from didi_instruct.distillation.run import DistillTask, Teacher
from didi_instruct.distillation.settings import check_rounds, settings_for
from didi_instruct.distillation.watch import Watcher
from didi_instruct.errors import Argument, UserError
from didi_instruct.evaluation.quick_eval import evaluation_of_students, quick_test
from didi_instruct.evaluation.training_curves import draw_curves
from didi_instruct.hub.run_budget import RunBudget, budget_of
from didi_instruct.hub.sources import (
    AdapterFolder,
    LoadOptions,
    Source,
    find_source,
    load_source,
)
from didi_instruct.models.checkpoint import LoadedModel, read_manifest
from didi_instruct.models.network import Network, window_of
from didi_instruct.process.masking import goes_on
from didi_instruct.tasks.prompt_rows import open_prompts
from didi_instruct.training.distributed import open_world, shards
from didi_instruct.training.likelihood import check_data
from didi_instruct.training.loop import Loop, Tick
from didi_instruct.training.reporting import Reporter
from didi_instruct.training.run_data import PrepareBar, open_run_data
from didi_instruct.training.run_dir import Run, RunResult, open_run, provenance

CURVES = "curves.png"
ROWS_LOOKED_AT = 4096
"""Rows of the data that tell if it is a stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillResult(RunResult):
    """State of a distillation when it returns."""

    teacher: Mapping[str, float] = field(default_factory=dict)
    """The teacher's quick evaluation."""
    student: Mapping[str, float] = field(default_factory=dict)
    """The student's last one, averaged weights and raw ones (`…_raw`)."""
    curves: Path | None = None
    exact: bool = True
    """True if the judge of path KL knows the likelihood, not the teacher's bound of it."""


def distill(
    recipe: str | Path | Mapping[str, Any] | DistillConfig,
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
    """Distil `teacher` (any SOURCE) as a recipe says, in `out`; under torchrun, all call this.

    `method` carries a recipe over to another method. `tokenizer` is for a foreign teacher that
    brings none.
    """
    if not isinstance(teacher, (str, Path)):
        raise UserError(f"teacher is a {type(teacher).__name__}: give its folder or name.")
    config, notes = settings_for(recipe, overrides, method)
    with open_run(out, config, resume=resume, device=device, reporter=reporter) as run:
        check_rounds(config, run)
        for note in notes:
            run.reporter.say(note)
        if run.is_complete:
            return _finished_before(run, config)
        source, found = str(teacher), find_source(teacher)
        loaded = found.load(LoadOptions(tokenizer=tokenizer))
        network = prepare_teacher(loaded, config, source)
        taught = Teacher(
            network=network,
            tokenizer=loaded.tokenizer,
            fingerprint=found.fingerprint(),
            source=source,
        )
        other = None if config.student is None else load_source(config.student)
        student = make_student(loaded, source, other, config)
        check_fit(config, network, processes=run.world.size)
        _check_teacher(run, taught.fingerprint)
        data, valid = _open_texts(
            run, config, loaded, str(tokenizer or words_folder(found)), data_progress
        )
        if config.lengths == DATA_LENGTHS:
            take_lengths(run, data, loaded, student, config.data.source)
        length = window_of(network) if data is None else data.length
        if (budget := budget_of(config, network, run.world, length)) is not None:
            budget.check()
        # A base that is to be sharded is whole for as long as it draws texts.
        if config.reads_bank or not (config.lora.rank and shards(config.train, run.world)):
            loaded.model.to(run.world.device)
        if data is not None:
            check_fit(config, network, rows=data.length, processes=run.world.size)
        references = None
        if config.reads_bank:
            references = teacher_bank(run, config, taught, data, bank_progress)
        task = make_task(config, taught, student, run.world, data=data, references=references)
        return _train(run, config, taught, task, valid)


def plan(
    recipe: str | Path | Mapping[str, Any] | DistillConfig,
    *,
    teacher: str | Path,
    overrides: Sequence[str] = (),
    method: Method | None = None,
    tokenizer: str | Path | None = None,
    device: str | None = None,
) -> tuple[DistillConfig, RunBudget | None]:
    """Settings in force of a run, and the memory of one with adapters; nothing is written.

    Refuses what `distill` would refuse before it opens data, but for prompts that are not named.
    """
    config, source = settings_for(recipe, overrides, method)[0], str(teacher)
    found = find_source(teacher)
    loaded = found.load(LoadOptions(tokenizer=tokenizer))
    network = prepare_teacher(loaded, config, source)
    with open_world(device) as world:
        length, prompts = window_of(network), config.prompts
        check_fit(config, network, processes=world.size)
        if prompts.longest and not prompts.source:
            length = min(length, prompts.longest + prompts.length)
        words = str(tokenizer or words_folder(found))
        if prompts.source and (rows := open_prompts(config, loaded, words, lambda _: None)):
            length = rows.length
        return config, budget_of(config, network, world, length)


def _train(
    run: Run,
    config: DistillConfig,
    teacher: Teacher,
    task: DistillTask,
    valid: TokenSource | None,
) -> DistillResult:
    """Train from the first step, or the last checkpoint, to the product."""
    test, latest = quick_test(task, valid, teacher), dict[str, float]()
    evaluate = evaluation_of_students(task, test, valid)

    def evaluated(step: int, tick: Tick) -> Mapping[str, float]:
        latest.update(evaluate(step, tick))
        return latest

    loop = Loop(
        task,
        replace(config.train, steps=config.iterations),
        run.folder,
        run.world,
        reporter=run.reporter,
        evaluate=evaluated,
        watch=Watcher(task, run.reporter.say),
        remedy=task.entry.lr_setting_names,
        first_save=max(1, config.warmup),
    )
    start, before = run.begin(loop), dict[str, float]()
    order = teacher.network.config.order
    if config.watch.budgets:
        budgets = ", ".join(map(str, config.watch.budgets))
        run.reporter.say(f"Measuring the teacher at {budgets} steps")
        before = test.measure(task.distillation.teacher_log_probs, order=order)
    # The first point of the student's curve, if it begins as the teacher and is drawn alike.
    model = task.distillation.model_config
    alike = config.student is None and (model.masks, model.order) == (1, order)
    outcome, curves = loop.run(start, before if alike else None), None
    if outcome.signal is None:
        facts = provenance(
            config,
            teacher=teacher.fingerprint,
            teacher_source=teacher.source,
            step=outcome.step,
            quick_evaluation={"teacher": before, "student": latest, "exact": test.exact},
        )
        task.write_model(run.folder, facts)
        curves = _draw(run, config)
        run.world.wait()
    return DistillResult(
        **run.end(outcome),
        teacher=before,
        student=latest,
        curves=curves,
        exact=test.exact,
    )


def _finished_before(run: Run, config: DistillConfig) -> DistillResult:
    """The result of a run that had made all of its steps."""
    found = read_manifest(run.folder).provenance.get("quick_evaluation", {})
    drawn = (run.folder / CURVES).exists()
    return DistillResult(
        **run.end(),
        teacher=found.get("teacher", {}),
        student=found.get("student", {}),
        curves=run.folder / CURVES if drawn else _draw(run, config),
        exact=found.get("exact", True),
    )


def _draw(run: Run, config: DistillConfig) -> Path | None:
    """Draw the numbers of a run, in the main process; None where matplotlib is missing."""
    if not run.world.is_main:
        return None
    file, title = run.folder / CURVES, f"{config.method}: {run.folder.name}"
    return file if draw_curves(run.folder / "log.jsonl", file, title=title) else None


def words_folder(found: Source) -> Path:
    """Folder of a model's tokenizer and chat template; adapters have those of their base."""
    if isinstance(found, AdapterFolder):
        return words_folder(find_source(base_of(found.path)))
    return found.path


def _open_texts(
    run: Run, config: DistillConfig, teacher: LoadedModel, folder: str, progress: PrepareBar
) -> tuple[TokenSource | None, TokenSource | None]:
    """Text to learn from and held-out text, if the recipe names any, in the teacher's tokens.

    In `folder` are the teacher's tokenizer and its chat template.
    """
    prompts = open_prompts(config, teacher, folder, run.reporter.say)
    if prompts is not None:
        return prompts, None
    source, end_id = config.data.source, teacher.config.end_id
    if not source:
        return None, None
    stream = UserError(
        f"data.source is {source}, whose rows go on after the end of a text, but each text of the "
        "teacher has a window of its own: use data.rows=document (--rows document to prepare it)."
    )
    raw = source != "oracle" and not is_prepared(Path(source))
    if end_id is not None and raw and config.data.rows == "stream":
        raise stream  # before it is prepared
    length = window_of(cast("Network", teacher.model))
    given = replace(config.data, tokenizer=folder)
    data, valid = open_run_data(run, given, length=length, progress=progress)
    check_data(teacher.config, teacher.tokenizer.hash if teacher.tokenizer else None, data)
    first = min(ROWS_LOOKED_AT, data.num_sequences or ROWS_LOOKED_AT)
    if end_id is not None and goes_on(data.ordered(0, first), end_id):
        raise stream
    return data, valid


def _check_teacher(run: Run, fingerprint: str) -> None:
    """Refuse another teacher before its bank is asked for; the loop compares once more."""
    for manifest in run.folder.glob("checkpoints/step-*/manifest.json") if run.resume else ():
        try:
            began = json.loads(manifest.read_text())["info"]["teacher"]
        except (OSError, ValueError, KeyError, TypeError):
            continue  # a damaged one: the loop sets it aside
        if began != fingerprint:
            raise UserError(
                "{} was begun with another teacher ({}…, now {}…): resume with what it began with, "
                "or choose another {}.",
                run.folder,
                began[:8],
                fingerprint[:8],
                Argument("out"),
            )
