"""Mixture steps: what they learn from, the gradient of the mixture, and that a code is used."""

import math

import pytest
import torch
from tests.sampling.enumeration import FALSE_ALARM, p_value

from didi_instruct.distillation.mixture import add_masks
from didi_instruct.errors import UserError
from didi_instruct.process.masking import interleaved_turns, with_code

from .small import (
    PROMPT,
    Stream,
    asked_of,
    check,
    fits_path_law,
    gradient_norm,
    maker,
    run,
    small_network,
    twin,
)

CODES, MASK = 3, 5


task_of = maker("mixture")


def step_of(task, step=0):
    """An iteration: its numbers, and states, times, reveals (B, ...) and codes (B, M) it learns."""
    asked = asked_of(task.distillation.student, "log_probs")
    numbers, batch = task.step(step), task.config.train.batch_size
    coded, t, revealed = asked[-1]  # the other passes are those of the posterior
    codes = (coded - MASK).amax(1).view(batch, -1)
    each = codes.shape[1]
    z = torch.where(coded >= MASK, MASK, coded)
    assert torch.equal(coded, with_code(z, MASK, codes.flatten()))
    return numbers, z[::each], t[::each], revealed[::each], codes


# Masks


def test_masks_that_are_alike_leave_the_law_of_the_teacher():
    """The student begins as the teacher: all codes have its law, but for their noise."""
    teacher = small_network()
    student = add_masks(teacher, CODES, seed=0, spread=0.0).eval()
    assert (student.config.num_tokens, student.config.mask_id) == (MASK, MASK)
    z, sigma = torch.tensor([[0, 5, 2, 5, 5, 1, 5, 4]]), torch.tensor([0.7])
    for code in range(CODES):
        coded = torch.where(z == MASK, z + code, z)
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


@pytest.mark.parametrize("prompt", [False, True])
def test_texts_are_masked_as_before_a_step_and_the_step_reveals_its_share(prompt):
    """A random step of a random budget; chi-square over times and counts of both."""
    data, changes = Stream(), {"train": {"batch_size": 4000}} | (PROMPT if prompt else {})
    _, z, t, revealed, _ = step_of(task_of({}, changes, data=data, references=data.rows))
    where, x = torch.arange(8) >= 3 * prompt, data.rows(0, 4000)
    assert torch.equal(z, torch.where(z == MASK, MASK, x))
    assert not (z == MASK)[:, ~where].any()
    assert fits_path_law(t, (z == MASK)[:, where], revealed[:, where], (2, 4)) > FALSE_ALARM


def test_streams_reveal_in_their_turn():
    """States and steps are those of the plan; every text is before a step of its budget."""
    task = task_of({"budgets": [4, 8]}, {"order": "streams", "train": {"batch_size": 64}})
    _, states, _, reveals, _ = step_of(task)
    plans = [interleaved_turns(torch.ones(1, 8, dtype=torch.bool), n)[0] for n in (4, 8)]
    known = {(*(plan >= n).tolist(), *(plan == n).tolist())
             for plan in plans for n in range(int(plan.max()) + 1)}  # fmt: skip
    found = {(*(z == MASK).tolist(), *revealed.tolist())
             for z, revealed in zip(states, reveals, strict=True)}  # fmt: skip
    assert found <= known
    assert len(found) > 6


def test_a_share_of_the_texts_may_keep_the_random_order():
    streams = {"order": "streams", "train": {"batch_size": 64}}
    found = {s: step_of(task_of({"random": s}, streams))[1:4] for s in (0.0, 0.5, 1.0)}
    plain = step_of(task_of({}, {"train": {"batch_size": 64}}))[1:4]
    assert all(torch.equal(one, other) for one, other in zip(found[1.0], plain, strict=True))
    kept = (found[0.5][0] == found[0.0][0]).all(1)
    assert 10 < int(kept.sum()) < 54
    for each, part in enumerate(found[0.5]):
        assert torch.equal(part[~kept], plain[each][~kept])


# The gradient


@pytest.mark.parametrize("codes", [1, CODES])
@pytest.mark.parametrize("timed", [False, True], ids=["constant", "timed"])
def test_an_iteration_by_hand(codes, timed):
    """Of the drawn codes' negative log-probability per revealed position; numbers of the mixture.

    The gradient of the log of a mixture is that of its parts weighted by their posterior, which the
    codes follow (below).
    """
    student = add_masks(small_network(1, time_conditioning=timed), codes, seed=0, spread=1.0)
    options = {"references": Stream().rows, "student": student.eval()}
    task = task_of({"codes": codes}, teacher=small_network(0, time_conditioning=timed), **options)
    network, schedule = twin(student), task.distillation.schedule
    numbers, z, t, revealed, drawn = step_of(task)
    x, count = Stream().rows(0, 12), revealed.sum()
    each = []
    for code in range(codes):
        log_p = network(with_code(z, MASK, code), schedule.sigma(t)).log_softmax(-1)
        each.append((log_p.gather(-1, x[..., None]).squeeze(-1) * revealed).sum(1))
    each = torch.stack(each, 1)
    loss = -each.gather(1, drawn).mean(1).sum() / count
    assert drawn.shape == (12, 2 if codes > 1 else 1)
    check(numbers, grad_norm=gradient_norm(loss, network))
    if codes == 1:
        check(numbers, rel=1e-5, loss=loss)
        return
    posterior = each.softmax(1)
    information = (posterior * (posterior * codes).log()).sum(1).mean()
    mixture = -(each.logsumexp(1) - math.log(codes)).sum() / count
    check(numbers, loss=mixture, component_loss=loss, code_information=information)
    assert posterior.max() < 0.999, "the codes differ, but none is certain"


def test_codes_are_drawn_from_their_posterior():
    """Chi-square of 8,000 draws of one text from all masks, where what is revealed is all."""
    student = add_masks(small_network(1), CODES, seed=0, spread=0.7).eval()
    x = torch.tensor([[0, 4, 1, 3, 2, 2, 0, 1]])
    with torch.no_grad():
        log_p = student(torch.stack([torch.full((8,), MASK + c) for c in range(CODES)]))
    each = log_p.log_softmax(-1).gather(-1, x[..., None].expand(CODES, 8, 1)).sum((1, 2))
    posterior = each.double().softmax(0)
    changes = {"train": {"batch_size": 4000}}
    task = task_of({"budgets": [1]}, changes, student=student,
                   references=lambda start, count: x.expand(count, -1))  # fmt: skip
    codes = step_of(task)[-1]
    assert codes.shape == (4000, 2)
    assert p_value(codes.flatten(), posterior) > FALSE_ALARM
    assert posterior.max() < 0.9


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
    losses = [8 * numbers["loss"].item() for numbers in run(task, 300)]
    assert losses[0] > 4
    assert losses[-1] == pytest.approx(math.log(2), abs=0.1)
