"""What RGAS does at each strength: perplexity, entropy and cost over h and M.

h is the tilting scale, the same in all tilting steps, M the number of candidates of the re-ranking
steps. h = 0 with M = 1 is ancestral sampling, bit for bit: the setting without guidance. A negative
h is the control of the sign: if tilting steers towards the teacher, it has to do harm.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from didi_instruct.errors import UserError
from didi_instruct.evaluation.measuring import Row
from didi_instruct.evaluation.report.figures import FONT, INK, SOFT, new_figure
from didi_instruct.reproduce.equal_terms import Setting, Terms, measure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Strength = tuple[float, int]
"""h and M."""
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
    """Whether a negative h does harm beside the same h above 0; a sentence per budget and M."""
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
