"""Rows of an evaluation grouped into lines, and the doubts about them.

A line is one sampler of one model at all its steps and settings: a line of a figure.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import NamedTuple

from didi_instruct.evaluation.measuring import Evaluation
from didi_instruct.evaluation.samples import REAL, SampleSet
from didi_instruct.evaluation.table import Row

SAMPLER_SETTINGS = ("steps", "nfe", "passes", "temperature", "top_p")
LOW_ENTROPY = 0.02
"""Relative loss of entropy beyond noise: it can halve a perplexity by itself."""
LOW_VARIETY = 0.05
"""Relative loss of distinct 4-grams, or gain of Self-BLEU, beyond noise."""


class Sign(NamedTuple):
    """A measure of variety and its direction where texts vary too little."""

    field: str
    name: str
    direction: int
    tolerance: float
    depends_on_count: bool


SIGNS = (
    Sign("entropy", "entropy", -1, LOW_ENTROPY, depends_on_count=False),
    Sign("unique_4gram", "4-grams", -1, LOW_VARIETY, depends_on_count=True),
    Sign("self_bleu", "Self-BLEU", 1, LOW_VARIETY, depends_on_count=True),
)


@dataclass(frozen=True, slots=True)
class Line:
    """One sampler of one model at all its steps and settings."""

    label: str
    model: str
    is_baseline: bool
    rows: tuple[Row, ...]

    @property
    def budgets(self) -> list[int]:
        """Numbers of steps, ascending."""
        return sorted({row["nfe"] for row in self.rows})

    def at(self, nfe: int) -> list[Row]:
        """Rows with this number of steps."""
        return [row for row in self.rows if row["nfe"] == nfe]

    def plain(self, nfe: int) -> Row | None:
        """The row at temperature 1 and top-p 1, else the first."""
        rows = self.at(nfe)
        return next(filter(is_plain, rows), rows[0] if rows else None)

    def best(self, nfe: int) -> Row | None:
        """The row with the lowest path KL; the plain one where none is known."""
        known = [row for row in self.at(nfe) if row.get("path_kl") is not None]
        return min(known, key=lambda row: row["path_kl"], default=self.plain(nfe))

    def edge(self, nfe: int) -> str | None:
        """The best setting, if it is the lowest temperature or top-p of the sweep."""
        best = self.best(nfe)
        tried = [tempered(row) for row in self.at(nfe) if row.get("path_kl") is not None]
        if best is None or not tried:
            return None
        for place, name in enumerate(("T", "top-p")):
            values = {settings[place] for settings in tried}
            if tempered(best)[place] == min(values) < max(values):
                return f"{name} {min(values):g}"
        return None


class Rows:
    """All rows of an evaluation: lines of sampled ones, controls and the reference text."""

    def __init__(self, evaluation: Evaluation) -> None:
        found = [row for row in evaluation.rows if row["nfe"] is not None]
        baseline = evaluation.baseline
        controls = [row for row in evaluation.rows if row["nfe"] is None] + [*evaluation.controls]
        self.lines = find_lines(found, baseline, evaluation.samples)
        self.controls = _without_reference([unsampled(row) for row in controls])
        self.reference = unsampled(evaluation.reference)
        self.rivals = list(short_names([row["model"] for row in baseline]).values())
        self.sampled = [*found, *baseline]
        self.all = [*self.sampled, *self.controls, *filter(None, [self.reference])]
        self.has_path_kl = any(row.get("path_kl") is not None for row in self.all)
        self.has_sweep = any(len(line.at(nfe)) > 1 for line in self.lines for nfe in line.budgets)
        self.budgets = sorted({nfe for line in self.lines for nfe in line.budgets})

    def doubt(self, row: Row) -> str:
        """Why a row's perplexity and path KL may mislead: its texts vary too little."""
        reasons = []
        for sign in SIGNS:
            value = row.get(sign.field)
            level, words = self._expected(row, sign)
            if value is None or not level:
                continue
            excess = sign.direction * (value / level - 1)
            if excess > sign.tolerance:
                side = "above" if sign.direction > 0 else "below"
                expected = words.format(level)
                reasons.append(f"{sign.name} {value:.3f} is {excess:.1%} {side} {expected}")
        return "; ".join(reasons)

    def _expected(self, row: Row, sign: Sign) -> tuple[float | None, str]:
        """The level of the reference text, or else of the plain baseline, and words for it.

        Entropy is compared with the baseline's at equal steps; what depends on the number of texts
        with the baseline's at its most steps, nearest to real text, and at an equal number.
        """
        for rival, words in self._standards(row, sign):
            same_count = rival.get("num_samples") == row.get("num_samples")
            if rival.get(sign.field) is not None and (same_count or not sign.depends_on_count):
                return rival[sign.field], words
        return None, ""

    def _standards(self, row: Row, sign: Sign) -> Iterator[tuple[Row, str]]:
        real = next(
            (c for c in self.controls if c["model"] == REAL and c["length"] == row["length"]),
            self.reference,
        )
        if real.get(sign.field) is not None:
            yield real, "the reference text's {:.3f}"
            return
        for line in (line for line in self.lines if line.is_baseline):
            nfe = line.budgets[-1] if sign.depends_on_count else row["nfe"]
            plain = line.plain(nfe)
            if plain is not None and is_plain(plain):
                at = f" at {nfe} NFE" * (nfe != row["nfe"])
                yield plain, "the plain baseline's {:.3f}" + at


