"""Options of a command from the fields of a settings dataclass, so that each is declared once."""

import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import typer

from didi_instruct.config.schema import Help, apply_overrides

Result = TypeVar("Result")


def with_settings(config: type) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Give a command an option for each field of `config`, a dataclass.

    The command takes the settings as its first argument; its other parameters follow as they are.
    A field is declared as `Annotated[TYPE, Help(...)]`. Tuples are separated by commas, mappings
    collect KEY=VALUE, and a flag that is off by default can only be switched on.
    """
    hints = get_type_hints(config, include_extras=True)
    settings = {f.name: _parameter(f, hints[f.name]) for f in fields(config)}
    kinds = {name: _kind(hint) for name, hint in hints.items() if name in settings}

    def decorate(command: Callable[..., Result]) -> Callable[..., Result]:
        _, *others = inspect.signature(command, eval_str=True).parameters.values()

        def run(**given: Any) -> Result:
            values = {name: _value(kinds[name], given.pop(name)) for name in settings}
            return command(config(**values), **given)

        run.__doc__, run.__module__ = command.__doc__, command.__module__
        signature = inspect.Signature([*settings.values(), *others])
        run.__signature__ = signature  # type: ignore[attr-defined]
        run.__annotations__ = {}
        return run

    return decorate


def _kind(hint: Any) -> Any:
    """Type without metadata and without None."""
    if get_origin(hint) is Annotated:
        return _kind(get_args(hint)[0])
    if get_origin(hint) in (Union, types.UnionType):
        (kind,) = (_kind(part) for part in get_args(hint) if part is not types.NoneType)
        return kind
    return hint


def _parameter(field: Field[Any], hint: Any) -> inspect.Parameter:
    (note,) = (part for part in get_args(hint) if isinstance(part, Help))
    kind, default = _kind(hint), None if field.default is MISSING else field.default
    shown: Any = kind if default is not None else kind | None
    flag = note.flag or f"--{field.name.replace('_', '-')}"
    if get_origin(kind) is tuple:
        shown, default = str, ",".join(default or ())
    elif get_origin(kind) in (dict, Mapping):
        shown = list[str] | None
    elif kind is bool and default is None:
        flag = f"{flag}/--no-{flag.removeprefix('--')}"
    more: dict[str, Any] = {"help": note.text, "metavar": note.metavar}
    option: Any = typer.Argument(**more) if note.positional else typer.Option(flag, **more)
    return inspect.Parameter(
        field.name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default,
        annotation=Annotated[shown, option],
    )  # fmt: skip


def _value(kind: Any, given: Any) -> Any:
    """Convert a value of the command line to the setting's type."""
    if get_origin(kind) is tuple:
        return tuple(part.strip() for part in given.split(",") if part.strip())
    if get_origin(kind) in (dict, Mapping):
        return apply_overrides({}, given or ())
    return given
