"""A table of ours beside the paper's: Markdown for people, CSV for spreadsheets, JSON for programs.

Rows are long: one for each model, budget and seed. Markdown puts budgets side by side and seeds
together; the other two keep every row.
"""

import csv
import io
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

from didi_instruct.data.files import no_space_as_user_error, write_atomic
from didi_instruct.reproduce.methods import TRAINED_ONCE

Row = dict[str, Any]
NOTHING = "–"
ENOUGH_SEEDS = 3
"""Seeds whose range says something."""
GEOMETRIC = ("ppl",)
"""Averaged over seeds by its logarithm: one that diverged says nothing of the others."""
ALWAYS = ("seed", "num_samples")
"""Columns of the CSV that every row has."""
SOMETIMES = (
    "temperature", "top_p", "training_minutes", "bank_minutes", "updates", "updates_of",
    "at_chance", "saturated",
)  # fmt: skip
"""Columns of the CSV that appear if some row has a value."""


@dataclass(frozen=True, slots=True)
class Shown:
    """A number that a table shows."""

    column: str
    title: str
    form: str = ".2f"


PPL, ENTROPY = Shown("ppl", "perplexity", ".4g"), Shown("entropy", "entropy", ".3f")
PATH_KL = Shown("path_kl", "path KL", ".2f")
APART = "In the paper, of another language, judge and size (nothing here compares with it):"
PASSES = Shown("passes", "passes", ".3g")
"""Forward passes of a text, which guidance takes more of than steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Rows of ours and of the paper, and how to lay them out."""

    title: str = ""
    """Empty: that of its item."""
    rows: Sequence[Row]
    labels: tuple[str, ...] = ("method",)
    """Columns that name a line."""
    across: str | None = "nfe"
    """Column whose values stand side by side."""
    across_title: str = "NFE"
    shown: tuple[Shown, ...] = (PPL, ENTROPY)
    brief: tuple[Shown, ...] = ()
    """Columns for a terminal, where there are many; empty: all."""
    paper: Sequence[Row] = ()
    over: str = "samples"
    """Units that the intervals are computed over."""
    notes: Sequence[str] = ()
    """Notes below the table, one or two sentences each."""
    appendix: str = ""
    """Markdown that follows the table."""
    sweep: Sequence[Row] = ()
    """Rows of the files for programs, where those of the table are a choice from them."""

    def __post_init__(self) -> None:
        """Perplexity alone proves nothing."""
        columns = [one.column for one in self.shown]
        assert "ppl" not in columns or "entropy" in columns, columns


@dataclass(frozen=True, slots=True)
class Cell:
    """A number over seeds."""

    mean: float | None
    low: float | None = None
    high: float | None = None
    seeds: int = 1


def cells(rows: Sequence[Row], labels: Sequence[str], across: str | None) -> dict[Any, list[Row]]:
    """Rows by what they are a number of: labels, and the place side by side."""
    found: dict[Any, list[Row]] = {}
    for row in rows:
        place = (tuple(row.get(name) for name in labels), row.get(across) if across else None)
        found.setdefault(place, []).append(row)
    return found


def over_seeds(rows: Sequence[Row], column: str) -> Cell:
    """Mean over seeds, of perplexities the geometric one; ends are those of three seeds or more.

    The range of two seeds holds the truth half of the time: of two or one, the ends are those of
    the samples' 95% intervals, from the lowest to the highest, where every seed has one.
    """
    known = [row for row in rows if _known(row.get(column))]
    values = [row[column] for row in known]
    if not values:
        return Cell(None)
    geometric = column in GEOMETRIC and len(values) > 1 and min(values) > 0
    mean = fmean(values) if not geometric else geometric_mean(values)
    ends = [row.get(f"{column}_ci95") for row in known]
    if len(values) < ENOUGH_SEEDS and all(ends):
        lows, highs = zip(*ends, strict=True)
        return Cell(mean, min(lows), max(highs), len(values))
    if len(values) > 1:
        return Cell(mean, min(values), max(values), len(values))
    return Cell(mean)


