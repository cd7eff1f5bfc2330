"""Jobs in processes of their own, one for each GPU."""

import os
from pathlib import Path

from didi_instruct.reproduce.grid import Grid
from didi_instruct.reproduce.jobs import Job
from didi_instruct.reproduce.processes import from_plain, to_plain

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
