"""Samplers of models in many settings, drawn and measured on equal terms, each once.

`didi eval` has one sampler for all its models. The tables here have rows that differ in model,
sampler and options, with one judge, one seed and one number of samples for all.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from didi_instruct.api.plan import Plan, check_metrics
from didi_instruct.api.studio import Studio
from didi_instruct.api.yardstick import make_yardstick
from didi_instruct.errors import UserError
from didi_instruct.evaluation.describing import check_comparable, complete
from didi_instruct.evaluation.judges import Judge
from didi_instruct.evaluation.measuring import Measured, Progress, Row, Yardstick
from didi_instruct.evaluation.rows import METRICS
from didi_instruct.evaluation.samples import SampleSet
from didi_instruct.hub.sources import ModelInfo, peek_models
from didi_instruct.model import Model, load
from didi_instruct.sampling.registry import find_sampler

WHOLE = (0, 1)
"""The only part there is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A model and a way to sample it: a row of a table."""

    method: str
    """Names the line of the table."""
    source: str
    steps: int | None = None
    """None where the sampler takes a step per token."""
    sampler: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    temperature: float = 1.0
    top_p: float = 1.0
    more: Mapping[str, Any] = field(default_factory=dict)
    """What else the row says."""
    without: tuple[str, ...] = ()
    """Metrics of the terms that its row does not have."""

    def plan(self, terms: "Terms") -> Plan:
        """What to draw."""
        return Plan(
            steps=(self.steps or 1,),
            num=terms.num,
            length=terms.length,
            sampler=self.sampler,
            options=self.options,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=terms.seed,
            batch_size=terms.batch_size,
            until_eot=terms.until_eot,
            measure_path=any(METRICS[name].path for name in terms.metrics),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """What all rows of a table share."""

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
    """Which settings are drawn and measured: of so many parts, the one of this number, from 0."""
    device: str | None = None
    progress: Progress | None = None

    def __post_init__(self) -> None:
        """Refuse measures that lack what they need."""
        check_metrics(self.metrics, self.judge is not None, self.reference is not None)


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
    models = {
        model.source: model for model in peek_models([*beside, *(s.source for s in settings)])
    }
    _check_lengths(list(models.values()), terms)
    first, parts = terms.part
    settings = settings[first::parts]
    if not settings:
        return Found((), ())
    studio, sets = Studio(terms.out), []
    loaded: tuple[str, Model] | None = None
    for number, setting in enumerate(settings):
        if terms.progress is not None:
            terms.progress("Drawing", number, len(settings))
        _check(setting, models[setting.source])
        if loaded is None or loaded[0] != setting.source:
            loaded = setting.source, load(setting.source, device=terms.device)
        sets += studio.draw(setting.source, loaded[1], setting.plan(terms))
    check_comparable(sets, terms.metrics)
    yardstick, _ = make_yardstick(
        sets,
        list(models.values()),
        seed=terms.seed,
        judge=terms.judge,
        reference=terms.reference,
        metrics=terms.metrics,
        device=terms.device,
    )
    asked = [[m for m in terms.metrics if m not in setting.without] for setting in settings]
    return Found(settings, list(_measure(studio, sets, asked, terms, yardstick)))


def _check_lengths(models: Sequence[ModelInfo], terms: Terms) -> None:
    """Refuse models of other lengths before anything is drawn, those beside the settings too."""
    first, *others = models
    for other in others:
        if terms.length is None and other.config.length != first.config.length:
            raise UserError(
                f"{other.source} writes {other.config.length} tokens and {first.source} "
                f"{first.config.length}: entropy grows with length, so they do not belong into "
                "one table."
            )


def _check(setting: Setting, model: ModelInfo) -> None:
    """Refuse a sampler that would not take the steps that its row claims, or takes its own."""
    counts = find_sampler(setting.sampler, model.config.kind).counts_tokens
    if counts != (setting.steps is None):
        remedy = "leave out its steps" if counts else "give it steps"
        raise UserError(f"{setting.method}: {remedy}, as its sampler asks.")


def _measure(
    studio: Studio,
    sets: Sequence[SampleSet],
    asked: Sequence[Sequence[str]],
    terms: Terms,
    yardstick: Yardstick,
) -> Iterator[Measured]:
    for number, (samples, metrics) in enumerate(zip(sets, asked, strict=True)):
        if terms.progress is not None:
            terms.progress("Measuring", number, len(sets))
        yield studio.measure(samples, metrics, yardstick)


def _row(setting: Setting, row: Row) -> Row:
    """With names of the table's own; where a model lay on this machine says nothing to a reader."""
    return complete(row) | {"model": None, "method": setting.method, **setting.more}
