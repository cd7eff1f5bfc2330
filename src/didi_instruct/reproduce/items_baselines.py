"""The item `baselines`: samplers, rivals and students of one teacher on equal terms."""

from collections.abc import Sequence
from pathlib import Path

from didi_instruct.data.files import write_atomic
from didi_instruct.evaluation.provenance import provenance
from didi_instruct.evaluation.report.drawing import as_png
from didi_instruct.reproduce.asking import ALL_TRICKS
from didi_instruct.reproduce.baselines import METRICS, summary, winners
from didi_instruct.reproduce.baselines_figure import draw_baselines
from didi_instruct.reproduce.calls import HERE
from didi_instruct.reproduce.items import Item, Results
from didi_instruct.reproduce.items_measures import MAUVE, SELF_BLEU
from didi_instruct.reproduce.jobs import Job
from didi_instruct.reproduce.scale import Scale
from didi_instruct.reproduce.tables import ENTROPY, PATH_KL, PPL, Row, Shown, Table

ROLES = ("ar", "sdtt", "dimo", "duo-teacher", "duo", "jump", "path", "token-matching")
"""Models beside teacher and student, where a scale has them."""
SHOWN = (
    PPL,
    ENTROPY,
    Shown("best_vsf", "vsF, best setting", ".3f"),
    PATH_KL,
    Shown("lowest_path_kl", "path KL, best setting", ".2f"),
    SELF_BLEU,
    MAUVE,
    Shown("training_minutes", "training minutes", ".3g"),
    Shown("tokens_per_second", "tokens/s", ",.0f"),
)


def _job(scale: Scale, seed: int) -> Job:
    known = provenance()
    inputs: dict[str, Job | str] = {
        "teacher": scale.teacher,
        "didi": scale.ablated(ALL_TRICKS, seed),
        "judge": scale.judge,
    }
    inputs |= {role: scale.model(role, seed) for role in ROLES if scale.has(role)}
    metrics = list(METRICS)
    if scale.causal_judge and scale.data is not None:
        inputs["reference"] = scale.data
        metrics.append("mauve")
    return Job(
        name=f"baselines-seed{seed}",
        does=f"{HERE}:baselines",
        inputs=inputs,
        options={
            "steps": list(scale.budgets),
            "most_steps": scale.most_steps,
            "temperatures": list(scale.temperatures),
            "top_ps": list(scale.top_ps),
            "metrics": metrics,
            "machine": known.get("GPU", known["CPU"]),
            **scale.drawing(seed),
        },
    )


def _table(scale: Scale, results: Results) -> Table:
    found = [results[job.key] for job in _jobs(scale) if job.key in results]
    rows = [row | {"lowest_path_kl": _lowest(one, row)} for one in found for row in summary(one)]
    absent = [role for role in ROLES if not scale.has(role)]
    shown = SHOWN if scale.causal_judge else tuple(s for s in SHOWN if s != MAUVE)
    return Table(
        title="Rivals on equal terms",
        rows=sorted(rows, key=lambda row: row["nfe"]),
        labels=("nfe", "method"),
        across=None,
        shown=shown,
        notes=[
            *(line for one in found[:1] for line in winners(one)),
            "vsF is perplexity over the lowest that the teacher's ancestral sampler reaches at the "
            "same NFE and the same entropy, with temperature or top-p; below 1 is a gain. Best "
            "settings are chosen on the samples they are reported on, everyone's alike.",
            "Unigram entropy is a weak control: a gain counts where path KL confirms it. Samplers "
            "that choose positions by confidence, rewrite tokens or are guided have no path KL.",
            "Training minutes are wall-clock time of the steps on this machine; a student's do not "
            "hold its teacher's.",
            *([f"Not at this scale: {', '.join(absent)}."] if absent else []),
        ],
    )


def _draw(scale: Scale, table: Table, results: Results, path: Path) -> None:
    """Of the first seed that has a result: lines of several would lie on each other."""
    rows = next(results[job.key] for job in _jobs(scale) if job.key in results)
    title = f"{scale.name} scale, seed {rows[0]['seed']}, judge: {scale.judge_name}"
    write_atomic(path, as_png(draw_baselines(rows, title)))


def _lowest(rows: Sequence[Row], row: Row) -> float | None:
    """Path KL of a method at its best temperature and top-p."""
    kin = [r for r in rows if (r["method"], r["nfe"]) == (row["method"], row["nfe"])]
    return min((r["path_kl"] for r in kin if r["path_kl"] is not None), default=None)


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
