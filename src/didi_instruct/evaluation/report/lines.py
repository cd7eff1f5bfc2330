"""Rows by what made them: one sampler of one model is a line, whatever its steps and settings.

Rows are one only where they are equal. What tells two lines of a model apart is in their labels.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from didi_instruct.evaluation.measuring import Row
from didi_instruct.evaluation.report.content import Content, of_length


@dataclass(frozen=True, slots=True)
class Line:
    """One sampler of one model, at all its budgets and settings: a line of a plot."""

    label: str
    model: str
    is_baseline: bool
    rows: tuple[Row, ...]

    @property
    def budgets(self) -> list[int]:
        """Steps it was measured at, ascending."""
        return sorted({row["nfe"] for row in self.rows})

    def at(self, nfe: int) -> list[Row]:
        """Rows of one budget."""
        return [row for row in self.rows if row["nfe"] == nfe]

    def plain(self, nfe: int) -> Row | None:
        """The row without temperature and top-p, or else the first that was asked for."""
        found = self.at(nfe)
        return next(filter(is_plain, found), found[0] if found else None)

    def best(self, nfe: int) -> Row | None:
        """The row with the lowest path KL; the plain one where none is known."""
        known = [row for row in self.at(nfe) if row.get("path_kl") is not None]
        return min(known, key=lambda row: row["path_kl"]) if known else self.plain(nfe)


class Maker(NamedTuple):
    """What made a row, beside its steps, temperature and top-p."""

    model: str
    weights: str | None
    """Fingerprint; None where the samples are not there."""
    sampler: str | None
    options: str
    """As JSON, so that they can be compared."""
    seed: int | None
    num_samples: int | None
    length: str = ""
    """In words, where rows of several lengths are in one table."""


def tempered(row: Row) -> tuple[float, float]:
    """Temperature and top-p, 1 where a row has none."""
    temperature, top_p = row.get("temperature"), row.get("top_p")
    return 1.0 if temperature is None else temperature, 1.0 if top_p is None else top_p


def is_plain(row: Row) -> bool:
    """Whether a row has neither temperature nor top-p."""
    return tempered(row) == (1, 1)


def setting(row: Row) -> str:
    """Temperature and top-p in words."""
    named = zip(("T", "top-p"), tempered(row), strict=True)
    return ", ".join(f"{name} {value:g}" for name, value in named if value != 1) or "plain"


def lines_of(content: Content) -> list[Line]:
    """Rows by what made them, the baseline first; a row that is there twice counts once.

    A model that is its own baseline has rows of both kinds; those of `rows` know more. Two that
    differ, though all that is known of their making is equal (of two files, say), are two lines.
    """
    found: dict[tuple[Maker, int], list[Row]] = defaultdict(list)
    settings: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for maker, row in _made(content):
        alike = settings[maker, row["nfe"], tempered(row)]
        if any(_equal(row, other) for other in alike):
            continue
        alike.append(row)
        found[maker, len(alike)].append(row)
    baseline = {row["model"] for row in content.baseline}
    names = short_names([maker.model for maker, _ in found])
    makers = list(dict.fromkeys(maker for maker, _ in found))
    lines = [
        Line(
            names[maker.model] + _apart(maker, makers) + (f" ({number})" if number > 1 else ""),
            maker.model,
            maker.model in baseline,
            tuple(rows),
        )
        for (maker, number), rows in found.items()
    ]
    return sorted(lines, key=lambda line: not line.is_baseline)


def _made(content: Content) -> Iterator[tuple[Maker, Row]]:
    """Every row and what made it; weights are known where its samples are there."""
    rows = [*content.rows, *content.baseline]
    prints: list[str | None] = [None] * len(rows)
    if [s.origin.model for s in content.samples] == [row["model"] for row in rows]:
        prints = [s.origin.fingerprint for s in content.samples]
    for row, weights in zip(rows, prints, strict=True):
        options = json.dumps(row.get("options") or {}, sort_keys=True, default=str)
        seed, count = row.get("seed"), row.get("num_samples")
        made = Maker(row["model"], weights, row.get("sampler"), options, seed, count)
        yield made._replace(length=of_length(row)), row


def _equal(one: Row, other: Row) -> bool:
    """Whether two rows agree in everything that both know."""
    both = one.keys() & other.keys()
    return all(one[k] == other[k] for k in both if one[k] is not None and other[k] is not None)


def short_names(models: Sequence[str]) -> dict[str, str]:
    """The last parts of each SOURCE, as many as it takes to tell them apart."""
    models = list(dict.fromkeys(models))
    parts = {model: PurePosixPath(model).parts or (model,) for model in models}
    most = max(map(len, parts.values()), default=1)
    for count in range(1, most + 1):
        names = {model: "/".join(parts[model][-count:]) for model in models}
        if len(set(names.values())) == len(models):
            return names
    return {model: model for model in models}


def _apart(maker: Maker, makers: Sequence[Maker]) -> str:
    """What tells a line from the others of its model, in words."""
    kin = [other for other in makers if other.model == maker.model]
    differ = [name for name in Maker._fields if len({getattr(k, name) for k in kin}) > 1]
    words = {
        "weights": f"weights {(maker.weights or 'unknown')[:8]}",
        "sampler": str(maker.sampler),
        "options": _options(maker, kin),
        "seed": f"seed {maker.seed}",
        "num_samples": f"{maker.num_samples} texts",
        "length": maker.length.removeprefix(", "),
    }
    return "".join(f" · {words[name]}" for name in differ if words[name])


def _options(maker: Maker, kin: Sequence[Maker]) -> str:
    """The options in which a line differs from others of its model."""
    ours: Mapping[str, Any] = json.loads(maker.options)
    others = [json.loads(other.options) for other in kin]
    differ = [name for name in ours if any(o.get(name) != ours[name] for o in others)]
    return ", ".join(f"{name} {ours[name]}" for name in differ)


def has_sweep(content: Content) -> bool:
    """Whether some model has several settings at one budget."""
    return any(len(line.at(nfe)) > 1 for line in lines_of(content) for nfe in line.budgets)


def has_path_kl(content: Content) -> bool:
    """Whether a best setting can be told."""
    return any(row.get("path_kl") is not None for row in content.everything())
