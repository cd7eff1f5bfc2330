"""Mixture steps: what they learn from, the gradient of the mixture, and that a code is used."""

import math

import pytest
import torch
from tests.sampling.enumeration import FALSE_ALARM, p_value

from didi_instruct.distillation.mixture import MixtureTask, add_masks
from didi_instruct.errors import UserError
from didi_instruct.process.masking import interleaved_turns, with_code

from .small import Stream, make_task, moved, small_network, weights

CODES = 3


def task_of(mixture=None, changes=None, **options):
    settings = {"codes": CODES, "budgets": [2, 4], "learning": 2} | (mixture or {})
    return make_task(MixtureTask, "mixture", {"mixture": settings} | (changes or {}), **options)


def gradients(task):
    return {n: p.grad.clone() for n, p in task.student.network.named_parameters()}


# Masks


def test_masks_that_are_alike_leave_the_law_of_the_teacher():
    """The student begins as the teacher: all codes have its law, but for their noise."""
    teacher = small_network()
    student = add_masks(teacher, CODES, seed=0, spread=0.0).eval()
    assert (student.config.num_tokens, student.config.mask_id) == (5, 5)
    z = torch.tensor([[0, 5, 2, 5, 5, 1, 5, 4]])
    sigma = torch.tensor([0.7])
    for code in range(CODES):
        coded = torch.where(z == 5, z + code, z)
        assert torch.equal(student(coded, sigma), teacher(z, sigma))


def test_the_spread_is_measured_in_deviations_of_the_embeddings():
    teacher = small_network(hidden=64)
    old = teacher.vocab_embed.embedding
    new = add_masks(teacher, 200, seed=0, spread=3.0).vocab_embed.embedding[6:]
    assert (new - old[-1]).std().item() == pytest.approx(3 * old.std().item(), rel=0.05)


def test_a_student_keeps_the_masks_it_has():
    student = add_masks(small_network(1), CODES, seed=0, spread=1.0)
    assert task_of(student=student).student.network is student
    with pytest.raises(UserError, match="mixture.codes is 2, but the student has 3 masks"):
        task_of({"codes": 2}, student=student)


# What it learns from


@pytest.mark.parametrize("prompt", [0, 3])
def test_texts_are_masked_as_before_a_step_and_the_step_reveals_the_rest(prompt):
    """By budget: as much is visible as the time says, and the last step reveals all."""
    data = Stream()
    changes = {"prompt": prompt, "data": {"source": "stream"}, "train": {"batch_size": 2000}}
    task = task_of({}, changes, data=data, references=data.rows)
    part = task.part(0, torch.arange(2000))
    assert torch.equal(part.x, data.rows(0, 2000))
    hidden = part.z == 5
    assert torch.equal(part.z[~hidden], part.x[~hidden])
    assert not (part.revealed & ~hidden).any()
    assert not hidden[:, :prompt].any()
    seen = set()
    for t in part.t.unique().tolist():
        here = part.t == t
        share = hidden[here, prompt:].double().mean().item()
        count = here.sum() * (8 - prompt)
        assert abs(share - t) < 5 * math.sqrt(0.25 / count)
        seen.add(round(t, 6))
        for budget in (2, 4):
            if (t * budget) % 1 == 0:  # steps of both budgets start at times 1 and 1/2
                seen.add((budget, t))
    assert {s for s in seen if isinstance(s, float)} == {1.0, 0.75, 0.5, 0.25}
    last = part.t == 0.25
    assert torch.equal(part.revealed[last], hidden[last])


def test_streams_reveal_in_their_turn():
    """States and steps are those of the plan; every text is before a step of its budget."""
    task = task_of({"budgets": [4, 8]}, {"order": "streams", "train": {"batch_size": 64}})
    part = task.part(0, torch.arange(64))
    plans = [interleaved_turns(torch.ones(1, task.length, dtype=torch.bool), n)[0] for n in (4, 8)]
    for z, revealed in zip(part.z, part.revealed, strict=True):
        masked = z == task.mask_id
        fits = [
            torch.equal(masked, plan >= n) and torch.equal(revealed, plan == n)
            for plan in plans
            for n in range(int(plan.max()) + 1)
        ]
        assert any(fits)


def test_a_share_of_the_texts_may_keep_the_random_order():
    streams = {"order": "streams", "train": {"batch_size": 64}}
    parts = {
        share: task_of({"random": share}, streams).part(0, torch.arange(64))
        for share in (0.0, 0.5, 1.0)
    }
    plain = task_of({}, {"train": {"batch_size": 64}}).part(0, torch.arange(64))
    assert torch.equal(parts[1.0].z, plain.z)
    assert torch.equal(parts[1.0].revealed, plain.revealed)
    kept = (parts[0.5].z == parts[0.0].z).all(1)
    assert 10 < int(kept.sum()) < 54
    assert torch.equal(parts[0.5].z[~kept], plain.z[~kept])


