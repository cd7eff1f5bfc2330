"""Sampling from a start that is partly random, as generators made by DiMO do.

A step draws its tokens independently given what the network sees, so one step from all masks has
nothing that its tokens could share. Here the start has: some of its masks are random tokens
instead, and the embeddings of all of them carry Gaussian noise. Every open position is written over
in the end, the random tokens too; until then the network sees the start where nothing is written.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from didi_instruct.models.network import Mixture, Network, logits_at
from didi_instruct.process.schedule import Schedule
from didi_instruct.sampling.ancestral import run
from didi_instruct.sampling.denoiser import times_of
from didi_instruct.sampling.draw import Purpose, draw_tokens
from didi_instruct.sampling.plan import Grid, Step, make_plan, reveal_turns
from didi_instruct.sampling.state import Reads, Samples, State, split_padding

FARTHEST = 8.5  # normal numbers end here: the last of 2^53 uniform ones would be infinite


class Uniforms(Protocol):
    """Random numbers of some texts, as `sampling.draw.Noise` makes them."""

    def uniforms(self, count: int, *stream: int) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Seen:
    """Texts on their way as a network sees them."""

    tokens: Tensor  # (B, L): what is written, the start elsewhere
    unwritten: Tensor  # (B, L) positions that show the start
    normals: Tensor | None  # (B, L, d) standard normal noise of the start; None: it has none

    def only(self, rows: Tensor) -> "Seen":
        """Return some of the texts, selected by (B,) or by their numbers (U,)."""
        normals = None if self.normals is None else self.normals[rows]
        return Seen(self.tokens[rows], self.unwritten[rows], normals)

    def later(self, z: Tensor, mask_id: int) -> "Seen":
        """Return the same once z (B, L) is written; where it has masks, the start shows."""
        unwritten = self.unwritten & (z == mask_id)
        return Seen(torch.where(unwritten, self.tokens, z), unwritten, self.normals)


@dataclass(frozen=True, slots=True)
class Start:
    """Settings of random starts."""

    random: float  # share of the masks that are random tokens instead
    noise: float
    """σ: an embedding e becomes sqrt(1 - σ²) e + σ s n, with n standard normal and s the deviation
    of all embeddings."""

    def begin(
        self, z: Tensor, mask_id: int, width: int, noise: Uniforms, never: Sequence[int] = ()
    ) -> Seen:
        """Draw the starts of texts z (B, L) with masks where to write; `width` is d.

        Random tokens are any of the V = `mask_id`, each as likely; not those in `never`, such as
        the end of texts that have windows of their own: inside a text it would seem to close it.
        """
        open_, length = z == mask_id, z.shape[1]
        coins, which = (noise.uniforms(length, Purpose.START, k) for k in range(2))
        random = (which * (mask_id - len(never))).long()
        for token in sorted(never):
            random += random >= token
        tokens = torch.where(open_ & (coins < self.random), random, z)
        if not self.noise:
            return Seen(tokens, open_, None)
        places = 2 * noise.uniforms(length * width, Purpose.START, 2) - 1
        normals = (math.sqrt(2) * torch.erfinv(places)).clamp(-FARTHEST, FARTHEST)
        return Seen(tokens, open_, normals.float().view(*z.shape, width))

    def logits(self, network: Network, seen: Seen, sigma: Tensor | None, at: Tensor) -> Tensor:
        """Logits (R, V) of a network that sees a start, at flat positions (R,)."""
        reads, mixture = split_padding(seen.tokens), None
        if seen.normals is not None:
            shown, vectors = seen.unwritten.flatten().nonzero().squeeze(1), network.vectors
            own = torch.nn.functional.embedding(reads.tokens.flatten()[shown], vectors)
            normals = seen.normals.flatten(0, 1)[shown]
            scale = self.noise * vectors.detach().std()
            mixture = Mixture(shown, math.sqrt(1 - self.noise**2) * own + scale * normals)
        return logits_at(network, reads.tokens, sigma, at, reads.attended, mixture=mixture)


@torch.no_grad()
def dimo(
    network: Network,
    schedule: Schedule,
    state: State,
    *,
    steps: int,
    start: Start,
    grid: Grid = "uniform",
) -> Samples:
    """Go from a partly random start to text in `steps` steps, those of ancestral sampling.

    `log_prob` is given the start, as if it were known: path entropies are then too low, and path
    KL bounds the KL of the sampler from above, though less closely than without a start.
    """
    state.steps = steps
    width, never = network.vectors.shape[1], network.config.never_drawn
    begun = start.begin(state.z, state.mask_id, width, state.noise, never)

    def draw(state: State, step: Step) -> tuple[Tensor, Tensor]:
        seen = begun.later(state.z, state.mask_id)
        seen = seen if step.states is None else seen.only(step.states)
        state.count(len(seen.tokens))
        sigma = schedule.sigma(times_of(step.t, Reads(seen.tokens)))
        logits = start.logits(network, seen, sigma, step.reads)[:, : network.config.num_tokens]
        return draw_tokens(logits, step.u, step.row, state.settings)

    turn, times = reveal_turns(schedule, state.noise, state.open, steps, grid, "random")
    run(make_plan(state, turn, times, begun=True), state, draw)
    return state.samples()
