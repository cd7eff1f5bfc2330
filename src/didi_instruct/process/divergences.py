"""Divergences between categorical laws without zeros (softmaxes), row by row, in nats."""

from torch import Tensor


def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p ‖ q) = Σ p (log p - log q): (..., V), (..., V) -> (...)."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def entropy(log_p: Tensor) -> Tensor:
    """-Σ p log p: (..., V) -> (...)."""
    return -(log_p.exp() * log_p).sum(-1)


def divergence(kind: str, log_teacher: Tensor, log_student: Tensor) -> Tensor:
    """Distance of a student from its teacher: (..., V), (..., V) -> (...).

    forward: KL(teacher ‖ student); backward: KL(student ‖ teacher); jeffreys: their mean.
    """
    match kind:
        case "forward":
            return kl(log_teacher, log_student)
        case "backward":
            return kl(log_student, log_teacher)
        case "jeffreys":
            return (kl(log_teacher, log_student) + kl(log_student, log_teacher)) / 2
    raise ValueError(f"`{kind}` is not a divergence")
