"""What a report tells, before it is a page: which rows are shown, which marked, which doubted.

A sweep has dozens of rows per model. Of each model at each budget the report shows two: the plain
setting, and the one with the lowest path KL. The rest is there to be unfolded.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from didi_instruct.evaluation.rows import Row
from didi_instruct.evaluation.samples import SampleSet
from didi_instruct.evaluation.table import Column, interval, unsampled

LOW_ENTROPY = 0.02
"""Share of entropy whose loss is no longer noise: it can halve a perplexity by itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Content:
    """Everything a report is made of."""

    title: str
    rows: Sequence[Row]
    baseline: Sequence[Row] = ()
    """Of the model that `rows` are compared with."""
    reference: Row = field(default_factory=dict)
    """The same measures of real text; empty without one."""
    judge: str | None = None
    samples: Sequence[SampleSet] = ()
    """Those behind the rows, for texts side by side."""
    provenance: Mapping[str, Any] = field(default_factory=dict)
    command: str | None = None
    """What makes the report again."""

    @property
    def real(self) -> Row:
        """The reference text, without the settings of a sampler."""
        return unsampled(self.reference)

    def everything(self) -> list[Row]:
        """All rows that were measured."""
        return [*self.rows, *self.baseline, *([self.real] if self.reference else [])]


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


@dataclass(frozen=True, slots=True)
class Entry:
    """A row in its place."""

    line: Line
    row: Row
    setting: str
    """In words; empty where there is only one."""
    doubt: str | None = None
    """Why its perplexity should not be compared."""
    leads: frozenset[str] = frozenset()
    """Fields in which it is better than all other models at this budget, beyond doubt."""


@dataclass(frozen=True, slots=True)
class Block:
    """Rows to compare with each other: those of one budget."""

    nfe: int
    entries: tuple[Entry, ...]


def is_plain(row: Row) -> bool:
    """Whether a row has neither temperature nor top-p."""
    return (row.get("temperature", 1), row.get("top_p", 1)) == (1, 1)


def setting(row: Row) -> str:
    """Temperature and top-p in words."""
    parts = []
    if row.get("temperature", 1) != 1:
        parts.append(f"T {row['temperature']:g}")
    if row.get("top_p", 1) != 1:
        parts.append(f"top-p {row['top_p']:g}")
    return ", ".join(parts) or "plain"


def lines_of(content: Content) -> list[Line]:
    """Rows by model, sampler and seed, the baseline first; a row that is there twice counts once.

    A model that is its own baseline has rows of both kinds; those of `rows` know more.
    """
    found: dict[tuple[Any, ...], dict[tuple[Any, ...], Row]] = defaultdict(dict)
    for row in (*content.rows, *content.baseline):
        key = (row["model"], row.get("sampler"), row.get("seed"))
        found[key].setdefault((row["nfe"], row.get("temperature"), row.get("top_p")), row)
    baseline = {row["model"] for row in content.baseline}
    names = short_names([key[0] for key in found])
    lines = [
        Line(_label(key, names, list(found)), key[0], key[0] in baseline, tuple(rows.values()))
        for key, rows in found.items()
    ]
    return sorted(lines, key=lambda line: not line.is_baseline)


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


def _label(key: tuple[Any, ...], names: Mapping[str, str], keys: Sequence[tuple[Any, ...]]) -> str:
    model, sampler, seed = key
    kin = [other for other in keys if other[0] == model]
    label = names[model]
    if len({other[1] for other in kin}) > 1:
        label += f" · {sampler}"
    if len({other[2] for other in kin}) > 1:
        label += f" · seed {seed}"
    return label


def has_sweep(content: Content) -> bool:
    """Whether some model has several settings at one budget."""
    return any(len(line.at(nfe)) > 1 for line in lines_of(content) for nfe in line.budgets)


def has_path_kl(content: Content) -> bool:
    """Whether a best setting can be told."""
    return any(row.get("path_kl") is not None for row in content.everything())


