"""`didi finetune`."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from didi_instruct.cli.ending import leave_unless_done

if TYPE_CHECKING:
    from didi_instruct.finetune import FinetuneResult

MEASURES = {"valid_nats_per_token": "nats per token", "valid_answer_nats": "nats per answer token"}
"""Measures of held-out data, in words."""


def command(
    recipe: Annotated[
        str,
        typer.Argument(
            help="finetune-text, finetune-pubmed, finetune-answers, finetune-mmlu, or a YAML file."
        ),
    ],
    model: Annotated[str, typer.Option(metavar="SOURCE", help="The model to go on from.")],
    tokenizer: Annotated[
        str | None, typer.Option(help="For a foreign model that brings none.")
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
    """Go on training a model, on text or on prompts with answers.

    The data is named with --set data.source=..., and read with the model's tokenizer.
    Several processes: torchrun --nproc-per-node N -m didi_instruct finetune ...
    """
    from didi_instruct.cli.progress import PrepareBar
    from didi_instruct.finetune import finetune
    from didi_instruct.training.reporting import TerminalReporter

    folder = out or Path("runs") / Path(recipe).stem
    result = finetune(
        recipe,
        model=model,
        tokenizer=tokenizer,
        out=folder,
        overrides=overrides or (),
        resume=resume,
        device=device,
        reporter=TerminalReporter("finetune"),
        data_progress=PrepareBar,
    )
    leave_unless_done(result.outcome, result.is_main)
    if result.new:
        typer.echo(f"Fine-tuned {result.source} for {result.outcome.step} steps.")
    for line in _held_out(result):
        typer.echo(line)
    typer.echo(
        f"{'Wrote' if result.new else 'There is'} {folder}: model.safetensors, config.json and "
        "tokenizer.json (the averaged model), recipe.yaml, log.jsonl, data/, checkpoints/"
    )
    typer.echo(f"Next: didi generate {folder}")


def _held_out(result: "FinetuneResult") -> Iterator[str]:
    """Held-out numbers before and after, with 95% intervals."""
    both = [result.held_out.get(when, {}) for when in ("before", "after")]
    for name, words in MEASURES.items():
        cells = [_cell(numbers, name) for numbers in both if name in numbers]
        if len(cells) == 2:
            yield f"Held out: {cells[0]} -> {cells[1]} {words} (95%, the same noise)."


def _cell(numbers: Mapping[str, float], name: str) -> str:
    """A number and half of its interval, which one row alone does not have."""
    half = numbers.get("valid_ci95")
    return f"{numbers[name]:.4f}" + ("" if half is None else f" ± {half:.4f}")
