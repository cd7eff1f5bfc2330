"""Iterations of Algorithm 1 by hand, with every switch, on networks of 2 layers x 16 hidden."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch.distributions import Beta, Categorical, kl_divergence

from didi_instruct.distillation.didi import make_pair, score_texts, write_texts
from didi_instruct.distillation.losses import advantages, beta_times, rewards
from didi_instruct.distillation.watch import RunningMean
from didi_instruct.models import discriminator
from didi_instruct.process.masking import interleaved_times, revealed_shares
from didi_instruct.process.schedule import LogLinear
from didi_instruct.sampling.draw import Purpose

from .small import (
    PROMPT,
    STATE,
    Stream,
    asked_of,
    batch_of,
    check,
    gradient_norm,
    make_task,
    moved,
    networks_of,
    pair,
    run,
    spy,
    twin,
    weights,
)

L, MASK, BATCH = 8, 5, 12


@pytest.fixture(autouse=True)
def _quick_heads(monkeypatch):
    """Fifteen power iterations of a fresh head take longer than a whole step of these networks."""
    monkeypatch.setattr(discriminator, "INITIAL_ITERATIONS", 1)


def task_of(changes=None, **options):
    return make_task("didi", changes, **options)


def pair_of(task, step=0, turn=0):
    """The texts of a batch in one pass, and what they are compared with."""
    return make_pair(task.distillation, batch_of(task, step, turn), write_texts)


def path_of(task, found, turn):
    """Times and states (B, L) of the student's way to its texts, the texts last.

    Reveals follow from frozen noise: of the texts, or of the groups that share z_τ.
    """
    d, didi, noise = task.distillation, task.config.didi, batch_of(task, 0, turn).noise
    x = found.rollout.x
    begin = torch.where(found.rollout.written, MASK, x)
    if not didi.score_decomposition:
        return [1.0], [begin, x]
    size = 1 if didi.grouping == "batch" else didi.group_size
    pi = (*didi.pi, noise.of_groups(size).uniforms(sum(didi.pi) - 1, Purpose.START, 0))
    tau = beta_times(*pi).repeat_interleave(size)
    shared = size if didi.grouping == "state" else 1
    order = noise.of_groups(shared).uniforms(L, Purpose.REVEAL).repeat_interleave(shared, 0)
    steps = torch.linspace(0, 1, didi.rollout_steps + 1, dtype=torch.float64)
    times = list((1 + (tau[:, None] - 1) * steps).unbind(1))
    states = [begin]
    for t in times[1:]:
        reveals = order < revealed_shares(d.schedule, t)[:, None]
        states.append(torch.where((begin == MASK) & reveals, x, begin))
    return times, [*states, x]


CASES = {
    "paper": {},
    "batch": {"didi": {"grouping": "batch", "scale": "batch", "kl": "backward"}},
    "tau": {"didi": {"grouping": "tau", "baseline": "leave-one-out", "advantage_clip": 0.5}},
    "state": {"didi": {**STATE, "scale": "none", "advantage_clip": 0.0}},
    "sum": {"didi": {"log_prob": "sum", "scale": "none", "baseline": "leave-one-out"}},
    "omega": {"didi": {"regularisation": False, "omega": "schedule", "omega_min_time": 0.4}},
    "importance": {"didi": {"omega": "schedule", "importance_weighting": True, "pi": [2, 5]}},
    "last": {"didi": {"score_steps": "last", "kl": "jeffreys", "grouping": "tau"}},
    "rollout": {"didi": {"rollout_steps": 3, "pi": [5, 2]}},
    "last of 3": {"didi": {**STATE, "rollout_steps": 3}},
    "one step": {"didi": {"score_decomposition": False}},
    "uncoupled": {"didi": {"coupled_time": False, "omega": "schedule", "pi": [2, 2],
                           "importance_weighting": True}},
    "uncoupled groups": {"didi": {"coupled_time": False, "grouping": "tau"}},
    "prompts": PROMPT | {"didi": STATE, "discriminator": {"positions": "masked"}},
    "masked positions": {"discriminator": {"positions": "masked", "label_smoothing": 0.3,
                                           "trainable_blocks": None}},
    "two updates": {"discriminator": {"steps": 2, "trainable_blocks": 0, "label_smoothing": 0.0}},
}  # fmt: skip


def critic_by_hand(critic, d, found):
    """Loss, accuracy, sharpness and both rewards of a discriminator, text by text."""
    settings, loss = d.config.discriminator, 0.0
    right, sharp, worths = [], [], []
    written = torch.arange(L) >= d.config.prompt
    fake = found.fake.z, found.fake.t, settings.label_smoothing
    real = found.real.z, found.real.t, 1 - settings.label_smoothing
    for z, t, target in (fake, real):
        ratio, masked = critic(z, d.schedule.sigma(t)), z == MASK
        cross = -(target * F.logsigmoid(ratio) + (1 - target) * F.logsigmoid(-ratio))
        for own, each, m in zip(cross, ratio.detach(), masked, strict=True):
            where = m if settings.positions == "masked" else written
            loss = loss + own[where].sum() / max(1, int(where.sum())) / len(z) / 2
            correct = ((each[where] > 0) == (target > 0.5)).double()
            sharp.append(float(correct.mean() if where.any() else 0.5) / len(z) / 2)
            reward = each[m if m.any() else written].mean()
            right.append(float((reward > 0) == (target > 0.5)) / len(z) / 2)
            worths.append(float(reward))
    sides = worths[:BATCH], worths[BATCH:]
    return loss, sum(right), sum(sharp), *(sum(side) / len(side) for side in sides)


def score_by_hand(student, teacher, d, found, path):
    """Log P / tokens (or the sum), the mean KL and the mean entropy of texts along their path."""
    didi, (times, states) = d.config.didi, path
    steps = list(zip(times, states, states[1:], strict=False))
    if didi.score_steps == "last":
        steps = steps[-1:]
    log_prob = kl = entropy = tokens = 0.0
    for t, z, after in steps:
        sigma = d.schedule.sigma(torch.as_tensor(t, dtype=torch.float64).expand(BATCH))
        p, q = (Categorical(logits=network(z, sigma)) for network in (student, teacher))
        masked, drawn = z == MASK, (z == MASK) & (after != MASK)
        tokens = tokens + drawn.sum(1)
        log_prob = log_prob + (p.log_prob(found.rollout.x) * drawn).sum(1)
        forward, backward = kl_divergence(q, p), kl_divergence(p, q)
        kinds = {"forward": forward, "backward": backward, "jeffreys": (forward + backward) / 2}
        count = masked.sum(1).clamp(min=1)
        kl = kl + ((kinds[didi.kl] * masked).sum(1) / count).mean()
        entropy = entropy + ((p.entropy() * masked).sum(1) / count).mean() / len(steps)
    mean = log_prob if didi.log_prob == "sum" else log_prob / tokens.clamp(min=1)
    return mean, kl, entropy


@pytest.mark.parametrize("timed", [False, True], ids=["constant", "timed"])
@pytest.mark.parametrize("name", CASES)
def test_an_iteration_by_hand(name, timed):
    """Text by text, from whole forward passes of each network.

    The discriminator: balanced cross-entropy, teacher 1 - s and student s; accuracy by the sign of
    the reward, sharpness by the share of positions with the right sign, of each text alike.
    The student: -E[w A log P / tokens] + λ KL - μ H, with rewards of the updated discriminator, and
    w of the time at which texts are compared, whether the student passed through it or not.
    """
    own = {"kl_weight": 0.4, "entropy_weight": 0.3} | CASES[name].get("didi", {})
    networks, seen, critics = pair(time_conditioning=timed), [], []
    options = {"path_score": lambda d, found: seen.append(found) or score_texts(d, found)}
    if "prompt" in CASES[name]:
        options["data"] = Stream()
    task = task_of(CASES[name] | {"didi": own}, **networks, **options)
    d, didi, learner = task.distillation, task.config.didi, task.parts["discriminator"]
    student, update = twin(networks["student"]), learner.update
    learner.update = lambda step: critics.append(twin(learner.network)) or update(step)
    (numbers,), (found,) = run(task, 1), seen
    assert len(critics) == task.config.discriminator.steps

    logged = functools.partial(check, numbers, rel=2e-4, abs=1e-5)

    # The discriminator, as it was before its last update
    loss, accuracy, sharpness, worth, reference = critic_by_hand(critics[-1], d, found)
    frozen = {n for n, p in learner.network.named_parameters() if not p.requires_grad}
    trained = [p for n, p in critics[-1].named_parameters() if n not in frozen]
    norms = [slope.norm() for slope in torch.autograd.grad(loss, trained)]
    logged(disc_loss=loss, disc_accuracy=accuracy, disc_sharpness=sharpness)
    logged(reward_student=worth, reward_reference=reference)
    texts = found.rollout
    logged(path_entropy=-(texts.log_prob / texts.written.sum(1)).mean())
    logged(disc_grad_norm=torch.stack(norms).norm())

    # Advantages, by the discriminator as it is now
    with torch.no_grad():
        ratio, masked = (
            learner.network(found.fake.z, d.schedule.sigma(found.fake.t)),
            found.fake.z == MASK,
        )
    reward = rewards(ratio, masked, (torch.arange(L) >= task.config.prompt).expand(BATCH, L))
    size = BATCH if didi.grouping == "batch" else didi.group_size
    shape = {"baseline": didi.baseline, "scale": didi.scale, "clip": didi.advantage_clip}
    compared = advantages(reward, size, eps=didi.advantage_eps, **shape)
    advantage = compared.values
    logged(advantage_max=advantage.abs().max(), clip_fraction=compared.clip_fraction)
    logged(advantage_std=advantage.std(correction=0))

    # The student, as it was
    path = path_of(task, found, task.config.discriminator.steps - 1)
    groups = found.fake.t.view(-1, 4)
    assert bool((groups == groups[:, :1]).all()) == (didi.grouping != "batch")
    if didi.score_decomposition:
        assert torch.equal(found.fake.t, path[0][-1]) == didi.coupled_time
    mean, kl, entropy = score_by_hand(student, networks["teacher"], d, found, path)
    weight = 1 / found.fake.t.clamp(min=didi.omega_min_time) if didi.omega == "schedule" else 1.0
    if didi.importance_weighting:
        law = Beta(*(torch.tensor(float(c)) for c in didi.pi))
        weight = weight / law.log_prob(found.fake.t.float()).exp()
    policy = loss = -(weight * advantage * mean).mean()
    if didi.regularisation:
        loss = loss + didi.kl_weight * kl - didi.entropy_weight * entropy
        logged(kl=kl)
    logged(loss=loss, policy_loss=policy, entropy=entropy, grad_norm=gradient_norm(loss, student))


# What is compared


def test_in_streams_texts_stop_on_the_path_and_are_compared_where_chance_says():
    """Of eight steps: the last stop before τ, which is where a text is compared."""
    didi = {"rollout_steps": 8, "score_steps": "last"}
    task = task_of({"didi": didi, "order": "streams"})
    asked = asked_of(task.distillation.student, "logits")
    found = pair_of(task)
    assert torch.equal(found.fake.t, pair_of(task_of({"didi": didi})).fake.t)
    path = torch.tensor(interleaved_times(LogLinear(1e-3), 8)[:-1], dtype=torch.float64)
    stops = torch.stack(
        [path[path >= t][-1] if (path >= t).any() else path[0] for t in found.fake.t]
    )
    torch.testing.assert_close(asked[-1][1], stops)
    assert len(torch.unique(stops)) > 2
    assert bool((found.rollout.x < MASK).all())


@pytest.mark.parametrize("given", ["online", "data"])
def test_prompts_stay_and_each_group_has_its_own(given):
    data = Stream()
    task = task_of(PROMPT, data=data, references=data.rows if given == "data" else None)
    found, prompts = pair_of(task), Stream().rows(0, BATCH // 4)[:, :3]
    for text in (found.rollout.x, found.fake.z):
        assert torch.equal(text[:, :3], prompts.repeat_interleave(4, 0))
    assert torch.equal(found.real.z[:, :3], prompts)
    assert torch.equal(found.rollout.written, (torch.arange(L) >= 3).expand(BATCH, L))
    assert bool((found.rollout.x < MASK).all())
    shorter = pair_of(task_of(PROMPT, data=Stream(length=6)))
    assert shorter.rollout.x.shape == (BATCH, 6), "texts are as long as the data"


@pytest.mark.parametrize("steps", [1, 4])
def test_a_reference_of_the_teacher_depends_on_its_number_alone(steps):
    """Texts without masks, drawn with as many steps of the teacher as the recipe says."""
    d = task_of({"reference": {"steps": steps}}).distillation
    asked = asked_of(d, "teacher_logits")
    whole = d.references(0, 6)
    assert [float(t[0]) for _, t, _ in asked] == [1 - n / steps for n in range(steps)]
    assert torch.equal(d.references(2, 3), whole[2:5])
    assert bool((whole < MASK).all())
    assert len(torch.unique(whole, dim=0)) > 3


@pytest.mark.parametrize("changes", [{}, {"didi": STATE}], ids=["batch", "state"])
def test_both_sides_are_corrupted_to_their_time(changes):
    """Masked shares 1 - α_t of both, 1,200 texts within 4.5 standard errors: false alarm 7e-6.

    Groups at one state share their mask, so there standard errors count groups. What is not masked
    is the text itself.
    """
    task = task_of(changes | {"train": {"batch_size": 1200}})
    found, copies = pair_of(task), 4 if changes else 1
    reference = task.distillation.references(0, 1200)
    for x, z, t, each in ((found.rollout.x, found.fake.z, found.fake.t, copies),
                          (reference, found.real.z, found.real.t, 1)):  # fmt: skip
        assert torch.equal(z, torch.where(z == MASK, MASK, x))
        groups = (z == MASK).view(-1, 4, L)
        assert bool((groups == groups[:, :1]).all()) == (each > 1)
        chance = (1 - task.distillation.schedule.alpha(t))[::each]
        share = (z == MASK).double().mean(1)[::each]
        variance = (chance * (1 - chance) / L).sum()
        assert (share - chance).sum().abs() < 4.5 * variance.sqrt()
    assert not torch.equal(found.fake.z == MASK, found.real.z == MASK)


def test_an_exact_denoiser_may_teach():
    """It is asked instead of the network, for texts and for the KL."""
    law = torch.tensor([0.6, 0.1, 0.1, 0.1, 0.1]).log()
    task = task_of(
        {"didi": {"kl_weight": 1.0}, "reference": {"steps": 1}},
        law=lambda z, t: law.expand(*z.shape, 5),
    )
    share = (task.distillation.references(0, 400) == 0).float().mean().item()
    # 3,200 coins: 5 standard errors, false alarm 6e-7.
    assert abs(share - 0.6) < 5 * (0.24 / 3200) ** 0.5
    with torch.no_grad():
        student = Categorical(logits=networks_of(task)["student"](torch.full((1, L), MASK))[0])
    expected = kl_divergence(Categorical(logits=law.expand(L, 5)), student).mean().item()
    assert task.distillation.kl_at_start().item() == pytest.approx(expected, rel=1e-5)
    run(task, 1)


# Who learns, and when


def means(values, prior=None):
    """Mean of the values before and with each: weights 1, m, m², … backwards; unseen ones prior."""
    found = []
    for n in range(1, len(values) + 1):
        ages = [0.05 * 0.95**age for age in range(n)][::-1]
        total = sum(w * v for w, v in zip(ages, values[:n], strict=True))
        found.append(total / sum(ages) if prior is None else total + prior * (1 - sum(ages)))
    return found


@pytest.mark.parametrize("gate", ["saturation", "chance"])
def test_the_gates_follow_running_means(gate):
    """The student waits at chance, this batch included; the discriminator for earlier batches.

    To learn from those batches alone on which it errs would bias what it tells of all texts. What
    it has not seen counts as one half.
    """
    train, metric = (
        {"train": {"steps": 14}},
        {"saturation": "disc_sharpness"}.get(gate, "disc_accuracy"),
    )
    prior = 0.5 if gate == "saturation" else None
    free = [numbers[metric].item() for numbers in run(task_of(train), 14)]
    limit = sorted(means(free, prior))[7]
    task, seen, waits = task_of(train | {"discriminator": {gate: limit}}), [], []
    for step in range(14):
        before = {name: weights(network) for name, network in networks_of(task).items()}
        past = means(seen, prior)[-1:]
        numbers = task.step(step)
        seen.append(numbers[metric].item())
        saturated, at_chance = gate == "saturation" and past > [limit], False
        if gate == "chance":
            at_chance = means(seen)[-1] < limit
        assert numbers["disc_waits"].item() == saturated == (numbers["disc_grad_norm"].item() == 0)
        assert numbers["at_chance"].item() == numbers["student_waits"].item() == at_chance
        still = {name: not moved(before[name], n) for name, n in networks_of(task).items()}
        assert still == {"student": at_chance, "discriminator": saturated}
        assert all(p.grad is None for n in networks_of(task).values() for p in n.parameters())
        waits.append(saturated or at_chance)
    assert 0 < sum(waits) < 14


def test_without_gates_everyone_always_learns(monkeypatch):
    """Whatever the discriminator's accuracies are: here 0 and 1, at which both would wait."""
    for method, value in (("add", 0.0), ("cautious", 1.0)):
        monkeypatch.setattr(RunningMean, method, lambda self, given, value=value: value)
    usual = {"chance": 0.52, "saturation": 0.95}
    for gates, waits in ((usual, 1.0), (dict.fromkeys(usual), 0.0)):
        task = task_of({"discriminator": gates})
        before = {name: weights(network) for name, network in networks_of(task).items()}
        for numbers in run(task, 2):
            names = ("student_waits", "at_chance", "disc_waits")
            assert [numbers[name].item() for name in names] == [waits] * 3
        changed = {name for name, n in networks_of(task).items() if moved(before[name], n)}
        assert changed == (set() if waits else {"student", "discriminator"})


