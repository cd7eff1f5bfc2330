"""A report in a terminal: the verdict, the main table as wide as the window, and what to doubt."""

from collections.abc import Sequence
from pathlib import PurePosixPath

from didi_instruct.evaluation.report.blocks import Entry, blocks_of
from didi_instruct.evaluation.report.content import Content
from didi_instruct.evaluation.report.verdict import verdict
from didi_instruct.evaluation.report.words import doubts, edges, footnotes, main_columns
from didi_instruct.evaluation.table import Column, number

GAP = 2
"""Spaces between columns."""
NEEDED = ("ppl", "entropy")
"""Columns that are never left out: the one means nothing without the other."""


def render_terminal(content: Content, width: int) -> list[str]:
    """Lines of the main table and of what belongs to it; columns that do not fit are named."""
    columns = main_columns(content)
    entries = [
        (block.nfe, entry) for block in blocks_of(content, columns) for entry in block.entries
    ]
    names = [_name(entry) for _, entry in entries]
    below = content.unwritten
    names += [PurePosixPath(name).name or name for name, _ in below]
    rows = [entry.row for _, entry in entries] + [row for _, row in below]
    steps = [str(nfe) for nfe, _ in entries] + [""] * len(below)
    first = max(map(len, ["model", *names]))
    second = max(map(len, ["steps", *steps])) + GAP
    cells = {c.field: [number(row, c) for row in rows] for c in columns}
    widths = {c.field: max(map(len, [c.title, *cells[c.field]])) + GAP for c in columns}
    shown = _fitting(columns, widths, width - first - second)
    lines = [f"{line}." for line in verdict(content)]
    lines.append("model".ljust(first) + "steps".rjust(second) + _line(shown, widths, None))
    for place, name in enumerate(names):
        values = {c.field: cells[c.field][place] for c in shown}
        lines.append(name.ljust(first) + steps[place].rjust(second) + _line(shown, widths, values))
    if left := [column.title for column in columns if column not in shown]:
        lines.append(f"In the report, for want of room here: {', '.join(left)}.")
    lines += [found[0] for found in (doubts(content), edges(content)) if found]
    return lines + footnotes(content)


def _name(entry: Entry) -> str:
    words = entry.setting.replace(", the edge of the sweep", ", edge")
    setting = f" ({words})" if words else ""
    baseline = ", baseline" if entry.line.is_baseline else ""
    return f"{entry.line.label}{baseline}{setting}" + (" ⚠" if entry.doubt else "")


def _fitting(columns: Sequence[Column], widths: dict[str, int], room: int) -> list[Column]:
    """As many columns as fit, those further right left out first."""
    shown = list(columns)
    for column in reversed(columns):
        if sum(widths[c.field] for c in shown) <= room:
            break
        if column.field not in NEEDED:
            shown.remove(column)
    return shown


def _line(columns: Sequence[Column], widths: dict[str, int], values: dict[str, str] | None) -> str:
    texts = [c.title if values is None else values[c.field] for c in columns]
    return "".join(text.rjust(widths[c.field]) for c, text in zip(columns, texts, strict=True))
