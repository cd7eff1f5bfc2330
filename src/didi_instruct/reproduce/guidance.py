"""Experiments on RGAS: perplexity, entropy and cost over h and M, and their functional ANOVA.

h is the tilting scale, the same in all tilting steps, M the number of candidates of the re-ranking
steps. h = 0 with M = 1 is ancestral sampling, bit for bit. A negative h is the control of the sign:
if tilting steers towards the teacher, it has to do harm.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from didi_instruct.data.files import write_atomic
from didi_instruct.errors import UserError
from didi_instruct.evaluation.measuring import Row
from didi_instruct.evaluation.report.figures import FONT, INK, SOFT, as_png, new_figure
from didi_instruct.reproduce import paper
from didi_instruct.reproduce.anova import PARAMETERS, Strength, design, draw_shares, shares
from didi_instruct.reproduce.baseline_rows import LATE
from didi_instruct.reproduce.jobs import Context, Job, spread
from didi_instruct.reproduce.lines import Answers, Experiment, Line
from didi_instruct.reproduce.measure import (
    WHOLE,
    Rows,
    Setting,
    Terms,
    measure,
    terms_of,
)
from didi_instruct.reproduce.methods import ALL_TRICKS
from didi_instruct.reproduce.scale import Scale
from didi_instruct.reproduce.tables import ENTROPY, PPL, Shown, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NO_GUIDANCE: Strength = (0.0, 1)
PANELS = {"ppl": "Perplexity", "entropy": "Entropy, nats"}
CELL, LINE, BESIDE, ABOVE, TICKS, FOOT = 46, 26, 60, 28, 22, 58
"""Points: width and height of a cell; beside and above a panel; below it, and below the last."""


def grid(scales: Iterable[float], candidates: Iterable[int]) -> list[Strength]:
    """All pairs, the setting without guidance and -h of every h above 0, named or not.

    The control of the sign needs no candidates: what was not named is drawn with M = 1 alone.
    """
    pairs = [(float(h), m) for h in scales for m in candidates]
    mirrored = [pair for h, _ in pairs if h > 0 for pair in ((h, 1), (-h, 1))]
    return list(dict.fromkeys([NO_GUIDANCE, *pairs, *mirrored]))


def guided_rows(
    source: str,
    strengths: Sequence[Strength],
    steps: Sequence[int],
    terms: Terms,
    guidance: Mapping[str, Any] | None = None,
) -> list[Row]:
    """A row for each budget and strength; `guidance` are further options of RGAS."""
    settings = [
        Setting(
            method=f"h {h:g}, M {m}",
            source=source,
            steps=nfe,
            sampler="rgas",
            options={**(guidance or {}), "h_start": h, "h_end": h, "candidates": m},
            more={"h": h, "candidates": m},
        )
        for nfe in steps
        for h, m in strengths
    ]
    return measure(settings, terms).rows


def sign_control(rows: Sequence[Row]) -> list[str]:
    """Sentences on the sign of h, one for each budget and M: a negative h should do harm."""
    found = {(row["nfe"], row["candidates"], row["h"]): row for row in rows}
    told = []
    for nfe, m, h in sorted(place for place in found if place[2] < 0):
        sides = [found.get((nfe, m, scale)) for scale in (h, 0.0, -h)]
        words = ", ".join(
            f"h = {row['h']:g}: {_number(row['ppl'], '.4g')} / {_number(row['entropy'], '.3f')}"
            for row in sides
            if row is not None
        )
        verdict = _verdict(found[nfe, m, h], found.get((nfe, m, -h)))
        told.append(
            f"The sign of h = {-h:g} at {nfe} NFE and M = {m}: {verdict}. Perplexity / entropy are "
            f"{words}."
        )
    return told


def _verdict(negative: Row, positive: Row | None) -> str:
    """By the 95% intervals of perplexity over samples."""
    against = positive and positive.get("ppl_ci95")
    harm = negative.get("ppl_ci95")
    if not against or not harm:
        return "not known, an interval is missing"
    if harm[0] > against[1]:
        return "holds"
    return "fails" if harm[1] < against[0] else "within noise"


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else f"{value:{form}}"


def draw_landscape(rows: Sequence[Row], title: str = "") -> "Figure":
    """Heat maps of perplexity and entropy over M (across) and h (up), a pair for each budget.

    Values stand in the cells; a frame marks the setting without guidance. The colours are even in
    lightness, so that they mean the same to the colour-blind and in grey.
    """
    if not rows:
        raise UserError("The landscape has no rows to draw.")
    budgets = list(dict.fromkeys(row["nfe"] for row in rows))
    across = sorted({row["candidates"] for row in rows})
    up = sorted({row["h"] for row in rows})
    wide, high = max(CELL * len(across), 170), max(LINE * len(up), 80)
    top = 24 if title else 4
    width = 2 * (BESIDE + wide) + 12
    height = top + len(budgets) * (ABOVE + high + TICKS) + FOOT - TICKS
    figure = new_figure(width, height)
    for line, nfe in enumerate(budgets):
        here = {(row["candidates"], row["h"]): row for row in rows if row["nfe"] == nfe}
        bottom = height - top - ABOVE - high - line * (ABOVE + high + TICKS)
        for place, (column, name) in enumerate(PANELS.items()):
            left = BESIDE + place * (BESIDE + wide)
            axis = figure.add_axes((left / width, bottom / height, wide / width, high / height))
            _heat(axis, [[_value(here.get((m, h)), column) for m in across] for h in up], column)
            axis.set_xticks(range(len(across)), [str(m) for m in across])
            axis.set_yticks(range(len(up)), [f"{h:g}" for h in up])
            axis.set_title(f"{name} at {nfe} NFE", fontsize=FONT, color=INK, loc="left", pad=6)
            axis.set_ylabel("tilting scale h", fontsize=FONT - 1, color=SOFT)
            if line == len(budgets) - 1:
                axis.set_xlabel("candidates M", fontsize=FONT - 1, color=SOFT)
            if NO_GUIDANCE[::-1] in here:
                _frame(axis, across.index(1), up.index(0.0))
    words = "framed: without guidance"
    figure.text(BESIDE / width, 5 / height, words, fontsize=FONT - 2, color=SOFT)
    if title:
        figure.text(8 / width, 1 - 16 / height, title, fontsize=FONT, color=INK, parse_math=False)
    return figure


def _value(row: Row | None, column: str) -> float:
    value = None if row is None else row[column]
    return float("nan") if value is None else float(value)


def _heat(axis: "Axes", values: Sequence[Sequence[float]], column: str) -> None:
    from matplotlib import colormaps
    from matplotlib.colors import LogNorm, Normalize

    known = [v for line in values for v in line if v == v]
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    norm = LogNorm(low, high) if column == "ppl" and 0 < low < high else Normalize(low, high)
    palette = colormaps["cividis"].with_extremes(bad="white")
    axis.imshow(values, cmap=palette, norm=norm, origin="lower", aspect="auto")
    for y, line in enumerate(values):
        for x, value in enumerate(line):
            red, green, blue, _ = palette(norm(value)) if value == value else (1.0, 1.0, 1.0, 1.0)
            dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.5
            text = _word(value, column) if value == value else "–"
            colour = "white" if dark else "black"
            axis.text(x, y, text, ha="center", va="center", fontsize=FONT - 2, color=colour)
    axis.tick_params(length=0, labelsize=FONT - 1, labelcolor=SOFT)
    axis.spines[:].set_visible(False)


def _word(value: float, column: str) -> str:
    """Three digits of a perplexity, three decimals of an entropy."""
    if column == "entropy":
        return f"{value:.3f}"
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.3g}"


def _frame(axis: "Axes", x: int, y: int) -> None:
    """Mark a cell: white within black shows on every colour."""
    from matplotlib.patches import Rectangle

    for colour, thick in (("black", 4.0), ("white", 1.6)):
        axis.add_patch(
            Rectangle(
                (x - 0.5, y - 0.5), 1, 1, fill=False, edgecolor=colour, linewidth=thick,
                clip_on=False, zorder=3,
            )
        )  # fmt: skip


def landscape(
    context: Context,
    *,
    scales: Sequence[float],
    candidates: Sequence[int],
    steps: Sequence[int],
    late_from: int | None = None,
    guidance: Mapping[str, Any] | None = None,
    **common: Any,
) -> Rows:
    """RGAS over all pairs of h and M."""
    terms = terms_of(context, **common)
    return _guided(context, grid(scales, candidates), steps, late_from, guidance, terms)


def anova(
    context: Context,
    *,
    points: int,
    scales: Sequence[float],
    candidates: Sequence[int],
    steps: Sequence[int],
    late_from: int | None = None,
    guidance: Mapping[str, Any] | None = None,
    **common: Any,
) -> dict[str, Rows]:
    """RGAS over a Latin hypercube of h and M, and the share of the variance of each."""
    ranges: Any = (tuple(scales), tuple(candidates))
    terms = terms_of(context, **common)
    strengths = design(points, common["seed"], *ranges)
    rows = _guided(context, strengths, steps, late_from, guidance, terms)
    known = [] if terms.part != WHOLE else shares(rows, *ranges, seed=common["seed"])
    return {"rows": rows, "shares": known}


def _guided(
    context: Context,
    strengths: Sequence[Strength],
    steps: Sequence[int],
    late_from: int | None,
    guidance: Mapping[str, Any] | None,
    terms: Terms,
) -> Rows:
    """Rows of each budget's own student: `model`, or `model-late` from `late_from` NFE on."""
    few = [nfe for nfe in steps if late_from is None or nfe < late_from]
    many = [nfe for nfe in steps if nfe not in few]
    return [
        row
        for role, budgets in (("model", few), (f"model{LATE}", many))
        if budgets
        for row in guided_rows(context.inputs[role], strengths, budgets, terms, guidance)
    ]


