"""The folder of a run: held by one command at a time, begun or resumed, its settings kept."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml

from didi_instruct import __version__
from didi_instruct.config.distill import DistillConfig
from didi_instruct.config.finetune import FinetuneConfig
from didi_instruct.config.schema import parse, read_yaml
from didi_instruct.config.train import OptimConfig, PretrainConfig, PretrainTrainConfig
from didi_instruct.data.files import no_space_as_user_error, write_atomic
from didi_instruct.errors import Argument, UserError
from didi_instruct.models.checkpoint import CONFIG, read_manifest
from didi_instruct.training.distributed import World, open_world
from didi_instruct.training.loop import Loop, Outcome
from didi_instruct.training.reporting import Reporter

RECIPE, LOCK = "recipe.yaml", ".lock"
BEFORE_THE_FIRST_STEP = (LOCK, "data", "bank")
BEFORE_THE_FIRST_SAVE = (*BEFORE_THE_FIRST_STEP, RECIPE, "log.jsonl", "tensorboard", "checkpoints")
"""Files of a run that was stopped before it saved anything: the same command starts it over."""

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

RunConfig = PretrainConfig | DistillConfig | FinetuneConfig


class Change(NamedTuple):
    """A setting that differs from the one a run was begun with."""

    name: str
    before: Any
    now: Any
    free: bool
    """True if a resumed run may change it."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """State of a run when it returns."""

    folder: Path
    config: Any
    outcome: Outcome
    is_main: bool
    """True in the process that reports."""
    new: bool = True
    """False where a resumed run had finished, so that nothing was trained."""

    @property
    def finished(self) -> bool:
        """True if all steps are done and the model is in `folder`."""
        return self.outcome.signal is None


@dataclass(frozen=True, slots=True)
class Run:
    """A run that holds its folder."""

    folder: Path
    config: RunConfig
    world: World
    reporter: Reporter
    resume: bool
    changes: Sequence[Change]
    """Settings that a resumed run changes."""

    @property
    def is_complete(self) -> bool:
        """True if a resumed run has made all of its steps: it stays as it is."""
        return self.resume and steps_made(self.folder) == self.config.iterations

    def begin(self, loop: Loop, notes: Iterable[str] = ()) -> int:
        """Load the last checkpoint, write the recipe and say the notes; return the first step."""
        start = loop.resume() if self.resume else 0
        if start > loop.config.steps:
            raise _cannot_go_back(self.folder, start, loop.config.steps)
        for change in self.changes:
            self.reporter.say(f"Changed: {change.name} {change.before} -> {change.now}")
        if self.world.is_main:
            write_recipe(self.folder, self.config)
        for note in (*notes, *self._ineffective()):
            self.reporter.say(note)
        return start

    def end(self, outcome: Outcome | None = None) -> dict[str, Any]:
        """Fields of a `RunResult`; without an outcome, of a run that had nothing left to do."""
        steps = self.config.iterations
        if outcome is None:
            self.reporter.say(
                f"{self.folder} has finished its {steps} steps: nothing to do (with a higher "
                "train.steps it goes on)."
            )
        return {
            "folder": self.folder,
            "config": self.config,
            "outcome": outcome or Outcome(steps, None, None),
            "is_main": self.world.is_main,
            "new": outcome is not None,
        }

    def _ineffective(self) -> Iterator[str]:
        train = self.config.train
        if train.strategy == "fsdp" and self.world.size == 1:
            yield "train.strategy=fsdp shards over processes, and there is one: it has no effect."
        elif train.checkpoints == "sharded" and train.strategy == "ddp":
            yield "train.checkpoints=sharded goes with train.strategy=fsdp: it has no effect."


@contextmanager
def open_run(
    folder: str | Path,
    config: RunConfig,
    *,
    resume: bool,
    device: str | None,
    reporter: Reporter | None,
) -> Iterator[Run]:
    """Hold a folder in which a run may begin, or resume; under torchrun, all processes call.

    A folder in which nothing was done is left as it was found.
    """
    folder = Path(folder)
    with open_world(device) as world, _held(folder, world):
        changes = _check_resumed(folder, config) if resume else _check_new(folder)
        world.wait()  # none writes before all have looked
        shown = reporter if world.is_main and reporter else Reporter()
        yield Run(folder, config, world, shown, resume, changes)


def is_begun(folder: Path) -> bool:
    """Tell if a run has saved something in a folder."""
    finished = (folder / CONFIG).exists() and (folder / RECIPE).exists()
    return finished or any((folder / "checkpoints").glob("step-*"))


def steps_made(folder: Path) -> int | None:
    """Steps behind the finished model in a folder; None where there is no whole one."""
    if not (folder / CONFIG).exists() or not (folder / RECIPE).exists():
        return None
    try:
        manifest = read_manifest(folder)
    except UserError:
        return None
    files, step = manifest.files.items(), manifest.provenance.get("step")
    damaged = any(record.damage(folder / name, verify=False) for name, record in files)
    return step if isinstance(step, int) and not damaged else None


def write_recipe(folder: Path, config: Any) -> None:
    """Write the settings in force."""
    folder.mkdir(parents=True, exist_ok=True)
    values = json.loads(json.dumps(asdict(config)))  # tuples as lists, which YAML can write
    with no_space_as_user_error(folder):
        write_atomic(folder / RECIPE, yaml.safe_dump(values, sort_keys=False).encode())


def provenance(config: Any, **facts: Any) -> dict[str, Any]:
    """Origin of a model: settings, facts of its run, versions."""
    versions = {"didi_instruct": __version__, "torch": torch.__version__}
    return {"recipe": asdict(config), **facts, **versions}


def _check_new(folder: Path) -> list[Change]:
    """Refuse to write over another run, or among other files."""
    if is_begun(folder):
        raise UserError(
            "{} already holds a run: resume it ({}), or choose another {}.",
            folder,
            Argument("resume"),
            Argument("out"),
        )
    own = BEFORE_THE_FIRST_SAVE if (folder / RECIPE).exists() else BEFORE_THE_FIRST_STEP
    if any(path.name not in own for path in folder.iterdir()):
        raise UserError("{} is not empty: choose another {}.", folder, Argument("out"))
    return []


def _check_resumed(folder: Path, config: RunConfig) -> list[Change]:
    """Refuse a run that cannot go on, or not with these settings; return what they change."""
    recipe, made, steps = folder / RECIPE, steps_made(folder) or 0, config.iterations
    if not is_begun(folder) and not recipe.exists():
        raise UserError(
            "{} holds no run to resume: leave out {} to start one.", folder, Argument("resume")
        )
    if made > steps:
        raise _cannot_go_back(folder, made, steps)
    if 0 < made < steps and not any((folder / "checkpoints").glob("step-*")):
        raise UserError(
            "{} has made {} steps, but its checkpoints are gone, so it cannot go on: choose "
            "another {}.",
            folder,
            made,
            Argument("out"),
        )
    if not recipe.exists():
        return []
    before = parse(type(config), read_yaml(recipe), where=str(recipe))
    found = _differences(asdict(before), asdict(config))
    changes = [change for change in found if change.name.split(".")[0] not in config.unread]
    for change in changes:
        if not change.free:
            raise UserError(
                "{} was begun with {} = {}, now it is {}: resume it with its own recipe ({}), or "
                "choose another {}.",
                folder,
                *change[:3],
                recipe,
                Argument("out"),
            )
    return changes


def _differences(
    before: Mapping[str, Any], after: Mapping[str, Any], section: str = ""
) -> Iterator[Change]:
    for name, old in before.items():
        if isinstance(old, dict):
            yield from _differences(old, after[name], f"{section}{name}.")
        elif old != after[name]:
            free = name in FREE_TO_CHANGE.get(section.rstrip("."), set())
            yield Change(f"{section}{name}", old, after[name], free)


def _cannot_go_back(folder: Path, made: int, steps: int) -> UserError:
    return UserError(
        "{} has made {} steps already, and train.steps asks for {}: it cannot go back. Choose "
        "another {} to start over.",
        folder,
        made,
        steps,
        Argument("out"),
    )


@contextmanager
def _held(folder: Path, world: World) -> Iterator[None]:
    """Hold a folder, so that no second command writes into it; all processes call."""
    if folder.exists() and not folder.is_dir():
        raise UserError("{} is a file: give a folder ({}).", folder, Argument("out"))
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    taken, handle, found = False, None, set()
    if world.is_main:
        folder.mkdir(parents=True, exist_ok=True)
        found = {path.name for path in folder.iterdir()}
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT)
        taken = not _lock(handle)
    try:
        if world.any(taken):
            error = UserError(
                "{} is in use by another didi: wait for it, or change {}.", folder, Argument("out")
            )
            raise error if world.is_main else SystemExit(2)  # the main process says what is wrong
        yield
    finally:
        if handle is not None:
            untouched = {path.name for path in folder.iterdir()} == {*found, LOCK}
            if untouched and not taken and LOCK not in found:
                (folder / LOCK).unlink()
                with suppress(OSError):  # another run may have begun beside it
                    for path in made:
                        path.rmdir()
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
