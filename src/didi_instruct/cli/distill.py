"""`didi distill`."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from didi_instruct.cli.ending import leave_unless_done

if TYPE_CHECKING:
    from didi_instruct.api.distill import DistillResult
    from didi_instruct.config.distill import Method

SHOWN = (
    "loss",
    "reward_student",
    "disc_accuracy",
    "aux_kl",
    "path_entropy",
    "unique_4gram",
    "iterations_per_second",
)
"""Numbers on the progress bar; log.jsonl has them all."""


def command(
    recipe: Annotated[str, typer.Argument(help="A shipped recipe, or a YAML file.")],
    teacher: Annotated[str, typer.Option(metavar="SOURCE", help="The model to distil.")],
    method: Annotated[
        str | None, typer.Option(help="didi or token-matching, instead of the recipe's.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one setting.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run (default: runs/RECIPE).")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last checkpoint.")
    ] = False,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:N.")] = None,
) -> None:
    """Distil a teacher into a student that needs few steps.

    Several processes: torchrun --nproc-per-node N -m didi_instruct distill ...
    """
    from didi_instruct.api.distill import distill
    from didi_instruct.cli.progress import BankBar, PrepareBar
    from didi_instruct.training.reporting import TerminalReporter

    folder = out or Path("runs") / Path(recipe).stem
    result = distill(
        recipe,
        teacher=teacher,
        out=folder,
        overrides=overrides or (),
        method=cast("Method | None", method),
        resume=resume,
        device=device,
        reporter=TerminalReporter("distill", shown=SHOWN),
        data_progress=PrepareBar,
        bank_progress=BankBar,
    )
    leave_unless_done(result.outcome, result.is_main)
    step = result.outcome.step
    _summary(result, step)


def _summary(result: "DistillResult", step: int) -> None:
    """Say what was won and what was written."""
    for line in _comparison(result):
        typer.echo(line)
    also = f", {result.curves.name}" if result.curves else ""
    typer.echo(
        f"Distilled {step} iterations. Wrote {result.folder}: model.safetensors, config.json and "
        f"tokenizer.json (the averaged student), recipe.yaml, log.jsonl, checkpoints/{also}"
    )
    if result.curves is None:
        typer.echo('No curves.png: matplotlib is missing (pip install "didi-instruct[eval]").')
    typer.echo(f"Next: didi generate {result.folder} --steps 8")


def _comparison(result: "DistillResult") -> list[str]:
    """Path KL of teacher and student at every budget, as a small table."""
    found = [re.fullmatch(r"path_kl_(\d+)", name) for name in result.teacher]
    budgets = [match[1] for match in found if match]
    if not budgets or not result.student:
        return []
    lines = ["path KL, nats per sequence (± standard error)"]
    lines.append("steps".rjust(10) + "".join(n.rjust(18) for n in budgets))
    rows = {"teacher": (result.teacher, ""), "student": (result.student, "")}
    if any(name.endswith("_raw") for name in result.student):
        rows["raw"] = (result.student, "_raw")
    for title, (numbers, tag) in rows.items():
        cells = (
            f"{numbers[f'path_kl_{n}{tag}']:.2f} ± {numbers[f'path_kl_{n}{tag}_se']:.2f}"
            for n in budgets
        )
        lines.append(title.rjust(10) + "".join(cell.rjust(18) for cell in cells))
    return lines
