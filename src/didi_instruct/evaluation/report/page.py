"""A report as one HTML page: no network, no script, no file beside it."""

import html
from collections.abc import Iterator, Sequence
from pathlib import Path

from didi_instruct.evaluation.measuring import Row
from didi_instruct.evaluation.report.blocks import Block, Entry, blocks_of, sweep_of
from didi_instruct.evaluation.report.content import Content
from didi_instruct.evaluation.report.lines import has_sweep
from didi_instruct.evaluation.report.plots import Plot
from didi_instruct.evaluation.report.texts import CONTROL, side_by_side
from didi_instruct.evaluation.report.verdict import verdict
from didi_instruct.evaluation.report.words import (
    budget,
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

TEMPLATE = Path(__file__).with_name("page.html")
WIDE = 7
"""Columns that fit on upright paper."""
FOLDED = '<span class="fold"> (folded: open it in the page to print it)</span>'
FEW = 4
"""Lines of a warning that are shown at once."""


def render_page(content: Content, plots: Sequence[Plot], notes: Sequence[str]) -> bytes:
    """Fill the page; `notes` say which plots there are not, and why."""
    columns = main_columns(content)
    body = [
        *_verdict(content),
        *_plots(plots, notes),
        *_results(content, columns),
        *_reading(content, columns),
        *_texts(content),
        *_origin(content),
    ]
    wide = len(columns) > WIDE
    parts = {
        "title": _safe(content.title),
        "facts": "".join(f"<li>{_safe(fact)}</li>" for fact in facts(content)),
        "body": "\n".join(body),
        "paper": "size: landscape;" if wide else "",
        "small": "7.5pt" if wide else "8.5pt",
    }
    # Cut at the marks of the template before filling, so that no text can pose as a mark.
    pieces = TEMPLATE.read_text(encoding="utf-8").split("%%")
    page = "".join(parts[piece] if i % 2 else piece for i, piece in enumerate(pieces))
    return page.encode("utf-8", "replace")


def _safe(text: object) -> str:
    return html.escape(CONTROL.sub("\ufffd", str(text)))


def _name(text: object) -> str:
    """A name that may be broken where a reader would break it."""
    return _safe(text).replace("/", "/<wbr>").replace("_", "_<wbr>")


def _verdict(content: Content) -> Iterator[str]:
    """What was found, and what to doubt of it; long lists of doubts are folded."""
    if found := verdict(content):
        head, *clauses = map(_safe, found)
        yield f'<div class="verdict"><p>{head}, in nats per text:</p><ul>'
        yield "".join(f"<li>{clause}.</li>" for clause in clauses) + "</ul></div>"
    for head, *lines in filter(None, (doubts(content), edges(content))):
        items = "".join(f"<li>{_safe(line)}</li>" for line in lines)
        title = f"<strong>{_safe(head)}</strong>"
        yield '<aside class="warn" aria-label="Warning">'
        if len(lines) > FEW:
            yield f"<details><summary>{title}{FOLDED}</summary><ul>{items}</ul></details></aside>"
        else:
            yield f"<p>{title}</p><ul>{items}</ul></aside>"


def _results(content: Content, columns: Sequence[Column]) -> Iterator[str]:
    notes = footnotes(content)
    yield "<h2>Results</h2>"
    yield from _table(content, blocks_of(content, columns), columns, which_rows(content), notes)
    if notes:
        yield '<ol class="notes">'
        yield from (f"<li>{_safe(note)}</li>" for note in notes)
        yield "</ol>"
    if has_sweep(content):
        blocks = sweep_of(content)
        count = sum(len(block.entries) for block in blocks)
        yield f"<details><summary>All {count} rows of the sweep{FOLDED}</summary>"
        yield from _table(content, blocks, columns, "Every setting that was measured.", [])
        yield "</details>"


def _table(
    content: Content,
    blocks: Sequence[Block],
    columns: Sequence[Column],
    caption: str,
    notes: Sequence[str],
) -> Iterator[str]:
    yield '<div class="scroll" role="region" aria-label="Table" tabindex="0"><table>'
    yield f"<caption><span>{_safe(caption)}</span></caption>"
    heads = "".join(f'<th scope="col">{_safe(column.title)}</th>' for column in columns)
    yield f'<thead><tr><th scope="col">model</th>{heads}</tr></thead>'
    span = len(columns) + 1
    for block in blocks:
        title = f"<span>{budget(block.nfe)}</span>"
        yield f'<tbody><tr class="budget"><th colspan="{span}" scope="rowgroup">{title}</th></tr>'
        before: Entry | None = None
        for entry in block.entries:
            same = before is not None and before.line is entry.line
            yield _row(entry, columns, notes, same=same)
            before = entry
        yield "</tbody>"
    if below := content.unwritten:
        title = f"<span>{unwritten_title(content)}</span>"
        yield f'<tbody><tr class="budget"><th colspan="{span}" scope="rowgroup">{title}</th></tr>'
        for name, row in below:
            cells = "".join(_cell(row, column, notes=notes) for column in columns)
            yield f'<tr><th scope="row">{_name(name)}</th>{cells}</tr>'
        yield "</tbody>"
    yield "</table></div>"


def _row(entry: Entry, columns: Sequence[Column], notes: Sequence[str], *, same: bool) -> str:
    words = [word for word in ("baseline" * entry.line.is_baseline, entry.setting) if word]
    small = f"<small>{_safe(', '.join(words))}</small>" if words else ""
    cells = "".join(_cell(entry.row, column, entry, notes) for column in columns)
    kind = ' class="same"' if same else ""
    mark = title = ""
    if entry.doubt:
        mark = '<span class="mark" role="img" aria-label="low variety">⚠</span> '
        title = f' title="{_safe(entry.doubt)}"'
    name = _name(entry.line.label)
    return f'<tr{kind}><th scope="row"{title}>{mark}{name}{small}</th>{cells}</tr>'


def _cell(row: Row, column: Column, entry: Entry | None = None, notes: Sequence[str] = ()) -> str:
    value, title = _safe(number(row, column)), ""
    if entry is not None and column.field in entry.leads:
        value = f"<strong>{value}</strong>"
    if note := row.get(f"{column.field}_note"):
        title = f' title="{_safe(note)}"'
        value += f"<sup>{notes.index(note) + 1}</sup>" if note in notes else ""
    ends = interval_text(row, column)
    return f"<td{title}>{value}{f'<small>{_safe(ends)}</small>' if ends else ''}</td>"


def _reading(content: Content, columns: Sequence[Column]) -> Iterator[str]:
    yield '<h2>How to read this</h2><dl class="meanings">'
    for column in columns:
        words = _safe(meaning(column, content.everything()))
        yield f"<div><dt>{_safe(column.title)}</dt><dd>{words}</dd></div>"
    yield "</dl>"
    yield from (f'<p class="note">{_safe(line)}</p>' for line in reading(content))


def _plots(plots: Sequence[Plot], notes: Sequence[str]) -> Iterator[str]:
    yield '<h2>Plots</h2><div class="plots">'
    for plot in plots:
        names = ("full", "narrow") if len(plot.svgs) > 1 else ("",)
        yield f"<figure{' class=wide' if len(plot.svgs) > 1 else ''}><h3>{_safe(plot.title)}</h3>"
        for name, svg in zip(names, plot.svgs, strict=True):
            label = f'class="{name}" role="img" aria-label="{_safe(plot.alt)}"'
            yield svg.replace("<svg", f"<svg {label}", 1)
        yield f"<figcaption>{_safe(plot.caption)}</figcaption></figure>"
    yield "</div>"
    yield from (f'<p class="note">{_safe(note)}</p>' for note in notes)


def _texts(content: Content) -> Iterator[str]:
    shown = side_by_side(content)
    yield f'<h2>Texts side by side</h2><p class="note">{_safe(shown.note)}</p>'
    for number_ in range(shown.count):
        yield f'<article><h3>Text {number_ + 1}</h3><div class="sides">'
        for side in shown.sides:
            head, rest = side.texts[number_]
            yield f"<section><h4>{_name(side.label)} <span>{_safe(side.steps)}</span></h4>"
            yield f'<p dir="auto">{_safe(head)}{" …" if rest else ""}</p>'
            if rest:
                yield '<details><summary>show all<span class="fold"> (in the page)</span></summary>'
                yield f'<p dir="auto">… {_safe(rest)}</p></details>'
            yield "</section>"
        yield "</div></article>"


def _origin(content: Content) -> Iterator[str]:
    yield '<h2>Where the numbers come from</h2><dl class="origin">'
    yield from (f"<dt>{_safe(k)}</dt><dd>{_safe(v)}</dd>" for k, v in origin(content))
    yield "</dl>"
    if content.command:
        yield f"<pre>{_safe(content.command)}</pre>"