def _without_reference(controls: list[Row]) -> list[Row]:
    """Drop the last row of real chains, which is the reference's own."""
    last = [row for row in controls if row["model"] == REAL][-1:]
    return [row for row in controls if row not in last]


def tempered(row: Row) -> tuple[float, float]:
    """Temperature and top-p, 1 where a row has none."""
    temperature, top_p = row.get("temperature"), row.get("top_p")
    return 1.0 if temperature is None else temperature, 1.0 if top_p is None else top_p


def is_plain(row: Row) -> bool:
    """Return True if a row has temperature 1 and top-p 1."""
    return tempered(row) == (1, 1)


def setting(row: Row) -> str:
    """Temperature and top-p in words."""
    named = zip(("T", "top-p"), tempered(row), strict=True)
    return ", ".join(f"{name} {value:g}" for name, value in named if value != 1) or "plain"


def length_of(row: Row) -> str:
    """Length of a row, in words, where a table has rows of several lengths."""
    if not row.get("lengths"):
        return ""
    return f"length {row['length']}" if row.get("length") else "mean over lengths"


def unsampled(row: Row) -> Row:
    """A row without what only samplers have."""
    return {name: value for name, value in row.items() if name not in SAMPLER_SETTINGS}


class _Sampler(NamedTuple):
    """Everything that tells lines of rows apart, as far as it is known."""

    model: str
    weights: str | None
    name: str | None
    options: str
    seed: int | None
    num_samples: int | None
    length: str


def find_lines(
    rows: Sequence[Row], baseline: Sequence[Row], samples: Sequence[SampleSet] = ()
) -> list[Line]:
    """Group rows by their sampler, the baseline first; a row that is there twice counts once.

    A model that is its own baseline has rows of both kinds; those of `rows` know more. Rows that
    differ although all that is known of their samplers is equal (two files, say) are two lines.
    """
    everything = [*rows, *baseline]
    prints: list[str | None] = [None] * len(everything)
    if [s.origin.model for s in samples] == [row["model"] for row in everything]:
        prints = [s.origin.fingerprint for s in samples]
    samplers = [_sampler(row, weights) for row, weights in zip(everything, prints, strict=True)]
    found: dict[tuple[_Sampler, int], list[Row]] = defaultdict(list)
    for sampler, row in zip(samplers, everything, strict=True):
        number, place = 1, (row["nfe"], tempered(row))
        while taken := [r for r in found[sampler, number] if (r["nfe"], tempered(r)) == place]:
            if _agree(row, taken[0]):
                break
            number += 1
        else:
            found[sampler, number].append(row)
    names, rivals = short_names([s.model for s in samplers]), {row["model"] for row in baseline}
    lines = [
        Line(
            names[sampler.model] + _distinction(sampler, samplers) + f" ({number})" * (number > 1),
            sampler.model,
            sampler.model in rivals,
            tuple(group),
        )
        for (sampler, number), group in found.items()
    ]
    return sorted(lines, key=lambda line: not line.is_baseline)


def _sampler(row: Row, weights: str | None) -> _Sampler:
    options = json.dumps(row.get("options") or {}, sort_keys=True, default=str)
    seed, count = row.get("seed"), row.get("num_samples")
    return _Sampler(row["model"], weights, row.get("sampler"), options, seed, count, length_of(row))


def _agree(one: Row, other: Row) -> bool:
    """Return True if two rows are equal in all entries that both have."""
    return all(
        one[name] == other[name]
        for name in one.keys() & other.keys()
        if one[name] is not None and other[name] is not None
    )


def _distinction(sampler: _Sampler, samplers: Sequence[_Sampler]) -> str:
    """Label of what differs between a sampler and the others of its model."""
    kin = [other for other in samplers if other.model == sampler.model]
    options, others = json.loads(sampler.options), [json.loads(other.options) for other in kin]
    words = (
        "",
        f"weights {(sampler.weights or 'unknown')[:8]}",
        str(sampler.name),
        ", ".join(f"{k} {v}" for k, v in options.items() if any(o.get(k) != v for o in others)),
        f"seed {sampler.seed}",
        f"{sampler.num_samples} texts",
        sampler.length,
    )
    told = zip(words, zip(*kin, strict=True), strict=True)
    return "".join(f" · {text}" for text, values in told if text and len(set(values)) > 1)


def short_names(models: Sequence[str]) -> dict[str, str]:
    """The last parts of each SOURCE, as many as it takes to tell them apart."""
    models = list(dict.fromkeys(models))
    parts = {model: PurePosixPath(model).parts or (model,) for model in models}
    for count in range(1, max(map(len, parts.values()), default=1) + 1):
        names = {model: "/".join(parts[model][-count:]) for model in models}
        if len(set(names.values())) == len(models):
            return names
    return {model: model for model in models}
