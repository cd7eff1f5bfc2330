"""Rows beside those of a baseline: place on its frontier, share of its gap, difference of path KL.

Every number has a 95% interval over samples, those of the row and of the baseline alike: all are
resampled, and what the number chooses from the baseline (its lowest curve, its best setting) is
chosen anew in each resample.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from didi_instruct.evaluation.frontier import (
    Point,
    cost,
    equal_nfe,
    equal_passes,
    log_vsf_resampled,
    vsf,
)
from didi_instruct.evaluation.intervals import (
    ENOUGH,
    Noise,
    Numbers,
    Resampling,
    reflected,
    share_with_value,
)
from didi_instruct.evaluation.measuring import Measured, Row, plain
from didi_instruct.evaluation.paths import gap_closed, gap_closed_resampled, paired_difference

OTHER_ORDER = (
    "drawn in another order than the baseline: in random order path KL also holds what a text "
    "tells of its order, in a fixed one nothing, so this flatters the fixed one (ar-kl does not)"
)
"""Of samplers that reveal positions by chance, path KL is a looser bound than of those that do
not: KL plus the information between text and order."""
NEARLY = 0.8
"""Share of a row's passes that a baseline of equal passes has at least."""
ONE_SAMPLER = ("fingerprint", "sampler", "options", "seed", "num_samples", "nfe")
"""What rows have in common that differ in temperature and top-p alone."""


def compare(
    rows: Sequence[Measured],
    baseline: Sequence[Measured],
    most_steps: int | None = None,
    seed: int = 0,
) -> list[Row]:
    """Rows with what sets them apart from the baseline; where nothing does, null and a note.

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
        row = dict(entry.row)
        if entry.point is not None:
            row |= _places(entry, theirs)
        if row.get("path_kl") is not None:
            if theirs:
                row |= _best(_kin(entry, ours)) | _against(entry, theirs)
            if theirs and most_steps is not None:
                row |= _share(entry, ours, theirs, most_steps)
        elif row.get("path_kl_note") and theirs:
            shares = () if most_steps is None else ("gap_closed", "gap_closed_best")
            for name in ("path_kl_vs_baseline", *shares):
                row |= _nothing(name, "this row has no path KL")
        found.append({name: plain(value) for name, value in row.items()})
    return found


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    """A row in the data and in all resamples."""

    row: Row
    noise: Noise
    point: Point | None
    """None without perplexity or entropy."""
    gaps: Numbers | None
    """Log q - log p of each sample, whose mean is the path KL: (N,)."""
    path_kl: Numbers | None
    """In each resample: (R,)."""

    @classmethod
    def of(cls, measured: Measured, resampling: Resampling) -> "_Entry":
        row, values = measured.row, measured.values
        noise = Noise(row["seed"], row["num_samples"])
        means = {
            name: resampling.means(numbers, noise)
            for name, numbers in values.items()
            if noise.size > 1  # one sample has no spread
        }
        cloud = None
        if {"nats", "tokens", "entropy"} <= means.keys():
            with np.errstate(divide="ignore", invalid="ignore"):
                cloud = np.stack([means["entropy"], means["nats"] / means["tokens"]])
        point = None
        if row.get("ppl") is not None and row.get("entropy") is not None:
            point = replace(Point.of(row), cloud=cloud)
        return cls(row, noise, point, values.get("path_gap"), means.get("path_gap"))


def _places(entry: _Entry, baseline: Sequence[_Entry]) -> Row:
    """On the baseline's frontier, at equal NFE and at equal passes.

    Texts that are drawn together share passes: those of other batches do not compare.
    """
    row: Row = {}
    point, size = entry.point, entry.row.get("batch_size")
    rivals = [rival for rival in baseline if rival.point]
    if point is None or not rivals:
        return row
    alike = [rival for rival in rivals if rival.row.get("batch_size") == size]
    for name, equals in (
        ("vsf", equal_nfe(_points(rivals), point.nfe)),
        ("vsf_passes", equal_passes(_points(alike), point.passes)),
    ):
        if name == "vsf_passes" and not alike:
            row |= _nothing(name, _other_batches(size, rivals[0].row.get("batch_size")))
            continue
        if name == "vsf_passes" and equals and cost(equals) < NEARLY * point.passes:
            row |= _nothing(name, _cheaper(cost(equals), point.passes))
            continue
        if len(equals) == 1 and equals[0].entropy != point.entropy:
            row |= _nothing(name, "vsF needs a sweep of the baseline (didi eval --frontier)")
            continue
        result = vsf(point, equals)
        row |= {name: result.value, f"{name}_ci95": None}
        if result.value is None:
            row[f"{name}_note"] = result.reason
            continue
        ratios = log_vsf_resampled(point, equals)
        if ratios is not None:
            ends = reflected(math.log(result.value), ratios)
            row[f"{name}_ci95"] = ends and [math.exp(min(end, 700)) for end in ends]
            row |= _lack(name, ratios, "the baseline's frontier reaches")
    return row


def _points(entries: Sequence[_Entry]) -> list[Point]:
    return [entry.point for entry in entries if entry.point is not None]


def _other_batches(ours: int | None, theirs: int | None) -> str:
    told = [
        "batches that are not known" if n is None else f"batches of {n}" for n in (ours, theirs)
    ]
    return (
        f"the row was drawn in {told[0]} and the baseline in {told[1]}, and texts of one batch "
        "share passes: draw both with one --batch-size"
    )


def _cheaper(theirs: float, ours: float) -> str:
    return (
        f"the row took {ours:.3g} passes, and the nearest number of steps of the baseline that is "
        f"no dearer {theirs:.3g}: draw it with more steps"
    )


def _nothing(name: str, note: str) -> Row:
    return {name: None, f"{name}_ci95": None, f"{name}_note": note}


def _best(entries: Sequence[_Entry]) -> Row:
    """Lowest path KL of one sampler over temperature and top-p, chosen anew in each resample."""
    best, name = min(entries, key=_path_kl), "path_kl_best"
    lowest = _lowest(entries)
    return {
        name: _path_kl(best),
        f"{name}_ci95": None if lowest is None else reflected(_path_kl(best), lowest),
        f"{name}_at": [best.row["temperature"], best.row["top_p"]],
    }


def _against(entry: _Entry, baseline: Sequence[_Entry]) -> Row:
    """Difference to the baseline's best setting of equal NFE, and its error for that setting."""
    few = _with_path(baseline, nfe=entry.row["nfe"])
    if not few:
        return {}
    best = min(few, key=_path_kl)
    name = "path_kl_vs_baseline"
    value = _path_kl(entry) - _path_kl(best)
    row: Row = {
        name: value,
        f"{name}_se": _error(entry, best),
        f"{name}_at": [best.row["temperature"], best.row["top_p"]],
    }
    if order_of(entry.row) != order_of(best.row):
        row[f"{name}_note"] = OTHER_ORDER
    lowest, own = _lowest(few), entry.path_kl
    if lowest is None or own is None:
        return row | {f"{name}_ci95": None}
    return row | {f"{name}_ci95": reflected(value, own - lowest)}


