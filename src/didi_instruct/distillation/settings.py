"""Settings of a distillation: a recipe carried over to a method, and how its student is sampled."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass, replace
from pathlib import Path
from typing import Any

from didi_instruct.config.distill import DistillConfig, Method
from didi_instruct.config.recipes import find_recipe, read_recipe
from didi_instruct.distillation.methods import METHODS
from didi_instruct.errors import UserError
from didi_instruct.training.run_dir import Change, configure

OWN = ("optim.lr", "train.batch_size", "train.steps")
"""Settings that every method wants otherwise."""


def settings_for(
    recipe: str | Mapping[str, Any] | DistillConfig,
    overrides: Sequence[str] = (),
    method: Method | None = None,
) -> tuple[DistillConfig, list[str]]:
    """Settings in force, and what is to be said of those that do not fit the method.

    With `method` a recipe is carried over to it: its own order and lengths are left out where the
    method may not know them, and what it reproduces. What `overrides` say is never left out, but
    refused where it does not fit.
    """
    said = []
    if method is not None and not isinstance(overrides, str):
        values = _values(recipe)
        own, order = values.get("method", "didi"), values.get("order", "random")
        if method != own:
            kept = [k for k in OWN if not any(o.startswith(f"{k}=") for o in overrides)]
            overrides = ["reproduces=''", "expect=''", *overrides]
            if kept:
                said.append(
                    f"{', '.join(kept)} are those of a recipe for {own}, not for method={method}: "
                    "give others with --set, or begin from a recipe of its own."
                )
        entry = METHODS.get(method)  # an unknown method is refused with all other settings
        if method != own and not (entry and entry.any_order) and order != "random":
            overrides = ["order=random", *overrides]
            said.append(f"order={order} is left out: method={method} learns in random order.")
        windows = entry is None or entry.teacher_kind != "duo"  # of their own
        if method != own and not windows and values.get("lengths"):
            overrides = ["lengths=''", *overrides]
            said.append(
                f"lengths={values['lengths']} is left out: texts of method=duo fill their windows."
            )
        overrides = [*overrides, f"method={method}"]
    config = configure(DistillConfig, recipe, overrides)
    if not METHODS[config.method].starts_masked and config.watch.budgets:
        # Both teacher and student would be drawn from masks alone.
        said.append(
            f"watch.budgets={list(config.watch.budgets)} is left out: quick evaluations start from "
            f"masks alone, a student of method={config.method} does not. Use `didi eval`."
        )
        config = replace(config, watch=replace(config.watch, budgets=()))
    return config, said


def _values(recipe: str | Mapping[str, Any] | DistillConfig) -> Mapping[str, Any]:
    """Values of a recipe, before anything is checked."""
    values: Any = recipe
    if isinstance(recipe, (str, Path)):
        values = read_recipe(find_recipe(str(recipe)))
    elif is_dataclass(recipe) and not isinstance(recipe, type):
        values = asdict(recipe)
    return values if isinstance(values, Mapping) else {}


def check_rounds(config: DistillConfig, changes: Sequence[Change], folder: Path) -> None:
    """Refuse to lengthen a run whose rounds follow from its number of steps: they would move."""
    if config.rounds is None or getattr(config, config.method).iterations is not None:
        return
    for change in changes:
        if change.name == "train.steps":
            raise UserError(
                f"{folder} shares {change.before} steps evenly among rounds, and train.steps is "
                f"{change.now}: the rounds it has made would be others. Choose another --out, with "
                f"{config.method}.iterations if it may be lengthened later."
            )


def sampling_flags(config: DistillConfig) -> str:
    """Flags of `didi generate` for what the student has learnt."""
    return METHODS[config.method].sampling_flags(config)
