"""Our networks as the callables that samplers take."""

import torch
from torch import Tensor

from didi_instruct.models.denoising import Denoising
from didi_instruct.models.discriminator import Discriminator
from didi_instruct.models.inference import InferenceDiT
from didi_instruct.process.schedule import Schedule
from didi_instruct.sampling.chain import PAD


class NetworkDenoiser:
    """A network and its schedule as a denoiser; padding (`PAD` in z) is never attended."""

    def __init__(self, network: Denoising, schedule: Schedule) -> None:
        self.network, self.schedule = network, schedule

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
        return selected_logits(self.network, tokens, self.schedule.sigma(t), where, attended)


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
    """A discriminator as a guide: log-ratios of teacher over student from embeddings."""

    def __init__(self, discriminator: Discriminator, schedule: Schedule) -> None:
        self.discriminator, self.schedule = discriminator.eval(), schedule

    @property
    def embedding(self) -> Tensor:
        """(V, d) embeddings of the real tokens."""
        return self.discriminator.vocab_embed.embedding[: self.discriminator.config.num_tokens]

    def embed(self, z: Tensor) -> Tensor:
        """Embeddings (B, L, d) of tokens and masks."""
        return self.discriminator.embed(split_padding(z)[0])

    def score(self, embeddings: Tensor, z: Tensor, t: Tensor) -> Tensor:
        """Log-ratio (B, L) at every position; z tells which ones are padding."""
        attended = split_padding(z)[1]
        return self.discriminator(
            None, self.schedule.sigma(t), embeddings=embeddings, attention_mask=attended
        )


def selected_logits(
    network: Denoising, tokens: Tensor, sigma: Tensor, where: Tensor, attended: Tensor | None = None
) -> Tensor:
    """Logits (R, V) of the positions that `where` (B, L) selects, in order.

    The output layer runs on those alone. Shapes: tokens (B, L), sigma (B,), attended as `where`.
    """
    hidden = network.trunk(tokens, sigma, attended)[where]
    condition = network.condition(sigma)
    if condition.shape[0] > 1:
        condition = condition[where.nonzero()[:, 0]]
    return network.head(hidden, condition, network.config.num_tokens)


def split_padding(z: Tensor) -> tuple[Tensor, Tensor | None]:
    """Tokens that can be embedded, and which positions are attended (None: all)."""
    padded = z == PAD
    if not padded.any():
        return z, None
    return z.masked_fill(padded, 0), ~padded