def test_every_text_is_read_once():
    data = Stream()
    task = task_of({}, {"train": {"micro_batch": 4}}, references=data.rows)
    for step in range(2):
        task.step(step)
    assert [i for asked in data.asked for i in asked] == list(range(2 * 12))


# The gradient


def test_the_expected_gradient_is_that_of_the_mixture():
    """Sum over codes of posterior times the loss's gradient = gradient of the log of the mixture.

    One text, so that the posterior is one number per code.
    """
    data = Stream()
    task = task_of({}, {"train": {"batch_size": 1}}, references=data.rows)
    task.student.network.double()
    part = next(p for p in (task.part(step, torch.arange(1)) for step in range(9)) if p.t < 1)
    count = part.revealed.sum().double()
    posterior = task.log_likelihoods(part).softmax(1)[0]
    assert posterior.max() < 0.99, "the codes differ, but none is certain"
    expected = {}
    for code in range(CODES):
        task.updater.optimizer.zero_grad(set_to_none=True)
        task._loss(part, torch.tensor([[code]]), count, sync=True)
        for name, value in gradients(task).items():
            expected[name] = expected.get(name, 0) + posterior[code] * value
    task.updater.optimizer.zero_grad(set_to_none=True)
    network, sigma = task.student.network, task.schedule.sigma(part.t)
    each = []
    for code in range(CODES):
        log_p = network(with_code(part.z, task.mask_id, code), sigma).log_softmax(-1)
        own = log_p.gather(-1, part.x[..., None]).squeeze(-1)
        each.append((own * part.revealed).sum())
    (-torch.stack(each).logsumexp(0) / count).backward()
    for name, value in gradients(task).items():
        assert torch.allclose(value, expected[name], atol=1e-6), name


def test_codes_are_drawn_from_their_posterior():
    """Chi-square of 20,000 draws from one posterior."""
    task = task_of({"learning": 1}, {"train": {"batch_size": 20_000}})
    each = torch.tensor([[0.3, -1.2, 0.9]], dtype=torch.float64).expand(20_000, -1)
    codes = task._posterior_codes(each, task.noise(0, 0, torch.arange(20_000)))
    assert p_value(codes.flatten(), each[0].softmax(0)) > FALSE_ALARM


def test_passes_share_a_batch_as_they_like():
    """Numbers and gradients do not depend on how many texts fit into a pass."""
    data = Stream()
    tasks = [task_of({}, {"train": {"micro_batch": n}}, references=data.rows) for n in (12, 4)]
    one, other = (task.step(0) for task in tasks)
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].item() == pytest.approx(other[name].item(), rel=1e-4), name
    assert "path_entropy" not in one, "nothing is drawn, so nothing can collapse"


def test_all_of_the_student_learns_and_nothing_else():
    task = task_of()
    before, teacher = weights(task.student.network), weights(task.teacher_host.network)
    task.step(0)
    assert moved(before, task.student.network) == before.keys()
    assert not moved(teacher, task.teacher_host.network)
    assert task.tensors().keys() == {f"student/{n}" for n in task.updater.tensors()}


# That it works


def test_two_codes_learn_what_independent_tokens_cannot_say():
    """Texts are 00000000 or 11111111: with two codes the truth, log 2 nats, is found within 0.1.

    One step of independent tokens costs 8 log 2.
    """

    def texts(start, count):
        coin = (torch.arange(start, start + count) * 2654435761 >> 7) & 1
        return coin[:, None].expand(-1, 8).contiguous()

    changes = {
        "train": {"steps": 300, "batch_size": 32, "ema": 0.0},
        "optim": {"lr": 1e-2, "schedule": "linear", "warmup": 10},
    }
    task = task_of({"codes": 2, "budgets": [1], "spread": 1.0}, changes, references=texts)
    losses = [8 * task.step(step)["loss"].item() for step in range(300)]
    assert losses[0] > 4
    assert losses[-1] == pytest.approx(math.log(2), abs=0.1)


def test_other_methods_do_not_know_several_masks():
    from didi_instruct.distillation.didi import DidiTask

    student = add_masks(small_network(1), CODES, seed=0, spread=1.0)
    with pytest.raises(UserError, match="has 3 masks, which didi does not know"):
        make_task(DidiTask, "didi", {}, student=student)
