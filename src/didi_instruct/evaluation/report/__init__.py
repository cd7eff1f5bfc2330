"""The report of an evaluation: `report.html`, which needs nothing else, and `report.md`."""

from pathlib import Path

from didi_instruct.data.files import no_space_as_user_error, write_atomic
from didi_instruct.errors import UserError
from didi_instruct.evaluation.report.content import Content
from didi_instruct.evaluation.report.markdown import render_markdown
from didi_instruct.evaluation.report.page import render_page
from didi_instruct.evaluation.report.plots import NAMES, draw_plots
from didi_instruct.evaluation.report.terminal import render_terminal

__all__ = ["Content", "render_terminal", "write_report"]


def write_report(folder: Path, content: Content) -> tuple[Path, Path]:
    """Write a report into a folder, and the plots of its markdown beside it.

    Each file is whole or not there. Plots of an earlier report that this one has not are removed.
    """
    if not content.everything():
        raise UserError(f"{folder}: there is nothing to report; evaluate a model first.")
    plots, notes = draw_plots(content)
    page, text = folder / "report.html", folder / "report.md"
    with no_space_as_user_error(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for plot in plots:
            write_atomic(folder / plot.file, plot.png)
        write_atomic(text, render_markdown(content, plots, notes))
        write_atomic(page, render_page(content, plots, notes))
    for name in set(NAMES) - {plot.name for plot in plots}:
        (folder / f"report-{name}.png").unlink(missing_ok=True)
    return page, text
