"""The plain iteration of Algorithm 1 has our losses, our gradients and our law of texts."""

import pytest
import torch

from didi_instruct.benchmarking.distillation import NaiveDidiTask, distill_case
from didi_instruct.distillation.didi import DidiTask

from ..distillation.small import ALONE, Stream, make_task, small_network  # noqa: TID252


def both(**changes):
    """The same settings and weights twice."""
    data = Stream()
    kinds = (DidiTask, NaiveDidiTask)
    return [make_task(kind, "didi", changes, references=data.rows) for kind in kinds]


def gradients(task, parts, advantage):
    """What the student's turn logs, and the gradients it takes."""
    found = {}
    update = task.updater.update

    def keep(step):
        for name, p in task.student.network.named_parameters():
            if p.grad is not None:
                found[name] = p.grad.clone()
        return update(step)

    task.updater.update = keep
    return task.teach_student(0, parts, advantage), found


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
    tasks = both(didi=didi)
    parts = [tasks[0].compare(1, 0, indices) for indices in tasks[0].parts()]
    advantage = torch.linspace(-2, 2, 12, dtype=torch.float64)
    (ours, g_ours), (theirs, g_theirs) = (gradients(t, parts, advantage) for t in tasks)
    assert set(ours) == set(theirs)
    for name, value in ours.items():
        torch.testing.assert_close(theirs[name], value, rtol=1e-4, atol=1e-6)
    assert set(g_ours) == set(g_theirs)
    largest = max(float(g.abs().max()) for g in g_ours.values())
    for name, gradient in g_ours.items():
        torch.testing.assert_close(g_theirs[name], gradient, rtol=1e-3, atol=1e-5 * largest)


def test_the_discriminator_learns_the_same():
    ours, theirs = both()
    parts = [ours.compare(1, 0, indices) for indices in ours.parts()]
    numbers = [task.teach_discriminator(1, parts).numbers for task in (ours, theirs)]
    assert numbers[0].keys() == numbers[1].keys()
    for name, value in numbers[0].items():
        torch.testing.assert_close(numbers[1][name], value)


def test_texts_have_our_law():
    """Log-probability, masks at z_τ and first tokens, means over 6,000 texts.

    Within 5 standard errors of the difference: three numbers, false alarm 2e-6.
    """
    found = []
    for task in both(didi={"rollout_steps": 2}, train={"batch_size": 6000, "micro_batch": 6000}):
        texts = task.compare(1, 0, torch.arange(6000)).rollout
        masks = texts.jumps[-1].where.sum(1)
        first = (texts.x[:, 0] == 0).double()
        found.append(torch.stack([texts.log_prob, masks.double(), first]))
    gap = (found[0].mean(1) - found[1].mean(1)).abs()
    error = (found[0].var(1) + found[1].var(1)).div(6000).sqrt()
    assert bool((gap < 5 * error).all()), gap / error
    assert float(error.max() / found[0].std(1).max()) < 0.05


def test_an_iteration_teaches_both_networks():
    """Whatever the discriminator thinks: a network that waits would be timed as a fast one."""
    for kind in (DidiTask, NaiveDidiTask):
        case = distill_case("x", kind, small_network(), 4, 8, ALONE, bf16=False, compile="off")
        for _ in range(2):
            numbers = case.run(0)
            assert float(numbers["student_waits"]) == float(numbers["disc_waits"]) == 0
