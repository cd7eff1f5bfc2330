"""Iterations of token-level matching: the law of states and contexts, and the loss by hand.

All is read from what an iteration asks: the teacher at the hidden positions of contexts and, for
the anchor, at the revealed positions of states.
"""

from types import SimpleNamespace

import pytest
import torch
from tests.random_models import randomise
from tests.sampling.enumeration import FALSE_ALARM, p_value
from torch.distributions import Categorical, kl_divergence

from didi_instruct.distillation.rollout import path_times
from didi_instruct.distillation.token_matching import matching_loss
from didi_instruct.process.schedule import LogLinear

from .small import (
    PROMPT,
    Stream,
    asked_of,
    check,
    fits_path_law,
    gradient_norm,
    make_task,
    networks_of,
    pair,
    run,
    spy,
    twin,
)
from .tables import (
    HIDDEN,
    LEFT,
    SHOWN,
    STATES,
    VISIBLE,
    Outcomes,
    any_step,
    first_step,
)

L, MASK, BATCH = 8, 5, 12


def task_of(matching=None, changes=None, **options):
    changes = {"token_matching": {"anchor": 0.5} | (matching or {})} | (changes or {})
    return make_task("token-matching", changes, **options)


def step_of(task, step=0):
    """An iteration: contexts with what is hidden of them, states with what is revealed there."""
    asked = asked_of(task.distillation, "teacher_log_probs")
    gathered = spy(task.distillation.world, "gather")
    numbers = task.step(step)
    # A state has all the masks of its contexts.
    (z, t, revealed), (context, t_context, hidden) = sorted(
        asked, key=lambda call: -float((call[0] == task.distillation.mask_id).double().mean())
    )
    state = torch.arange(len(context)) // (len(context) // len(z))
    return SimpleNamespace(
        numbers=numbers, z=z, t=t, revealed=revealed, context=context, t_context=t_context,
        hidden=hidden, state=state, shown=revealed[state] & ~hidden, x=gathered[0][0],
    )  # fmt: skip


# What is learned from


@pytest.mark.parametrize(
    ("budget", "contexts", "completion"), [(1, 1, 0), (2, 1, 0), (3, 1, 0), (1, 2, 1), (2, 2, 1)]
)
def test_states_and_contexts_follow_their_enumerated_law(budget, contexts, completion):
    """Of 3 tokens at 3 positions: a random step of the student's own path, its tokens, a share.

    Chi-square over everything that may happen. Contexts that the completion term compares show the
    same positions.
    """
    states = 12_000
    matching = {"budgets": [budget], "contexts": contexts, "completion": completion}
    shape, train = {"vocab_size": 4, "length": 3, "eps": 0.0}, {"batch_size": contexts * states}
    networks = pair(**shape)
    with torch.no_grad():  # laws that leave something to chance
        networks["student"].output_layer.linear.weight.mul_(0.1)
        log_p = networks["student"](STATES).log_softmax(-1).double()
    found = step_of(task_of(matching, {"train": train}, **networks))
    role = torch.full_like(found.z, VISIBLE).masked_fill(found.z == 3, LEFT)
    hidden, shown = found.hidden[::contexts], found.shown[::contexts]
    role = role.masked_fill(hidden, HIDDEN).masked_fill(shown, SHOWN)
    drawn = Outcomes(role, found.z, found.context.view(states, contexts, 3))
    outcomes = Outcomes.enumerate(contexts)
    law = first_step(1.0) if budget == 1 else any_step(log_p, budget)
    chance = law(outcomes) * outcomes.tokens_chance(log_p)
    keys, order = outcomes.keys().sort()
    place = torch.searchsorted(keys, drawn.keys()).clamp(max=len(keys) - 1)
    assert torch.equal(keys[place], drawn.keys())
    assert p_value(place, chance[order]) > FALSE_ALARM
    # Mean surprise of 12,000 texts or more: 5% are above 5 standard errors, false alarm 6e-7.
    entropy = found.numbers["entropy"].item()
    assert entropy > 0.5
    assert found.numbers["path_entropy"].item() == pytest.approx(entropy, rel=0.05)


