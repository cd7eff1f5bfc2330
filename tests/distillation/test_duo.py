"""Discrete consistency distillation: the law of its states by enumeration, its loss, its rounds.

All is read from what an iteration asks: the student at (z_t, t), its target at (z_s, s).
"""

from types import SimpleNamespace

import pytest
import torch
from tests.process.reference import marginal
from tests.sampling.enumeration import FALSE_ALARM, p_value
from torch.distributions import Categorical

from didi_instruct.distillation.losses import divergence
from didi_instruct.errors import UserError
from didi_instruct.process.uniform import gaussian_to_discrete

from .small import (
    DUO,
    asked_of,
    check,
    gradient_norm,
    make_task,
    moved,
    small_network,
    twin,
    weights,
)

V = 3


class OneText:
    """The same text in every row."""

    num_tokens, num_sequences, fingerprint, tokenizer = V, None, "text", None
    text, length = torch.tensor([2, 0]), 2

    def rows(self, start, count):
        return self.text.expand(count, -1)

    ordered = rows


def task_of(duo=None, *, train=None, **options):
    changes = {
        "duo": duo or {},
        "optim": {"lr": 1e-2, "schedule": "constant"},
        "train": {"ema": 0.5} | (train or {}),
    }
    return make_task("duo", changes, **options)


def step_of(task, step=0):
    """An iteration: its numbers, what the student was shown and what its target was."""
    student, target = (asked_of(task.parts[name], "log_probs") for name in ("student", "target"))
    numbers = task.step(step)
    ((z_t, t, where),), ((z_s, s, there),) = student, target
    assert bool(where.all() and there.all())
    return SimpleNamespace(numbers=numbers, z_t=z_t, t=t, z_s=z_s, s=s)


def steps_of_one_noise(x, alpha_t, alpha_s):
    """Every (probability, z_t, z_s) of one position at levels (B,), from one noise."""
    clean_t, clean_s = (a + (1 - a) / V for a in (alpha_t, alpha_s))
    yield clean_t, x, x
    for other in (token for token in range(V) if token != x):
        yield (clean_s - clean_t) / (V - 1), other, x
        yield (1 - clean_s) / (V - 1), other, other


@pytest.mark.parametrize("clock", ["schedule", "gaussian"])
def test_states_of_one_noise_follow_their_enumerated_law(clock):
    """Two positions, chi-square of 8,000 texts over all pairs of states, averaged over times.

    gamma = -3 + 5 t is the log of sigma_tilde² / alpha_tilde².
    """
    network = {"kind": "duo", "vocab_size": V, "length": 2, "time_conditioning": True}
    teacher, student = (small_network(seed, **network) for seed in (0, 1))
    options = {"data": OneText(), "teacher": teacher, "student": student}
    task = task_of(
        {"clock": clock, "gamma": [-3.0, 2.0], "steps": 4},
        train={"batch_size": 8000, "steps": 2},
        **options,
    )
    found, schedule = step_of(task), task.distillation.schedule
    times = found.t
    if clock == "gaussian":  # networks are told the time of the schedule that has this level
        grid = torch.linspace(0, 1, 2001, dtype=torch.float64)
        levels = gaussian_to_discrete((1 + (-3 + 5 * grid).exp()) ** -0.5, V)
        places = torch.searchsorted(-levels, -schedule.alpha(found.t))
        times = grid[places.clamp(max=2000)]
    assert (times.min() - 0.25).abs() < 1e-3
    assert (times.max() - 1).abs() < 1e-3
    alpha_t, alpha_s = schedule.alpha(found.t), schedule.alpha(found.s)
    if clock == "schedule":
        torch.testing.assert_close(found.s, found.t - 0.25)
    else:
        tilde = (1 + (-3 + 5 * (times - 0.25)).exp()) ** -0.5
        torch.testing.assert_close(alpha_s, gaussian_to_discrete(tilde, V), rtol=0, atol=1e-3)
    law = torch.zeros(V**4, dtype=torch.float64)
    for p, a, b in steps_of_one_noise(2, alpha_t, alpha_s):
        for q, c, d in steps_of_one_noise(0, alpha_t, alpha_s):
            law[((a * V + b) * V + c) * V + d] += (p * q).mean()
    keys = torch.stack([found.z_t[:, 0], found.z_s[:, 0], found.z_t[:, 1], found.z_s[:, 1]], 1)
    assert p_value(keys @ V ** torch.arange(3, -1, -1), law) > FALSE_ALARM