@pytest.mark.parametrize("on_top", [False, True])
def test_a_warm_up_is_among_the_steps_or_on_top_of_them(on_top):
    """On top: exactly `train.steps` updates of the student, at the rates of that many."""
    changes = {"discriminator": {"warmup": 2}, "warmup_on_top": on_top}
    task = task_of(changes | {"train": {"steps": 3}, "optim": {"lr": 3e-3}})
    config, updates = task.config, 3 if on_top else 1
    assert (config.iterations, config.updates) == (5 if on_top else 3, updates)
    asked = spy(task.distillation.student.updater, "update")
    rates = []
    for step in range(config.iterations):
        assert task.step(step)["student_waits"].item() == (step < 2)
        rates.append(task.describe(step, 1.0, 1)["lr"])
    assert [step for (step,) in asked] == list(range(updates))
    falling = [3e-3 * (1 - n / updates) for n in range(updates)]
    assert rates == pytest.approx([0.0, 0.0, *falling])


def test_the_discriminator_decays_as_it_is_told():
    """By its own weight decay; by the student's where it has none."""
    for own, expected in ((None, 0.3), (0.0, 0.0), (0.7, 0.7)):
        task = task_of({"discriminator": {"weight_decay": own}, "optim": {"weight_decay": 0.3}})
        decays = {
            name: {g["weight_decay"] for g in part.updater.optimizer.param_groups}
            for name, part in task.parts.items()
        }
        assert decays == {"student": {0.3, 0.0}, "discriminator": {expected, 0.0}}


