"""Figures of a report: path KL and gap closed, perplexity and entropy over steps, the frontier.

Each is an SVG for the page and a PNG for Markdown. An SVG takes its colours and font from the page,
so that it suits dark mode too, and is as narrow as a phone. A figure without data is not drawn; a
sentence says why. The look (`new_figure`, `style`, `set_scale`) is shared with other figures.
"""

import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

from didi_instruct.errors import MissingExtraError
from didi_instruct.evaluation.frontier import Point, curves
from didi_instruct.evaluation.report.lines import Line, Rows
from didi_instruct.evaluation.report.summary import clean, steps
from didi_instruct.evaluation.table import Row, interval
from didi_instruct.evaluation.training_curves import COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, SOFT, RULE = "#23211e", "#77716a", "#e4dfd7"
"""As in the page's light mode."""
HUES = COLOURS[:7]
MARKERS = "osD^vPX"
NARROW, WIDE, FONT = 400, 860, 12.0
"""Points; a phone shows about 340 of them."""
PNG_DPI = 144
FAR = 10
"""A reference text whose value is this many times off is left out: it would flatten all lines."""
LABEL = 46
"""Characters of a legend's entry."""
PANELS = 6
"""Panels of the frontier at most."""
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


def draw_plots(rows: Rows) -> tuple[list[Plot], list[str]]:
    """Draw the figures that have data; a sentence for each that has none."""
    try:
        import matplotlib
    except ImportError:
        return [], [str(MissingExtraError("Drawing plots", "eval"))]
    # Text stays text, in the page's own font, and is no formula; equal numbers make equal files.
    with matplotlib.rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": "didi", "text.parse_math": False}
    ):
        drawn = [draw(rows) for draw in (_path_kl, _over_steps, _frontier)]
    plots = [plot for plot in drawn if isinstance(plot, Plot)]
    return plots, [note for note in drawn if isinstance(note, str)]


@dataclass(frozen=True, slots=True)
class Panel:
    """One number of all lines over their steps."""

    title: str
    field: str
    series: list[tuple[Line, list[Row]]]
    level: float | None = None
    """Of the reference text."""
    is_far: bool = False
    """Whether the level is too far off to be drawn."""

    @classmethod
    def of(cls, title: str, field: str, rows: Rows, *, best: bool = False) -> "Panel":
        """Take the number at each line's best or plain setting."""
        series = []
        for line in rows.lines:
            chosen = [line.best(nfe) if best else line.plain(nfe) for nfe in line.budgets if nfe]
            if known := [row for row in chosen if row is not None and finite(row.get(field))]:
                series.append((line, known))
        level, panel = rows.reference.get(field), cls(title, field, series)
        if not series or not finite(level):
            return panel
        return cls(title, field, series, level, is_far=not _is_near(level, panel.ends()))

    def ends(self) -> list[float]:
        """Ends of all intervals."""
        return [end for _, rows in self.series for row in rows for end in _ends(row, self.field)]

    def words(self) -> str:
        """Starts and ends of the lines."""
        found = []
        for line, rows in self.series:
            places = [f"{row[self.field]:.4g} at {steps(row['nfe'])}" for row in rows]
            first_and_last = ", ".join(places[:: len(places) - 1 or 1])
            found.append(f"{self.title}, {line.label}: {first_and_last}.")
        return " ".join(found)


def _path_kl(rows: Rows) -> Plot | str:
    panels = [Panel.of("Path KL, nats per text", "path_kl", rows, best=True)]
    if not panels[0].series:
        return (
            "There is no plot of path KL: it needs the metric path-kl, a judge and a sampler whose "
            "paths have a probability (ancestral)."
        )
    # Where it is known, the share at the best setting: its interval allows for the choice.
    known = any(row.get("gap_closed_best") is not None for row in rows.sampled)
    gap = Panel.of("Gap closed", "gap_closed_best" if known else "gap_closed", rows, best=True)
    which = "Each model at its best setting by path KL" if rows.has_sweep else "One row each"
    caption = f"{which}; bands are 95% intervals."
    if gap.series:
        panels.append(gap)
        caption += " 0% is the baseline at equal steps, 100% the baseline at its most steps."
    return _steps_plot("path-kl", "Path KL over steps", caption, panels, rows)


