"""A run's folder: its recipe, whether it may be begun or resumed, what may change meanwhile."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml

from didi_instruct.config.recipes import load_recipe
from didi_instruct.config.schema import apply_overrides, parse, read_yaml
from didi_instruct.config.train import OptimConfig, PretrainTrainConfig
from didi_instruct.data.files import no_space_as_user_error, write_atomic
from didi_instruct.errors import UserError
from didi_instruct.models.checkpoint import CONFIG, read_manifest
from didi_instruct.training.distributed import World
from didi_instruct.training.loop import Loop

T = TypeVar("T")

RECIPE, LOCK = "recipe.yaml", ".lock"
BEFORE_THE_FIRST_STEP = (LOCK, "data", "bank")
BEFORE_THE_FIRST_SAVE = (*BEFORE_THE_FIRST_STEP, RECIPE, "log.jsonl", "tensorboard", "checkpoints")
"""What a run that was stopped may leave in its folder: the same command starts it over."""

FREE_TO_CHANGE = {
    "": {"reproduces", "expect"},
    "train": {f.name for f in fields(PretrainTrainConfig)}
    - {"batch_size", "seed", "ema", "ema_warmup"},
    "optim": {f.name for f in fields(OptimConfig)},
    "watch": {"budgets", "samples", "min_entropy"},
    "didi": {"kl_weight", "entropy_weight", "advantage_clip"},
    "discriminator": {
        "lr",
        "lr_warmup",
        "weight_decay",
        "dropout",
        "chance",
        "saturation",
        "label_smoothing",
    },
    "token_matching": {"aux_lr", "anchor", "ratio_clip"},
    "mixture": {"budgets", "learning"},
}
"""Settings that a resumed run may change: they alter what is done next, not what has been done."""


class Change(NamedTuple):
    """A setting that differs from the one a run was begun with."""

    name: str
    before: Any
    now: Any
    free: bool
    """Whether a resumed run may change it."""


def configure(
    cls: type[T], recipe: str | Mapping[str, Any] | T, overrides: Sequence[str] = ()
) -> T:
    """Settings from a recipe's name, its file, a mapping or settings already made, overridden."""
    if isinstance(overrides, str):
        raise UserError(f"overrides is the text {overrides!r}: give a list of them.")
    if isinstance(recipe, (str, Path)):
        return load_recipe(cls, str(recipe), overrides)
    # Settings made in Python are checked as those of a file are.
    if is_dataclass(recipe) and not isinstance(recipe, type):
        recipe = asdict(recipe)
    if not isinstance(recipe, Mapping):
        raise UserError(f"A recipe is a name, a file, a mapping or a {cls.__name__}: {recipe!r}.")
    return parse(cls, apply_overrides(_plain(dict(recipe)), overrides), where=cls.__name__)


def is_begun(folder: Path) -> bool:
    """Whether a run has saved something in a folder."""
    finished = (folder / CONFIG).exists() and (folder / RECIPE).exists()
    return finished or any((folder / "checkpoints").glob("step-*"))


def steps_made(folder: Path) -> int | None:
    """Steps behind the finished model in a folder; None where there is no whole one."""
    if not (folder / CONFIG).exists() or not (folder / RECIPE).exists():
        return None
    try:
        manifest = read_manifest(folder)
        sizes = {name: (folder / name).stat().st_size for name in manifest.files}
    except (UserError, OSError):
        return None
    whole = all(sizes[name] == record.bytes for name, record in manifest.files.items())
    step = manifest.provenance.get("step")
    return step if whole and isinstance(step, int) else None


def nothing_to_do(folder: Path, steps: int, resume: bool, say: Callable[[str], None]) -> bool:
    """Whether a run to resume has finished; it then stays as it is, recipe included."""
    if not resume or steps_made(folder) != steps:
        return False
    say(
        f"{folder} has finished its {steps} steps: nothing to do "
        "(--set train.steps=... with a higher number goes on)."
    )
    return True


