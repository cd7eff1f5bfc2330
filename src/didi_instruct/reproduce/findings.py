"""Findings of the experiment `baselines`, in sentences: who wins where, and what not to trust."""

from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from statistics import fmean

from didi_instruct.evaluation.compare import order_of
from didi_instruct.evaluation.measuring import Row
from didi_instruct.reproduce.baseline_rows import BASELINE, PLAIN, STREAMS
from didi_instruct.reproduce.tables import Cell

ORDERS = ("random", "streams")
"""Of revealing positions."""
EVEN = 0.75
"""Share of the baseline's spread of lengths below which a method is named: of 512 texts a spread is
known to 3%."""
SIDES = ("below", "above", "in a gap of")


def summary(rows: Sequence[Row]) -> list[Row]:
    """One row for each method, NFE and seed: the plain one, which tells of the best settings too.

    Those of a step per token are one row, since texts of other temperatures are shorter or longer;
    it tells the lowest path KL of all, and the steps of the longest plain text of any seed.
    """
    groups: dict[tuple[str, int | None, int], list[Row]] = {}
    for row in rows:
        nfe = None if row["own_steps"] else row["nfe"]
        groups.setdefault((row["method"], nfe, row["seed"]), []).append(row)
    found = [_summary(group) for group in groups.values()]
    longest: dict[str, int] = {}
    for row in (row for row in found if row["own_steps"]):
        longest[row["method"]] = max(row["nfe"], longest.get(row["method"], 0))
    return [row | {"nfe": longest.get(row["method"], row["nfe"])} for row in found]


def _summary(group: Sequence[Row]) -> Row:
    plain = next(row for row in group if (row["temperature"], row["top_p"]) == PLAIN)
    known = [row for row in group if row.get("path_kl_best") is not None]
    if not known:
        return plain
    best = min(known, key=itemgetter("path_kl_best"))
    told = {name: value for name, value in best.items() if name.startswith("path_kl_best")}
    if best["own_steps"] and best is not plain:
        told["path_kl_best_ci95"] = None  # its own, which does not know of the choice
    return plain | told


def winners(rows: Sequence[Row]) -> list[str]:
    """Rank methods by path KL at each NFE, over all seeds, as far as intervals tell them apart.

    Those without the number have no part in it, nor have those of a step per token, which share no
    budget with the others, nor those whose number is a looser bound. Orders are ranked apart: in
    random order the bound holds what a text tells of its order, in streams it does not.
    """
    told = []
    for order in ORDERS:
        tight = [row for row in rows if order_of(row) == order and not row.get("loose")]
        for nfe, found in _by_method(tight, "path_kl_best"):
            if len(found) > 1:
                words = f"Lowest path KL at {nfe} NFE in {order} order, of {len(found)}"
                told.append(f"{words}, each at its best setting: {_ranked(found)}.")
    return told


def at_the_edge(rows: Sequence[Row]) -> list[str]:
    """Name methods whose lowest path KL lies at the end of the sweep; beyond it may be lower."""
    told = []
    for place, (name, column) in enumerate((("temperature", "temperature"), ("top-p", "top_p"))):
        end = min((row[column] for row in rows), default=PLAIN[place])
        found: dict[str, list[str]] = {}
        for row in summary(rows):
            best = row.get("path_kl_best_at")
            if best and end < PLAIN[place] and best[place] == end:
                found.setdefault(row["method"], []).append(f"{row['nfe']}")
        budgets = {method: ", ".join(dict.fromkeys(each)) for method, each in found.items()}
        told += _naming(f"Best at the lowest {name} of the sweep, {end:g} (NFE)", budgets)
    return told


def _naming(words: str, found: Mapping[str, str]) -> list[str]:
    """A sentence that names methods, with what is said of each; none where nobody is named."""
    named = "; ".join(f"{method} ({said})" for method, said in found.items())
    return [f"{words}: {named}."] if found else []


