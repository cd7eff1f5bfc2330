"""Measure models as `didi eval` does: one at several budgets, or many settings on equal terms.

All jobs of a grid share one folder of samples and measurements, so that a model is sampled and
judged once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from didi_instruct.errors import UserError
from didi_instruct.evaluation.config import EvalConfig, Variant
from didi_instruct.evaluation.diversity import unigram_entropy
from didi_instruct.evaluation.evaluate import evaluate
from didi_instruct.evaluation.judges import JudgeConfig, open_judge
from didi_instruct.evaluation.measuring import Measured, Progress, Row, complete, plain
from didi_instruct.evaluation.metrics import METRICS
from didi_instruct.evaluation.samples import SampleSet
from didi_instruct.evaluation.scores import Judge
from didi_instruct.hub.sources import ModelInfo, peek_models
from didi_instruct.reproduce.jobs import Context, Job
from didi_instruct.reproduce.minutes import learning
from didi_instruct.reproduce.scale import Scale
from didi_instruct.sampling.registry import find_sampler
from didi_instruct.training.likelihood import perplexity

EVALS = "evals"
"""Folder of samples and of what was measured of them, in that of the grid."""
SHOWN = 2
"""Texts of a row that are shown."""


def quality_job(
    scale: Scale,
    name: str,
    model: Job | str,
    *,
    steps: Sequence[int],
    seed: int = 0,
    metrics: Sequence[str] = (),
    num: int | None = None,
    sampler: str | None = None,
    does: str = "quality",
) -> Job:
    """Ask for rows of a model at this scale; perplexity never goes without entropy."""
    usual = ("ppl", "entropy", "path-kl", "unique-4gram")
    inputs: dict[str, Job | str] = {"model": model, "judge": scale.judge}
    if "mauve" in metrics and scale.data is not None:
        inputs["reference"] = scale.data
    return Job(
        name=name,
        does=does,
        inputs=inputs,
        options={
            "steps": list(steps),
            "metrics": list(metrics or usual),
            "sampler": sampler,
            "options": dict(scale.guidance) if sampler == "rgas" else {},  # of the sampler
            **scale.drawing(seed, num),
        },
    )


def quality(context: Context, **settings: Any) -> list[dict[str, Any]]:
    """Rows of one model, one for each number of steps."""
    rows, _ = _evaluate(context, **settings)
    return rows


def texts(context: Context, **settings: Any) -> list[dict[str, Any]]:
    """Rows with the first texts of each, and the measures of those alone."""
    rows, sets = _evaluate(context, **settings)
    judge = judge_of(context, settings["judging"])
    return [row | {"texts": _first(s, judge)} for row, s in zip(rows, sets, strict=True)]


def _first(samples: SampleSet, judge: Judge) -> list[dict[str, Any]]:
    some = samples.first(SHOWN)
    scores = judge.score(some)
    nats = (scores.nats / scores.tokens).tolist()
    entropies = unigram_entropy(some.tokens, some.lengths).tolist()
    return [
        {"text": text, "ppl": plain(perplexity(mean)), "entropy": entropy}
        for text, mean, entropy in zip(some.texts, nats, entropies, strict=True)
    ]


def _evaluate(
    context: Context,
    *,
    steps: Sequence[int],
    num: int,
    seed: int,
    metrics: Sequence[str],
    sampler: str | None,
    options: Mapping[str, Any],
    until_eot: bool,
    batch_size: int,
    judging: Mapping[str, Any],
) -> tuple[list[dict[str, Any]], tuple[SampleSet, ...]]:
    config = EvalConfig(
        metrics=tuple(metrics),
        steps=tuple(steps),
        num=num,
        sampler=sampler,
        options=options,
        seed=seed,
        batch_size=batch_size,
        until_eot=until_eot,
        reference=context.inputs.get("reference"),
        device=context.device,
    )
    found = evaluate(
        [context.inputs["model"]],
        config,
        out=context.shared / EVALS,
        judge=judge_of(context, judging),
        progress=lambda stage, done, total: context.tell(f"{_short(stage)} {done} of {total}"),
    )
    # Where a model lay on this machine says nothing to a reader.
    whose = {"model": None, "judge": found.judge and Path(found.judge).name}
    rows = [row | whose | learning(Path(context.inputs["model"])) for row in found.rows]
    return rows, found.samples


def judge_of(context: Context, judging: Mapping[str, Any]) -> Judge:
    """The judge of a job, opened once for all jobs of this process; `judging` is how it reads."""
    return _open(context.inputs["judge"], context.device, tuple(sorted(judging.items())))


@lru_cache(maxsize=1)
def _open(source: str, device: str | None, judging: tuple[tuple[str, Any], ...]) -> Judge:
    return open_judge(source, JudgeConfig(**dict(judging)), device=device)


def _short(stage: str) -> str:
    return stage.split()[0].lower()


WHOLE = (0, 1)
"""All settings in one part."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A model and a way to sample it: a row of a table."""

    method: str
    """Name of the line in the table."""
    source: str
    steps: int | None = None
    """None where the sampler takes a step per token."""
    sampler: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    temperature: float = 1.0
    top_p: float = 1.0
    more: Mapping[str, Any] = field(default_factory=dict)
    """Further columns of the row."""
    without: tuple[str, ...] = ()
    """Metrics that its row leaves out."""

    def variant(self, terms: "Terms") -> Variant:
        """The row of an evaluation."""
        config = replace(
            terms.config,
            steps=(self.steps or 1,),
            metrics=tuple(name for name in terms.metrics if name not in self.without),
            sampler=self.sampler,
            options=self.options,
            temperature=self.temperature,
            top_p=self.top_p,
        )
        return Variant(self.source, config)


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """Settings that all rows of a table share."""

    out: Path
    """Folder of samples and numbers; what is there is not made again."""
    judge: Judge | None = None
    metrics: tuple[str, ...] = ("ppl", "entropy")
    num: int = 256
    seed: int = 0
    length: int | None = None
    batch_size: int = 64
    until_eot: bool = False
    reference: str | None = None
    """Text to compare with, for MAUVE."""
    part: tuple[int, int] = WHOLE
    """(i, n): measure part i of n, from 0."""
    device: str | None = None
    progress: Progress | None = None

    @property
    def config(self) -> EvalConfig:
        """Settings of the evaluation."""
        return EvalConfig(
            metrics=self.metrics,
            num=self.num,
            length=self.length,
            seed=self.seed,
            batch_size=self.batch_size,
            until_eot=self.until_eot,
            measure_path=any("path" in METRICS[name].requires for name in self.metrics),
            reference=self.reference,
            measure_reference=False,
            device=self.device,
        )