def test_the_mean_target_is_sharper_than_the_denoiser_it_replaces():
    """Of an exact target: not p(x^1 | z_t^2), the further from it the larger the step, and sharper.

    What `duo.py` says of the method, on a language of two tokens that depend on each other.
    """
    generator = torch.Generator().manual_seed(0)
    joint = (1.5 * torch.randn(V * V, generator=generator, dtype=torch.float64)).softmax(0)
    joint, alpha_t, distances = joint.view(V, V), 0.4, []

    def denoiser(alpha):  # p(x^1 | z^2): (V, V), rows z^2
        kernel = marginal(torch.arange(V)[:, None], torch.tensor([[alpha]]), V)[:, 0]
        noisy = joint @ kernel.double()
        return (noisy / noisy.sum(0)).T

    right = denoiser(alpha_t).expand(V, V, V)
    for alpha_s in (0.4 + 1e-9, 0.45, 0.6, 0.9, 1.0):
        path = torch.zeros(V, V, V, dtype=torch.float64)
        for x in range(V):
            for p, z_t, z_s in steps_of_one_noise(x, alpha_t, alpha_s):
                path[x, z_t, z_s] += p
        law = torch.einsum("ab,azs,bwr->zwr", joint, path, path)
        chance = law.sum(-1)
        mean = torch.einsum("zwr,rv->zwv", law, denoiser(alpha_s)) / chance[..., None]
        distances.append((chance * (mean * (mean / right).log()).sum(-1)).sum().item())
        sharper = torch.special.entr(right).sum(-1) - torch.special.entr(mean).sum(-1)
        assert (chance * sharper).sum() > -1e-8
    assert distances == sorted(distances)
    assert distances[0] == pytest.approx(0, abs=1e-9)
    assert distances[-1] > 0.01


@pytest.mark.parametrize("kind", ["forward", "backward", "jeffreys"])
def test_the_loss_is_the_mean_divergence_from_the_target(kind):
    """In every round, of whole passes of student and target; gradients to the student alone."""
    task = task_of({"kl": kind})
    student, target = (task.parts[name].network for name in ("student", "target"))
    for step in range(6):
        before = twin(student)
        found = step_of(task, step)  # a round changes the target before it is asked
        sigma = task.distillation.schedule.sigma
        log_p = before(found.z_t, sigma(found.t)).log_softmax(-1)
        log_q = target(found.z_s, sigma(found.s)).log_softmax(-1).detach()
        loss = divergence(kind, log_q, log_p).mean()
        own, of_target = (Categorical(logits=each).entropy().mean() for each in (log_p, log_q))
        check(found.numbers, entropy=own, target_entropy=of_target)
        check(found.numbers, loss=loss, grad_norm=gradient_norm(loss, before))


def test_times_leave_room_for_the_step():
    """From Δ to 1, stratified; a share Δ stands at 1, where samplers begin. Others every time."""
    task = task_of({"steps": 4, "iterations": 3}, train={"batch_size": 400})
    t, other = (step_of(task, step).t for step in (0, 1))
    assert float(t.min()) >= 0.25
    assert int((t == 1).sum()) == pytest.approx(100, abs=1)
    inside = t[t < 1].sort().values
    expected = 0.25 + (torch.arange(len(inside)) + 0.5) / 400
    assert (inside - expected).abs().max() <= 1 / 400
    assert not torch.equal(other, t)


@pytest.mark.parametrize("target", ["average", "student"])
def test_a_round_ends_with_the_student_as_target_and_twice_the_step(target):
    task = task_of({"target": target})
    d, held_by = task.distillation, task.parts["target"].network
    teacher, deltas = weights(d.teacher.network), []
    for step in range(6):
        before, held = weights(d.student.network), weights(held_by)
        average = {name: t.clone() for name, t in d.student.ema.shadow.items()}
        found = step_of(task, step)
        deltas.append(found.numbers["delta"].item())
        assert torch.allclose(found.s, found.t - deltas[-1])
        later = {"average": average, "student": before}[target]
        expected, now = held if step % 2 or step == 0 else later, weights(held_by)
        assert all(torch.equal(now[name], expected[name]) for name in now), step
        assert moved(before, d.student.network) == set(before)
    assert deltas == [1 / 8, 1 / 8, 1 / 4, 1 / 4, 1 / 2, 1 / 2]
    assert not moved(teacher, d.teacher.network)


def test_a_student_of_another_shape_is_refused():
    with pytest.raises(UserError, match="another shape than the teacher"):
        task_of(student=small_network(1, **DUO, layers=1))