@pytest.mark.parametrize("contexts", [1, 3])
@pytest.mark.parametrize("completion", [0.0, 1.0])
@pytest.mark.parametrize("prompt", [False, True])
def test_a_context_shows_a_part_of_what_its_state_reveals(contexts, completion, prompt):
    """And has the time of its share of masks.

    Masked are (1 - α) / (1 - α_1) of it at its own time: 4.5 standard errors, false alarm 7e-6.
    """
    matching = {"contexts": contexts, "completion": completion * (contexts > 1), "budgets": [2, 4]}
    changes = {"train": {"batch_size": 3600}} | (PROMPT if prompt else {})
    data = Stream() if prompt else None
    task = task_of(matching, changes, data=data)
    found = step_of(task)
    where = torch.arange(L) >= 3 * prompt
    masked, revealed = (x[:, where] for x in (found.z == MASK, found.revealed))
    assert fits_path_law(found.t, masked, revealed, (2, 4)) > FALSE_ALARM
    assert not (found.hidden & ~found.revealed[found.state]).any()
    assert torch.equal(found.context.masked_fill(found.shown, MASK), found.z[found.state])
    assert bool((found.context[found.shown] < MASK).all())
    if prompt:
        rows = Stream().rows(0, len(found.z))
        assert torch.equal(found.z[:, :3], rows[:, :3])
        assert data.asked == [range(len(found.z))]
    groups = found.shown.view(-1, contexts, L)
    assert bool((groups == groups[:, :1]).all()) == (contexts == 1 or completion > 0)
    schedule = task.distillation.schedule
    chance = (1 - schedule.alpha(found.t_context)) / (1 - schedule.eps)
    share = (found.context == MASK).sum(1) - chance * where.sum()
    of_state = share.view(-1, contexts).sum(1)  # contexts of one state are not independent
    assert of_state.mean().abs() < 4.5 * of_state.std() / len(of_state) ** 0.5


def test_iterations_and_turns_have_their_own_texts():
    task = task_of({"aux_steps": 2})
    asked = spy(networks_of(task)["auxiliary"], "embed")
    run(task, 2)
    assert len(asked) == 4
    assert len({tuple(tokens.flatten().tolist()) for tokens, *_ in asked}) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_path_times_at_the_ends(dtype):
    """The smallest and the largest number of `dtype` in [0, 1) are a first and a last step."""
    place = torch.tensor([0.0, 1 - torch.finfo(dtype).eps / 2], dtype=dtype)
    times, t, after, budget = path_times((4, 3, 8), place, LogLinear())
    assert times.tolist() == [[1.0] * 8, [1 - k / 8 for k in range(8)]]
    assert (t.tolist(), after.tolist()) == ([1.0, 1 / 8], [3 / 4, 0.0])
    assert budget.tolist() == [4, 8]


# The loss


def test_the_matching_loss_has_the_gradient_of_the_kl():
    """With φ = the student's law, its gradient is that of KL(student ‖ teacher), exactly."""
    generator = torch.Generator().manual_seed(0)
    logits, teacher = torch.randn(2, 30, 6, generator=generator, dtype=torch.float64)
    own = logits.requires_grad_()
    log_p = own.log_softmax(-1)
    matching = matching_loss(log_p, log_p.detach() - teacher.log_softmax(-1))
    divergence = kl_divergence(Categorical(logits=own), Categorical(logits=teacher))
    gradients = [torch.autograd.grad(each.sum(), own)[0] for each in (matching, divergence)]
    torch.testing.assert_close(*gradients)
    torch.testing.assert_close(matching, divergence)


