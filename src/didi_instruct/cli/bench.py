"""`didi bench`."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from didi_instruct.cli.files import check_target
from didi_instruct.errors import UserError

TABLE_WIDTH = 120
"""Characters that a table has at least, so that no name or number is cut."""

if TYPE_CHECKING:
    from didi_instruct.benchmarking.report import Bench


def command(
    source: Annotated[
        str | None,
        typer.Argument(
            help="The model: a shipped name (`stories`), a folder, a foreign checkpoint, a Hugging "
            "Face id."
        ),
    ] = None,
    arch: Annotated[
        str | None, typer.Option(help="A named architecture with random weights instead.")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a setting of --arch: layers=4."),
    ] = None,
    against: Annotated[
        str,
        typer.Option(
            help="Further rows: plain, naive, ar, transformers, other models; separated by commas."
        ),
    ] = "",
    batch: Annotated[int, typer.Option(help="Texts at once.")] = 16,
    length: Annotated[int | None, typer.Option(help="Tokens of a text; all if not said.")] = None,
    steps: Annotated[
        int | None, typer.Option(help="Steps per text; if not said, as in didi generate.")
    ] = None,
    sampler: Annotated[str | None, typer.Option(help="As in didi generate.")] = None,
    guided: Annotated[bool, typer.Option("--guided", help="Sample by RGAS.")] = False,
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
    repeat: Annotated[int, typer.Option(help="Timed runs of each row.")] = 5,
    fast: Annotated[
        bool | None,
        typer.Option("--fast/--no-fast", help="Compile and capture; on a GPU, if not said."),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="float32 or bfloat16; if not said, bfloat16 on a GPU."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:N.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows here.")] = None,
) -> None:
    """Latency and throughput beside bare passes of the trunk; ratios within one run."""
    from didi_instruct.api import bench as api
    from didi_instruct.api.bench_distill import bench_distillation
    from didi_instruct.api.bench_plan import BenchPlan
    from didi_instruct.cli.progress import ProgressBar
    from didi_instruct.config.parse import apply_overrides

    if json_file is not None:
        check_target(json_file)
    plan = BenchPlan(
        source=source, arch=arch, model=apply_overrides({}, overrides or ()),
        against=tuple(name.strip() for name in against.split(",") if name.strip()),
        batch=batch, length=length, steps=steps, sampler=sampler, guided=guided, repeat=repeat,
        device=device, dtype=dtype, fast=fast,
    )  # fmt: skip
    if distill and sweep is not None:
        raise UserError("--distill times one size: leave out --sweep.")
    with ProgressBar() as bar:

        def tell(stage: str, done: int, total: int) -> None:
            bar.update("Timing", done, total, "runs")

        if distill:
            found = bench_distillation(plan, tell)
        elif sweep is None:
            found = api.bench(plan, tell)
        else:
            found = api.sweep(plan, *_sweep(sweep, api.SWEEPS), tell)
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

    from didi_instruct.benchmarking.report import notes, table

    about = found.about
    compiled = "compiled and captured" if about["fast"] else "neither compiled nor captured"
    typer.echo(
        f"{found.subject}: {about['device']}, {about['dtype']}, {about['threads']} threads, "
        f"{compiled}; medians of {about['repeat']}"
    )
    width = max(shutil.get_terminal_size().columns, TABLE_WIDTH)
    Console(highlight=False, width=width).print(table(found))
    for line in notes(found):
        typer.echo(line)
