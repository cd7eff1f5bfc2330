"""Pretraining losses: masked diffusion, uniform-state diffusion, left to right.

Each objective works in three acts. `draw` makes the noise of a whole global batch on the CPU, a
pure function of the generator; `corrupt` applies it to some rows, still on the CPU, where looking
at the result costs no synchronisation; `loss` is the network's part. So processes and
micro-batches may slice a batch as they like and see the same noise.
"""

import math
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from didi_instruct.config.model import ModelConfig
from didi_instruct.config.train import CurriculumConfig
from didi_instruct.models.compile import compiled
from didi_instruct.models.layers import ALIGN
from didi_instruct.models.network import Mixture, aligned, all_logits, logits_at
from didi_instruct.process import masking, uniform
from didi_instruct.process.schedule import Schedule, make_schedule

Batch = dict[str, Tensor]


class Objective(Protocol):
    """A loss in nats per position: an upper bound of -log p(x) / L, or that itself.

    Where each text has a window of its own, what follows its end costs nothing, but its positions
    count: `training.likelihood` gives nats per token of text.
    """

    head_fraction: float
    """Share of positions at which the loss needs the output layer."""

    def draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Noise for `count` sequences, sequences along the first axis."""

    def corrupt(self, tokens: Tensor, *noise: Tensor) -> Batch:
        """Make the network's input from clean `tokens` (B, L)."""

    def loss(self, network: Any, batch: Batch) -> Tensor:
        """Nats per token of each sequence, (B,)."""


def make_objective(config: ModelConfig, *, compile: bool = False) -> Objective:
    """Return the pretraining objective of a model's kind; `compile` what is beside the network."""
    if config.kind == "mdlm":
        return MaskedObjective(config, compile=compile)
    return UniformObjective(config) if config.kind == "duo" else ARObjective(config)


def token_nll(logits: Tensor, targets: Tensor) -> Tensor:
    """-log p(target), in float32 whatever the logits: (R, V), (R,) -> (R,)."""
    return F.cross_entropy(logits.float(), targets, reduction="none")


class MaskedObjective:
    """NELBO of masked diffusion, Eq. (3): weight(t) times the NLL of the masked tokens."""

    head_fraction = 0.5

    def __init__(self, config: ModelConfig, *, compile: bool = False) -> None:
        assert config.mask_id is not None
        self.config, self.schedule = config, make_schedule(config.schedule)
        self.mask_id: int = config.mask_id
        # The number of masked rows differs from batch to batch.
        self._nll = compiled(token_nll, dynamic=True) if compile else token_nll

    def draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Draw times, a uniform number per position and, with several masks, a code per text."""
        times = masking.stratified_times(count, generator)
        noise = times, torch.rand(count, self.config.length, generator=generator)
        if self.config.masks == 1:
            return noise
        return *noise, torch.randint(self.config.masks, (count,), generator=generator)

    def corrupt(self, tokens: Tensor, *noise: Tensor) -> Batch:
        """Mask, each row with one of the masks, and list the masked positions."""
        t, uniforms, *code = noise
        length = tokens.shape[1]
        alpha = self.schedule.alpha(t)[:, None]
        z = masking.mask(tokens, alpha, self.mask_id, uniforms[:, :length])
        end_id, given = self.config.end_id, self.config.banned
        if end_id is not None or given:
            z = torch.where(masking.written(tokens, end_id, given), z, tokens)
        masked = (z == self.mask_id).flatten().nonzero().squeeze(1)
        weight = self.schedule.nelbo_weight(t) / length
        if code:
            z = masking.with_code(z, self.mask_id, *code)
        return {
            "z": z,
            "sigma": self.schedule.sigma(t),
            "rows": masked,
            "sequence": masked // length,
            "targets": tokens.flatten()[masked],
            "weight": weight[masked // length],
        }

    def loss(self, network: Any, batch: Batch) -> Tensor:
        """Weighted sum over the masked positions of each sequence, (B,).

        Without gradients a model with several masks has the law of their mixture, a pass for each.
        """
        z, masks = batch["z"], self.config.masks
        if masks == 1 or torch.is_grad_enabled():
            nll = self._masked_nll(network, batch, z)
        else:
            coded = (torch.where(z < self.mask_id, z, self.mask_id + n) for n in range(masks))
            each = torch.stack([self._masked_nll(network, batch, z) for z in coded])
            nll = math.log(masks) - each.neg().logsumexp(0)
        zeros: Tensor = nll.new_zeros(len(z))
        return zeros.index_add(0, batch["sequence"], batch["weight"] * nll)

    def _masked_nll(self, network: Any, batch: Batch, z: Tensor) -> Tensor:
        """-log p of the true token at each masked position: (R,)."""
        # An odd number of columns is slow on a GPU.
        with aligned(network, ALIGN):
            logits = logits_at(network, z, batch["sigma"], batch["rows"], batch.get("attended"))
        return self._nll(logits, batch["targets"])


class UniformObjective:
    """NELBO of uniform-state diffusion (DUO)."""

    head_fraction = 1.0

    def __init__(self, config: ModelConfig) -> None:
        self.config, self.schedule = config, make_schedule(config.schedule)

    def draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Draw times, uniforms, and the token that each position would be replaced with."""
        times = masking.stratified_times(count, generator)
        shape = (count, self.config.length)
        uniforms = torch.rand(shape, generator=generator)
        return times, uniforms, torch.randint(self.config.num_tokens, shape, generator=generator)

    def corrupt(self, tokens: Tensor, *noise: Tensor) -> Batch:
        """Replace tokens by random ones with probability 1 - alpha_t."""
        t, uniforms, random_tokens = noise
        length = tokens.shape[1]
        levels = _levels(self.schedule, t)
        others = random_tokens[:, :length]
        z = uniform.corrupt(tokens, levels["alpha"], uniforms[:, :length], others)
        return {**levels, "x": tokens, "z": z}

    def loss(self, network: Any, batch: Batch) -> Tensor:
        return _uniform_loss(network, batch)


