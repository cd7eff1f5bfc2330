"""Recipes: YAML files, shipped by name or given as a path."""

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from didi_instruct.config.parse import apply_overrides, parse, read_yaml
from didi_instruct.errors import UserError

T = TypeVar("T")

SHIPPED = Path(__file__).parent.parent / "recipes"


def recipe_names() -> list[str]:
    """Names of the recipes that come with the package."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def find_recipe(recipe: str) -> Path:
    """Return the file of a recipe given by shipped name or by path."""
    shipped = SHIPPED / f"{recipe}.yaml"
    if recipe in recipe_names():
        return shipped
    path = Path(recipe)
    if path.is_file():
        return path
    raise UserError(
        f"`{recipe}` is neither a recipe file nor a shipped recipe. "
        f"Shipped: {', '.join(recipe_names())}."
    )


def load_recipe(cls: type[T], recipe: str, overrides: Sequence[str] = ()) -> T:
    """Read a recipe into the settings class `cls`, with `section.key=value` overrides."""
    path = find_recipe(recipe)
    return parse(cls, apply_overrides(read_yaml(path), overrides), where=path.name)
