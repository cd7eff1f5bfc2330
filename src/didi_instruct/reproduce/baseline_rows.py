"""Rows of the experiment `baselines`: samplers and rivals on equal terms.

Every way of sampling is measured at the same NFE, plain and over the same temperatures and top-p,
so that none is reported at its worst setting alone. Each is drawn by a job of its own, whose rows
hold the numbers of every sample; `compared` sets rows against each other when all are there, so
that one may fail, come later or be made on another machine.

The baseline is plain ancestral sampling: vsF is a row's perplexity over the lowest that the teacher
so reaches at the same NFE and entropy, below 1 a gain. Some students sample in streams order, which
costs a teacher nothing: all rows stand beside the teacher in that order too. On the oracle language
mistakes raise the entropy, so that vsF punishes repairs: there path KL is the measure to choose by.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from didi_instruct.config.schema import read_yaml
from didi_instruct.errors import UserError
from didi_instruct.evaluation import frontier
from didi_instruct.evaluation.compare import best_by_vsf, compare
from didi_instruct.evaluation.measuring import Measured, Row
from didi_instruct.evaluation.provenance import provenance
from didi_instruct.reproduce.jobs import NO_MODELS, Context
from didi_instruct.reproduce.latency import time_settings
from didi_instruct.reproduce.measure import (
    Rows,
    Setting,
    Terms,
    measure,
    terms_of,
)
from didi_instruct.reproduce.methods import METHODS, PATH_FIRST
from didi_instruct.reproduce.minutes import bank_minutes, learning, training_minutes, training_texts

BASELINE = "MDLM, ancestral"
STREAMS, BESIDE_STREAMS = "MDLM, streams order", "streams_"
"""The second baseline, and how the columns of numbers against it begin."""

METRICS = ("ppl", "entropy", "path-kl", "self-bleu", "unique-4gram")
PLAIN_ALONE = ("mauve",)
"""Measured of plain settings alone, which tables show: k-means of each takes a second."""
TEACHER = "teacher"
PLAIN = (1.0, 1.0)
"""Temperature and top-p."""
ABOVE = 1.1
"""A temperature of the baselines alone, hardly ever a best one: without it their frontiers end
where plain rows lie, so that half of the resamples of one that differs in nothing had no vsF."""
LATE = "-late"
"""Ends the role of a model that stands in for another from some NFE on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """A way to sample one of the models."""

    role: str
    method: str
    sampler: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    own_steps: bool = False
    """True if it takes one step per token; such rows are shown but not ranked by NFE."""
    loose: bool = False
    """True if its path KL is a looser bound than the others', and is not ranked with them."""

    as_fast_as: str = ""
    """Another way that takes as long, whatever the weights are; empty: its own time."""

    @property
    def is_baseline(self) -> bool:
        """True if the other rows are compared with this one."""
        return self.method in (BASELINE, STREAMS)


WAYS = (
    Way(role=TEACHER, method=BASELINE),
    Way(role=TEACHER, method="MDLM, greedy tail", options={"greedy_tail": True}),
    Way(role=TEACHER, method=STREAMS, options={"order": "streams"}),
    Way(role=TEACHER, method="MDLM, confidence order", sampler="confidence"),
    Way(role=TEACHER, method="MDLM, entropy order", sampler="entropy"),
    Way(role=TEACHER, method="MDLM, margin order", sampler="margin"),
    Way(role=TEACHER, method="MDLM, re-masking", sampler="remasking"),
    Way(role=TEACHER, method="MDLM, token by token", sampler="first-hitting", own_steps=True),
    Way(role="ar", method=METHODS["ar"].label, own_steps=True),
    Way(role="sdtt", method=METHODS["sdtt"].label, as_fast_as=BASELINE),
    Way(role="dimo", method=METHODS["dimo"].label, sampler="dimo", loose=True),
    Way(role="duo-teacher", method="DUO, its teacher"),
    Way(role="duo", method=METHODS["duo"].label),
    Way(role="duo", method="DUO distilled, greedy tail", options={"greedy_tail": True}),
    Way(role="didi", method=METHODS["didi-plain"].label, as_fast_as=BASELINE),
    Way(role="didi", method=METHODS["didi"].label, sampler="rgas"),
    Way(
        role="didi",
        method="DiDi-Instruct, h 10",
        sampler="rgas",
        options={"h_start": 10.0, "h_end": 10.0},
        as_fast_as=METHODS["didi"].label,
    ),
    Way(role="jump", method=METHODS["jump"].label, as_fast_as=BASELINE),
    Way(role="path", method=METHODS["path"].label, as_fast_as=STREAMS),
    Way(role="token-matching", method=METHODS["token-matching"].label, as_fast_as=STREAMS),
)
"""Of each role that has a model."""


