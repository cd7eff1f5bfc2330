"""Plot of the frontier: perplexity over entropy, a panel per budget, each sweep joined."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from didi_instruct.evaluation.frontier import Point, curves
from didi_instruct.evaluation.report.content import Content
from didi_instruct.evaluation.report.drawing import (
    FONT,
    FOOT,
    LEFT,
    NARROW,
    RIGHT,
    SOFT,
    TITLE,
    WIDE,
    draw_legend,
    finite,
    is_near,
    legend_height,
    look,
    new_axis,
    new_figure,
    scale,
)
from didi_instruct.evaluation.report.lines import Line
from didi_instruct.evaluation.report.words import budget

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BETWEEN, TICKS = 18, 26
"""Points between panels: beside each other, and below each other."""


def points_of(line: Line, nfe: int) -> list[Point]:
    """Settings of a line at one budget whose perplexity and entropy are known."""
    usual = {"passes": 1.0, "temperature": 1.0, "top_p": 1.0}
    rows = [row for row in line.at(nfe) if finite(row.get("ppl")) and finite(row.get("entropy"))]
    return [Point.of(usual | row) for row in rows]


def star_of(
    content: Content, lines: Sequence[Line], budgets: Sequence[int]
) -> tuple[float, float] | None:
    """Entropy and perplexity of the reference text, where both are known and not far off."""
    entropy, perplexity = content.real.get("entropy"), content.real.get("ppl")
    if not finite(entropy) or not finite(perplexity):
        return None
    points = [point for line in lines for nfe in budgets for point in points_of(line, nfe)]
    near = is_near(perplexity, [point.perplexity for point in points])
    near = near and is_near(entropy, [point.entropy for point in points])
    return (entropy, perplexity) if near else None


def draw_frontiers(
    content: Content, lines: Sequence[Line], budgets: Sequence[int], columns: int
) -> "Figure":
    """A panel per budget in so many columns, all with the same axes."""
    columns = min(columns, len(budgets))
    width, panel = (WIDE, 190) if columns > 2 else (NARROW, 150 if columns == 2 else 220)
    rows = -(-len(budgets) // columns)
    shown = [line for line in lines if any(points_of(line, nfe) for nfe in budgets)]
    top = legend_height(shown, width)
    height = top + rows * (TITLE + panel + TICKS) + FOOT - TICKS
    figure = new_figure(width, height)
    draw_legend(figure, shown, lines, width)
    points = [p for line in shown for nfe in budgets for p in points_of(line, nfe)]
    star = star_of(content, lines, budgets)
    entropies = [p.entropy for p in points] + ([star[0]] if star else [])
    perplexities = [p.perplexity for p in points] + ([star[1]] if star else [])
    room = 0.06 * (max(entropies) - min(entropies)) or 0.1
    across = (width - LEFT - RIGHT - (columns - 1) * BETWEEN) / columns
    for place, nfe in enumerate(budgets):
        row, column = divmod(place, columns)
        bottom = height - top - TITLE - panel - row * (TITLE + panel + TICKS)
        box = (LEFT + column * (across + BETWEEN), bottom, across, panel)
        axis = new_axis(figure, box, budget(nfe))
        for line in shown:
            _draw_sweep(axis, points_of(line, nfe), *look(line, lines))
        if star:
            axis.plot(*star, "*", markersize=11, color=SOFT, zorder=2)
        axis.set_xlim(min(entropies) - room, max(entropies) + room)
        axis.locator_params(axis="x", nbins=4 if columns > 1 else 6)
        scale(axis, perplexities)
        if column:
            axis.tick_params(labelleft=False)
    words = "perplexity (up) over entropy in nats (across)"
    figure.text(0.5, 4 / height, words, fontsize=FONT, color=SOFT, ha="center")
    return figure


def _draw_sweep(axis: "Axes", points: Sequence[Point], colour: str, marker: str) -> None:
    for curve in (c for c in curves(points) if len(c) > 1):
        style = "solid" if len({p.temperature for p in curve}) > 1 else (0, (3, 2))
        xs, ys = [p.entropy for p in curve], [p.perplexity for p in curve]
        axis.plot(xs, ys, color=colour, linestyle=style, linewidth=1.4, marker=".", markersize=4)
    for point in points:
        if len(points) == 1 or (point.temperature, point.top_p) == (1, 1):
            axis.plot(point.entropy, point.perplexity, marker, color=colour, markersize=6, zorder=3)
