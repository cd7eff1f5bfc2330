"""Plots of a report: path KL and gap closed, perplexity and entropy over steps, the frontier.

Only those that have data are drawn; a line of words says why another is missing. The frontier,
which has a panel per budget, is drawn in two widths, for paper and for phones.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from didi_instruct.errors import MissingExtraError
from didi_instruct.evaluation.report.content import Content
from didi_instruct.evaluation.report.drawing import (
    FONT,
    FOOT,
    LEFT,
    NARROW,
    RIGHT,
    SOFT,
    TITLE,
    as_png,
    as_svg,
    draw_legend,
    finite,
    is_near,
    legend_height,
    look,
    new_axis,
    new_figure,
    scale,
)
from didi_instruct.evaluation.report.frontier import draw_frontiers, points_of, star_of
from didi_instruct.evaluation.report.lines import Line, has_sweep, lines_of
from didi_instruct.evaluation.report.words import budget
from didi_instruct.evaluation.table import interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANEL = 150
"""Points of a panel's height."""
PANELS = 6
"""Budgets of the frontier that are drawn at most."""
NAMES = ("path-kl", "nfe", "frontier")


@dataclass(frozen=True, slots=True)
class Plot:
    """A figure in all its forms."""

    name: str
    title: str
    caption: str
    alt: str
    """The figure in words, for those who do not see it."""
    svgs: tuple[str, ...]
    """One for all widths, or a wide and a narrow one."""
    png: bytes

    @property
    def file(self) -> str:
        """Name of the PNG beside the report."""
        return f"report-{self.name}.png"


@dataclass(frozen=True, slots=True)
class Series:
    """A number of one line over its budgets."""

    line: Line
    steps: list[int]
    values: list[float]
    lows: list[float]
    highs: list[float]


@dataclass(frozen=True, slots=True)
class Panel:
    """What is drawn over the steps together."""

    title: str
    series: list[Series]
    level: float | None = None
    """Of the reference text."""
    far: float | None = None
    """The same, where it is too far off to be drawn."""
    share: bool = False
    """From 0 to 1, shown as percentages with both ends marked."""


def draw_plots(content: Content) -> tuple[list[Plot], list[str]]:
    """The plots that have data, and a line for each that has none."""
    try:
        import matplotlib
    except ImportError:
        return [], [str(MissingExtraError("Plots", "eval"))]
    found, notes = [], []
    # Words stay words, to be read in the page's own font; equal numbers make equal files.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "didi"}):
        for draw in (_draw_path_kl, _draw_steps, _draw_frontier):
            drawn = draw(content, lines_of(content))
            if isinstance(drawn, str):
                notes.append(drawn)
            else:
                found.append(drawn)
    return found, notes


def _draw_steps(content: Content, lines: Sequence[Line]) -> Plot | str:
    entropy = _panel("Unigram entropy, nats", "entropy", content, lines)
    if not entropy.series:
        return "There is no plot of perplexity and entropy over steps: add the metric entropy."
    perplexity = _panel("Perplexity", "ppl", content, lines)
    panels = [perplexity, entropy] if perplexity.series else [entropy]
    title = " and ".join(("perplexity", "entropy")[-len(panels) :]).capitalize() + " over steps"
    which = "Plain setting of each model" if has_sweep(content) else "One row each"
    caption = f"{which}; bands are 95% intervals."
    if any(panel.level is not None for panel in panels):
        caption += " Dashed: the reference text."
    for panel in panels:
        if panel.far is not None:
            caption += f" {panel.title} of the reference text is far off: {panel.far:.4g}."
    if not perplexity.series:
        caption += " Perplexity was not measured: it needs the metric ppl and a judge."
    figure = _over_steps(panels, lines)
    return Plot("nfe", title, caption, _words(panels), (as_svg(figure, "nfe"),), as_png(figure))


def _draw_path_kl(content: Content, lines: Sequence[Line]) -> Plot | str:
    panels = [_panel("Path KL, nats per text", "path_kl", content, lines, best=True)]
    if not panels[0].series:
        return (
            "There is no plot of path KL: it needs the metric path-kl, a judge and a sampler whose "
            "path has a probability (ancestral)."
        )
    # Where it is known, the share at the best setting: its interval knows that one was chosen.
    known = any(row.get("gap_closed_best") is not None for row in content.rows)
    field = "gap_closed_best" if known else "gap_closed"
    gap = _panel("Gap closed", field, content, lines, best=True, share=True)
    which = "Each model at its best setting by path KL" if has_sweep(content) else "One row each"
    caption = f"{which}; bands are 95% intervals."
    if gap.series:
        panels.append(gap)
        caption += " 0% is the baseline at equal steps, 100% the baseline with its most steps."
    figure = _over_steps(panels, lines)
    title, svg = "Path KL over steps", as_svg(figure, "path-kl")
    return Plot("path-kl", title, caption, _words(panels), (svg,), as_png(figure))


