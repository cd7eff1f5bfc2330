"""Jobs in processes of their own, one for each GPU."""

import os
from pathlib import Path

from didi_instruct.reproduce import grid as grids
from didi_instruct.reproduce.grid import Grid
from didi_instruct.reproduce.jobs import Job
from didi_instruct.reproduce.minutes import SHARED
from didi_instruct.reproduce.processes import from_plain, to_plain
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


def test_jobs_share_a_gpu_but_not_one_that_is_timed(monkeypatch, tmp_path: Path):
    """On a stage that starts and ends what it is told: three at once, the timed one alone."""
    history: list[tuple[str, ...]] = []

    class Stage:
        def __init__(self, gpus, out):
            self.gpus, self.running = gpus, {}

        free = property(lambda self: len(self.running) < len(self.gpus))
        busy = property(lambda self: bool(self.running))

        def start(self, job):
            self.running[job.key] = job
            history.append(tuple(sorted(j.name for j in self.running.values())))

        def ended(self):
            key = next(iter(self.running))
            del self.running[key]
            yield key, ""

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

    monkeypatch.setattr(grids, "Processes", Stage)
    monkeypatch.setattr(grids, "PAUSE", 0.0)

    def run(gpus):
        history.clear()
        monkeypatch.setattr(grids, "finished", lambda job, out: None)
        grid = Grid(jobs, tmp_path)
        monkeypatch.setattr(grids, "finished", lambda job, out: Done(tmp_path, 1.0, None))
        grid.run(gpus)
        assert [s.state for s in grid.standings] == ["done"] * 5
        return history

    jobs = [Job(name=name, does="m:f", options={"n": name}, timed=name == "c") for name in "abcd"]
    jobs.append(Job(name="e", does="pretrain", recipe="oracle-teacher"))
    assert run(["0"] * 3) == [("a",), ("a", "b"), ("a", "b", "d"), ("b", "d", "e"), ("c",)]
    assert ("a", "b", "c") in run(["0", "1", "2"])
    assert (folder_of(jobs[-1], tmp_path) / SHARED).exists()
    assert not (folder_of(jobs[0], tmp_path) / SHARED).exists()
