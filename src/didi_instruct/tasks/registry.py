"""Downstream tasks by name. A new one is a file with a `Task`, and an entry in `TASKS`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from didi_instruct.config.schema import nearest, parse
from didi_instruct.errors import UserError
from didi_instruct.model import load
from didi_instruct.tasks import mmlu, mrpc, qa
from didi_instruct.tasks.task import NamedModel, Progress, Task, TaskReport

TASKS: dict[str, Task] = {task.name: task for task in (mmlu.TASK, mrpc.TASK, qa.TASK)}


def find_task(name: str) -> Task:
    """Return the task of that name."""
    if name not in TASKS:
        raise UserError(f"`{name}` is not a task.{nearest(name, list(TASKS))}")
    return TASKS[name]


def evaluate_task(
    name: str,
    sources: Sequence[str],
    data: str | Path,
    settings: Mapping[str, Any],
    *,
    tokenizer: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    progress: Progress = lambda stage, done, total: None,
) -> TaskReport:
    """Measure the models `sources` on a task; `settings` are fields of the task's options.

    `tokenizer` is for models that bring none; `dtype` as in `load`.
    """
    task = find_task(name)
    options: Any = parse(task.options, settings, where=f"--task {name}")
    if not sources:
        raise UserError("--task measures models: name one or more.")
    if not Path(data).exists():
        raise UserError(f"{data}: no such file or folder; give the task's data with --data.")
    models = [
        NamedModel(source, load(source, device=device, dtype=dtype, tokenizer=tokenizer))
        for source in dict.fromkeys(sources)
    ]
    for entry in models:
        if entry.model.tokenizer is None:
            raise UserError(f"{entry.name}: brings no tokenizer; name it with --tokenizer.")
    return task.evaluate(models, Path(data), options, progress)
