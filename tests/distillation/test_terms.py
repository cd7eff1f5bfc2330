"""Terms of a loss against torch's own distributions, values and gradients."""

import threading

import pytest
import torch
from torch.distributions import Categorical, kl_divergence

from didi_instruct.distillation import losses as module
from didi_instruct.distillation.losses import terms
from didi_instruct.models import compile as fused
from didi_instruct.models.layers import NEVER

KINDS = ["forward", "backward", "jeffreys"]
DRAWN = torch.tensor([0, 3, 3, 3, 5, 0]), torch.tensor([6, 2, 2, 4, 0, 1])
"""Row 3 gives one token twice, and another one; rows 1, 2 and 4 give none."""


def logits_of(seed, rows=6, num=7):
    return torch.randn(rows, num, generator=torch.Generator().manual_seed(seed)).double()


def plainly(kind, student, teacher, drawn):
    """The same by torch's distributions, with their own gradients."""
    p, q = Categorical(logits=teacher), Categorical(logits=student)
    sides = kl_divergence(p, q), kl_divergence(q, p)
    distance = {"forward": sides[0], "backward": sides[1], "jeffreys": sum(sides) / 2}[kind]
    return q.entropy(), distance, student.log_softmax(-1)[drawn]


def weighted(found):
    """A loss in which every number counts in its own way."""
    weights = [torch.linspace(-1, k + 1, len(values)).double() for k, values in enumerate(found)]
    return sum((w * values).sum() for w, values in zip(weights, found, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients(kind):
    student, teacher = logits_of(0).requires_grad_(), logits_of(1)
    found, expected = (
        terms(student, teacher + 5, kind, DRAWN),
        plainly(kind, student, teacher, DRAWN),
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    one, other = (torch.autograd.grad(weighted(each), student)[0] for each in (found, expected))
    torch.testing.assert_close(one, other)


def test_without_a_teacher_there_is_no_distance():
    student = logits_of(0).requires_grad_()
    found = terms(student, drawn=DRAWN)
    assert not found.distance.any()
    torch.testing.assert_close(found.entropy, Categorical(logits=student).entropy())
    plain = Categorical(logits=student).entropy(), student.log_softmax(-1)[DRAWN]
    (one,) = torch.autograd.grad(weighted((found.entropy, found.drawn)), student)
    (other,) = torch.autograd.grad(weighted(plain), student)
    torch.testing.assert_close(one, other)


def test_nothing_drawn_is_no_number():
    student = logits_of(0).requires_grad_()
    found = terms(student, logits_of(1))
    assert found.drawn.shape == (0,)
    (one,) = torch.autograd.grad(found.distance.sum(), student)
    torch.testing.assert_close(one, student.softmax(-1) - logits_of(1).softmax(-1))


@pytest.mark.parametrize("kind", KINDS)
def test_columns_of_probability_0_make_no_difference(kind):
    student, teacher = (logits_of(seed).requires_grad_() for seed in (0, 1))
    wide = [torch.nn.functional.pad(x, (0, 3), value=NEVER) for x in (student, teacher)]
    found, expected = terms(*wide, kind, DRAWN), terms(student, teacher, kind, DRAWN)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    one, other = (torch.autograd.grad(weighted(each), student)[0] for each in (found, expected))
    torch.testing.assert_close(one, other)


@pytest.mark.parametrize("sure", [0.5, 0.99, 0.9999])
def test_a_token_that_is_nearly_certain_keeps_its_gradient_in_bfloat16(sure):
    """1 - p at the token, -p at the others: rounded once, so within 2^-8 of each number."""
    others = torch.full((1, 50), (1 - sure) / 50).log()
    logits = torch.cat([torch.tensor([[sure]]).log(), others], 1).bfloat16().requires_grad_()
    drawn = torch.tensor([0]), torch.tensor([0])
    (found,) = torch.autograd.grad(terms(logits, drawn=drawn).drawn.sum(), logits)
    exact = logits.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(exact.log_softmax(-1)[drawn].sum(), exact)
    torch.testing.assert_close(found.double(), expected, rtol=2**-7, atol=0)


def test_gradients_are_compiled_in_their_own_thread(monkeypatch):
    """Those of a GPU have one, which knows nothing of what was set in ours."""
    told = []

    def slopes(*given):
        told.append(fused._allowed.get())
        return module._slopes(*given)

    monkeypatch.setattr(module, "fuses", lambda tensor: True)
    monkeypatch.setattr(module, "_fused_slopes", slopes)
    logits = logits_of(0).requires_grad_()
    thread = threading.Thread(target=terms(logits).entropy.sum().backward)
    thread.start()
    thread.join()
    assert told == [True]
    assert logits.grad is not None
