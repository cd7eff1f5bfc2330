"""MAUVE: how alike samples and reference texts are, by the library of its authors (`mauve-text`).

Texts are vectors, vectors are sorted into buckets by k-means, and the histograms of both sides are
compared along all their mixtures: 1 where they are equal, 0 where they are disjoint. The settings
are the library's defaults.
"""

import importlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from didi_instruct.errors import MissingExtraError, UserError
from didi_instruct.evaluation.stats import Numbers

Features = Callable[[Sequence[str]], NDArray[np.float32]]
"""Vectors of texts: (N, d)."""

FEWEST = 20
"""Texts on either side below which two buckets say nothing."""
MOST, SEED, SCALE, STARTS = 5000, 25, 5.0, 5
"""Texts of a side that count; settings of k-means and of the curve."""
ITERATIONS, WORK = 500, 10**13
"""Of k-means from each start, at most; and multiplications it may take, minutes on two cores."""
RESAMPLES = 500
MIXTURES = 25
"""Points of the curve between its ends, as many as the library's."""
POINTS_PER_BUCKET = 256
"""Points per bucket that k-means learns from; it takes a sample of more."""


class Mauve(NamedTuple):
    """The result, and how many texts it rests on."""

    value: float
    ci95: tuple[float, float]
    samples: int
    reference: int


def mauve_score(
    sample_texts: Sequence[str],
    reference_texts: Sequence[str],
    features: Features,
    *,
    seed: int = SEED,
) -> Mauve:
    """MAUVE of samples and reference, of the first texts of each side; empty ones are left out.

    The library gets the reference first, as is the custom: the order decides where k-means starts,
    and so the number. There is a bucket for ten texts of the smaller side. k-means is cut short
    where it would take too long, which depends on the sizes alone: the same texts give the same
    number on any machine.
    """
    library = _library()
    p = _vectors("reference texts", reference_texts, features)
    q = _vectors("samples", sample_texts, features)
    _require_variety(np.vstack([p, q]))
    buckets = max(2, round(min(len(p), len(q)) / 10))
    points = min(len(p) + len(q), POINTS_PER_BUCKET * buckets)
    work = STARTS * points * buckets * p.shape[1]
    with _silence():
        result = library.compute_mauve(
            p_features=p,
            q_features=q,
            num_buckets=buckets,
            kmeans_num_redo=STARTS,
            kmeans_max_iter=max(1, min(ITERATIONS, WORK // work)),
            mauve_scaling_factor=SCALE,
            seed=seed,
            verbose=False,
        )
    # For equal histograms the library joins the ends of the curve in arbitrary order: 0.75 or 1.
    equal = np.array_equal(result.p_hist, result.q_hist)
    value = 1.0 if equal else float(result.mauve)
    interval = mauve_interval(value, result.p_hist, result.q_hist, len(p), len(q), seed)
    return Mauve(value, interval, len(q), len(p))


def mauve_interval(
    value: float, p: Numbers, q: Numbers, num_p: int, num_q: int, seed: int = SEED
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
    found = np.array([area(one, other) for one, other in zip(*drawn, strict=True)])
    low, high = value * np.quantile(found, [0.025, 0.975]) / found.mean()
    return float(low), min(1.0, float(high))


def area(p: Numbers, q: Numbers) -> float:
    """MAUVE of two histograms: the library's curve, and the area under it from either side."""
    if np.array_equal(p, q):
        return 1.0
    curve = _library("mauve.compute_mauve").get_divergence_curve_for_multinomials
    x, y = curve(p, q, np.linspace(1e-6, 1 - 1e-6, MIXTURES), SCALE).T
    across, up = np.argsort(x), np.argsort(y)
    return float(np.trapezoid(y[across], x[across]) + np.trapezoid(x[up], y[up])) / 2


def _library(name: str = "mauve") -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtraError("MAUVE", "eval") from error


def _vectors(side: str, texts: Sequence[str], features: Features) -> NDArray[np.float32]:
    kept = [text for text in texts[:MOST] if text.strip()]
    if len(kept) < FEWEST:
        raise UserError(
            f"MAUVE compares histograms, and {len(kept)} {side} (without empty ones) are too few: "
            f"give {FEWEST} or more; its authors advise thousands."
        )
    vectors = features(kept)
    if not np.isfinite(vectors).all():
        raise UserError("The judge's features are not finite: its weights are damaged.")
    return vectors


def _require_variety(vectors: NDArray[np.float32]) -> None:
    """Refuse vectors that all point in one direction, the only thing that counts of them."""
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
