"""Any recipe in all combinations of any settings."""

import pytest

from didi_instruct.errors import UserError
from didi_instruct.reproduce.jobs import Job, sweep

TEACHER = Job(name="teacher", does="pretrain", recipe="oracle-teacher")


def test_every_combination_is_a_job_once():
    jobs = sweep(
        "oracle-didi", {"optim.lr": [1e-4, 3e-5], "didi.rollout_steps": [1, 2, 4]},
        teacher=TEACHER, overrides=["train.steps=70"],
    )  # fmt: skip
    found = [job.settings() for job in jobs]
    assert [(c.optim.lr, c.didi.rollout_steps) for c in found] == [
        (1e-4, 1), (1e-4, 2), (1e-4, 4), (3e-5, 1), (3e-5, 2), (3e-5, 4)
    ]  # fmt: skip
    assert {c.train.steps for c in found} == {70}
    assert len({job.key for job in jobs}) == len({job.name for job in jobs}) == 6
    assert all(job.does == "distill" and job.inputs == {"teacher": TEACHER} for job in jobs)
    assert jobs[0].name == "oracle-didi-lr-0.0001-rollout-steps-1"


def test_values_of_any_kind_reach_the_settings():
    choices = {
        "didi.pi": [[5, 2], [1, 1]],
        "discriminator.trainable_blocks": [None],
        "didi.coupled_time": [False],
        "reference.source": ["bank"],
    }
    few, uniform = (job.settings() for job in sweep("oracle-didi", choices, teacher="a/b"))
    assert (few.didi.pi, uniform.didi.pi) == ((5, 2), (1, 1))
    assert few.discriminator.trainable_blocks is None
    assert (few.didi.coupled_time, few.reference.source) == (False, "bank")


def test_what_is_the_same_in_another_grid_is_the_same_job():
    wide = sweep("oracle-didi", {"optim.lr": [1e-4, 3e-4, 1e-3]}, teacher=TEACHER)
    (one,) = sweep("oracle-didi", {"optim.lr": [3e-4]}, teacher=TEACHER)
    assert [job.key == one.key for job in wide] == [False, True, False]


def test_without_a_teacher_models_are_pretrained():
    (job,) = sweep("oracle-teacher", {}, overrides=["train.steps=3"])
    assert (job.does, job.settings().train.steps) == ("pretrain", 3)


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"optim.lrr": [1.0]}, "lr"),
        ({"optim.lr": []}, "give a list"),
        ({"didi.kl": "forward"}, "give a list"),
    ],
)
def test_mistakes_are_told_before_anything_runs(choices, words):
    with pytest.raises(UserError, match=words):
        sweep("oracle-didi", choices, teacher=TEACHER)
