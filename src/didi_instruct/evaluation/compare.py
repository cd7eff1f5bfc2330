"""Compare rows with those of a baseline: vsF, difference of path KL, share of the gap closed.

Every number is computed in columns (1 + R,): the data, then R bootstrap resamples of all samples,
those of the row and of the baseline alike. What a number chooses from the baseline (the lowest
curve, the best setting) is chosen anew in each column. Where per-sample numbers are missing there
is one column, and no interval.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from didi_instruct.evaluation.frontier import Point, cost, equal_passes, log_vsf, why_not
from didi_instruct.evaluation.measuring import Measured, Row, plain
from didi_instruct.evaluation.stats import (
    Noise,
    Numbers,
    Resampling,
    aligned,
    mean_and_error,
    reflected,
)
from didi_instruct.training.likelihood import perplexity

OTHER_ORDER = (
    "drawn in another order than the baseline: in random order path KL also holds what a text "
    "tells of its order, in a fixed one nothing, so this flatters the fixed one (ar-kl does not)"
)
NEARLY = 0.8
"""Share of a row's passes that a baseline of equal passes has at least."""
ONE_SAMPLER = ("fingerprint", "sampler", "options", "seed", "num_samples", "nfe")
"""Entries of a row that stay the same where temperature and top-p alone vary."""
PER_SAMPLE = ("nats", "tokens", "entropy")
"""Numbers of each sample that vsF is made of."""


def compare(
    rows: Sequence[Measured],
    baseline: Sequence[Measured],
    most_steps: int | None = None,
    seed: int = 0,
) -> list[Row]:
    """Add to each row its comparison with the baseline; null and a note where there is none.

    `vsf` is at equal NFE, `vsf_passes` at equal forward passes. `path_kl_vs_baseline` is against
    the baseline's best setting of equal NFE, below 0 a gain; `gap_closed` is the share of what few
    steps cost the baseline, its best settings with few and with `most_steps`. `gap_closed_best`
    is that of the row's sampler at the best temperature and top-p of that NFE, whose path KL is
    `path_kl_best`: a minimum, which flatters, and whose interval allows for that.
    """
    resampling = Resampling(seed)
    ours, theirs = ([_Entry.of(m, resampling) for m in side] for side in (rows, baseline))
    found = []
    for entry in ours:
        row = entry.row | _on_frontier(entry, theirs)
        if theirs and len(entry.path_kl):
            kin = _kin(entry, ours)
            row |= _number("path_kl_best", _lowest(kin)) | {"path_kl_best_at": _at(_best(kin))}
            row |= _path_kl_difference(entry, theirs)
            if most_steps is not None:
                row |= _gap_share("gap_closed", entry, [entry], theirs, most_steps)
                row |= _gap_share("gap_closed_best", entry, kin, theirs, most_steps)
        elif theirs and row.get("path_kl_note"):
            shares = () if most_steps is None else ("gap_closed", "gap_closed_best")
            for name in ("path_kl_vs_baseline", *shares):
                row |= _nothing(name, "this row has no path KL")
        found.append({name: plain(value) for name, value in row.items()})
    return found


def best_by_vsf(rows: Sequence[Measured], baseline: Sequence[Measured], seed: int = 0) -> list[Row]:
    """Compute `vsf_best` of each row: its sampler's vsF at the best temperature and top-p.

    For samplers without a path KL. The lowest of many ratios is biased low on the samples that
    selected it. So one half of the samples selects the setting (`vsf_best_at`), and the other half
    gives the number and its interval. Null where no setting has a vsF on the first half, or the
    selected one has none on the second.
    """
    usable = [number for number, each in enumerate(rows) if _can_be_halved(each)]
    choosing, telling = (
        compare(
            [_every_second(rows[number], first) for number in usable],
            [_every_second(each, first) for each in baseline if _can_be_halved(each)],
            seed=seed,
        )
        for first in (0, 1)
    )
    found: list[Row] = []
    for each in rows:
        kin = [k for k, n in enumerate(usable) if _one_sampler(each.row, rows[n].row)]
        known = [(choosing[k]["vsf"], k) for k in kin if choosing[k].get("vsf") is not None]
        if not known:
            note = "no setting has a vsF on the half of the samples that chooses"
            found.append(_nothing("vsf_best", note))
            continue
        row = telling[min(known)[1]]
        told = {f"vsf_best{end}": row.get(f"vsf{end}") for end in ("", "_ci95", "_note")}
        if not told["vsf_best_note"]:
            del told["vsf_best_note"]
        found.append(told | {"vsf_best_at": [row["temperature"], row["top_p"]]})
    return found


