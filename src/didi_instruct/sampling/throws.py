"""Random numbers of candidates for a next state."""

import torch
from torch import Tensor

from didi_instruct.sampling.chain import NOISE_ELEMENTS, Chain, Purpose
from didi_instruct.sampling.noise import uniforms


class Throws:
    """Random numbers of all candidates, made for many steps at once."""

    def __init__(self, chain: Chain, num: int) -> None:
        self.chain, self.num = chain, num
        self._others: dict[int, tuple[int, Tensor]] = {}
        """By purpose: the first step that numbers were made for, and they (N, M - 1, B, L)."""
        self._select = self._made(Purpose.SELECT, 0, chain.steps, 1).squeeze(-1)

    def __call__(self, purpose: Purpose, n: int) -> Tensor:
        """(M, B, L) numbers of a step; the first candidate has those of a chain of steps."""
        first = self.chain.uniforms(purpose, n)[None]
        if self.num == 1:
            return first
        start, made = self._others.get(purpose, (n, None))
        if made is None or not start <= n < start + len(made):
            room = NOISE_ELEMENTS // (first.numel() * (self.num - 1))
            count = max(1, min(self.chain.steps - n, room))
            which = torch.arange(1, self.num, device=first.device)[:, None]
            start, made = n, self._made(purpose, n, count, first.shape[-1], which)
            self._others[purpose] = start, made
        return torch.cat([first, made[n - start]])

    def select(self, n: int) -> Tensor:
        """(B,) the number by which each sample chooses."""
        return self._select[n]

    def _made(
        self, purpose: Purpose, start: int, count: int, length: int, *which: Tensor
    ) -> Tensor:
        """Numbers of steps from `start` on: (N, B, L).

        With `which` (M - 1, 1), the numbers of candidates: (N, M - 1, B, L).
        """
        chain = self.chain
        steps = torch.arange(start, start + count, device=chain.z.device)
        steps = steps.view(-1, *(1,) * (1 + len(which)))
        stream: tuple[int | Tensor, ...] = (*chain.canvas.stream, purpose, steps, *which)
        return uniforms(chain.settings.seed, chain.canvas.samples, stream, length)
