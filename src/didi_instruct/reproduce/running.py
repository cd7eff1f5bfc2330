"""Run one job in its folder, resume it if it was interrupted, and mark it as done.

`done.json` is written last and whole, so a folder with it holds a result and one without does not.
"""

import importlib
import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from didi_instruct.data.files import no_space_as_user_error, write_atomic
from didi_instruct.evaluation.provenance import provenance
from didi_instruct.reproduce.jobs import DATA, Context, Job, content, digest, find_task
from didi_instruct.training.distributed import pick_device
from didi_instruct.training.reporting import Reporter
from didi_instruct.training.run_dir import RECIPE, is_begun, steps_made

DONE, SPENT, RUN = "done.json", "spent.json", "run"
Tell = Callable[[str], None]
"""Receives the progress of a job in a few words."""


class StoppedError(Exception):
    """A signal stopped a training run, which has saved its state."""

    def __init__(self, signal: int) -> None:
        super().__init__(f"stopped by signal {signal}")
        self.signal = signal


@dataclass(frozen=True, slots=True)
class Done:
    """A finished job."""

    folder: Path
    seconds: float
    """Of all attempts together."""
    result: Any
    provenance: Mapping[str, str] = field(default_factory=dict)
    """Of the process that finished it, which may be older than the one that reads it."""


def folder_of(job: Job, out: Path) -> Path:
    """Folder of a job; a renamed job keeps its folder."""
    for found in sorted((out / "jobs").glob(f"*-{job.key}")):
        return found
    return out / "jobs" / f"{job.name}-{job.key}"


def finished(job: Job, out: Path) -> Done | None:
    """Stored result of a finished job, else None."""
    folder = folder_of(job, out)
    try:
        told = json.loads((folder / DONE).read_text(encoding="utf-8"))
        made = dict(told.get("provenance") or {})
        done = Done(folder, float(told["seconds"]), told["result"], made)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if told["key"] != job.key or (job.trains and steps_made(folder / RUN) is None):
        return None
    return done


def run_job(job: Job, out: Path, *, device: str | None = None, tell: Tell | None = None) -> Done:
    """Run a job whose needs are finished, or go on with it; read it where it is done."""
    known = finished(job, out)
    if known is not None:
        return known
    folder, tell = folder_of(job, out), tell or (lambda _: None)
    folder.mkdir(parents=True, exist_ok=True)
    before, started = _spent(folder), time.monotonic()
    try:
        if job.trains:
            result: Any = _train(job, folder, out, device, tell)
        else:
            result = _call(job, folder, out, device, tell)
    finally:
        seconds = before + time.monotonic() - started
        _write(folder / SPENT, {"seconds": seconds})
    made = {**provenance(), "device": pick_device(device).type}
    _write(folder / DONE, _told(job, seconds, result, made))
    return Done(folder, seconds, result, made)


def sources(job: Job, out: Path) -> dict[str, str]:
    """Resolve inputs by role: the folder of a trained model, or the SOURCE that was given."""
    return {
        role: str(folder_of(given, out) / RUN) if isinstance(given, Job) else given
        for role, given in job.inputs.items()
    }


def _train(job: Job, folder: Path, out: Path, device: str | None, tell: Tell) -> dict[str, Any]:
    run, config, given = folder / RUN, job.settings(), sources(job, out)
    resume = is_begun(run) or (run / RECIPE).exists()
    common: dict[str, Any] = {
        "out": run,
        "resume": resume,
        "device": device,
        "reporter": _StepReporter(tell),
    }
    overrides = [f"data.source={json.dumps(given[DATA])}"] if DATA in given else []
    if job.does == "pretrain":
        from didi_instruct.pretrain import pretrain

        outcome = pretrain(config, overrides=overrides, **common).outcome
    elif job.does == "finetune":
        from didi_instruct.finetune import finetune

        outcome = finetune(config, model=given["model"], overrides=overrides, **common).outcome
    else:
        from didi_instruct.distill import distill

        overrides += _share_bank(job, config, out)
        outcome = distill(config, teacher=given["teacher"], overrides=overrides, **common).outcome
    if outcome.signal is not None:
        raise StoppedError(outcome.signal)
    return {"steps": outcome.step}


def _share_bank(job: Job, config: Any, out: Path) -> list[str]:
    """Runs that read one bank of a teacher's texts draw it once."""
    name = bank_of(job, config)
    if name is None:
        return []
    (out / "banks").mkdir(exist_ok=True)  # where runs of several processes wait for each other
    return [f"reference.bank={json.dumps(str(out / 'banks' / name))}"]


def bank_of(job: Job, config: Any) -> str | None:
    """Name of the bank that a run shares; None where it reads none, or one that was given."""
    if not config.reads_bank or config.reference.bank is not None:
        return None
    teacher = job.inputs["teacher"]
    of = teacher.key if isinstance(teacher, Job) else content(teacher)
    settings = {"reference": config.reference, "prompt": config.prompt, "data": config.data}
    return digest(of, {k: str(v) for k, v in settings.items()})


def _call(job: Job, folder: Path, out: Path, device: str | None, tell: Tell) -> Any:
    module, _, name = find_task(job.does).function.partition(":")
    results = {
        role: done.result
        for role, need in job.inputs.items()
        if isinstance(need, Job) and (done := finished(need, out)) is not None
    }
    context = Context(
        folder=folder,
        shared=out,
        inputs=sources(job, out),
        results=results,
        device=device,
        tell=tell,
    )
    found = getattr(importlib.import_module(module), name)(context, **job.options)
    return json.loads(json.dumps(found, allow_nan=False))  # as it will be read again


def _told(job: Job, seconds: float, result: Any, made: Mapping[str, str]) -> dict[str, Any]:
    return {
        "name": job.name,
        "key": job.key,
        "does": job.does,
        "recipe": job.recipe,
        "overrides": list(job.overrides),
        "inputs": {r: g.key if isinstance(g, Job) else g for r, g in job.inputs.items()},
        "options": dict(job.options),
        "seconds": seconds,
        "provenance": dict(made),
        "result": result,
    }


def _spent(folder: Path) -> float:
    with suppress(OSError, ValueError, KeyError, TypeError):
        return float(json.loads((folder / SPENT).read_text(encoding="utf-8"))["seconds"])
    return 0.0


def _write(path: Path, value: Any) -> None:
    with no_space_as_user_error(path):
        write_atomic(path, (json.dumps(value, indent=1) + "\n").encode())


class _StepReporter(Reporter):
    """Reports the step of a training."""

    def __init__(self, tell: Tell) -> None:
        self._tell, self._steps = tell, 0

    def start(self, step: int, steps: int) -> None:
        """Remember how many steps there are."""
        self._steps = steps

    def tick(self, step: int) -> None:
        """Tell the step."""
        self._tell(f"step {step} of {self._steps}")

    def measuring(self, step: int) -> None:
        """Tell that it is evaluated."""
        self._tell(f"step {step} of {self._steps}, evaluating")
