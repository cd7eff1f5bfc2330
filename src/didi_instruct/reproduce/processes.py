"""A process for each GPU, one job at a time: what it needs is written into the job's folder."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from didi_instruct.data.files import write_atomic
from didi_instruct.reproduce.jobs import Job
from didi_instruct.reproduce.running import folder_of

JOB, ERROR, LOG = "job.json", "error.txt", "log.txt"


class Processes:
    """Jobs in processes of their own, each of which sees one GPU; left, all have ended."""

    def __init__(self, gpus: Sequence[str], out: Path) -> None:
        self._free, self._out = list(gpus), out
        self._running: dict[str, tuple[subprocess.Popen[bytes], str, Path]] = {}

    @property
    def free(self) -> bool:
        """Whether a GPU is idle."""
        return bool(self._free)

    @property
    def busy(self) -> bool:
        """Whether a job runs."""
        return bool(self._running)

    def start(self, job: Job) -> None:
        """Run a job on an idle GPU."""
        gpu, folder = self._free.pop(0), folder_of(job, self._out)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ERROR).unlink(missing_ok=True)
        write_atomic(folder / JOB, json.dumps(to_plain(job)).encode())
        with (folder / LOG).open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "didi_instruct.reproduce.worker", folder, self._out],
                stdout=log,
                stderr=log,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": gpu},
            )
        self._running[job.key] = (process, gpu, folder)

    def ended(self) -> Iterator[tuple[str, str]]:
        """Keys of jobs that have ended, and what went wrong, if anything did."""
        for key, (process, gpu, folder) in list(self._running.items()):
            if process.poll() is None:
                continue
            del self._running[key]
            self._free.append(gpu)
            error = folder / ERROR
            yield key, error.read_text(encoding="utf-8") if error.exists() else ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        """Ask what still runs to save and stop, and wait for it."""
        for process, _, _ in self._running.values():
            process.send_signal(signal.SIGTERM)
        for process, _, _ in self._running.values():
            process.wait()


def to_plain(job: Job) -> dict[str, Any]:
    """A job and all that it needs, as JSON."""
    return {
        "name": job.name,
        "does": job.does,
        "recipe": job.recipe,
        "overrides": list(job.overrides),
        "options": dict(job.options),
        "inputs": {
            role: to_plain(given) if isinstance(given, Job) else given
            for role, given in job.inputs.items()
        },
    }


def from_plain(value: Mapping[str, Any]) -> Job:
    """The job that `to_plain` wrote."""
    inputs = {
        role: given if isinstance(given, str) else from_plain(given)
        for role, given in value["inputs"].items()
    }
    return Job(
        name=value["name"],
        does=value["does"],
        recipe=value["recipe"],
        overrides=tuple(value["overrides"]),
        options=value["options"],
        inputs=inputs,
    )
