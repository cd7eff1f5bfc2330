"""Pictures of protein structures: C-alpha traces coloured by confidence, in a grid."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from didi_instruct.errors import MissingExtraError, UserError
from didi_instruct.proteins.structures import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CONFIDENCE = (
    (90.0, "#0053d6", "above 90"),
    (70.0, "#65cbf3", "70 to 90"),
    (50.0, "#ffdb13", "50 to 70"),
    (-1.0, "#ff7d45", "below 50"),
)
"""AlphaFold's colours: pLDDT above which each holds, the colour, and what it means."""

INK, SOFT, PAPER = "#23211e", "#77716a", "#ffffff"
_POINTS = 6  # of the curve between two residues
_INCHES = 2.1  # of a panel


@dataclass(frozen=True, slots=True)
class Panel:
    """A chain and the lines under it."""

    trace: Trace
    caption: str


def confidence_colour(plddt: float) -> str:
    """Return AlphaFold's colour of a pLDDT from 0 to 100."""
    return next(colour for least, colour, _ in CONFIDENCE if plddt > least or least < 0)


def principal_view(positions: NDArray[np.float64]) -> NDArray[np.float64]:
    """Centre and turn positions (L, 3) so that they spread most along x, then y, then z.

    The turn is a rotation, never a reflection: helices keep their handedness. Of the axes' signs,
    which the spread leaves open, the first residue stands to the left and above.
    """
    centred = positions - positions.mean(0)
    axes = np.linalg.svd(centred, full_matrices=False)[2] if len(positions) > 2 else np.eye(3)
    for row in (0, 1):
        if (centred[0] @ axes[row] > 0) == (row == 0):
            axes[row] = -axes[row]
    axes[2] = np.cross(axes[0], axes[1])
    return np.asarray(centred @ axes.T)


def smooth_curve(positions: NDArray[np.float64], points: int = _POINTS) -> NDArray[np.float64]:
    """Catmull-Rom curve through positions (L, 3), with `points` steps between two residues."""
    if len(positions) < 2:
        return positions
    before = 2 * positions[0] - positions[1]
    after = 2 * positions[-1] - positions[-2]
    p = np.concatenate([before[None], positions, after[None]])
    a, b, c, d = (p[n : n + len(positions) - 1, None] for n in range(4))
    t = (np.arange(points) / points)[None, :, None]
    curve = (
        2 * b + (c - a) * t + (2 * a - 5 * b + 4 * c - d) * t**2 + (3 * b - 3 * c + d - a) * t**3
    ) / 2
    return np.concatenate([curve.reshape(-1, 3), positions[-1:]])


def draw_structures(
    panels: Sequence[Panel], path: Path, *, title: str = "", columns: int = 5
) -> None:
    """Draw chains in a grid, captions under them, to an image file (.png, .svg, .pdf)."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.lines import Line2D
    except ImportError as error:
        raise MissingExtraError("Pictures of structures", "eval") from error
    if not panels:
        raise UserError(f"{path}: there is no structure to draw.")
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    head, foot, caption = 0.45 if title else 0.15, 0.5, 0.55
    width = max(columns * _INCHES, 4.5) + 0.3
    height = rows * (_INCHES + caption) + head + foot
    figure = Figure(figsize=(width, height), facecolor=PAPER)
    for n, panel in enumerate(panels):
        row, column = divmod(n, columns)
        left = 0.15 + column * (width - 0.3) / columns
        bottom = height - head - row * (_INCHES + caption) - _INCHES
        box = (left / width, bottom / height, (width - 0.3) / columns / width, _INCHES / height)
        axes = figure.add_axes(box)
        _draw_trace(axes, panel.trace)
        axes.text(
            0.5, -0.03, panel.caption, transform=axes.transAxes, ha="center", va="top",
            fontsize=8, color=INK, linespacing=1.35, parse_math=False,
        )  # fmt: skip
    if title:
        figure.text(
            0.5, 1 - 0.1 / height, title, ha="center", va="top", fontsize=11, color=INK,
            parse_math=False,
        )  # fmt: skip
    marks = [Line2D([], [], color=colour, lw=4, label=label) for _, colour, label in CONFIDENCE]
    figure.legend(
        handles=marks, loc="lower center", ncols=4, frameon=False, fontsize=8, labelcolor=SOFT,
        title="pLDDT", title_fontsize=8, handlelength=1.2,
    )  # fmt: skip
    figure.savefig(path, dpi=160)


def _draw_trace(axes: "Axes", trace: Trace) -> None:
    """Draw a chain as a tube: near parts over far ones, each with a rim of the paper's colour."""
    from matplotlib.collections import LineCollection
    from matplotlib.colors import to_rgb

    axes.set_axis_off()
    axes.set_aspect("equal", adjustable="box")
    if len(trace.positions) < 2:
        return
    curve = smooth_curve(principal_view(trace.positions))
    # Each half of a stretch between residues belongs to the residue that is nearer.
    owner = (np.arange(len(curve) - 1) + _POINTS // 2) // _POINTS
    near = _near(curve[:, 2])
    order = np.argsort((curve[:-1, 2] + curve[1:, 2]) / 2)
    flat = curve[:, :2]
    ahead = 0.3 * np.diff(flat, axis=0)  # so that no seam opens where the tube bends
    rims = np.stack([flat[:-1], flat[1:]], 1)
    tubes = np.stack([flat[:-1] - ahead, flat[1:] + ahead], 1)
    lines, colours, widths = [], [], []
    for n in order:
        depth = near[n]
        fog = 0.45 * (1 - depth)
        colour = np.array(to_rgb(confidence_colour(trace.plddt[owner[n]])))
        width = 1.6 + 1.4 * depth
        lines += [rims[n], tubes[n]]
        colours += [to_rgb(PAPER), tuple(colour * (1 - fog) + np.array(to_rgb(PAPER)) * fog)]
        widths += [width + 1.6, width]
    axes.add_collection(LineCollection(lines, colors=colours, linewidths=widths, capstyle="butt"))
    middle = (curve.max(0) + curve.min(0)) / 2
    reach = max(float(np.ptp(curve[:, :2], axis=0).max()) / 2, 1.0) * 1.06
    axes.set_xlim(middle[0] - reach, middle[0] + reach)
    axes.set_ylim(middle[1] - reach, middle[1] + reach)


def _near(depth: NDArray[np.float64]) -> NDArray[np.float64]:
    """Depth as a share, from 0 (farthest) to 1 (nearest)."""
    return np.asarray((depth - depth.min()) / max(float(np.ptp(depth)), 1e-9))
