"""One iteration of token-level matching with every switch, on networks of 2 layers x 16 hidden."""

import itertools

import pytest
import torch
from tests.random_models import randomise
from tests.sampling.enumeration import FALSE_ALARM, p_value
from torch.distributions import Categorical, kl_divergence

from didi_instruct.config.distill import DistillConfig
from didi_instruct.config.parse import parse
from didi_instruct.distillation.rollout import as_denoiser, walk
from didi_instruct.distillation.token_matching import matching_loss
from didi_instruct.errors import UserError
from didi_instruct.sampling.ancestral import plain

from .small import (
    Stream,
    batch_of,
    check_numbers,
    gradient_norm,
    make_task,
    moved,
    networks_of,
    run,
    small_network,
    twin,
    weights,
)

L, MASK, BATCH = 8, 5, 12
PROMPT = {"prompt": 3, "data": {"source": "stream"}}
NAMES = {name for name, _ in small_network().named_parameters()}


def task_of(matching=None, changes=None, **options):
    changes = {"token_matching": matching or {}} | (changes or {})
    return make_task("token-matching", changes, **options)


def plan_of(task, step=0, turn=0):
    return task.method.plan(batch_of(task, step, turn))


# The loss itself


def test_the_matching_loss_has_the_gradient_of_the_kl():
    """With φ = the student's law, its gradient is that of KL(student ‖ teacher), exactly."""
    generator = torch.Generator().manual_seed(0)
    logits, teacher = torch.randn(2, 30, 6, generator=generator, dtype=torch.float64)
    log_theta = teacher.log_softmax(-1)

    def gradient(function):
        own = logits.clone().requires_grad_()
        return torch.autograd.grad(function(own).sum(), own)[0]

    def matching(own):
        log_p = own.log_softmax(-1)
        return matching_loss(log_p, log_p.detach() - log_theta)

    def divergence(own):
        return kl_divergence(Categorical(logits=own), Categorical(logits=teacher))

    torch.testing.assert_close(gradient(matching), gradient(divergence))
    torch.testing.assert_close(matching(logits), divergence(logits))


# The plan