def gap_closed(few: Numbers, own: Numbers, many: Numbers) -> Numbers:
    """Fraction of the path KL lost by taking few steps that a student recovers.

    (KL[teacher@N] - KL[student@N]) / (KL[teacher@N] - KL[teacher@max]): 0 is the teacher, 1 is as
    good as all its steps. NaN where the teacher loses nothing. Shapes: all (1 + R,).
    """
    gap = few - many
    share: Numbers = (few - own) / np.where(gap > 0, gap, math.nan)
    return share


def order_of(row: Row) -> str:
    """Return the order in which the sampler of a row reveals positions."""
    return str((row.get("options") or {}).get("order", "random"))


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    """A row in the data and in all resamples."""

    row: Row
    noise: Noise
    point: Point | None
    """None without perplexity or entropy."""
    path_kl: Numbers
    """(1 + R,); empty where the row has none."""
    gaps: Numbers | None
    """Log q - log p of each sample, whose mean is the path KL: (N,)."""

    @classmethod
    def of(cls, measured: Measured, resampling: Resampling) -> "_Entry":
        row, values = measured.row, measured.values
        noise = Noise(row["seed"], row["num_samples"])
        means = {
            name: resampling.means(numbers, noise)
            for name, numbers in values.items()
            if noise.size > 1  # one sample has no spread
        }
        point, path_kl = None, np.array([])
        if row.get("ppl") is not None and row.get("entropy") is not None:
            resamples = None
            if means.keys() >= set(PER_SAMPLE):
                with np.errstate(divide="ignore", invalid="ignore"):
                    resamples = np.stack([means["entropy"], means["nats"] / means["tokens"]])
            point = Point.of(row, resamples)
        if row.get("path_kl") is not None:
            path_kl = np.append(row["path_kl"], means.get("path_gap", []))
        return cls(row, noise, point, path_kl, values.get("path_gap"))


def _on_frontier(entry: _Entry, baseline: Sequence[_Entry]) -> Row:
    """VsF at equal NFE and at equal passes.

    Texts that are drawn together share passes: those of other batches do not compare.
    """
    point, size = entry.point, entry.row.get("batch_size")
    rivals = [(rival.point, rival.row.get("batch_size")) for rival in baseline if rival.point]
    if point is None or not rivals:
        return {}
    row = _vsf("vsf", point, [rival for rival, _ in rivals if rival.nfe == point.nfe])
    alike = [rival for rival, batch in rivals if batch == size]
    if not alike:
        ours, theirs = (
            "batches that are not known" if n is None else f"batches of {n}"
            for n in (size, rivals[0][1])
        )
        note = f"the row was drawn in {ours} and the baseline in {theirs}, and texts of one batch "
        note += "share passes: draw both with one --batch-size"
        return row | _nothing("vsf_passes", note)
    equals = equal_passes(alike, point.passes)
    if equals and cost(equals) < NEARLY * point.passes:
        note = f"the row took {point.passes:.3g} passes, and the nearest number of steps of the "
        note += f"baseline that is no dearer {cost(equals):.3g}: draw it with more steps"
        return row | _nothing("vsf_passes", note)
    return row | _vsf("vsf_passes", point, equals)


def _vsf(name: str, point: Point, baseline: Sequence[Point]) -> Row:
    if len(baseline) == 1 and baseline[0].entropy != point.entropy:
        return _nothing(name, "vsF needs a sweep of the baseline (didi eval --frontier)")
    ratio = log_vsf(point, baseline)
    if math.isnan(ratio[0]):
        return _nothing(name, why_not(point.entropy, baseline))
    row, ci95 = _number(name, ratio, "the baseline's frontier reaches"), f"{name}_ci95"
    row[name] = math.exp(row[name])
    row[ci95] = row[ci95] and [math.exp(min(end, 700)) for end in row[ci95]]
    return row


