"""What a collapse is told from."""

import pytest
import torch

from didi_instruct.distillation.didi import DidiTask
from didi_instruct.distillation.dimo import DiMOTask
from didi_instruct.distillation.task import ENOUGH_TEXTS
from didi_instruct.distillation.token_matching import TokenMatchingTask
from didi_instruct.distillation.watch import COLLAPSES, Watcher

from .small import make_task

TASKS = {"didi": DidiTask, "token-matching": TokenMatchingTask, "dimo": DiMOTask}


def watched(method, start):
    changes = {"watch": {"min_entropy": 0.5}, "train": {"batch_size": ENOUGH_TEXTS}}
    task = make_task(TASKS[method], method, changes)
    task.variety_at_start.fill_(start)
    return Watcher(task, lambda text: pytest.fail(text)), task.config.warmup + 1


@pytest.mark.parametrize("method", TASKS)
def test_only_what_shows_variety_counts(method):
    """Half of the start is enough, a little less is a collapse; the other number says nothing."""
    watcher, step = watched(method, 2.0)
    own = TASKS[method].shows_variety
    (other,) = set(COLLAPSES) - {own}
    assert watcher(step, {own: 1.0, other: 0.0}) is None
    watcher, _ = watched(method, 2.0)
    reason = watcher(step, {own: 0.99, other: 9.0})
    what, unit = COLLAPSES[own]
    assert reason.startswith(f"{what} collapse, 0.99 {unit} where it began with 2. ")
    assert "watch.min_entropy=0" in reason


def test_chance_in_the_start_leaves_nothing_to_the_entropy():
    """So a student of DiMO is watched by the texts themselves."""
    assert DiMOTask.shows_variety == "unique_4gram"
    assert {DidiTask.shows_variety, TokenMatchingTask.shows_variety} == {"path_entropy"}


def test_what_a_student_of_dimo_begins_with_is_what_its_log_says_of_like_texts():
    task = make_task(DiMOTask, "dimo", {"dimo": {"warmup": 1}})
    task.remember_variety(0)
    start = float(task.variety_at_start)
    logged = float(torch.as_tensor(task.step(0)["unique_4gram"]))
    assert 0 < start <= 1
    assert start == pytest.approx(logged, abs=0.2)
