"""Discrete consistency distillation: its law by enumeration, its rounds, its parts."""

import itertools

import pytest
import torch
from tests.process.reference import marginal

from didi_instruct.config.distill import DistillConfig
from didi_instruct.config.parse import parse
from didi_instruct.distillation.duo import draw_times
from didi_instruct.distillation.losses import divergence
from didi_instruct.errors import UserError
from didi_instruct.process.uniform import gaussian_to_discrete

from . import small
from .small import batch_of, moved, small_network, weights

V = 3


def uniform_network(seed, length=2, num_tokens=V):
    """A uniform-state network whose weights all matter."""
    return small_network(
        seed, kind="duo", vocab_size=num_tokens, length=length, time_conditioning=True
    )


class OneText:
    """The same text in every row."""

    num_tokens, num_sequences, fingerprint, tokenizer = V, None, "text", None

    def __init__(self, text):
        self.text, self.length = torch.tensor(text), len(text)

    def rows(self, start, count):
        return self.text.expand(count, -1)

    ordered = rows


def task_of(duo=None, *, data=None, student=None, teacher=None, **train):
    changes = {
        "duo": duo or {},
        "optim": {"lr": 1e-2, "schedule": "constant"},
        "train": {"ema": 0.5} | train,
    }
    options = {} if data is None else {"data": data}
    if data is not None:
        shape = {"length": data.length, "num_tokens": data.num_tokens}
        teacher, student = uniform_network(0, **shape), uniform_network(1, **shape)
    return small.make_task("duo", changes, teacher=teacher, student=student, **options)


def pairs(x, alpha_t, alpha_s):
    """Every (probability, z_t, z_s) of one position, from one noise."""
    clean_t, clean_s = (a + (1 - a) / V for a in (alpha_t, alpha_s))
    yield clean_t, x, x
    for other in (token for token in range(V) if token != x):
        yield (clean_s - clean_t) / (V - 1), other, x
        yield (1 - clean_s) / (V - 1), other, other


def enumerated(task, text, alpha_t, alpha_s, kind):
    """Mean and standard deviation of a text's divergence, over all paths of its positions."""
    mean = square = 0.0
    for path in itertools.product(*(pairs(x, alpha_t, alpha_s) for x in text)):
        chance = 1.0
        for p, _, _ in path:
            chance *= p
        z_t, z_s = (torch.tensor([[step[k] for step in path]]) for k in (1, 2))
        everywhere = torch.ones_like(z_t, dtype=torch.bool)
        t, s = (task.distillation.schedule.time(torch.tensor([a])) for a in (alpha_t, alpha_s))
        log_p = task.distillation.student.replica.log_probs(z_t, t, everywhere)
        target = task.method.target.replica.log_probs(z_s, s, everywhere)
        value = divergence(kind, target, log_p).mean().item()
        mean, square = mean + chance * value, square + chance * value**2
    return mean, (square - mean**2) ** 0.5


@pytest.mark.parametrize("kind", ["forward", "backward"])
@pytest.mark.parametrize("clock", ["schedule", "gaussian"])
def test_the_loss_is_the_enumerated_expectation(kind, clock):
    """Paths of one noise over two positions; 5 errors of 20,000 texts: false alarm 6e-7."""
    text, count, t, delta = (2, 0), 20_000, 0.7, 0.25
    task = task_of(
        {"kl": kind, "clock": clock, "gamma": [-3.0, 2.0]},
        data=OneText(text),
        batch_size=count,
    )
    if clock == "schedule":
        alpha_t, alpha_s = (task.distillation.schedule.alpha(at).item() for at in (t, t - delta))
    else:
        # gamma = -3 + 5 t, the log of sigma_tilde^2 / alpha_tilde^2
        tilde = [(1 + torch.tensor(-3 + 5 * at).double().exp()) ** -0.5 for at in (t, t - delta)]
        alpha_t, alpha_s = (gaussian_to_discrete(a, V).item() for a in tilde)
    mean, deviation = enumerated(task, text, alpha_t, alpha_s, kind)
    with torch.no_grad():
        times = torch.full((count,), t, dtype=torch.float64)
        found, _ = task.method.loss(batch_of(task), times, delta)
    assert abs(found.item() - mean) < 5 * deviation / count**0.5
    assert deviation > 1e-3


def exact_denoiser(joint, alpha):
    """p(x^1 | z^2) of two tokens: (V, V), rows z^2."""
    noisy = joint @ marginal(torch.arange(V)[:, None], torch.tensor([[alpha]]), V)[:, 0].double()
    return (noisy / noisy.sum(0)).T


def mean_target(joint, alpha_t, alpha_s):
    """E[p(x^1 | z_s^2) | z_t] and P(z_t), by enumeration: (V, V, V) and (V, V)."""
    path = torch.zeros(V, V, V, dtype=torch.float64)
    for x in range(V):
        for p, z_t, z_s in pairs(x, alpha_t, alpha_s):
            path[x, z_t, z_s] += p
    law = torch.einsum("ab,azs,bwr->zwr", joint, path, path)
    mean = torch.einsum("zwr,rv->zwv", law, exact_denoiser(joint, alpha_s))
    return mean / law.sum(-1, keepdim=True), law.sum(-1)