def _path_kl_difference(entry: _Entry, baseline: Sequence[_Entry]) -> Row:
    """Difference to the baseline's best setting of equal NFE, and its error for that setting."""
    few, name = _with_path(baseline, "nfe", entry.row["nfe"]), "path_kl_vs_baseline"
    if not few:
        return {}
    best = _best(few)
    own, lowest = aligned(entry.path_kl, _lowest(few))
    row = _number(name, own - lowest) | {f"{name}_se": _error(entry, best), f"{name}_at": _at(best)}
    if order_of(entry.row) != order_of(best.row):
        row[f"{name}_note"] = OTHER_ORDER
    return row


def _gap_share(
    name: str, entry: _Entry, own: Sequence[_Entry], baseline: Sequence[_Entry], most_steps: int
) -> Row:
    """Share of the baseline's gap that the best of the sampler's `own` settings closes.

    These differ in temperature and top-p alone: the best of several seeds would be the luckiest.
    """
    few = _with_path(baseline, "nfe", entry.row["nfe"])
    many = _with_path(baseline, "steps", most_steps)
    if not few or not many:
        missing = f"{most_steps} steps" if few else f"{entry.row['nfe']} NFE"
        return _nothing(name, f"the baseline has no path KL with {missing}")
    shares = gap_closed(*aligned(_lowest(few), _lowest(own), _lowest(many)))
    if math.isnan(shares[0]):
        return _nothing(name, "few steps cost the baseline nothing: there is no gap to close")
    row = _number(name, shares, "few steps cost the baseline something")
    if {order_of(entry.row)} != {order_of(each.row) for each in (*few, *many)}:
        row.setdefault(f"{name}_note", OTHER_ORDER)
    return row


def _number(name: str, columns: Numbers, condition: str = "") -> Row:
    """Entries of a number: value, interval, and a note where too few resamples have a value."""
    value, resamples = float(columns[0]), columns[1:]
    row: Row = {name: value, f"{name}_ci95": reflected(value, resamples)}
    if row[f"{name}_ci95"] is None and len(resamples):
        share = np.isfinite(resamples).mean()
        row[f"{name}_note"] = f"no interval: {condition} in {share:.0%} of the resamples only"
    return row


def _nothing(name: str, note: str) -> Row:
    return {name: None, f"{name}_ci95": None, f"{name}_note": note}


def _with_path(entries: Iterable[_Entry], name: str, value: object) -> list[_Entry]:
    """Entries that have a path KL, and this value in their row."""
    return [each for each in entries if len(each.path_kl) and each.row.get(name) == value]


def _kin(entry: _Entry, entries: Iterable[_Entry]) -> list[_Entry]:
    """Entries with a path KL that differ in temperature and top-p alone."""
    return [each for each in entries if len(each.path_kl) and _one_sampler(each.row, entry.row)]


def _one_sampler(one: Row, other: Row) -> bool:
    return all(one.get(name) == other.get(name) for name in ONE_SAMPLER)


def _best(entries: Iterable[_Entry]) -> _Entry:
    return min(entries, key=lambda entry: float(entry.path_kl[0]))


def _at(entry: _Entry) -> list[float]:
    return [entry.row["temperature"], entry.row["top_p"]]


def _lowest(entries: Iterable[_Entry]) -> Numbers:
    """Lowest path KL: (1 + R,)."""
    lowest: Numbers = aligned(*(entry.path_kl for entry in entries)).min(axis=0)
    return lowest


def _error(one: _Entry, other: _Entry) -> float:
    """Standard error of the difference of two path KLs; smaller where they share their noise."""
    if one.gaps is None or other.gaps is None:
        return math.inf
    paired = one.noise == other.noise
    parts = [one.gaps - other.gaps] if paired else [one.gaps, other.gaps]
    return math.hypot(*(mean_and_error(part)[1] for part in parts))


def _can_be_halved(each: Measured) -> bool:
    values = [each.values.get(name) for name in PER_SAMPLE]
    return all(v is not None and len(v) > 1 and np.isfinite(v).all() for v in values)


def _every_second(each: Measured, first: int) -> Measured:
    """Samples `first`, `first` + 2, ... with the perplexity and entropy of those alone."""
    count = len(each.values["nats"]) // 2  # as many in both halves
    values = {name: each.values[name][first : 2 * count : 2] for name in PER_SAMPLE}
    kept = (*ONE_SAMPLER, "passes", "batch_size", "temperature", "top_p")
    row = {name: each.row.get(name) for name in kept} | {
        "num_samples": count,
        "ppl": plain(perplexity(values["nats"].sum() / values["tokens"].sum())),
        "entropy": values["entropy"].mean(),
    }
    return Measured(row, values)