def blocks_of(content: Content, columns: Sequence[Column]) -> list[Block]:
    """Choose the rows of the main table: plain and best, by budget."""
    lines = lines_of(content)
    found = []
    for nfe in sorted({nfe for line in lines for nfe in line.budgets}):
        chosen = [(line, row, words) for line in lines for row, words in _chosen(line, nfe)]
        leaders = {c.field: _leader([(li, r) for li, r, _ in chosen], c) for c in columns}
        entries = []
        for line, row, words in chosen:
            leads = frozenset(name for name, leader in leaders.items() if leader is row)
            entries.append(Entry(line, row, words, doubt(content, lines, row), leads))
        found.append(Block(nfe, tuple(entries)))
    return found


def sweep_of(content: Content) -> list[Block]:
    """All rows, by budget and model; nothing is marked but doubts."""
    lines = lines_of(content)
    return [
        Block(
            nfe,
            tuple(
                Entry(line, row, setting(row), doubt(content, lines, row))
                for line in lines
                for row in line.at(nfe)
            ),
        )
        for nfe in sorted({nfe for line in lines for nfe in line.budgets})
    ]


def _chosen(line: Line, nfe: int) -> Iterator[tuple[Row, str]]:
    plain, best = line.plain(nfe), line.best(nfe)
    if plain is None or best is None:
        return
    alone = len(line.at(nfe)) == 1
    known = best.get("path_kl") is not None
    if alone:
        yield plain, "" if is_plain(plain) else setting(plain)
    elif plain is best:
        yield plain, f"{setting(plain)}, the best" if known else setting(plain)
    else:
        yield plain, setting(plain)
        yield best, f"best: {setting(best)}"


def _leader(chosen: Sequence[tuple[Line, Row]], column: Column) -> Row | None:
    """The row whose interval lies beyond those of all other models; None where they overlap."""
    if column.better is None:
        return None
    sign = 1 if column.better == "lower" else -1
    known = [(line, row) for line, row in chosen if row.get(column.field) is not None]
    if not known:
        return None
    leader, first = min(known, key=lambda pair: sign * pair[1][column.field])
    mine = interval(first, column.field)
    rivals = [interval(row, column.field) for line, row in known if line is not leader]
    if mine is None or not rivals:
        return None
    for other in rivals:
        if other is None or max(sign * end for end in mine) >= min(sign * end for end in other):
            return None
    return first


def doubt(content: Content, lines: Sequence[Line], row: Row) -> str | None:
    """Why a row's perplexity should not be compared: its entropy is low, in words."""
    value = row.get("entropy")
    if value is None:
        return None
    rivals = [(content.real.get("entropy"), "the reference text's")]
    for line in lines:
        plain = line.plain(row["nfe"]) if line.is_baseline else None
        if plain is not None and is_plain(plain):
            rivals.append((plain.get("entropy"), "the plain baseline's"))
    known = [(other, whose) for other, whose in rivals if other]
    low = [pair for pair in known if value < (1 - LOW_ENTROPY) * pair[0]]
    if not low:
        return None
    other, whose = max(low)
    return f"entropy {value:.3f} is {1 - value / other:.0%} below {whose} {other:.3f}"


def facts(content: Content) -> list[str]:
    """What holds for all rows, in a few words each."""
    rows = [*content.rows, *content.baseline]
    found = [f"{_values(rows, 'num_samples')} texts per row"] if rows else []
    if _values(rows, "length"):
        found.append(f"{_values(rows, 'length')} tokens each")
    if _values(rows, "sampler"):
        found.append(f"sampler {_values(rows, 'sampler')}")
    if _values(rows, "seed"):
        found.append(f"seed {_values(rows, 'seed')}")
    found.append(f"judge {content.judge}" if content.judge else "no judge")
    if content.reference:
        found.append(f"reference {short_names([content.real['model']])[content.real['model']]}")
    return found


def _values(rows: Sequence[Row], name: str) -> str:
    values = {row[name] for row in rows if row.get(name) is not None}
    return ", ".join(str(value) for value in sorted(values))