def _over_steps(rows: Rows) -> Plot | str:
    entropy = Panel.of("Unigram entropy, nats", "entropy", rows)
    if not entropy.series:
        return "There is no plot of perplexity and entropy over steps: add the metric entropy."
    perplexity = Panel.of("Perplexity", "ppl", rows)
    panels = [perplexity, entropy] if perplexity.series else [entropy]
    title = " and ".join(("perplexity", "entropy")[-len(panels) :]).capitalize() + " over steps"
    which = "Plain setting of each model" if rows.has_sweep else "One row each"
    caption = f"{which}; bands are 95% intervals."
    if any(panel.level is not None and not panel.is_far for panel in panels):
        caption += " Dashed: the reference text."
    for panel in panels:
        if panel.is_far:
            caption += f" {panel.title} of the reference text is far off: {panel.level:.4g}."
    if not perplexity.series:
        caption += " Perplexity was not measured: it needs the metric ppl and a judge."
    return _steps_plot("nfe", title, caption, panels, rows)


def _steps_plot(name: str, title: str, caption: str, panels: Sequence[Panel], rows: Rows) -> Plot:
    """Panels below each other, over one axis of steps."""
    shown = [x for x in rows.lines if any(x is line for p in panels for line, _ in p.series)]
    figure = _figure_of_lines(NARROW, 178 * len(panels) + 44, shown, rows.lines)
    axes = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
    for axis, panel in zip(axes, panels, strict=True):
        style(axis, panel.title)
        for line, known in panel.series:
            _draw_series(axis, panel.field, known, *_look(line, rows.lines))
        ends = panel.ends()
        if panel.level is not None and not panel.is_far:
            axis.axhline(panel.level, color=SOFT, linewidth=1.1, dashes=(5, 3), zorder=1)
            ends.append(panel.level)
        if panel.field.startswith("gap_closed"):
            axis.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.4g}%")
            for end in (0, 1):
                axis.axhline(end, color=SOFT, linewidth=0.8, alpha=0.6, zorder=1)
        else:
            set_scale(axis, ends)
    _set_steps(axes[-1], sorted({r["nfe"] for p in panels for _, known in p.series for r in known}))
    _lay_out(figure)
    alt = " ".join(panel.words() for panel in panels)
    return Plot(name, title, caption, alt, (as_svg(figure, name),), as_png(figure))


def _draw_series(axis: "Axes", field: str, rows: Sequence[Row], colour: str, marker: str) -> None:
    """A line with its band; a single point has a bar instead."""
    look: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 5, "linewidth": 1.8}
    across, values = [row["nfe"] for row in rows], [float(row[field]) for row in rows]
    lows, highs = zip(*(_ends(row, field) for row in rows), strict=True)
    if len(rows) > 1:
        axis.plot(across, values, **look)
        axis.fill_between(across, lows, highs, color=colour, alpha=0.18, linewidth=0)
        return
    errors = [[max(0.0, values[0] - lows[0])], [max(0.0, highs[0] - values[0])]]
    axis.errorbar(across, values, yerr=errors, capsize=3, **look)


def _ends(row: Row, field: str) -> tuple[float, float]:
    return interval(row, field) or (row[field], row[field])


def _set_steps(axis: "Axes", budgets: Sequence[int]) -> None:
    from matplotlib.ticker import NullLocator

    axis.set_xscale("log", base=2)
    room = math.log2(budgets[-1] / budgets[0]) or 1.0
    axis.set_xlim(budgets[0] * 2 ** (-0.06 * room), budgets[-1] * 2 ** (0.06 * room))
    ticks: list[int] = []
    for nfe in budgets:
        if not ticks or math.log2(nfe / ticks[-1]) > room / 12:
            ticks.append(nfe)
    axis.set_xticks(ticks, [str(tick) for tick in ticks])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xlabel("steps per text (NFE)", fontsize=FONT, color=SOFT)


Place = tuple[float, float]
Sweeps = Mapping[int, Sequence[tuple[Line, list[Point]]]]
"""Points of each line by number of steps."""


def _frontier(rows: Rows) -> Plot | str:
    sweeps = {nfe: _points(rows.lines, nfe) for nfe in rows.budgets}
    budgets = [nfe for nfe in sweeps if any(len(points) > 1 for _, points in sweeps[nfe])]
    if not budgets:
        return (
            "There is no plot of the frontier: it needs perplexity and entropy at several "
            "temperatures or top-p (--frontier)."
        )
    last, left_out = len(budgets) - 1, max(0, len(budgets) - PANELS)
    if left_out:  # evenly from the first to the last
        budgets = [budgets[round(i * last / (PANELS - 1))] for i in range(PANELS)]
    shown = {nfe: sweeps[nfe] for nfe in budgets}
    caption = (
        "Perplexity over entropy: lower at equal entropy is better. Solid: temperature; dashed: "
        "top-p; large marks: the plain setting."
    )
    stars: list[Place] = []
    entropy, perplexity = rows.reference.get("entropy"), rows.reference.get("ppl")
    if finite(entropy) and finite(perplexity):
        across, up = zip(*_places(shown), strict=True)
        if _is_near(entropy, across) and _is_near(perplexity, up):
            stars, caption = [(entropy, perplexity)], f"{caption} Star: the reference text."
    caption += f" {left_out} budgets are left out." if left_out else ""
    alt = "Perplexity over entropy, one panel per budget. " + " ".join(
        f"{line.label} at {steps(nfe)}: {len(points)} settings."
        for nfe in shown
        for line, points in shown[nfe]
        if len(points) > 1
    )
    wide = _draw_frontier(rows.lines, shown, stars, 3)
    svgs: tuple[str, ...] = (as_svg(wide, "frontier-wide"),)
    if len(shown) > 2:
        svgs += (as_svg(_draw_frontier(rows.lines, shown, stars, 2), "frontier-narrow"),)
    return Plot("frontier", "Frontier", caption, alt, svgs, as_png(wide))


