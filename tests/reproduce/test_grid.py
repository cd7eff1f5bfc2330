"""The grid: each job once, in order; a failure stops nothing else; what was stopped goes on."""

import json
import sys
import types
from dataclasses import replace

import pytest

from didi_instruct.models.checkpoint import read_manifest
from didi_instruct.reproduce.grid import Grid
from didi_instruct.reproduce.jobs import Job
from didi_instruct.reproduce.running import DONE, RUN, finished, folder_of, run_job

TINY = (
    "model.hidden=16", "model.heads=2", "model.layers=1", "train.batch_size=4", "train.steps=9",
    "train.save_every=3", "train.log_every=3", "train.eval_sequences=4", "optim.warmup=2",
)  # fmt: skip
TEACHER = Job(name="teacher", does="pretrain", recipe="oracle-teacher", overrides=TINY)


@pytest.fixture
def calls(monkeypatch):
    """A module of functions that jobs may call; it notes each call."""
    module = types.ModuleType("grid_calls")
    module.log = []

    def number(context, *, value):
        module.log.append(value)
        return value

    def total(context):
        module.log.append("total")
        return sum(context.results.values())

    def fail(context):
        module.log.append("fail")
        raise ValueError("no\nluck")

    module.number, module.total, module.fail = number, total, fail
    monkeypatch.setitem(sys.modules, "grid_calls", module)
    return module


def number(value, **inputs):
    name = f"number{value}"
    return Job(name=name, does="grid_calls:number", options={"value": value}, inputs=inputs)


def total(**inputs):
    return Job(name="total", does="grid_calls:total", inputs=inputs)


def states(grid):
    return {s.job.name: s.state for s in grid.standings}


def test_results_alone_are_enough_elsewhere(calls, tmp_path):
    """What a done job was made of is not made again; what another one still needs is."""
    one, two = number(1), number(2)
    first = total(a=one, b=two)
    Grid([first], tmp_path / "here").run()
    done = folder_of(first, tmp_path / "here")
    moved = tmp_path / "there" / "jobs" / done.name
    moved.mkdir(parents=True)
    (moved / DONE).write_bytes((done / DONE).read_bytes())
    calls.log.clear()
    grid = Grid([first], tmp_path / "there")
    grid.run()
    assert calls.log == []
    assert states(grid) == {"total": "kept"}
    assert list(grid.results.values()) == [3]
    other = Job(name="other", does="grid_calls:total", inputs={"a": two})
    grid = Grid([first, other], tmp_path / "there")
    grid.run()
    assert calls.log == [2, "total"]
    assert states(grid) == {"total": "kept", "number2": "done", "other": "done"}


def test_a_job_runs_after_its_needs_and_sees_what_they_returned(calls, tmp_path):
    grid = Grid([total(a=number(1), b=number(2))], tmp_path)
    grid.run()
    assert calls.log == [1, 2, "total"]
    assert grid.results[grid.jobs[0].key] == 3


def test_what_is_done_is_not_done_again_under_any_name(calls, tmp_path):
    Grid([number(1)], tmp_path).run()
    again = Job(name="renamed", does="grid_calls:number", options={"value": 1})
    grid = Grid([again, number(2)], tmp_path)
    grid.run()
    assert calls.log == [1, 2]
    assert states(grid) == {"renamed": "kept", "number2": "done"}
    assert grid.results[again.key] == 1


def test_another_option_is_another_job(calls, tmp_path):
    Grid([number(1)], tmp_path).run()
    Grid([number(2)], tmp_path).run()
    assert calls.log == [1, 2]


def test_a_failure_blocks_what_needs_it_and_nothing_else(calls, tmp_path):
    lost = Job(name="lost", does="grid_calls:fail")
    grid = Grid([total(a=lost, b=number(1)), number(2)], tmp_path)
    grid.run()
    assert states(grid) == {
        "lost": "failed", "number1": "done", "total": "blocked", "number2": "done"
    }  # fmt: skip
    notes = {s.job.name: s.note for s in grid.failures}
    assert notes == {"lost": "ValueError: no luck", "total": "needs lost"}
    assert set(grid.results) == {number(1).key, number(2).key}


