"""What an evaluation asks for: what to draw, and what to measure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from didi_instruct.config.schema import nearest
from didi_instruct.errors import UserError
from didi_instruct.evaluation.frontier import sweep
from didi_instruct.evaluation.rows import METRICS
from didi_instruct.model import Model
from didi_instruct.sampling.generate import Request
from didi_instruct.sampling.registry import SAMPLERS, find_sampler


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What to draw from each model."""

    steps: tuple[int, ...]
    most_steps: int | None = None
    """Steps of the baseline at its best, which the gap is measured to; None: no gap."""
    num: int = 256
    length: int | None = None
    sampler: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    temperature: float = 1.0
    top_p: float = 1.0
    temperatures: tuple[float, ...] = ()
    """Of the sweep; empty without one."""
    top_ps: tuple[float, ...] = ()
    seed: int = 0
    batch_size: int = 64
    until_eot: bool = False
    """Texts end at their end-of-text; those of a model that has one always do."""
    measure_path: bool = False
    """Know the path's log-probability even where it costs passes: of models with several masks."""

    def __post_init__(self) -> None:
        """Refuse settings that contradict each other."""
        if self.sweeps and (self.temperature, self.top_p) != (1, 1):
            raise UserError(
                "A sweep tries its own temperatures and top-p: leave out temperature and top_p."
            )

    @property
    def sweeps(self) -> bool:
        """Whether several temperatures or top-p are tried."""
        return bool(self.temperatures or self.top_ps)

    def requests(self, counts_tokens: bool = False) -> Iterator[Request]:
        """One wish per row of the table; samplers that count tokens have no steps to choose."""
        settings = [(self.temperature, self.top_p)]
        if self.sweeps:
            settings = [*sweep(self.temperatures, self.top_ps)]
        for steps in (None,) if counts_tokens else dict.fromkeys(self.steps):
            for temperature, top_p in settings:
                yield Request(
                    num=self.num,
                    steps=steps,
                    length=self.length,
                    sampler=self.sampler,
                    options=self.options,
                    temperature=temperature,
                    top_p=top_p,
                    seed=self.seed,
                    batch_size=self.batch_size,
                    measure_path=self.measure_path,
                )


def check_metrics(
    metrics: Sequence[str], judge: bool, reference: bool, folding: bool = False
) -> None:
    """Refuse measures that are not known, or that lack what they need."""
    if not metrics:
        raise UserError(f"No metric is named. Known: {', '.join(METRICS)}.")
    for name in metrics:
        if name not in METRICS:
            raise UserError(f"`{name}` is not a metric.{nearest(name, list(METRICS))}")
        if METRICS[name].judge and not judge:
            raise UserError(f"The metric {name} needs a judge: add --judge SOURCE.")
        if METRICS[name].reference and not reference:
            raise UserError(f"The metric {name} compares with text: add --reference DATA.")
        if METRICS[name].chains and not reference:
            raise UserError(f"The metric {name} compares with chains: add --reference FASTA.")
        if METRICS[name].folding and not folding:
            raise UserError(f"The metric {name} folds chains: add --folding SOURCE.")
    if "ppl" in metrics and "entropy" not in metrics:
        raise UserError("Perplexity alone proves nothing: add the metric entropy.")


def usual_num(metrics: Sequence[str]) -> int:
    """Samples of a row where nobody says how many: 40 chains, as in the paper, or 256 texts."""
    return 40 if any(METRICS[name].residues for name in metrics) else 256


def plan_of_baseline(plan: Plan, model: Model) -> Plan:
    """The same, with most steps too; plainly sampled where it cannot be sampled as the others."""
    budgets = {*plan.steps, *([plan.most_steps] if plan.most_steps else [])}
    plan = replace(plan, steps=tuple(sorted(budgets)))
    sampler = None if plan.sampler is None else SAMPLERS.get(plan.sampler)
    if sampler is None:
        known = {option.name for option in fields(find_sampler(None, model.config.kind).options)}
        return plan if set(plan.options) <= known else replace(plan, options={})
    guided = sampler.name == "rgas" and model.discriminator is None
    if guided or sampler.kind != model.config.kind:
        return replace(plan, sampler=None, options={})
    return plan