def _points(lines: Sequence[Line], nfe: int) -> list[tuple[Line, list[Point]]]:
    """Settings at one number of steps whose perplexity and entropy are known."""
    usual = {"passes": 1.0, "temperature": 1.0, "top_p": 1.0}
    return [
        (line, [Point.of({**usual, **row}) for row in rows])
        for line in lines
        if (rows := [r for r in line.at(nfe) if finite(r.get("ppl")) and finite(r.get("entropy"))])
    ]


def _places(sweeps: Sweeps) -> list[Place]:
    """Entropy and perplexity of all points."""
    return [(p.entropy, p.perplexity) for each in sweeps.values() for _, of in each for p in of]


def _draw_frontier(
    lines: Sequence[Line], sweeps: Sweeps, stars: Sequence[Place], columns: int
) -> "Figure":
    """A panel per budget in so many columns, all with the same axes; each sweep is joined."""
    columns = min(columns, len(sweeps))
    count = -(-len(sweeps) // columns)
    width, panel = (WIDE, 244) if columns > 2 else (NARROW, 204 if columns == 2 else 274)
    named = [line for line in lines if any(line is x for s in sweeps.values() for x, _ in s)]
    figure = _figure_of_lines(width, count * panel + 20, named, lines)
    axes = figure.subplots(count, columns, sharex=True, sharey=True, squeeze=False).flat
    for axis in axes[len(sweeps) :]:
        axis.remove()
    for axis, (nfe, shown) in zip(axes, sweeps.items(), strict=False):
        style(axis, steps(nfe))
        axis.tick_params(labelbottom=True)
        for line, points in shown:
            _draw_sweep(axis, points, *_look(line, lines))
        for star in stars:
            axis.plot(*star, "*", markersize=11, color=SOFT, zorder=2)
    across, up = zip(*_places(sweeps), *stars, strict=True)
    room = 0.06 * (max(across) - min(across)) or 0.1
    axes[0].set_xlim(min(across) - room, max(across) + room)
    axes[0].locator_params(axis="x", nbins=4 if columns > 1 else 6)
    set_scale(axes[0], up)
    words = "perplexity (up) over entropy in nats (across)"
    figure.supxlabel(words, fontsize=FONT, color=SOFT)
    _lay_out(figure)
    return figure


def _draw_sweep(axis: "Axes", points: Sequence[Point], colour: str, marker: str) -> None:
    for curve in (c for c in curves(points) if len(c) > 1):
        dashes = "solid" if len({p.temperature for p in curve}) > 1 else (0, (3, 2))
        xs, ys = [p.entropy for p in curve], [p.perplexity for p in curve]
        axis.plot(xs, ys, color=colour, linestyle=dashes, linewidth=1.4, marker=".", markersize=4)
    for point in points:
        if len(points) == 1 or (point.temperature, point.top_p) == (1, 1):
            axis.plot(point.entropy, point.perplexity, marker, color=colour, markersize=6, zorder=3)


def new_figure(width: float, height: float) -> "Figure":
    """A figure of a size in points."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width / 72, height / 72), dpi=72)


def _figure_of_lines(
    width: float, height: float, shown: Sequence[Line], lines: Sequence[Line]
) -> "Figure":
    """A figure with those shown of all lines named above its panels."""
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.lines import Line2D

    labels = [_shorten(clean(line.label) + " (baseline)" * line.is_baseline) for line in shown]
    fitting = int(width / (FONT * (4 + 0.62 * max(map(len, labels)))))
    columns = max(1, min(len(shown), fitting))
    height += 18 * -(-len(shown) // columns) + 4
    figure = new_figure(width, height)
    figure.set_layout_engine(ConstrainedLayoutEngine(h_pad=7 / 72))
    looks = [_look(line, lines) for line in shown]
    handles = [
        Line2D([], [], color=colour, marker=marker, markersize=5, label=label)
        for (colour, marker), label in zip(looks, labels, strict=True)
    ]
    figure.legend(
        handles=handles, loc="outside upper left", frameon=False, ncols=columns, fontsize=FONT,
        labelcolor=INK, borderaxespad=0.1, borderpad=0.1, handlelength=1.8, labelspacing=0.35,
        columnspacing=1.4,
    )  # fmt: skip
    return figure


def _lay_out(figure: "Figure") -> None:
    """Place the panels once, not anew in each file."""
    engine = figure.get_layout_engine()
    assert engine is not None
    engine.execute(figure)
    figure.set_layout_engine(None)


def _shorten(name: str) -> str:
    half = (LABEL - 1) // 2
    return name if len(name) <= LABEL else f"{name[:half]}…{name[-half:]}"


def _look(line: Line, lines: Sequence[Line]) -> tuple[str, str]:
    """Colour and marker: ink for the baseline, so that the others stand out."""
    number = [other for other in lines if other.is_baseline == line.is_baseline].index(line)
    if line.is_baseline:
        return INK, MARKERS[number % len(MARKERS)]
    # The second time round, a colour has another marker.
    return HUES[number % len(HUES)], MARKERS[(number + 1 + number // len(HUES)) % len(MARKERS)]


def style(axis: "Axes", title: str) -> None:
    """Give a panel the look of all: a title, a light grid, no frame."""
    axis.patch.set_visible(False)
    axis.spines[:].set_visible(False)
    axis.grid(color=RULE, linewidth=0.9)
    axis.set_axisbelow(True)
    axis.tick_params(length=0, labelsize=FONT - 0.5, labelcolor=SOFT)
    axis.set_title(title, fontsize=FONT, color=INK, loc="left", pad=6, parse_math=False)


def set_scale(axis: "Axes", values: Sequence[float]) -> None:
    """Use a logarithm where values differ by factors, with round numbers as ticks."""
    from matplotlib.ticker import LogLocator, NullLocator

    low, high = min(values), max(values)
    if low <= 0 or high < 3 * low:
        room = 0.12 * (high - low) or 0.1 * abs(high) or 1.0
        axis.set_ylim(low - room, high + room)
        return
    decades = math.log10(high / low)
    subs = (1, 1.5, 2, 3, 5, 7) if decades < 1 else (1, 2, 5) if decades < 2 else (1,)
    axis.set_yscale("log")
    axis.set_ylim(low * (high / low) ** -0.08, high * (high / low) ** 0.08)
    axis.yaxis.set_major_locator(LogLocator(subs=subs, numticks=99))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_locator(NullLocator())


def finite(value: Any) -> TypeGuard[float]:
    """True if there is a number to draw."""
    return value is not None and math.isfinite(value)


def _is_near(level: float, values: Sequence[float]) -> bool:
    low, high = min(values), max(values)
    return low <= level <= high or (low > 0 and low / FAR < level < high * FAR)


def as_png(figure: "Figure") -> bytes:
    """A figure as a file, on white."""
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=PNG_DPI, facecolor="white")
    return data.getvalue()


def as_svg(figure: "Figure", name: str) -> str:
    """A figure to stand in a page: its colours and font are the page's, its ids its own."""
    data = io.BytesIO()
    figure.savefig(data, format="svg", transparent=True, metadata={"Date": None})
    text = data.getvalue().decode()
    # What stands before the figure is for files; its style sheet would hold for the whole page.
    text = re.sub(r"<(metadata|style)\b.*?</\1>", "", text[text.index("<svg") :], flags=re.DOTALL)
    head, rest = text.split(">", 1)
    (box,) = re.findall(r'viewBox="[^"]*"', head)
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', rest))
    colours = {INK: "ink", SOFT: "soft", RULE: "rule", **{h: f"h{i}" for i, h in enumerate(HUES)}}

    def themed(tag: re.Match[str]) -> str:
        kept = re.sub(r' id="([^"]*)"', lambda m: m[0] if m[1] in used else "", tag[0])
        kept = re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{name}-", kept)
        for colour, variable in colours.items():
            kept = kept.replace(colour, f"var(--{variable})")
        kept = re.sub(r'(style="[^"]*?font-family: )[^;"]*', r"\1var(--ui)", kept)
        return re.sub(r'(style="[^"]*?font: [^;"]*?px )[^;"]*', r"\1var(--ui)", kept)

    # Only inside of tags: a label may look like anything.
    return f"<svg {box}>{re.sub(r'<[^>]*>', themed, rest)}".strip()
