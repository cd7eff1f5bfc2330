"""`didi distill`."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from didi_instruct.cli.ending import leave_unless_done

if TYPE_CHECKING:
    from didi_instruct.config.distill import Method
    from didi_instruct.distill import DistillResult

SHOWN = (
    "loss",
    "reward_student",
    "disc_accuracy",
    "student_steps",
    "aux_kl",
    "code_information",
    "path_entropy",
    "unique_4gram",
    "iterations_per_second",
)
"""Numbers on the progress bar; log.jsonl has them all."""


def command(
    recipe: Annotated[str, typer.Argument(help="A shipped recipe, or a YAML file.")],
    teacher: Annotated[str, typer.Option(metavar="SOURCE", help="The model to distil.")],
    method: Annotated[
        str | None,
        typer.Option(
            help="didi, token-matching, mixture, sdtt, dimo or duo, not the recipe's: what the "
            "recipe does not say of its own section is the published setting; rates, batch and "
            "steps stay the recipe's."
        ),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="For a foreign teacher that brings none.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one setting.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the run (default: runs/RECIPE, with --method RECIPE-METHOD)."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last checkpoint.")
    ] = False,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:N.")] = None,
) -> None:
    """Distil a teacher into a student that needs few steps.

    Several processes: torchrun --nproc-per-node N -m didi_instruct distill ...
    """
    from didi_instruct.cli.progress import BankBar, PrepareBar
    from didi_instruct.distill import distill
    from didi_instruct.training.reporting import TerminalReporter

    folder = out or Path("runs") / "-".join(filter(None, (Path(recipe).stem, method)))
    result = distill(
        recipe,
        teacher=teacher,
        tokenizer=tokenizer,
        out=folder,
        overrides=overrides or (),
        method=cast("Method | None", method),
        resume=resume,
        device=device,
        reporter=TerminalReporter("distill", shown=SHOWN, summary=evaluation_line),
        data_progress=PrepareBar,
        bank_progress=BankBar,
    )
    leave_unless_done(result.outcome, result.is_main)
    _summary(result)


MEASURES = {
    "path_kl": ("path KL", ".2f"),
    "path_entropy": ("path entropy", ".3f"),
    "judge_nats": ("judge", ".3f"),
    "entropy": ("entropy", ".3f"),
    "unique_4gram": ("unique 4-grams", ".3f"),
    "latent_share": ("latent entropy", ".1%"),
}
"""What an evaluation measures at each budget: its name for people, and its format."""


def evaluation_line(values: Mapping[str, float]) -> str:
    """Numbers of an evaluation by measure, one for each budget: `path KL (4, 8 steps) 14.97, 7.69`.

    Those of the raw weights are in the log alone.
    """
    parts, budgets = [], ", ".join(map(str, _budgets(values)))
    for name, (title, form) in MEASURES.items():
        cells = [_cell(values, f"{name}_{n}", form) for n in _budgets(values)]
        if cells and all(cells):
            parts.append(f"{title} {', '.join(cells)}")
    if "valid_nats_per_token" in values:
        parts.append(f"held-out text {values['valid_nats_per_token']:.4f} nats per token")
    return (f"at {budgets} steps: " if budgets else "") + "; ".join(parts)


def _budgets(values: Mapping[str, float]) -> list[int]:
    found = (re.fullmatch(r"(?:path_)?entropy_(\d+)", name) for name in values)
    return [int(match[1]) for match in found if match]


def _cell(values: Mapping[str, float], name: str, form: str) -> str:
    """A number with its standard error; empty where there is none."""
    if name not in values:
        return ""
    error = values.get(f"{name}_se")
    return f"{values[name]:{form}}" + (f" ± {error:{form}}" if error is not None else "")


def _summary(result: "DistillResult") -> None:
    """Say what was won and what was written."""
    for line in _comparison(result):
        typer.echo(line)
    files = ("discriminator.safetensors", "bank/", "curves.png")
    also = "".join(f", {name}" for name in files if (result.folder / name).exists())
    if result.new:
        typer.echo(f"Distilled {result.outcome.step} iterations.")
    typer.echo(
        f"{'Wrote' if result.new else 'There is'} {result.folder}: model.safetensors, config.json "
        f"and tokenizer.json (the {'averaged ' if result.averaged else ''}student), recipe.yaml, "
        f"log.jsonl, checkpoints/{also}"
    )
    if result.curves is None:
        typer.echo('No curves.png: matplotlib is missing (pip install "didi-instruct[eval]").')
    prompt = ' --prompt "..."' if result.prompt else ""
    typer.echo(f"Next: didi generate {result.folder} {result.sampling}{prompt}")


def _unit(name: str, exact: bool) -> str:
    """What a measure is counted in, and who judged."""
    if name == "judge_nats":
        judge = "" if exact else ", by the teacher's own bound"
        return f"{judge}, nats per token (± standard error) / entropy of a sample's tokens"
    if name != "path_kl":
        return ", nats per token (texts that continue a prompt have no judge here)"
    unit = ", nats per sequence (± standard error)"
    if exact:
        return unit
    return f"{unit}, judged by the teacher's own bound: differences count, a value may be below 0"


def _comparison(result: "DistillResult") -> Iterator[str]:
    """Teacher and student at every budget, as a small table; path KL where there is one."""
    budgets = _budgets(result.teacher)
    if not budgets or not result.student:
        return
    name, (title, form) = next(
        (n, m) for n, m in MEASURES.items() if f"{n}_{budgets[0]}" in result.teacher
    )
    yield title + _unit(name, result.exact)
    rows = {"teacher": (result.teacher, ""), "student": (result.student, "")}
    if any(name.endswith("_raw") for name in result.student):
        rows["raw"] = (result.student, "_raw")
    # A judge likes what is said often: its number never stands alone.
    shown = [name, "entropy"] if name == "judge_nats" else [name]
    width = 18 if len(shown) == 1 else 25
    yield "steps".rjust(10) + "".join(str(n).rjust(width) for n in budgets)
    for row, (numbers, tag) in rows.items():
        cells = [
            " / ".join(_cell(numbers, f"{one}_{n}{tag}", form) for one in shown) for n in budgets
        ]
        yield row.rjust(10) + "".join(cell.rjust(width) for cell in cells)
