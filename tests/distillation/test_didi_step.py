"""One iteration of Algorithm 1 with every switch, on networks of 2 layers x 16 hidden."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.distributions import Categorical, kl_divergence

from didi_instruct.config.distill import DistillConfig
from didi_instruct.config.parse import parse
from didi_instruct.distillation.didi import DidiTask
from didi_instruct.distillation.discriminating import smooth_bce
from didi_instruct.errors import UserError
from didi_instruct.models import discriminator
from didi_instruct.process.masking import interleaved_times
from didi_instruct.process.schedule import LogLinear

from .small import (
    Stream,
    check_numbers,
    gradient_norm,
    largest_difference,
    make_task,
    moved,
    settings,
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
    return make_task(DidiTask, "didi", changes or {}, **options)


def student_and_critic(task):
    return task.student.network, task.critic.network


def run(changes, steps=2, **options):
    task = task_of(changes, **options)
    for step in range(steps):
        check_numbers(task.step(step))
    return task


def stops(part):
    """Where each text of the student stopped on its way: (B,)."""
    last = part.rollout.jumps[-1]
    return last.t[last.owner]


def moves(changes, **options):
    """Run one step; return its numbers and what moved in both networks."""
    task = task_of(changes, **options)
    before = [weights(network) for network in student_and_critic(task)]
    numbers = task.step(0)
    check_numbers(numbers)
    for network in student_and_critic(task):
        assert all(p.grad is None for p in network.parameters())
    return numbers, *map(moved, before, student_and_critic(task))


# Every switch


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("baseline", ["mean", "leave-one-out"])
@pytest.mark.parametrize("grouping", ["batch", "tau", "state"])
def test_a_step_with_every_advantage(grouping, baseline, scale):
    """The student learns from rewards of all parts, centred and scaled by hand here, clipped."""
    didi = {"grouping": grouping, "baseline": baseline, "scale": scale, "advantage_clip": 1.5}
    if grouping == "state":
        didi["score_steps"] = "last"
    task = task_of({"didi": didi, "train": {"micro_batch": 8}})
    before, rewards, seen = weights(task.student.network), [], []
    reward, teach = task.reward, task.teach_student
    task.reward = lambda *given: rewards.append(reward(*given)) or rewards[-1]
    task.teach_student = lambda *inputs: seen.append(inputs[-1]) or teach(*inputs)
    numbers = task.step(0)
    check_numbers(numbers)
    assert moved(before, task.student.network) == before.keys()

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


@pytest.mark.parametrize("name", ["importance", "rollout of 3", "two updates", "one step"])
def test_a_step_with_time_conditioning(name):
    networks = [small_network(seed, time_conditioning=True) for seed in (0, 1)]
    _, student, _ = moves(SWITCHES[name], teacher=networks[0], student=networks[1])
    assert student == {name for name, _ in networks[1].named_parameters()}


@pytest.mark.parametrize("grouping", ["batch", "tau", "state"])
@pytest.mark.parametrize("given", ["online", "data"])
def test_a_step_with_prompts(grouping, given):
    didi = STATE if grouping == "state" else {"grouping": grouping}
    data = Stream()
    references = data.rows if given == "data" else None
    task = task_of(PROMPT | {"didi": didi}, data=data, references=references)
    check_numbers(task.step(0))
    part = task.compare(0, 0, torch.arange(BATCH))
    prompts = Stream().rows(0, BATCH // 4)[:, :3]
    for text in (part.rollout.x, part.z):
        assert torch.equal(text[:, :3], prompts.repeat_interleave(4, 0))
    assert torch.equal(part.z_reference[:, :3], prompts)
    assert torch.equal(part.rollout.written, (torch.arange(L) >= 3).expand(BATCH, L))
    assert bool((part.rollout.x < MASK).all())


def test_every_reference_is_read_once():
    """Rows in order over iterations, turns and parts: no text is seen twice, none left out."""
    data = Stream()
    task = task_of(
        {"discriminator": {"steps": 2}, "train": {"micro_batch": 4}}, references=data.rows
    )
    for step in range(2):
        task.step(step)
    assert [i for asked in data.asked for i in asked] == list(range(4 * BATCH))


@pytest.mark.parametrize("steps", [1, 4])
def test_a_reference_of_the_teacher_depends_on_its_number_alone(steps):
    """Texts without masks, drawn with as many steps of the teacher as the recipe says."""
    task = task_of({"reference": {"steps": steps}})
    teacher, asked = task.teacher_logits, []
    task.teacher_logits = lambda *inputs: asked.append(inputs[1]) or teacher(*inputs)
    whole = task.references(0, 6)
    assert [float(t[0]) for t in asked] == [1 - n / steps for n in range(steps)]
    assert torch.equal(task.references(2, 3), whole[2:5])
    assert bool((whole < MASK).all())
    assert len(torch.unique(whole, dim=0)) > 3


# What is compared


def test_in_streams_texts_stop_on_the_path_and_are_compared_where_chance_says():
    """Of eight steps: the last stop before τ, which is where a text is compared."""
    didi = {"rollout_steps": 8, "score_steps": "last"}
    part = task_of({"didi": didi, "order": "streams"}).compare(0, 0, torch.arange(BATCH))
    path = torch.tensor(interleaved_times(LogLinear(1e-3), 8)[:-1], dtype=torch.float64)
    drawn = task_of({"didi": didi}).compare(0, 0, torch.arange(BATCH)).t
    assert torch.equal(part.t, drawn)
    gap = (stops(part)[:, None] - path).abs().amin(1)
    assert float(gap.max()) < 1e-9
    assert bool((stops(part) >= part.t).all())
    assert len(torch.unique(stops(part))) > 2
    assert bool((part.rollout.x < MASK).all())


def test_coupled_times_are_the_same_and_uncoupled_ones_are_not():
    indices = torch.arange(BATCH)
    coupled = task_of().compare(0, 0, indices)
    assert torch.equal(coupled.t, stops(coupled))
    apart = task_of({"didi": {"coupled_time": False}}).compare(0, 0, indices)
    assert not (apart.t == stops(apart)).any()
    assert torch.equal(stops(apart), stops(coupled))
    assert torch.equal(apart.t_reference, apart.t)


@pytest.mark.parametrize("grouping", ["batch", "tau", "state"])
def test_what_the_members_of_a_group_share(grouping):
    """batch: nothing; tau: the time; state: the time, z_τ and the corruption mask."""
    didi = STATE if grouping == "state" else {"grouping": grouping}
    part = task_of({"didi": didi}).compare(0, 0, torch.arange(BATCH))
    last = part.rollout.jumps[-1]

    def alike(values):
        groups = values.view(BATCH // 4, 4, *values.shape[1:])
        return bool((groups == groups[:, :1]).all())

    assert alike(stops(part)) == (grouping != "batch")
    assert alike(last.z[last.owner]) == (grouping == "state")
    assert alike(part.z == MASK) == (grouping == "state")
    assert not alike(part.rollout.x)
    assert len(torch.unique(stops(part))) == (BATCH if grouping == "batch" else BATCH // 4)


@pytest.mark.parametrize("changes", [{}, {"didi": STATE}], ids=["batch", "state"])
def test_both_sides_are_corrupted_to_their_time(changes):
    """Masked shares 1 - α_t of both, 1,200 texts within 4.5 standard errors: false alarm 7e-6.

    Standard errors of groups that share their mask count groups, not texts.
    """
    task, sums = task_of(changes | {"train": {"batch_size": 1200}}), []
    part = task.compare(0, 0, torch.arange(1200))
    for z, t, copies in (
        (part.z, part.t, 4 if changes else 1),
        (part.z_reference, part.t_reference, 1),
    ):
        chance = (1 - task.schedule.alpha(t))[::copies]
        masked = (z == MASK).double().mean(1)[::copies]
        variance = chance * (1 - chance) / L
        sums.append(torch.stack([(masked - chance).sum(), variance.sum()]))
    sums = torch.stack(sums)
    assert (sums[:, 0].abs() < 4.5 * sums[:, 1].sqrt()).all()


def test_iterations_turns_and_seeds_have_their_own_texts():
    task, other = task_of(), task_of({"train": {"seed": 1}})
    indices = torch.arange(BATCH)
    texts = [task.compare(*where, indices).rollout.x for where in ((0, 0), (0, 1), (1, 0))]
    texts.append(other.compare(0, 0, indices).rollout.x)
    for one, another in itertools.combinations(texts, 2):
        assert not torch.equal(one, another)


# Losses by hand


def laws_by_hand(network, z, t, task):
    return Categorical(logits=network(z[None], task.schedule.sigma(t[None]))[0])


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
    part = task.compare(0, 0, torch.arange(BATCH))
    advantage = torch.randn(BATCH, generator=torch.Generator().manual_seed(0)).double()
    student, teacher, didi = twin(task.student.network), networks[0], task.config.didi
    numbers = task.teach_student(0, [part], advantage)

    losses = []
    for text in range(BATCH):
        x, tau, last = part.rollout.x[text], stops(part)[text], part.rollout.jumps[-1]
        z_tau = last.z[last.owner[text]]
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
        weight, t_compared = 1.0, part.t[text]
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
    part = task.compare(0, 0, torch.arange(BATCH))
    critic = twin(task.critic.network).train()
    numbers = task.teach_discriminator(0, [part]).numbers
    z, t = torch.cat([part.z, part.z_reference]), torch.cat([part.t, part.t_reference])
    ratio = critic(z, task.schedule.sigma(t))
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


def test_smooth_bce_is_torchs_where_selected():
    generator = torch.Generator().manual_seed(0)
    ratio = torch.randn(3, 4, generator=generator)
    where = torch.tensor([[True] * 4, [True, False, True, False], [False] * 4])
    values = smooth_bce(ratio, where, 0.9)
    expected = F.binary_cross_entropy(ratio.sigmoid(), torch.full((3, 4), 0.9), reduction="none")
    assert values[0].item() == pytest.approx(expected[0].mean().item(), rel=1e-5)
    assert values[1].item() == pytest.approx(expected[1, ::2].mean().item(), rel=1e-5)
    assert values[2].item() == 0


def test_an_exact_denoiser_may_teach():
    """`Teacher.rows` is asked instead of the network, for texts and for the KL."""
    law = torch.tensor([0.6, 0.1, 0.1, 0.1, 0.1]).log()
    task = task_of(
        {"didi": {"kl_weight": 1.0}, "reference": {"steps": 1}},
        rows=lambda z, t, where: law.expand(int(where.sum()), 5),
    )
    share = (task.references(0, 400) == 0).float().mean().item()
    # 3,200 coins: 5 standard errors, false alarm 6e-7.
    assert abs(share - 0.6) < 5 * (0.24 / 3200) ** 0.5
    with torch.no_grad():
        student = Categorical(logits=task.student.network(torch.full((1, L), MASK))[0])
    expected = kl_divergence(Categorical(logits=law.expand(L, 5)), student).mean().item()
    assert task.kl_at_start().item() == pytest.approx(expected, rel=1e-5)
    check_numbers(task.step(0))


# Who learns, and when


STUDENTS = {"loss", "policy_loss", "kl", "entropy", "grad_norm"}


def test_the_student_waits_during_warm_up():
    task = task_of({"discriminator": {"warmup": 2}})
    before = weights(task.student.network)
    for step in range(2):
        numbers = task.step(step)
        check_numbers(numbers)
        assert numbers["student_waits"].item() == 1
        assert not moved(before, task.student.network)
        assert task.describe(step, 1.0, 1)["lr"] == 0
    assert all(torch.equal(v, before[n]) for n, v in task.updater.ema.shadow.items())
    after = task.step(2)
    assert after.keys() - numbers.keys() == STUDENTS, "of no meaning while the student waits"
    assert after["student_waits"].item() == 0
    assert moved(before, task.student.network) == before.keys()
    assert task.describe(2, 1.0, 1)["lr"] == 1e-3


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
    task = task_of({"discriminator": {"saturation": 0.9}})
    seen = []
    for accuracy in [1.0] * 40 + [0.5] * 6 + [1.0] * 50:
        seen.append(task._is_saturated())
        task.sharpness.add(accuracy)
    assert not any(seen[:31]), "a few good ones are not enough: 1 - 0.95 ** n / 2 is 0.9 at 31"
    assert all(seen[32:41]), "before it is seen, a bad batch changes nothing"
    assert not any(seen[43:47])
    assert seen[-1], "once the bad ones are forgotten"


@pytest.mark.parametrize("blocks", [0, 1, 2, None])
def test_frozen_parts_of_the_discriminator_never_move(blocks):
    task = task_of({"discriminator": {"trainable_blocks": blocks}})
    before = weights(task.critic.network)
    for step in range(3):
        task.step(step)
    free = {None: [""], 0: ["output_layer."], 1: ["output_layer.", "blocks.1."]}
    free[2] = ["output_layer.", "blocks."]
    expected = {n for n in before if n.startswith(tuple(free[blocks]))}
    assert moved(before, task.critic.network) == expected


def test_the_teacher_never_moves():
    teacher = small_network(0)
    before = weights(teacher)
    run({}, steps=2, teacher=teacher)
    assert not moved(before, teacher)


def test_passes_leave_the_networks_in_evaluation_mode():
    task = run({}, steps=1)
    assert not any(module.training for n in student_and_critic(task) for module in n.modules())


# Parts and seeds

STEADY = {"optim": {"lr": 1e-3, "eps": 1e-3}, "discriminator": {"trainable_blocks": None}}
"""A large eps: AdamW does not turn the rounding of a tiny gradient into a step of full size."""


@pytest.mark.parametrize(
    ("changes", "micro_batch"),
    [
        ({}, 2),
        ({}, 5),
        ({"didi": {"grouping": "tau"}}, 4),
        ({"didi": STATE | {"group_size": 2}}, 4),
        ({"didi": {"rollout_steps": 2, "kl": "jeffreys"}}, 7),
        (PROMPT, 8),
        ({"discriminator": {"positions": "masked", "trainable_blocks": None, "steps": 2}}, 8),
    ],
    ids=["2", "5", "tau", "state", "rollout", "prompts", "masked"],
)
def test_the_size_of_parts_changes_nothing(changes, micro_batch):
    """Weights of both networks after 2 steps, to 1e-6; the student moved 100 times as far.

    The head's power iterations count updates, not passes: its singular vectors are the same too.
    """
    changes = STEADY | changes
    options = {"data": Stream()} if "prompt" in changes else {}
    whole = run(changes, **options)
    parts = run(changes | {"train": {"micro_batch": micro_batch}}, **options)
    assert len(parts.parts()) > 1
    difference = largest_difference(student_and_critic(whole), student_and_critic(parts))
    assert difference < 1e-6
    assert largest_difference([whole.student.network], [small_network(1)]) > 1e-4
    state, other = (task.critic.network.state_dict() for task in (whole, parts))
    for name in state:
        torch.testing.assert_close(state[name], other[name], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("didi", "micro_batch"), [({}, 1), (STATE, 4)], ids=["one text", "one state"]
)
def test_a_part_may_have_a_single_state(didi, micro_batch):
    """One text, or one group at one z_τ: its teacher is asked at z_τ, not where all is masked."""
    changes = STEADY | {"didi": didi | {"kl_weight": 0.5}}
    whole = task_of(changes)
    parts = task_of(changes | {"train": {"micro_batch": micro_batch}})
    numbers = [task.step(0)["kl"].item() for task in (whole, parts)]
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-5)


def test_the_same_seed_gives_the_same_bits_and_another_does_not():
    first, again, other = (run({"train": {"seed": seed}}) for seed in (3, 3, 4))
    for one, another in zip(student_and_critic(first), student_and_critic(again), strict=True):
        assert not moved(weights(one), another)
    assert moved(weights(first.student.network), other.student.network)
    assert moved(weights(first.critic.network), other.critic.network)


def test_a_checkpoint_holds_all_that_changes():
    """A fresh task with the tensors of another goes on with the same bits."""
    first = run({}, steps=2)
    second = task_of({})
    saved = {name: tensor.clone() for name, tensor in first.tensors().items()}
    second.prepare_to_load()
    assert second.tensors().keys() == saved.keys()
    with torch.no_grad():
        for name, tensor in second.tensors().items():
            tensor.copy_(saved[name])
    one, other = first.step(2), second.step(2)
    assert {n: v.item() for n, v in one.items()} == {n: v.item() for n, v in other.items()}
    for name, tensor in second.tensors().items():
        assert torch.equal(tensor, first.tensors()[name]), name


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


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"didi": {"group_sise": 4}},
            "`didi.group_sise` is not a setting. Did you mean `group_size`?",
        ),
        ({"discriminatr": {}}, "`discriminatr` is not a setting. Did you mean `discriminator`?"),
        ({"didi": {"coupled_times": True}}, "Did you mean `coupled_time`?"),
        ({"didi": {"grouping": "group"}}, "choose one of batch, tau, state"),
        ({"method": "dido"}, "choose one of didi, token-matching"),
    ],
)
def test_a_typo_is_an_error_that_names_what_was_meant(values, message):
    assert message in refused(values)


def test_more_trainable_blocks_than_there_are_is_refused():
    with pytest.raises(UserError, match="trainable_blocks is 3, but the teacher has 2 blocks"):
        task_of({"discriminator": {"trainable_blocks": 3}})


@pytest.mark.parametrize("prompt", [8, 9])
def test_a_prompt_that_leaves_nothing_to_write_is_refused(prompt):
    with pytest.raises(UserError, match=f"prompt is {prompt}, but texts have 8 tokens"):
        task_of(PROMPT | {"prompt": prompt}, data=Stream())


def test_data_longer_than_the_teacher_reads_is_refused():
    with pytest.raises(UserError, match="rows of 9 tokens, but the teacher reads at most 8"):
        task_of(PROMPT, data=Stream(length=9))


def test_texts_are_as_long_as_the_data():
    task = task_of(PROMPT, data=Stream(length=6))
    check_numbers(task.step(0))
    assert task.compare(0, 0, torch.arange(BATCH)).rollout.x.shape == (BATCH, 6)


def test_the_group_of_a_recipe():
    """Texts that must stay together: none in the paper's batch, a group else."""
    assert settings("didi", {}).group_size == 1
    assert settings("didi", {"didi": {"grouping": "tau"}}).group_size == 4
    assert settings("didi", PROMPT).group_size == 4


@pytest.mark.parametrize("blocks", [0, 1, None])
def test_rewards_after_an_update_are_those_of_whole_passes(blocks):
    """What frozen blocks made of the texts is kept over the update; without any, nothing is."""
    task = task_of({"discriminator": {"trainable_blocks": blocks}, "train": {"micro_batch": 8}})
    parts = [task.compare(0, 0, indices) for indices in task.parts()]
    before = weights(task.critic.network)
    taught = task.teach_discriminator(0, parts)
    assert moved(before, task.critic.network)
    assert taught.accuracy == taught.numbers["disc_accuracy"].item()
    assert taught.sharpness == taught.numbers["disc_sharpness"].item()
    for part, state in zip(parts, taught.states, strict=True):
        assert (state is None) == (blocks is None)
        torch.testing.assert_close(task.reward(part, state), task.reward(part))


def test_the_log_follows_the_teacher_at_the_start_where_an_entry_follows():
    task = task_of({"train": {"log_every": 2, "steps": 3}})
    assert ["kl_start" in task.step(step) for step in range(3)] == [False, True, True]


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
    assert task_of(given, references=Stream().rows).train.compile == expected
