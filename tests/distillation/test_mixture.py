"""Mixture steps: what they learn from, the gradient of the mixture, and that a code is used."""

import math

import pytest
import torch
from tests.sampling.enumeration import FALSE_ALARM, p_value

from didi_instruct.distillation.mixture import (
    add_masks,
    code_log_probs,
    component_loss,
    draw_codes,
    make_part,
)
from didi_instruct.errors import UserError
from didi_instruct.process.masking import interleaved_turns, with_code

from .small import Stream, batch_of, make_task, small_network

CODES = 3


def task_of(mixture=None, changes=None, **options):
    return make_task("mixture", {"mixture": mixture or {}} | (changes or {}), **options)


def part_of(task, step=0):
    return make_part(task.distillation, batch_of(task, step))


def gradients(network):
    return {name: p.grad.clone() for name, p in network.named_parameters()}


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
    assert task_of(student=student).distillation.student.network is student
    with pytest.raises(UserError, match="mixture.codes is 2, but the student has 3 masks"):
        task_of({"codes": 2}, student=student)


# What it learns from


@pytest.mark.parametrize("prompt", [0, 3])
def test_texts_are_masked_as_before_a_step_and_the_step_reveals_the_rest(prompt):
    """By budget: as much is visible as the time says, and the last step reveals all."""
    data = Stream()
    changes = {"prompt": prompt, "data": {"source": "stream"}, "train": {"batch_size": 2000}}
    task = task_of({}, changes, data=data, references=data.rows)
    part = part_of(task)
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
    part = part_of(task)
    everywhere = torch.ones(1, task.distillation.length, dtype=torch.bool)
    plans = [interleaved_turns(everywhere, n)[0] for n in (4, 8)]
    for z, revealed in zip(part.z, part.revealed, strict=True):
        masked = z == 5
        fits = [
            torch.equal(masked, plan >= n) and torch.equal(revealed, plan == n)
            for plan in plans
            for n in range(int(plan.max()) + 1)
        ]
        assert any(fits)


def test_a_share_of_the_texts_may_keep_the_random_order():
    streams = {"order": "streams", "train": {"batch_size": 64}}
    parts = {share: part_of(task_of({"random": share}, streams)) for share in (0.0, 0.5, 1.0)}
    plain = part_of(task_of({}, {"train": {"batch_size": 64}}))
    assert torch.equal(parts[1.0].z, plain.z)
    assert torch.equal(parts[1.0].revealed, plain.revealed)
    kept = (parts[0.5].z == parts[0.0].z).all(1)
    assert 10 < int(kept.sum()) < 54
    assert torch.equal(parts[0.5].z[~kept], plain.z[~kept])


# The gradient


def test_the_expected_gradient_is_that_of_the_mixture():
    """Sum over codes of posterior times the loss's gradient = gradient of the log of the mixture.

    One text, so that the posterior is one number per code.
    """
    task = task_of({}, {"train": {"batch_size": 1}}, references=Stream().rows)
    d, network = task.distillation, task.distillation.student.network.double()
    part = next(p for p in (part_of(task, step) for step in range(9)) if p.t < 1)
    count = part.revealed.sum().double()
    posterior = code_log_probs(d, part).softmax(1)[0]
    assert posterior.max() < 0.99, "the codes differ, but none is certain"
    expected = {}
    for code in range(CODES):
        d.student.drop_gradients()
        component_loss(d, part, torch.tensor([[code]]), count, sync=True).backward()
        for name, value in gradients(network).items():
            expected[name] = expected.get(name, 0) + posterior[code] * value
    d.student.drop_gradients()
    each = []
    for code in range(CODES):
        log_p = network(with_code(part.z, 5, code), d.schedule.sigma(part.t)).log_softmax(-1)
        own = log_p.gather(-1, part.x[..., None]).squeeze(-1)
        each.append((own * part.revealed).sum())
    (-torch.stack(each).logsumexp(0) / count).backward()
    for name, value in gradients(network).items():
        assert torch.allclose(value, expected[name], atol=1e-6), name


def test_codes_are_drawn_from_their_posterior():
    """Chi-square of 20,000 draws from one posterior."""
    task = task_of({}, {"train": {"batch_size": 20_000}})
    each = torch.tensor([[0.3, -1.2, 0.9]], dtype=torch.float64).expand(20_000, -1)
    codes = draw_codes(each, batch_of(task).noise, 1)
    assert p_value(codes.flatten(), each[0].softmax(0)) > FALSE_ALARM


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