def test_dropout_is_a_law_of_the_units_and_of_nothing_else():
    """Each unit is left out with that chance, others make up for it; a text has its own draws.

    24 texts x 8 positions x 16 units, 5 standard errors: false alarm 6e-7.
    """
    task = task_of({"discriminator": {"dropout": 0.25}})
    found, critic = pair_of(task), task.method.critic
    kept = critic._dropout(found)
    assert kept.shape == (2 * BATCH, L, 16)
    assert kept.unique().tolist() == pytest.approx([0.0, 4 / 3])
    assert abs((kept == 0).double().mean() - 0.25) < 5 * (0.25 * 0.75 / kept.numel()) ** 0.5
    assert len(torch.unique(kept.flatten(1), dim=0)) == 2 * BATCH
    parts = task_of({"discriminator": {"dropout": 0.25}, "train": {"micro_batch": 4}})
    d = parts.distillation
    some = [make_pair(d, part, write_texts) for part in d.micro_batches(0)]
    fakes = torch.cat([parts.method.critic._dropout(each)[:4] for each in some])
    assert torch.equal(fakes, kept[:BATCH])
    network, sigma = critic.learner.network, d.schedule.sigma(found.fake.t)
    x, mods = network.trunk.embed(found.fake.z), network.trunk.modulations(sigma)
    hidden = network.output_layer.main[:2](network.trunk.trunk(x, mods))
    last = network.output_layer.main[2]
    expected = F.linear(hidden * kept[:BATCH], last.weight(), last.bias).squeeze(-1)
    torch.testing.assert_close(network(found.fake.z, sigma, dropout=kept[:BATCH]), expected)


