"""Jobs in processes of their own, one for each GPU."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from didi_instruct.reproduce import grid as grids
from didi_instruct.reproduce.grid import Grid, from_plain, to_plain
from didi_instruct.reproduce.jobs import Job
from didi_instruct.reproduce.minutes import SHARED
from didi_instruct.reproduce.running import Done, folder_of

CALLS = """
import os

def which(context, *, value):
    return [value, os.environ["CUDA_VISIBLE_DEVICES"]]

def fail(context):
    raise ValueError("no luck")
"""


def test_a_job_read_again_is_the_same_job():
    teacher = Job(name="t", does="pretrain", recipe="oracle-teacher", overrides=("train.steps=7",))
    job = Job(name="m", does="m:f", inputs={"model": teacher, "judge": "oracle"}, options={"a": 1})
    again = from_plain(to_plain(job))
    assert again.key == job.key
    assert to_plain(again) == to_plain(job)


def test_each_process_sees_one_gpu_and_a_failure_is_told(tmp_path: Path, monkeypatch):
    (tmp_path / "process_calls.py").write_text(CALLS)
    paths = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    jobs = [
        Job(name="good", does="process_calls:which", options={"value": 3}),
        Job(name="bad", does="process_calls:fail"),
    ]
    grid = Grid(jobs, tmp_path / "out")
    grid.run(["5", "7"])
    assert grid.results[jobs[0].key] == [3, "5"]
    assert [(s.job.name, s.note) for s in grid.failures] == [("bad", "ValueError: no luck")]


@pytest.fixture
def stage(monkeypatch):
    """Processes that start and end what they are told, the first first.

    `history` has who ran at once, `errors` how jobs by their names end, one error after the other.
    """
    history: list[tuple[str, ...]] = []
    errors: dict[str, list[str]] = {}
    lost: set[str] = set()

    class Stage:
        def __init__(self, gpus, out):
            self.gpus, self.running = gpus, {}

        free = property(lambda self: len(self.running) < len(self.gpus))
        busy = property(lambda self: bool(self.running))

        def start(self, job):
            self.running[job.key] = job
            history.append(tuple(sorted(j.name for j in self.running.values())))

        def ended(self):
            job = self.running.pop(next(iter(self.running)))
            error = errors[job.name].pop(0) if errors.get(job.name) else ""
            (lost.add if error else lost.discard)(job.key)
            yield job.key, error

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

    def run(jobs, gpus, out):
        history.clear()
        monkeypatch.setattr(grids, "finished", lambda job, out: None)
        grid = Grid(jobs, out)
        done = Done(out, 1.0, None)
        monkeypatch.setattr(grids, "finished", lambda job, out: None if job.key in lost else done)
        grid.run(gpus)
        return grid

    monkeypatch.setattr(grids, "Processes", Stage)
    monkeypatch.setattr(grids, "PAUSE", 0.0)
    return SimpleNamespace(history=history, errors=errors, run=run)


def test_jobs_share_a_gpu_but_not_one_that_is_timed(stage, tmp_path: Path):
    """Three at once, the timed one alone."""
    jobs = [Job(name=name, does="m:f", options={"n": name}, timed=name == "c") for name in "abcd"]
    jobs.append(Job(name="e", does="pretrain", recipe="oracle-teacher"))
    grid = stage.run(jobs, ["0"] * 3, tmp_path)
    assert [s.state for s in grid.standings] == ["done"] * 5
    assert stage.history == [("a",), ("a", "b"), ("a", "b", "d"), ("b", "d", "e"), ("c",)]
    stage.run(jobs, ["0", "1", "2"], tmp_path)
    assert ("a", "b", "c") in stage.history
    assert (folder_of(jobs[-1], tmp_path) / SHARED).exists()
    assert not (folder_of(jobs[0], tmp_path) / SHARED).exists()


def test_a_training_that_is_timed_keeps_its_minutes(stage, tmp_path: Path):
    """It has its GPU to itself, though others share it before and after."""
    alone = Job(name="a", does="pretrain", recipe="oracle-teacher", timed=True)
    jobs = [Job(name="b", does="m:f"), alone, Job(name="c", does="m:g")]
    stage.run(jobs, ["0"] * 3, tmp_path)
    assert ("a",) in stage.history
    assert not (folder_of(alone, tmp_path) / SHARED).exists()


def test_trainings_that_are_timed_do_not_part_what_may_run_together(stage, tmp_path: Path):
    """They come first, one by one; what they were for is then drawn side by side."""
    students = [
        Job(name=name, does="pretrain", recipe="oracle-teacher", overrides=(f"train.seed={n}",),
            timed=True)
        for n, name in enumerate("ab")
    ]  # fmt: skip
    ways = [Job(name=f"of-{s.name}", does="m:f", inputs={"model": s}) for s in students]
    stage.run(ways, ["0"] * 2, tmp_path)
    assert stage.history == [("a",), ("b",), ("of-a",), ("of-a", "of-b")]


FULL = [
    "OutOfMemoryError: CUDA out of memory. Tried to allocate 128.00 MiB.",
    "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
]


@pytest.mark.parametrize("error", FULL)
def test_a_job_without_memory_is_tried_again_alone(stage, error, tmp_path: Path):
    jobs = [Job(name=name, does="m:f", options={"n": name}) for name in "abc"]
    stage.errors["a"] = [error]
    grid = stage.run(jobs, ["0"] * 2, tmp_path)
    assert [s.state for s in grid.standings] == ["done"] * 3
    assert stage.history == [("a",), ("a", "b"), ("b", "c"), ("a",)]


@pytest.mark.parametrize(
    ("gpus", "errors"),
    [(["0", "0"], FULL), (["0", "1"], FULL[:1]), (["0", "0"], ["ValueError: no luck"])],
)
def test_a_job_that_has_failed_alone_has_failed(stage, gpus, errors, tmp_path: Path):
    """So has one on a GPU of its own, and one that fails for another reason."""
    jobs = [Job(name=name, does="m:f", options={"n": name}) for name in "ab"]
    stage.errors["a"] = list(errors)
    grid = stage.run(jobs, gpus, tmp_path)
    assert [(s.job.name, s.note) for s in grid.failures] == [("a", errors[-1])]
