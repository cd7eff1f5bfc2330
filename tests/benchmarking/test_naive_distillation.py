"""The naive iteration of Algorithm 1 has our losses, our gradients and our law of texts."""

import pytest
import torch

from didi_instruct.benchmarking.naive_distillation import (
    NAIVE,
    dense_path_score,
    dense_rollout,
    distill_case,
)
from didi_instruct.distillation.didi import make_pair, score_texts, update_student, write_texts

from ..distillation.small import (  # noqa: TID252
    ALONE,
    Stream,
    batch_of,
    make_task,
    small_network,
)


def gradients(d, pairs, advantage, path_score):
    """What the student's turn logs, and the gradients it takes."""
    found = {}
    update = d.student.update

    def keep(step):
        for name, p in d.student.network.named_parameters():
            if p.grad is not None:
                found[name] = p.grad.clone()
        return update(step)

    d.student.update = keep
    return update_student(d, 0, pairs, advantage, path_score), found


@pytest.mark.parametrize(
    "didi",
    [
        {},
        {"rollout_steps": 3, "kl": "jeffreys", "log_prob": "sum"},
        {"score_steps": "last", "omega": "schedule"},
        {"regularisation": False},
    ],
)
def test_losses_and_gradients_are_ours(didi):
    """On texts of our rollouts, all of which start from one state."""
    data = Stream()
    ours, theirs = (make_task("didi", {"didi": didi}, references=data.rows) for _ in range(2))
    pairs = [make_pair(ours.distillation, batch_of(ours, 1), write_texts)]
    advantage = torch.linspace(-2, 2, 12, dtype=torch.float64)
    numbers, own = gradients(ours.distillation, pairs, advantage, score_texts)
    dense, others = gradients(theirs.distillation, pairs, advantage, dense_path_score)
    assert set(numbers) == set(dense)
    for name, value in numbers.items():
        torch.testing.assert_close(dense[name], value, rtol=1e-4, atol=1e-6)
    assert set(own) == set(others)
    largest = max(float(g.abs().max()) for g in own.values())
    for name, gradient in own.items():
        torch.testing.assert_close(others[name], gradient, rtol=1e-3, atol=1e-5 * largest)


def test_the_discriminator_learns_the_same():
    data = Stream()
    tasks = [make_task("didi", references=data.rows, **how) for how in ({}, NAIVE)]
    pairs = [make_pair(tasks[0].distillation, batch_of(tasks[0], 1), write_texts)]
    ours, theirs = (task.method.critic.update(1, pairs).metrics for task in tasks)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(theirs[name], value)


def test_texts_have_our_law():
    """Log-probability, masks at z_τ and first tokens, means over 6,000 texts.

    Within 5 standard errors of the difference: three numbers, false alarm 2e-6.
    """
    changes = {"didi": {"rollout_steps": 2}, "train": {"batch_size": 6000, "micro_batch": 6000}}
    task, found = make_task("didi", changes, references=Stream().rows), []
    for student_texts in (write_texts, dense_rollout):
        texts = make_pair(task.distillation, batch_of(task, 1), student_texts).rollout
        masks = texts.jumps[-1].writes.sum(1)
        first = (texts.x[:, 0] == 0).double()
        found.append(torch.stack([texts.log_prob, masks.double(), first]))
    gap = (found[0].mean(1) - found[1].mean(1)).abs()
    error = (found[0].var(1) + found[1].var(1)).div(6000).sqrt()
    assert bool((gap < 5 * error).all()), gap / error
    assert float(error.max() / found[0].std(1).max()) < 0.05


@pytest.mark.parametrize("naive", [False, True])
def test_an_iteration_teaches_both_networks(naive):
    """Whatever the discriminator thinks: a network that waits would be timed as a fast one."""
    how = {"bf16": False, "compile": "off", "naive": naive}
    case = distill_case("x", small_network(), 4, 8, ALONE, **how)
    for _ in range(2):
        numbers = case.run(0)
        assert float(numbers["student_waits"]) == float(numbers["disc_waits"]) == 0
