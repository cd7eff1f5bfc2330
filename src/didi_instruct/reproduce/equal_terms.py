"""Samplers of models in many settings, drawn and measured on equal terms, each once.

`didi eval` has one sampler for all its models. The tables here have rows that differ in model,
sampler and options, with one judge, one seed and one number of samples for all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from didi_instruct.errors import UserError
from didi_instruct.evaluation.config import EvalConfig, Variant
from didi_instruct.evaluation.evaluate import evaluate
from didi_instruct.evaluation.measuring import Measured, Progress, Row, complete
from didi_instruct.evaluation.metrics import METRICS
from didi_instruct.evaluation.scores import Judge
from didi_instruct.hub.sources import ModelInfo, peek_models
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
    """With names of the table's own; where a model lay on this machine says nothing to a reader."""
    return complete(row) | {"model": None, "method": setting.method, **setting.more}
