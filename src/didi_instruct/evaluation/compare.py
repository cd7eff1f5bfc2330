"""Path KL: how far a sampler's law is from a judge's, whatever its temperature.

An ancestral sampler knows the probability of its own draws. The order in which positions are
revealed does not depend on the model, and given the order a sequence x has one path, so

    path entropy = -E sum log p(drawn token | state)  =  H(x | order)  <=  H(x)
    path KL      = E[-log judge(x)] - path entropy    >=  KL(sampler || judge)

with equality where the text does not depend on the order. A temperature that sharpens the samples
lowers both terms: the difference falls only if the samples come closer to the judge's law.

Perplexity at matched entropy: a sampler against the frontier that a baseline reaches.

Perplexity under a judge falls when entropy falls, so a sampler is compared with the best that the
baseline (the teacher) reaches at the same entropy with a temperature or with top-p. A sweep of one
of the two is a curve of log-perplexity over entropy, straight between neighbouring settings; the
frontier is the lowest curve. Where no curve reaches, there is nothing to compare with, and nothing
is extrapolated.

Rows beside those of a baseline: place on its frontier, share of its gap, difference of path KL.

Every number has a 95% interval over samples, those of the row and of the baseline alike: all are
resampled, and what the number chooses from the baseline (its lowest curve, its best setting) is
chosen anew in each resample.

The best temperature and top-p of a sampler by vsF, chosen on some samples and told of others.

A sampler without a path KL (one that rewrites tokens, is guided, or has no masks) has vsF alone to
choose a setting by. The lowest of many ratios, told of the samples that chose it, is low by luck,
of one that gains nothing too. So half of the samples choose, and the other half say how good it is.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from didi_instruct.config.model import ModelConfig
from didi_instruct.errors import UserError
from didi_instruct.evaluation.measuring import Measured, Row, plain
from didi_instruct.evaluation.stats import (
    ENOUGH,
    Noise,
    Numbers,
    Resampling,
    reflected,
    share_with_value,
)
from didi_instruct.sampling.state import Samples
from didi_instruct.training.likelihood import nats_of_texts, perplexity
from didi_instruct.training.objectives import Batch

Judge = Callable[[Tensor], Tensor]
"""Log p of each sequence, or a lower bound of it: (B, L), where the samples are -> (B,) float64."""


@dataclass(frozen=True, slots=True)
class PathKL:
    """Nats per sequence."""

    path_entropy: float
    judge_nats: float
    """Cross-entropy of the samples under the judge, the mean of -log p."""
    path_kl: float
    """judge_nats - path_entropy."""
    path_kl_se: float
    """Standard error over the samples, infinite for one."""
    samples: int


def path_kl(samples: Samples, judge: Judge) -> PathKL:
    """Path KL of samples to the judge's law; too high where the judge gives a lower bound."""
    gaps = path_gaps(samples, judge)
    assert samples.log_prob is not None
    path_entropy = -samples.log_prob.mean().item()
    mean, error = _mean_and_error(gaps)
    return PathKL(path_entropy, mean + path_entropy, mean, error, len(gaps))


def path_gaps(samples: Samples, judge: Judge) -> Tensor:
    """Log q(path) - log p(x) of each sample, whose mean is the path KL: (B,), float64, CPU."""
    if samples.log_prob is None:
        raise UserError(
            "These samples come from a sampler that does not know the probability of its path, "
            "so they have no path KL: draw them with sampler `ancestral`."
        )
    log_p = judge(samples.tokens)
    if log_p.shape != samples.log_prob.shape:
        raise ValueError(
            f"the judge gave {tuple(log_p.shape)} for {len(samples.tokens)} sequences: "
            "give one log-probability for each"
        )
    return samples.log_prob.double().cpu() - log_p.double().cpu()


def paired_difference(gaps_a: Tensor, gaps_b: Tensor) -> tuple[float, float]:
    """Path KL of a minus that of b, from `path_gaps` (B,) of both, and its standard error.

    Samples drawn with one seed and equally many steps share their reveal order and uniforms. What
    they have in common cancels, so the error is smaller than that of two separate estimates.
    """
    if gaps_a.shape != gaps_b.shape:
        raise ValueError(
            f"{len(gaps_a)} samples cannot be paired with {len(gaps_b)}: draw equally many"
        )
    return _mean_and_error(gaps_a - gaps_b)


def gap_closed(teacher_few: float, student_few: float, teacher_many: float) -> float:
    """Part of the path KL that few steps cost the teacher, and that the student wins back.

    (KL[teacher@N] - KL[student@N]) / (KL[teacher@N] - KL[teacher@max]): 0 is the teacher, 1 is as
    good as all its steps.
    """
    gap = teacher_few - teacher_many
    if not gap > 0:
        raise ValueError(
            f"the teacher's path KL is {teacher_few:.4g} with few steps and {teacher_many:.4g} "
            "with many: there is no gap to close"
        )
    return (teacher_few - student_few) / gap


