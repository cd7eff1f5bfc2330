"""The best temperature and top-p of a sampler by vsF, chosen on some samples and told of others.

A sampler without a path KL (one that rewrites tokens, is guided, or has no masks) has vsF alone to
choose a setting by. The lowest of many ratios, told of the samples that chose it, is low by luck,
of one that gains nothing too. So half of the samples choose, and the other half say how good it is.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from didi_instruct.evaluation.comparison import ONE_SAMPLER, compare
from didi_instruct.evaluation.measuring import Measured, Row
from didi_instruct.training.likelihood import perplexity

NAME = "vsf_best"
NEEDED = ("nats", "tokens", "entropy")
"""Per-sample numbers that vsF is made of."""


Half = Mapping[int, Row]
"""Rows of every second sample by their number; those that lack what vsF is made of are missing."""


def best_by_vsf(rows: Sequence[Measured], baseline: Sequence[Measured], seed: int = 0) -> list[Row]:
    """`vsf_best` of every row: of its sampler at the temperature and top-p that one half chooses.

    It is told of the other half, with an interval over that, and `vsf_best_at` is the choice. Rows
    that differ in temperature and top-p alone have the same. Null where no setting has a vsF in the
    first half, or the chosen one has none in the second.
    """
    choosing, telling = (_half(rows, baseline, first, seed) for first in (0, 1))
    found: list[Row] = []
    for each in rows:
        kin = [number for number, other in enumerate(rows) if _one_sampler(each, other)]
        found.append(_told(kin, choosing, telling))
    return found


def _half(rows: Sequence[Measured], baseline: Sequence[Measured], first: int, seed: int) -> Half:
    """Perplexity, entropy and vsF of every second sample, the first of which is `first`."""
    usable = [number for number, each in enumerate(rows) if _usable(each)]
    ours = [_every_second(rows[number], first) for number in usable]
    theirs = [_every_second(each, first) for each in baseline if _usable(each)]
    return dict(zip(usable, compare(ours, theirs, seed=seed), strict=True))


def _told(kin: Iterable[int], choosing: Half, telling: Half) -> Row:
    known = {number: choosing[number].get("vsf") for number in kin if number in choosing}
    values = [(value, number) for number, value in known.items() if value is not None]
    if not values:
        note = "no setting has a vsF on the half of the samples that chooses"
        return {NAME: None, f"{NAME}_ci95": None, f"{NAME}_note": note}
    row = telling[min(values)[1]]
    return {
        NAME: row.get("vsf"),
        f"{NAME}_ci95": row.get("vsf_ci95"),
        f"{NAME}_at": [row["temperature"], row["top_p"]],
        **({f"{NAME}_note": row["vsf_note"]} if row.get("vsf_note") else {}),
    }


def _usable(each: Measured) -> bool:
    """Whether vsF can be computed of half of it."""
    values = [each.values.get(name) for name in NEEDED]
    return all(v is not None and len(v) > 1 and np.isfinite(v).all() for v in values)


def _every_second(each: Measured, first: int) -> Measured:
    """Samples `first`, `first` + 2, ... with the perplexity and entropy of those alone."""
    count = len(each.values["nats"]) // 2  # as many in both halves
    values = {name: each.values[name][first : 2 * count : 2] for name in NEEDED}
    row = {
        **{name: each.row.get(name) for name in (*ONE_SAMPLER, "passes", "batch_size")},
        "temperature": each.row["temperature"],
        "top_p": each.row["top_p"],
        "num_samples": count,
        "ppl": perplexity(values["nats"].sum() / values["tokens"].sum()),
        "entropy": values["entropy"].mean(),
    }
    return Measured(row, values)


def _one_sampler(one: Measured, other: Measured) -> bool:
    """Whether two rows differ in temperature and top-p alone."""
    return all(one.row.get(name) == other.row.get(name) for name in ONE_SAMPLER)
