"""Which rows are shown, which marked, which doubted.

A sweep has dozens of rows per model. Of each model at each budget the report shows two: the plain
setting, and the one with the lowest path KL. The rest is there to be unfolded.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from didi_instruct.evaluation.measuring import Row
from didi_instruct.evaluation.report.content import Content
from didi_instruct.evaluation.report.doubts import doubt, edge
from didi_instruct.evaluation.report.lines import Line, is_plain, lines_of, setting
from didi_instruct.evaluation.table import Column, interval


@dataclass(frozen=True, slots=True)
class Entry:
    """A row in its place."""

    line: Line
    row: Row
    setting: str
    """In words; empty where there is only one."""
    doubt: str | None = None
    """Why its perplexity and path KL should not be compared."""
    leads: frozenset[str] = frozenset()
    """Fields in which it is better than all other models at this budget, beyond doubt."""


@dataclass(frozen=True, slots=True)
class Block:
    """Rows to compare with each other: those of one budget."""

    nfe: int
    entries: tuple[Entry, ...]


def blocks_of(content: Content, columns: Sequence[Column]) -> list[Block]:
    """Choose the rows of the main table: plain and best, by budget."""
    lines = lines_of(content)
    found = []
    for nfe in sorted({nfe for line in lines for nfe in line.budgets}):
        chosen = [(line, row, words) for line in lines for row, words in _chosen(line, nfe)]
        leaders = [(c.field, row) for c in columns for row in _leaders(chosen, c)]
        entries = []
        for line, row, words in chosen:
            leads = frozenset(name for name, leader in leaders if leader is row)
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
    known = best.get("path_kl") is not None
    if len(line.at(nfe)) == 1:
        yield plain, "" if is_plain(plain) else setting(plain)
        return
    at_edge = ", the edge of the sweep" if edge(line, nfe) else ""
    if plain is best:
        yield plain, f"{setting(plain)}, the best{at_edge}" if known else setting(plain)
    else:
        yield plain, setting(plain)
        yield best, f"best: {setting(best)}{at_edge}"


def _leaders(chosen: Sequence[tuple[Line, Row, str]], column: Column) -> Iterator[Row]:
    """The best row of each length, where it is beyond doubt."""
    for length in dict.fromkeys(row.get("length") for _, row, _ in chosen):
        alike = [(line, row) for line, row, _ in chosen if row.get("length") == length]
        if leader := _leader(alike, column):
            yield leader


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
