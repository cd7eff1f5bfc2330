"""Students that are bidirectional causal LMs (LLaDA, Dream): every method teaches them."""

import copy

import pytest
from tests.models.causal_folders import BIDIRECTIONAL
from tests.random_models import randomise

from didi_instruct.distillation.methods import METHODS
from didi_instruct.models.masked_lm import load_masked_lm

from .small import make_task, moved, networks_of, run, weights

CHANGES = {"discriminator": {"trainable_blocks": None}, "mixture": {"codes": 2}}


@pytest.mark.parametrize("family", BIDIRECTIONAL)
@pytest.mark.parametrize("method", [method for method in METHODS if method != "duo"])
def test_every_method_moves_the_student_and_not_the_teacher(method, family, tmp_path):
    """The teacher is bit by bit as it was; the gradient reaches every weight of the student."""
    BIDIRECTIONAL[family](tmp_path)
    teacher = load_masked_lm(tmp_path).model
    student = randomise(copy.deepcopy(teacher), 3)
    task = make_task(method, CHANGES, teacher=teacher, student=student)
    kept, before = weights(teacher), weights(networks_of(task)["student"])
    run(task, 2)
    assert not moved(kept, teacher)
    assert moved(before, networks_of(task)["student"]) == before.keys()
