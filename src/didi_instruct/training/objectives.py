"""Pretraining losses: masked diffusion, uniform-state diffusion, left to right.

Each objective works in three acts. `draw` makes the noise of a whole global batch on the CPU, a
pure function of the generator; `corrupt` applies it to some rows, still on the CPU, where looking
at the result costs no synchronisation; `loss` is the network's part. So processes and
micro-batches may slice a batch as they like and see the same noise.
"""

import math
from typing import TYPE_CHECKING, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from didi_instruct.config.model import ModelConfig
from didi_instruct.config.pretrain import CurriculumConfig
from didi_instruct.models.compile import compiled
from didi_instruct.models.layers import ALIGN
from didi_instruct.models.network import Mixture, aligned, all_logits, logits_at
from didi_instruct.process import masking, uniform
from didi_instruct.process.masking import before_end
from didi_instruct.process.schedule import make_schedule
from didi_instruct.process.uniform import soft_state

if TYPE_CHECKING:
    from collections.abc import Callable

    from didi_instruct.models.ar import ARModel
    from didi_instruct.models.network import Network

Batch = dict[str, Tensor]


def token_nll(logits: Tensor, targets: Tensor) -> Tensor:
    """-log p(target), in float32 whatever the logits: (R, V), (R,) -> (R,)."""
    return F.cross_entropy(logits.float(), targets, reduction="none")


class Objective(Protocol):
    """A loss in nats per position: an upper bound of -log p(x) / L, or that itself.

    Where each text has a window of its own, what follows its end costs nothing, but its positions
    count: `evaluation.likelihood` tells nats per token of text.
    """

    head_fraction: float
    """Share of positions at which the loss needs the output layer."""

    def draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Noise for `count` sequences, sequences along the first axis."""

    def corrupt(self, tokens: Tensor, *noise: Tensor) -> Batch:
        """Make the network's input from clean `tokens` (B, L)."""

    def loss(self, model: torch.nn.Module, batch: Batch) -> Tensor:
        """Nats per token of each sequence, (B,)."""

    def compile(self) -> None:
        """Compile what the objective computes beside the network."""


