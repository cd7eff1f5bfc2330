"""Our networks as the callables that samplers take."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from didi_instruct.errors import first_line
from didi_instruct.models.compile import compiled, fusing, say_once
from didi_instruct.models.denoising import Denoising
from didi_instruct.models.discriminator import Discriminator
from didi_instruct.models.graphs import Chosen, GraphedDiT
from didi_instruct.models.inference import InferenceDiT
from didi_instruct.models.layers import ALIGN, upcast, versions
from didi_instruct.process.schedule import Schedule
from didi_instruct.sampling.chain import PAD
from didi_instruct.sampling.chunks import draw_compiled
from didi_instruct.transfer import sent


class NetworkDenoiser:
    """A network and its schedule as a denoiser; padding (`PAD` in z) is never attended.

    `graphs` are the same network's captured passes, used where nothing is padding.
    """

    def __init__(
        self, network: Denoising, schedule: Schedule, graphs: GraphedDiT | None = None
    ) -> None:
        self.network, self.schedule, self.graphs = network, schedule, graphs
        self.draw = None if graphs is None else _draw
        self.at = None if graphs is None else self._at
        self.draw_at = None if graphs is None or graphs.draw is None else self._draw_at

    @torch.no_grad()
    def __call__(self, z: Tensor, t: Tensor) -> Tensor:
        """Logits (B, L, V) at every position."""
        tokens, attended = split_padding(z)
        logits: Tensor = self.network(tokens, self.schedule.sigma(t), attended)
        return logits

    @torch.no_grad()
    def rows(self, z: Tensor, t: Tensor, where: Tensor) -> Tensor:
        """Logits (R, V) at the selected positions: the output layer runs on those alone."""
        tokens, attended = split_padding(z)
        if self.graphs is not None and attended is None:
            return self.graphs.logits(tokens, self.schedule.sigma(t), where)
        return selected_logits(self.network, tokens, self.schedule.sigma(t), where, attended)

    @torch.no_grad()
    def _at(self, z: Tensor, t: float, place: Tensor) -> Tensor:
        """Logits (R, V) at positions by their numbers in (B * L); z has no padding."""
        assert self.graphs is not None
        return self.graphs.logits_at(z, self._sigma(t, z), place)

    @torch.no_grad()
    def _draw_at(
        self, z: Tensor, t: float, place: Tensor, numbers: Tensor, chosen: Chosen | None
    ) -> tuple[Tensor, Tensor]:
        """Tokens and log-probabilities (R,) at such positions, drawn by numbers (R,)."""
        assert self.graphs is not None
        return self.graphs.drawn_at(z, self._sigma(t, z), place, numbers, chosen)

    @property
    def num_tokens(self) -> int:
        """V, the real tokens."""
        return self.network.config.num_tokens

    @torch.no_grad()
    def states_at(self, z: Tensor, t: float, place: Tensor) -> tuple[Tensor, Tensor]:
        """What `wide_logits` takes, (R, ...) and (R, ...) or one row for all, at such positions.

        So many logits need not be held at once.
        """
        assert self.graphs is not None
        return self.graphs.states_at(z, self._sigma(t, z), place)

    @torch.no_grad()
    def wide_logits(self, states: Tensor, condition: Tensor) -> Tensor:
        """Logits (R, W) as the GPU makes them: columns of probability 0 fill up a good width."""
        assert self.graphs is not None
        return self.graphs.wide_logits(states, condition)

    def _sigma(self, t: float, z: Tensor) -> Tensor | None:
        """(B,); what nobody reads is not made."""
        return _sigma(self.schedule, t, z, timed=self.network.config.time_conditioning)


def _draw(logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Draws of a network that is compiled itself."""
    with fusing(True):
        return draw_compiled(logits, uniforms)


class InferenceDenoiser:
    """A network laid out for the CPU as a denoiser; it does not see the time."""

    def __init__(self, network: InferenceDiT) -> None:
        self.network = network

    def __call__(self, z: Tensor, t: Tensor) -> Tensor:
        """Logits (B, L, V) at every position."""
        return self.network(*split_padding(z))

    def rows(self, z: Tensor, t: Tensor, where: Tensor) -> Tensor:
        """Logits (R, V) at the selected positions: the last block, too, runs on those alone."""
        tokens, attended = split_padding(z)
        return self.network.rows(tokens, where, attended)