@pytest.mark.parametrize("blocks", [1, None], ids=["kept states", "whole"])
def test_dropout_is_in_updates_and_not_in_rewards(blocks):
    changes = {"discriminator": {"dropout": 0.5, "trainable_blocks": blocks}}
    task, plain = task_of(changes), task_of({"discriminator": {"trainable_blocks": blocks}})
    found, other = pair_of(task), pair_of(plain)
    critics = [each.method.critic for each in (task, plain)]
    assert torch.equal(critics[0].reward(found), critics[1].reward(other))
    ratios = [
        c._log_ratios(each, first=True)[0] for c, each in zip(critics, (found, other), strict=True)
    ]
    assert (ratios[0] - ratios[1]).abs().max() > 1e-3
    runs = [task_of(changes) for _ in range(2)]
    for each in runs:
        run(each, 2)
    for one, another in zip(*(networks_of(each).values() for each in runs), strict=True):
        assert not moved(weights(one), another)


@pytest.mark.parametrize("blocks", [0, 1, 2, None])
def test_frozen_parts_of_the_discriminator_never_move(blocks):
    task = task_of({"discriminator": {"trainable_blocks": blocks}})
    critic = networks_of(task)["discriminator"]
    before = weights(critic)
    run(task, 2)
    free = {None: ("",), 0: ("output_layer.",), 1: ("output_layer.", "blocks.1."),
            2: ("output_layer.", "blocks.")}[blocks]  # fmt: skip
    assert moved(before, critic) == {n for n in before if n.startswith(free)}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "graphs"),
        ({"train": {"micro_batch": 4}}, "auto"),
        ({"train": {"compile": "off"}}, "off"),
        ({"didi": {"rollout_steps": 2}}, "auto"),
        ({"discriminator": {"steps": 2}}, "auto"),
        ({"reference": {"source": "online"}}, "auto"),
    ],
)
def test_graphs_of_passes_where_there_are_few(changes, expected):
    """A graph is recorded for each size and place in an iteration."""
    given = {"reference": {"source": "data"}, "data": {"source": "oracle"}} | changes
    task = task_of(given, references=Stream().rows)
    assert task.distillation.train.compile == expected
