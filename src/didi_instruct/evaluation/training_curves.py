"""A run's `log.jsonl` as a picture: one small panel per group of numbers, over the steps."""

import io
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from didi_instruct.data.files import write_atomic
from didi_instruct.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, HEIGHT, DPI, FONT = 8.0, 1.85, 150, 7.0
"""Inches of the picture from side to side, and of a row of panels."""
LEGEND_COLUMNS = 4
Style = Literal["-", "--"]
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#5b3a8c", "#222222")
"""Distinguishable for the colour-blind too."""
GREY, LIGHT = "#555555", "#e6e6e6"
SMOOTHED = 40
"""A series of this many points is noise around a running mean; a shorter one is shown as it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Numbers that belong into one panel."""

    title: str
    left: tuple[str, ...] = ()
    right: tuple[str, ...] = ()
    """Numbers of another scale: their axis is at the right, and starts at 0."""
    guides: tuple[float, ...] = ()
    """Where the right axis has light lines; it then ends at 1."""
    log: bool = False
    smooth: bool = True
    dashed: tuple[str, ...] = ()
    """Numbers that may lie on others, which show through."""


BY_BUDGET = {
    "path_kl": Group(title="path KL, nats per sequence", smooth=False),
    "judge_nats": Group(title="judge, nats per token", smooth=False),
    "entropy": Group(title="entropy of a sample's tokens, nats", smooth=False),
}
"""Numbers of quick evaluations, one for each count of sampling steps: the first panels."""

GROUPS = (
    Group(title="reward", left=("reward_student", "reward_reference")),
    Group(
        title="discriminator",
        left=("disc_loss",),
        right=("disc_accuracy", "disc_sharpness"),
        guides=(0.5, 0.95),
    ),
    Group(title="advantage", left=("advantage_std", "advantage_max"), right=("clip_fraction",)),
    Group(
        title="loss",
        left=("loss", "policy_loss", "matching_loss", "component_loss", "aux_loss"),
        dashed=("policy_loss", "matching_loss", "component_loss"),
    ),
    Group(title="information in the codes, nats per step", left=("code_information",)),
    Group(title="KL to the teacher", left=("kl", "kl_start", "aux_kl")),
    Group(title="entropy, nats per token", left=("entropy", "path_entropy", "target_entropy")),
    Group(title="gradient norms", left=("grad_norm", "disc_grad_norm", "aux_grad_norm"), log=True),
    Group(title="unique 4-grams", left=("unique_4gram",)),
    Group(title="clipped log-ratios", left=("ratio_clip_fraction",)),
    Group(title="waiting", left=("student_waits", "disc_waits")),
    Group(title="learning rate", left=("lr",), smooth=False),
    Group(title="speed", left=("tokens_per_second",), right=("iterations_per_second",)),
)
"""The panels that follow those of the quick evaluations."""


@dataclass(frozen=True, slots=True)
class Series:
    """One number over the steps."""

    label: str
    points: dict[float, float]
    """Step -> value, in the order of steps."""
    colour: str
    style: Style = "-"
    right: bool = False
    """Drawn on an axis of its own beside that of the others."""
    raw: bool = False
    """Of the weights themselves, where another series is of their average."""
    errors: list[float] | None = None
    """Standard errors, 0 where none is known."""


class Panel(NamedTuple):
    """A group and its numbers in a log."""

    group: Group
    series: list[Series]


def draw_curves(log: Path, out: Path, *, title: str = "") -> bool:
    """Draw the numbers of a run's log into the PNG `out`; False where matplotlib is missing."""
    panels = panels_of(read_log(log))
    if not panels:
        raise UserError(
            f"{log} holds none of the numbers that curves show: give a run's log.jsonl."
        )
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import EngFormatter, MaxNLocator
    except ImportError:
        return False
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure((WIDTH, HEIGHT * rows + 0.4), DPI, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    if title:
        figure.suptitle(title, fontsize=FONT + 3, parse_math=False)
    places = figure.subplots(rows, columns, sharex=True, squeeze=False).flat
    for place, (axis, panel) in enumerate(zip(places, panels, strict=False)):
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
        axis.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10], integer=True))
        if place + columns >= len(panels):  # the last of its column
            axis.tick_params(labelbottom=True)
            axis.set_xlabel("step", fontsize=FONT, color=GREY)
        _draw_panel(axis, panel)
    for axis in list(places)[len(panels) :]:
        axis.remove()
    png = io.BytesIO()
    canvas.print_png(png)  # type: ignore[no-untyped-call]
    write_atomic(out, png.getvalue())
    return True


def read_log(path: Path) -> list[dict[str, float]]:
    """Read the finite numbers of every line that has a `step`; cut lines are left out."""
    if not path.is_file():
        raise UserError(f"{path} does not exist: give a run's log.jsonl.")
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue  # cut by a kill, or being written now
        if isinstance(record, dict) and _is_number(record.get("step")):
            records.append({name: value for name, value in record.items() if _is_number(value)})
    if not records:
        raise UserError(f"{path} holds no steps yet: wait until the run has logged one.")
    return records


