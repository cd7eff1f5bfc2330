"""How plots of a report look: axes, legend, colours; and their files, as SVG and as PNG.

An SVG takes colours and font from the page it stands in, by name, so that it is at home in the dark
too. A figure is as narrow as a phone, so that its words stay legible there.
"""

import io
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

from didi_instruct.evaluation.report.lines import Line
from didi_instruct.evaluation.training_curves import COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, SOFT, RULE = "#23211e", "#77716a", "#e4dfd7"
"""As in the page by day."""
HUES = COLOURS[:7]
MARKERS = "osD^vPX"
NARROW, WIDE, FONT = 400, 860, 12.0
"""Points; a phone shows about 340 of them."""
LEFT, RIGHT, TITLE, FOOT, ENTRY = 56, 12, 28, 44, 18
"""Points beside a panel, above and below it, and of a legend's row."""
PNG_DPI = 144
FAR = 10
"""A reference text whose value is so many times off would flatten all lines to one."""
LABEL = 46
"""Characters of a legend's entry."""


def new_figure(width: float, height: float) -> "Figure":
    """A figure of a size in points."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width / 72, height / 72), dpi=72)


def new_axis(figure: "Figure", box: tuple[float, float, float, float], title: str) -> "Axes":
    """An empty panel at a place given in points from the lower left."""
    width, height = (72 * inches for inches in figure.get_size_inches())
    left, bottom, across, up = box
    axis = figure.add_axes((left / width, bottom / height, across / width, up / height))
    axis.patch.set_visible(False)
    axis.spines[:].set_visible(False)
    axis.grid(color=RULE, linewidth=0.9)
    axis.set_axisbelow(True)
    axis.tick_params(length=0, labelsize=FONT - 0.5, labelcolor=SOFT)
    axis.set_title(title, fontsize=FONT, color=INK, loc="left", pad=6, parse_math=False)
    return axis


def scale(axis: "Axes", values: Sequence[float]) -> None:
    """Use a logarithm where values differ by factors, with whole numbers as ticks."""
    from matplotlib.ticker import NullLocator

    low, high = min(values), max(values)
    if low <= 0 or high < 3 * low:
        room = 0.12 * (high - low) or 0.1 * abs(high) or 1.0
        axis.set_ylim(low - room, high + room)
        return
    decades = math.log10(high / low)
    subs = (1.0, 1.5, 2.0, 3.0, 5.0, 7.0) if decades < 1 else (1.0, 2.0, 5.0)
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    ticks = [sub * 10.0**power for power in powers for sub in (subs if decades < 2 else (1.0,))]
    ends = (low * (high / low) ** -0.08, high * (high / low) ** 0.08)
    axis.set_yscale("log")
    axis.set_ylim(*ends)
    inside = [tick for tick in ticks if ends[0] <= tick <= ends[1]]
    axis.set_yticks(inside, [f"{tick:g}" for tick in inside])
    axis.yaxis.set_minor_locator(NullLocator())


def look(line: Line, lines: Sequence[Line]) -> tuple[str, str]:
    """Colour and marker: ink for the baseline, so that the others stand out."""
    number = [other for other in lines if other.is_baseline == line.is_baseline].index(line)
    if line.is_baseline:
        return INK, MARKERS[number % len(MARKERS)]
    # The second time round, a colour has another marker.
    return HUES[number % len(HUES)], MARKERS[(number + 1 + number // len(HUES)) % len(MARKERS)]


def _name(line: Line) -> str:
    name, half = line.label + (" (baseline)" if line.is_baseline else ""), (LABEL - 1) // 2
    return name if len(name) <= LABEL else f"{name[:half]}…{name[-half:]}"


def _legend_columns(shown: Sequence[Line], width: float) -> int:
    longest = max((len(_name(line)) for line in shown), default=1)
    return max(1, min(len(shown), int(width / (FONT * (4 + 0.62 * longest)))))


def legend_height(shown: Sequence[Line], width: float) -> float:
    """Points that a legend takes."""
    return ENTRY * -(-len(shown) // _legend_columns(shown, width)) + 4


def draw_legend(
    figure: "Figure", shown: Sequence[Line], lines: Sequence[Line], width: float
) -> None:
    """Name the lines above all panels, where the names cover nothing."""
    from matplotlib.lines import Line2D

    handles = []
    for line in shown:
        colour, marker = look(line, lines)
        handles.append(Line2D([], [], color=colour, marker=marker, markersize=5, label=_name(line)))
    legend = figure.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(0, 1), frameon=False,
        ncols=_legend_columns(shown, width), fontsize=FONT, labelcolor=INK, borderaxespad=0.1,
        borderpad=0.1, handlelength=1.8, labelspacing=0.35, columnspacing=1.4,
    )  # fmt: skip
    for text in legend.get_texts():
        text.set_parse_math(False)


def finite(value: Any) -> TypeGuard[float]:
    """Whether there is a number to draw."""
    return value is not None and math.isfinite(value)


def is_near(level: float, values: Sequence[float]) -> bool:
    """Whether a level may be drawn beside these values."""
    low, high = min(values), max(values)
    return low <= level <= high or (low > 0 and low / FAR < level < high * FAR)


def as_png(figure: "Figure") -> bytes:
    """A figure as a file, on white."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
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
    box = re.search(r'viewBox="[^"]*"', head)
    assert box is not None
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', rest))

    def themed(tag: re.Match[str]) -> str:
        kept = re.sub(r' id="([^"]*)"', lambda m: m[0] if m[1] in used else "", tag[0])
        kept = re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{name}-", kept)
        return re.sub(r' style="([^"]*)"', lambda m: f' style="{_themed(m[1])}"', kept)

    # Only inside of tags: a label may look like anything.
    return f"<svg {box[0]}>{re.sub(r'<[^>]*>', themed, rest)}".strip()


def _themed(style: str) -> str:
    """Colours and fonts of a style by the names that the page has for them."""
    names = {INK: "ink", SOFT: "soft", RULE: "rule"} | {hue: f"h{i}" for i, hue in enumerate(HUES)}
    for colour, name in names.items():
        style = style.replace(colour, f"var(--{name})")
    style = re.sub(r"font-family: [^;]*", "font-family: var(--ui)", style)
    return re.sub(r"font: ([^;]*?px) [^;]*", r"font: \1 var(--ui)", style)
