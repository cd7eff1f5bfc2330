"""One iteration of Algorithm 1 with every switch, on networks of 2 layers x 16 hidden."""

import pytest
import torch
import torch.nn.functional as F
from torch.distributions import Categorical, kl_divergence

from didi_instruct.config.distill import DistillConfig
from didi_instruct.config.parse import parse
from didi_instruct.distillation import didi as module
from didi_instruct.distillation.didi import (
    Critic,
    make_pair,
    score_texts,
    update_student,
    write_texts,
)
from didi_instruct.errors import UserError
from didi_instruct.models import discriminator
from didi_instruct.process.masking import interleaved_times
from didi_instruct.process.schedule import LogLinear

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
STATE = {"grouping": "state", "score_steps": "last"}
PROMPT = {"prompt": 3, "data": {"source": "stream"}}


@pytest.fixture(autouse=True)
def _quick_heads(monkeypatch):
    """Fifteen power iterations of a fresh head take longer than a whole step of these networks."""
    monkeypatch.setattr(discriminator, "INITIAL_ITERATIONS", 1)


def task_of(changes=None, **options):
    return make_task("didi", changes, **options)


def pair_of(task, step=0, turn=0):
    """The texts of the first pass of a batch, and what they are compared with."""
    return make_pair(task.distillation, batch_of(task, step, turn), write_texts)


def stops(pair):
    """Where each text of the student stopped on its way: (B,)."""
    last = pair.rollout.jumps[-1]
    return last.t[last.state]


def moves(changes, **options):
    """Run one step; return its numbers and what moved in both networks."""
    task = task_of(changes, **options)
    before = {name: weights(network) for name, network in networks_of(task).items()}
    numbers = task.step(0)
    check_numbers(numbers)
    return numbers, *(moved(before[name], network) for name, network in networks_of(task).items())


# Every switch


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("baseline", ["mean", "leave-one-out"])
@pytest.mark.parametrize("grouping", ["batch", "tau", "state"])
def test_a_step_with_every_advantage(grouping, baseline, scale, monkeypatch):
    """The student learns from rewards of all parts, centred and scaled by hand here, clipped."""
    didi = {"grouping": grouping, "baseline": baseline, "scale": scale, "advantage_clip": 1.5}
    if grouping == "state":
        didi["score_steps"] = "last"
    task = task_of({"didi": didi, "train": {"micro_batch": 8}})
    rewards, seen, reward = [], [], Critic.reward
    monkeypatch.setattr(
        Critic, "reward", lambda *given: rewards.append(reward(*given)) or rewards[-1]
    )
    monkeypatch.setattr(
        module, "update_student", lambda *given: seen.append(given[3]) or update_student(*given)
    )
    numbers = task.step(0)
    check_numbers(numbers)

    size = BATCH if grouping == "batch" else 4
    groups = torch.cat(rewards).double().view(-1, size)
    centred = groups - groups.mean(1, keepdim=True)
    spread = {"group": centred.std(1, correction=0)[:, None], "none": torch.ones(())}
    spread["batch"] = centred.square().mean().sqrt()
    factor = size / (size - 1) if baseline == "leave-one-out" else 1
    values = (factor * centred / (spread[scale] + (scale != "none") * 1e-6)).flatten()
    torch.testing.assert_close(seen[0], values.clamp(-1.5, 1.5))
    clipped = (values.abs() > 1.5).double().mean().item()
    assert numbers["clip_fraction"].item() == pytest.approx(clipped)
    assert clipped > 0 or scale == "none" or grouping != "batch"
    assert numbers["advantage_max"].item() == pytest.approx(seen[0].abs().max().item())


