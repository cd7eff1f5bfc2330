"""The item `baselines`: samplers, rivals and students of one teacher on equal terms."""

from dataclasses import replace
from pathlib import Path

from didi_instruct.data.files import write_atomic
from didi_instruct.evaluation.provenance import provenance
from didi_instruct.evaluation.report.drawing import as_png
from didi_instruct.reproduce.asking import ALL_TRICKS, learnt
from didi_instruct.reproduce.baselines import (
    BEYOND,
    LATE,
    METRICS,
    gains,
    summary,
    winners,
    without_vsf,
)
from didi_instruct.reproduce.baselines_figure import draw_baselines
from didi_instruct.reproduce.calls import HERE
from didi_instruct.reproduce.items import Item, Results
from didi_instruct.reproduce.items_measures import MAUVE, SELF_BLEU, without_mauve
from didi_instruct.reproduce.jobs import Job, spread
from didi_instruct.reproduce.latency import untimed
from didi_instruct.reproduce.scale import FIRST, Scale
from didi_instruct.reproduce.tables import ENTROPY, PASSES, PATH_KL, PPL, Shown, Table

ROLES = ("ar", "sdtt", "dimo", "duo-teacher", "duo", "jump", "path", "token-matching")
"""Models beside teacher and student, where a scale has them."""
TIMED = (*ROLES, FIRST)
"""Those, and who is asked for the minutes of its training alone."""
SHOWN = (
    PASSES,
    PPL,
    ENTROPY,
    Shown("vsf", "vsF", ".3f"),
    Shown("vsf_passes", "vsF, equal passes", ".3f"),
    Shown("streams_vsf", "vsF, teacher in streams", ".3f"),
    PATH_KL,
    Shown("lowest_path_kl", "path KL, best setting", ".2f"),
    Shown("gap_closed_best", "gap closed, best setting", ".0%"),
    Shown("streams_gap_closed_best", "gap closed, teacher in streams", ".0%"),
    SELF_BLEU,
    MAUVE,
    Shown("training_texts", "training texts", ",.0f"),
    Shown("chain_minutes", "training minutes", ".3g"),
    Shown("tokens_per_second", "tokens/s", ",.0f"),
)
BRIEF = ("passes", "ppl", "entropy", "vsf", "vsf_passes", "lowest_path_kl", "gap_closed_best")
"""What fits on a terminal."""


def _job(scale: Scale, seed: int) -> Job:
    known = provenance()
    students = {"didi": scale.ablated(ALL_TRICKS, seed)}
    late = [nfe for nfe in scale.budgets if scale.late_from and nfe >= scale.late_from]
    if late:
        students[f"didi{LATE}"] = scale.ablated(ALL_TRICKS, seed, late[0])
    students |= {role: scale.model(role, seed) for role in TIMED if scale.has(role)}
    inputs: dict[str, Job | str] = {
        "teacher": scale.teacher,
        **{role: replace(job, timed=True) for role, job in students.items()},
        "judge": scale.judge,
    }
    metrics = list(METRICS)
    if scale.measures_mauve and scale.data is not None:
        inputs["reference"] = scale.data
        metrics.append("mauve")
    job = Job(
        name=f"baselines-seed{seed}",
        does=f"{HERE}:baselines",
        timed=True,
        inputs=inputs,
        options={
            "steps": list(scale.budgets),
            "most_steps": scale.most_steps,
            "late_from": scale.late_from,
            "few": list(scale.few),
            "temperatures": list(scale.temperatures),
            "top_ps": list(scale.top_ps),
            "metrics": metrics,
            "machine": known.get("GPU", known["CPU"]),
            "fast": True,
            **scale.drawing(seed),
        },
    )
    return spread(job, scale.parts)


def _table(scale: Scale, results: Results) -> Table:
    found = [results[job.key] for job in _jobs(scale) if job.key in results]
    sweep = [row for one in found for row in one]
    rows = summary(sweep)
    count = 1 + len(scale.temperatures) + len(scale.top_ps)
    absent = [role for role in ROLES if not (scale.has(role) or role in scale.left_out)]
    beyond = [heat for heat in BEYOND if heat not in scale.temperatures]
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
            *gains(sweep),
            *without_vsf(sweep),
            "vsF is perplexity over the lowest that the teacher's ancestral sampler reaches at the "
            "same NFE and the same entropy, with temperature or top-p; below 1 is a gain. Equal "
            "passes: against its sweeps of as many forward passes, which guidance and rewriting "
            "cost more of. It is that of the plain setting, nothing is chosen.",
            f"Best settings are the lowest of {count}, chosen on the samples they are reported on, "
            "everyone's alike: a minimum flatters (the baselines have more, temperatures of "
            f"{', '.join(map(str, beyond))}, so that their frontiers reach beyond plain rows).",
            f"Gap closed is the share of what few steps cost the teacher, beside "
            f"{scale.most_steps}; its interval chooses anew in each resample.",
            "Some students sample in streams order (`stories-path` and what follows from it), "
            "which a teacher can do as well: the columns on streams set rows against the teacher "
            "in that order. The stricter of both baselines counts. In random order path KL holds "
            "what a text tells of its order beside the divergence, in streams it does not: shares "
            "of a gap across orders flatter streams.",
            "Unigram entropy is a weak control: a gain counts where path KL confirms it. Samplers "
            "that choose positions by confidence, rewrite tokens or are guided have no path KL; "
            "neither have uniform-state models (DUO): of these, vsF, Self-BLEU and MAUVE are all "
            "there is. That of DiMO, whose noise is part of a path, is a looser bound: not ranked.",
            "Training minutes are wall-clock time on this machine of the whole chain after the "
            "teacher that all share: steps, the bank of the teacher's texts that a student reads "
            "(drawn once for all; `bank_minutes` in the CSV; --minutes are of steps alone), DUO's "
            "own teacher, token matching's first student. Texts are those of the last training.",
            "Tokens/s are those of batches of 16 plain texts, without what follows their end; on a "
            "GPU models are accelerated (`--fast`). Networks of one shape that are sampled in the "
            "same way share one timing.",
            *untimed(rows),
            *without_mauve(scale),
            *([f"Not at this scale: {', '.join(absent)}."] if absent else []),
            *([f"Left out by --rivals: {', '.join(scale.left_out)}."] if scale.left_out else []),
        ],
    )


def _draw(scale: Scale, table: Table, results: Results, path: Path) -> None:
    """Of the first seed that has a result: lines of several would lie on each other."""
    rows = next(results[job.key] for job in _jobs(scale) if job.key in results)
    title = f"{scale.name} scale, seed {rows[0]['seed']}, judge: {scale.judge_name}"
    write_atomic(path, as_png(draw_baselines(rows, title)))


def _jobs(scale: Scale) -> list[Job]:
    return [_job(scale, seed) for seed in scale.seeds]


BASELINE_ITEMS = (
    Item(
        name="baselines",
        title="Rivals on equal terms: SDTT, DiMO, DUO, AR, and the teacher's own samplers",
        where="",
        jobs=_jobs,
        table=_table,
        figure=_draw,
    ),
)
