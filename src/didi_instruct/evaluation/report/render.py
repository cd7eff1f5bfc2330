"""A report in its forms: one HTML page, Markdown with figures beside it, a terminal."""

import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from didi_instruct.data.files import no_space_as_user_error, write_atomic
from didi_instruct.errors import UserError
from didi_instruct.evaluation.measuring import Evaluation
from didi_instruct.evaluation.report.figures import NAMES, Plot, draw_plots
from didi_instruct.evaluation.report.summary import Entry, Summary, clean

FOLDER = Path(__file__).parent
MARKUP = re.compile(r"[\\`|*_~\[\]#$!]")
"""Characters with a meaning in Markdown and its common extensions, beside those of HTML."""
NEEDED = ("ppl", "entropy")
"""Columns that a terminal never leaves out: perplexity means nothing without entropy."""


@dataclass(frozen=True, slots=True)
class Report:
    """Everything an evaluation says, computed once."""

    summary: Summary
    plots: Sequence[Plot]
    missing_plots: Sequence[str]
    """Why there are no others."""

    @classmethod
    def build(
        cls,
        evaluation: Evaluation,
        title: str,
        *,
        provenance: Mapping[str, Any] | None = None,
        command: str | None = None,
    ) -> "Report":
        """Summarise an evaluation and draw its figures; `command` is what makes it again."""
        summary = Summary(evaluation, title, provenance, command)
        if not summary.rows.all:
            raise UserError("There is nothing to report: evaluate a model first.")
        return cls(summary, *draw_plots(summary.rows))

    def write(self, folder: Path) -> tuple[Path, Path]:
        """Write `report.html`, which needs no other file, and `report.md` with its figures.

        Each file is whole or not there. Figures of an earlier report that this one has not are
        removed.
        """
        page, text = folder / "report.html", folder / "report.md"
        with no_space_as_user_error(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for plot in self.plots:
                write_atomic(folder / plot.file, plot.png)
            write_atomic(text, self._render("report.md.j2", _markdown))
            write_atomic(page, self._render("report.html.j2", _html))
        for name in set(NAMES) - {plot.name for plot in self.plots}:
            (folder / f"report-{name}.png").unlink(missing_ok=True)
        return page, text

    def to_terminal(self, width: int) -> RenderableType:
        """Findings, the main table as wide as the window, and what to doubt."""
        s = self.summary
        entries = [entry for group in (*s.table, *s.not_sampled) for entry in group.entries]
        names, longest = [_terminal_name(entry) for entry in entries], width // 2
        widths = {
            c.title: 2 + max(map(len, [c.title, *(c.value(entry.row) for entry in entries)]))
            for c in s.columns
        }
        room = width - min(max(map(len, ["model", *names])), longest) - len("  steps")
        shown = list(s.columns)
        for column in reversed(s.columns):
            if sum(widths[c.title] for c in shown) <= room:
                break
            if column.field not in NEEDED:
                shown.remove(column)
        table = Table(box=None, padding=(0, 0, 0, 2), pad_edge=False)
        table.add_column("model", overflow="fold")
        for title in ("steps", *(column.title for column in shown)):
            table.add_column(title, justify="right", no_wrap=True)
        for name, entry in zip(names, entries, strict=True):
            cells = [Text(c.value(entry.row), "bold" * (c.field in entry.bold)) for c in shown]
            table.add_row(Text(name), str(entry.nfe or ""), *cells)
        left_out = ", ".join(column.title for column in s.columns if column not in shown)
        return Group(
            *(
                Text.assemble((clean(f.head), "bold"), *(f" {clean(d)}" for d in f.details))
                for f in s.findings
            ),
            table,
            *(
                [Text(f"Only in the report, for lack of room here: {left_out}.")]
                if left_out
                else []
            ),
            *(Text(clean(warning.head), "yellow") for warning in s.warnings),
            *(Text(clean(note)) for note in s.footnotes),
        )

    def _render(self, template: str, finalize: Any) -> bytes:
        environment = Environment(
            loader=FileSystemLoader(FOLDER), autoescape=True, finalize=finalize,
            undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        )  # fmt: skip
        environment.filters["breakable"] = _breakable
        environment.filters["fenced"] = _fenced
        page = environment.get_template(template).render(
            s=self.summary, plots=self.plots, missing_plots=self.missing_plots
        )
        return page.encode("utf-8", "replace")


def _terminal_name(entry: Entry) -> str:
    """A row's name and setting on one line."""
    if entry.nfe is None:
        return clean(PurePosixPath(entry.name).name or entry.name)
    setting = entry.setting.replace(", the edge of the sweep", ", edge")
    name = entry.name + ", baseline" * entry.is_baseline + f" ({setting})" * bool(setting)
    return clean(name + " ⚠" * bool(entry.doubt))


def _html(value: object) -> str:
    """A value of the page, which jinja2 escapes."""
    return value if isinstance(value, Markup) else clean(value)


def _markdown(value: object) -> str:
    """A value as text that is nothing but text, on one line."""
    if isinstance(value, Markup):
        return value
    plain = html.escape(clean(value), quote=False)
    # Entities, not backslashes: tables are cut at pipes before anything else is read.
    return Markup(MARKUP.sub(lambda m: f"&#{ord(m[0])};", plain).replace("\n", "<br>"))


def _breakable(name: str) -> Markup:
    """A name that may be broken where a reader would break it."""
    return Markup(html.escape(clean(name)).replace("/", "/<wbr>").replace("_", "_<wbr>"))


def _fenced(text: str) -> Markup:
    """A block of Markdown whose fence the text cannot close."""
    fence = "`" * max(3, *(len(run) + 1 for run in re.findall(r"`+", text)), 0)
    return Markup(f"{fence}\n{clean(text)}\n{fence}")
