"""Semi-autoregressive sampling: blocks from left to right, each by any sampler of masks."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from didi_instruct.errors import UserError
from didi_instruct.sampling.chain import Callback, Canvas, Purpose, Samples, Step


def blocks(
    sampler: Callable[..., Samples],
    canvas: Canvas,
    *,
    block_length: int,
    callback: Callback | None = None,
    **arguments: Any,
) -> Samples:
    """Finish each block of positions with `sampler(canvas, **arguments)` before the next begins.

    The denoiser always sees the whole text, with masks where later blocks are. Blocks are counted
    from the first position of the window, given or not, and one without anything to write takes no
    steps. A single block is the sampler itself, bit for bit. The sampler's clock runs from 1 to 0
    in every block: a model that reads the time sees it too early in the first ones.

    `nfe`, `passes`, `disc_calls` and `log_prob` are sums over the blocks. The callback sees one
    long run of steps; how many there will be is an estimate if the blocks differ.
    """
    if block_length < 1:
        raise UserError(f"block_length is {block_length}: use 1 or more.")
    length = canvas.tokens.shape[1]
    columns = torch.arange(length, device=canvas.tokens.device)
    to_write = canvas.open.any(0)
    numbers = sorted(set((columns[to_write] // block_length).tolist()))
    watcher = None if callback is None else _Watcher(callback, canvas.open, blocks=len(numbers))
    parts: list[Samples] = []
    tokens = canvas.tokens
    for number in numbers:
        block = columns // block_length == number
        part = replace(
            canvas,
            tokens=tokens,
            allowed=block if canvas.allowed is None else block & canvas.allowed,
            # By the block's place, not by how many came before: that depends on the batch.
            stream=(*canvas.stream, Purpose.BLOCK, number) if number else canvas.stream,
        )
        watching = {} if watcher is None else {"callback": watcher}
        parts.append(sampler(part, **arguments, **watching))
        tokens = parts[-1].tokens
        if watcher is not None:
            watcher.end_block()
    return Samples(
        tokens,
        _total(parts, len(tokens), tokens.device),
        nfe=sum(part.nfe for part in parts),
        passes=sum(part.passes for part in parts),
        disc_calls=sum(part.disc_calls for part in parts),
    )


def _total(parts: list[Samples], batch: int, device: torch.device) -> Tensor | None:
    """Return the log-probability (B,) of all blocks, if each knows its own."""
    total = torch.zeros(batch, dtype=torch.float64, device=device)
    for part in parts:
        if part.log_prob is None:
            return None
        total += part.log_prob
    return total


class _Watcher:
    """Shows a callback the steps of all blocks as one run."""

    def __init__(self, callback: Callback, written: Tensor, blocks: int) -> None:
        self.callback, self.open, self.left = callback, written, blocks
        self.done = 0
        self.confidence: Tensor | float = 0.0
        self.last: Step | None = None

    def __call__(self, step: Step) -> None:
        self.last = replace(
            step,
            index=self.done + step.index,
            steps=self.done + step.steps * self.left,
            # Each block knows its own positions only.
            confidence=self.confidence + step.confidence,
            open=self.open,
        )
        self.callback(self.last)

    def end_block(self) -> None:
        """Count the steps of a block."""
        self.left -= 1
        if self.last is not None:
            self.done, self.confidence = self.last.index + 1, self.last.confidence
