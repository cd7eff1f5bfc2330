"""`didi eval --task`: accuracy on a downstream task."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from didi_instruct.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from didi_instruct.tasks.task import Column, Row, Task, TaskReport

TABLE_WIDTH = 120
"""Columns of a table at least: intervals are not broken over lines."""

TaskName = Annotated[
    str | None,
    typer.Option(
        "--task",
        metavar="NAME",
        help="mmlu or qa: answer the questions of --data; mrpc: tell paraphrases by features.",
    ),
]
Shots = Annotated[
    int | None, typer.Option(help="For mmlu: answered questions before each, 0 (default) to 5.")
]
SftShare = Annotated[
    float | None,
    typer.Option(
        help="For mmlu: share of test, cut off by hash, that `didi finetune` may have learnt "
        "(its answers.share); the others are scored."
    ),
]
Permute = Annotated[
    bool | None,
    typer.Option("--permute", help="For mmlu: average over four rotations of the choices."),
]
Limit = Annotated[
    int | None,
    typer.Option(
        help="For a task: questions at most, those with the smallest hashes; of mrpc, the first "
        "pairs of each split."
    ),
]

SETTINGS = ("shots", "sft_share", "permute", "limit", "draws", "seed")
"""Flags that are options of tasks under the same name."""
TASK_FLAGS = ("shots", "sft_share", "permute", "limit")
"""Those that are for tasks alone."""
OTHERS = (
    "sources",
    "task",
    "data",
    "steps",
    "options",
    "json_file",
    "tokenizer",
    "device",
    "dtype",
)
"""Arguments and flags that a task takes beside its options."""


def given_flags(context: typer.Context) -> set[str]:
    """Parameters that were written on the command line."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in sources.items() if source and source.name == "COMMANDLINE"}


def check_flags(given: set[str], task: str | None) -> None:
    """Refuse flags of tasks without a task, and others with one."""
    odd = given & {*TASK_FLAGS} if task is None else given - {*SETTINGS, *OTHERS}
    if odd:
        flag = "--" + min(odd).replace("_", "-").replace("options", "option")
        reason = "needs --task NAME" if task is None else f"is not for --task {task}: leave it out"
        raise UserError(f"{flag} {reason}.")


def run_task(
    name: str,
    sources: "Sequence[str]",
    data: str | None,
    settings: dict[str, Any],
    *,
    json_file: Path | None,
    **opening: Any,
) -> None:
    """Measure, print the table, write the numbers."""
    from didi_instruct.cli.progress import ProgressBar
    from didi_instruct.tasks.registry import evaluate_task, find_task

    task = find_task(name)
    if data is None:
        raise UserError(f"--task {name} needs its data: add --data DIR.")
    with ProgressBar() as bar:
        report = evaluate_task(
            name,
            sources,
            data,
            settings,
            progress=lambda stage, done, total: bar.update(stage, done, total, "rows"),
            **opening,
        )
    _show(task, report)
    if json_file is not None:
        report.write(json_file)
        typer.echo(f"Wrote {json_file}")


def task_settings(
    given: set[str], values: dict[str, Any], options: "Sequence[str] | None"
) -> dict[str, Any]:
    """Options of a task from the flags that were given and the pairs of --option."""
    from didi_instruct.config.schema import apply_overrides

    settings = {name: values[name] for name in SETTINGS if name in given}
    if "steps" in given:
        parts = values["steps"].split(",")
        if not all(part.strip().isdecimal() for part in parts):
            raise UserError(f"--steps {values['steps']}: give numbers, as 4,8,16.")
        settings["steps"] = [int(part) for part in parts]
    return apply_overrides(settings, options or (), flag="--option")


def _show(task: "Task", report: "TaskReport") -> None:
    from rich.console import Console

    width = max(shutil.get_terminal_size().columns, TABLE_WIDTH)
    Console(highlight=False, width=width).print(_table(task, report.rows))
    for note in (*report.notes, *report.differences):
        typer.echo(note)


def _table(task: "Task", rows: "Sequence[Row]") -> "Table":
    from rich.table import Table

    table = Table(title=f"{task.name}, {rows[0]['num']:,} {task.counts}", title_justify="left")
    table.add_column("model", overflow="fold")
    columns = [each for each in task.columns if any(row.get(each.key) is not None for row in rows)]
    for column in columns:
        table.add_column(column.title, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(str(row["model"]), *(_cell(column, row) for column in columns))
    return table


def _cell(column: "Column", row: "Row") -> str:
    """A number as people read it, with its interval where the row has one."""
    value = row.get(column.key)
    if value is None:
        return "–"
    if column.kind == "shares":
        return " ".join(f"{100 * share:.0f}" for share in value.values())
    if column.kind != "percent":
        return {"number": "{:.3f}", "count": "{:,}", "text": "{}"}[column.kind].format(value)
    interval = row.get(f"{column.key}_ci95")
    low, high = interval or (0.0, 0.0)
    around = f" [{100 * low:.1f}, {100 * high:.1f}]" if interval else ""
    return f"{100 * value:.1f}%{around}"
