"""`didi info`."""

import json
from typing import Annotated, Any

import typer

from didi_instruct.errors import UserError

LISTED = 40
"""Tensors of an unknown file that are shown; `--json` has them all."""


def command(
    source: Annotated[
        str | None,
        typer.Argument(help="A model: folder, foreign checkpoint file, Hugging Face id."),
    ] = None,
    arch: Annotated[str | None, typer.Option(help="A named architecture instead.")] = None,
    weights: Annotated[
        str, typer.Option(help="Of a training run's file: ema (averaged) or raw.")
    ] = "ema",
    family: Annotated[
        str | None,
        typer.Option(help="What a foreign network was trained as: mdlm, sedd, duo, ar."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Parameters, shapes, memory and provenance of a model or a named architecture."""
    if (source is None) == (arch is None):
        raise UserError("Give a model or --arch NAME, one of the two.")
    from didi_instruct.api.info import describe_architecture, describe_source

    settings: Any = {"weights": weights, "family": family}
    facts = describe_architecture(arch) if arch else describe_source(str(source), **settings)
    if as_json:
        typer.echo(json.dumps(facts, indent=1))
        return
    tensors = facts.pop("tensors", [])
    for name, value in facts.items():
        for number, line in enumerate(_lines(value)):
            typer.echo(f"{'' if number else name.replace('_', ' '):26} {line}")
    for number, line in enumerate(_tensor_lines(tensors)):
        typer.echo(f"{'' if number else 'tensors':26} {line}")


def _lines(value: Any) -> list[str]:
    if isinstance(value, list):
        return [str(item) for item in value] or ["-"]
    return [_text(value)]


def _text(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, dict):
        return ", ".join(f"{k} {v}" for k, v in value.items() if not isinstance(v, dict)) or "-"
    return "-" if value is None else str(value)


def _tensor_lines(tensors: list[dict[str, Any]]) -> list[str]:
    lines = []
    for tensor in tensors[:LISTED]:
        times = f"{tensor['count']} × " if tensor["count"] > 1 else ""
        shape = " × ".join(map(str, tensor["shape"])) or "a number"
        lines.append(f"{tensor['name']}  {times}({shape}) {tensor['dtype']}")
    if len(tensors) > LISTED:
        lines.append(f"and {len(tensors) - LISTED} more (--json)")
    return lines
