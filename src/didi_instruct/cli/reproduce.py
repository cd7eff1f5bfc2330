"""`didi reproduce`."""

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from didi_instruct.cli.judging import (
    JudgeBeyond,
    JudgeCollapsesSpaces,
    JudgeEnd,
    JudgeTemperature,
)
from didi_instruct.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from didi_instruct.reproduce.experiments import Outcome
    from didi_instruct.reproduce.lines import Experiment
    from didi_instruct.reproduce.scale import Scale

FAILED = 1
WIDE = 160
"""Columns of a table in a file; a terminal has its own."""


def command(
    item: Annotated[
        str | None,
        typer.Argument(
            metavar="ITEM", help="As --list names it; several with commas between; or `all`."
        ),
    ] = None,
    scale: Annotated[
        str,
        typer.Option(
            metavar="toy|small|paper",
            help="CPU and minutes; one GPU and stories; the paper's own models and data.",
        ),
    ] = "toy",
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of jobs and tables (default: reproduce/SCALE)."),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Text: at small, stories (.jsonl, a folder of .txt, or prepared with the "
            "teacher's tokenizer), or oracle, the built-in language; at paper, OpenWebText "
            "(default: the hub)."
        ),
    ] = None,
    judge: Annotated[
        str | None,
        typer.Option(
            help="Who judges (default: at toy the oracle, at small a left-to-right model trained "
            "on --data, at paper GPT-2 Large)."
        ),
    ] = None,
    judge_temperature: JudgeTemperature = 1.0,
    judge_collapse_spaces: JudgeCollapsesSpaces = False,
    judge_end: JudgeEnd = None,
    judge_beyond: JudgeBeyond = "cut",
    teacher: Annotated[
        str | None, typer.Option(metavar="SOURCE", help="A teacher, instead of training one.")
    ] = None,
    corpora: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Files of the zero-shot corpora (default: the hub)."),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Files of the downstream tasks, at small and paper: mmlu/, mrpc/, pubmed.jsonl.",
        ),
    ] = None,
    folding: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE",
            help="Folds proteins, at small and paper (default at paper: facebook/esmfold_v1).",
        ),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(help="Students and draws of each row (toy 1, small 2, paper 1).")
    ] = None,
    at_once: Annotated[
        int,
        typer.Option(min=1, help="Jobs that share a GPU, where one alone would leave it idle."),
    ] = 1,
    mauve: Annotated[
        bool,
        typer.Option("--mauve/--no-mauve", help="Measure MAUVE, which needs mauve-text."),
    ] = True,
    minutes: Annotated[
        float | None,
        typer.Option(
            help="Of baselines and latency: train every student that long, by its pace here "
            "(default: the steps of its recipe)."
        ),
    ] = None,
    rivals: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,...",
            help="Of baselines: these models alone beside the teacher and DiDi-Instruct, by role "
            "(ar, sdtt, dimo, duo, ...; default: all).",
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="List the jobs, check what they need, estimate GPU-hours."),
    ] = False,
    write_only: Annotated[
        bool,
        typer.Option("--write-only", help="Tables of what has finished in --out; nothing is run."),
    ] = False,
    names: Annotated[bool, typer.Option("--list", help="Name all items.")] = False,
    device: Annotated[
        str | None, typer.Option(help="cpu (at small, for who has hours), cuda, cuda:N.")
    ] = None,
) -> None:
    """Make tables and figures of the paper again, beside the paper's numbers.

    What is done is kept: the same command goes on where it stopped.
    """
    from didi_instruct.reproduce.experiments import ITEMS, find_item
    from didi_instruct.reproduce.preflight import check_given
    from didi_instruct.reproduce.scale import Given
    from didi_instruct.reproduce.scales import find_scale

    if names:
        _list(list(ITEMS.values()))
        return
    if item is None:
        raise UserError("Name an item, or `all`: `didi reproduce --list` names them.")
    asked = dict.fromkeys(name.strip() for name in item.split(","))
    judging = _judging(judge_temperature, judge_collapse_spaces, judge_end, judge_beyond)
    given = Given(
        data=data,
        judge=judge,
        judge_options=judging,
        teacher=teacher,
        corpora=corpora,
        tasks=tasks,
        proteins=_of_proteins(scale, asked),
        folding=folding,
        seeds=seeds,
        mauve=mauve,
    )
    check_given(given)
    chosen = find_scale(scale, given)
    wanted = [i for i in ITEMS.values() if i.name not in chosen.apart]
    items = wanted if item == "all" else [find_item(name, ITEMS) for name in asked]
    if item == "all" and chosen.apart:
        apart = ", ".join(chosen.apart)
        typer.echo(f"Not part of `all` at scale {scale}, name it to have it: {apart}.", err=True)
    folder = out or Path("reproduce") / scale
    if minutes is not None and not (minutes > 0 and all(i.equal_minutes for i in items)):
        able = " and ".join(sorted(i.name for i in ITEMS.values() if i.equal_minutes))
        raise UserError(f"--minutes is for {able}, and more than 0: leave it out.")
    if rivals is not None:
        if not all(i.chooses_rivals for i in items):
            able = " and ".join(i.name for i in ITEMS.values() if i.chooses_rivals)
            raise UserError(f"--rivals is for {able}: leave it out.")
        chosen = chosen.with_rivals([role.strip() for role in rivals.split(",") if role.strip()])
    _refuse_file(folder)
    if dry_run:
        sys.exit(_dry_run(items, chosen, folder, minutes))
    if write_only:
        sys.exit(_write_only(items, chosen, folder, minutes))
    if at_once > 1:
        items = _shared(items, device)
    sys.exit(_run(items, chosen, folder, device, at_once, minutes))


