"""`didi pretrain`."""

from pathlib import Path
from typing import Annotated

import typer

from didi_instruct.cli.ending import leave_unless_done


def command(
    recipe: Annotated[str, typer.Argument(help="A shipped recipe, or a YAML file.")],
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
    """Train a teacher (MDLM), a uniform-state teacher (DUO) or an AR model.

    Several processes: torchrun --nproc-per-node N -m didi_instruct pretrain ...
    """
    from didi_instruct.cli.progress import PrepareBar
    from didi_instruct.pretrain import pretrain
    from didi_instruct.training.reporting import TerminalReporter

    folder = out or Path("runs") / Path(recipe).stem
    result = pretrain(
        recipe,
        out=folder,
        overrides=overrides or (),
        resume=resume,
        device=device,
        reporter=TerminalReporter("pretrain"),
        data_progress=PrepareBar,
    )
    leave_unless_done(result.outcome, result.is_main)
    if result.new:
        typer.echo(f"Trained {result.outcome.step} steps.")
    typer.echo(
        f"{'Wrote' if result.new else 'There is'} {folder}: model.safetensors, config.json and "
        "tokenizer.json (the averaged model), recipe.yaml, log.jsonl, checkpoints/"
    )
    typer.echo(f"Next: didi generate {folder}")