def settings_of(
    models: Mapping[str, str],
    steps: Sequence[int],
    *,
    temperatures: Sequence[float] = (),
    top_ps: Sequence[float] = (),
    most_steps: int | None = None,
    late_from: int | None = None,
    few: Sequence[int] = (),
    costly: Sequence[int] = (),
    methods: Collection[str] | None = None,
) -> list[Setting]:
    """All rows of the table, or of some methods; `models` are SOURCEs by role.

    With `most_steps` the baselines are drawn with so many too, for the gap that others close, and
    the first with `costly` NFE, about as many as guidance takes passes. From `late_from` NFE on,
    the model of a role is that of ROLE-late, where there is one. `few` are NFE of what was trained,
    and of the baselines, alone: some learn to take one or two steps.
    """
    if TEACHER not in models:
        raise UserError("The baselines need a teacher, whose sweep all rows are compared with.")
    known = {PATH_FIRST, *(way.role for way in WAYS)}
    unknown = {role.removesuffix(LATE) for role in models} - known
    assert not unknown, f"nothing samples {unknown}"
    found = []
    wanted = [way for way in WAYS if methods is None or way.method in methods]
    for way in (way for way in wanted if way.role in models):
        for nfe in budgets_of(way, steps, most_steps=most_steps, few=few, costly=costly):
            late = late_from is not None and nfe is not None and nfe >= late_from
            role = f"{way.role}{LATE}" if late and f"{way.role}{LATE}" in models else way.role
            source = models[role]
            options = {**way.options, **(_start(source) if way.sampler == "dimo" else {})}
            for temperature, top_p in sweep_of(way, temperatures, top_ps):
                found.append(
                    Setting(
                        method=way.method,
                        source=source,
                        steps=nfe,
                        sampler=way.sampler,
                        options=options,
                        temperature=temperature,
                        top_p=top_p,
                        more={"role": way.role, "own_steps": way.own_steps, "loose": way.loose},
                        without=() if (temperature, top_p) == PLAIN else PLAIN_ALONE,
                    )
                )
    return found


def sweep_of(
    way: Way, temperatures: Sequence[float], top_ps: Sequence[float]
) -> list[frontier.Setting]:
    """Temperatures and top-p that a model is sampled with in one way, the plain setting first.

    The teacher token by token, which no budget compares with, is plain alone: its sweep would take
    as long as all else.
    """
    if way.own_steps and way.role == TEACHER:
        return frontier.sweep((), ())
    above = (ABOVE,) if temperatures and way.is_baseline else ()
    return frontier.sweep((*temperatures, *above), top_ps)


def budgets_of(
    way: Way,
    steps: Sequence[int],
    *,
    most_steps: int | None,
    few: Sequence[int],
    costly: Sequence[int],
) -> list[int | None]:
    """NFE that a model is sampled with in one way; None: a step per token."""
    if way.own_steps:
        return [None]
    found = [*(few if way.role != TEACHER or way.is_baseline else ()), *steps]
    if way.method == BASELINE:
        found += costly
    if way.is_baseline and most_steps is not None:
        found.append(most_steps)
    return list(dict.fromkeys(found))


def way_rows(
    method: str, models: Mapping[str, str], steps: Sequence[int], terms: Terms, **sweep: Any
) -> list[Row]:
    """A row for every setting of one way to sample, with its costs and the numbers of each sample.

    `models` are the teacher, whose tokens all have, the model that is sampled, and those that its
    training began with; `sweep` is for `settings_of`. `training_minutes` are those of the run's own
    steps, `chain_minutes` also those of a bank and of a teacher of its own; null for a model that
    was not trained here.
    """
    settings = settings_of(models, steps, methods=[method], **sweep)
    found = measure(settings, terms, beside=[models[TEACHER]])
    costs = {source: _costs(role, models) for role, source in models.items()}
    return [
        with_values(row, measured.values) | costs[setting.source]
        for row, measured, setting in zip(found.rows, found.measured, settings, strict=True)
    ]


def began_as(role: str, models: Mapping[str, Any]) -> str | None:
    """Role of the model that one began its training with, where that is not the teacher of all."""
    starts = METHODS[role.removesuffix(LATE)].starts_from
    return next((start for start in starts if start in models), None)


