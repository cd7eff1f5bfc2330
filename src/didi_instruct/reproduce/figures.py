"""Figures of tables: a line for each method over NFE, a panel for each number, seeds as points."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from didi_instruct.data.files import write_atomic
from didi_instruct.evaluation.report.figures import (
    FONT,
    HUES,
    INK,
    MARKERS,
    SOFT,
    as_png,
    finite,
    new_figure,
    set_scale,
    style,
)
from didi_instruct.reproduce.tables import PASSES, Shown, Table, cells, over_seeds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANEL, HEIGHT, LEFT, GAP, FOOT, ENTRY = 360, 250, 60, 64, 50, 18
"""Points: of a panel, beside, between and below panels, and of a line of the legend."""
COLUMNS = 3
"""Of the legend."""
PALETTE = (
    INK, *HUES, "#a0522d", "#8fbc3a", "#9a9a9a", "#e377c2", "#17a2a2",
    "#8b0000", "#1f3a93", "#bfa100", "#4b5d20", "#ff8a75",
)  # fmt: skip
"""A colour for every method of the longest table; the first seven hues are told apart by all, what
follows by its marker too."""


def new_axis(figure: "Figure", box: tuple[float, float, float, float], title: str) -> "Axes":
    """An empty panel at a place given in points: left, bottom, width, height."""
    width, height = (72 * inches for inches in figure.get_size_inches())
    left, bottom, across, up = box
    axis = figure.add_axes((left / width, bottom / height, across / width, up / height))
    style(axis, title)
    return axis


def can_draw() -> bool:
    """True if matplotlib is installed."""
    return find_spec("matplotlib") is not None


def drawn(shown: Sequence[Shown]) -> list[Shown]:
    """Numbers that are worth a panel: passes are a cost, told in the table."""
    return [one for one in shown if one != PASSES]


def draw_lines(
    table: Table, path: Path, shown: Sequence[Shown], *, paper: bool = False, caption: str = ""
) -> None:
    """Draw each number of a table over NFE; with `paper`, its numbers too, dashed."""
    sides = [(table.rows, "-")] + ([(table.paper, "--")] if paper else [])
    names = list(dict.fromkeys(_name(table, row) for rows, _ in sides for row in rows))
    rows_of_legend = -(-len(names) // COLUMNS)
    legend = ENTRY * rows_of_legend + 12
    width = LEFT + len(shown) * PANEL + (len(shown) - 1) * GAP + 16
    figure = new_figure(width, FOOT + HEIGHT + 30 + legend)
    for number, one in enumerate(shown):
        box = (LEFT + number * (PANEL + GAP), FOOT, PANEL, HEIGHT)
        _panel(new_axis(figure, box, one.title), table, one, sides, names)
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=_colour(i), marker=_marker(i), markersize=5, label=name)
        for i, name in enumerate(names)
    ]
    figure.legend(
        handles=handles,
        loc="upper left",
        ncols=COLUMNS,
        frameon=False,
        fontsize=FONT - 1,
        labelcolor=INK,
    )
    figure.text(0.01, 0.01, caption, fontsize=FONT - 3, color=SOFT, parse_math=False)
    write_atomic(path, as_png(figure))


def _panel(
    axis: "Axes", table: Table, one: Shown, sides: Sequence[Any], names: Sequence[str]
) -> None:
    from matplotlib.ticker import NullLocator, PercentFormatter

    seen: list[float] = []
    places: set[int] = set()
    for rows, dashes in sides:
        for number, name in enumerate(names):
            mine = [row for row in rows if _name(table, row) == name]
            points = cells(mine, (), table.across)
            line = sorted(
                (place, over_seeds(of, one.column).mean)
                for (_, place), of in points.items()
                if finite(over_seeds(of, one.column).mean)
            )
            if not line:
                continue
            across, values = zip(*line, strict=True)
            colour = _colour(number)
            axis.plot(
                across,
                values,
                dashes,
                color=colour,
                marker=_marker(number),
                ms=5,
                lw=1.6,
                alpha=0.9,
            )
            each = [
                (row[table.across], row[one.column]) for row in mine if finite(row.get(one.column))
            ]
            if len(each) > len(line):  # several seeds
                axis.plot(*zip(*each, strict=True), ".", color=colour, ms=4, alpha=0.5)
            seen += [value for _, value in each]
            places |= set(across)
    if not seen:
        axis.text(0.5, 0.5, "not measured", transform=axis.transAxes, ha="center", color=SOFT)
        return
    set_scale(axis, seen)
    if one.form.endswith("%"):
        axis.yaxis.set_major_formatter(PercentFormatter(1.0))
    axis.set_xscale("log", base=2)
    axis.set_xticks(sorted(places), [str(place) for place in sorted(places)])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xlabel(table.across_title, fontsize=FONT - 0.5, color=SOFT)


def _name(table: Table, row: dict[str, Any]) -> str:
    return ", ".join(str(row[label]) for label in table.labels)


def _colour(number: int) -> str:
    return PALETTE[number % len(PALETTE)]


def _marker(number: int) -> str:
    return MARKERS[(number + number // len(PALETTE)) % len(MARKERS)]
