"""Sensitivity of RGAS: functional ANOVA of h and M over a Latin hypercube (SciPy, Optuna).

The importance of a parameter is the share of the variance that its main effect explains, read from
a random forest fitted to the points of the design. The forest sees parameters scaled to 0..1 of
their range.

A forest grown to single points takes much of the noise for interaction: shares of noisy numbers sum
to less than 1, and `rest` is what is left, interaction and noise together. With few points in many
dimensions it also flatters the strongest parameter.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from didi_instruct.errors import MissingExtraError, UserError
from didi_instruct.evaluation.measuring import Row
from didi_instruct.evaluation.report.figures import FONT, INK, SOFT, new_figure
from didi_instruct.evaluation.stats import around
from didi_instruct.evaluation.training_curves import COLOURS
from didi_instruct.reproduce.paper import ANOVA_CANDIDATES, ANOVA_SCALES

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Strength = tuple[float, int]
"""h and M."""

Value = float | int
EXTRA = "reproduce"
FEWEST = 8
"""Points that a forest needs at the least."""
TREES = 64
GROUPS, FEWER = 8, 4
"""Parts of the design that are left out in turn, for the error of a share, and how many times fewer
trees these fits have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """A setting to vary."""

    name: str
    scale: Literal["linear", "integer"]
    low: float
    high: float

    def __post_init__(self) -> None:
        """Refuse ranges that hold nothing to compare."""
        if not (self.low < self.high and math.isfinite(self.low) and math.isfinite(self.high)):
            raise UserError(f"{self.name}: the range {self.low:g} to {self.high:g} is empty.")
        if self.scale == "integer" and not (self.low % 1 == 0 == self.high % 1):
            raise UserError(f"{self.name}: ends of a range of whole numbers are whole numbers.")

    def at(self, place: float) -> Value:
        """The value at a place between 0 and 1; whole numbers take equal parts."""
        if self.scale == "integer":
            return int(min(self.low + place * (self.high - self.low + 1) // 1, self.high))
        return self.low + place * (self.high - self.low)

    def place(self, value: Value) -> float:
        """Scale a value to 0..1; a whole number to the middle of its part."""
        if self.scale == "integer":
            return (value - self.low + 0.5) / (self.high - self.low + 1)
        return (value - self.low) / (self.high - self.low)


Point = Mapping[str, Value]
"""A value for every parameter, by name."""


def latin_hypercube(
    parameters: Sequence[Parameter], num: int, seed: int = 0
) -> list[dict[str, Value]]:
    """`num` settings; cut any parameter's range into `num` equal parts, and each holds one."""
    if num < 1:
        raise UserError(f"A design has {num} points: use 1 or more.")
    try:
        from scipy.stats import qmc
    except ImportError as error:
        raise MissingExtraError("A Latin hypercube", EXTRA) from error
    places = qmc.LatinHypercube(len(parameters), rng=np.random.default_rng(seed)).random(num)
    return [
        {p.name: p.at(float(x)) for p, x in zip(parameters, row, strict=True)} for row in places
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Importances:
    """Shares of the variance."""

    shares: dict[str, float]
    """Main effects, by parameter; not scaled to sum to 1."""
    errors: dict[str, float]
    """Standard errors of the shares over points of the design; empty where there are too few."""
    rest: float
    """Share that no main effect explains: interaction and noise."""
    points: int


def importances(
    parameters: Sequence[Parameter],
    points: Sequence[Point],
    values: Sequence[float],
    *,
    seed: int = 0,
    trees: int = TREES,
    groups: int = GROUPS,
) -> Importances:
    """Share of the variance of `values` that each parameter's main effect explains.

    Errors are a jackknife over `groups` parts of the points, 0 for none.
    """
    numbers = np.asarray(values, dtype=np.float64)
    assert len(points) == len(numbers)
    if len(points) < FEWEST:
        raise UserError(f"fANOVA has {len(points)} points: use {FEWEST} or more.")
    if not np.isfinite(numbers).all():
        raise UserError("fANOVA needs finite values: leave out the points that have none.")
    if np.ptp(numbers) == 0:
        raise UserError("fANOVA explains differences, and all values are equal.")
    shares = _shares(parameters, points, numbers, seed, trees)
    errors: dict[str, float] = {}
    if groups > 1 and len(points) >= FEWEST * groups:
        part = np.random.default_rng(seed).permutation(len(points)) % groups
        left, fewer = [], max(1, trees // FEWER)
        for group in range(groups):
            kept = np.flatnonzero(part != group).tolist()
            some = _shares(parameters, [points[i] for i in kept], numbers[kept], seed, fewer)
            left.append([some[p.name] for p in parameters])
        spread = np.var(left, axis=0) * (groups - 1)
        errors = {p.name: math.sqrt(s) for p, s in zip(parameters, spread, strict=True)}
    return Importances(
        shares=shares, errors=errors, rest=1 - sum(shares.values()), points=len(points)
    )


def _shares(
    parameters: Sequence[Parameter],
    points: Sequence[Point],
    values: NDArray[np.float64],
    seed: int,
    trees: int,
) -> dict[str, float]:
    """Main effects of one forest, in the order of the parameters."""
    try:
        import optuna

        import_module("sklearn")  # has the forest; optuna looks for it only when it makes one
    except ImportError as error:
        raise MissingExtraError("Functional ANOVA", EXTRA) from error
    laws: dict[str, Any] = {
        p.name: optuna.distributions.FloatDistribution(0.0, 1.0) for p in parameters
    }
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        study = optuna.create_study()
        study.add_trials(
            optuna.trial.create_trial(
                params={p.name: p.place(point[p.name]) for p in parameters},
                distributions=laws,
                value=float(value),
            )
            for point, value in zip(points, values, strict=True)
        )
        evaluator = optuna.importance.FanovaImportanceEvaluator(n_trees=trees, seed=seed)
        found = evaluator.evaluate(study)
    finally:
        optuna.logging.set_verbosity(before)
    return {p.name: float(found[p.name]) for p in parameters}


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