@pytest.mark.parametrize(
    "matching",
    [
        {"kl": "backward", "aux_steps": 2},
        {"ratio_clip": 0.3, "contexts": 3},
        {"kl": "jeffreys", "budgets": [1]},
        {"contexts": 2, "completion": 0.8, "ratio_clip": 0.0, "budgets": [2, 3, 8]},
    ],
    ids=["plain", "clipped", "one step", "completion"],
)
@pytest.mark.parametrize("timed", [False, True], ids=["constant", "timed"])
def test_the_losses_and_the_students_gradient_by_hand(matching, timed):
    """Context by context, position by position, from whole forward passes.

    Of several turns the last is the student's, which it learns from once.
    """
    networks = pair(time_conditioning=timed)
    task = task_of(matching, **networks)
    d, config = task.distillation, task.config.token_matching
    randomise(networks_of(task)["auxiliary"], 5)  # it begins as the teacher
    auxiliary = task.parts["auxiliary"]
    student, before, update = twin(networks["student"]), [], auxiliary.update
    auxiliary.update = lambda step: before.append(twin(auxiliary.network)) or update(step)
    learned = spy(d.student, "backward")
    found = step_of(task)
    assert (len(before), len(learned)) == (config.aux_steps, 1)
    numbers, auxiliary, size = found.numbers, before[-1], config.contexts

    def law(network, z, t):
        return Categorical(logits=network(z[None], d.schedule.sigma(t[None]))[0])

    clip = config.ratio_clip or float("inf")
    own = [law(student, z, t) for z, t in zip(found.z, found.t, strict=True)]
    hidden_count, revealed_count = int(found.hidden.sum()), int(found.revealed.sum())
    gaps, kls, clipped = [], [], []
    said, drawn = [], []
    for b, hidden in enumerate(found.hidden):
        with torch.no_grad():
            phi, theta = (law(network, found.context[b], found.t_context[b])
                          for network in (auxiliary, networks["teacher"]))  # fmt: skip
            ratio = (phi.logits - theta.logits)[hidden]
        gaps.append((own[found.state[b]].probs[hidden] * ratio.clamp(-clip, clip)).sum())
        kls.append(kl_divergence(phi, theta)[hidden].sum())
        if size == 1:  # of several contexts of a state, only the first ones are gathered
            x, revealed = found.x[b].clamp(max=4), found.revealed[b]
            assert torch.equal(found.x[b].masked_fill(hidden, MASK), found.context[b])
            said.append(-phi.log_prob(x)[hidden].sum() / hidden_count)
            drawn.append(-own[b].log_prob(x)[revealed].sum() / revealed_count)
        clipped.append((ratio.abs() > clip).double().mean(-1).sum())
    anchor = entropy = 0.0
    for p, z, t, revealed in zip(own, found.z, found.t, found.revealed, strict=True):
        q = law(networks["teacher"], z, t)
        sides = kl_divergence(q, p), kl_divergence(p, q)
        kinds = {"forward": sides[0], "backward": sides[1], "jeffreys": sum(sides) / 2}
        anchor = anchor + kinds[config.kl][revealed].sum() / revealed_count
        entropy = entropy + p.entropy()[revealed].sum() / revealed_count
    matched = torch.stack(gaps).sum() / hidden_count
    loss = matched + config.anchor * anchor
    for b, shown in enumerate(found.shown):
        group = [i for i in range(b // size * size, (b // size + 1) * size) if i != b]
        token = found.context[b, shown][:, None]
        path = own[found.state[b]].logits[shown].gather(1, token).sum()
        if config.completion:
            excess = gaps[b].item() - sum(gaps[i].item() for i in group) / len(group)
            loss = loss + config.completion * excess * path / hidden_count
    expected = {
        "matching_loss": matched, "aux_kl": sum(kls) / hidden_count, "kl": anchor, "loss": loss,
        "ratio_clip_fraction": sum(clipped) / hidden_count, "entropy": entropy,
        "grad_norm": gradient_norm(loss, student),
    }  # fmt: skip
    if size == 1:
        expected |= {"aux_loss": sum(said), "path_entropy": sum(drawn)}
    check(numbers, **expected)


def test_a_students_law_is_learnt_by_the_auxiliary():
    """Its cross-entropy on a student that stands still falls, from the teacher's."""
    matching = {"warmup": 60, "aux_lr": 1e-2, "budgets": [2]}
    task = task_of(matching, {"train": {"steps": 61, "batch_size": 64}})
    losses = [numbers["aux_loss"].item() for numbers in run(task, 60)]
    assert 0 < sum(losses[-10:]) < sum(losses[:10]) - 1
