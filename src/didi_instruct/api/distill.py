"""Distillation from a recipe and a teacher to a folder that `didi.load` opens."""

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from didi_instruct import __version__
from didi_instruct.api.runs import (
    Change,
    check_folder,
    configure,
    only_run,
    open_data_together,
    start_of,
)
from didi_instruct.api.sources import PrepareBar
from didi_instruct.config.distill import DistillConfig, Method
from didi_instruct.config.model import ModelConfig
from didi_instruct.data.dataset import TokenSource
from didi_instruct.data.oracle import OracleLanguage
from didi_instruct.distillation.bank import BankSettings, Progress, open_bank
from didi_instruct.distillation.didi import DidiTask, References
from didi_instruct.distillation.hosting import Host
from didi_instruct.distillation.task import DistillTask, Teacher, check_fit
from didi_instruct.distillation.token_matching import TokenMatchingTask
from didi_instruct.distillation.watch import Watcher
from didi_instruct.errors import UserError
from didi_instruct.evaluation.curves import draw_curves
from didi_instruct.evaluation.likelihood import check_data, likelihood
from didi_instruct.evaluation.paths import Judge, nelbo_judge
from didi_instruct.evaluation.quick import QuickTest, oracle_facts, oracle_judge
from didi_instruct.models.checkpoint import LoadedModel, load_model
from didi_instruct.models.dit import DiT
from didi_instruct.models.manifest import MODEL, read_manifest
from didi_instruct.process.schedule import make_schedule
from didi_instruct.sampling.ancestral import ancestral
from didi_instruct.sampling.chain import Canvas, Draw
from didi_instruct.sampling.network import NetworkDenoiser
from didi_instruct.seeding import mix
from didi_instruct.training.loop import Loop, Outcome
from didi_instruct.training.objectives import Batch, make_objective
from didi_instruct.training.pretrain import uses_bf16
from didi_instruct.training.reporting import Reporter, SilentReporter
from didi_instruct.training.world import World, open_world

CURVES = "curves.png"
BankBar = Callable[[], Any]
"""Opens a progress display (`Progress`) for as long as a bank is being drawn."""


@dataclass(frozen=True, slots=True)
class DistillResult:
    """Where a run stands when it returns."""

    folder: Path
    outcome: Outcome
    is_main: bool
    """Whether this is the process that reports."""
    teacher: Mapping[str, float] = field(default_factory=dict)
    """The teacher's quick evaluation."""
    student: Mapping[str, float] = field(default_factory=dict)
    """The student's last one, averaged weights and raw ones (`…_raw`)."""
    curves: Path | None = None
    exact: bool = True
    """Whether the judge of path KL knows the likelihood; else it is the teacher's own bound."""
    prompt: int = 0
    """Tokens that every text was given."""

    @property
    def finished(self) -> bool:
        """Whether all steps are done and the student is in `folder`."""
        return self.outcome.signal is None