class SoftObjective:
    """The uniform-state objective on softened tokens, for DUO's curriculum."""

    head_fraction = 1.0

    def __init__(self, config: ModelConfig, temperature: float, tokens: int) -> None:
        self.config, self.schedule = config, make_schedule(config.schedule)
        self.temperature, self.others = temperature, min(tokens, config.num_tokens) - 1

    def draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Draw times, and the numbers that the latent's largest entries are made from."""
        times = masking.stratified_times(count, generator)
        shape = (count, self.config.length, 2 * self.others + 1)
        return times, torch.rand(shape, generator=generator, dtype=torch.float64)

    def corrupt(self, tokens: Tensor, *noise: Tensor) -> Batch:
        """Mix tokens with noise; the state z is the one of most weight."""
        t, numbers = noise
        levels = _levels(self.schedule, t)
        uniforms, picks = numbers[:, : tokens.shape[1]].tensor_split([self.others + 1], -1)
        found, weights = uniform.soft_state(
            tokens, levels["alpha"], self.config.num_tokens, self.temperature, uniforms, picks
        )
        z = found.gather(-1, weights.argmax(-1, keepdim=True)).squeeze(-1)
        return {**levels, "x": tokens, "z": z, "tokens": found, "weights": weights}

    def loss(self, network: Any, batch: Batch) -> Tensor:
        return _uniform_loss(network, batch)


def _levels(schedule: Schedule, t: Tensor) -> Batch:
    """σ, α and its slope at times (B,)."""
    return {
        "sigma": schedule.sigma(t),
        "alpha": schedule.alpha(t)[:, None],
        "alpha_prime": schedule.alpha_prime(t)[:, None],
    }


def _uniform_loss(network: Any, batch: Batch) -> Tensor:
    """Mean of the NELBO's integrand over positions, (B,).

    Of softened tokens the network reads the weighted embeddings in place of z.
    """
    mixture = None
    if "weights" in batch:
        vectors, weights = network.vectors, batch["weights"].flatten(0, 1)
        tokens, weights = batch["tokens"].flatten(0, 1), weights.to(vectors.dtype)
        mixed = F.embedding_bag(tokens, vectors, per_sample_weights=weights, mode="sum")
        mixture = Mixture(None, mixed)
    logits = all_logits(network, batch["z"], batch["sigma"], mixture=mixture).float()
    text = [batch[name] for name in ("x", "z", "alpha", "alpha_prime")]
    return uniform.nelbo_integrand(logits, *text).mean(1)


def temperature_at(step: int, config: CurriculumConfig) -> float | None:
    """Temperature of a step, its logarithm changing evenly; None once the curriculum is over."""
    if step >= config.steps:
        return None
    first, last = config.temperature
    return float(first * (last / first) ** (step / config.steps))


class ARObjective:
    """Exact negative log-likelihood, left to right from the start symbol."""

    head_fraction = 1.0

    def __init__(self, config: ModelConfig) -> None:
        self.config = config

    def draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        return ()

    def corrupt(self, tokens: Tensor, *noise: Tensor) -> Batch:
        """The tokens as they are; where texts end inside their window, with their lengths."""
        end_id = self.config.end_id
        if end_id is None:
            return {"x": tokens}
        # The end itself is to be learnt.
        count = (masking.before_end(tokens, end_id).sum(1) + 1).clamp(max=tokens.shape[1])
        return {"x": tokens, "count": count}

    def loss(self, network: Any, batch: Batch) -> Tensor:
        """Mean over the window's positions of -log p(x^l | x^<l), 0 after the end of a text."""
        log_prob: Tensor = network.log_prob(batch["x"], batch.get("count"))
        return -log_prob / batch["x"].shape[1]
