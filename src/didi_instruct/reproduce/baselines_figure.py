"""Plot of the baselines: perplexity over entropy, a panel for each NFE, every sweep a thin line."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from didi_instruct.errors import UserError
from didi_instruct.evaluation.measuring import Row
from didi_instruct.evaluation.report.figures import (
    FONT,
    INK,
    MARKERS,
    SOFT,
    finite,
    new_figure,
    set_scale,
)
from didi_instruct.reproduce.baseline_rows import TEACHER
from didi_instruct.reproduce.figures import PALETTE, new_axis

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANEL, HEIGHT, LEFT, BETWEEN, FOOT, ENTRY, WORDS = 300, 250, 74, 70, 92, 16, 230
"""Points: of a panel, beside, between and below panels, of a line of the legend and its width."""
ACROSS = 3
"""Panels in a row."""
FAR, ABOVE = 3, 1.0
"""Widths of the middle half of the plain settings beyond which a method is left out of view: of
entropy, and upwards of the logarithm of perplexity."""
Look = tuple[str, str, bool]
"""Colour, marker, and whether it is filled: open for what was not trained to take few steps."""


def draw_baselines(rows: Sequence[Row], title: str = "") -> "Figure":
    """Draw all rows that have perplexity and entropy.

    Large marks are plain settings, small ones those of the sweep. Methods that take a step per
    token are grey and the same in all panels.
    """
    usable = [row for row in rows if finite(row["ppl"]) and finite(row["entropy"])]
    budgets = _budgets(usable)
    if not budgets:
        raise UserError("The baselines have no two methods at one NFE to draw.")
    shown = [r for r in usable if r["own_steps"] or r["nfe"] in budgets]
    looks = _looks(shown)
    across, rows_of_panels = min(len(budgets), ACROSS), -(-len(budgets) // ACROSS)
    width = max(LEFT + across * (PANEL + BETWEEN), 2 * WORDS + 20)
    columns = int((width - 10) // WORDS)
    legend = ENTRY * -(-len(looks) // columns) + 2 + (20 if title else 0)
    height = FOOT + (rows_of_panels - 1) * (HEIGHT + BETWEEN) + HEIGHT + 28 + legend
    figure = new_figure(width, height)
    low, high, cut = _window(shown)
    worse: dict[str, list[int]] = {}
    for place, nfe in enumerate(budgets):
        down = rows_of_panels - 1 - place // ACROSS
        left = LEFT + place % ACROSS * (PANEL + BETWEEN)
        axis = new_axis(
            figure, (left, FOOT + down * (HEIGHT + BETWEEN), PANEL, HEIGHT), f"{nfe} NFE"
        )
        here = [r for r in shown if r["own_steps"] or r["nfe"] == nfe]
        for method, look in reversed(looks.items()):  # the baseline, which is first, on top
            _draw_method(axis, [r for r in here if r["method"] == method], look)
        axis.set_xlim(low, high)
        axis.locator_params(axis="x", nbins=5)
        axis.set_xlabel("entropy, nats", fontsize=FONT - 1, color=SOFT)
        within, above = _below([r for r in here if low <= r["entropy"] <= high])
        set_scale(axis, within or [row["ppl"] for row in here])
        for method in above:
            worse.setdefault(method, []).append(nfe)
        if not place % ACROSS:
            axis.set_ylabel("perplexity", fontsize=FONT - 1, color=SOFT)
    _legend(figure, looks, shown, columns, 1 - (20 / height if title else 0))
    words = "large marks: plain sampling; small ones: temperature (solid) and top-p (dotted)"
    words += f"\noutside to the side: {'; '.join(cut)}" if cut else ""
    far = [f"{method} ({', '.join(map(str, nfes))} NFE)" for method, nfes in worse.items()]
    words += f"\nfar above: {'; '.join(far)}" if far else ""
    figure.text(8 / width, 10 / height, words, fontsize=FONT - 1, color=SOFT)
    if title:
        figure.text(8 / width, 1 - 15 / height, title, fontsize=FONT, color=INK, parse_math=False)
    return figure


def _window(rows: Sequence[Row]) -> tuple[float, float, list[str]]:
    """Ends of the axis of entropy, and methods with a plain setting outside.

    One method whose texts are far poorer than all others' would press those into a corner: what
    lies farther from the middle half of the plain settings than three times its width is cut.
    """
    everything = [row["entropy"] for row in rows]
    first, last = np.quantile([row["entropy"] for row in rows if _is_plain(row)], (0.25, 0.75))
    reach = FAR * (last - first) or np.inf
    near = [value for value in everything if first - reach <= value <= last + reach]
    low, high = min(near), max(near)
    room = 0.06 * (high - low) or 0.1
    outside = [r["method"] for r in rows if _is_plain(r) and not low <= r["entropy"] <= high]
    return low - room, high + room, list(dict.fromkeys(outside))


def _below(rows: Sequence[Row]) -> tuple[list[float], list[str]]:
    """Perplexities of a panel that are in view, and methods whose plain setting lies above.

    What is far better than the others is what the panel is for; what is far worse would press them
    together.
    """
    heights = {row["method"]: np.log(row["ppl"]) for row in rows if _is_plain(row)}
    first, last = np.quantile([*heights.values()] or [0.0], (0.25, 0.75))
    highest = last + (ABOVE * (last - first) or np.inf)
    outside = [method for method, height in heights.items() if height > highest]
    return [row["ppl"] for row in rows if row["method"] not in outside], outside


def _is_plain(row: Row) -> bool:
    return (row["temperature"], row["top_p"]) == (1, 1)


def _budgets(rows: Sequence[Row]) -> list[int]:
    """NFEs at which the teacher and something that was trained are compared."""
    roles: dict[int, dict[str, str]] = {}
    for row in rows:
        if not row["own_steps"]:
            roles.setdefault(row["nfe"], {})[row["method"]] = row["role"]
    return sorted(n for n, of in roles.items() if len(of) > 1 and {*of.values()} != {TEACHER})


def _looks(rows: Sequence[Row]) -> dict[str, Look]:
    """The baseline in ink; what needs no training open, what is distilled filled."""
    found: dict[str, Look] = {}
    counts = {True: 0, False: 0}
    for row in rows:
        method, filled = row["method"], not row["role"].endswith("teacher")
        if method in found:
            continue
        number = counts[filled]
        if row["is_baseline"]:
            found[method] = (INK, "o", True)
        elif row["own_steps"]:
            found[method] = (SOFT, "*" if row["role"] == "ar" else "P", True)
        else:
            colours = PALETTE[1:]  # ink is the baseline's
            colour = colours[(counts[True] + counts[False]) % len(colours)]
            found[method] = (colour, MARKERS[number % len(MARKERS)], filled)
            counts[filled] += 1
    return found


def _draw_method(axis: "Axes", rows: Sequence[Row], look: Look) -> None:
    """Sweeps of temperature (solid) and of top-p (dashed), which meet in the plain setting."""
    colour, marker, filled = look
    for name, other, style in (("temperature", "top_p", "-"), ("top_p", "temperature", ":")):
        line = sorted((r for r in rows if r[other] == 1), key=lambda r, n=name: r[n])  # type: ignore[misc]
        across, up = [r["entropy"] for r in line], [r["ppl"] for r in line]
        axis.plot(across, up, style, color=colour, linewidth=1.0, marker=".", ms=3, alpha=0.55)
    for row in rows:
        if _is_plain(row):
            axis.plot(
                row["entropy"], row["ppl"], marker, color=colour, markersize=8, zorder=3,
                markerfacecolor=colour if filled else "white", markeredgewidth=1.6,
            )  # fmt: skip


def _legend(
    figure: "Figure", looks: dict[str, Look], rows: Sequence[Row], columns: int, top: float
) -> None:
    from matplotlib.lines import Line2D

    steps = {row["method"]: row["nfe"] for row in rows if row["own_steps"] and _is_plain(row)}
    handles = [
        Line2D(
            [], [], linestyle="none", color=colour, marker=marker, markersize=7,
            markerfacecolor=colour if filled else "white", markeredgewidth=1.4,
            label=f"{method} ({steps[method]} NFE)" if method in steps else method,
        )
        for method, (colour, marker, filled) in looks.items()
    ]  # fmt: skip
    figure.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(0, top), ncols=columns, frameon=False,
        fontsize=FONT - 1.5, labelcolor=INK, borderaxespad=0.2, handletextpad=0.3,
        columnspacing=1.0, labelspacing=0.35,
    )  # fmt: skip