@dataclass(frozen=True, slots=True)
class Found:
    """Numbers of settings, in their order."""

    settings: Sequence[Setting]
    measured: Sequence[Measured]

    @property
    def rows(self) -> list[Row]:
        """A row for each setting."""
        return [_row(s, m.row) for s, m in zip(self.settings, self.measured, strict=True)]


def measure(settings: Sequence[Setting], terms: Terms, beside: Sequence[str] = ()) -> Found:
    """Draw and measure every setting of a part; models of one table have one tokenizer.

    `beside` are other models of the table, for what all of it is measured with.
    """
    if not settings:
        raise UserError("There is no setting to measure: name a model.")
    sources = list(dict.fromkeys([*beside, *(setting.source for setting in settings)]))
    models = {model.source: model for model in peek_models(sources)}
    for setting in settings:
        _check_steps(setting, models[setting.source])
    first, parts = terms.part
    settings = settings[first::parts]
    if not settings:
        return Found((), ())
    found = evaluate(
        [setting.variant(terms) for setting in settings],
        replace(terms.config, beside=tuple(sources)),
        out=terms.out,
        judge=terms.judge,
        progress=terms.progress,
    )
    return Found(settings, found.measured)


def _check_steps(setting: Setting, model: ModelInfo) -> None:
    """Refuse a sampler that would not take the steps that its row claims, or takes its own."""
    counts = find_sampler(setting.sampler, model.config.kind).counts_tokens
    if counts != (setting.steps is None):
        remedy = "leave out its steps" if counts else "give it steps"
        raise UserError(f"{setting.method}: {remedy}, as its sampler asks.")


def _row(setting: Setting, row: Row) -> Row:
    """A row under the names of the table, without the local path of its model."""
    return complete(row) | {"model": None, "method": setting.method, **setting.more}


Rows = list[dict[str, Any]]


def terms_of(
    context: Context,
    *,
    num: int,
    seed: int,
    batch_size: int,
    until_eot: bool,
    judging: Mapping[str, Any],
    metrics: Sequence[str] = ("ppl", "entropy"),
    part: Sequence[int] = WHOLE,
) -> Terms:
    """Settings that all rows of a job share, from its options."""
    return Terms(
        out=context.shared / EVALS,
        judge=judge_of(context, judging),
        metrics=tuple(metrics),
        num=num,
        seed=seed,
        batch_size=batch_size,
        until_eot=until_eot,
        reference=context.inputs.get("reference"),
        part=(part[0], part[1]),
        device=context.device,
        progress=progress_of(context),
    )


def progress_of(context: Context) -> Progress:
    """Report progress of an evaluation in the words of a job."""
    return lambda stage, done, total: context.tell(f"{stage.lower()} {done} of {total}")
