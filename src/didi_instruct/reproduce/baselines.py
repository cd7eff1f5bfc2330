"""Rivals on equal terms: what a user would try before training anything, and what others distil.

Every way of sampling is measured at the same NFE, plain and over the same temperatures and top-p,
so that none is reported at its worst setting alone. The baseline is plain ancestral sampling:
vsF is a row's perplexity over the lowest that the teacher so reaches at the same NFE and the
same entropy, below 1 a gain. On the oracle language mistakes raise the entropy, so that vsF
punishes repairs: there path KL is the measure to choose by.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

from didi_instruct.config.parse import read_yaml
from didi_instruct.errors import UserError
from didi_instruct.evaluation.frontier import sweep
from didi_instruct.evaluation.rows import Row
from didi_instruct.reproduce.equal_terms import Setting, Terms, measure
from didi_instruct.reproduce.latency import time_settings
from didi_instruct.reproduce.minutes import training_minutes

METRICS = ("ppl", "entropy", "path-kl", "self-bleu", "unique-4gram")
NAMES = {"vsf": "vsF", "path_kl": "path KL"}
TEACHER = "teacher"
PLAIN = (1.0, 1.0)
"""Temperature and top-p."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """A way to sample one of the models."""

    role: str
    method: str
    sampler: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    own_steps: bool = False
    """Whether it takes a step per token: it then stands beside the others, not on equal terms."""


WAYS = (
    Way(role=TEACHER, method="MDLM, ancestral"),
    Way(role=TEACHER, method="MDLM, greedy tail", options={"greedy_tail": True}),
    Way(role=TEACHER, method="MDLM, streams order", options={"order": "streams"}),
    Way(role=TEACHER, method="MDLM, confidence order", sampler="confidence"),
    Way(role=TEACHER, method="MDLM, entropy order", sampler="entropy"),
    Way(role=TEACHER, method="MDLM, margin order", sampler="margin"),
    Way(role=TEACHER, method="MDLM, re-masking", sampler="remasking"),
    Way(role=TEACHER, method="MDLM, token by token", sampler="first-hitting", own_steps=True),
    Way(role="ar", method="AR, the same trunk", own_steps=True),
    Way(role="sdtt", method="SDTT"),
    Way(role="dimo", method="DiMO", sampler="dimo"),
    Way(role="duo-teacher", method="DUO, its teacher"),
    Way(role="duo", method="DUO distilled"),
    Way(role="duo", method="DUO distilled, greedy tail", options={"greedy_tail": True}),
    Way(role="didi", method="DiDi-Instruct, unguided"),
    Way(role="didi", method="DiDi-Instruct", sampler="rgas"),
    Way(role="jump", method="DiDi-Instruct, jump variant (ours)"),
    Way(role="path", method="likelihood along streams (ours)"),
    Way(role="token-matching", method="token matching (ours)"),
)
"""Of each role that has a model; the first is the baseline."""


def settings_of(
    models: Mapping[str, str],
    steps: Sequence[int],
    *,
    temperatures: Sequence[float] = (),
    top_ps: Sequence[float] = (),
    most_steps: int | None = None,
    ways: Sequence[Way] = WAYS,
) -> list[Setting]:
    """All rows of the table; `models` are SOURCEs by role.

    With `most_steps` the baseline is drawn with so many too, for the gap that others close.
    """
    if TEACHER not in models:
        raise UserError("The baselines need a teacher, whose sweep all rows are compared with.")
    unknown = set(models) - {way.role for way in ways}
    assert not unknown, f"nothing samples {unknown}"
    found = []
    for way in (way for way in ways if way.role in models):
        source = models[way.role]
        options = {**way.options, **(_start(source) if way.sampler == "dimo" else {})}
        budgets: list[int | None] = [None] if way.own_steps else [*steps]
        if way is ways[0] and most_steps is not None and most_steps not in steps:
            budgets.append(most_steps)
        for nfe in budgets:
            for temperature, top_p in sweep(temperatures, top_ps):
                found.append(
                    Setting(
                        method=way.method,
                        source=source,
                        steps=nfe,
                        sampler=way.sampler,
                        options=options,
                        temperature=temperature,
                        top_p=top_p,
                        more={"role": way.role, "own_steps": way.own_steps},
                    )
                )
    return found


def baseline_rows(
    models: Mapping[str, str],
    steps: Sequence[int],
    terms: Terms,
    *,
    temperatures: Sequence[float] = (0.8, 0.9),
    top_ps: Sequence[float] = (0.9, 0.95),
    most_steps: int | None = None,
    timing_batch: int = 16,
    timing_rounds: int = 3,
) -> list[Row]:
    """Every setting's row, with its place on the baseline's frontier, minutes and tokens/s.

    `training_minutes` are those of the run's own steps, null for a model that was not trained here.
    Speed is timed of plain settings alone, since temperature and top-p do not change it.
    """
    settings = settings_of(
        models, steps, temperatures=temperatures, top_ps=top_ps, most_steps=most_steps
    )
    found = measure(settings, terms)
    first = WAYS[0].method
    baseline = [number for number, s in enumerate(settings) if s.method == first]
    rows = found.compared(baseline, most_steps)
    plain = [number for number, s in enumerate(settings) if _plain(s)]
    rates = time_settings(
        [settings[number] for number in plain],
        batch=timing_batch,
        rounds=timing_rounds,
        length=terms.length,
        device=terms.device,
    )
    timed = dict(zip(plain, rates, strict=True))
    minutes = {role: training_minutes(Path(source)) for role, source in models.items()}
    for number, row in enumerate(rows):
        rate = timed.get(number, {})
        row["tokens_per_second"] = rate.get("tokens_per_second")
        row["training_minutes"] = minutes[row["role"]]
        row["is_baseline"] = number in baseline
    return rows


def summary(rows: Sequence[Row], by: Sequence[str] = ("vsf", "path_kl")) -> list[Row]:
    """One row for each method and NFE: plain, with the best setting of its sweep beside it.

    The best is lowest in the first of `by` that any row of the sweep has: `best_at` (temperature
    and top-p) with `best_ppl`, `best_entropy`, `best_vsf` and `best_path_kl`. It is chosen on the
    samples it is reported on, the baseline's as everyone's: differences within the intervals mean
    nothing.
    """
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["method"], row["nfe"]), []).append(row)
    return [_summary(group, by) for group in groups.values()]


def _summary(group: Sequence[Row], by: Sequence[str]) -> Row:
    plain = next(row for row in group if (row["temperature"], row["top_p"]) == PLAIN)
    best = plain
    for column in by:
        known = [row for row in group if row.get(column) is not None]
        if known:
            best = min(known, key=itemgetter(column))
            break
    beside = {f"best_{name}": best.get(name) for name in ("ppl", "entropy", "vsf", "path_kl")}
    return plain | {"best_at": [best["temperature"], best["top_p"]], **beside}


def winners(rows: Sequence[Row], measures: Sequence[str] = ("path_kl", "vsf")) -> list[str]:
    """Which methods are lowest at which NFE, each at its best setting, in words.

    Those without the number have no part in it, nor have those of a step per token, which share no
    budget with the others.
    """
    told = []
    for by in measures:
        found = [row for row in summary(rows, (by,)) if row[f"best_{by}"] is not None]
        found = [row for row in found if not row["own_steps"]]
        for nfe in sorted({row["nfe"] for row in found}):
            ranked = sorted((r for r in found if r["nfe"] == nfe), key=itemgetter(f"best_{by}"))
            words = "; ".join(f"{r['method']} {r[f'best_{by}']:.2f}" for r in ranked[:3])
            count = f"of {len(ranked)} that have one, each at its best setting"
            if len(ranked) > 1:
                told.append(f"Lowest {NAMES[by]} at {nfe} NFE, {count}: {words}.")
    return told


def _plain(setting: Setting) -> bool:
    return (setting.temperature, setting.top_p) == PLAIN


def _start(source: str) -> dict[str, float]:
    """Where a student of DiMO starts from: what it was distilled with, if its run says so."""
    recipe = Path(source) / "recipe.yaml"
    if not recipe.is_file():
        return {}
    settings = read_yaml(recipe).get("dimo") or {}
    return {name: settings[name] for name in ("random", "noise") if name in settings}
