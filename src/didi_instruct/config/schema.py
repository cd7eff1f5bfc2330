"""Settings from plain values (YAML, `--set`): types and bounds checked, a typo is an error."""

import difflib
import functools
import math
import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from didi_instruct.errors import UserError

T = TypeVar("T")
STEP_COUNTS = "step counts, 1 or more"
REMOVED = {("train.compile", "blocks"): "train.compile=blocks was removed: leave it out."}
"""Values that settings had in earlier versions, and what to do without them."""


class Bound(NamedTuple):
    """Limit of a setting, as metadata of its `Annotated` type."""

    holds: Callable[[Any], bool]
    remedy: str


class Help(NamedTuple):
    """Description of a setting that the command line has an option for, as metadata of its type."""

    text: str
    flag: str | None = None
    """By default made from the setting's name."""
    metavar: str | None = None
    positional: bool = False


def at_least(least: float) -> Bound:
    """Bound of finite numbers from `least` on."""
    return Bound(lambda value: least <= value < math.inf, f"use {least:g} or more")


FINITE = Bound(math.isfinite, "use a finite number")
Count = Annotated[int, at_least(1)]
Natural = Annotated[int, at_least(0)]
NonNegative = Annotated[float, at_least(0)]
Positive = Annotated[float, Bound(lambda v: 0 < v < math.inf, "use a finite number above 0")]
Fraction = Annotated[float, Bound(lambda v: 0 <= v < 1, "use 0 or more and less than 1")]
Share = Annotated[float, Bound(lambda v: 0 <= v <= 1, "use 0 to 1")]
Inside = Annotated[float, Bound(lambda v: 0 < v < 1, "use more than 0 and less than 1")]
StepCounts = Annotated[tuple[int, ...], Bound(lambda v: min(v, default=1) >= 1, STEP_COUNTS)]
SomeStepCounts = Annotated[tuple[int, ...], Bound(lambda v: min(v, default=0) >= 1, STEP_COUNTS)]


def parse(cls: type[T], values: Mapping[str, Any], *, where: str, prefix: str = "") -> T:
    """Build the dataclass `cls` from nested plain values; errors start with `where`."""
    if not isinstance(values, Mapping):
        raise UserError(f"{where}: `{prefix.rstrip('.')}` is {values!r}, but a section is needed.")
    hints = _hints(cls)  # type: ignore[arg-type]
    known = [f.name for f in fields(cls)]  # type: ignore[arg-type]
    for key in values:
        if key not in known:
            raise UserError(f"{where}: `{prefix}{key}` is not a setting.{nearest(str(key), known)}")
    for f in fields(cls):  # type: ignore[arg-type]
        required = f.default is MISSING and f.default_factory is MISSING
        if required and f.name not in values:
            raise UserError(f"{where}: `{prefix}{f.name}` is missing.")
    parsed = {
        key: _value(hints[key], value, where, f"{prefix}{key}") for key, value in values.items()
    }
    try:
        return cls(**parsed)
    except UserError as error:
        raise UserError("{}: {}", where, error) from None


