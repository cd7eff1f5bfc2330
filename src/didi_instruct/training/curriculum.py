"""DUO's curriculum: a uniform-state model first learns from tokens that are not quite noise yet.

The network reads softmax(w_t / temperature) of the Gaussian latent w_t, a mixture of embeddings, in
place of the one token argmax w_t, so it is told how near other tokens came. Everything else is the
uniform-state objective, state and levels of noise included: as the temperature falls to 0 the
mixture becomes the token, and the loss that of `UniformObjective`.

DUO draws the latent's log noise-to-signal ratio uniformly between two bounds meanwhile, which
leaves out both ends of time; here times are those of the schedule from the first step on.
"""

import torch
from torch import Tensor

from didi_instruct.config.model import ModelConfig
from didi_instruct.config.pretrain import CurriculumConfig
from didi_instruct.process import masking
from didi_instruct.process.latents import soft_state
from didi_instruct.training.objectives import Batch, UniformObjective


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
