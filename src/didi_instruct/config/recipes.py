"""Recipes: YAML files, shipped by name or given as a path."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from didi_instruct.config.distill import DistillConfig
from didi_instruct.config.finetune import FinetuneConfig
from didi_instruct.config.schema import apply_overrides, nearest, parse, read_yaml
from didi_instruct.config.train import PretrainConfig
from didi_instruct.errors import UserError

T = TypeVar("T")

SHIPPED = Path(__file__).resolve().parent.parent / "recipes"
ABLATIONS = SHIPPED / "ablations.yaml"
"""A `base` and `variants`, each of which is a recipe by its name; its path is ABLATIONS / NAME."""
VERBS: dict[type[Any], str] = {
    PretrainConfig: "didi pretrain",
    DistillConfig: "didi distill",
    FinetuneConfig: "didi finetune",
}


def recipe_names() -> list[str]:
    """Names of the recipes that come with the package."""
    files = [path.stem for path in SHIPPED.glob("*.yaml") if path != ABLATIONS]
    return sorted([*files, *_ablations()])


@functools.cache
def _ablations() -> dict[str, dict[str, Any]]:
    values = read_yaml(ABLATIONS)
    return {name: {"base": values["base"], **own} for name, own in values["variants"].items()}


def find_recipe(recipe: str) -> Path:
    """Return the path of a recipe given by shipped name or by path."""
    if recipe in _ablations():
        return ABLATIONS / recipe
    if recipe in recipe_names():
        return SHIPPED / f"{recipe}.yaml"
    path = Path(recipe)
    if path.is_file():
        return path
    hint = nearest(recipe, recipe_names())
    raise UserError(f"`{recipe}` is neither a recipe file nor a shipped recipe.{hint}")


def load_recipe(
    cls: type[T], recipe: str | Path | Mapping[str, Any] | T, overrides: Sequence[str] = ()
) -> T:
    """Settings of class `cls` from a recipe, with `section.key=value` overrides.

    The recipe is a shipped name, a file, a mapping, or settings made in Python, which are checked
    as those of a file are.
    """
    values, where = recipe_values(cls, recipe)
    return parse(cls, apply_overrides(values, overrides), where=where)


def recipe_values(
    cls: type[T], recipe: str | Path | Mapping[str, Any] | T
) -> tuple[dict[str, Any], str]:
    """Values of a recipe for `cls` before they are checked, and the name that errors give it."""
    if isinstance(recipe, (str, Path)):
        path = find_recipe(str(recipe))
        values = read_recipe(path)
        _check_kind(cls, values, path)
        return values, path.name
    values = dataclasses.asdict(recipe) if isinstance(recipe, cls) else recipe  # type: ignore
    if not isinstance(values, Mapping):
        raise UserError(f"A recipe is a name, a file, a mapping or a {cls.__name__}: {recipe!r}.")
    return dict(values), cls.__name__


def _check_kind(cls: type[Any], values: dict[str, Any], path: Path) -> None:
    """Refuse a recipe of another command by that command's name."""
    fitting = [
        kind for kind in VERBS if set(values) <= {field.name for field in dataclasses.fields(kind)}
    ]
    if cls in VERBS and fitting and cls not in fitting:
        raise UserError(f"{path.name} is a recipe for `{VERBS[fitting[0]]}`.")


def read_recipe(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Read a recipe on top of the one it names as `base`, if any: a shipped one, or a file."""
    path = path.resolve()
    if path in seen:
        raise UserError(f"{path.name}: `base` leads back to itself.")
    values = dict(_ablations()[path.name]) if path.parent == ABLATIONS else read_yaml(path)
    if "base" not in values:
        return values
    base = values.pop("base")
    if not isinstance(base, str):
        raise UserError(f"{path}: `base` is {base!r}, but the name of a recipe is needed.")
    beside = path.parent / base
    found = beside if beside.is_file() else find_recipe(base)
    return _merged(read_recipe(found, (*seen, path)), values)


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Settings of `above` over those of `below`, section by section."""
    result = dict(below)
    for key, value in above.items():
        old = result.get(key)
        both = isinstance(old, dict) and isinstance(value, dict)
        result[key] = _merged(old, value) if both else value  # type: ignore[arg-type]
    return result
