"""-log p of rows of tokens under a left-to-right network, in batches that fit into memory."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from didi_instruct.evaluation.scores import Progress

LOGITS_BYTES = 1 << 30
"""Logits that a network may return at once; batches are cut to fit."""
SOFTMAX_ENTRIES = 1 << 25
"""Logits that are cast to float32 at once."""


class Nats(NamedTuple):
    """-log p of each row given its first id, (N,) float64 each."""

    before: Tensor
    """Of all ids but the last."""
    last: Tensor
    """Of the last one, 0 for rows of one id or none."""

    @property
    def total(self) -> Tensor:
        """Of the whole rows."""
        return self.before + self.last


@torch.no_grad()
def causal_nats(
    logits: Callable[[Tensor, Tensor], Tensor],
    rows: Sequence[list[int]],
    *,
    num_tokens: int,
    temperature: float = 1.0,
    batch_size: int = 16,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> Nats:
    """-log p of each row of ids given its first one, summed over tokens, that of the last apart.

    `logits` takes ids and which of them are real, both (B, L), padded on the right, to logits
    (B, L, V) of the next token. Rows of like length go together; neither their order nor the batch
    size changes a result.
    """
    nats = torch.zeros(len(rows), 2, dtype=torch.float64)
    entry = 2 if torch.device(device).type == "cuda" else 4
    done = sum(len(row) < 2 for row in rows)
    size = _rows_at_once(batch_size, num_tokens * entry)
    for chunk in batches(rows, size, shortest=2):
        ids, real = pad([rows[i][:-1] for i in chunk], device)
        targets, _ = pad([rows[i][1:] for i in chunk], device)
        next_token, wanted = logits(ids, real).flatten(0, 1), targets.flatten()
        where = real.flatten().nonzero().squeeze(1)
        length, last = ids.shape[1], real.sum(1) - 1
        total = torch.zeros(2 * len(chunk), dtype=torch.float64, device=device)
        for part in torch.split(where, max(1, SOFTMAX_ENTRIES // num_tokens)):
            scaled = next_token[part].float() / temperature
            nll = F.cross_entropy(scaled, wanted[part], reduction="none")
            row = part // length
            total.index_add_(0, 2 * row + (part % length == last[row]), nll.double())
        nats[chunk] = total.view(-1, 2).cpu()
        done += len(chunk)
        if progress is not None:
            progress(done, len(rows))
    return Nats(*nats.unbind(1))


def _rows_at_once(batch_size: int, bytes_per_token: int) -> Callable[[int], int]:
    """How many rows of a length to read together."""
    return lambda length: max(1, min(batch_size, LOGITS_BYTES // (length * bytes_per_token)))


def batches(
    rows: Sequence[Sequence[int]], size: Callable[[int], int], shortest: int = 1
) -> Iterator[list[int]]:
    """Indices of the rows, longest first: what does not fit into memory fails at once."""
    kept = [i for i, row in enumerate(rows) if len(row) >= shortest]
    order = sorted(kept, key=lambda i: -len(rows[i]))
    while order:
        count = size(len(rows[order[0]]))
        yield order[:count]
        order = order[count:]


def pad(rows: Sequence[list[int]], device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Rows in one tensor, filled up with 0 on the right, and where they are real: both (B, L)."""
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    real = torch.arange(longest) < torch.tensor([len(row) for row in rows])[:, None]
    return ids.to(device), real.long().to(device)