SWITCHES = {
    "beta(2,5)": {"didi": {"pi": [2, 5]}},
    "beta(5,2)": {"didi": {"pi": [5, 2]}},
    "omega": {"didi": {"omega": "schedule"}},
    "importance": {"didi": {"importance_weighting": True, "pi": [2, 5], "omega": "schedule"}},
    "one step": {"didi": {"score_decomposition": False}},
    "uncoupled": {"didi": {"coupled_time": False}},
    "uncoupled groups": {"didi": {"coupled_time": False, "grouping": "tau"}},
    "rollout of 3": {"didi": {"rollout_steps": 3}},
    "rollout of 3, state": {"didi": {"rollout_steps": 3, **STATE}},
    "last": {"didi": {"score_steps": "last"}},
    "last of 3": {"didi": {"score_steps": "last", "rollout_steps": 3}},
    "sum": {"didi": {"log_prob": "sum"}},
    "no regularisation": {"didi": {"regularisation": False}},
    "backward": {"didi": {"kl": "backward"}},
    "jeffreys": {"didi": {"kl": "jeffreys", "grouping": "tau"}},
    "no clipping": {"didi": {"advantage_clip": 0.0}},
    "clipping": {"didi": {"advantage_clip": 0.5}},
    "teacher in 1 step": {"reference": {"steps": 1}},
    "teacher in 4 steps": {"reference": {"steps": 4}},
    "masked positions": {"discriminator": {"positions": "masked"}},
    "no smoothing": {"discriminator": {"label_smoothing": 0.0}},
    "two updates": {"discriminator": {"steps": 2}},
    "no blocks": {"discriminator": {"trainable_blocks": 0}},
    "one block": {"discriminator": {"trainable_blocks": 1}},
    "all weights": {"discriminator": {"trainable_blocks": None}},
    "no average": {"train": {"ema": 0.0}},
}


@pytest.mark.parametrize("name", SWITCHES)
def test_a_step_with_every_switch(name):
    _, student, critic = moves(SWITCHES[name])
    assert student == {name for name, _ in small_network().named_parameters()}
    assert any(n.startswith("output_layer.") for n in critic)


