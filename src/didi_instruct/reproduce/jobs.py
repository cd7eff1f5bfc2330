"""Jobs of a grid: a training or a registered task, with everything its result depends on.

A key is a hash of content: settings in force, data and weights by content, keys of the jobs it
builds on, the version of the package. Names, folders and the order of jobs have no part in it, so
two experiments that need the same training share one.

    students = sweep("oracle-didi", {"optim.lr": [1e-4, 3e-4]}, teacher="runs/teacher")
    Grid(students, Path("out")).run()

`sweep` makes jobs of one recipe in all combinations of some settings (examples/grid.py).
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import product
from pathlib import Path
from typing import Any, Literal

from didi_instruct import __version__
from didi_instruct.config.distill import DistillConfig
from didi_instruct.config.finetune import FinetuneConfig
from didi_instruct.config.methods import PromptsConfig
from didi_instruct.config.recipes import load_recipe
from didi_instruct.config.train import LoraConfig, PretrainConfig
from didi_instruct.data.files import sha256_file
from didi_instruct.data.manifest import Manifest, is_prepared
from didi_instruct.errors import UserError
from didi_instruct.hub.sources import find_shipped, find_source
from didi_instruct.models.checkpoint import is_ours

TRAINED = 4
"""Version of trainings, raised when their numbers change, so that old results are made again."""
Does = Literal["pretrain", "distill", "finetune"] | str
"""Training, a task of `TASKS`, or a function of the user's own (`package.module:function`)."""
SETTINGS = {"pretrain": PretrainConfig, "distill": DistillConfig, "finetune": FinetuneConfig}
DATA = "data"
"""Role of what a training learns from, where it is given as an input."""
TEXTS = ("reference", "corpora", DATA)
"""Roles of texts: a folder `stories` of texts is not the shipped model of that name."""
NO_PART = {"": ("reproduces", "expect", "watch"), "train": ("log_every", "save_every", "keep")}
"""Settings that affect logs and checkpoints, not the trained model; a run that `watch` stops has no
result."""
ADDED = {
    "warmup_on_top": False,
    "bidirectional": False,
    "model.family": "dit",
    "train.ema_warmup": True,
    "lengths": "",
    "train.pass_tokens": None,
    "discriminator.weight_decay": None,
    "discriminator.lr_warmup": 0,
    "discriminator.dropout": 0.0,
    "lora": asdict(LoraConfig()),
    "prompts": asdict(PromptsConfig()),
}
"""Settings that came later, with the values that change nothing: there they have no part in a key,
so that older results stay."""


@dataclass(frozen=True, slots=True)
class Task:
    """A registered function that jobs call as `function(context, **options)`."""

    function: str
    """`package.module:function`, imported when a job runs."""
    identity: str
    """Stands for the task in job keys. It must not change when the function moves."""
    version: int = 4
    """Raised when the function's numbers change, so that old results are made again."""


_HERE = "didi_instruct.reproduce"
TASKS: Mapping[str, Task] = {
    "quality": Task(f"{_HERE}.measure:quality", f"{_HERE}.measuring:quality"),
    "texts": Task(f"{_HERE}.measure:texts", f"{_HERE}.measuring:texts"),
    "landscape": Task(f"{_HERE}.guidance:landscape", f"{_HERE}.calls:landscape"),
    "anova": Task(f"{_HERE}.guidance:anova", f"{_HERE}.calls:anova"),
    "latency": Task(f"{_HERE}.latency:latency", f"{_HERE}.calls:latency"),
    "zero_shot": Task(f"{_HERE}.zero_shot:zero_shot", f"{_HERE}.calls:zero_shot"),
    "toy_zero_shot": Task(f"{_HERE}.zero_shot:toy_zero_shot", f"{_HERE}.calls:toy_zero_shot"),
    "way": Task(f"{_HERE}.baseline_rows:way", f"{_HERE}.calls:way"),
    "speeds": Task(f"{_HERE}.baseline_rows:speeds", f"{_HERE}.calls:speeds"),
    "task": Task(f"{_HERE}.downstream:task", f"{_HERE}.downstream:task"),
    "adaptation": Task(f"{_HERE}.downstream:adaptation", f"{_HERE}.downstream:adaptation"),
    "cells": Task(f"{_HERE}.proteins:cells", f"{_HERE}.proteins:cells"),
    "adopt": Task(f"{_HERE}.add_tokenizer:adopt", f"{_HERE}.adopting:adopt"),
    "write_proteins": Task(f"{_HERE}.protein_scales:write", f"{_HERE}.proteins:write"),
    "write_task_files": Task(f"{_HERE}.task_files:write", f"{_HERE}.task_files:write"),
}


