"""`didi bench`."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from didi_instruct.cli.files import check_target
from didi_instruct.cli.options import with_settings
from didi_instruct.config.bench import BenchConfig
from didi_instruct.errors import UserError

TABLE_WIDTH = 120
"""Characters that a table has at least, so that no name or number is cut."""

if TYPE_CHECKING:
    from collections.abc import Sequence

    from didi_instruct.benchmarking.bench import Bench, Row


@with_settings(BenchConfig)
def command(
    config: BenchConfig,
    distill: Annotated[
        bool, typer.Option("--distill", help="Time iterations of distillation instead.")
    ] = False,
    sweep: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[=N,N]",
            help="Time at several values: length, batch, steps or vocabulary.",
        ),
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows here.")] = None,
) -> None:
    """Latency and throughput beside bare passes of the trunk; compare ratios within a run."""
    from didi_instruct.benchmarking import bench as benchmarks
    from didi_instruct.cli.progress import ProgressBar

    if json_file is not None:
        check_target(json_file)
    if distill and sweep is not None:
        raise UserError("--distill times one size: leave out --sweep.")
    with ProgressBar() as bar:

        def tell(done: int, total: int) -> None:
            bar.update("Timing", done, total, "runs")

        if distill:
            found = benchmarks.bench_distillation(config, tell)
        elif sweep is None:
            found = benchmarks.bench(config, tell)
        else:
            found = benchmarks.sweep(config, *_sweep(sweep, benchmarks.SWEEPS), tell)
    _show(found)
    if json_file is not None:
        found.write(json_file)
        typer.echo(f"Wrote {json_file}")


def _sweep(text: str, usual: "dict[str, tuple[int, ...]]") -> "tuple[str, tuple[int, ...]]":
    """`batch` or `batch=1,2,4` as a name and values."""
    name, equals, values = text.partition("=")
    if not equals:
        return name, usual.get(name, (1,))
    try:
        return name, tuple(int(value) for value in values.split(","))
    except ValueError:
        raise UserError(f"--sweep {text}: write it as {name}=1,2,4.") from None


def _show(found: "Bench") -> None:
    from rich.console import Console
    from rich.table import Table

    about = found.about
    compiled = "compiled and captured" if about["fast"] else "neither compiled nor captured"
    typer.echo(
        f"{found.model}: {about['device']}, {about['dtype']}, {about['threads']} threads, "
        f"{compiled}; medians of {about['repeat']}"
    )
    busy = any(row["gpu_busy"] is not None for row in found.rows)
    lines = [cells(row, busy=busy) for row in found.rows]
    table = Table("", box=None, pad_edge=False)
    table.columns[0].no_wrap = True
    for title in list(lines[0])[1:]:
        table.add_column(title, justify="right", no_wrap=True)
    for each in lines:
        table.add_row(*each.values())
    width = max(shutil.get_terminal_size().columns, TABLE_WIDTH)
    Console(highlight=False, width=width).print(table)
    for line in notes(found.rows):
        typer.echo(line)


def cells(row: "Row", *, busy: bool) -> dict[str, str]:
    """A row of the table by column; `busy` adds the share of the time in which the GPU worked."""

    def show(text: str, *names: str) -> str:
        values = [row[name] for name in names]
        return "-" if None in values else text.format(*values)

    shape = [name for name in ("batch", "length", "steps", "vocabulary") if name in row]
    return {
        "name": row["name"],
        **{name: str(row[name]) for name in shape},
        "seconds": show("{:.4f}", "seconds_median"),
        "min..max": show("{:.4f}..{:.4f}", "seconds_min", "seconds_max"),
        "tokens/s": show("{:,.0f}", "tokens_per_second"),
        "ms/step": show("{:.2f}", "ms_per_step"),
        "GiB": show("{:.2f}", "peak_memory_gib"),
        "ratio": show("{:.2f}", "ratio_to_first"),
        **({"busy": show("{:.0%}", "gpu_busy")} if busy else {}),
    }


def notes(rows: "Sequence[Row]") -> list[str]:
    """Lines about rows that did not run or are not on equal terms, each once."""
    lines = []
    for row in rows:
        if row["note"]:
            verb = " did not run" if row["seconds_median"] is None else ""
            lines.append(f"{row['name']}{verb}: {row['note']}")
    return list(dict.fromkeys(lines))
