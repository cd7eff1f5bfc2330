"""What `didi distill` says of a student whose sampler has no path KL."""

from pathlib import Path

from didi_instruct.cli.train import comparison, evaluation_line
from didi_instruct.config.distill import DistillConfig
from didi_instruct.distill import DistillResult
from didi_instruct.training.loop import Outcome

TEACHER = {"judge_nats_4": 1.5, "judge_nats_4_se": 0.25, "judge_ppl_4": 4.48, "entropy_4": 2.75}
STUDENT = TEACHER | {"judge_nats_4": 1.25}


def result(**changes):
    numbers = {"teacher": TEACHER, "student": STUDENT}
    stands = (Path("run"), DistillConfig(), Outcome(6, None, None), True)
    return DistillResult(*stands, **(numbers | changes))


def test_a_judge_never_stands_without_the_entropy():
    """In the table after a run, and in the line of an evaluation."""
    title, steps, teacher, student = comparison(result())
    assert title == "judge, nats per token (± standard error) / entropy of a sample's tokens"
    assert steps.split() == ["steps", "4"]
    assert teacher.split() == ["teacher", "1.500", "±", "0.250", "/", "2.750"]
    assert student.split() == ["student", "1.250", "±", "0.250", "/", "2.750"]
    assert len({len(line) for line in (steps, teacher, student)}) == 1
    assert evaluation_line(TEACHER) == "at 4 steps: judge 1.500 ± 0.250; entropy 2.750"


def test_a_bound_is_called_one():
    title = next(iter(comparison(result(exact=False))))
    assert title.startswith("judge, by the teacher's own bound, nats per token")