def test_the_mean_target_is_sharper_than_the_denoiser_it_replaces():
    """Of an exact target: not p(x^1 | z_t^2), the further from it the larger the step, and sharper.

    What `duo.py` says of the method, on a language of two tokens that depend on each other.
    """
    generator = torch.Generator().manual_seed(0)
    joint = (1.5 * torch.randn(V * V, generator=generator, dtype=torch.float64)).softmax(0)
    joint, alpha_t, distances = joint.view(V, V), 0.4, []
    right = exact_denoiser(joint, alpha_t).expand(V, V, V)
    for alpha_s in (0.4 + 1e-9, 0.45, 0.6, 0.9, 1.0):
        mean, chance = mean_target(joint, alpha_t, alpha_s)
        gap = (mean * (mean / right).log()).sum(-1)
        distances.append((chance * gap).sum().item())
        sharper = torch.special.entr(right).sum(-1) - torch.special.entr(mean).sum(-1)
        assert (chance * sharper).sum() > -1e-8
    assert distances == sorted(distances)
    assert distances[0] == pytest.approx(0, abs=1e-9)
    assert distances[-1] > 0.01


@pytest.mark.parametrize("target", ["average", "student"])
def test_a_round_ends_with_the_student_as_target_and_twice_the_step(target):
    task = task_of({"target": target})
    d, held_by = task.distillation, task.method.target.network
    teacher, deltas = weights(d.teacher.network), []
    for step in range(6):
        before = weights(d.student.network)
        average = {name: t.clone() for name, t in d.student.updater.ema.shadow.items()}
        held = weights(held_by)
        deltas.append(task.step(step)["delta"].item())
        now = weights(held_by)
        later = {"average": average, "student": before}[target]
        expected = held if step % 2 or step == 0 else later
        assert all(torch.equal(now[name], expected[name]) for name in now), step
        assert moved(before, d.student.network) == set(before)
    assert deltas == [1 / 8, 1 / 8, 1 / 4, 1 / 4, 1 / 2, 1 / 2]
    assert not moved(teacher, d.teacher.network)


def test_later_rounds_compare_states_that_are_twice_as_far_apart():
    """The target reads s = t - Δ with the Δ of the round, and the loss is that of this Δ.

    The loss at a given Δ is the enumerated one (above). The first iteration of a round is not
    compared, since the target changes within it.
    """
    task, read = task_of(), []
    replica = task.method.target.replica
    log_probs = replica.log_probs

    def spy(z, s, where):
        read.append(s)
        return log_probs(z, s, where)

    replica.log_probs = spy
    for step in range(6):
        delta = 2 ** (step // 2) / 8
        t = draw_times(task.distillation, step, delta)
        with torch.no_grad():
            right, wrong = (
                task.method.loss(batch_of(task, step), t, each)[0].item()
                for each in (delta, 1 / 8 if step > 1 else 1 / 4)
            )
        read.clear()
        loss = task.step(step)["loss"].item()
        assert torch.allclose(read[0], t - delta), step
        if step % 2:
            assert loss == pytest.approx(right, rel=1e-5), step
            assert loss != pytest.approx(wrong, rel=1e-3), step


def test_times_leave_room_for_the_step():
    """From Δ to 1, stratified; a share Δ stands at 1, where samplers begin."""
    task = task_of(batch_size=400)
    t = draw_times(task.distillation, 0, 0.25)
    assert float(t.min()) >= 0.25
    assert float(t.max()) == 1
    assert int((t == 1).sum()) == pytest.approx(100, abs=1)
    inside = t[t < 1].sort().values
    expected = 0.25 + (torch.arange(len(inside)) + 0.5) / 400
    assert (inside - expected).abs().max() <= 1 / 400
    assert not torch.equal(draw_times(task.distillation, 1, 0.25), t)


def test_a_student_that_agrees_has_nothing_to_learn():
    """Where a network says the same whatever it reads, a copy of it is consistent at any step."""
    constant = uniform_network(0, length=8, num_tokens=5)
    with torch.no_grad():
        constant.output_layer.linear.weight.zero_()
    same = uniform_network(0, length=8, num_tokens=5)
    same.load_state_dict(constant.state_dict())
    task = task_of(teacher=constant, student=same)
    numbers = task.step(0)
    assert numbers["loss"].item() == pytest.approx(0, abs=1e-7)
    assert numbers["grad_norm"].item() == pytest.approx(0, abs=1e-6)
    assert numbers["entropy"].item() == pytest.approx(numbers["target_entropy"].item())


def test_a_student_of_another_shape_is_refused():
    student = small_network(1, kind="duo", vocab_size=5, length=8, time_conditioning=True, layers=1)
    with pytest.raises(UserError, match="another shape than the teacher"):
        task_of(student=student)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": {"steps": 5}}, "train.steps is 5, which is not a whole number of rounds"),
        ({"duo": {"steps": 3, "iterations": 2}}, "use 2 rounds at most"),
        ({"duo": {"steps": 1}}, "duo.steps is 1: use 2 or more"),
        ({"duo": {"iterations": 2, "gamma": [1.0, -1.0]}}, "the smaller first"),
        ({"prompt": 2}, "prompt is 2, but method=duo learns whole texts"),
    ],
)
def test_bad_settings_are_refused(changes, message):
    values = {
        "method": "duo",
        "data": {"source": "oracle"},
        "duo": {"steps": 8, "iterations": 2},
        "train": {"steps": 6},
    }
    with pytest.raises(UserError, match=message):
        parse(DistillConfig, values | changes, where="test")
