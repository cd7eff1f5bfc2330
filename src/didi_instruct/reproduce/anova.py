"""Which settings matter: a Latin hypercube of settings, and functional ANOVA of what they give.

The design spreads points evenly over every setting at once (SciPy). The importance of a setting is
the share of the variance that its main effect explains, read from a random forest that was fitted
to the points (Optuna's fANOVA). The forest sees settings as places between 0 and 1 of their own
range, so that shares are those of the design.

A forest grown to single points takes much of the noise for interaction: shares of noisy numbers sum
to less than 1, and `rest` is what is left, interaction and noise together. With few points in many
dimensions it also flatters the strongest setting.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from didi_instruct.errors import MissingExtraError, UserError

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
        """Where a value lies, between 0 and 1; whole numbers amid their part."""
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
    """What no main effect explains: interaction, and noise."""
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
