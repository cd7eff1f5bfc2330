"""Sampling from a start that is partly random, as generators made by DiMO do.

A step draws its tokens independently given what the network sees, so one step from all masks has
nothing that its tokens could share. Here the start has: some of its masks are random tokens
instead, and the embeddings of all of them carry Gaussian noise. Every open position is written over
in the end, the random tokens too; until then the network sees the start where nothing is written.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from didi_instruct.models.dit import DiT
from didi_instruct.process.schedule import Schedule
from didi_instruct.sampling.chain import Callback, Canvas, Chain, Draw, Purpose, Samples
from didi_instruct.sampling.grids import Grid
from didi_instruct.sampling.network import selected_logits, split_padding
from didi_instruct.sampling.noise import uniforms
from didi_instruct.sampling.reveals import Reveals

FARTHEST = 8.5
"""Normal numbers are cut here, where the last of 2^53 uniform ones would be infinite."""

Numbers = Callable[..., Tensor]
"""(count, *stream) -> (B, count) float64 numbers in [0, 1) of some texts."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What a network sees of texts on their way."""

    tokens: Tensor
    """(B, L): what is written, the start elsewhere."""
    unwritten: Tensor
    """(B, L) positions that show the start."""
    normals: Tensor | None
    """(B, L, d) standard normal numbers: the noise of the start. None: it has none."""

    def only(self, rows: Tensor) -> "Seen":
        """Some of the texts, selected by (B,)."""
        normals = None if self.normals is None else self.normals[rows]
        return Seen(self.tokens[rows], self.unwritten[rows], normals)


Reader = Callable[[Seen, Tensor, Tensor], Tensor]
"""(what is seen, t (B,), where (B, L)) -> logits (R, V)."""


@dataclass(frozen=True, slots=True)
class Start:
    """How a start is made."""

    random: float
    """Share of the masks that are random tokens instead."""
    noise: float
    """σ: an embedding e becomes sqrt(1 - σ²) e + σ s n, with n standard normal and s the deviation
    of all embeddings."""

    def begin(
        self, z: Tensor, mask_id: int, width: int, numbers: Numbers, end_id: int | None = None
    ) -> Seen:
        """Draw the starts of texts z (B, L) with masks where to write; `width` is d.

        Random tokens are any of the V = `mask_id`, each as likely; not `end_id`, where texts have
        windows of their own, which an end inside a text would seem to close.
        """
        open_, length = z == mask_id, z.shape[1]
        coins, which = (numbers(length, Purpose.START, k) for k in range(2))
        count = mask_id if end_id is None else mask_id - 1
        random = (which * count).long().clamp(max=count - 1)  # a product may be rounded up
        if end_id is not None:
            random += random >= end_id
        tokens = torch.where(open_ & (coins < self.random), random, z)
        if not self.noise:
            return Seen(tokens, open_, None)
        places = 2 * numbers(length * width, Purpose.START, 2) - 1
        normals = (math.sqrt(2) * torch.erfinv(places)).clamp(-FARTHEST, FARTHEST)
        return Seen(tokens, open_, normals.float().view(*z.shape, width))

    def embed(self, network: DiT, seen: Seen) -> Tensor:
        """Embeddings (B, L, d), with noise where the start shows."""
        embeddings = network.embed(split_padding(seen.tokens)[0])
        if seen.normals is None:
            return embeddings
        scale = network.vocab_embed.embedding.detach().std()
        noisy = math.sqrt(1 - self.noise**2) * embeddings + self.noise * scale * seen.normals
        return torch.where(seen.unwritten[..., None], noisy, embeddings)

    def logits(self, network: DiT, seen: Seen, sigma: Tensor, where: Tensor) -> Tensor:
        """Logits (R, V) of the positions that `where` (B, L) selects, in order; sigma (B,)."""
        tokens, attended = split_padding(seen.tokens)
        perturbed = _Perturbed(network, self.embed(network, seen))
        return selected_logits(perturbed, tokens, sigma, where, attended)


class _Perturbed:
    """A network that sees given embeddings, whatever its tokens: a `Denoising`."""

    def __init__(self, network: DiT, embeddings: Tensor) -> None:
        self.config, self.condition, self.head = network.config, network.condition, network.head
        self._network, self._embeddings = network, embeddings

    def trunk(
        self,
        tokens: Tensor,
        sigma: Tensor | float | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        return self._network.trunk(None, sigma, attention_mask, self._embeddings)

    def __call__(
        self,
        tokens: Tensor,
        sigma: Tensor | float | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        return self.head(
            self.trunk(tokens, sigma, attention_mask),
            self.condition(sigma),
            self.config.num_tokens,
            align=1,
        )


def later(begun: Seen, z: Tensor, mask_id: int) -> Seen:
    """What is seen once z (B, L) is written, with masks where it is not: the start shows there."""
    unwritten = begun.unwritten & (z == mask_id)
    return Seen(torch.where(unwritten, begun.tokens, z), unwritten, begun.normals)


def reader_of(network: DiT, schedule: Schedule, start: Start) -> Reader:
    """A network as `dimo` asks for it."""
    return lambda seen, t, where: start.logits(network, seen, schedule.sigma(t), where)


@torch.no_grad()
def dimo(
    reader: Reader,
    schedule: Schedule,
    canvas: Canvas,
    *,
    steps: int,
    start: Start,
    width: int,
    end_id: int | None = None,
    settings: Draw | None = None,
    grid: Grid = "uniform",
    callback: Callback | None = None,
) -> Samples:
    """Go from a partly random start to text in `steps` steps, those of ancestral sampling.

    `width` is that of the network's embeddings; `end_id`, where texts have one, is in no start.
    `log_prob` is given the start, as if it were known: path entropies are then too low, and path
    KL bounds the KL of the sampler from above, though less closely than without a start.
    """
    settings = settings or Draw()
    chain = Chain(_unused, canvas, settings, steps=steps, callback=callback)

    def numbers(count: int, *stream: int) -> Tensor:
        return uniforms(settings.seed, canvas.samples, (*canvas.stream, *stream), count)

    begun = start.begin(canvas.tokens, canvas.mask_id, width, numbers, end_id)
    reveals = Reveals(chain, schedule, grid, "random")
    for n, time in enumerate(reveals.times[:-1]):
        reveal = reveals(n)
        if reveal.any():
            active = reveal.any(1)
            seen = later(begun, chain.z, canvas.mask_id).only(active)
            t = torch.full((len(seen.tokens),), time, device=chain.z.device)
            chain.passes += len(t) / len(chain.z)
            chain.write(reveal, reader(seen, t, reveal[active]), Purpose.TOKEN, n)
        chain.tell(time, reveal)
    return chain.samples(nfe=steps)


def _unused(z: Tensor, t: Tensor) -> Tensor:
    raise NotImplementedError("what is seen goes to the reader")
