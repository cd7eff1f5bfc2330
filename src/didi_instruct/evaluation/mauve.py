"""MAUVE: how alike samples and reference texts are, by the library of its authors (`mauve-text`).

Texts are vectors, vectors are sorted into buckets by k-means, and the histograms of both sides are
compared along all their mixtures: 1 where they are equal, 0 where they are disjoint.
"""

import importlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from didi_instruct.errors import MissingExtraError, UserError

Features = Callable[[Sequence[str]], NDArray[np.float32]]
"""Texts to vectors (N, d): `CausalJudge.features`."""

FEWEST = 20
"""Texts on either side below which two buckets say nothing."""
WORK = 10**13
"""Multiplications that k-means may take, a few minutes on two cores."""
RESAMPLES = 500
MIXTURES = 25
"""Points of the curve between its ends, as many as the library's."""
POINTS_PER_BUCKET = 256
"""Points per bucket that k-means learns from; it takes a sample of more."""


@dataclass(frozen=True, slots=True, eq=False)
class Mauve:
    """The result, and what it rests on."""

    value: float
    """Area under the curve."""
    ci95: tuple[float, float]
    """Bootstrap over texts, the buckets held fixed: see `mauve_interval`."""
    curve: NDArray[np.float64]
    """(27, 2): exp(-scale KL) of samples and reference to each mixture, from end to end."""
    buckets: int
    samples: int
    """Texts that were compared."""
    reference: int
    iterations: int
    """Bound on the iterations of k-means."""


def mauve_score(
    sample_texts: Sequence[str],
    reference_texts: Sequence[str],
    features: Features,
    *,
    scale: float = 5.0,
    max_texts: int | None = 5000,
    seed: int = 25,
    buckets: int | Literal["auto"] = "auto",
    redo: int = 5,
    iterations: int = 500,
) -> Mauve:
    """MAUVE of samples and reference; the settings are the library's, and so are their defaults.

    Of each side the first `max_texts` texts count; empty ones are left out, as by the library.
    The library gets the reference first, as is the custom: the order decides where k-means starts,
    and so the number. `buckets` is a tenth of the smaller side. k-means starts `redo` times, with
    fewer than `iterations` each where they would take too long, which depends on the sizes alone:
    the same texts give the same number on any machine.
    """
    if buckets != "auto" and buckets < 2:
        raise UserError(f"buckets is {buckets}: use 2 or more.")
    library = _library()
    p, q = (
        _vectors(side, texts, features, max_texts)
        for side, texts in (("reference texts", reference_texts), ("samples", sample_texts))
    )
    number = max(2, round(min(len(p), len(q)) / 10)) if buckets == "auto" else buckets
    if number > len(p) + len(q):
        raise UserError(f"buckets is {number}, but there are {len(p) + len(q)} texts: use fewer.")
    _require_variety(p, q)
    points = min(len(p) + len(q), POINTS_PER_BUCKET * number)
    bound = max(1, min(iterations, WORK // (redo * points * number * p.shape[1])))
    with _silence():
        result = library.compute_mauve(
            p_features=p,
            q_features=q,
            num_buckets=number,
            kmeans_num_redo=redo,
            kmeans_max_iter=bound,
            mauve_scaling_factor=scale,
            seed=seed,
            verbose=False,
        )
    # For equal histograms the library joins the ends of the curve in arbitrary order: 0.75 or 1.
    equal = np.array_equal(result.p_hist, result.q_hist)
    value = 1.0 if equal else float(result.mauve)
    interval = mauve_interval(value, result.p_hist, result.q_hist, len(p), len(q), scale, seed)
    return Mauve(value, interval, result.divergence_curve, number, len(q), len(p), bound)


def mauve_interval(
    value: float,
    p: NDArray[np.float64],
    q: NDArray[np.float64],
    num_p: int,
    num_q: int,
    scale: float = 5.0,
    seed: int = 25,
) -> tuple[float, float]:
    """95% interval of MAUVE from both histograms (K,): texts are drawn again from their buckets.

    MAUVE falls with the noise of its histograms, and a resample adds noise to that of the data: all
    would lie below the value. So their quantiles, as ratios to their mean, are laid around the
    value, and the interval is about the mean of MAUVE at this number of texts. It leaves out the
    buckets, which other texts or another seed of k-means would choose differently, and how far
    MAUVE lies from what endless texts would give. It is too wide where both sides have nearly one
    law.
    """
    generator = np.random.default_rng(seed)
    drawn = [
        generator.multinomial(count, histogram / histogram.sum(), size=RESAMPLES) / count
        for count, histogram in ((num_p, p), (num_q, q))
    ]
    found = np.array([_area(one, other, scale) for one, other in zip(*drawn, strict=True)])
    low, high = value * np.quantile(found, [0.025, 0.975]) / found.mean()
    return float(low), min(1.0, float(high))


def _area(p: NDArray[np.float64], q: NDArray[np.float64], scale: float) -> float:
    """MAUVE of two histograms: the library's curve, and the area under it from either side."""
    if np.array_equal(p, q):
        return 1.0
    curve = _library("mauve.compute_mauve").get_divergence_curve_for_multinomials
    x, y = curve(p, q, np.linspace(1e-6, 1 - 1e-6, MIXTURES), scale).T
    across, up = np.argsort(x), np.argsort(y)
    return float(np.trapezoid(y[across], x[across]) + np.trapezoid(x[up], y[up])) / 2


def _library(name: str = "mauve") -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtraError("MAUVE", "eval") from error


def _vectors(
    side: str, texts: Sequence[str], features: Features, max_texts: int | None
) -> NDArray[np.float32]:
    kept = [text for text in texts[:max_texts] if text.strip()]
    if len(kept) < FEWEST:
        raise UserError(
            f"MAUVE compares histograms, and {len(kept)} {side} (without empty ones) are too few: "
            f"give {FEWEST} or more; its authors advise thousands."
        )
    vectors = features(kept)
    if not np.isfinite(vectors).all():
        raise UserError("The judge's features are not finite: its weights are damaged.")
    return vectors


def _require_variety(p: NDArray[np.float32], q: NDArray[np.float32]) -> None:
    """Refuse vectors that all point in one direction, the only thing that counts of them."""
    vectors = np.vstack([p, q])
    directions = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-30)
    if np.abs(directions - directions[0]).max() < 1e-5:
        raise UserError(
            "All texts, samples and reference, look the same to the judge, so MAUVE has nothing to "
            "compare: give different texts, or another judge."
        )


@contextmanager
def _silence() -> Iterator[None]:
    """Keep a library's C++ part from writing to the terminal, and Python from warning."""
    sys.stderr.flush()
    saved, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nowhere)
