"""The experiment `baselines`: samplers, rivals and students of one teacher on equal terms."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from didi_instruct.data.files import write_atomic
from didi_instruct.evaluation.measuring import Row
from didi_instruct.evaluation.report.figures import as_png
from didi_instruct.reproduce.baseline_rows import (
    ABOVE,
    BASELINE,
    LATE,
    METRICS,
    PLAIN,
    TEACHER,
    WAYS,
    Way,
    began_as,
    compared,
)
from didi_instruct.reproduce.baselines_figure import draw_baselines
from didi_instruct.reproduce.findings import (
    at_the_edge,
    gains,
    less_varied,
    of_like_lengths,
    of_other_lengths,
    summary,
    winners,
    without_vsf,
)
from didi_instruct.reproduce.generation import MAUVE, SELF_BLEU, about_mauve
from didi_instruct.reproduce.jobs import Job
from didi_instruct.reproduce.latency import untimed
from didi_instruct.reproduce.lines import Answers, Experiment, Line, learnt
from didi_instruct.reproduce.methods import ALL_TRICKS, PATH_FIRST, RIVALS
from didi_instruct.reproduce.scale import Scale
from didi_instruct.reproduce.tables import ENTROPY, PASSES, PATH_KL, PPL, Shown, Table

TIMED = "timed"
"""Group of the lines that are timed."""
SPEED = ("tokens_per_second", "tokens_per_second_note", "machine")
TRAINED = (*RIVALS, PATH_FIRST)
"""Rivals, and the student whose training time alone is part of the table."""
SHOWN = (
    PASSES,
    PPL,
    ENTROPY,
    Shown("mean_length", "tokens a text", ".0f"),
    Shown("vsf", "vsF", ".3f"),
    Shown("vsf_best", "vsF, best setting", ".3f"),
    Shown("vsf_passes", "vsF, equal passes", ".3f"),
    Shown("streams_vsf", "vsF, teacher in streams", ".3f"),
    PATH_KL,
    Shown("path_kl_best", "path KL, best setting", ".2f"),
    Shown("gap_closed_best", "gap closed, best setting", ".0%"),
    Shown("streams_gap_closed_best", "gap closed, teacher in streams", ".0%"),
    SELF_BLEU,
    MAUVE,
    Shown("training_texts", "training texts", ",.0f"),
    Shown("chain_minutes", "training minutes", ".3g"),
    Shown("tokens_per_second", "tokens/s", ",.0f"),
)
BRIEF = ("passes", "ppl", "entropy", "vsf", "vsf_best", "path_kl_best", "gap_closed_best")
"""Columns that fit on a terminal."""


def _lines(scale: Scale) -> Iterator[Line]:
    models = {seed: _models(scale, seed) for seed in scale.seeds}
    for seed in scale.seeds:
        for way in _ways(scale):
            yield Line(_way_job(scale, way, seed, models[seed]))
    for job in _speed_jobs(scale, models[scale.seeds[0]]):
        yield Line(job, group=TIMED)


def _ways(scale: Scale) -> list[Way]:
    return [way for way in WAYS if scale.has(way.role)]


def _models(scale: Scale, seed: int) -> dict[str, Job | str]:
    """All models by role, whose trainings are timed."""
    students = {"didi": scale.rival(ALL_TRICKS, seed)}
    late = [nfe for nfe in scale.budgets if scale.late_from and nfe >= scale.late_from]
    if late:
        students[f"didi{LATE}"] = scale.rival(ALL_TRICKS, seed, late[0])
    students |= {role: scale.model(role, seed) for role in TRAINED if scale.has(role)}
    timed = {role: replace(job, timed=True) for role, job in students.items()}
    return {TEACHER: scale.teacher, **timed}


def _way_job(scale: Scale, way: Way, seed: int, models: Mapping[str, Job | str]) -> Job:
    named = (TEACHER, way.role, f"{way.role}{LATE}", began_as(way.role, models))
    inputs = {role: models[role] for role in named if role and role in models}
    inputs["judge"] = scale.judge
    metrics = list(METRICS)
    if scale.measures_mauve and scale.data is not None:
        inputs["reference"] = scale.data
        metrics.append("mauve")
    return Job(
        name=f"baselines-{_slug(way.method)}-seed{seed}",
        does="way",
        inputs=inputs,
        options={
            "method": way.method,
            **_budgets(scale),
            "temperatures": list(scale.temperatures),
            "top_ps": list(scale.top_ps),
            "metrics": metrics,
            **scale.drawing(seed),
        },
    )


def _speed_jobs(scale: Scale, models: Mapping[str, Job | str]) -> list[Job]:
    """One for each model that has a time of its own, of the first seed: others are as fast."""
    methods: dict[str, list[str]] = {}
    for way in _ways(scale):
        if not way.as_fast_as:
            methods.setdefault(way.role, []).append(way.method)
    return [
        Job(
            name=f"speed-{role}",
            does="speeds",
            timed=True,
            inputs={
                name: models[name] for name in (TEACHER, role, f"{role}{LATE}") if name in models
            },
            options={
                "methods": timed,
                **_budgets(scale),
                "costly": [],  # drawn to compare passes alone
                "until_eot": scale.until_eot,
            },
        )
        for role, timed in methods.items()
    ]


def _budgets(scale: Scale) -> dict[str, Any]:
    return {
        "steps": list(scale.budgets),
        "most_steps": scale.most_steps,
        "late_from": scale.late_from,
        "few": list(scale.few),
        "costly": list(scale.costly),
    }


def _slug(method: str) -> str:
    return re.sub("[^a-z0-9]+", "-", method.lower()).strip("-")


def _sweep(scale: Scale, answers: Answers) -> list[Row]:
    """Rows of all seeds, each compared within its seed, with the speeds of the first."""
    timed = {(row["method"], row["steps"]): row for row in answers.rows(TIMED)}
    by_seed: dict[int, list[Row]] = {}
    for row in answers.rows():
        by_seed.setdefault(row["seed"], []).append(row)
    seeds = list(by_seed.values())
    # A seed that has lost its baseline is left out; where all have, the comparison says so.
    whole = [rows for rows in seeds if any(row["method"] == BASELINE for row in rows)] or seeds
    sweep = [row for rows in whole for row in compared(rows, scale.most_steps)]
    return [row | _speed(row, timed) for row in sweep]


def _speed(row: Row, timed: Mapping[tuple[str, int | None], Row]) -> Row:
    plain = (row["temperature"], row["top_p"]) == PLAIN
    (way,) = [way for way in WAYS if way.method == row["method"]]
    steps = None if way.own_steps else row["nfe"]
    found = timed.get((way.as_fast_as or way.method, steps), {}) if plain else {}
    return {name: found.get(name) for name in SPEED}


def _table(scale: Scale, answers: Answers) -> Table:
    sweep = _sweep(scale, answers)
    rows = summary(sweep)
    shown = SHOWN if scale.measures_mauve else tuple(s for s in SHOWN if s != MAUVE)
    return Table(
        title="Rivals on equal terms",
        rows=sorted(rows, key=lambda row: row["nfe"]),
        labels=("nfe", "method"),
        across=None,
        shown=shown,
        brief=tuple(one for one in SHOWN if one.column in BRIEF),
        sweep=sweep,
        notes=[
            *learnt(rows),
            *winners(sweep),
            *at_the_edge(sweep),
            *less_varied(sweep),
            *(gains(sweep) if scale.judge != "oracle" else [PUNISHES]),
            *without_vsf(sweep),
            *of_other_lengths(sweep),
            *of_like_lengths(sweep),
            *_reading(scale),
            *untimed(rows),
            *about_mauve(scale),
            *_absent(scale),
        ],
    )


PUNISHES = (
    "On the oracle language mistakes raise the entropy of words, so that vsF punishes repairs: "
    "choose by path KL here."
)


def _reading(scale: Scale) -> list[str]:
    """Notes on the columns."""
    count = 1 + len(scale.temperatures) + len(scale.top_ps)
    return [
        "vsF is perplexity over the lowest that the teacher's ancestral sampler reaches at the "
        "same NFE and the same entropy, with temperature or top-p; below 1 is a gain. It is that "
        f"of the plain setting. Its best setting is the one of {count} that half of the samples "
        "choose, and is told of the other half. Equal passes: against its sweeps of nearly as many "
        "forward passes, which guidance and rewriting cost more of.",
        f"Path KL at its best setting is the lowest of {count}, the same for all, on the samples "
        "that choose it: its interval allows for that. Which it is: `path_kl_best_at` in the JSON. "
        f"(The baselines have temperature {ABOVE} too, so that their frontiers go on above plain "
        "rows; the teacher token by token is plain alone.)",
        f"Gap closed is the share of what few steps cost the teacher, beside {scale.most_steps}; "
        "its interval chooses anew in each resample.",
        "Some students sample in streams order (`stories-path` and what follows from it), "
        "which a teacher can do as well: the columns on streams set rows against the teacher "
        "in that order. The stricter of both baselines counts. In random order path KL holds "
        "what a text tells of its order beside the divergence, in streams it does not: shares "
        "of a gap across orders flatter streams, and orders are ranked apart.",
        "Unigram entropy is a weak control: a gain counts where path KL confirms it. Samplers "
        "that choose positions by confidence, rewrite tokens or are guided have no path KL; "
        "neither have uniform-state models (DUO): of these, vsF, Self-BLEU and MAUVE are all "
        "there is. That of DiMO, whose noise is part of a path, is a looser bound: not ranked.",
        "Intervals in the sentences above are over samples, of all seeds together; of so many rows "
        "some stand out by chance.",
        "Training minutes are wall-clock time here, without what compiles at first, of the whole "
        "chain after the teacher that all share (whose own rows show its pretraining, if that was "
        "here): steps, the bank of the teacher's texts that a student reads (drawn once for all; "
        "`bank_minutes` in the CSV; --minutes are of steps alone), DUO's own teacher, token "
        "matching's first student. None where runs shared a GPU. Texts are those of the last "
        "training. DUO's teacher learns without its curriculum, and for fewer steps than the "
        "masked one at scale small. SDTT, DUO and likelihood along streams read training text, "
        "the others what teacher and student write.",
        "Steps below the budgets of a scale are taken by what was trained and by both baselines "
        "alone; a student may never have learnt to take so few, or so many.",
        "Tokens/s are those of batches of 16 plain texts, without what follows their end; on a "
        "GPU models are accelerated (`--fast`). Networks of one shape that are sampled in the "
        "same way share one timing; all are of the first seed.",
    ]


def _absent(scale: Scale) -> list[str]:
    """Models that are not in the table."""
    lacking = [role for role in RIVALS if not (scale.has(role) or role in scale.left_out)]
    told = [f"Not at this scale: {', '.join(lacking)}."] if lacking else []
    if scale.left_out:
        told.append(f"Left out by --rivals: {', '.join(scale.left_out)}.")
    return told


def _draw(scale: Scale, table: Table, path: Path) -> None:
    """Draw the first seed that has a result: lines of several would lie on each other."""
    first = table.sweep[0]["seed"]
    rows = [row for row in table.sweep if row["seed"] == first]
    title = f"{scale.name} scale, seed {first}, judge: {scale.judge_name}"
    write_atomic(path, as_png(draw_baselines(rows, title)))


BASELINE_ITEMS = (
    Experiment(
        name="baselines",
        title="Rivals on equal terms: SDTT, DiMO, DUO, AR, and the teacher's own samplers",
        where="",
        lines=_lines,
        table=_table,
        draw=_draw,
        packages=("mauve",),
        equal_minutes=True,
        chooses_rivals=True,
        timed_training=True,
    ),
)
