"""Passes over rows of similar length, cropped to the longest, so that padding is not computed.

A batch stays what it is without them, rows drawn at random: its rows are only put into passes by
their lengths, and each keeps its own noise. So loss and gradient are those of the batch in one
piece, up to the order of additions, and short and long texts weigh what they always do.
"""

from typing import NamedTuple

from torch import Tensor

from didi_instruct.config.model import ModelConfig
from didi_instruct.process.masking import before_end

MULTIPLE = 8
"""Widths of passes are multiples of it, or the whole window: fewer shapes, aligned memory."""


class Pass(NamedTuple):
    """Rows that one process reads together."""

    rows: Tensor
    """Places in the batch, (R,)."""
    width: int
    """Positions of each that are read."""


def widths(tokens: Tensor, config: ModelConfig) -> Tensor:
    """Positions that a loss needs of each window (B, L): (B,).

    Up to the end of the text; a left-to-right model learns the end too.
    """
    assert config.end_id is not None
    length = tokens.shape[1]
    found = before_end(tokens, config.end_id).sum(1) + (config.kind == "ar")
    return (-(-found // MULTIPLE) * MULTIPLE).clamp(MULTIPLE, length)


def plan_passes(widths: Tensor, tokens: int, rank: int = 0, processes: int = 1) -> list[Pass]:
    """Divide a batch of rows of `widths` (B,) into passes of at most `tokens` positions each.

    Rows are sorted by width, the widest first, and dealt to the processes in turn. All processes
    have passes of the same shapes, so that they exchange gradients at the same time.
    """
    order = widths.argsort(descending=True, stable=True).view(-1, processes)
    widest, passes, first = widths[order[:, 0]].tolist(), [], 0
    while first < len(order):
        count = max(1, tokens // widest[first])
        passes.append(Pass(order[first : first + count, rank], widest[first]))
        first += count
    return passes