def panels_of(records: Sequence[Mapping[str, float]]) -> list[Panel]:
    """Sort what a log holds into panels; numbers of no group are left out."""
    panels = [Panel(group, _by_budget(records, name)) for name, group in BY_BUDGET.items()]
    panels += [Panel(group, _of_group(records, group)) for group in GROUPS]
    return [panel for panel in panels if panel.series]


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Mean over a centred window of odd width; at both ends, over the part of it that exists."""
    kernel = np.ones(window)
    return np.convolve(values, kernel, "same") / np.convolve(np.ones(len(values)), kernel, "same")


def _is_number(value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and math.isfinite(value)


def _points(records: Sequence[Mapping[str, float]], name: str) -> dict[float, float]:
    """Step -> value, in the order of steps; of two lines about one step the later counts."""
    points = {record["step"]: record[name] for record in records if name in record}
    return dict(sorted(points.items()))


def _of_group(records: Sequence[Mapping[str, float]], group: Group) -> list[Series]:
    """Series of a group; a right axis is there beside a left one alone."""
    found: list[Series] = []
    for name, colour in zip(group.left + group.right, COLOURS, strict=False):
        points = _points(records, name)
        if group.log:
            points = {step: value for step, value in points.items() if value > 0}
        if points:
            right = name in group.right and any(each.label in group.left for each in found)
            label = f"{name} (right)" if right else name
            style: Style = "--" if right or name in group.dashed else "-"
            found.append(Series(label, points, colour, style, right))
    return found


def _by_budget(records: Sequence[Mapping[str, float]], measure: str) -> list[Series]:
    """One colour per number of sampling steps, for averaged and raw weights alike."""
    names = {name for record in records for name in record}
    form = re.compile(rf"{measure}_([1-9]\d*)(_raw)?")
    found = sorted((int(m[1]), m[2] or "") for m in map(form.fullmatch, names) if m)
    budgets, series = sorted({steps for steps, _ in found}), []
    for steps, raw in found:
        name = f"{measure}_{steps}{raw}"
        points, known = _points(records, name), _points(records, f"{name}_se")
        errors = [known.get(step, 0.0) for step in points] if known else None
        label = "1 step" if steps == 1 else f"{steps} steps"
        colour = COLOURS[budgets.index(steps) % len(COLOURS)]
        style: Style = "--" if raw else "-"
        series.append(Series(label, points, colour, style, raw=bool(raw), errors=errors))
    return series


def _draw_panel(axis: "Axes", panel: Panel) -> None:
    """Draw one panel; its title and legend stand above it, where they cover no line."""
    group, tops = panel.group, [max(s.points.values()) for s in panel.series if s.right]
    right = axis.twinx() if tops else axis
    # The twin lies on top by default, and would hide the main numbers behind the lesser ones.
    axis.set_zorder(right.get_zorder() + 1)
    axis.patch.set_visible(False)
    for series in panel.series:
        _draw_series(right if series.right else axis, series, smooth=group.smooth)
    for side in {axis, right}:
        side.yaxis.set_major_formatter(_tick_label)
        side.tick_params(length=0, labelsize=FONT, labelcolor=GREY)
        side.spines[:].set_visible(False)
    axis.grid(color=LIGHT, linewidth=0.6)
    axis.set_axisbelow(True)
    if group.log:
        _make_logarithmic(axis, panel.series)
    if tops:
        right.set_ylim(0, 1.02 if group.guides else 1.08 * max(tops) or 1)
    if tops and group.guides:
        right.set_yticks([0, *group.guides])
        for level in group.guides:
            right.axhline(level, color=GREY, linewidth=0.7, alpha=0.4, zorder=0)
    _draw_legend(axis, panel)


def _draw_legend(axis: "Axes", panel: Panel) -> None:
    from matplotlib.lines import Line2D

    shown = [series for series in panel.series if not series.raw]
    lines = [Line2D([], [], label=s.label, c=s.colour, ls=s.style) for s in shown]
    if len(shown) < len(panel.series):
        lines.append(Line2D([], [], label="raw", c=GREY, ls="--"))
    rows = -(-len(lines) // LEGEND_COLUMNS)
    axis.set_title(panel.group.title, loc="left", pad=13 * rows, size=FONT + 1, weight="bold")
    legend = axis.legend(
        handles=lines,
        loc="lower left",
        bbox_to_anchor=(0, 1),
        borderpad=0.2,
        borderaxespad=0.1,
        ncols=-(-len(lines) // rows),
        fontsize=FONT,
        frameon=False,
        handlelength=1.6,
        handletextpad=0.5,
        columnspacing=1.0,
    )
    legend.set_in_layout(False)  # a wide one would make all panels narrow


def _draw_series(axis: "Axes", series: Series, *, smooth: bool) -> None:
    """Draw a short series with its points, a long one as a running mean over a thin raw line."""
    steps, values = np.array(list(series.points.items())).T
    style, colour = series.style, series.colour
    if smooth and len(values) >= SMOOTHED:
        axis.plot(steps, values, color=colour, linewidth=0.5, alpha=0.3)
        axis.plot(steps, running_mean(values, len(values) // 20 | 1), style, color=colour, lw=1.4)
        return
    marked = style if len(values) >= SMOOTHED else f"o{style}"
    look: dict[str, Any] = {"elinewidth": 0.8, "capsize": 1.5, "markersize": 2.5}
    axis.errorbar(steps, values, series.errors, fmt=marked, color=colour, linewidth=1.3, **look)


def _make_logarithmic(axis: "Axes", series: Sequence[Series]) -> None:
    """Use a logarithmic scale, unless the values are so close that it would have no ticks."""
    from matplotlib.ticker import LogLocator, NullLocator

    values = [value for each in series for value in each.points.values()]
    decades = math.log10(max(values) / min(values))
    if decades < 1:
        return
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 3.0) if decades < 3 else (1.0,)))
    axis.yaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_formatter(_tick_label)


def _tick_label(value: float, _: float) -> str:
    """Write each number whole: a factor common to all of them would stand where the legend is."""
    return f"{value / 1000:g}k" if abs(value) >= 10_000 else f"{value:.4g}"
