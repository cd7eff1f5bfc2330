"""Terms of a loss against torch's own distributions, values and gradients."""

import pytest
import torch
from torch.distributions import Categorical, kl_divergence

from didi_instruct.distillation.terms import terms
from didi_instruct.models.layers import NEVER

KINDS = ["forward", "backward", "jeffreys"]


def logits_of(seed, rows=6, num=7):
    return torch.randn(rows, num, generator=torch.Generator().manual_seed(seed)).double()


def expected(kind, student, teacher):
    p, q = Categorical(logits=teacher), Categorical(logits=student)
    sides = kl_divergence(p, q), kl_divergence(q, p)
    return {"forward": sides[0], "backward": sides[1], "jeffreys": sum(sides) / 2}[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients(kind):
    student, teacher = logits_of(0).requires_grad_(), logits_of(1)
    log_sum, entropy, distance = terms(student, teacher + 5, kind)
    torch.testing.assert_close(log_sum, student.logsumexp(-1))
    torch.testing.assert_close(entropy, Categorical(logits=student).entropy())
    torch.testing.assert_close(distance, expected(kind, student, teacher))
    found = torch.autograd.grad((entropy + 2 * distance).sum(), student)
    own = Categorical(logits=student).entropy() + 2 * expected(kind, student, teacher)
    for one, other in zip(found, torch.autograd.grad(own.sum(), student), strict=True):
        torch.testing.assert_close(one, other)


def test_without_a_teacher_there_is_no_distance():
    log_sum, entropy, distance = terms(logits_of(0))
    assert distance is None
    torch.testing.assert_close(entropy, Categorical(logits=logits_of(0)).entropy())
    torch.testing.assert_close(log_sum, logits_of(0).logsumexp(-1))


@pytest.mark.parametrize("kind", KINDS)
def test_columns_of_probability_0_make_no_difference(kind):
    student, teacher = (logits_of(seed).requires_grad_() for seed in (0, 1))
    wide = [torch.nn.functional.pad(x, (0, 3), value=NEVER) for x in (student, teacher)]
    for one, other in zip(terms(*wide, kind), terms(student, teacher, kind), strict=True):
        torch.testing.assert_close(one, other)
    one, other = (
        torch.autograd.grad(sum(t.sum() for t in terms(*pair, kind)), student)[0]
        for pair in (wide, (student, teacher))
    )
    torch.testing.assert_close(one, other)
