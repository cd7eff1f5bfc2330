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
POINTS_PER_BUCKET = 256
"""Points per bucket that k-means learns from; it takes a sample of more."""


@dataclass(frozen=True, slots=True, eq=False)
class Mauve:
    """The result, and what it rests on."""

    value: float
    """Area under the curve."""
    curve: NDArray[np.float64]
    """(27, 2): exp(-scale KL) of reference and samples to each mixture, from end to end."""
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
    `buckets` is a tenth of the smaller side. k-means starts `redo` times, with fewer than
    `iterations` each where they would take too long, which depends on the sizes alone: the same
    texts give the same number on any machine.
    """
    if buckets != "auto" and buckets < 2:
        raise UserError(f"buckets is {buckets}: use 2 or more.")
    library = _library()
    p, q = (
        _vectors(side, texts, features, max_texts)
        for side, texts in (("samples", sample_texts), ("reference texts", reference_texts))
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
    return Mauve(value, result.divergence_curve, number, len(p), len(q), bound)


def _library() -> Any:
    try:
        return importlib.import_module("mauve")
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
