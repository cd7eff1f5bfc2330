"""Items on RGAS: what h and M do to perplexity and entropy, and which of them matters."""

from pathlib import Path
from typing import Any

from didi_instruct.data.files import write_atomic
from didi_instruct.evaluation.report.figures import as_png
from didi_instruct.reproduce import paper
from didi_instruct.reproduce.asking import ALL_TRICKS
from didi_instruct.reproduce.baselines import LATE
from didi_instruct.reproduce.items import Item, Results
from didi_instruct.reproduce.jobs import Job, spread
from didi_instruct.reproduce.landscape import draw_landscape, sign_control
from didi_instruct.reproduce.scale import Scale
from didi_instruct.reproduce.sensitivity import PARAMETERS, draw_shares
from didi_instruct.reproduce.tables import ENTROPY, PPL, Shown, Table

SHARES = (
    Shown("ppl_share", "share for perplexity", ".1%"),
    Shown("entropy_share", "for entropy", ".1%"),
)


def _guided(scale: Scale, name: str, **options: Any) -> Job:
    """A job on the student of all tricks, of the first seed."""
    seed = scale.seeds[0]
    inputs: dict[str, Job | str] = {
        "model": scale.ablated(ALL_TRICKS, seed),
        "judge": scale.judge,
    }
    late = [nfe for nfe in scale.guided_budgets if scale.late_from and nfe >= scale.late_from]
    if late:
        inputs[f"model{LATE}"] = scale.ablated(ALL_TRICKS, seed, late[0])
        options["late_from"] = scale.late_from
    if scale.guidance:
        options["guidance"] = dict(scale.guidance)
    job = Job(
        name=name,
        does=name.removeprefix("rgas-"),
        inputs=inputs,
        options={
            "steps": list(scale.guided_budgets),
            **scale.drawing(seed, scale.guided_samples),
            **options,
        },
    )
    return spread(job, scale.parts)


def _landscape(scale: Scale) -> Job:
    return _guided(
        scale,
        "rgas-landscape",
        scales=list(scale.scales_h),
        candidates=list(scale.candidates),
    )


def _landscape_table(scale: Scale, results: Results) -> Table:
    found = results.get(_landscape(scale).key, [])
    rows = sorted(found, key=lambda row: (row["h"], row["candidates"]))
    return Table(
        title="RGAS landscape: h and M",
        rows=rows,
        labels=("h", "candidates"),
        shown=(PPL, ENTROPY),
        notes=[
            "h is the tilting scale, the same in all tilting steps; M (candidates) is that of the "
            "re-ranking steps. h = 0 with M = 1 is ancestral sampling.",
            "Guidance costs passes: a tilting step three and more, a re-ranking step one for each "
            "candidate beside the draw (`passes` in the CSV).",
            *sign_control(rows),
            "The control of the sign: if tilting steers towards the teacher, the perplexity of -h "
            "lies above that of h; a verdict is given where their 95% intervals part. Entropy "
            "moves with it: read both.",
            f"The paper draws this at {paper.LANDSCAPE_NFE} NFE with {paper.LANDSCAPE_SAMPLES} "
            "samples a point and prints no number of it.",
        ],
    )


def _draw_landscape(scale: Scale, table: Table, results: Results, path: Path) -> None:
    title = f"{scale.name} scale, seed {scale.seeds[0]}, {scale.guided_samples} samples a cell"
    write_atomic(path, as_png(draw_landscape(table.rows, title)))


def _anova(scale: Scale) -> Job:
    return _guided(
        scale,
        "rgas-anova",
        points=scale.anova_points,
        scales=list(scale.anova_h),
        candidates=list(scale.anova_candidates),
    )


def _anova_table(scale: Scale, results: Results) -> Table:
    found = results.get(_anova(scale).key, {"shares": []})["shares"]
    rows = [row | {"parameter": PARAMETERS[row["parameter"]]} for row in found]
    low, high = scale.anova_h
    return Table(
        title="Functional ANOVA of RGAS: shares of the variance",
        rows=rows,
        labels=("parameter",),
        shown=SHARES,
        over="points of the design",
        paper=[
            {"parameter": PARAMETERS[name], "nfe": nfe, "ppl_share": share}
            for nfe, parts in paper.ANOVA.items()
            for name, share in parts.items()
        ],
        notes=[
            f"A Latin hypercube of {scale.anova_points} points, h from {low:g} to {high:g} and M "
            f"from {scale.anova_candidates[0]} to {scale.anova_candidates[1]} (the paper: "
            f"{paper.ANOVA_POINTS} points, {paper.ANOVA_SCALES[0]:g} to {paper.ANOVA_SCALES[1]:g} "
            f"and {paper.ANOVA_CANDIDATES[0]} to {paper.ANOVA_CANDIDATES[1]}); main effects by "
            "Optuna's fANOVA.",
            "Shares depend on the ranges: a range in which h does little leaves more to M. Few "
            "points and few samples leave much to the last line, which holds the noise.",
            "A large share of the variance of entropy says that the parameter trades entropy for "
            "perplexity, as a temperature would.",
        ],
    )


def _draw_anova(scale: Scale, table: Table, results: Results, path: Path) -> None:
    found = results[_anova(scale).key]["shares"]
    write_atomic(path, as_png(draw_shares(found, paper.ANOVA)))


GUIDANCE_ITEMS = (
    Item(
        name="rgas-landscape",
        title="RGAS landscape: perplexity and entropy over h and M",
        where='Appendix "Sensitivity Analysis of RGAS", figure',
        jobs=lambda scale: [_landscape(scale)],
        table=_landscape_table,
        figure=_draw_landscape,
    ),
    Item(
        name="rgas-anova",
        title="Functional ANOVA of h and M",
        where='Appendix "Sensitivity Analysis of RGAS", table',
        jobs=lambda scale: [_anova(scale)],
        table=_anova_table,
        figure=_draw_anova,
    ),
)