def find_task(does: str) -> Task:
    """The registered task of that name, or a function of the user's own."""
    return TASKS.get(does) or Task(does, does)


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """A training run, or a call of a function, with all that its result depends on."""

    name: str
    """Shown to the user and part of the folder's name: letters, digits, `-`, `.`."""
    does: Does
    recipe: str = ""
    """Of a training run: a shipped name, or a file."""
    overrides: tuple[str, ...] = ()
    """`section.key=value`, on top of the recipe."""
    inputs: Mapping[str, "Job | str"] = field(default_factory=dict)
    """By role (`teacher`, `model`, `judge`, `data`): another job, or a SOURCE."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the function; plain values, as JSON has them."""
    timed: bool = False
    """Its result is a time: nothing else may run on its GPU meanwhile."""
    before: tuple["Job", ...] = ()
    """Jobs that leave in the shared folder what this one looks for there first: they save it time,
    and have no part in its result or key."""

    def __post_init__(self) -> None:
        """Check that the job can be run."""
        assert self.does in SETTINGS or self.does in TASKS or ":" in self.does, self.does
        assert bool(self.recipe) == (self.does in SETTINGS), self.name
        assert self.name.replace("-", "").replace(".", "").isalnum(), self.name

    @property
    def trains(self) -> bool:
        """True if the result is a model."""
        return self.does in SETTINGS

    @property
    def needs(self) -> list["Job"]:
        """Jobs that come before."""
        return [job for job in (*self.inputs.values(), *self.before) if isinstance(job, Job)]

    def settings(self) -> Any:
        """Settings in force of a training run."""
        return _settings(self.does, self.recipe, self.overrides)

    @cached_property
    def key(self) -> str:
        """Short hash of all that decides the result."""
        inputs = {
            role: given.key
            if isinstance(given, Job)
            else (stored if role in TEXTS else content)(given)
            for role, given in self.inputs.items()
        }
        if self.trains:
            version, does, settings = TRAINED, self.does, _deciding(asdict(self.settings()))
        else:
            task = find_task(self.does)
            version, does, settings = task.version, task.identity, {}
        return digest(version, __version__, does, settings, dict(self.options), inputs)


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """Inputs and folders of a task, which is called as `function(context, **options)`."""

    folder: Path
    """Of this job, to write what is its own."""
    shared: Path
    """Of the grid, for what several jobs keep together: samples, banks, what was measured."""
    inputs: Mapping[str, str]
    """By role: the folder of a trained model, or the SOURCE that was given."""
    results: Mapping[str, Any]
    """By role: what the function of that job returned."""
    device: str | None = None
    tell: Callable[[str], None] = lambda _: None
    """Takes a few words on how far it is."""


@lru_cache(maxsize=1024)
def _settings(does: str, recipe: str, overrides: tuple[str, ...]) -> Any:
    return load_recipe(SETTINGS[does], recipe, overrides)


def digest(*parts: Any) -> str:
    """A short name for plain values."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def content(source: str) -> str:
    """Hash of a model's content; a shipped name stands for the model it currently refers to."""
    return stored(str(find_shipped(source) or source))


@lru_cache(maxsize=256)
def stored(source: str) -> str:
    """Hash of a file or folder; a bare name (hub id, `oracle`) stands for itself."""
    path = Path(source)
    if not path.exists():
        return source
    if path.is_dir() and is_prepared(path):
        return Manifest.read(path).fingerprint
    if path.is_dir() and is_ours(path):
        return digest(find_source(path).digests())
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    return digest([(str(p.relative_to(path)), sha256_file(p)) for p in files])