def _share(
    entry: _Entry, rows: Sequence[_Entry], baseline: Sequence[_Entry], most_steps: int
) -> Row:
    """Share of the gap that the row closes, and that its sampler closes at its best.

    Its best is chosen among temperatures and top-p alone: a best of several seeds, or of other
    options, would be the luckiest draw of another sampler.
    """
    few = _with_path(baseline, nfe=entry.row["nfe"])
    many = _with_path(baseline, steps=most_steps)
    row: Row = {}
    for name, own in (("gap_closed", [entry]), ("gap_closed_best", _kin(entry, rows))):
        row |= {name: None, f"{name}_ci95": None}
        if not few or not many:
            missing = f"{most_steps} steps" if few else f"{entry.row['nfe']} NFE"
            row[f"{name}_note"] = f"the baseline has no path KL with {missing}"
            continue
        at_best = [min(map(_path_kl, side)) for side in (few, own, many)]
        if not at_best[0] > at_best[2]:
            row[f"{name}_note"] = "few steps cost the baseline nothing: there is no gap to close"
            continue
        value = row[name] = gap_closed(*at_best)
        if {order_of(entry.row)} != {order_of(each.row) for each in (*few, *many)}:
            row[f"{name}_note"] = OTHER_ORDER
        lows = [_lowest(side) for side in (few, own, many)]
        if lows[0] is not None and lows[1] is not None and lows[2] is not None:
            shares = gap_closed_resampled(lows[0], lows[1], lows[2])
            row[f"{name}_ci95"] = reflected(value, shares)
            row |= _lack(name, shares, "few steps cost the baseline something")
    return row


def _lack(name: str, resampled: Numbers, condition: str) -> Row:
    """Why there is no interval, if there is none."""
    share = share_with_value(resampled)
    if share >= ENOUGH:
        return {}
    return {f"{name}_note": f"no interval: {condition} in {share:.0%} of the resamples only"}


def _with_path(entries: Sequence[_Entry], **same: object) -> list[_Entry]:
    """Those that have a path KL and these entries in their row."""
    return [
        entry
        for entry in entries
        if entry.row.get("path_kl") is not None
        and all(entry.row.get(name) == value for name, value in same.items())
    ]


def _kin(entry: _Entry, entries: Sequence[_Entry]) -> list[_Entry]:
    """Those with a path KL that differ in temperature and top-p alone."""
    return _with_path(entries, **{name: entry.row.get(name) for name in ONE_SAMPLER})


def order_of(row: Row) -> str:
    """In which the sampler of a row reveals positions."""
    return str((row.get("options") or {}).get("order", "random"))


def _path_kl(entry: _Entry) -> float:
    return float(entry.row["path_kl"])


def _lowest(entries: Sequence[_Entry]) -> Numbers | None:
    """Lowest path KL in each resample: (R,)."""
    known = [entry.path_kl for entry in entries if entry.path_kl is not None]
    return np.min(known, axis=0) if len(known) == len(entries) else None


def _error(one: _Entry, other: _Entry) -> float:
    """Standard error of the difference of two path KLs; smaller where they share their noise."""
    if one.gaps is None or other.gaps is None or min(len(one.gaps), len(other.gaps)) < 2:
        return math.inf
    if one.noise == other.noise:
        return paired_difference(torch.from_numpy(one.gaps), torch.from_numpy(other.gaps))[1]
    return math.hypot(*(g.std(ddof=1) / math.sqrt(len(g)) for g in (one.gaps, other.gaps)))
