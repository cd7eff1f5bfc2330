"""How much h and M of RGAS matter: shares of the variance of perplexity and entropy.

As in the paper: a Latin hypercube of settings, few samples each, functional ANOVA for each budget.
With few samples a perplexity is noisy, which raises the `rest`.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from didi_instruct.errors import UserError
from didi_instruct.evaluation.measuring import Row
from didi_instruct.evaluation.report.figures import FONT, INK, SOFT, new_figure
from didi_instruct.evaluation.stats import around
from didi_instruct.evaluation.training_curves import COLOURS
from didi_instruct.reproduce.anova import Parameter, importances, latin_hypercube
from didi_instruct.reproduce.landscape import Strength
from didi_instruct.reproduce.paper import ANOVA_CANDIDATES, ANOVA_SCALES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PARAMETERS = {"h": "h", "candidates": "M", "rest": "both together, noise"}
HUES = (*COLOURS[:2], "#cccccc")
VALUES = ("ppl", "entropy")


def design(
    num: int,
    seed: int = 0,
    scales: tuple[float, float] = ANOVA_SCALES,
    candidates: tuple[int, int] = ANOVA_CANDIDATES,
) -> list[Strength]:
    """A Latin hypercube over h and M; by default the paper's ranges."""
    points = latin_hypercube(_parameters(scales, candidates), num, seed)
    return [(float(point["h"]), int(point["candidates"])) for point in points]


def _parameters(scales: tuple[float, float], candidates: tuple[int, int]) -> list[Parameter]:
    return [
        Parameter(name="h", scale="linear", low=scales[0], high=scales[1]),
        Parameter(name="candidates", scale="integer", low=candidates[0], high=candidates[1]),
    ]


def shares(
    rows: Sequence[Row],
    scales: tuple[float, float] = ANOVA_SCALES,
    candidates: tuple[int, int] = ANOVA_CANDIDATES,
    *,
    seed: int = 0,
) -> list[Row]:
    """Shares of the variance of perplexity and of entropy over a design's rows, for each budget.

    A row of the answer is a parameter (or the `rest`) at one budget: `ppl_share` and
    `entropy_share`, their intervals over points of the design, and how many points there were.
    """
    parameters, found = _parameters(scales, candidates), []
    for nfe in dict.fromkeys(row["nfe"] for row in rows):
        here = [row for row in rows if row["nfe"] == nfe]
        usable = [row for row in here if row["ppl"] is not None and row["entropy"] is not None]
        answer: dict[str, Row] = {name: {} for name in PARAMETERS}
        for column in VALUES:
            told = importances(parameters, usable, [row[column] for row in usable], seed=seed)
            for name, row in answer.items():
                share, error = told.shares.get(name, told.rest), told.errors.get(name)
                row[f"{column}_share"] = share
                row[f"{column}_share_ci95"] = None if error is None else around(share, error)
        facts = {
            "nfe": nfe,
            "points": len(usable),
            "points_without_number": len(here) - len(usable),
        }
        facts |= {name: here[0][name] for name in ("num_samples", "seed")}
        found += [{"parameter": name, **facts, **row} for name, row in answer.items()]
    return found


def draw_shares(
    rows: Sequence[Row], paper: Mapping[int, Mapping[str, float]] | None = None
) -> "Figure":
    """Shares of the variance of perplexity as bars, ours beside the paper's for each budget."""
    if not rows:
        raise UserError("There are no shares to draw.")
    bars: list[tuple[str, dict[str, float]]] = []
    for nfe in dict.fromkeys(row["nfe"] for row in rows):
        ours = {r["parameter"]: r["ppl_share"] for r in rows if r["nfe"] == nfe}
        bars.append((f"{nfe} NFE, ours", ours))
        if paper and nfe in paper:
            theirs = dict(paper[nfe])
            bars.append(
                (f"{nfe} NFE, paper", theirs | {"rest": max(0.0, 1 - sum(theirs.values()))})
            )
    height = 26 * len(bars) + 76
    figure = new_figure(430, height)
    axis = figure.add_axes((0.24, 44 / height, 0.69, 26 * len(bars) / height))
    for place, (_, parts) in enumerate(reversed(bars)):
        left = 0.0
        for colour, name in zip(HUES, PARAMETERS, strict=True):
            share = max(0.0, parts[name])
            axis.barh(place, share, left=left, height=0.72, color=colour)
            if share >= 0.08:
                ink = "black" if name == "rest" else "white"
                axis.text(
                    left + share / 2, place, f"{share:.0%}", ha="center", va="center",
                    fontsize=FONT - 2, color=ink,
                )  # fmt: skip
            left += share
    axis.set_yticks(range(len(bars)), [name for name, _ in reversed(bars)])
    axis.set_xlim(0, 1)
    axis.set_xticks([0, 0.5, 1], ["0%", "50%", "100%"])
    axis.tick_params(length=0, labelsize=FONT - 1, labelcolor=SOFT)
    axis.spines[:].set_visible(False)
    _name_parts(figure)
    words = "share of the variance of perplexity"
    figure.text(0.24, 6 / height, words, fontsize=FONT - 1, color=SOFT)
    return figure


def _name_parts(figure: "Figure") -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=c, label=n) for c, n in zip(HUES, PARAMETERS.values(), strict=True)]
    figure.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(0.22, 1), ncols=3, frameon=False,
        fontsize=FONT - 1, labelcolor=INK, handlelength=1.0, borderaxespad=0.2,
    )  # fmt: skip
