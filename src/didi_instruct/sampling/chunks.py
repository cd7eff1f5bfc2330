"""The exact draw of `categorical` without float64 laws over the vocabulary.

Inverting a cumulative sum needs the sum up to one token, not up to all of them. So probabilities
are summed in float64 by chunks of the vocabulary, one number picks the chunk and then the token
within it. Compiled, the sums are one pass over the logits that writes almost nothing.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from didi_instruct.models.compiling import compiled
from didi_instruct.models.graphs import in_a_line, say_once

CHUNK = 128
BELOW_ONE = 1 - 2.0**-53

Sums = Callable[[Tensor], tuple[Tensor, Tensor]]


def chunk_sums(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Largest logit, and sums of exp(logit - largest) over chunks: (R, V) -> (R, 1), (R, K)."""
    top = logits.amax(-1, keepdim=True).double()
    padded = F.pad(logits, (0, -logits.shape[1] % CHUNK), value=-torch.inf)
    chunks = padded.view(len(logits), -1, CHUNK).double()
    return top, (chunks - top[..., None]).exp().sum(-1)


def draw_by_chunks(
    logits: Tensor, uniforms: Tensor, sums_of: Sums = chunk_sums
) -> tuple[Tensor, Tensor]:
    """Tokens and their log-probabilities, drawn from softmax(logits).

    They are those of `categorical.draw` with the same numbers, unless one of them lies within
    rounding of a border. Shapes: logits (R, V), uniforms (R,) float64 in [0, 1) -> (R,), (R,).
    """
    num = logits.shape[1]
    top, sums = sums_of(logits)
    until = sums.cumsum(-1)
    target = uniforms[:, None] * until[:, -1:]
    # The first chunk, and the first token, whose sum exceeds the target; never one of
    # probability 0.
    chunk = (until <= target).sum(-1, keepdim=True).clamp(max=sums.shape[1] - 1)
    before = torch.where(chunk > 0, until.gather(1, (chunk - 1).clamp(min=0)), 0.0)
    columns = chunk * CHUNK + torch.arange(CHUNK, device=logits.device)
    inside = logits.gather(1, columns.clamp(max=num - 1)).double() - top
    inside = inside.masked_fill(columns >= num, -torch.inf).exp().cumsum(-1)
    # Two ways to add up the same numbers round differently: the target stays within the chunk.
    rest = torch.minimum(target - before, inside[:, -1:] * BELOW_ONE)
    place = (inside <= rest).sum(-1, keepdim=True).clamp(max=CHUNK - 1)
    token = (chunk * CHUNK + place).clamp(max=num - 1)
    log_p = logits.gather(1, token).double() - top - until[:, -1:].log()
    return token.squeeze(1), log_p.squeeze(1)


@functools.cache
def _compiled_sums() -> Sums:
    return compiled(chunk_sums)


_refused: list[str] = []
"""Why torch could not compile the sums: asked again, it would try again at every draw."""


def draw_compiled(logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """`draw_by_chunks`, with compiled sums where torch can compile."""
    if _refused or not logits.is_cuda or len(logits) < 2:  # a single row would be compiled anew
        return draw_by_chunks(logits, uniforms)
    torch._dynamo.maybe_mark_dynamic(logits, 0)
    try:
        return draw_by_chunks(logits, uniforms, _compiled_sums())
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever the compiler raises
        _refused.append(in_a_line(error))
        say_once(f"Draws cannot be compiled here, so they run slower: {_refused[0]}")
        return draw_by_chunks(logits, uniforms)