@pytest.mark.parametrize("grouping", ["batch", "tau", "state"])
@pytest.mark.parametrize("given", ["online", "data"])
def test_a_step_with_prompts(grouping, given):
    didi = STATE if grouping == "state" else {"grouping": grouping}
    data = Stream()
    references = data.rows if given == "data" else None
    task = task_of(PROMPT | {"didi": didi}, data=data, references=references)
    check_numbers(task.step(0))
    pair = pair_of(task)
    prompts = Stream().rows(0, BATCH // 4)[:, :3]
    for text in (pair.rollout.x, pair.fake.z):
        assert torch.equal(text[:, :3], prompts.repeat_interleave(4, 0))
    assert torch.equal(pair.real.z[:, :3], prompts)
    assert torch.equal(pair.rollout.written, (torch.arange(L) >= 3).expand(BATCH, L))
    assert bool((pair.rollout.x < MASK).all())


@pytest.mark.parametrize("steps", [1, 4])
def test_a_reference_of_the_teacher_depends_on_its_number_alone(steps):
    """Texts without masks, drawn with as many steps of the teacher as the recipe says."""
    task = task_of({"reference": {"steps": steps}})
    d, asked = task.distillation, []
    teacher = d.teacher_logits
    d.teacher_logits = lambda *inputs: asked.append(inputs[1]) or teacher(*inputs)
    whole = d.references(0, 6)
    assert [float(t[0]) for t in asked] == [1 - n / steps for n in range(steps)]
    assert torch.equal(d.references(2, 3), whole[2:5])
    assert bool((whole < MASK).all())
    assert len(torch.unique(whole, dim=0)) > 3


# What is compared


def test_in_streams_texts_stop_on_the_path_and_are_compared_where_chance_says():
    """Of eight steps: the last stop before τ, which is where a text is compared."""
    didi = {"rollout_steps": 8, "score_steps": "last"}
    pair = pair_of(task_of({"didi": didi, "order": "streams"}))
    path = torch.tensor(interleaved_times(LogLinear(1e-3), 8)[:-1], dtype=torch.float64)
    drawn = pair_of(task_of({"didi": didi})).fake.t
    assert torch.equal(pair.fake.t, drawn)
    gap = (stops(pair)[:, None] - path).abs().amin(1)
    assert float(gap.max()) < 1e-9
    assert bool((stops(pair) >= pair.fake.t).all())
    assert len(torch.unique(stops(pair))) > 2
    assert bool((pair.rollout.x < MASK).all())


def test_coupled_times_are_the_same_and_uncoupled_ones_are_not():
    coupled = pair_of(task_of())
    assert torch.equal(coupled.fake.t, stops(coupled))
    apart = pair_of(task_of({"didi": {"coupled_time": False}}))
    assert not (apart.fake.t == stops(apart)).any()
    assert torch.equal(stops(apart), stops(coupled))
    assert torch.equal(apart.real.t, apart.fake.t)


@pytest.mark.parametrize("grouping", ["batch", "tau", "state"])
def test_what_the_members_of_a_group_share(grouping):
    """batch: nothing; tau: the time; state: the time, z_τ and the corruption mask."""
    didi = STATE if grouping == "state" else {"grouping": grouping}
    pair = pair_of(task_of({"didi": didi}))
    last = pair.rollout.jumps[-1]

    def alike(values):
        groups = values.view(BATCH // 4, 4, *values.shape[1:])
        return bool((groups == groups[:, :1]).all())

    assert alike(stops(pair)) == (grouping != "batch")
    assert alike(last.z[last.state]) == (grouping == "state")
    assert alike(pair.fake.z == MASK) == (grouping == "state")
    assert not alike(pair.rollout.x)
    assert len(torch.unique(stops(pair))) == (BATCH if grouping == "batch" else BATCH // 4)


@pytest.mark.parametrize("changes", [{}, {"didi": STATE}], ids=["batch", "state"])
def test_both_sides_are_corrupted_to_their_time(changes):
    """Masked shares 1 - α_t of both, 1,200 texts within 4.5 standard errors: false alarm 7e-6.

    Standard errors of groups that share their mask count groups, not texts.
    """
    task, sums = task_of(changes | {"train": {"batch_size": 1200}}), []
    pair = pair_of(task)
    for z, t, copies in (
        (pair.fake.z, pair.fake.t, 4 if changes else 1),
        (pair.real.z, pair.real.t, 1),
    ):
        chance = (1 - task.distillation.schedule.alpha(t))[::copies]
        masked = (z == MASK).double().mean(1)[::copies]
        variance = chance * (1 - chance) / L
        sums.append(torch.stack([(masked - chance).sum(), variance.sum()]))
    sums = torch.stack(sums)
    assert (sums[:, 0].abs() < 4.5 * sums[:, 1].sqrt()).all()


# Losses by hand


def laws_by_hand(network, z, t, task):
    return Categorical(logits=network(z[None], task.distillation.schedule.sigma(t[None]))[0])


@pytest.mark.parametrize("timed", [False, True], ids=["constant", "timed"])
@pytest.mark.parametrize(
    "didi",
    [
        {},
        {"log_prob": "sum", "kl": "backward", "kl_weight": 0.7, "entropy_weight": 0.3},
        {"regularisation": False, "omega": "schedule", "omega_min_time": 0.4},
        {"omega": "schedule", "importance_weighting": True, "pi": [2, 5], "kl_weight": 0.4},
        {"score_steps": "last", "kl": "jeffreys", "kl_weight": 0.7, "entropy_weight": 0.3},
        {**STATE, "kl_weight": 0.4, "entropy_weight": 0.3},
        {"score_decomposition": False, "kl_weight": 0.7},
        {"coupled_time": False, "omega": "schedule", "importance_weighting": True, "pi": [2, 2]},
    ],
    ids=["paper", "sum", "omega", "importance", "last", "state", "one step", "uncoupled"],
)
def test_the_students_loss_and_gradient_by_hand(didi, timed):
    """Text by text: -E[w A log P / tokens] + λ KL - μ H, and the norm of its gradient.

    w is that of the time at which texts are compared, whether the student passed through it or not.
    """
    networks = [small_network(seed, time_conditioning=timed) for seed in (0, 1)]
    task = task_of({"didi": didi}, teacher=networks[0], student=networks[1])
    pair = pair_of(task)
    advantage = torch.randn(BATCH, generator=torch.Generator().manual_seed(0)).double()
    student, teacher, didi = twin(networks[1]), networks[0], task.config.didi
    numbers = update_student(task.distillation, 0, [pair], advantage, score_texts)

    losses = []
    for text in range(BATCH):
        x, tau, last = pair.rollout.x[text], stops(pair)[text], pair.rollout.jumps[-1]
        z_tau = last.z[last.state[text]]
        path = [(torch.full((L,), MASK), torch.ones(()).double(), z_tau), (z_tau, tau, x)]
        if didi.score_steps == "last":
            path = path[1:]
        if not didi.score_decomposition:
            path = [(torch.full((L,), MASK), torch.ones(()).double(), x)]
        log_p = kl = entropy = 0.0
        tokens = 0
        for z, t, after in path:
            masked, drawn = z == MASK, (z == MASK) & (after != MASK)
            p, q = laws_by_hand(student, z, t, task), laws_by_hand(teacher, z, t, task)
            log_p = log_p + p.log_prob(x)[drawn].sum()
            tokens += int(drawn.sum())
            if masked.any():
                forward, backward = kl_divergence(q, p)[masked], kl_divergence(p, q)[masked]
                kinds = {"forward": forward, "backward": backward}
                kinds["jeffreys"] = (forward + backward) / 2
                kl = kl + kinds[didi.kl].mean()
                entropy = entropy + p.entropy()[masked].mean() / len(path)
        weight, t_compared = 1.0, pair.fake.t[text]
        if didi.omega == "schedule":
            weight = 1 / max(float(t_compared), didi.omega_min_time)
        if didi.importance_weighting:
            law = torch.distributions.Beta(*(float(c) for c in didi.pi))
            weight = weight / float(law.log_prob(t_compared.float()).exp())
        mean = log_p if didi.log_prob == "sum" else log_p / max(tokens, 1)
        loss = -weight * advantage[text] * mean
        if didi.regularisation:
            loss = loss + didi.kl_weight * kl - didi.entropy_weight * entropy
        losses.append(loss)
    loss = torch.stack(losses).mean()
    assert numbers["loss"].item() == pytest.approx(loss.item(), rel=1e-4, abs=1e-6)
    norm = gradient_norm(loss, student)
    assert numbers["grad_norm"].item() == pytest.approx(norm.item(), rel=1e-4)


@pytest.mark.parametrize("positions", ["all", "masked"])
@pytest.mark.parametrize("prompt", [False, True])
def test_the_discriminators_loss_and_accuracy_by_hand(positions, prompt):
    """Balanced cross-entropy, teacher 0.9 and student 0.1; accuracy by the sign of the reward.

    Sharpness is the share of positions with the right sign, of each text alike.
    """
    changes = {"discriminator": {"positions": positions, "trainable_blocks": None}}
    data = Stream() if prompt else None
    task = task_of(changes | (PROMPT if prompt else {}), data=data)
    pair = pair_of(task)
    critic = twin(networks_of(task)["discriminator"]).train()
    numbers = task.method.critic.update(0, [pair]).metrics
    z, t = torch.cat([pair.fake.z, pair.real.z]), torch.cat([pair.fake.t, pair.real.t])
    ratio = critic(z, task.distillation.schedule.sigma(t))
    sides, right, sharp = [], [], []
    for rows, target in ((slice(0, BATCH), 0.1), (slice(BATCH, None), 0.9)):
        losses, correct = [], []
        for own, state in zip(ratio[rows], z[rows], strict=True):
            written = torch.arange(L) >= (3 if prompt else 0)
            masked = state == MASK
            where = masked if positions == "masked" else written
            cross = -(target * F.logsigmoid(own) + (1 - target) * F.logsigmoid(-own))
            losses.append(cross[where].sum() / max(1, int(where.sum())))
            reward = own[masked if masked.any() else written].mean()
            correct.append(float((reward > 0) == (target > 0.5)))
            signs = ((own > 0) == (target > 0.5))[where].float()
            sharp.append(float(signs.mean()) if where.any() else 0.5)
        sides.append(torch.stack(losses).mean())
        right.append(sum(correct) / len(correct))
    loss = sum(sides) / 2
    assert numbers["disc_loss"].item() == pytest.approx(loss.item(), rel=1e-5)
    assert numbers["disc_accuracy"].item() == pytest.approx(sum(right) / 2)
    halves = sharp[:BATCH], sharp[BATCH:]
    assert numbers["disc_sharpness"].item() == pytest.approx(
        sum(sum(half) / len(half) for half in halves) / 2
    )
    assert numbers["disc_grad_norm"].item() == pytest.approx(
        gradient_norm(loss, critic).item(), rel=1e-4
    )


def test_an_exact_denoiser_may_teach():
    """`Teacher.log_probs` is asked instead of the network, for texts and for the KL."""
    law = torch.tensor([0.6, 0.1, 0.1, 0.1, 0.1]).log()
    task = task_of(
        {"didi": {"kl_weight": 1.0}, "reference": {"steps": 1}},
        log_probs=lambda z, t, where: law.expand(int(where.sum()), 5),
    )
    share = (task.distillation.references(0, 400) == 0).float().mean().item()
    # 3,200 coins: 5 standard errors, false alarm 6e-7.
    assert abs(share - 0.6) < 5 * (0.24 / 3200) ** 0.5
    with torch.no_grad():
        student = Categorical(logits=networks_of(task)["student"](torch.full((1, L), MASK))[0])
    expected = kl_divergence(Categorical(logits=law.expand(L, 5)), student).mean().item()
    assert task.distillation.kl_at_start().item() == pytest.approx(expected, rel=1e-5)
    check_numbers(task.step(0))


# Who learns, and when


def test_what_is_of_no_meaning_while_the_student_waits_is_not_logged():
    before, after = run(task_of({"discriminator": {"warmup": 1}}), 2)
    assert after.keys() - before.keys() == {"loss", "policy_loss", "kl", "entropy", "grad_norm"}
    assert [before["student_waits"].item(), after["student_waits"].item()] == [1, 0]


def test_the_student_waits_while_the_discriminator_guesses():
    """An accuracy that is hardly ever reached: the discriminator learns, the student does not."""
    numbers, student, critic = moves({"discriminator": {"chance": 0.999, "saturation": 1.0}})
    assert numbers["student_waits"].item() == 1
    assert not student
    assert critic


def test_a_saturated_discriminator_waits_and_the_student_learns():
    changes = {"discriminator": {"chance": 0.0, "saturation": 1e-3, "trainable_blocks": None}}
    numbers, student, critic = moves(changes)
    assert numbers["disc_waits"].item() == 1, "without a past it counts as one half"
    assert numbers["disc_grad_norm"].item() == 0
    assert not critic
    assert student


def test_whether_a_discriminator_waits_is_decided_by_earlier_batches():
    """Learning from the batches alone on which it errs would bias what it tells of all texts."""
    critic, seen = task_of({"discriminator": {"saturation": 0.9}}).method.critic, []
    for accuracy in [1.0] * 40 + [0.5] * 6 + [1.0] * 50:
        seen.append(critic.is_saturated())
        critic.sharpness.add(accuracy)
    assert not any(seen[:31]), "a few good ones are not enough: 1 - 0.95 ** n / 2 is 0.9 at 31"
    assert all(seen[32:41]), "before it is seen, a bad batch changes nothing"
    assert not any(seen[43:47])
    assert seen[-1], "once the bad ones are forgotten"


@pytest.mark.parametrize("blocks", [0, 1, 2, None])
def test_frozen_parts_of_the_discriminator_never_move(blocks):
    task = task_of({"discriminator": {"trainable_blocks": blocks}})
    critic = networks_of(task)["discriminator"]
    before = weights(critic)
    run(task, 3)
    free = {None: [""], 0: ["output_layer."], 1: ["output_layer.", "blocks.1."]}
    free[2] = ["output_layer.", "blocks."]
    expected = {n for n in before if n.startswith(tuple(free[blocks]))}
    assert moved(before, critic) == expected


@pytest.mark.parametrize(
    ("didi", "micro_batch"), [({}, 1), (STATE, 4)], ids=["one text", "one state"]
)
def test_a_part_may_have_a_single_state(didi, micro_batch):
    """One text, or one group at one z_τ: its teacher is asked at z_τ, not where all is masked."""
    changes = {"didi": didi | {"kl_weight": 0.5}}
    whole = task_of(changes)
    parts = task_of(changes | {"train": {"micro_batch": micro_batch}})
    numbers = [task.step(0)["kl"].item() for task in (whole, parts)]
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-5)


# Settings that mean nothing


def refused(values):
    with pytest.raises(UserError) as caught:
        parse(DistillConfig, values, where="test.yaml")
    return str(caught.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"didi": {"group_size": 1}}, "didi.group_size is 1"),
        ({"didi": {"grouping": "tau", "group_size": 3}}, "not a multiple of didi.group_size, 3"),
        ({"didi": {"grouping": "state"}}, "use didi.score_steps=last"),
        (
            {"didi": {**STATE, "score_decomposition": False}},
            "didi.grouping=state shares z_τ: it needs didi.score_decomposition",
        ),
        (
            {"didi": {"score_decomposition": False, "score_steps": "last"}},
            "didi.score_steps=last scores the jump from z_τ",
        ),
        ({"reference": {"source": "data"}}, "reference.source=data takes real text"),
        ({"prompt": 2}, "prompt gives the first tokens of real text: name it with --set"),
        ({"prompt": -1}, "prompt is -1"),
        ({"didi": {"pi": [0, 1]}}, "didi.pi is [0, 1]"),
        ({"didi": {"pi": [1, 2, 3]}}, "didi.pi is [1, 2, 3]"),
        ({"didi": {"omega_min_time": 0.0}}, "didi.omega_min_time is 0.0"),
        ({"didi": {"rollout_steps": 0}}, "didi.rollout_steps is 0: use 1 or more"),
        ({"didi": {"kl_weight": -1}}, "didi.kl_weight is -1.0: use 0 or more"),
        ({"discriminator": {"lr": 0}}, "discriminator.lr is 0.0"),
        ({"discriminator": {"label_smoothing": 0.5}}, "discriminator.label_smoothing is 0.5"),
        ({"discriminator": {"steps": 0}}, "discriminator.steps is 0"),
        ({"discriminator": {"chance": 0.96}}, "chance the smaller"),
        ({"discriminator": {"trainable_blocks": -1}}, "discriminator.trainable_blocks is -1"),
        ({"reference": {"steps": 0}}, "reference.steps is 0"),
    ],
)
def test_settings_that_mean_nothing_are_refused(values, message):
    error = refused({"train": {"batch_size": 64}} | values)
    assert error.startswith("test.yaml: ")
    assert message in error


def test_texts_are_as_long_as_the_data():
    task = task_of(PROMPT, data=Stream(length=6))
    check_numbers(task.step(0))
    assert pair_of(task).rollout.x.shape == (BATCH, 6)


@pytest.mark.parametrize("blocks", [0, 1, None])
def test_rewards_after_an_update_are_those_of_whole_passes(blocks):
    """What frozen blocks made of the texts is kept over the update; without any, nothing is."""
    task = task_of({"discriminator": {"trainable_blocks": blocks}, "train": {"micro_batch": 8}})
    d, critic = task.distillation, task.method.critic
    pairs = [make_pair(d, batch, write_texts) for batch in d.micro_batches(0)]
    before = weights(critic.learner.network)
    update = critic.update(0, pairs)
    assert moved(before, critic.learner.network)
    assert update.accuracy == update.metrics["disc_accuracy"].item()
    assert update.sharpness == update.metrics["disc_sharpness"].item()
    for pair, state in zip(pairs, update.states, strict=True):
        assert (state is None) == (blocks is None)
        torch.testing.assert_close(critic.reward(pair, state), critic.reward(pair))


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