def distill(
    recipe: str | Mapping[str, Any] | DistillConfig,
    *,
    teacher: str | Path,
    out: str | Path,
    overrides: Sequence[str] = (),
    method: Method | None = None,
    resume: bool = False,
    device: str | None = None,
    reporter: Reporter | None = None,
    data_progress: PrepareBar = nullcontext,
    bank_progress: BankBar = nullcontext,
) -> DistillResult:
    """Distil `teacher` as the recipe says, in the folder `out`; under torchrun, all call this."""
    if not isinstance(teacher, (str, Path)):
        raise UserError(f"teacher is a {type(teacher).__name__}: give the folder of a model.")
    folder, source = Path(out), Path(teacher)
    more = [] if method is None else [f"method={method}"]
    config = configure(DistillConfig, recipe, [*overrides, *more] if more else overrides)
    verb = f"didi distill RECIPE --teacher {source}"
    changes = check_folder(folder, config, resume, verb=verb)
    loaded = load_model(source)
    student = _student(config, loaded, source)
    with open_world(device) as world:
        check_fit(config, loaded.config, processes=world.size)
        with only_run(folder, world):
            shown = reporter if world.is_main and reporter else SilentReporter()
            data, valid = _data(config, loaded, source, folder, world, data_progress)
            rows = None if data is None else data.length
            check_fit(config, loaded.config, rows=rows, processes=world.size)
            taught = Teacher(
                network=_denoiser(loaded, source).to(world.device),
                tokenizer=loaded.tokenizer,
                fingerprint=read_manifest(source).files[MODEL].sha256,
            )
            if resume:
                _check_teacher(folder, taught.fingerprint)
            task = _task(config, taught, student, world, data, folder, bank_progress)
            test = _quick_test(task, valid, loaded)
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
            config.train,
            folder,
            task.world,
            reporter=reporter,
            evaluate=_evaluator(task, test, valid, self.found),
            watch=Watcher(task, reporter.say),
            remedy=f"optim.lr or {task.critic_rate}",
            first_save=max(1, config.warmup),
        )

    def __call__(self, changes: Sequence[Change], resume: bool) -> DistillResult:
        start = start_of(self.loop, self.config, changes, resume)
        if start is None:
            return self._as_before()
        before: dict[str, float] = {}
        if self.config.watch.budgets:
            budgets = ", ".join(map(str, self.config.watch.budgets))
            self.reporter.say(f"Measuring the teacher at {budgets} steps")
            before = self.test.measure(self.task.teacher)
        outcome = self.loop.run(start, before if self.config.student is None else None)
        curves = False
        if outcome.signal is None:
            facts = _provenance(self.config, self.teacher, outcome, before, self.found)
            self.task.write_model(self.folder, facts)
            if self.world.is_main:
                title = f"{self.config.method}: {self.folder.name}"
                log, picture = self.folder / "log.jsonl", self.folder / CURVES
                curves = draw_curves(log, picture, title=title)
            self.world.wait()
        return self._result(outcome, before, self.found, curves)

    def _as_before(self) -> DistillResult:
        """What a finished run found when it finished."""
        found = read_manifest(self.folder).provenance.get("quick_evaluation", {})
        outcome, curves = self.loop.as_it_stands(), (self.folder / CURVES).exists()
        return self._result(outcome, found.get("teacher", {}), found.get("student", {}), curves)

    def _result(
        self,
        outcome: Outcome,
        teacher: Mapping[str, float],
        student: Mapping[str, float],
        curves: bool,
    ) -> DistillResult:
        return DistillResult(
            self.folder,
            outcome,
            self.world.is_main,
            teacher,
            student,
            self.folder / CURVES if curves else None,
            self.test.exact,
            self.config.prompt,
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


def _denoiser(loaded: LoadedModel, source: Path) -> DiT:
    """The network of a model that these methods can distil."""
    if not isinstance(loaded.model, DiT) or loaded.config.kind != "mdlm":
        raise UserError(
            f"{source} is a model of kind `{loaded.config.kind}`: these methods distil masked "
            "diffusion models (`mdlm`)."
        )
    return loaded.model


def _student(config: DistillConfig, teacher: LoadedModel, source: Path) -> DiT:
    """Where the student starts: a copy of the teacher, or a model that speaks its tokens."""
    network = _denoiser(teacher, source)
    if config.student is None:
        # Copied tensors: those of a loaded model are views of its file.
        return copy.deepcopy(network)
    other = Path(config.student)
    loaded = load_model(other)
    student = _denoiser(loaded, other)
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
    return copy.deepcopy(student)


def _data(
    config: DistillConfig,
    teacher: LoadedModel,
    source: Path,
    folder: Path,
    world: World,
    progress: PrepareBar,
) -> tuple[TokenSource | None, TokenSource | None]:
    """Training text and held-out text, if the recipe names any, in the teacher's tokens."""
    if not config.data.source:
        return None, None
    settings = replace(config.data, tokenizer=str(source))
    data, valid = open_data_together(
        settings, folder, world, progress, length=teacher.config.length, seed=config.train.seed
    )
    check_data(teacher.config, teacher.tokenizer.hash if teacher.tokenizer else None, data)
    return data, valid


def _task(
    config: DistillConfig,
    teacher: Teacher,
    student: DiT,
    world: World,
    data: TokenSource | None,
    folder: Path,
    progress: BankBar,
) -> DistillTask:
    if config.method == "token-matching":
        return TokenMatchingTask(config, teacher, student, world, data=data)
    references: References | None = None
    if config.reference.source == "data":
        assert data is not None
        references = data.rows
    elif config.reference.source == "bank":
        references = _bank(config, teacher, world, data, folder, progress).rows
    return DidiTask(config, teacher, student, world, references=references, data=data)


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
    length = model.length if data is None else data.length
    settings = BankSettings(
        teacher=teacher.fingerprint,
        steps=reference.steps,
        rows=reference.rows,
        length=length,
        num_tokens=model.num_tokens,
        seed=reference.seed,
        prompt=config.prompt,
        prompts=data.fingerprint if data is not None and config.prompt else "",
    )
    schedule = make_schedule(model.schedule)
    denoiser = NetworkDenoiser(teacher.network, schedule)
    seed, bf16 = mix(reference.seed, "bank"), uses_bf16(config.train, world.device)
    mask_id = model.mask_id
    assert mask_id is not None
    if teacher.tokenizer is None:
        raise UserError("The teacher has no tokenizer: use reference.source=online or data.")

    def draw(first: int, count: int) -> Tensor:
        tokens = torch.full((count, length), mask_id, device=world.device)
        if config.prompt:
            assert data is not None
            given = data.rows(first, count)[:, : config.prompt]
            tokens[:, : config.prompt] = given.to(world.device)
        indices = torch.arange(first, first + count, device=world.device)
        canvas = Canvas(tokens, mask_id, indices)
        with torch.autocast(world.device.type, dtype=torch.bfloat16, enabled=bf16):
            drawn = ancestral(
                denoiser, schedule, canvas, steps=reference.steps, settings=Draw(seed=seed)
            )
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


def _quick_test(task: DistillTask, valid: TokenSource | None, loaded: LoadedModel) -> QuickTest:
    """The quick evaluation: exact on the oracle language, else judged by the teacher's NELBO."""
    config = task.config
    start = torch.full((config.watch.samples, task.length), task.mask_id, device=task.world.device)
    judge: Judge | None = None
    also = None
    if config.prompt:
        source = valid or task.data
        assert source is not None
        given = source.ordered(0, config.watch.samples)
        start = start[: len(given)]
        start[:, : config.prompt] = given[:, : config.prompt].to(start.device)
    elif (language := _oracle(loaded)) is not None:
        judge, also = oracle_judge(language), oracle_facts
    else:
        loss = _loss_of(task.teacher_host, loaded.config)
        judge = nelbo_judge(loss, loaded.config, device=task.world.device)
    seed = mix(config.train.seed, "quick")
    return QuickTest(
        task.schedule,
        start,
        task.mask_id,
        config.watch.budgets,
        judge,
        seed,
        also,
        exact=also is not None,
    )


def _loss_of(host: Host, config: ModelConfig) -> Callable[[Batch], Tensor]:
    """A hosted network's part of its pretraining objective: nats per token of each sequence."""
    objective = make_objective(config)
    return lambda batch: host.run(lambda net: {"loss": objective.loss(net, batch)})["loss"]


def _oracle(loaded: LoadedModel) -> OracleLanguage | None:
    """The built-in language, if that is what the model speaks."""
    language = OracleLanguage.default()
    speaks = loaded.tokenizer is not None and loaded.tokenizer.hash == language.tokenizer.hash
    shape = (loaded.config.num_tokens, loaded.config.length)
    return language if speaks and shape == (language.num_tokens, language.length) else None


def _evaluator(
    task: DistillTask, test: QuickTest, valid: TokenSource | None, result: dict[str, float]
) -> Callable[[int], Mapping[str, float]]:
    """Quick evaluation of the averaged and of the raw student; every process computes the same."""
    train = task.config.train
    loss = _loss_of(task.student, task.model_config)

    def evaluate(step: int) -> Mapping[str, float]:
        with task.averaged():
            found = test.measure(task.student_rows)
            if valid is not None:
                count = min(train.eval_sequences, valid.num_sequences or train.eval_sequences)
                held_out = likelihood(
                    loss,
                    task.model_config,
                    valid.ordered,
                    sequences=count,
                    device=task.world.device,
                )
                found["valid_nats_per_token"] = held_out.nats_per_token
        if task.updater.ema is not None:
            found |= test.measure(task.student_rows, "_raw")
        result.clear()
        result.update(found)
        return found

    return evaluate


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
        "step": outcome.step,
        "quick_evaluation": {"teacher": dict(before), "student": dict(after)},
        "didi_instruct": __version__,
        "torch": torch.__version__,
    }