def test_a_job_goes_on_without_who_was_to_save_it_time(calls, tmp_path):
    helper = Job(name="helper", does="grid_calls:fail")
    grid = Grid([replace(number(3), before=(helper, number(1)))], tmp_path)
    grid.run()
    assert states(grid) == {"helper": "failed", "number1": "done", "number3": "done"}
    assert grid.failures == [], "nothing is lost"


def test_nobody_saves_time_for_what_is_done(calls, tmp_path):
    Grid([number(3)], tmp_path).run()
    grid = Grid([replace(number(3), before=(number(1),))], tmp_path)
    grid.run()
    assert states(grid) == {"number3": "kept"}
    assert calls.log == [3]


def test_a_failed_job_is_tried_again(calls, tmp_path):
    lost = Job(name="lost", does="grid_calls:fail")
    Grid([lost], tmp_path).run()
    calls.fail = lambda context: "luck"
    grid = Grid([lost], tmp_path)
    grid.run()
    assert states(grid) == {"lost": "done"}


@pytest.mark.parametrize("damage", ["", "{", '{"key": "other", "seconds": 1, "result": 1}'])
def test_a_mark_that_is_damaged_or_of_another_job_counts_for_nothing(calls, tmp_path, damage):
    run_job(number(1), tmp_path)
    (folder_of(number(1), tmp_path) / DONE).write_text(damage)
    assert finished(number(1), tmp_path) is None
    assert run_job(number(1), tmp_path).result == 1
    assert calls.log == [1, 1]


def test_a_result_that_json_cannot_hold_is_a_failure(calls, tmp_path):
    grid = Grid([number(float("nan"))], tmp_path)
    grid.run()
    assert states(grid) == {"numbernan": "failed"}


def test_an_interrupted_grid_keeps_what_was_done(calls, tmp_path):
    def stop(context):
        raise KeyboardInterrupt

    calls.total = stop
    jobs = [total(a=number(1)), number(2)]
    with pytest.raises(KeyboardInterrupt):
        Grid(jobs, tmp_path).run()
    calls.total = lambda context: "went on"
    grid = Grid(jobs, tmp_path)
    grid.run()
    assert calls.log == [1, 2]
    assert states(grid) == {"number1": "kept", "total": "done", "number2": "done"}


class CrashError(Exception):
    """What kills a run in its middle."""


def test_a_run_killed_in_its_middle_goes_on_to_the_same_weights(tmp_path):
    """A crash at step 5 loses what follows the checkpoint of step 3, and changes no weight."""
    whole = run_job(TEACHER, tmp_path / "whole")
    steps: list[int] = []

    def tell(words, crash=None):
        if words.startswith("step") and "evaluating" not in words:
            steps.append(int(words.split()[1]))
            if steps[-1] == crash:
                raise CrashError

    out = tmp_path / "killed"
    with pytest.raises(CrashError):
        run_job(TEACHER, out, tell=lambda words: tell(words, crash=5))
    assert finished(TEACHER, out) is None
    steps.clear()
    resumed = run_job(TEACHER, out, tell=tell)
    assert steps[0] == 4
    weights = [
        read_manifest(done.folder / RUN).files["model.safetensors"] for done in (whole, resumed)
    ]
    assert weights[0].sha256 == weights[1].sha256
    spent = json.loads((resumed.folder / DONE).read_text())["seconds"]
    assert spent == resumed.seconds > 0


def test_a_model_that_is_gone_is_trained_again(tmp_path):
    done = run_job(TEACHER, tmp_path)
    assert finished(TEACHER, tmp_path) is not None
    (done.folder / RUN / "model.safetensors").unlink()
    assert finished(TEACHER, tmp_path) is None


def test_two_students_share_a_bank(tmp_path):
    changes = (
        "train.batch_size=8", "train.steps=4", "discriminator.warmup=1", "reference.rows=16",
        "reference.steps=2", "watch.budgets=[]", "train.eval_every=0", "train.eval_sequences=4",
        "didi.group_size=2",
    )  # fmt: skip
    students = [
        Job(
            name=f"student{seed}",
            does="distill",
            recipe="oracle-didi",
            overrides=(*changes, f"train.seed={seed}"),
            inputs={"teacher": TEACHER},
        )
        for seed in (0, 1)
    ]
    grid = Grid(students, tmp_path)
    grid.run()
    assert not grid.failures
    assert len(list((tmp_path / "banks").iterdir())) == 1
    assert not list((tmp_path / "jobs").glob("*/run/bank"))