class NetworkGuide:
    """A discriminator as a guide: log-ratios of teacher over student from embeddings.

    `fast` compiles it; its weights then take no gradients, which would be computed in vain.
    """

    def __init__(
        self, discriminator: Discriminator, schedule: Schedule, *, fast: bool = False
    ) -> None:
        self.discriminator, self.schedule = discriminator.eval(), schedule
        if fast:
            discriminator.requires_grad_(False)
        self._compiles = fast
        self._run: Any = None
        self._table: Tensor | None = None
        self._table_state: tuple[int, tuple[int, ...]] = (0, ())

    @property
    def embedding(self) -> Tensor:
        """(V, d) embeddings of the real tokens."""
        return self.discriminator.vocab_embed.embedding[: self.discriminator.config.num_tokens]

    def embed(self, z: Tensor) -> Tensor:
        """Embeddings (B, L, d) of tokens and masks."""
        return self.discriminator.embed(split_padding(z)[0])

    def score(self, embeddings: Tensor, z: Tensor, t: Tensor) -> Tensor:
        """Log-ratio (B, L) at every position; z tells which ones are padding."""
        return self._score(None, embeddings, self.schedule.sigma(t), split_padding(z)[1])

    @property
    def table(self) -> Tensor:
        """(W, d) `embedding` with rows of 0 below it, to a number that GPUs like."""
        embedding = self.embedding.detach()
        weight = self.discriminator.vocab_embed.embedding
        state = (weight.data_ptr(), versions([weight]))
        if self._table is None or state != self._table_state:
            padded = F.pad(embedding, (0, 0, 0, -len(embedding) % ALIGN))
            self._table, self._table_state = padded, state
        return self._table

    @torch.no_grad()
    def score_texts(self, z: Tensor, t: float) -> Tensor:
        """Log-ratio (B, L) at every position of texts without padding; no wait for the GPU."""
        return self._score(z, None, self._sigma(t, z), None)

    @torch.no_grad()
    def gradient(
        self, z: Tensor, t: float, place: Tensor, mixed: Tensor, counted: Tensor
    ) -> Tensor:
        """Gradient (B * L, d) of the log-ratios with respect to all embeddings; no wait either.

        Of texts z (B, L) without padding, that show mixtures (K, d) at the positions `place` (K,)
        of (B * L). The log-ratios are added up where `counted` (B, L).
        """
        shown = self.discriminator.embed(z)
        flat = shown.flatten(0, 1).index_copy(0, place, mixed.to(shown.dtype))
        given = flat.view_as(shown), self._sigma(t, z), counted
        try:
            return self._gradient(*given)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of the compiler, which may meet gradients last
            if not self._compiles:
                raise
            self._give_up(error)
            return self._gradient(*given)

    def _gradient(self, shown: Tensor, sigma: Tensor | None, counted: Tensor) -> Tensor:
        with torch.enable_grad():
            shown = shown.detach().requires_grad_()
            ratio = self._score(None, shown, sigma, None)
            (gradient,) = torch.autograd.grad(ratio, shown, counted.to(ratio.dtype))
        return gradient.flatten(0, 1)

    def _give_up(self, error: Exception) -> None:
        """Go on without compiling."""
        reason = first_line(error)
        say_once(f"A discriminator cannot be compiled here, so it runs slower: {reason}")
        self._compiles, self._run = False, None

    def _sigma(self, t: float, z: Tensor) -> Tensor | None:
        return _sigma(self.schedule, t, z, timed=self.discriminator.config.time_conditioning)

    def _score(
        self,
        tokens: Tensor | None,
        shown: Tensor | None,
        sigma: Tensor | None,
        attended: Tensor | None,
    ) -> Tensor:
        """Log-ratios (B, L) of tokens (B, L), or of what is shown in their place (B, L, d)."""
        if self._compiles:
            try:
                return self._score_compiled(tokens, shown, sigma, attended)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # whatever the compiler raises
                self._give_up(error)
        return self._ratio(tokens, self.discriminator.condition(sigma), attended, shown)

    def _ratio(
        self, tokens: Tensor | None, c: Tensor, attended: Tensor | None, shown: Tensor | None
    ) -> Tensor:
        hidden = self.discriminator.run_blocks(tokens, c, attended, shown)
        return upcast(self.discriminator.output_layer(hidden)).squeeze(-1)

    def _score_compiled(
        self,
        tokens: Tensor | None,
        shown: Tensor | None,
        sigma: Tensor | None,
        attended: Tensor | None,
    ) -> Tensor:
        if self._run is None:
            self._run = compiled(self._ratio)
        given = tokens if shown is None else shown
        assert given is not None
        rows = len(given)
        if rows == 1:  # would be compiled anew, as would rows that are one in memory
            tokens, shown, attended, sigma = (_twice(x) for x in (tokens, shown, attended, sigma))
        c = self.discriminator.condition(sigma)
        for tensor in (tokens, shown, c, attended):
            if tensor is not None and len(tensor) > 1:
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        ratio: Tensor = self._run(tokens, c, attended, shown)
        return ratio[:rows]


def _twice(x: Tensor | None) -> Tensor | None:
    """A row and the same again."""
    return None if x is None else torch.cat([x, x])


def _sigma(schedule: Schedule, t: float, z: Tensor, *, timed: bool) -> Tensor | None:
    """(B,) for texts (B, L) at one time; what nobody reads is not made."""
    return schedule.sigma(torch.full((len(z),), t, device=z.device)) if timed else None


def selected_logits(
    network: Denoising, tokens: Tensor, sigma: Tensor, where: Tensor, attended: Tensor | None = None
) -> Tensor:
    """Logits (R, V) of the positions that `where` (B, L) selects, in order.

    Shapes: tokens (B, L), sigma (B,), attended as `where`, which may be on the host: then no GPU is
    waited for.
    """
    place = sent(where.flatten().nonzero().squeeze(1), tokens.device)
    return logits_at(network, tokens, sigma, place, attended)


def logits_at(
    network: Denoising, tokens: Tensor, sigma: Tensor, place: Tensor, attended: Tensor | None = None
) -> Tensor:
    """Logits (R, V) at positions by their numbers `place` (R,) in (B * L).

    The output layer runs on those alone. There may be more than V columns (`DiT.align`), of
    probability 0.
    """
    hidden = network.trunk(tokens, sigma, attended).flatten(0, 1).index_select(0, place)
    condition = network.condition(sigma)
    if condition.shape[0] > 1:
        condition = condition[place // tokens.shape[1]]
    return network.head(hidden, condition, network.config.num_tokens)


def split_padding(z: Tensor) -> tuple[Tensor, Tensor | None]:
    """Tokens that can be embedded, and which positions are attended (None: all)."""
    padded = z == PAD
    if not padded.any():
        return z, None
    return z.masked_fill(padded, 0), ~padded
