"""A run's folder: its recipe, whether it may be begun or resumed, what may change meanwhile."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import yaml

from didi_instruct.api.sources import PrepareBar, is_prepared, open_source
from didi_instruct.config.parse import apply_overrides, parse, read_yaml
from didi_instruct.config.pretrain import DataConfig, OptimConfig, TrainConfig
from didi_instruct.config.recipes import load_recipe
from didi_instruct.data.dataset import TokenSource
from didi_instruct.data.files import no_space_as_user_error, write_atomic
from didi_instruct.errors import UserError
from didi_instruct.training.world import World

T = TypeVar("T")

RECIPE = "recipe.yaml"

FREE_TO_CHANGE = {
    "": {"reproduces", "expect"},
    "train": {f.name for f in fields(TrainConfig)} - {"batch_size", "seed", "ema"},
    "optim": {f.name for f in fields(OptimConfig)},
    "watch": {"budgets", "samples", "min_entropy"},
    "didi": {"kl_weight", "entropy_weight", "advantage_clip"},
    "discriminator": {"lr", "chance", "saturation", "label_smoothing"},
    "token_matching": {"aux_lr", "anchor", "ratio_clip"},
}
"""Settings that a resumed run may change: they alter what is done next, not what has been done."""


def configure(cls: type[T], recipe: str | T, overrides: Sequence[str] = ()) -> T:
    """Settings from a recipe's name, its file, or settings already made, with overrides."""
    if isinstance(recipe, str):
        return load_recipe(cls, recipe, overrides)
    if not overrides:
        return recipe
    values = apply_overrides(_plain(asdict(recipe)), overrides)  # type: ignore[call-overload]
    return parse(cls, values, where=cls.__name__)


def check_folder(
    folder: Path, config: Any, resume: bool, *, verb: str, own: tuple[str, ...] = ("data",)
) -> None:
    """Refuse to write over another run, or to resume one that was set up otherwise.

    `verb` is the command, with RECIPE for the recipe; `own` is what a run prepares in its folder
    before it has begun.
    """
    begun = (folder / RECIPE).exists() or (folder / "checkpoints").exists()
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file: give a folder with --out.")
    if not resume and begun:
        raise UserError(f"{folder} already holds a run: add --resume, or choose another --out.")
    if not resume and folder.exists() and any(p.name not in own for p in folder.iterdir()):
        raise UserError(f"{folder} is not empty: choose another --out.")
    if resume and not begun:
        raise UserError(f"{folder} holds no run to resume: leave out --resume to start one.")
    if resume and (folder / RECIPE).exists():
        before = parse(type(config), read_yaml(folder / RECIPE), where=str(folder / RECIPE))
        command = verb.replace("RECIPE", str(folder / RECIPE))
        for name, old, new in _differences(asdict(before), asdict(config)):
            raise UserError(
                f"{folder} was begun with {name} = {old}, now it is {new}: resume as it began "
                f"({command} --out {folder} --resume), or choose another --out."
            )


def write_recipe(folder: Path, config: Any) -> None:
    """Write the settings in force."""
    folder.mkdir(parents=True, exist_ok=True)
    with no_space_as_user_error(folder):
        text = yaml.safe_dump(_plain(asdict(config)), sort_keys=False)
        write_atomic(folder / RECIPE, text.encode())


def open_data_together(
    config: DataConfig,
    folder: Path,
    world: World,
    progress: PrepareBar,
    *,
    length: int,
    seed: int,
) -> tuple[TokenSource, TokenSource | None]:
    """Open the data in every process; the main one goes first, since it may have to prepare it."""
    prepared, source = folder / "data", config
    if is_prepared(prepared) and (folder / RECIPE).exists():
        # A run that goes on needs its tokens, not the corpus they were made from.
        source = replace(source, source=str(prepared))

    def open_now(bar: PrepareBar) -> tuple[TokenSource, TokenSource | None]:
        return open_source(source, length=length, seed=seed, prepared=prepared, progress=bar)

    opened, error = None, None
    if world.is_main:
        try:
            opened = open_now(progress)
        except Exception as problem:
            error = problem
    if world.any(error is not None):
        raise error or SystemExit(2)  # the main process says what is wrong
    return opened or open_now(nullcontext)


def _plain(value: Any) -> Any:
    """Tuples as lists: what YAML can write."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return list(value) if isinstance(value, tuple) else value


def _differences(
    before: Mapping[str, Any], after: Mapping[str, Any], section: str = ""
) -> list[tuple[str, Any, Any]]:
    found = []
    for name, old in before.items():
        if isinstance(old, dict):
            found += _differences(old, after[name], f"{section}{name}.")
        elif old != after[name] and name not in FREE_TO_CHANGE.get(section.rstrip("."), set()):
            found.append((f"{section}{name}", old, after[name]))
    return found