SHARES = (
    Shown("ppl_share", "share for perplexity", ".1%"),
    Shown("entropy_share", "for entropy", ".1%"),
)


def _guided_job(scale: Scale, name: str, **options: Any) -> Job:
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


def _landscape_job(scale: Scale) -> Job:
    return _guided_job(
        scale,
        "rgas-landscape",
        scales=list(scale.scales_h),
        candidates=list(scale.candidates),
    )


def _landscape_table(scale: Scale, answers: Answers) -> Table:
    rows = sorted(answers.rows(), key=lambda row: (row["h"], row["candidates"]))
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


def _draw_landscape(scale: Scale, table: Table, path: Path) -> None:
    title = f"{scale.name} scale, seed {scale.seeds[0]}, {scale.guided_samples} samples a cell"
    write_atomic(path, as_png(draw_landscape(table.rows, title)))


def _anova_job(scale: Scale) -> Job:
    return _guided_job(
        scale,
        "rgas-anova",
        points=scale.anova_points,
        scales=list(scale.anova_h),
        candidates=list(scale.anova_candidates),
    )


def _anova_table(scale: Scale, answers: Answers) -> Table:
    found = answers.only({"shares": []})["shares"]
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


def _draw_anova(scale: Scale, table: Table, path: Path) -> None:
    names = {title: name for name, title in PARAMETERS.items()}
    rows = [row | {"parameter": names[row["parameter"]]} for row in table.rows]
    write_atomic(path, as_png(draw_shares(rows, paper.ANOVA)))


GUIDANCE_ITEMS = (
    Experiment(
        name="rgas-landscape",
        title="RGAS landscape: perplexity and entropy over h and M",
        where='Appendix "Sensitivity Analysis of RGAS", figure',
        lines=lambda scale: [Line(_landscape_job(scale))],
        table=_landscape_table,
        draw=_draw_landscape,
    ),
    Experiment(
        name="rgas-anova",
        title="Functional ANOVA of h and M",
        where='Appendix "Sensitivity Analysis of RGAS", table',
        lines=lambda scale: [Line(_anova_job(scale))],
        table=_anova_table,
        draw=_draw_anova,
        packages=("optuna", "sklearn", "scipy"),
    ),
)
