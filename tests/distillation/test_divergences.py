import pytest
import torch
from torch.distributions import Categorical, kl_divergence

from didi_instruct.distillation.losses import divergence, entropy, kl


def logits(seed, rows=50, num=7):
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(rows, num, generator=generator, dtype=torch.float64)


P, Q = logits(0), logits(1)
LOG_P, LOG_Q = P.log_softmax(-1), Q.log_softmax(-1)


def test_kl_and_entropy_are_torchs():
    p, q = Categorical(logits=P), Categorical(logits=Q)
    torch.testing.assert_close(kl(LOG_P, LOG_Q), kl_divergence(p, q))
    torch.testing.assert_close(entropy(LOG_P), p.entropy())
    assert entropy(LOG_P.view(5, 10, 7)).shape == (5, 10)


@pytest.mark.parametrize("kind", ["forward", "backward", "jeffreys"])
def test_a_divergence_is_positive_and_zero_at_the_teacher(kind):
    assert (divergence(kind, LOG_P, LOG_Q) > 0).all()
    torch.testing.assert_close(
        divergence(kind, LOG_P, LOG_P), torch.zeros(50, dtype=torch.float64), rtol=0, atol=1e-15
    )


def test_the_three_kinds():
    """Forward is KL(teacher ‖ student), backward the other way round, jeffreys their mean."""
    teacher, student = Categorical(logits=P), Categorical(logits=Q)
    forward, backward = kl_divergence(teacher, student), kl_divergence(student, teacher)
    torch.testing.assert_close(divergence("forward", LOG_P, LOG_Q), forward)
    torch.testing.assert_close(divergence("backward", LOG_P, LOG_Q), backward)
    torch.testing.assert_close(divergence("jeffreys", LOG_P, LOG_Q), (forward + backward) / 2)
    torch.testing.assert_close(
        divergence("jeffreys", LOG_P, LOG_Q), divergence("jeffreys", LOG_Q, LOG_P)
    )
    assert not torch.allclose(forward, backward, rtol=0.1)


def test_gradients_with_respect_to_the_students_logits():
    """forward: q - p; backward: q (log q - log p - KL); entropy: -q (log q + H)."""
    p, q = LOG_P.exp(), LOG_Q.exp()

    def gradient(function):
        student = Q.clone().requires_grad_()
        return torch.autograd.grad(function(student.log_softmax(-1)).sum(), student)[0]

    forward = gradient(lambda log_q: divergence("forward", LOG_P, log_q))
    backward = gradient(lambda log_q: divergence("backward", LOG_P, log_q))
    torch.testing.assert_close(forward, q - p)
    torch.testing.assert_close(backward, q * (LOG_Q - LOG_P - kl(LOG_Q, LOG_P)[:, None]))
    jeffreys = gradient(lambda log_q: divergence("jeffreys", LOG_P, log_q))
    torch.testing.assert_close(jeffreys, (forward + backward) / 2)
    torch.testing.assert_close(gradient(entropy), -q * (LOG_Q + entropy(LOG_Q)[:, None]))


def test_another_name_is_refused():
    with pytest.raises(ValueError, match="`sideways` is not a divergence"):
        divergence("sideways", LOG_P, LOG_Q)
