"""Write docs/reference.md from the dataclasses and registries of the package.

    python docs/make_reference.py [FILE]

Settings, their types, defaults and descriptions come from the source of the dataclasses; samplers,
metrics, methods and recipes from their registries. `tests/test_reference.py` fails where the page
and the package disagree.
"""

import ast
import inspect
import sys
import textwrap
import types
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from didi_instruct.config.distill import DistillConfig
from didi_instruct.config.finetune import FinetuneConfig
from didi_instruct.config.recipes import find_recipe, read_recipe, recipe_names
from didi_instruct.config.train import PretrainConfig
from didi_instruct.sampling.registry import SAMPLERS

PAGE = Path(__file__).with_name("reference.md")
VERBS = {
    "pretrain": (PretrainConfig, "didi pretrain"),
    "distill": (DistillConfig, "didi distill"),
    "finetune": (FinetuneConfig, "didi finetune"),
}
NONE = type(None)
PLAIN_NAMES = {bool: "true, false", int: "integer", float: "number", str: "text"}
KINDS = {"mdlm": "masked", "duo": "uniform-state", "ar": "left to right"}


def reference() -> str:
    """Return the page."""
    parts = [
        "# Reference",
        "Made from the package by `python docs/make_reference.py`; do not edit by hand.",
        "Contents: [samplers](#samplers), [recipes](#recipes), "
        + ", ".join(f"[settings of `{command}`](#{verb})" for verb, (_, command) in VERBS.items())
        + ".",
        *_samplers(),
        *_recipes(),
    ]
    for verb, (config, command) in VERBS.items():
        parts += [f"## {verb}", f"Settings of `{command} --set name=value`."]
        parts += _sections(config)
    return "\n\n".join(parts) + "\n"


def _samplers() -> Iterator[str]:
    yield "## Samplers"
    yield (
        "`didi generate --sampler NAME --option key=value`, or "
        '`model.sample(sampler="NAME", options={...})`.'
    )
    rows = [f"| `{s.name}` | {KINDS[s.kind]} | {s.help} |" for s in SAMPLERS.values()]
    yield "\n".join(["| sampler | models | description |", "|---|---|---|", *rows])
    for sampler in SAMPLERS.values():
        if fields(sampler.options):
            yield f"### Options of `{sampler.name}`"
            yield _table(sampler.options)


def _recipes() -> Iterator[str]:
    yield "## Recipes"
    yield "A recipe of your own may name any of these as its `base`."
    rows = []
    for name in recipe_names():
        values = read_recipe(find_recipe(name))
        verb = next(verb for verb, (config, _) in VERBS.items() if set(values) <= _names(config))
        rows.append(f"| `{name}` | `{verb}` | {_cell(values.get('reproduces', ''))} |")
    yield "\n".join(["| recipe | verb | reproduces |", "|---|---|---|", *rows])


def _names(config: type) -> set[str]:
    return {field.name for field in fields(config)}


def _sections(config: type) -> Iterator[str]:
    """Tables of a configuration: its own settings, then a section for each nested dataclass."""
    yield _table(config)
    verb = config.__name__.removesuffix("Config").lower()
    hints = get_type_hints(config)
    for field in fields(config):
        section = hints[field.name]
        if is_dataclass(section):
            assert isinstance(section, type)
            yield f"### {verb}: `{field.name}`"
            yield _summary(section)
            yield _table(section, prefix=f"{field.name}.")


def _table(config: type, prefix: str = "") -> str:
    rows = ["| setting | values | default | |", "|---|---|---|---|", *_rows(config, prefix)]
    return "\n".join(rows)


def _rows(config: type, prefix: str) -> Iterator[str]:
    """Rows of a dataclass; those of a section have a table of their own, or follow here."""
    notes, hints = _descriptions(config), get_type_hints(config, include_extras=True)
    for field in fields(config):
        hint, name = hints[field.name], f"{prefix}{field.name}"
        if not is_dataclass(hint):
            note = _cell(notes.get(field.name, ""))
            yield f"| `{name}` | {_values(hint)} | {_default(field)} | {note} |"
        elif prefix:
            assert isinstance(hint, type)
            yield from _rows(hint, f"{name}.")


def _descriptions(config: type) -> dict[str, str]:
    """Return the string under each field, in the class or in those that it inherits from."""
    found: dict[str, str] = {}
    for cls in reversed(config.__mro__):
        if not is_dataclass(cls):
            continue
        [body] = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        assert isinstance(body, ast.ClassDef)
        for line, following in zip(body.body, body.body[1:], strict=False):
            if not (isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)):
                continue
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                found[line.target.id] = inspect.cleandoc(str(following.value.value))
    return found


def _summary(config: type) -> str:
    return inspect.cleandoc(config.__doc__ or "").split("\n\n")[0].replace("\n", " ")


def _values(hint: Any) -> str:
    """Values that a setting takes: the choices of a Literal, else the name of the type."""
    if get_origin(hint) is Annotated:
        plain, *bounds = get_args(hint)
        remedies = [bound.remedy.removeprefix("use ") for bound in bounds]
        return f"{_values(plain)}: {', '.join(remedies)}"
    if get_origin(hint) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(hint))
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join("`null`" if part is NONE else _values(part) for part in get_args(hint))
    if get_origin(hint) is tuple:
        inner = dict.fromkeys(_values(part) for part in get_args(hint) if part is not Ellipsis)
        return f"list of {', '.join(inner)}"
    return PLAIN_NAMES.get(hint, getattr(hint, "__name__", str(hint)))


def _default(field: "Field[Any]") -> str:
    value = field.default
    if value is MISSING and field.default_factory is not MISSING:
        value = field.default_factory()
    if value is MISSING:
        return "required"
    if isinstance(value, bool) or value is None:
        return f"`{str(value).lower() if isinstance(value, bool) else 'null'}`"
    return f"`{list(value) if isinstance(value, tuple) else value or repr(value)}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    Path(sys.argv[1] if len(sys.argv) > 1 else PAGE).write_text(reference(), encoding="utf-8")