def check_folder(folder: Path, config: Any, resume: bool, *, verb: str) -> list[Change]:
    """Refuse to write over another run, or to resume one that was set up otherwise.

    `verb` is the command, with RECIPE for the recipe. Returns what a resumed run changes.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file: give a folder with --out.")
    if resume:
        return _check_resumed(folder, config, verb)
    if is_begun(folder):
        raise UserError(
            f"{folder} already holds a run: resume it (--resume), or choose another --out."
        )
    own = BEFORE_THE_FIRST_SAVE if (folder / RECIPE).exists() else BEFORE_THE_FIRST_STEP
    if folder.exists() and any(path.name not in own for path in folder.iterdir()):
        raise UserError(f"{folder} is not empty: choose another --out.")
    return []


def check_held(folder: Path, config: Any, resume: bool, world: World, *, verb: str) -> list[Change]:
    """`check_folder` once the folder is held: another run may have begun there before that.

    All processes call, and none writes before all have looked.
    """
    changes = check_folder(folder, config, resume, verb=verb)
    world.wait()
    return changes


def _check_resumed(folder: Path, config: Any, verb: str) -> list[Change]:
    """Refuse what cannot go on, or not like this; return what changes."""
    recipe, made, steps = folder / RECIPE, steps_made(folder) or 0, config.iterations
    if not is_begun(folder) and not recipe.exists():
        raise UserError(f"{folder} holds no run to resume: leave out --resume to start one.")
    if made > steps:
        raise UserError(_cannot_go_back(folder, made, steps))
    if 0 < made < steps and not any((folder / "checkpoints").glob("step-*")):
        raise UserError(
            f"{folder} has made {made} steps, but its checkpoints are gone, so it cannot go on: "
            "choose another --out."
        )
    if not recipe.exists():
        return []
    before = parse(type(config), read_yaml(recipe), where=str(recipe))
    unread = getattr(config, "unread", ())
    differences = _differences(asdict(before), asdict(config))
    changes = [change for change in differences if change.name.split(".")[0] not in unread]
    for change in changes:
        if not change.free:
            raise UserError(
                f"{folder} was begun with {change.name} = {change.before}, now it is {change.now}: "
                f"resume as it began ({verb.replace('RECIPE', str(recipe))} --out {folder} "
                "--resume), or choose another --out."
            )
    return changes


def _cannot_go_back(folder: Path, made: int, steps: int) -> str:
    return (
        f"{folder} has made {made} steps already, and train.steps asks for {steps}: it cannot go "
        "back. Choose another --out to start over."
    )


@contextmanager
def only_run(folder: Path, world: World) -> Iterator[None]:
    """Hold a run's folder, so that no second command writes into it; all processes call."""
    taken, handle, new = False, None, not folder.exists()
    if world.is_main:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT)
        taken = not _lock(handle)
    try:
        if world.any(taken):
            error = UserError(f"{folder} is in use by another didi: wait for it, or change --out.")
            raise error if world.is_main else SystemExit(2)  # the main process says what is wrong
        yield
    finally:
        if handle is not None:
            if new and not taken and [path.name for path in folder.iterdir()] == [LOCK]:
                (folder / LOCK).unlink()  # refused before anything was done: no trace
                folder.rmdir()
            os.close(handle)


def _lock(handle: int) -> bool:
    """Take a lock that ends with the process; True also where locks do not exist."""
    try:
        import fcntl
    except ImportError:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def start_of(loop: Loop, config: Any, changes: Sequence[Change], resume: bool) -> int:
    """Load the last checkpoint and keep the recipe; the step to go on from."""
    folder, steps = loop.folder, loop.config.steps
    start = loop.resume() if resume else 0
    if start > steps:
        raise UserError(_cannot_go_back(folder, start, steps))
    for change in changes:
        loop.reporter.say(f"Changed: {change.name} {change.before} -> {change.now}")
    if loop.world.is_main:
        write_recipe(folder, config)
    return start


def write_recipe(folder: Path, config: Any) -> None:
    """Write the settings in force."""
    folder.mkdir(parents=True, exist_ok=True)
    with no_space_as_user_error(folder):
        text = yaml.safe_dump(_plain(asdict(config)), sort_keys=False)
        write_atomic(folder / RECIPE, text.encode())


def _plain(value: Any) -> Any:
    """Tuples as lists: what YAML can write."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return list(value) if isinstance(value, tuple) else value


def _differences(
    before: Mapping[str, Any], after: Mapping[str, Any], section: str = ""
) -> Iterator[Change]:
    for name, old in before.items():
        if isinstance(old, dict):
            yield from _differences(old, after[name], f"{section}{name}.")
        elif old != after[name]:
            free = name in FREE_TO_CHANGE.get(section.rstrip("."), set())
            yield Change(f"{section}{name}", old, after[name], free)
