"""Estimates of cost, against what can be counted by hand."""

import pytest

from didi_instruct.config.model import ModelConfig
from didi_instruct.models.dit import count_parameters
from didi_instruct.reproduce.baseline_rows import settings_of
from didi_instruct.reproduce.costs import (
    PEAK,
    SAMPLING_MFU,
    TRAINING_MFU,
    Cost,
    cost_of,
    forward_flops,
)
from didi_instruct.reproduce.costs import model_of as cost_model
from didi_instruct.reproduce.experiments import ITEMS
from didi_instruct.reproduce.jobs import Job, spread
from didi_instruct.reproduce.measure import quality_job
from didi_instruct.reproduce.preflight import plan
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


def test_every_way_of_the_baselines_counts_with_its_own_passes():
    """Those of all settings that are drawn; a step per token is 32.

    Of a guided step, half are a draw, a gradient and a second draw (5), half 4 candidates.
    """
    sweep = {"most_steps": 16, "temperatures": [0.8], "top_ps": [0.9], "few": [2], "costly": [9]}
    drawn = settings_of({"teacher": "t", "didi": "d"}, [4], **sweep)
    once = forward_flops(cost_model(TEACHER))
    inputs = {"teacher": TEACHER, "didi": TEACHER, "judge": "oracle"}
    for method in {setting.method for setting in drawn}:
        options = {"method": method, "steps": [4], "num": 5, **sweep}
        job = Job(name="b", does="way", inputs=inputs, options=options)
        mine = [setting for setting in drawn if setting.method == method]
        each = [(s.steps or 32) * ((5 + 4) / 2 if s.sampler == "rgas" else 1) for s in mine]
        assert cost_of(job).sampling / once / 5 == pytest.approx(sum(each))


def test_what_is_timed_costs_next_to_nothing():
    job = Job(name="s", does="speeds", inputs={"teacher": TEACHER}, options={"methods": ["x"]})
    assert cost_of(job) == Cost()


def test_a_shared_bank_is_counted_once(tmp_path):
    """Two seeds of one recipe differ by the bank, which the first draws."""
    scale = find_scale("toy", Given(seeds=2))
    planned = [p for p in plan([ITEMS["generation"]], scale, tmp_path) if p.job.does == "distill"]
    first, second = planned
    bank = 512 * 32 * forward_flops(cost_model(scale.teacher))
    assert first.gpu_hours - second.gpu_hours == pytest.approx(bank / (PEAK * SAMPLING_MFU) / 3600)


def test_small_scale_is_planned_for_half_an_hour(tmp_path):
    """All items that `all` makes, by the estimate."""
    (tmp_path / "a.jsonl").write_text('{"text": "A story."}')
    scale = find_scale("small", Given(data=str(tmp_path / "a.jsonl")))
    if not isinstance(scale.teacher, str):
        pytest.skip("no teacher is shipped, which `small` is planned with")
    items = [i for i in ITEMS.values() if i.name not in scale.apart]
    assert 60 * sum(p.gpu_hours for p in plan(items, scale, tmp_path / "out")) < 30


def test_a_model_nobody_has_seen_has_no_cost():
    scale = find_scale("toy", Given())
    assert cost_of(quality_job(scale, "m", "owner/name", steps=[4])).gpu_hours is None
    assert Cost().gpu_hours == 0


def test_parts_cost_as_much_as_the_whole():
    job = quality_job(find_scale("toy", Given()), "m", TEACHER, steps=[4, 8], num=5)
    shared = spread(job, 4)
    costs = [cost_of(one).sampling for one in (*shared.before, shared)]
    assert costs[-1] == 0
    assert sum(costs) == pytest.approx(cost_of(job).sampling)
