"""What a loss needs of laws over the vocabulary, in one pass over the logits where torch compiles.

Written operation by operation, each of them would read and write rows of the size of the
vocabulary: on a GPU that costs more than the trunk. The gradient has a closed form, which is one
more pass; what it has at the drawn tokens is put there in full precision, where a sum of rounded
tensors would cancel to noise for a token that is nearly certain.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from didi_instruct.models.compile import Fused, fuses, fusing
from didi_instruct.models.layers import upcast
from didi_instruct.process.divergences import divergence, entropy, kl


class LossTerms(NamedTuple):
    """Numbers of rows of logits, (R,) each."""

    entropy: Tensor
    distance: Tensor
    """Divergence from the teacher; 0 without one."""
    drawn: Tensor
    """(N,) float64, log-probabilities of the drawn tokens."""


def terms(
    logits: Tensor,
    teacher: Tensor | None = None,
    kind: str = "forward",
    drawn: tuple[Tensor, Tensor] | None = None,
) -> LossTerms:
    """Entropy of each row, its divergence from the teacher's, log-probabilities of drawn tokens.

    Logits (R, V) of both need not be normalised; the teacher has no gradient. `drawn` are rows and
    tokens, (N,) both; by default there are none.
    """
    none = torch.zeros(0, dtype=torch.long, device=logits.device)
    row, token = drawn or (none, none)
    found: Any = _Terms.apply(logits, teacher, kind, row, token)  # type: ignore[no-untyped-call]
    return LossTerms(*found)


class _Terms(Function):
    """Values, and the closed form of their gradient."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, teacher: Tensor | None, kind: str, row: Tensor, token: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        log_sum, own, beside, distance, backward_kl = _fused_values(logits, teacher, kind)
        ctx.save_for_backward(logits, teacher, log_sum, own, beside, backward_kl, row, token)
        ctx.kind, ctx.fuses = kind, fuses(logits)
        drawn = logits[row, token].double() - log_sum[row].double()
        return own, distance, drawn

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        logits, teacher, *rows, row, token = ctx.saved_tensors
        g_entropy, g_distance, g_drawn = gradients
        given = g_drawn.to(rows[0].dtype)
        # Each drawn token takes its part from all tokens of the row.
        g_sum = torch.zeros_like(rows[0]).index_add(0, row, -given)
        per_row = (*rows, g_sum, g_entropy, g_distance)
        with fusing(ctx.fuses):  # gradients have a thread of their own, which was not told
            slopes = _fused_slopes(logits, teacher, ctx.kind, *per_row)
        if len(row):
            beside = None if teacher is None else teacher[row, token]
            own = _slopes(logits[row, token], beside, ctx.kind, *(x[row] for x in per_row))
            exact = own + _of_equals(row * logits.shape[1] + token, given)
            slopes.index_put_((row, token), exact.to(slopes.dtype))
        return slopes, None, None, None, None


def _values(
    logits: Tensor, teacher: Tensor | None, kind: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Log-sum of exp, entropy; log-sum of the teacher, divergence from it, KL(own ‖ teacher).

    The last one is 0 where nothing needs it.
    """
    x = upcast(logits)
    log_sum = x.logsumexp(-1)
    log_p = x - log_sum[:, None]
    own = entropy(log_p)
    if teacher is None:
        nothing = torch.zeros_like(own)
        return log_sum, own, nothing, nothing.clone(), nothing.clone()
    y = upcast(teacher)
    beside = y.logsumexp(-1)
    log_q = y - beside[:, None]
    distance = divergence(kind, log_q, log_p)
    # What the gradient needs of it.
    backward_kl = torch.zeros_like(own) if kind == "forward" else kl(log_p, log_q)
    return log_sum, own, beside, distance, backward_kl


def _slopes(
    logits: Tensor,
    teacher: Tensor | None,
    kind: str,
    log_sum: Tensor,
    own: Tensor,
    beside: Tensor,
    backward_kl: Tensor,
    g_sum: Tensor,
    g_entropy: Tensor,
    g_distance: Tensor,
) -> Tensor:
    """Gradient with respect to logits: of rows (R, V) in their type, of single ones (N,) in full.

    Of the log-sum p, of the entropy -p (log p + H), of KL(q ‖ p) p - q, of KL(p ‖ q)
    p (log p - log q - KL(p ‖ q)).
    """
    whole = logits.ndim > 1
    if whole:
        log_sum, own, beside, backward_kl, g_sum, g_entropy, g_distance = (
            value[:, None]
            for value in (log_sum, own, beside, backward_kl, g_sum, g_entropy, g_distance)
        )
    log_p = upcast(logits) - log_sum
    p = log_p.exp()
    slopes = p * (g_sum - g_entropy * (log_p + own))
    if teacher is not None:
        log_q = upcast(teacher) - beside
        if kind != "forward":
            share = 1.0 if kind == "backward" else 0.5
            slopes = slopes + share * g_distance * p * (log_p - log_q - backward_kl)
        if kind != "backward":
            share = 1.0 if kind == "forward" else 0.5
            slopes = slopes + share * g_distance * (p - log_q.exp())
    return slopes.to(logits.dtype) if whole else slopes


def _of_equals(key: Tensor, values: Tensor) -> Tensor:
    """For each value the sum of all that have its key, (N,) all: no wait for a GPU."""
    ranked, order = key.sort()
    first = torch.ones_like(ranked)
    first[1:] = ranked.diff() != 0
    group = first.cumsum(0) - 1
    sums = torch.zeros_like(values).index_add(0, group, values[order])
    return torch.empty_like(values).index_copy(0, order, sums[group])


_fused_values: Fused[..., tuple[Tensor, Tensor, Tensor, Tensor, Tensor]] = Fused(_values, "A loss")
_fused_slopes: Fused[..., Tensor] = Fused(_slopes, "A gradient")