def _of_proteins(scale: str, asked: "Iterable[str]") -> bool:
    """Return True if the items use the models and data of proteins instead of those of text."""
    from didi_instruct.reproduce.protein_scales import ITEMS

    of_proteins = {name in ITEMS for name in asked}
    if len(of_proteins) > 1 and scale != "toy":
        raise UserError(
            f"{' and '.join(ITEMS)} have data and a teacher of their own: ask for them apart."
        )
    return True in of_proteins


def _shared(items: "list[Experiment]", device: str | None) -> "list[Experiment]":
    """Items that may be made by several jobs on one GPU."""
    from didi_instruct.reproduce.grid import visible_gpus

    if device is not None or not visible_gpus():
        raise UserError("--at-once is for jobs that share GPUs: leave it out here, or --device.")
    kept = [item for item in items if not item.timed_training]
    apart = [item.name for item in items if item.timed_training]
    if not kept:  # a grid runs timed trainings alone
        return items
    if apart:
        typer.echo(
            f"Not part of this run with --at-once: {', '.join(apart)}, whose trainings must run "
            "alone.",
            err=True,
        )
    return kept


def _refuse_file(folder: Path) -> None:
    """Refuse a folder that cannot be made, before hours of work that would have gone there."""
    for place in (folder, *folder.parents):
        if place.exists() and not place.is_dir():
            raise UserError(f"--out {folder}: {place} is a file, give a folder.")


def _judging(
    temperature: float, collapse_spaces: bool, end: str | None, beyond: str
) -> dict[str, Any]:
    """How the judge reads, as far as it is not as usual."""
    if beyond not in ("cut", "uniform"):
        raise UserError(f"--judge-beyond {beyond}: use cut or uniform.")
    given = (
        ("temperature", temperature, 1.0),
        ("collapse_spaces", collapse_spaces, False),
        ("end", end, None),
        ("beyond", beyond, "cut"),
    )
    return {name: value for name, value, usual in given if value != usual}


def _list(items: "Sequence[Experiment]") -> None:
    width = max(len(item.name) for item in items)
    for item in items:
        where = f" ({item.where})" if item.where else " (not in the paper)"
        typer.echo(f"{item.name.ljust(width)}  {item.title}{where}")


