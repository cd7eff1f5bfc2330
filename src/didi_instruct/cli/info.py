"""`didi info`."""

import json
from typing import Annotated, Any

import typer

from didi_instruct.errors import UserError


def command(
    source: Annotated[str | None, typer.Argument(help="A folder written by didi.")] = None,
    arch: Annotated[str | None, typer.Option(help="A named architecture instead.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Parameters, shapes, memory and provenance of a model or a named architecture."""
    if (source is None) == (arch is None):
        raise UserError("Give a model folder or --arch NAME, one of the two.")
    from didi_instruct.api.info import describe_architecture, describe_folder

    facts = describe_architecture(arch) if arch else describe_folder(str(source))
    if as_json:
        typer.echo(json.dumps(facts, indent=1))
        return
    for name, value in facts.items():
        typer.echo(f"{name.replace('_', ' '):26} {_text(value)}")


def _text(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, dict):
        return ", ".join(f"{k} {v}" for k, v in value.items() if not isinstance(v, dict)) or "-"
    return "-" if value is None else str(value)