@pytest.mark.parametrize(
    ("contexts", "completion"), [(1, 0.0), (2, 0.0), (3, 0.0), (2, 1.0), (3, 1.0)]
)
@pytest.mark.parametrize("prompt", [False, True])
def test_a_plan_shows_a_part_and_hides_the_rest(contexts, completion, prompt):
    """Of the revealed positions, all masked before; contexts of a state share what they should."""
    texts, changes = 120, {"train": {"batch_size": 120}} | (PROMPT if prompt else {})
    options = {"data": Stream()} if prompt else {}
    matching = {"contexts": contexts, "completion": completion, "budgets": [4]}
    task = task_of(matching, changes, **options)
    plan = plan_of(task)
    states = texts // contexts
    assert len(plan.path.t) == len(plan.revealed) == states
    assert torch.equal(plan.state, torch.arange(texts) // contexts)
    revealed = plan.revealed[plan.state]
    assert torch.equal(plan.shown | plan.hidden, revealed)
    assert not (plan.shown & plan.hidden).any()
    assert plan.hidden.any()
    assert plan.shown.any()
    if prompt:
        assert not revealed[:, :3].any()
        assert torch.equal(plan.start[:, :3], Stream().rows(0, states)[:, :3])
    groups = plan.shown.view(states, contexts, L)
    alike = bool((groups == groups[:, :1]).all())
    assert alike == (contexts == 1 or completion > 0)
    t = plan.path.t[plan.state]
    assert bool(((plan.t_context <= t + 1e-9) & (plan.t_context >= t - 1 / 4 - 1e-9)).all())


def masked_after_the_walk(task, plan):
    """Positions that are masked where the step of a plan of all texts starts: (U, L)."""
    d, noise = task.distillation, batch_of(task).noise
    draw, given = (
        plain(as_denoiser(d.student.replica.log_probs)),
        (plan.start, plan.owner, plan.path.times),
    )
    return walk(draw, d.schedule, *given, noise, MASK).z == MASK


def test_the_step_of_a_plan_reveals_what_its_walk_left_masked():
    """One order of positions for the walk and for the step after it; the last step ends it."""
    task = task_of({"budgets": [2, 4, 8]}, {"train": {"batch_size": 400}})
    plan = plan_of(task)
    left = masked_after_the_walk(task, plan)
    first, last = plan.path.t == 1, plan.path.t <= 1 / 8
    assert first.any()
    assert last.any()
    assert bool(left[first].all())
    assert not (plan.revealed & ~left).any()
    assert torch.equal(plan.revealed[last], left[last])


def test_a_context_has_the_time_of_its_share_of_masks():
    """Masked are (1 - α) / (1 - α_1) of it at its own time α.

    32,000 positions within 4.5 standard errors: false alarm 7e-6.
    """
    task = task_of({"budgets": [4]}, {"train": {"batch_size": 4000}})
    plan = plan_of(task)
    masked = plan.hidden | (masked_after_the_walk(task, plan) & ~plan.revealed)
    schedule = task.distillation.schedule
    chance = (1 - schedule.alpha(plan.t_context)) / (1 - schedule.alpha(1.0))
    error = (chance * (1 - chance) * L).sum().sqrt()
    assert abs(masked.sum() - (chance * L).sum()) < 4.5 * error


# Every switch

SWITCHES = {
    "one step": {"budgets": [1]},
    "one budget": {"budgets": [4]},
    "three budgets": {"budgets": [2, 3, 8]},
    "two contexts": {"contexts": 2},
    "three contexts": {"contexts": 3},
    "forward anchor": {"anchor": 0.5},
    "backward anchor": {"anchor": 0.5, "kl": "backward"},
    "jeffreys anchor": {"anchor": 0.5, "kl": "jeffreys", "contexts": 2},
    "completion": {"completion": 1.0, "contexts": 2},
    "completion of 3": {"completion": 0.5, "contexts": 3, "anchor": 0.1},
    "three updates": {"aux_steps": 3},
    "no clipping": {"ratio_clip": 0.0},
    "clipping": {"ratio_clip": 0.1},
}


def moves(matching, changes=None, **options):
    """A step with an auxiliary denoiser that has left the teacher, so that there is a ratio."""
    task = task_of(matching, changes, **options)
    networks = networks_of(task)
    randomise(networks["auxiliary"], 5)
    before = [weights(network) for network in networks.values()]
    numbers = task.step(0)
    check_numbers(numbers)
    return numbers, *map(moved, before, networks.values())


@pytest.mark.parametrize("timed", [False, True], ids=["constant", "timed"])
@pytest.mark.parametrize("name", SWITCHES)
def test_a_step_with_every_switch(name, timed):
    networks = [small_network(seed, time_conditioning=timed) for seed in (0, 1)]
    numbers, student, auxiliary = moves(SWITCHES[name], teacher=networks[0], student=networks[1])
    assert student == auxiliary == NAMES
    assert ("kl" in numbers) == ("anchor" in SWITCHES[name])
    if "clipping" in name:
        assert (numbers["ratio_clip_fraction"].item() > 0) == (name == "clipping")


def test_every_prompt_is_read_once():
    data = Stream()
    task = task_of(
        {"contexts": 2, "aux_steps": 2},
        PROMPT | {"train": {"micro_batch": 4}},
        data=data,
    )
    run(task, 2)
    assert [i for asked in data.asked for i in asked] == list(range(4 * BATCH // 2))


# Numbers by hand


@pytest.mark.parametrize(
    "matching",
    [
        {},
        {"ratio_clip": 0.3, "contexts": 3},
        {"anchor": 0.7, "kl": "backward"},
        {"contexts": 2, "completion": 0.8, "anchor": 0.2, "ratio_clip": 0.0},
    ],
    ids=["plain", "clipped", "anchor", "completion"],
)
@pytest.mark.parametrize("timed", [False, True], ids=["constant", "timed"])
def test_the_losses_and_the_students_gradient_by_hand(matching, timed):
    """Context by context, position by position, from whole forward passes."""
    networks = [small_network(seed, time_conditioning=timed) for seed in (0, 1)]
    task = task_of(matching, teacher=networks[0], student=networks[1])
    randomise(networks_of(task)["auxiliary"], 5)
    d, config = task.distillation, task.config.token_matching
    size = config.contexts
    plan, walker = plan_of(task), batch_of(task).noise.of_groups(size)
    draw, given = (
        plain(as_denoiser(d.student.replica.log_probs)),
        (plan.start, plan.owner, plan.path.times),
    )
    z = walk(draw, d.schedule, *given, walker, MASK).z
    asked, teacher = [], d.teacher_log_probs
    d.teacher_log_probs = lambda *inputs: asked.append(inputs) or teacher(*inputs)
    student, auxiliary = (twin(network) for network in networks_of(task).values())
    numbers = task.step(0)
    context = asked[0][0]
    kept = (context != MASK) | ~plan.revealed[plan.state]
    assert torch.equal(kept, ~plan.hidden)
    assert torch.equal(torch.where(plan.shown, MASK, context), z[plan.state])

    def law(network, z, t):
        return Categorical(logits=network(z[None], d.schedule.sigma(t[None]))[0])

    clip = config.ratio_clip or float("inf")
    own = [law(student, z[u], plan.path.t[u]) for u in range(len(z))]
    count = int(plan.hidden.sum())
    terms, costs, kls = [], [], []
    for b in range(BATCH):
        hidden, p = plan.hidden[b], own[plan.state[b]]
        with torch.no_grad():
            phi = law(auxiliary, context[b], plan.t_context[b])
            theta = law(networks[0], context[b], plan.t_context[b])
            ratio = (phi.logits - theta.logits).clamp(-clip, clip)[hidden]
        terms.append((p.probs[hidden] * ratio).sum())
        costs.append(terms[-1].item())
        kls.append(kl_divergence(phi, theta)[hidden].sum())
    loss = matching_term = torch.stack(terms).sum() / count
    assert numbers["matching_loss"].item() == pytest.approx(matching_term.item(), rel=1e-4)
    assert numbers["aux_kl"].item() == pytest.approx(float(sum(kls)) / count, rel=1e-4)
    revealed = int(plan.revealed.sum())
    entropy = sum(p.entropy()[r].sum().item() for p, r in zip(own, plan.revealed, strict=True))
    assert numbers["entropy"].item() == pytest.approx(entropy / revealed, rel=1e-4)
    if config.anchor:
        distances = [
            kl_divergence(*((p, q) if config.kl == "backward" else (q, p)))[plan.revealed[u]].sum()
            for u, p in enumerate(own)
            for q in [law(networks[0], z[u], plan.path.t[u])]
        ]
        anchor = torch.stack(distances).sum() / revealed
        assert numbers["kl"].item() == pytest.approx(anchor.item(), rel=1e-4)
        loss = loss + config.anchor * anchor
    if config.completion:
        for b in range(BATCH):
            group = range(b // size * size, (b // size + 1) * size)
            others = [costs[i] for i in group if i != b]
            excess = costs[b] - sum(others) / len(others)
            shown = plan.shown[b]
            log_p = own[plan.state[b]].logits[shown].gather(1, context[b, shown][:, None])
            loss = loss + config.completion * excess * log_p.sum() / count
    assert numbers["loss"].item() == pytest.approx(loss.item(), rel=1e-4)
    norm = gradient_norm(loss, student)
    assert numbers["grad_norm"].item() == pytest.approx(norm.item(), rel=1e-4)


@pytest.mark.parametrize("contexts", [1, 3])
def test_tokens_are_drawn_from_the_students_law(contexts):
    """What contexts show after a first step of two, chi-square over 5 tokens at `FALSE_ALARM`.

    The path entropy, their mean surprise, is near the entropy of the laws: more than 2,000 draws
    have a standard error below 2%, so 10% are 5 of them, false alarm 6e-7.
    """
    pytest.importorskip("scipy")
    task = task_of({"contexts": contexts, "budgets": [2]}, {"train": {"batch_size": 900}})
    d, plan, asked = task.distillation, plan_of(task), []
    teacher = d.teacher_log_probs
    with torch.no_grad():
        law = d.student.network(torch.full((1, L), MASK))[0].softmax(-1)
    torch.testing.assert_close(law, law[:1].expand(L, 5))
    d.teacher_log_probs = lambda *inputs: asked.append(inputs[0]) or teacher(*inputs)
    numbers = task.step(0)
    shown = plan.shown & (plan.path.t == 1)[plan.state][:, None]
    assert p_value(asked[0][shown], law[0].double()) > FALSE_ALARM
    assert int(plan.revealed.sum()) * contexts > 2000
    assert numbers["path_entropy"].item() == pytest.approx(numbers["entropy"].item(), rel=0.1)


def test_the_auxiliary_denoiser_learns_what_the_student_writes():
    """Its cross-entropy on a student that stands still falls, from the teacher's."""
    task = task_of(
        {"warmup": 60, "aux_lr": 1e-2, "budgets": [2]}, {"train": {"steps": 61, "batch_size": 64}}
    )
    losses = [task.step(step)["aux_loss"].item() for step in range(60)]
    assert 0 < sum(losses[-10:]) < sum(losses[:10]) - 1


# Who learns, and when


def test_the_student_learns_once_per_iteration_and_the_auxiliary_every_turn():
    task = task_of({"aux_steps": 3})
    student = task.distillation.student
    passes, backward = [], student.backward
    student.backward = lambda *inputs, **sync: passes.append(1) or backward(*inputs, **sync)
    task.step(0)
    assert len(passes) == 1
    counts = [
        {int(state["step"]) for state in part.updater.optimizer.state.values()}
        for part in task.parts.values()
    ]
    assert counts == [{1}, {3}]


def test_iterations_and_turns_have_their_own_plans():
    task = task_of()
    plans = [plan_of(task, *where) for where in ((0, 0), (0, 1), (1, 0))]
    for one, another in itertools.combinations(plans, 2):
        assert not torch.equal(one.revealed, another.revealed)
        assert not torch.equal(one.shown, another.shown)


# Settings that mean nothing


@pytest.mark.parametrize(
    ("matching", "message"),
    [
        (
            {"contexts": 3},
            "train.batch_size is 64, which is not a multiple of token_matching.contexts, 3",
        ),
        ({"completion": 1.0}, "token_matching.contexts is 1, but the completion term compares"),
        ({"budgets": []}, "token_matching.budgets is []"),
        ({"budgets": [4, 0]}, "token_matching.budgets is [4, 0]"),
        ({"aux_lr": 0}, "token_matching.aux_lr is 0.0"),
        ({"aux_steps": 0}, "token_matching.aux_steps is 0: use 1 or more"),
        ({"contexts": 0}, "token_matching.contexts is 0: use 1 or more"),
        ({"anchor": -0.1}, "token_matching.anchor is -0.1: use 0 or more"),
        ({"kl": "both"}, "choose one of forward, backward, jeffreys"),
        ({"context": 2}, "`token_matching.context` is not a setting. Did you mean `contexts`?"),
    ],
)
def test_settings_that_mean_nothing_are_refused(matching, message):
    values = {"method": "token-matching", "token_matching": matching}
    with pytest.raises(UserError) as caught:
        parse(DistillConfig, values, where="test.yaml")
    assert str(caught.value).startswith("test.yaml: ")
    assert message in str(caught.value)
