"""Settings of a distillation: a recipe carried over to a method, and what is said of it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from didi_instruct.config.distill import DistillConfig, Method
from didi_instruct.config.recipes import recipe_values
from didi_instruct.config.schema import apply_overrides, parse
from didi_instruct.distillation.methods import METHODS
from didi_instruct.errors import Argument, Setting, UserError
from didi_instruct.training.run_dir import Run

OWN = ("optim.lr", "train.batch_size", "train.steps")
"""Settings for which every method needs values of its own."""


def settings_for(
    recipe: str | Path | Mapping[str, Any] | DistillConfig,
    overrides: Sequence[str] = (),
    method: Method | None = None,
) -> tuple[DistillConfig, list[str]]:
    """Settings in force, and what is to be said of those that do not fit the method.

    With `method` a recipe is carried over to it: its own order and lengths are left out where the
    method may not know them, and what it reproduces. What `overrides` say is never left out, but
    refused where it does not fit.
    """
    values, where = recipe_values(DistillConfig, recipe)
    notes: list[str] = []
    if method is not None and method != values.get("method", "didi"):
        values, notes = _carried_over(values, overrides, method)
    values = apply_overrides(values, overrides)
    config = parse(DistillConfig, values | ({"method": method} if method else {}), where=where)
    entry = METHODS[config.method]
    if entry.texts == "data" and not config.data.source:
        raise UserError(
            "method={} adds noise to real text: name it with {}.",
            config.method,
            Setting("data.source"),
        )
    if not entry.starts_masked and config.watch.budgets:
        # Both teacher and student would be drawn from masks alone.
        notes.append(
            f"watch.budgets={list(config.watch.budgets)} is left out: quick evaluations start from "
            f"masks alone, a student of method={config.method} does not. Use `didi eval`."
        )
        config = replace(config, watch=replace(config.watch, budgets=()))
    return config, notes


def _carried_over(
    values: Mapping[str, Any], overrides: Sequence[str], method: Method
) -> tuple[dict[str, Any], list[str]]:
    """A recipe's values without those that another method does not know, and notes on them."""
    own, entry = values.get("method", "didi"), METHODS.get(method)
    notes, values = [], {**values, "reproduces": "", "expect": ""}
    if kept := [k for k in OWN if not any(o.startswith(f"{k}=") for o in overrides)]:
        notes.append(
            f"{', '.join(kept)} are those of a recipe for {own}, not for method={method}: "
            "give others, or begin from a recipe of its own."
        )
    if entry is None:  # refused with all other settings
        return values, notes
    order, lengths = values.get("order", "random"), values.get("lengths")
    if order != "random" and not entry.any_order:
        values["order"] = "random"
        notes.append(f"order={order} is left out: method={method} learns in random order.")
    if lengths and entry.teacher_kind == "duo":
        values["lengths"] = ""
        notes.append(f"lengths={lengths} is left out: texts of method=duo fill their windows.")
    return values, notes


def check_rounds(config: DistillConfig, run: Run) -> None:
    """Refuse to lengthen a run whose rounds follow from its number of steps: they would move."""
    settings = config.sdtt if config.method == "sdtt" else config.duo
    if config.rounds is None or settings.iterations is not None:
        return
    for change in run.changes:
        if change.name == "train.steps":
            raise UserError(
                "{} shares {} steps evenly among rounds, and train.steps is {}: the rounds it has "
                "made would be others. Choose another {}, with {}.iterations if it may be "
                "lengthened later.",
                run.folder,
                change.before,
                change.now,
                Argument("out"),
                config.method,
            )