def less_varied(rows: Sequence[Row]) -> list[str]:
    """Name methods below the baseline of their order, both at best, whose texts are less varied.

    By intervals of Self-BLEU. Path KL alone rewards a sampler that leaves out what it is bad at.
    """
    places = {_place(row, row["temperature"], row["top_p"]): row for row in rows}
    chosen = [
        places[_place(row, *row["path_kl_best_at"])]
        for row in summary(rows)
        if row.get("path_kl_best_at") and not row["own_steps"] and not row.get("loose")
    ]
    usual = {
        (row["nfe"], row["seed"], order_of(row)): row
        for row in chosen
        if row["method"] in (BASELINE, STREAMS)
    }
    found: dict[str, list[str]] = {}
    seeds = len({row["seed"] for row in rows})
    for row in chosen:
        beside = usual.get((row["nfe"], row["seed"], order_of(row)))
        own, other = (each and each.get("self_bleu_ci95") for each in (row, beside))
        if beside is None or not own or not other or row["path_kl"] >= beside["path_kl"]:
            continue
        if own[0] > other[1]:
            words = f"{row['nfe']} NFE {row['self_bleu']:.2f} against {beside['self_bleu']:.2f}"
            words += f", seed {row['seed']}" if seeds > 1 else ""
            found.setdefault(row["method"], []).append(words)
    return _naming(
        "Lower in path KL than the baseline of its order, each at its best, and less varied "
        "(Self-BLEU), so that some of the gain may be variety that was given up",
        {method: "; ".join(each) for method, each in found.items()},
    )


def _place(row: Row, temperature: float, top_p: float) -> tuple[object, ...]:
    """Key of a setting among those of all methods."""
    return row["method"], row["nfe"], row["seed"], temperature, top_p


def of_other_lengths(rows: Sequence[Row]) -> list[str]:
    """Name methods whose plain texts differ in length from the baseline's, by their intervals.

    Entropy grows with length, so that of these vsF is not at equal terms.
    """
    found: dict[str, float] = {}
    for row, beside in _beside_baseline(rows):
        own, other = (each.get("mean_length_ci95") for each in (row, beside))
        if own and other and (own[0] > other[1] or own[1] < other[0]):
            ratio = row["mean_length"] / beside["mean_length"] - 1
            found[row["method"]] = max(ratio, found.get(row["method"], 0.0), key=abs)
    return _naming(
        "Texts of another length than the baseline's, where vsF is not at equal terms",
        {method: f"{ratio:+.0%}" for method, ratio in found.items()},
    )


def of_like_lengths(rows: Sequence[Row]) -> list[str]:
    """Name methods whose plain texts vary much less in length than the baseline's.

    That is variety too, and none of the other numbers shows it: judges and entropy read one text
    at a time, Self-BLEU its n-grams.
    """
    least: dict[str, tuple[float, str]] = {}
    for row, beside in _beside_baseline(rows):
        own, other = (each.get("length_spread") for each in (row, beside))
        if own is not None and other and own < EVEN * other:
            words = f"{own:.0f} against {other:.0f} tokens at {row['nfe']} NFE"
            found = own / other, words
            least[row["method"]] = min(found, least.get(row["method"], found))
    return _naming(
        "Lengths of texts vary less than the baseline's (standard deviation, where it is least)",
        {method: words for method, (_, words) in least.items()},
    )


def _beside_baseline(rows: Sequence[Row]) -> Iterator[tuple[Row, Row]]:
    """Plain rows, each with the baseline's of its NFE and seed."""
    plain = summary(rows)
    usual = {(row["nfe"], row["seed"]): row for row in plain if row["is_baseline"]}
    for row in plain:
        if (row["nfe"], row["seed"]) in usual:
            yield row, usual[row["nfe"], row["seed"]]