@functools.cache  # slow, and the same each time
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls, include_extras=True)


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file whose top level is a section."""
    import yaml  # here, since the command line imports settings when it starts

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error}).") from None
    except yaml.YAMLError as error:
        line = getattr(getattr(error, "problem_mark", None), "line", None)
        at = "" if line is None else f" at line {line + 1}"
        raise UserError(f"{path}: not valid YAML{at}.") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: a recipe is a list of `setting: value` lines.")
    return values


def apply_overrides(
    values: dict[str, Any], overrides: Sequence[str], flag: str = "--set"
) -> dict[str, Any]:
    """Return a copy of `values` with each `section.key=value` put in its place."""
    import yaml

    if isinstance(overrides, str):
        raise UserError(f"overrides is the text {overrides!r}: give a list of them.")
    result = _copy(values)
    for override in overrides:
        key, sign, text = override.partition("=")
        if not sign or not key.strip():
            form = "section.key=value" if flag == "--set" else "key=value"
            raise UserError(f"{flag} {override}: write it as {form}.")
        *sections, last = key.strip().split(".")
        target = result
        for section in sections:
            target = target.setdefault(section, {})
            if not isinstance(target, dict):
                raise UserError(f"{flag} {override}: `{section}` is a value, not a section.")
        try:
            target[last] = yaml.safe_load(text)
        except yaml.YAMLError:
            raise UserError(f"{flag} {override}: the value is not valid YAML.") from None
    return result


def _copy(values: dict[str, Any]) -> dict[str, Any]:
    return {k: _copy(v) if isinstance(v, dict) else v for k, v in values.items()}


def nearest(name: str, known: Sequence[str]) -> str:
    """Suggest the known name that was meant, or list them all."""
    close = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean `{close[0]}`?" if close else f" Known: {', '.join(known)}."


def _value(hint: Any, value: Any, where: str, name: str) -> Any:
    """Check one value against its annotation, converting what YAML reads too literally."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _within(args[1:], _value(args[0], value, where, name), where, name)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        return _first_that_fits([a for a in args if a is not type(None)], value, where, name)
    if origin is Literal:
        return _choice(args, value, where, name)
    if is_dataclass(hint):
        return parse(hint, value, where=where, prefix=f"{name}.")  # type: ignore[arg-type]
    if origin is tuple:
        items = _require((list, tuple), "a list", value, where, name)
        return tuple(_value(args[0], v, where, name) for v in items)
    if origin is dict:
        section = _require(dict, "a section", value, where, name)
        return {k: _value(args[1], v, where, f"{name}.{k}") for k, v in section.items()}
    return value if hint is Any else _scalar(hint, value, where, name)


def _choice(choices: Sequence[Any], value: Any, where: str, name: str) -> Any:
    if isinstance(value, bool) and "on" in choices:
        value = "on" if value else "off"  # YAML 1.1 reads `on` and `off` as booleans
    if isinstance(value, str) and (name, value) in REMOVED:
        raise UserError(f"{where}: {REMOVED[name, value]}")
    if value not in choices or isinstance(value, bool):
        known = ", ".join(map(str, choices))
        raise UserError(f"{where}: `{name}` is {value!r}; choose one of {known}.")
    return value


def _within(metadata: Sequence[Any], value: Any, where: str, name: str) -> Any:
    for bound in metadata:
        if isinstance(bound, Bound) and not bound.holds(value):
            shown = list(value) if isinstance(value, tuple) else value
            raise UserError(f"{where}: {name} is {shown}: {bound.remedy}.")
    return value


def _require(kind: Any, needed: str, value: Any, where: str, name: str) -> Any:
    if not isinstance(value, kind):
        raise UserError(f"{where}: `{name}` is {value!r}, but {needed} is needed.")
    return value


def _first_that_fits(hints: Sequence[Any], value: Any, where: str, name: str) -> Any:
    for hint in hints[:-1]:
        try:
            return _value(hint, value, where, name)
        except UserError:
            continue
    return _value(hints[-1], value, where, name)


def _scalar(hint: type, value: Any, where: str, name: str) -> Any:
    if hint is float:
        # YAML 1.1 reads `1e-4` as text; people mean the number.
        if isinstance(value, (int, float, str)) and not isinstance(value, bool):
            try:
                return float(value)
            except ValueError:
                pass
    elif hint is int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if isinstance(value, str) and re.fullmatch(r"\d+(\.0*)?e\+?\d+", value):
            return int(float(value))  # `1e3`: text to YAML 1.1, a whole number to people
    elif isinstance(value, hint):
        return value
    elif hint is str and isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    words = {float: "a number", int: "a whole number", bool: "true or false", str: "text"}
    raise UserError(f"{where}: `{name}` is {value!r}, but {words.get(hint, hint)} is needed.")