def gap_closed_resampled(
    teacher_few: NDArray[np.float64],
    student_few: NDArray[np.float64],
    teacher_many: NDArray[np.float64],
) -> NDArray[np.float64]:
    """`gap_closed` in every resample (R,), NaN where the teacher has no gap."""
    gap = teacher_few - teacher_many
    share: NDArray[np.float64] = (teacher_few - student_few) / np.where(gap > 0, gap, np.nan)
    return share


def nelbo_judge(
    loss: Callable[[Batch], Tensor],
    config: ModelConfig,
    *,
    draws: int = 8,
    batch_size: int = 64,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Judge:
    """Judge by a model: minus the NELBO of a diffusion model, the exact log p of an AR model.

    `loss` is the network's part of the objective, as for `likelihood`. The NELBO is estimated from
    `draws` noise levels per sequence, without bias. The noise follows the row, so that samplers
    which are compared row by row are judged with the same. Where texts have windows of their own,
    it judges them up to their ends, which fill the rest; the cost of a text's length is part of it.
    """

    def judge(tokens: Tensor) -> Tensor:
        clean = tokens.cpu()
        nats, _ = nats_of_texts(
            loss,
            config,
            lambda start, count: clean[start : start + count],
            sequences=len(clean),
            draws=draws,
            batch_size=batch_size,
            seed=seed,
            device=device,
        )
        return -nats

    return judge


def _mean_and_error(values: Tensor) -> tuple[float, float]:
    """Mean and its standard error."""
    error = values.std().item() / math.sqrt(len(values)) if len(values) > 1 else math.inf
    return values.mean().item(), error


SHARE_OF_PASSES, PART_OF_A_PASS = 0.01, 0.1
"""Costs this close are equal: coins decide what a step skips, batches share the first pass."""


@dataclass(frozen=True, slots=True)
class Point:
    """One sampler in one setting."""

    perplexity: float
    """Under the judge."""
    entropy: float
    """Mean per-sequence unigram entropy, nats."""
    nfe: int
    """Scheduled steps."""
    passes: float
    """What really ran, in forward passes per sample."""
    temperature: float
    top_p: float
    cloud: NDArray[np.float64] | None = field(default=None, compare=False, repr=False)
    """(2, R) entropy and log-perplexity in resamples, the same resamples for all points."""

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> "Point":
        """Where a row of a table stands."""
        names = ("ppl", "entropy", "nfe", "passes", "temperature", "top_p")
        return cls(*(row[name] for name in names))


@dataclass(frozen=True, slots=True)
class Vsf:
    """Perplexity over the frontier's at the same entropy; below 1 is a gain."""

    value: float | None
    """None where the comparison cannot be made."""
    reason: str = ""
    """Why not, in words."""


class Setting(NamedTuple):
    """What a sweep changes."""

    temperature: float
    top_p: float


def sweep(temperatures: Iterable[float], top_ps: Iterable[float]) -> list[Setting]:
    """Settings that make two curves: each temperature without top-p, each top-p at temperature 1.

    The curves meet in the plain setting (1, 1), which comes first, whether it was named or not.
    """
    settings = [Setting(1.0, 1.0)]
    for temperature in temperatures:
        if not 0 < temperature < math.inf:
            raise UserError(f"temperature is {temperature}: use more than 0.")
        settings.append(Setting(float(temperature), 1.0))
    for top_p in top_ps:
        if not 0 < top_p <= 1:
            raise UserError(f"top_p is {top_p}: it is a share, more than 0 and at most 1.")
        settings.append(Setting(1.0, float(top_p)))
    return list(dict.fromkeys(settings))


def equal_nfe(points: Iterable[Point], nfe: int) -> list[Point]:
    """Points with that many scheduled steps."""
    return [point for point in points if point.nfe == nfe]


def equal_passes(points: Iterable[Point], passes: float) -> list[Point]:
    """Points of the largest budget that costs no more than `passes`; none if all cost more.

    A budget is a number of scheduled steps, and costs what its dearest point cost.
    """
    budgets: dict[int, list[Point]] = defaultdict(list)
    for point in points:
        budgets[point.nfe].append(point)
    limit = passes + max(SHARE_OF_PASSES * passes, PART_OF_A_PASS)
    affordable = [found for found in budgets.values() if cost(found) <= limit]
    return max(affordable, key=cost, default=[])


def curves(points: Iterable[Point]) -> list[list[Point]]:
    """Sort points into sweeps: one setting varies, the other and the number of steps stay.

    Each is ordered by what varies; a point may lie on two, and be alone on one.
    """
    sweeps: dict[Hashable, list[Point]] = defaultdict(list)
    for point in points:
        sweeps["temperature", point.nfe, point.top_p].append(point)
        sweeps["top_p", point.nfe, point.temperature].append(point)
    return [
        sorted(found, key=lambda p: (p.temperature, p.top_p, p.entropy))
        for found in sweeps.values()
    ]


def vsf(point: Point, baseline: Sequence[Point]) -> Vsf:
    """Ratio of the point's perplexity to the baseline's frontier at the same entropy.

    The baseline is the set to compare with, chosen by `equal_nfe` or `equal_passes`.
    """
    if not _usable(point):
        return Vsf(
            None, f"perplexity is {point.perplexity} at entropy {point.entropy}: nothing to compare"
        )
    lowest = _log_frontier(baseline, point.entropy)
    if lowest is None:
        return Vsf(None, _why_not(point.entropy, baseline))
    return Vsf(math.exp(math.log(point.perplexity) - lowest))


def log_vsf_resampled(point: Point, baseline: Sequence[Point]) -> NDArray[np.float64] | None:
    """Log of the ratio in every resample (R,), NaN where no curve reaches; None without clouds.

    The frontier is made anew in each: which of its curves is the lowest may change.
    """
    if point.cloud is None or any(rival.cloud is None for rival in baseline):
        return None
    entropy, log_perplexity = point.cloud
    lowest = np.full_like(entropy, np.inf)
    for left, right in _segments(baseline):
        assert left.cloud is not None
        assert right.cloud is not None
        lowest = np.fmin(lowest, _log_perplexity(left.cloud, right.cloud, entropy))
    ratio: NDArray[np.float64] = log_perplexity - np.where(lowest < np.inf, lowest, np.nan)
    return ratio


def cost(points: Sequence[Point]) -> float:
    """Passes of the dearest point."""
    return max(point.passes for point in points)


def _usable(point: Point) -> bool:
    return 0 < point.perplexity < math.inf and math.isfinite(point.entropy)


def _segments(baseline: Iterable[Point]) -> list[tuple[Point, Point]]:
    """Neighbours of all curves, and every point with itself, for curves of one point."""
    points = list(baseline)
    pairs = [pair for curve in curves(points) for pair in pairwise(curve)]
    pairs += [(point, point) for point in points]
    return [pair for pair in pairs if all(map(_usable, pair))]


def _log_frontier(baseline: Iterable[Point], entropy: float) -> float | None:
    """Lowest log-perplexity of all curves at that entropy; None where none reaches.

    A curve may pass an entropy several times, where noise bends it back; each passage counts. A
    setting whose numbers are not finite interrupts its curve.
    """
    passages = [
        float(_log_perplexity(_place(left), _place(right), np.array(entropy)))
        for left, right in _segments(baseline)
    ]
    return min((value for value in passages if not math.isnan(value)), default=None)


def _place(point: Point) -> NDArray[np.float64]:
    """Entropy and log-perplexity: (2,)."""
    return np.array([point.entropy, math.log(point.perplexity)])


def _log_perplexity(
    left: NDArray[np.float64], right: NDArray[np.float64], entropy: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Log-perplexity on the straight line between two places, NaN outside.

    Shapes: left and right (2, ...), entropy (...) -> (...).
    """
    turned = left[0] > right[0]
    low, high = np.where(turned, right, left), np.where(turned, left, right)
    width = high[0] - low[0]
    weight = (entropy - low[0]) / np.where(width > 0, width, 1)
    between = (1 - weight) * low[1] + weight * high[1]
    value = np.where(width > 0, between, np.minimum(low[1], high[1]))
    return np.where((low[0] <= entropy) & (entropy <= high[0]), value, np.nan)


def _why_not(entropy: float, baseline: Sequence[Point]) -> str:
    covered: list[list[float]] = []
    for low, high in sorted(sorted(p.entropy for p in pair) for pair in _segments(baseline)):
        if covered and low <= covered[-1][1]:
            covered[-1][1] = max(covered[-1][1], high)
        else:
            covered.append([low, high])
    if not covered:
        return "the baseline has no point to compare with"
    reach = " and ".join(f"{low:.6g} to {high:.6g}" for low, high in covered)
    if entropy < covered[0][0]:
        return f"entropy {entropy:.6g} is below all that the baseline reaches ({reach})"
    if entropy > covered[-1][1]:
        return f"entropy {entropy:.6g} is above all that the baseline reaches ({reach})"
    return f"entropy {entropy:.6g} lies in a gap between the baseline's curves ({reach})"


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
    usable = [number for number, each in enumerate(rows) if _can_be_halved(each)]
    ours = [_every_second(rows[number], first) for number in usable]
    theirs = [_every_second(each, first) for each in baseline if _can_be_halved(each)]
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


def _can_be_halved(each: Measured) -> bool:
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
