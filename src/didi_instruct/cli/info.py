"""`didi info`."""

import json
from typing import Annotated, Any

import typer

from didi_instruct.errors import UserError

LISTED = 40
"""Lines of one list that are shown; `--json` has them all."""

WIDEST = 600
"""Characters of a line."""

_GIVEN = ("batch", "length", "rank")
"""For which memory is told."""

_TOLD = ("source", "reproduces", "teacher", "step", "didi_instruct", "torch")
"""Of the provenance; the rest is long."""


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
    from didi_instruct.hub.info import describe_architecture, describe_source

    settings: Any = {"weights": weights, "family": family}
    facts = describe_architecture(arch) if arch else describe_source(str(source), **settings)
    if as_json:
        typer.echo(json.dumps(facts, indent=1))
        return
    for name, value in facts.items():
        if value in (None, []) and facts.get("layout", "") is None:
            continue  # nothing is known of a file that is no model of ours
        for number, line in enumerate(_cut(_lines(name, value))):
            typer.echo(f"{'' if number else name.replace('_', ' '):26} {_printable(line)}")


def _lines(name: str, value: Any) -> list[str]:
    if name == "provenance" and isinstance(value, dict):
        return _provenance(value)
    if name == "tensors":
        return [_tensor(tensor) for tensor in value]
    if name.startswith("bytes_"):
        return memory_lines(value)
    if isinstance(value, list):
        return [str(item) for item in value] or ["-"]
    return [_text(value)]


def _cut(lines: list[str]) -> list[str]:
    more = len(lines) - LISTED
    return [*lines[:LISTED], f"and {more} more (--json)"] if more > 0 else lines


def _printable(line: str) -> str:
    """Foreign files hold any words; none of them may steer the terminal."""
    from didi_instruct.models.tensor_files import shown

    return shown(line, WIDEST)


def _provenance(value: dict[str, Any]) -> list[str]:
    """A few facts of where a model comes from, one per line."""
    foreign, recipe = value.get("foreign"), value.get("recipe")
    facts = {name: value.get(name) for name in _TOLD}
    if isinstance(foreign, dict):
        facts["source"] = foreign.get("source")
    if isinstance(recipe, dict):
        facts["method"] = recipe.get("method")
    if isinstance(base := value.get("finetuned_from"), dict):
        facts["finetuned_from"] = f"{base.get('source')} ({str(base.get('sha256'))[:12]})"
    lines = [f"{name.replace('_', '-')} {fact}" for name, fact in facts.items() if fact is not None]
    if set(value) - set(_TOLD):
        lines.append("the rest: --json")
    return lines or ["-"]


def memory_lines(parts: dict[str, int]) -> list[str]:
    """Memory by part; the total first, and what it is for."""
    of = ", ".join(f"{name} {parts[name]}" for name in _GIVEN if name in parts)
    rest = (name for name in parts if name not in (*_GIVEN, "total"))
    size, unit = (1e9, "GB") if parts["total"] >= 1e8 else (1e6, "MB")
    lines = [f"{parts[name] / size:8.2f} {unit} {name.replace('_', ' ')}" for name in rest]
    return [f"{parts['total'] / size:8.2f} {unit} ({of or 'in all'})", *lines]


def _text(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, dict):
        return ", ".join(f"{k} {v}" for k, v in value.items() if not isinstance(v, dict)) or "-"
    return "-" if value is None else str(value)


def _tensor(tensor: dict[str, Any]) -> str:
    times = f"{tensor['count']} × " if tensor["count"] > 1 else ""
    shape = " × ".join(map(str, tensor["shape"])) or "a number"
    return f"{tensor['name']}  {times}({shape}) {tensor['dtype']}"
