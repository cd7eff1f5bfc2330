"""`didi convert`."""

from pathlib import Path
from typing import Annotated, Any

import typer


def command(
    source: Annotated[
        str, typer.Argument(help="A model: folder, foreign checkpoint file, Hugging Face id.")
    ],
    dest: Annotated[Path, typer.Argument(help="The folder to write: new, or empty.")],
    to: Annotated[
        str,
        typer.Option(
            metavar="FORMAT", help="didi, mdlm-hub, didi-instruct, duo-hub, sdtt-hub, esm."
        ),
    ],
    weights: Annotated[
        str, typer.Option(help="Of a training run's file: ema (averaged) or raw.")
    ] = "ema",
    family: Annotated[
        str | None,
        typer.Option(help="What a foreign network was trained as: mdlm, sedd, duo, ar."),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="For a checkpoint that brings none: gpt2, a folder, a tokenizer.json."),
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option(help="Of --to didi: float32, bfloat16 or int8 (a quarter of float32's size)."),
    ] = None,
    license: Annotated[
        str | None, typer.Option(help="For the card of --to didi, by the hub's name: mit.")
    ] = None,
    numbers: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="For the card of --to didi: what `didi eval --json` wrote."
        ),
    ] = None,
    about: Annotated[
        str | None,
        typer.Option(help="For the card of --to didi: a few words, of its data for example."),
    ] = None,
    no_discriminator: Annotated[
        bool, typer.Option("--no-discriminator", help="Leave the discriminator out.")
    ] = False,
) -> None:
    """Write a model in another layout, bit by bit the same unless --storage asks for less."""
    from didi_instruct.cli.progress import ProgressBar
    from didi_instruct.hub.export import convert

    with ProgressBar() as bar:

        def show(done: int, total: int) -> None:
            bar.update("Writing", done, total, "bytes")

        settings: Any = {"to": to, "weights": weights, "family": family}
        settings |= {"storage": storage, "license": license, "numbers": numbers}
        settings["about"] = about
        folder = convert(
            source,
            dest,
            tokenizer=tokenizer,
            discriminator=not no_discriminator,
            progress=show,
            **settings,
        )
    typer.echo(f"Wrote {folder} ({to}):")
    for path in sorted(folder.iterdir()):
        typer.echo(f"  {path.name:26} {path.stat().st_size:>14,} bytes")
    if to == "didi" and (folder / "tokenizer.json").exists():
        typer.echo(f"Use it: didi generate {folder}")