def _known(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def lay_out(table: Table, *, brief: bool = False) -> tuple[list[str], list[list[str]]]:
    """Titles and lines: ours, and the paper's under it where it has the same.

    `brief` leaves out intervals, columns that the paper alone has, and what is too much.
    """
    if brief and table.brief:
        table = replace(table, shown=table.brief)
    ours, theirs = (cells(r, table.labels, table.across) for r in (table.rows, table.paper))
    lines = list(dict.fromkeys(line for line, _ in (*ours, *theirs)))
    columns = ours if brief and ours else (*ours, *theirs)
    places = _sorted(dict.fromkeys(place for _, place in columns))
    named = [_word(table.across_title, p) for p in places]
    across = named if table.across else [one.title for one in table.shown]
    whose = bool(table.paper)
    titles = [*table.labels, *(["of"] if whose else []), *across]
    body = []
    for line in lines:
        words = [NOTHING if w is None else str(w) for w in line]
        for name, side in (("ours", ours), ("paper", theirs)):
            if not any((line, p) in side for p in places):
                continue
            body.append(
                [*words, *([name] if whose else []), *_numbers(table, side, line, places, brief)]
            )
            words = [""] * len(words)
    return titles, body


def _numbers(
    table: Table, side: Mapping[Any, list[Row]], line: Any, places: Sequence[Any], brief: bool
) -> Iterator[str]:
    def numbers(rows: Sequence[Row]) -> Iterator[str]:
        for one in table.shown:
            cell = over_seeds(rows, one.column)
            yield show(Cell(cell.mean) if brief else cell, one)

    if not table.across:
        yield from numbers(side[line, None])
        return
    for place in places:
        rows = side.get((line, place))
        if rows is None:
            yield NOTHING
            continue
        yield " / ".join(numbers(rows))


def show(cell: Cell, shown: Shown) -> str:
    """A number, with half of the way between its ends; the ends themselves where they lie far."""
    if cell.mean is None:
        return NOTHING
    large = abs(cell.mean) >= 1000 and shown.form.endswith("g")  # no powers of ten
    form = ",.0f" if large else shown.form
    text = f"{cell.mean:{form}}"
    if cell.low is None or cell.high is None:
        return text
    half = (cell.high - cell.low) / 2
    if half == 0:
        return text
    if half > abs(cell.mean) / 2 and shown.column in GEOMETRIC:
        return f"{text} [{cell.low:{form}}, {cell.high:{form}}]"
    digits = ".0%" if shown.form.endswith("%") else ",.0f" if half >= 10 else ".2g"
    return f"{text} ± {half:{digits}}"


def _sorted(places: Iterable[Any]) -> list[Any]:
    """Numbers by size; names as they came."""
    found = list(places)
    return sorted(found) if all(_known(place) for place in found) else found


def _word(title: str, place: Any) -> str:
    return f"{place}" if isinstance(place, str) else f"{place} {title}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Edition:
    """Context that is written with a table: scale, judge, provenance, failures."""

    item: str
    where: str
    scale: str
    says: str
    judge: str
    provenance: Mapping[str, str]
    jobs: Sequence[Row] = ()
    """Name, key and seconds of each job behind the table; None: it was not here."""
    failed: Sequence[str] = ()
    figure: str | None = None
    """Its file, beside the table's."""


def to_markdown(table: Table, edition: Edition) -> str:
    """The table for people."""
    apart = edition.scale == "toy" and bool(table.paper)
    blocks = [replace(table, paper=())] if apart else [table]
    where = f"{edition.where} of the paper. " if edition.where else "Not in the paper. "
    parts = [
        f"# {table.title}",
        f"{where}{edition.says}",
        *([f"![{table.title}]({edition.figure})"] if edition.figure else []),
        _how_to_read(table, edition),
        *("\n".join(_markdown(*lay_out(block))) for block in blocks),
    ]
    if apart:
        theirs = replace(table, rows=table.paper, paper=(), shown=_printed(table))
        parts += [APART, "\n".join(_markdown(*lay_out(theirs)))]
    if edition.failed:
        lost = "\n".join(f"- {line}" for line in edition.failed)
        parts.append(f"**Missing:**\n\n{lost}")
    if table.notes:
        parts.append("\n".join(f"- {note}" for note in table.notes))
    if table.appendix:
        parts.append(table.appendix)
    facts = [f"- {name}: {value}" for name, value in edition.provenance.items()]
    facts += [f"- job {j['name']}: {j['key']}, {_spent(j)}" for j in edition.jobs]
    parts.append("## Where the numbers come from\n\n" + "\n".join(facts))
    return "\n\n".join(parts) + "\n"


def _spent(job: Row) -> str:
    """Seconds of a job, or by what recipe it was trained where nobody here knows them."""
    seconds = job["seconds"]
    return f"trained elsewhere by {job['recipe']}" if seconds is None else f"{seconds:.0f} s"


def _printed(table: Table) -> tuple[Shown, ...]:
    """Numbers of a table that the paper prints."""
    return tuple(s for s in table.shown if any(_known(row.get(s.column)) for row in table.paper))


def _how_to_read(table: Table, edition: Edition) -> str:
    seeds = sorted({row["seed"] for row in table.rows if row.get("seed") is not None})
    counts = sorted({row["num_samples"] for row in table.rows if row.get("num_samples")})
    what = " / ".join(one.title for one in table.shown)
    ends = dict.fromkeys((counts[0], counts[-1])) if counts else ()
    parts = [
        f"cells are {what}" if table.across else "",
        f"judge: {edition.judge}" if any(s.column == "ppl" for s in table.shown) else "",
        f"seeds {', '.join(map(str, seeds))}" if seeds else "",
        f"{' to '.join(map(str, ends))} texts a row" if ends else "",
    ]
    text = "; ".join(part for part in parts if part)
    text = text[:1].upper() + text[1:]
    has_ends = len(seeds) > 1 or any(
        row.get(f"{one.column}_ci95") for row in table.rows for one in table.shown
    )
    theirs = "; the paper gives none" if table.paper else ""
    if len(seeds) > 1 and any(one.column in GEOMETRIC for one in table.shown):
        text += "; perplexities are geometric means, [ ] are both ends where they lie far apart"
    return f"{text}." + (
        f" ± is {_spread(len(seeds), table.over)}{theirs}.{_draws(table)}" if has_ends else ""
    )


def _spread(seeds: int, over: str) -> str:
    """Meaning of ± for that many seeds."""
    if seeds < 2:
        return f"half of the 95% interval over {over}"
    if seeds < ENOUGH_SEEDS:
        return (
            "half the way from the lowest to the highest end of both seeds' 95% intervals over "
            f"{over} (a number that has none: half the range of the two, which says little)"
        )
    return f"half the range over {seeds} seeds, which is no 95% interval"


def _draws(table: Table) -> str:
    """A note on rows whose model is trained once: their seeds are draws."""
    seeds = {row.get("seed") for row in table.rows}
    once = any(row.get("role") in TRAINED_ONCE for row in table.rows)
    return " Seeds of a teacher's or an AR row are draws alone." if once and len(seeds) > 1 else ""


def _markdown(titles: Sequence[str], body: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(map(_safe, titles))} |"
    yield f"|{'---|' * len(titles)}"
    for line in body:
        yield f"| {' | '.join(map(_safe, line))} |"


def _safe(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def to_csv(table: Table) -> str:
    """Every row, ours and the paper's; what is not a plain value is left to the JSON."""
    names = [*table.labels, *([table.across] if table.across else []), "of"]
    rows = table.sweep or table.rows
    numbers = [c for one in table.shown for c in (one.column, f"{one.column}_ci95")]
    more = [c for c in SOMETIMES if any(row.get(c) is not None for row in rows)]
    columns = list(dict.fromkeys([*names, *numbers, "passes", *more, *ALWAYS]))
    file = io.StringIO()
    writer = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for whose, side in (("ours", rows), ("paper", table.paper)):
        for row in side:
            flat = {
                k: " ".join(map(str, v)) if isinstance(v, list | tuple) else v
                for k, v in row.items()
            }
            writer.writerow(flat | {"of": whose})
    return file.getvalue()


def to_json(table: Table, edition: Edition) -> str:
    """Everything."""
    value = {
        "item": edition.item,
        "title": table.title,
        "where": edition.where,
        "scale": edition.scale,
        "says": edition.says,
        "judge": edition.judge,
        "rows": list(table.sweep or table.rows),
        "paper": list(table.paper),
        "notes": list(table.notes),
        "failed": list(edition.failed),
        "jobs": list(edition.jobs),
        "provenance": dict(edition.provenance),
    }
    return json.dumps(value, indent=1, allow_nan=False) + "\n"


def write_table(table: Table, edition: Edition, folder: Path) -> list[Path]:
    """Write ITEM.md, .csv and .json; return what was written, with the figure if there is one."""
    written = []
    with no_space_as_user_error(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for suffix, text in (
            (".md", to_markdown(table, edition)),
            (".csv", to_csv(table)),
            (".json", to_json(table, edition)),
        ):
            written.append((folder / edition.item).with_suffix(suffix))
            write_atomic(written[-1], text.encode())
    return [*written, *([folder / edition.figure] if edition.figure else [])]
