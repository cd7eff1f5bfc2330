"""Run jobs in the order of their needs, each once; a failed job blocks only its dependents.

A job whose result is on disk is read. Interrupted training resumes from its checkpoint. With
several GPUs each has a process of its own, which runs one job after another; a GPU that is named
several times has several processes, for jobs that leave it idle most of the time. A job that runs
out of memory beside others is tried again when it has the GPU to itself.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, Self

from didi_instruct.data.files import write_atomic
from didi_instruct.reproduce.jobs import Job, in_order
from didi_instruct.reproduce.minutes import SHARED
from didi_instruct.reproduce.running import Done, StoppedError, finished, folder_of, run_job

State = Literal["waiting", "running", "done", "kept", "failed", "blocked"]
"""`kept`: done before. `blocked`: something it needs has failed."""
FOUND, LOST = ("done", "kept"), ("failed", "blocked")
NO_MEMORY = ("out of memory", "ALLOC_FAILED")
"""Phrases by which CUDA and its libraries report that memory ran out."""
PAUSE = 0.2
"""Seconds between two looks at the processes."""


@dataclass(slots=True)
class Standing:
    """State and result of a job."""

    job: Job
    state: State = "waiting"
    seconds: float = 0.0
    note: str = ""
    """Progress, what it waits for, or the reason of its failure."""
    result: Any = None
    provenance: Mapping[str, str] = field(default_factory=dict)
    """Of the process that made the result."""
    crowded: bool = False
    """It ran out of memory beside other jobs."""

    @property
    def alone(self) -> bool:
        """True if it must have its GPU to itself."""
        return self.job.timed or self.crowded

    def take(self, done: Done) -> None:
        """Take over the result of a finished job."""
        self.seconds, self.result, self.provenance = done.seconds, done.result, done.provenance


class Board(Protocol):
    """Display of the states of all jobs."""

    def show(self, standings: Sequence[Standing], changed: Standing) -> None:
        """Show the states after one has changed."""


class NoBoard:
    """A board without output."""

    def show(self, standings: Sequence[Standing], changed: Standing) -> None:
        """Ignore the change."""


@dataclass(slots=True)
class Grid:
    """Jobs in a folder."""

    jobs: Sequence[Job]
    out: Path
    device: str | None = None
    board: Board = field(default_factory=NoBoard)
    standings: list[Standing] = field(init=False)

    def __post_init__(self) -> None:
        """Put the jobs in order, and see which are done."""
        found: dict[str, Done | None] = {}

        def done_before(job: Job) -> Done | None:
            if job.key not in found:
                found[job.key] = finished(job, self.out)
            return found[job.key]

        jobs = in_order(self.jobs, lambda job: done_before(job) is not None)
        self.standings = [Standing(job) for job in jobs]
        for standing in self.standings:
            done = done_before(standing.job)
            if done is not None:
                standing.state = "kept"
                standing.take(done)

    def run(self, gpus: Sequence[str] = ()) -> None:
        """Run missing jobs, here or in one process for each name in `gpus`."""
        if len(gpus) > 1:
            self._run_in_processes(gpus)
            return
        while (standing := self._next()) is not None:
            self._change(standing, "running")
            started = time.monotonic()
            try:
                tell = self._teller(standing)
                done = run_job(standing.job, self.out, device=self.device, tell=tell)
            except (KeyboardInterrupt, StoppedError):
                self._change(standing, "waiting", "stopped; the same command goes on")
                raise
            except Exception as error:
                standing.seconds = time.monotonic() - started
                self._change(standing, "failed", explain(error))
                continue
            standing.take(done)
            self._change(standing, "done")

    def give_up(self, why: str) -> None:
        """Mark what has not finished as lost."""
        for standing in self.standings:
            if standing.state == "waiting":
                self._change(standing, "failed", why)

    def _run_in_processes(self, gpus: Sequence[str]) -> None:
        shared = len(set(gpus)) < len(gpus)
        with Processes(gpus, self.out) as processes:
            while True:
                while processes.free and (standing := self._next(shared)) is not None:
                    if shared and standing.job.trains and not standing.job.timed:
                        folder = folder_of(standing.job, self.out)
                        folder.mkdir(parents=True, exist_ok=True)
                        (folder / SHARED).touch()
                    processes.start(standing.job)
                    self._change(standing, "running")
                if not processes.busy:
                    return
                for key, error in processes.ended():
                    standing = next(s for s in self.standings if s.job.key == key)
                    done = finished(standing.job, self.out)
                    if done is None:
                        self._failed(standing, error or "its process ended early", shared)
                        continue
                    standing.take(done)
                    self._change(standing, "done")
                time.sleep(PAUSE)

    def _next(self, shared: bool = False) -> Standing | None:
        """Find the first job that can run now, and mark those that never can.

        Where jobs share a GPU, one that has to be alone runs while no other does.
        """
        states = {s.job.key: s for s in self.standings}
        running = [s for s in self.standings if s.state == "running"] if shared else []
        if any(s.alone for s in running):
            return None
        # Trainings that have to be alone come first: the others may then run beside each other.
        for standing in sorted(
            self.standings, key=lambda s: shared and not (s.alone and s.job.trains)
        ):
            if standing.state != "waiting":
                continue
            needs = [states[need.key] for need in standing.job.needs]
            helpers = {job.key for job in standing.job.before}  # without whom it takes longer
            lost = [n.job.name for n in needs if n.state in LOST and n.job.key not in helpers]
            waits = [n.job.name for n in needs if n.state not in (*LOST, *FOUND)]
            if lost:
                self._change(standing, "blocked", f"needs {', '.join(lost)}")
            elif waits:
                standing.note = f"waits for {', '.join(dict.fromkeys(waits))}"
            elif not (running and standing.alone):
                return standing
            else:
                standing.note = "waits for the GPU to be its own"
        return None

    def _failed(self, standing: Standing, error: str, shared: bool) -> None:
        """Record a failure; if other jobs may have taken its memory, queue the job again."""
        if shared and not standing.alone and any(word in error for word in NO_MEMORY):
            standing.crowded = True
            self._change(standing, "waiting", "found no memory beside others")
        else:
            self._change(standing, "failed", error)

    def _change(self, standing: Standing, state: State, note: str = "") -> None:
        standing.state, standing.note = state, note
        self.board.show(self.standings, standing)

    def _teller(self, standing: Standing) -> Callable[[str], None]:
        def tell(words: str) -> None:
            standing.note = words
            self.board.show(self.standings, standing)

        return tell

    @property
    def results(self) -> dict[str, Any]:
        """Results of finished jobs, by key."""
        return {s.job.key: s.result for s in self.standings if s.state in FOUND}

    @property
    def failures(self) -> list[Standing]:
        """Jobs that failed or were blocked, unless their dependents finished without them."""
        managed = {job.key for s in self.standings if s.state in FOUND for job in s.job.before}
        return [s for s in self.standings if s.state in LOST and s.job.key not in managed]


def explain(error: Exception) -> str:
    """Format an error on one line."""
    text = " ".join(str(error).split())
    known = type(error).__name__ in ("UserError", "TrainingError", "MissingExtraError")
    return text if known and text else f"{type(error).__name__}: {text}"


def visible_gpus() -> list[str]:
    """GPUs by the names that CUDA_VISIBLE_DEVICES has for them; torch is asked how many."""
    import torch

    count = torch.cuda.device_count()
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return named if len(named) == count else [str(i) for i in range(count)]


JOB, ERROR, LOG = "job.json", "error.txt", "log.txt"


class Processes:
    """Jobs in processes of their own, each with one GPU; leaving the context ends them all."""

    def __init__(self, gpus: Sequence[str], out: Path) -> None:
        self._free, self._out = list(gpus), out
        self._running: dict[str, tuple[subprocess.Popen[bytes], str, Path]] = {}

    @property
    def free(self) -> bool:
        """True if a GPU is idle."""
        return bool(self._free)

    @property
    def busy(self) -> bool:
        """True if a job is running."""
        return bool(self._running)

    def start(self, job: Job) -> None:
        """Run a job on an idle GPU."""
        gpu, folder = self._free.pop(0), folder_of(job, self._out)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ERROR).unlink(missing_ok=True)
        write_atomic(folder / JOB, json.dumps(to_plain(job)).encode())
        with (folder / LOG).open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "didi_instruct.reproduce.grid", folder, self._out],
                stdout=log,
                stderr=log,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": gpu},
            )
        self._running[job.key] = (process, gpu, folder)

    def ended(self) -> Iterator[tuple[str, str]]:
        """Yield the key of each job that has ended, with its error or an empty string."""
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
        """Ask running jobs to save and stop, and wait for them."""
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


def work(folder: Path, out: Path) -> int:
    """Run the job that a grid wrote into `folder`; an error is written there too."""
    try:
        run_job(from_plain(json.loads((folder / JOB).read_text(encoding="utf-8"))), out)
    except StoppedError as stopped:
        return 128 + stopped.signal
    except Exception as error:
        (folder / ERROR).write_text(explain(error), encoding="utf-8")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(work(Path(sys.argv[1]), Path(sys.argv[2])))