def gains(rows: Sequence[Row]) -> list[str]:
    """Name methods whose vsF lies below 1 by its interval, over all seeds; the baseline has 1."""
    told = []
    for nfe, found in _by_method([row for row in rows if not row["is_baseline"]], "vsf"):
        below = sorted(
            (cell.mean, f"{method} {cell.mean:.3f} ({cell.low:.3f} to {cell.high:.3f})")
            for method, cell in found.items()
            if cell.mean is not None and cell.high is not None and cell.high < 1
        )
        words = "; ".join(text for _, text in below) or "none"
        known = sum(cell.high is not None for cell in found.values())
        told.append(f"VsF below 1 by its interval at {nfe} NFE, of {known} that have one: {words}.")
    return told


def _by_method(rows: Sequence[Row], column: str) -> Iterator[tuple[int, dict[str, Cell]]]:
    """A number of every method that has it in all seeds, at each NFE."""
    seeds, of = {row["seed"] for row in rows}, dict[int, dict[str, list[Row]]]()
    for row in (row for row in summary(rows) if not row["own_steps"]):
        of.setdefault(row["nfe"], {}).setdefault(row["method"], []).append(row)
    for nfe, methods in sorted(of.items()):
        known = {
            method: kin
            for method, kin in methods.items()
            if {row["seed"] for row in kin if _has(row, column)} == seeds
        }
        if known:
            yield nfe, {method: _over_seeds(kin, column) for method, kin in known.items()}


def _has(row: Row, column: str) -> bool:
    return row.get(column) is not None


def _over_seeds(rows: Sequence[Row], column: str) -> Cell:
    """Mean of all seeds, and the intervals of all together where every one has its own.

    The range of some seeds' numbers is no interval, however many they are.
    """
    mean = fmean(row[column] for row in rows)
    ends = [end for row in rows if (end := row.get(f"{column}_ci95"))]
    if len(ends) < len(rows):
        return Cell(mean, seeds=len(rows))
    return Cell(mean, min(low for low, _ in ends), max(high for _, high in ends), len(rows))


def _ranked(found: Mapping[str, Cell]) -> str:
    """The lowest, and those whose interval meets its own."""
    ranked = sorted(found, key=lambda method: found[method].mean or 0.0)
    first, words = found[ranked[0]], f"{ranked[0]} {found[ranked[0]].mean:.2f}"
    if first.low is None or first.high is None:
        return f"{words}, without an interval: whether it is lower than the others is not known"
    words += f" ({first.low:.2f} to {first.high:.2f})"
    near = [m for m in ranked[1:] if (low := found[m].low) is None or low <= first.high]
    if not near:
        return f"{words}, below all others"
    close = "; ".join(f"{method} {found[method].mean:.2f}" for method in near)
    return f"{words}, not told apart by intervals from {close}"


def without_vsf(rows: Sequence[Row]) -> list[str]:
    """Name methods whose plain rows have no vsF, a sentence for each NFE and reason."""
    told = []
    plain = [row for row in summary(rows) if not row["own_steps"]]
    lacking = [row for row in plain if not _has(row, "vsf")]
    for nfe in sorted({row["nfe"] for row in lacking}):
        why: dict[str, dict[str, list[int]]] = {}
        for row in (row for row in lacking if row["nfe"] == nfe):
            why.setdefault(_reason(row), {}).setdefault(row["method"], []).append(row["seed"])
        for reason, of in why.items():
            words = [method + _seeds(plain, method, nfe, seeds) for method, seeds in of.items()]
            told.append(f"No vsF at {nfe} NFE, {reason}: {'; '.join(words)}.")
    return told


def _seeds(rows: Sequence[Row], method: str, nfe: int, seeds: Sequence[int]) -> str:
    """Name the seeds without vsF, unless all are; the table then averages the others."""
    everyone = {r["seed"] for r in rows if (r["method"], r["nfe"]) == (method, nfe)}
    return "" if everyone == set(seeds) else f" (seed {', '.join(map(str, seeds))})"


def _reason(row: Row) -> str:
    note = row.get("vsf_note") or "it was not measured"
    for side in SIDES:
        if note.startswith("entropy") and side.removesuffix(" of") in note:
            return f"entropy {side} what the baseline's sweep reaches"
    return str(note)
