"""What a loss needs of laws over the vocabulary, in one pass over the logits where torch compiles.

Written operation by operation, each of them would read and write rows of the size of the
vocabulary: on a GPU that costs more than the trunk.
"""

from torch import Tensor

from didi_instruct.models.fused import Fused
from didi_instruct.models.precision import upcast
from didi_instruct.process.divergences import divergence, entropy


def _own(logits: Tensor) -> tuple[Tensor, Tensor]:
    x = upcast(logits)
    log_sum = x.logsumexp(-1)
    return log_sum, entropy(x - log_sum[:, None])


def _beside(logits: Tensor, teacher: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    x = upcast(logits)
    log_sum = x.logsumexp(-1)
    log_p = x - log_sum[:, None]
    return log_sum, entropy(log_p), divergence(kind, upcast(teacher).log_softmax(-1), log_p)


_fused_own: Fused[[Tensor], tuple[Tensor, Tensor]] = Fused(_own, "A loss")
_fused_beside: Fused[[Tensor, Tensor, str], tuple[Tensor, Tensor, Tensor]] = Fused(
    _beside, "A loss"
)


def terms(
    logits: Tensor, teacher: Tensor | None = None, kind: str = "forward"
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Log of the sum of exp(logits), entropy, and the divergence from the teacher: (R,) each.

    Logits (R, V) of both need not be normalised. Without a teacher there is no divergence.
    """
    if teacher is None:
        return *_fused_own(logits), None
    return _fused_beside(logits, teacher, kind)