def _costs(role: str, models: Mapping[str, str]) -> Row:
    """Texts, minutes (of its steps; of all that came before too) and updates of a training."""
    folder = Path(models[role])
    minutes, bank = training_minutes(folder), bank_minutes(folder)
    before = began_as(role, models)
    earlier = training_minutes(Path(models[before])) if before else 0.0
    chain = [minutes, bank, earlier]
    known = [part for part in chain if part is not None]
    return {
        "training_texts": training_texts(folder),
        "training_minutes": minutes,
        "bank_minutes": bank,
        "chain_minutes": sum(known) if len(known) == len(chain) else None,
        **learning(folder),
    }


def _start(source: str) -> dict[str, float]:
    """Initialisation options of a DiMO student, read from the recipe of its run."""
    recipe = Path(source) / "recipe.yaml"
    if not recipe.is_file():
        return {}
    settings = read_yaml(recipe).get("dimo") or {}
    return {name: settings[name] for name in ("random", "noise") if name in settings}


VALUES = "values"
"""Of each sample, in a row that waits for the others."""


def with_values(row: Row, values: Mapping[str, NDArray[np.float64]]) -> Row:
    """The row with the numbers of its samples, as JSON holds them: null is infinite."""
    numbers = {
        name: [v if np.isfinite(v) else None for v in each.tolist()]
        for name, each in values.items()
    }
    return row | {VALUES: numbers}


def compared(rows: Sequence[Row], most_steps: int | None = None) -> list[Row]:
    """Rows of one seed with their places on both baselines' frontiers, and without `values`.

    `length_spread` says how much the lengths of texts vary.
    Numbers against the teacher in streams order begin with `streams_`; there are none where that
    was lost. A row without perplexity, of a judge of its own samples, has none of these.
    """
    measured = [_measured(row) for row in rows]
    baseline = [m for m in measured if m.row["method"] == BASELINE]
    if not baseline:
        raise ValueError(f"{BASELINE} is missing, with which all are compared")
    seed = rows[0]["bootstrap_seed"]
    found = compare(measured, baseline, most_steps, seed)
    beside = _beside_streams(measured, most_steps, seed)
    best = best_by_vsf(measured, baseline, seed)
    return [
        row
        | (other | chosen if row["ppl"] is not None else {})
        | {"is_baseline": row["method"] == BASELINE, "length_spread": _spread(each)}
        for row, other, chosen, each in zip(found, beside, best, measured, strict=True)
    ]


def _spread(measured: Measured) -> float | None:
    """Standard deviation of the lengths of texts, in tokens of the judge; None without two."""
    lengths = measured.values.get("tokens", np.empty(0))
    return float(lengths.std(ddof=1)) if len(lengths) > 1 else None


def _measured(row: Row) -> Measured:
    values = {
        name: np.array([np.inf if v is None else v for v in each], dtype=np.float64)
        for name, each in row[VALUES].items()
    }
    return Measured({name: value for name, value in row.items() if name != VALUES}, values)


def _beside_streams(rows: Sequence[Measured], most_steps: int | None, seed: int) -> list[Row]:
    """Columns that compare every row with the teacher in streams order."""
    rivals = [m for m in rows if m.row["method"] == STREAMS]
    if not rivals:
        return [{} for _ in rows]
    names = ("vsf", "path_kl_vs_baseline", "gap_closed", "gap_closed_best")
    return [
        {
            f"{BESIDE_STREAMS}{name}": value
            for name, value in row.items()
            if name.startswith(names) and not name.startswith("vsf_passes")
        }
        for row in compare(rows, rivals, most_steps, seed)
    ]


SWEEP = ("most_steps", "late_from", "few", "costly", "temperatures", "top_ps")
"""Options of `settings_of` in a job, beside the budgets."""


def way(context: Context, *, method: str, steps: Sequence[int], **asked: Any) -> Rows:
    """One way to sample one model, over temperature and top-p, with the numbers of each sample."""
    sweep = {name: asked.pop(name) for name in SWEEP}
    models = {role: source for role, source in context.inputs.items() if role not in NO_MODELS}
    return way_rows(method, models, steps, terms_of(context, **asked), **sweep)


def speeds(
    context: Context, *, methods: Sequence[str], steps: Sequence[int], until_eot: bool, **more: Any
) -> Rows:
    """Tokens per second of plain settings, in turns: temperature and top-p do not change them."""
    settings = settings_of(context.inputs, steps, methods=methods, **more)
    rows = time_settings(settings, rounds=3, device=context.device, until_eot=until_eot)
    known = provenance()
    told = ("method", "steps", "tokens_per_second", "tokens_per_second_note")
    machine = {"machine": known.get("GPU", known["CPU"])}
    return [{name: row.get(name) for name in told} | machine for row in rows]
