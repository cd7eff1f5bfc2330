"""Exact draws from a categorical law.

Float32 Gumbel noise truncates the tail and so fakes a lower temperature. Here one float64 uniform
per row picks the token by inverting the cumulative sum, exact to 2^-53.
"""

import math

import torch
from torch import Tensor

from didi_instruct.errors import UserError

GREEDY = 1e-8
"""Temperatures below it are 0: logits over them would not be numbers."""


def restrict(
    logits: Tensor, *, temperature: float = 1.0, top_p: float = 1.0, top_k: int | None = None
) -> Tensor:
    """Log-probabilities in float64 after temperature, then top-k, then top-p, renormalised.

    top_p keeps the smallest set of most probable tokens whose probability reaches top_p; at
    temperature 0 only the most probable token is left.

    Shapes: logits (..., V) -> (..., V).
    """
    if not 0 <= temperature < math.inf:
        raise UserError(f"temperature is {temperature}: use 0 (greedy) or more.")
    if not 0 < top_p <= 1:
        raise UserError(f"top_p is {top_p}: use more than 0, and at most 1.")
    if top_k is not None and top_k < 1:
        raise UserError(f"top_k is {top_k}: use 1 or more.")
    logits = logits.double()
    if temperature < GREEDY:
        best, place = logits.max(-1, keepdim=True)
        # `best - best` is 0, or NaN where the logits are: that must not pass for a choice.
        return torch.full_like(logits, -torch.inf).scatter_(-1, place, best - best)
    log_p = torch.log_softmax(logits / temperature, -1)
    if top_k is not None and top_k < log_p.shape[-1]:
        kept, place = log_p.topk(top_k, -1)
        log_p = torch.full_like(log_p, -torch.inf).scatter_(-1, place, kept).log_softmax(-1)
    if top_p < 1:
        ordered, index = log_p.sort(-1, descending=True)
        before = ordered.exp().cumsum(-1) - ordered.exp()
        kept = ordered.masked_fill(before >= top_p, -torch.inf)
        log_p = torch.empty_like(log_p).scatter_(-1, index, kept).log_softmax(-1)
    return log_p


def draw(log_p: Tensor, uniforms: Tensor) -> Tensor:
    """Draw one token per row by inverting the cumulative probabilities.

    Shapes: log_p (R, V) float64, or (1, V) for one law shared by all rows; uniforms (R,) float64 in
    [0, 1) -> (R,).
    """
    cumulative = log_p.exp().cumsum(-1)
    # `right`: the first token whose sum exceeds the target, so never one of probability 0.
    if len(log_p) == 1:
        target = uniforms * cumulative[0, -1]
        token = torch.searchsorted(cumulative[0], target, right=True)
    else:
        target = uniforms[:, None] * cumulative[:, -1:]
        token = torch.searchsorted(cumulative, target, right=True).squeeze(-1)
    return token.clamp(max=log_p.shape[-1] - 1)