def _run(
    items: "Sequence[Experiment]",
    scale: "Scale",
    folder: Path,
    device: str | None,
    at_once: int,
    minutes: float | None,
) -> int:
    from didi_instruct.cli.board import ProgressBoard
    from didi_instruct.reproduce.experiments import lasting, make
    from didi_instruct.reproduce.grid import visible_gpus
    from didi_instruct.reproduce.preflight import check_together, require_gpu
    from didi_instruct.reproduce.running import StoppedError

    require_gpu(scale, device)
    check_together(scale)
    gpus = visible_gpus() * at_once if device is None else ()
    try:
        with ProgressBoard() as board:
            if minutes is not None:
                scale = lasting(scale, minutes, folder, device=device, board=board)
            outcome = make(items, scale, folder, device=device, gpus=gpus, board=board)
    except (StoppedError, KeyboardInterrupt) as stopped:
        typer.echo("Stopped; what is done is kept. The same command goes on.", err=True)
        return 128 + (stopped.signal if isinstance(stopped, StoppedError) else signal.SIGINT)
    return _end(outcome, scale)


def _write_only(
    items: "Sequence[Experiment]", scale: "Scale", folder: Path, minutes: float | None
) -> int:
    from didi_instruct.reproduce.experiments import write_only
    from didi_instruct.reproduce.minutes import expected

    if minutes is not None:
        scale = expected(scale, minutes, folder)
    return _end(write_only(items, scale, folder), scale)


def _end(outcome: "Outcome", scale: "Scale") -> int:
    """Show what was made; return the exit code."""
    _show(outcome)
    typer.echo(scale.says)
    return 0 if outcome.whole else FAILED


def _show(outcome: "Outcome") -> None:
    from rich.console import Console

    from didi_instruct.cli.tables import render

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDE
    for made in outcome.made:
        if made.table is not None:
            console.print(render(made.table))
        else:
            typer.echo(f"{made.item.name}: {made.error}", err=True)
    for made in outcome.made:
        for path in made.files[:1]:
            others = ", ".join(p.suffix for p in made.files[1:])
            typer.echo(f"Wrote {path} ({others})")
    for lost in outcome.failures:
        typer.echo(f"{lost.state}: {lost.job.name}: {lost.note}", err=True)


def _time(hours: float) -> str:
    """GPU-hours as people plan with them."""
    if hours == 0:
        return "nothing"
    if hours < 1 / 60:
        return "under a minute"
    return f"{hours * 60:.0f} GPU-minutes" if hours < 2 else f"{hours:,.0f} GPU-hours"


def _dry_run(
    items: "Sequence[Experiment]", scale: "Scale", folder: Path, minutes: float | None
) -> int:
    from didi_instruct.reproduce.costs import SAMPLING_MFU, TRAINING_MFU
    from didi_instruct.reproduce.minutes import expected
    from didi_instruct.reproduce.preflight import checks, plan, plan_paces

    paced = []
    if minutes is not None:
        paced, scale = plan_paces(scale, folder), expected(scale, minutes, folder)
    planned = plan(items, scale, folder, paced)
    width = max(len(one.job.name) for one in planned)
    for one in planned:
        state = "done" if one.is_done else "to do"
        hours = "" if one.gpu_hours is None else _time(one.gpu_hours)
        what = one.job.recipe or one.job.does.rpartition(":")[2]
        typer.echo(f"{one.job.name.ljust(width)}  {state:5}  {hours:>20}  {what}")
    left = [one for one in planned if not one.is_done]
    unknown = sum(one.gpu_hours is None for one in left)
    total = sum(one.gpu_hours or 0.0 for one in left)
    typer.echo(
        f"{len(planned)} jobs, {len(left)} to do: {_time(total)} on an H100 or H200, at "
        f"{TRAINING_MFU:.0%} of its peak in training and {SAMPLING_MFU:.0%} in sampling (assumed)"
        + (f"; students train {minutes:g} minutes each" if minutes is not None else "")
        + (f"; {unknown} jobs of unknown cost are not in it" if unknown else "")
    )
    lacking = 0
    for check in checks(items, scale, folder):
        lacking += not check.is_there
        typer.echo(
            f"{'ok     ' if check.is_there else 'MISSING'} {check.what}"
            + ("" if check.is_there else f": {check.remedy}")
        )
    return FAILED if lacking else 0
