"""The exact draw of `categorical` without float64 laws over the vocabulary.

Inverting a cumulative sum needs the sum up to one token, not up to all of them. So probabilities
are summed in float64 by chunks of the vocabulary, one number picks the chunk and then the token
within it. Compiled, the sums are one pass over the logits that writes almost nothing.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from didi_instruct.models.compile import Fused
from didi_instruct.sampling.chain import in_parts

CHUNK = 64
LOWEST = torch.finfo(torch.float64).min
"""What is below all logits, where -inf less itself would be no number."""

Sums = Callable[[Tensor], tuple[Tensor, Tensor]]


def chunk_sums(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Largest logit, and sums of exp(logit - largest) over chunks: (R, V) -> (R, 1), (R, K).

    Each chunk is summed by its own largest logit first, so that all logits are read once.
    """
    padded = F.pad(logits, (0, -logits.shape[1] % CHUNK), value=-torch.inf)
    chunks = padded.view(len(logits), padded.shape[1] // CHUNK, CHUNK)
    tops = chunks.amax(-1).double().clamp(min=LOWEST)
    sums = (chunks.double() - tops[..., None]).exp().sum(-1)
    top = tops.amax(-1, keepdim=True)
    return top, sums * (tops - top).exp()


def draw_by_chunks(
    logits: Tensor, uniforms: Tensor, sums_of: Sums = chunk_sums, row: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Tokens and their log-probabilities, drawn from softmax(logits).

    They are those of `categorical.draw` with the same numbers, unless one of them lies within
    rounding of a border. Several numbers may draw from one row: `row` (R,) tells which one each of
    them draws from; by default number k draws from row k.

    What stands somewhere in a row is picked as a maximum or a minimum: compiled, the choice of the
    chunk is one kernel then, and that of the token another. Sums that a GPU makes in parallel may
    fall by their last bits, where nothing is added: a place without probability is never chosen.

    Shapes: logits (R', V), uniforms (R,) float64 in [0, 1) -> (R,), (R,).
    """
    num = logits.shape[1]
    top, sums = sums_of(logits)
    until = sums.cumsum(-1)
    if row is not None:
        top, sums, until = top[row], sums[row], until[row]
    total = until.amax(-1, keepdim=True)
    target = uniforms[:, None] * total
    chunk = _first(until > target, sums > 0)
    number = torch.arange(until.shape[1], device=logits.device)
    rest = target - torch.where(number < chunk, until, 0.0).amax(-1, keepdim=True)
    columns = chunk * CHUNK + torch.arange(CHUNK, device=logits.device)
    inside = _pick(logits, row, columns.clamp(max=num - 1)).double() - top
    inside = inside.masked_fill(columns >= num, -torch.inf).exp()
    # Two ways to add up the same numbers round differently; the chunk has some probability.
    place = _first(inside.cumsum(-1) > rest, inside > 0)
    token = (chunk * CHUNK + place).clamp(max=num - 1)
    log_p = _pick(logits, row, token).double() - top - total.log()
    return token.squeeze(1), log_p.squeeze(1)


def _first(exceeds: Tensor, possible: Tensor) -> Tensor:
    """Number of the first place (R, N) that exceeds and is possible: (R, 1); else the last one."""
    count = exceeds.shape[1]
    number = torch.arange(count, device=exceeds.device)
    last = torch.where(possible, number, 0).amax(-1, keepdim=True)
    first = torch.where(exceeds & possible, number, count).amin(-1, keepdim=True)
    return torch.minimum(first, last)


def _pick(logits: Tensor, row: Tensor | None, columns: Tensor) -> Tensor:
    """Some columns (R, C) of each draw's row."""
    return logits.gather(1, columns) if row is None else logits[row[:, None], columns]


def _sums_in_parts(logits: Tensor) -> tuple[Tensor, Tensor]:
    """`chunk_sums` of some rows after the other: float64 of all of them may not fit into memory."""
    parts = [chunk_sums(part) for (part,) in in_parts(logits)]
    return torch.cat([top for top, _ in parts]), torch.cat([sums for _, sums in parts])


_sums: Fused[[Tensor], tuple[Tensor, Tensor]] = Fused(chunk_sums, "A draw", _sums_in_parts)


def draw_compiled(
    logits: Tensor, uniforms: Tensor, row: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`draw_by_chunks`, with compiled sums where torch can compile."""
    return draw_by_chunks(logits, uniforms, _sums, row)