def _deciding(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings that decide what is learnt, with data and models by their content."""
    settings = without_additions(settings)
    kept: dict[str, Any] = {k: v for k, v in settings.items() if k not in NO_PART[""]}
    kept["train"] = {k: v for k, v in kept["train"].items() if k not in NO_PART["train"]}
    if source := kept["data"]["source"]:
        # Prepared data has a tokenizer of its own, whatever the settings name.
        words = None if is_prepared(Path(source)) else kept["data"].get("tokenizer")
        kept["data"] |= {"source": stored(source), "tokenizer": words and stored(words)}
    if kept.get("student"):
        kept["student"] = content(kept["student"])
    if "reference" in kept and kept["reference"]["bank"]:
        kept["reference"] = kept["reference"] | {"bank": stored(kept["reference"]["bank"])}
    return kept


def without_additions(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by section without those of `ADDED` that change nothing."""
    kept = {k: dict(v) if isinstance(v, dict) else v for k, v in settings.items()}
    for name, usual in ADDED.items():
        section, _, key = name.rpartition(".")
        place = kept.get(section, {}) if section else kept
        if key in place and place[key] == usual:
            del place[key]
    return kept


def spread(job: Job, parts: int) -> Job:
    """Put jobs before this one that draw and measure a part of its settings each.

    They may run at the same time. Its function takes `part`, the number of one and how many there
    are.
    """
    if parts < 2:
        return job
    before = tuple(
        replace(
            job,
            name=f"{job.name}-part{number + 1}",
            options={**job.options, "part": [number, parts]},
            timed=False,
        )
        for number in range(parts)
    )
    return replace(job, before=before)


def in_order(jobs: Sequence[Job], done: Callable[[Job], bool] = lambda _: False) -> list[Job]:
    """All jobs and what they need, each after its needs, and no two of one key.

    What one of them has timed is timed for all. What is `done` needs nobody any more: of those
    behind it only such are named as are done too.
    """
    found: dict[str, Job] = {}

    def visit(job: Job) -> None:
        whole = done(job)
        for need in job.needs:
            if not whole or (need not in job.before and done(need)):
                visit(need)
        if job.key not in found or job.timed:
            found[job.key] = job

    for job in jobs:
        visit(job)
    return list(found.values())


WORDS = "tokenizer"
"""Role of the tokenizer among the inputs."""
NO_MODELS = ("judge", "reference", "corpora", "chains", "folding", DATA, WORDS)
"""Inputs that are not sampled."""


def sweep(
    recipe: str,
    choices: Mapping[str, Sequence[Any]],
    *,
    teacher: Job | str | None = None,
    overrides: Sequence[str] = (),
) -> list[Job]:
    """A training for each combination of `choices`, values by setting (`section.key`).

    With a `teacher` they distil it, without they pretrain. `overrides` (`section.key=value`) hold
    for all. The last setting of `choices` changes first; those of a job end its `overrides`.
    """
    for setting, values in choices.items():
        if isinstance(values, str) or not values:
            raise UserError(f"choices of {setting} are {values!r}: give a list of values.")
    jobs = []
    for values in product(*choices.values()):
        chosen = [f"{s}={_written(v)}" for s, v in zip(choices, values, strict=True)]
        job = Job(
            name=_name(recipe, chosen),
            does="pretrain" if teacher is None else "distill",
            recipe=recipe,
            overrides=(*overrides, *chosen),
            inputs={} if teacher is None else {"teacher": teacher},
        )
        job.settings()  # a setting that is none is told now, not when its turn comes
        jobs.append(job)
    return jobs


def _written(value: Any) -> str:
    """Format a value as an override."""
    return value if isinstance(value, str) else json.dumps(value)


def _name(recipe: str, chosen: Sequence[str]) -> str:
    """The recipe, and each setting's own word with its value, as a folder may be called."""
    words = [Path(recipe).stem]
    for setting, _, value in (one.partition("=") for one in chosen):
        words.append(f"{setting.rpartition('.')[2]}-{value}")
    return "-".join(re.sub(r"[^A-Za-z0-9.]+", "-", word).strip("-") for word in words)