class MaskedObjective:
    """NELBO of masked diffusion, Eq. (3): weight(t) times the NLL of the masked tokens."""

    head_fraction = 0.5
    align = ALIGN
    """Columns of the logits are padded to a multiple: an odd width is slow on a GPU."""

    def __init__(self, config: ModelConfig) -> None:
        self.config, self.schedule = config, make_schedule(config.schedule)
        self._nll: Callable[[Tensor, Tensor], Tensor] = token_nll

    def compile(self) -> None:
        """Compile the softmax; the number of masked rows differs from batch to batch."""
        self._nll = compiled(token_nll, dynamic=True)

    def draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        """One time per stratum of (0, 1), one uniform per position."""
        times = masking.stratified_times(count, generator)
        noise = times, torch.rand(count, self.config.length, generator=generator)
        if self.config.masks == 1:
            return noise
        return *noise, torch.randint(self.config.masks, (count,), generator=generator)

    def corrupt(self, tokens: Tensor, *noise: Tensor) -> Batch:
        """Mask, and list the masked positions: the only rows that the output layer sees.

        Where there are several masks, each row has one of them.
        """
        t, uniforms, *code = noise
        mask_id = self.config.mask_id
        assert mask_id is not None
        length = tokens.shape[1]
        z = masking.mask(tokens, self.schedule.alpha(t)[:, None], mask_id, uniforms[:, :length])
        if self.config.end_id is not None:
            z = torch.where(before_end(tokens, self.config.end_id), z, tokens)
        masked = (z == mask_id).flatten().nonzero().squeeze(1)
        weight = self.schedule.nelbo_weight(t) / length
        for which in code:
            z = masking.with_code(z, mask_id, which)
        return {
            "z": z,
            "sigma": self.schedule.sigma(t),
            "rows": masked,
            "sequence": masked // length,
            "targets": tokens.flatten()[masked],
            "weight": weight[masked // length],
        }

    def loss(self, model: torch.nn.Module, batch: Batch) -> Tensor:
        """Weighted sum over the masked positions of each sequence.

        While measuring, a model with several masks has the law of their mixture, a pass for each.
        """
        z, sequence = batch["z"], batch["sequence"]
        if self.config.masks == 1 or torch.is_grad_enabled():
            nll = self._masked_nll(model, batch, z)
        else:
            first, codes = self.config.mask_id, range(self.config.masks)
            assert first is not None
            each = [
                self._masked_nll(model, batch, torch.where(z < first, z, first + code))
                for code in codes
            ]
            nll = math.log(len(codes)) - torch.stack(each).neg().logsumexp(0)
        zeros: Tensor = nll.new_zeros(len(z))
        return zeros.index_add(0, sequence, batch["weight"] * nll)

    def _masked_nll(self, model: torch.nn.Module, batch: Batch, z: Tensor) -> Tensor:
        """-log p of the true token at each masked position: (R,)."""
        with aligned(cast("Network", model), self.align) as network:
            logits = logits_at(network, z, batch["sigma"], batch["rows"])
        return self._nll(logits, batch["targets"])


class UniformObjective:
    """NELBO of uniform-state diffusion (DUO)."""

    head_fraction = 1.0

    def __init__(self, config: ModelConfig) -> None:
        self.config, self.schedule = config, make_schedule(config.schedule)

    def compile(self) -> None:
        """Nothing: the integrand works chunk by chunk already."""

    def draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Times, uniforms, and the token that each position would be replaced with."""
        times = masking.stratified_times(count, generator)
        shape = (count, self.config.length)
        uniforms = torch.rand(shape, generator=generator)
        return times, uniforms, torch.randint(self.config.num_tokens, shape, generator=generator)

    def corrupt(self, tokens: Tensor, *noise: Tensor) -> Batch:
        """Replace tokens by random ones with probability 1 - alpha_t."""
        t, uniforms, random_tokens = noise
        length = tokens.shape[1]
        alpha = self.schedule.alpha(t)[:, None]
        z = uniform.corrupt(tokens, alpha, uniforms[:, :length], random_tokens[:, :length])
        return {**self.levels(t), "x": tokens, "z": z}

    def levels(self, t: Tensor) -> Batch:
        """Compute σ, α and its slope at times (B,)."""
        return {
            "sigma": self.schedule.sigma(t),
            "alpha": self.schedule.alpha(t)[:, None],
            "alpha_prime": self.schedule.alpha_prime(t)[:, None],
        }

    def loss(self, model: torch.nn.Module, batch: Batch) -> Tensor:
        """Mean of the integrand over positions.

        Where there are `tokens` and their `weights`, the network reads mixtures of embeddings in
        place of z (`SoftObjective`).
        """
        network = cast("Network", model)
        mixture = _mixed(network, batch) if "weights" in batch else None
        logits = all_logits(network, batch["z"], batch["sigma"], mixture=mixture).float()
        terms = uniform.nelbo_integrand(
            logits, batch["x"], batch["z"], batch["alpha"], batch["alpha_prime"]
        )
        return terms.mean(1)


def _mixed(network: "Network", batch: Batch) -> Mixture:
    """Embeddings of some tokens at every position, added up by their weights."""
    tokens, weights, vectors = batch["tokens"], batch["weights"], network.vectors
    mixed = F.embedding_bag(
        tokens.flatten(0, 1),
        vectors,
        per_sample_weights=weights.flatten(0, 1).to(vectors.dtype),
        mode="sum",
    )
    return Mixture(None, mixed)


class ARObjective:
    """Exact negative log-likelihood, left to right from the start symbol."""

    head_fraction = 1.0

    def __init__(self, config: ModelConfig) -> None:
        self.config = config

    def compile(self) -> None:
        """Nothing beside the network."""

    def draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Nothing is random."""
        return ()

    def corrupt(self, tokens: Tensor, *noise: Tensor) -> Batch:
        """Nothing is corrupted; where texts end inside their window, tell how long they are."""
        end_id = self.config.end_id
        if end_id is None:
            return {"x": tokens}
        # The end itself is to be learnt.
        count = (before_end(tokens, end_id).sum(1) + 1).clamp(max=tokens.shape[1])
        return {"x": tokens, "count": count}

    def loss(self, model: torch.nn.Module, batch: Batch) -> Tensor:
        """Mean over the window's positions of -log p(x^l | x^<l), 0 after the end of a text."""
        inner: ARModel = model  # type: ignore[assignment]
        return -inner.log_prob(batch["x"], batch.get("count")) / batch["x"].shape[1]


def make_objective(config: ModelConfig) -> Objective:
    """Return the pretraining objective of a model's kind."""
    kinds: dict[str, Callable[[ModelConfig], Objective]] = {
        "mdlm": MaskedObjective,
        "duo": UniformObjective,
        "ar": ARObjective,
    }
    return kinds[config.kind](config)


def temperature_at(step: int, config: CurriculumConfig) -> float | None:
    """Temperature of a step, its logarithm changing evenly; None once the curriculum is over."""
    if step >= config.steps:
        return None
    first, last = config.temperature
    return float(first * (last / first) ** (step / config.steps))


class SoftObjective(UniformObjective):
    """The uniform-state objective on softened tokens."""

    def __init__(self, config: ModelConfig, temperature: float, tokens: int) -> None:
        super().__init__(config)
        self.temperature, self.others = temperature, min(tokens, config.num_tokens) - 1

    def draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Times, and the numbers that the latent's largest entries are made from."""
        times = masking.stratified_times(count, generator)
        shape = (count, self.config.length, 2 * self.others + 1)
        return times, torch.rand(shape, generator=generator, dtype=torch.float64)

    def corrupt(self, tokens: Tensor, *noise: Tensor) -> Batch:
        """Mix tokens with noise; the state z is the one of most weight."""
        t, numbers = noise
        alpha = self.schedule.alpha(t)[:, None]
        uniforms, picks = numbers[:, : tokens.shape[1]].tensor_split([self.others + 1], -1)
        found, weights = soft_state(
            tokens, alpha, self.config.num_tokens, self.temperature, uniforms, picks
        )
        z = found.gather(-1, weights.argmax(-1, keepdim=True)).squeeze(-1)
        return {**self.levels(t), "x": tokens, "z": z, "tokens": found, "weights": weights}