def _draw_frontier(content: Content, lines: Sequence[Line]) -> Plot | str:
    budgets = sorted(
        {nfe for line in lines for nfe in line.budgets if len(points_of(line, nfe)) > 1}
    )
    if not budgets:
        return (
            "There is no plot of the frontier: it needs perplexity and entropy at several "
            "temperatures or top-p (--frontier)."
        )
    shown = _spread(budgets, PANELS)
    caption = (
        "Perplexity over entropy: lower at equal entropy is better. Solid: temperature; dashed: "
        "top-p; large marks: the plain setting."
    )
    if star_of(content, lines, shown):
        caption += " Star: the reference text."
    if len(shown) < len(budgets):
        caption += f" {len(budgets) - len(shown)} budgets are left out."
    wide, narrow = (draw_frontiers(content, lines, shown, columns) for columns in (3, 2))
    alt = "Perplexity over entropy, one panel per budget. " + " ".join(
        f"{line.label} at {budget(nfe)}: {len(points_of(line, nfe))} settings."
        for nfe in shown
        for line in lines
        if len(points_of(line, nfe)) > 1
    )
    svgs: tuple[str, ...] = (as_svg(wide, "frontier-wide"),)
    if len(shown) > 2:
        svgs += (as_svg(narrow, "frontier-narrow"),)
    return Plot("frontier", "Frontier", caption, alt, svgs, as_png(wide))


def _spread(budgets: Sequence[int], most: int) -> list[int]:
    """At most so many, evenly from the first to the last."""
    if len(budgets) <= most:
        return list(budgets)
    return [budgets[round(i * (len(budgets) - 1) / (most - 1))] for i in range(most)]


def _panel(
    title: str,
    field: str,
    content: Content,
    lines: Sequence[Line],
    *,
    best: bool = False,
    share: bool = False,
) -> Panel:
    found = []
    for line in lines:
        rows = [line.best(nfe) if best else line.plain(nfe) for nfe in line.budgets if nfe > 0]
        known = [row for row in rows if row is not None and finite(row.get(field))]
        if not known:
            continue
        values = [float(row[field]) for row in known]
        ends = [interval(row, field) or (row[field], row[field]) for row in known]
        steps = [row["nfe"] for row in known]
        found.append(Series(line, steps, values, [e[0] for e in ends], [e[1] for e in ends]))
    level, reach = content.real.get(field), [end for s in found for end in (*s.lows, *s.highs)]
    if not reach or not finite(level):
        return Panel(title, found, share=share)
    near = is_near(level, reach)
    return Panel(title, found, level if near else None, None if near else level, share)


def _words(panels: Sequence[Panel]) -> str:
    """A figure in words: where each line starts and ends."""
    parts = []
    for panel in panels:
        for s in panel.series:
            words = f"{s.line.label}: {s.values[0]:.4g} at {budget(s.steps[0])}"
            if len(s.steps) > 1:
                words += f", {s.values[-1]:.4g} at {budget(s.steps[-1])}"
            parts.append(f"{panel.title}, {words}.")
    return " ".join(parts)


def _over_steps(panels: Sequence[Panel], lines: Sequence[Line]) -> "Figure":
    """Panels below each other, over one axis of steps."""
    shown = [line for line in lines if any(s.line is line for p in panels for s in p.series)]
    top = legend_height(shown, NARROW)
    height = top + len(panels) * (TITLE + PANEL) + FOOT
    figure = new_figure(NARROW, height)
    draw_legend(figure, shown, lines, NARROW)
    budgets = sorted({step for p in panels for s in p.series for step in s.steps})
    for place, panel in enumerate(panels):
        bottom = height - top - (place + 1) * (TITLE + PANEL)
        axis = new_axis(figure, (LEFT, bottom, NARROW - LEFT - RIGHT, PANEL), panel.title)
        for series in panel.series:
            _draw_series(axis, series, *look(series.line, lines))
        if panel.level is not None:
            axis.axhline(panel.level, color=SOFT, linewidth=1.1, dashes=(5, 3), zorder=1)
        if panel.share:
            axis.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.4g}%")
            for end in (0, 1):
                axis.axhline(end, color=SOFT, linewidth=0.8, alpha=0.6, zorder=1)
        else:
            ends = [end for s in panel.series for end in (*s.lows, *s.highs)]
            scale(axis, ends if panel.level is None else [*ends, panel.level])
        _step_axis(axis, budgets, named=place == len(panels) - 1)
    return figure


def _draw_series(axis: "Axes", series: Series, colour: str, marker: str) -> None:
    """A line with its band; a single point has a bar instead."""
    style: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 5, "linewidth": 1.8}
    if len(series.steps) > 1:
        axis.plot(series.steps, series.values, **style)
        axis.fill_between(
            series.steps, series.lows, series.highs, color=colour, alpha=0.18, linewidth=0
        )
        return
    down = [max(0.0, v - low) for v, low in zip(series.values, series.lows, strict=True)]
    up = [max(0.0, high - v) for v, high in zip(series.values, series.highs, strict=True)]
    axis.errorbar(series.steps, series.values, yerr=[down, up], capsize=3, **style)


def _step_axis(axis: "Axes", budgets: Sequence[int], *, named: bool) -> None:
    from matplotlib.ticker import NullLocator

    axis.set_xscale("log", base=2)
    room = math.log2(budgets[-1] / budgets[0]) or 1.0
    axis.set_xlim(budgets[0] * 2 ** (-0.06 * room), budgets[-1] * 2 ** (0.06 * room))
    ticks: list[int] = []
    for steps in budgets:
        if not ticks or math.log2(steps / ticks[-1]) > room / 12:
            ticks.append(steps)
    axis.set_xticks(ticks, [str(tick) for tick in ticks] if named else [])
    axis.xaxis.set_minor_locator(NullLocator())
    if named:
        axis.set_xlabel("steps per text (NFE)", fontsize=FONT, color=SOFT)
