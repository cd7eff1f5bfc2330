"""Estimates of cost, against what can be counted by hand."""

import pytest

from didi_instruct.config.model import ModelConfig
from didi_instruct.models.build import count_parameters
from didi_instruct.reproduce.costs import PEAK, TRAINING_MFU, Cost, cost_of, forward_flops
from didi_instruct.reproduce.jobs import Job
from didi_instruct.reproduce.measuring import quality_job
from didi_instruct.reproduce.scale import Given
from didi_instruct.reproduce.scales import find_scale

TEACHER = Job(
    name="t", does="pretrain", recipe="oracle-teacher",
    overrides=("train.steps=10", "train.batch_size=4"),
)  # fmt: skip


def test_a_pass_costs_two_flops_a_parameter_and_token_and_attention():
    model = ModelConfig(layers=3, hidden=64, heads=4, length=16, vocab_size=11)
    scores_and_mixing = 2 * (2 * 16 * 16 * 64) * 3
    assert forward_flops(model) == 2 * count_parameters(model) * 16 + scores_and_mixing


def test_training_costs_three_passes_a_text():
    """Ten steps of four texts, a backward counted as two passes."""
    model = TEACHER.settings().model.resolve(60)
    found = cost_of(TEACHER).training
    assert found == pytest.approx(10 * 4 * 3 * forward_flops(model), rel=0.05)  # of the vocabulary


def test_the_papers_teacher_costs_as_much_as_its_parameters_say():
    """6 x 169.6M parameters x 200,000 x 336 x 1,024 tokens, and less than a fifth for attention."""
    scale = find_scale("paper", Given())
    least = 6 * 169_627_218 * 200_000 * 336 * 1024
    found = cost_of(scale.teacher).training
    assert least < found < 1.2 * least
    assert cost_of(scale.teacher).gpu_hours == pytest.approx(found / (PEAK * TRAINING_MFU) / 3600)


def test_samples_cost_a_pass_a_step_and_an_exact_judge_nothing():
    scale = find_scale("toy", Given())
    job = quality_job(scale, "m", TEACHER, steps=[4, 8], num=5)
    one = cost_of(quality_job(scale, "m", TEACHER, steps=[1], num=1)).sampling
    assert cost_of(job).sampling == pytest.approx(5 * 12 * one)


def test_a_model_nobody_has_seen_has_no_cost():
    scale = find_scale("toy", Given())
    assert cost_of(quality_job(scale, "m", "owner/name", steps=[4])).gpu_hours is None
    assert Cost().gpu_hours == 0
