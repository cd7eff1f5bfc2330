"""Settings of an evaluation of samples."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from didi_instruct.config.model import Kind
from didi_instruct.data.readers import ReadOptions
from didi_instruct.errors import UserError
from didi_instruct.evaluation.frontier import sweep
from didi_instruct.evaluation.metrics import METRICS, check_metrics
from didi_instruct.evaluation.scores import JudgeConfig
from didi_instruct.model import Model
from didi_instruct.sampling.generate import Request
from didi_instruct.sampling.registry import SAMPLERS, find_sampler


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    """Settings of an evaluation: draws from each model, and metrics."""

    metrics: tuple[str, ...] = ("entropy", "unique-4gram", "self-bleu")
    steps: tuple[int, ...] = (8, 16, 32)
    """A row for each; samplers that take a step per token have one row."""
    most_steps: int | None = None
    """Steps of the baseline at its best, which the gap is measured to; None: no gap."""
    num: int | None = None
    """Samples per row; None: 256, or 40 for proteins, as in the paper."""
    length: int | None = None
    """Tokens of a sample; None: the model's, drawn where texts have windows of their own."""
    lengths: tuple[int, ...] = ()
    """Several lengths: rows for each, and their means."""
    sampler: str | None = None
    """By name; None: the plain one of each model."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the sampler."""
    temperature: float = 1.0
    top_p: float = 1.0
    temperatures: tuple[float, ...] = ()
    """Of a sweep, beside the plain setting."""
    top_ps: tuple[float, ...] = ()
    """Of a sweep."""
    seed: int = 0
    batch_size: int = 64
    until_eot: bool = False
    """Texts end at their end-of-text; those of a model that has one always do."""
    measure_path: bool = False
    """Know the path's log-probability even where it costs passes and no metric asks for it."""
    reference: str | None = None
    """Text, a file of samples, or FASTA, to compare with."""
    measure_reference: bool = True
    """Measure the reference too, as a row of its own."""
    reading: ReadOptions = field(default_factory=ReadOptions)
    """How that text is read."""
    judging: JudgeConfig = field(default_factory=JudgeConfig)
    """How a judge that is named by its SOURCE reads."""
    start: str | None = None
    """SOURCE of a left-to-right model that the training of the AR-entropy bound starts from. It
    must not have seen the samples."""
    tokenizer: str | None = None
    """For models that bring none; beside saved samples and FASTA files alone, for the text of the
    reference."""
    beside: tuple[str, ...] = ()
    """Further models of the table, measured elsewhere, which share its vocabulary."""
    device: str | None = None
    dtype: str | None = None
    """Type that weights are cast to, as in `load`."""

    def __post_init__(self) -> None:
        check_metrics(self.metrics)
        if self.sweeps and (self.temperature, self.top_p) != (1, 1):
            raise UserError(
                "A sweep tries its own temperatures and top-p: leave out temperature and top_p."
            )
        if self.lengths and self.length is not None:
            raise UserError("length is one length and lengths are several: leave out one.")
        if self.start is not None and "ar-kl" not in self.metrics:
            raise UserError(
                "A left-to-right model to start from is for the metric ar-kl: add it to --metrics, "
                "or leave the model out."
            )
        list(self._requests(self.steps))  # a request refuses numbers that mean nothing

    @property
    def sweeps(self) -> bool:
        """True if several temperatures or top-p are tried."""
        return bool(self.temperatures or self.top_ps)

    @property
    def num_samples(self) -> int:
        """Samples per row."""
        if self.num is not None:
            return self.num
        return 40 if any("residues" in METRICS[name].requires for name in self.metrics) else 256

    def requests(self, kind: Kind) -> Iterator[Request]:
        """One request per row of a model; samplers that count tokens have no steps to choose."""
        counts_tokens = find_sampler(self.sampler, kind).counts_tokens
        return self._requests((None,) if counts_tokens else tuple(dict.fromkeys(self.steps)))

    def _requests(self, budgets: Sequence[int | None]) -> Iterator[Request]:
        settings = [(self.temperature, self.top_p)]
        if self.sweeps:
            settings = [*sweep(self.temperatures, self.top_ps)]
        needs_path = any("path" in METRICS[name].requires for name in self.metrics)
        for steps in budgets:
            for temperature, top_p in settings:
                yield Request(
                    num=self.num_samples,
                    steps=steps,
                    length=self.length,
                    sampler=self.sampler,
                    options=self.options,
                    temperature=temperature,
                    top_p=top_p,
                    seed=self.seed,
                    batch_size=self.batch_size,
                    measure_path=self.measure_path or needs_path,
                )


@dataclass(frozen=True, slots=True)
class Variant:
    """A model that is drawn and measured in a way of its own, among others of a table."""

    source: str
    config: EvalConfig
    """Like that of the table but for sampler, options, steps, temperature, top-p and metrics."""


def baseline_config(config: EvalConfig, model: Model) -> EvalConfig:
    """Settings of the baseline: most steps too, sampled plainly if the sampler does not fit."""
    budgets = {*config.steps, *([config.most_steps] if config.most_steps else [])}
    config = replace(config, steps=tuple(sorted(budgets)))
    sampler = None if config.sampler is None else SAMPLERS.get(config.sampler)
    if sampler is None:
        known = {option.name for option in fields(find_sampler(None, model.config.kind).options)}
        return config if set(config.options) <= known else replace(config, options={})
    guided = sampler.name == "rgas" and model.discriminator is None
    if guided or sampler.kind != model.config.kind:
        return replace(config, sampler=None, options={})
    return config
