"""Denoisers: p(x | z_t) as samplers ask for it, evaluated only where a step needs it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from didi_instruct.models.dit import DiT
from didi_instruct.models.network import Network, WeightsStamp, logits_at, weights_stamp
from didi_instruct.process.schedule import Schedule
from didi_instruct.sampling.draw import DrawOptions, draw_tokens
from didi_instruct.sampling.plan import Step
from didi_instruct.sampling.state import Reads

Logits = Callable[[Reads, Tensor | float, Tensor], Tensor]
"""Logits or log-probabilities (R, V) at flat positions: (texts (U, L), t, at (R,)) -> (R, V)."""


class Denoiser(Protocol):
    """Laws of the clean tokens given noisy texts; t is one time for all of them, or (U,)."""

    num_tokens: int  # V, the real tokens
    compiled: bool  # functions beside the network may be compiled too

    def logits(self, reads: Reads, t: Tensor | float, at: Tensor) -> Tensor:
        """Logits (R, V) at flat positions `at` (R,) of texts (U, L)."""

    def logits_in_parts(self, reads: Reads, t: Tensor | float, at: Tensor) -> Iterator[Tensor]:
        """`logits` some rows at a time; columns beyond V have probability 0."""

    def draw(self, reads: Reads, step: Step, options: DrawOptions) -> tuple[Tensor, Tensor]:
        """Tokens and log-probabilities (N,) of what a step writes."""


@dataclass(eq=False)
class LogitsDenoiser:
    """A denoiser whose draws start from logits that are all held at once."""

    logits: Logits
    num_tokens: int
    compiled: bool = False

    def logits_in_parts(self, reads: Reads, t: Tensor | float, at: Tensor) -> Iterator[Tensor]:
        yield self.logits(reads, t, at)

    def draw(self, reads: Reads, step: Step, options: DrawOptions) -> tuple[Tensor, Tensor]:
        logits = self.logits(reads, step.t, step.reads)
        return draw_tokens(logits, step.u, step.row, options)


def function_denoiser(
    function: Callable[[Tensor, Tensor], Tensor], num_tokens: int
) -> LogitsDenoiser:
    """Denoiser of a function (z (U, L), t (U,)) -> logits (U, L, V)."""

    def logits(reads: Reads, t: Tensor | float, at: Tensor) -> Tensor:
        return function(reads.tokens, times_of(t, reads)).flatten(0, 1)[at]

    return LogitsDenoiser(logits, num_tokens)


def network_denoiser(network: Network, schedule: Schedule) -> LogitsDenoiser:
    """Denoiser of a network as it is."""
    timed, constants = network.config.time_conditioning, network.constants()

    @torch.no_grad()
    def logits(reads: Reads, t: Tensor | float, at: Tensor) -> Tensor:
        sigma = schedule.sigma(times_of(t, reads)) if timed else None
        found = logits_at(network, reads.tokens, sigma, at, reads.attended, mods=constants)
        return found[:, : network.config.num_tokens]

    return LogitsDenoiser(logits, network.config.num_tokens)


def times_of(t: Tensor | float, reads: Reads) -> Tensor:
    """(U,) float32 times of the texts of a pass."""
    times = torch.as_tensor(t, dtype=torch.float32, device=reads.tokens.device)
    return times.expand(len(reads))


def make_denoiser(network: Network, schedule: Schedule, *, accelerate: bool = False) -> Denoiser:
    """Fastest denoiser of a network: packed on a CPU, by CUDA graphs if asked, or as it is.

    The same tokens up to rounding. It holds the weights as they are now.
    """
    from didi_instruct.sampling.engines import cpu, cuda  # which import this file

    if isinstance(network, DiT) and accelerate:
        return cuda.GraphDenoiser(network, schedule)
    if isinstance(network, DiT) and cpu.fits(network):
        return cpu.packed_denoiser(network)
    return network_denoiser(network, schedule)


class CachedDenoiser:
    """The denoiser of a network on its device, made anew when its weights have changed."""

    def __init__(self, network: Network, schedule: Schedule) -> None:
        self.network, self.schedule, self.accelerated = network, schedule, False
        self._made: tuple[WeightsStamp, bool, Denoiser] | None = None

    def accelerate(self) -> None:
        """Make CUDA graphs from now on."""
        self.accelerated, self._made = True, None

    def current(self) -> Denoiser:
        """The denoiser of the weights as they are now."""
        stamp, training = weights_stamp(self.network), self.network.training
        if self._made is None or self._made[:2] != (stamp, training):
            made = make_denoiser(self.network, self.schedule, accelerate=self.accelerated)
            self._made = stamp, training, made
        return self._made[2]
