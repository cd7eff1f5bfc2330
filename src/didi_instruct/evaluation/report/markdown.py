"""A report as markdown, its plots as files beside it."""

import html
import re
from collections.abc import Iterator, Sequence

from didi_instruct.evaluation.measuring import Row
from didi_instruct.evaluation.report.blocks import Block, blocks_of, sweep_of
from didi_instruct.evaluation.report.content import Content
from didi_instruct.evaluation.report.lines import has_sweep
from didi_instruct.evaluation.report.plots import Plot
from didi_instruct.evaluation.report.texts import CONTROL, side_by_side
from didi_instruct.evaluation.report.verdict import verdict
from didi_instruct.evaluation.report.words import (
    doubts,
    edges,
    facts,
    footnotes,
    main_columns,
    origin,
    reading,
    unwritten_title,
    which_rows,
)
from didi_instruct.evaluation.table import Column, interval_text, meaning, number

MARKUP = re.compile(r"[\\`|*_~\[\]#$!]")
"""What means something in markdown and its common extensions, beside the signs of HTML."""


def render_markdown(content: Content, plots: Sequence[Plot], notes: Sequence[str]) -> bytes:
    """Write the report; `notes` say which plots there are not, and why."""
    columns = main_columns(content)
    blocks = [
        f"# {_safe(content.title)}",
        " · ".join(map(_safe, facts(content))),
        *_verdict(content),
        "## Plots",
        *_plots(plots),
        *map(_safe, notes),
        "## Results",
        _safe(which_rows(content)),
        "\n".join(_table(content, blocks_of(content, columns), columns, footnotes(content))),
        *_footnotes(content),
        *_sweep(content, columns),
        "## How to read this",
        "\n".join(
            f"- **{_safe(c.title)}**: {_safe(meaning(c, content.everything()))}" for c in columns
        ),
        *map(_safe, reading(content)),
        "## Texts side by side",
        *_texts(content),
        "## Where the numbers come from",
        "\n".join(f"- {_safe(name)}: {_safe(value)}" for name, value in origin(content)),
        *([_code(content.command)] if content.command else []),
    ]
    return ("\n\n".join(blocks) + "\n").encode("utf-8", "replace")


def _safe(text: object) -> str:
    """Text that is nothing but text, on one line."""
    plain = html.escape(CONTROL.sub("\ufffd", str(text)), quote=False)
    # Entities, not backslashes: tables are cut at pipes before anything else is read.
    return MARKUP.sub(lambda m: f"&#{ord(m[0])};", plain).replace("\n", "<br>")


def _code(text: str) -> str:
    """A fenced block whose fence the text cannot close."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{text}\n{fence}"


def _verdict(content: Content) -> Iterator[str]:
    """What was found, and what to doubt of it."""
    if found := verdict(content):
        head, *clauses = map(_safe, found)
        yield "\n".join([f"{head}, in nats per text:", "", *(f"- **{c}.**" for c in clauses)])
    for head, *lines in filter(None, (doubts(content), edges(content))):
        yield "\n".join([f"> **{_safe(head)}**", ">", *(f"> - {_safe(line)}" for line in lines)])


def _footnotes(content: Content) -> Iterator[str]:
    if found := footnotes(content):
        yield "\n".join(f"{i}. {_safe(note)}" for i, note in enumerate(found, start=1))


def _sweep(content: Content, columns: Sequence[Column]) -> Iterator[str]:
    if not has_sweep(content):
        return
    blocks = sweep_of(content)
    count = sum(len(block.entries) for block in blocks)
    yield f"<details><summary>All {count} rows of the sweep</summary>"
    yield "\n".join(_table(content, blocks, columns, ()))
    yield "</details>"


def _table(
    content: Content, blocks: Sequence[Block], columns: Sequence[Column], notes: Sequence[str]
) -> Iterator[str]:
    yield _line(["steps", "model", "setting", *(_safe(column.title) for column in columns)])
    yield _line(["---:", "---", "---", *("---:" for _ in columns)])
    for block in blocks:
        for entry in block.entries:
            mark = " (baseline)" if entry.line.is_baseline else ""
            name = _safe(("⚠ " if entry.doubt else "") + entry.line.label + mark)
            cells = [str(block.nfe), name, _safe(entry.setting)]
            for column in columns:
                value = _safe(number(entry.row, column))
                value = f"**{value}**" if column.field in entry.leads else value
                value += _mark(entry.row, column, notes)
                cells.append(_with_ends(value, interval_text(entry.row, column)))
            yield _line(cells)
    for name, row in content.unwritten:
        cells = ["", _safe(name), unwritten_title(content).lower()]
        for column in columns:
            value = _safe(number(row, column)) + _mark(row, column, notes)
            cells.append(_with_ends(value, interval_text(row, column)))
        yield _line(cells)


def _mark(row: Row, column: Column, notes: Sequence[str]) -> str:
    note = row.get(f"{column.field}_note")
    return f"<sup>{notes.index(note) + 1}</sup>" if note in notes else ""


def _with_ends(value: str, ends: str) -> str:
    return f"{value} <sub>{_safe(ends)}</sub>" if ends else value


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _plots(plots: Sequence[Plot]) -> Iterator[str]:
    for plot in plots:
        yield f"### {_safe(plot.title)}"
        yield f"![{_safe(plot.alt)}]({plot.file})"
        yield _safe(plot.caption)


def _texts(content: Content) -> Iterator[str]:
    shown = side_by_side(content)
    yield _safe(shown.note)
    if not shown.count:
        return
    lines = [_line(["", *(f"{_safe(s.label)}, {_safe(s.steps)}" for s in shown.sides)])]
    lines.append(_line(["---:", *("---" for _ in shown.sides)]))
    for number_ in range(shown.count):
        texts = [side.texts[number_] for side in shown.sides]
        cells = [_safe(head) + (" …" if rest else "") for head, rest in texts]
        lines.append(_line([str(number_ + 1), *cells]))
    yield "\n".join(lines)
    if any(rest for side in shown.sides for _, rest in side.texts):
        yield "… marks texts that go on; report.html has them whole."
