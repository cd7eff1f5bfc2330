"""Likelihood of held-out text: NELBO of a diffusion model, exact NLL of an AR model."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import torch

from didi_instruct.config.model import ModelConfig
from didi_instruct.data.dataset import TokenSource
from didi_instruct.errors import UserError
from didi_instruct.seeding import mix
from didi_instruct.training.objectives import Batch, make_objective


@dataclass(frozen=True, slots=True)
class Likelihood:
    """Nats per token, with the uncertainty of data and noise together."""

    nats_per_token: float
    ci95: tuple[float, float]
    ppl: float
    ppl_ci95: tuple[float, float]
    sequences: int
    draws: int
    """Noise levels tried per sequence."""
    bound: bool
    """Whether this is an upper bound (diffusion) or exact (AR)."""

    def as_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        return asdict(self)


def evaluation_config(config: ModelConfig) -> ModelConfig:
    """Return the model's settings with eps = 0 where the network cannot tell.

    The bound is the same for every schedule that runs from 1 to 0; with eps > 0 it leaves out the
    tokens still visible at t = 1. A network without time conditioning sees only z, so the exact
    integral is free.
    """
    if config.kind == "mdlm" and not config.time_conditioning:
        return replace(config, schedule=replace(config.schedule, eps=0.0))
    return config


@torch.no_grad()
def likelihood(
    loss: Callable[[Batch], torch.Tensor],
    config: ModelConfig,
    data: Callable[[int, int], torch.Tensor],
    *,
    sequences: int,
    draws: int = 1,
    batch_size: int = 64,
    seed: int = 0,
    device: torch.device | str = "cpu",
    progress: Callable[[int], None] | None = None,
) -> Likelihood:
    """Estimate nats per token over `sequences` rows of `data(start, count)`.

    `loss` is the network's part of the objective: batch -> nats per token of each sequence.

    Times are stratified over each batch and all its draws, so the estimate varies less than with
    independent ones; the interval comes from the spread between sequences, which overstates
    the error a little for that reason.
    """
    objective = make_objective(evaluation_config(config))
    draws = 1 if config.kind == "ar" else draws
    means = []
    for start in range(0, sequences, batch_size):
        tokens = data(start, min(batch_size, sequences - start))
        generator = torch.Generator().manual_seed(mix(seed, "likelihood", start))
        noise = objective.draw(len(tokens) * draws, generator)
        batch = objective.corrupt(tokens.repeat_interleave(draws, 0), *noise)
        losses = loss({k: v.to(device) for k, v in batch.items()})
        means.append(losses.double().view(-1, draws).mean(1).cpu())
        if progress is not None:
            progress(min(start + batch_size, sequences))
    values = torch.cat(means)
    if not torch.isfinite(values).all():
        raise UserError("The model's loss on this data is not a number: its weights are damaged.")
    mean = values.mean().item()
    half = 1.96 * values.std().item() / math.sqrt(len(values)) if len(values) > 1 else math.inf
    low, high = mean - half, mean + half
    return Likelihood(
        nats_per_token=mean,
        ci95=(low, high),
        ppl=math.exp(mean),
        ppl_ci95=(math.exp(low), math.exp(high) if high < 700 else math.inf),
        sequences=len(values),
        draws=draws,
        bound=config.kind != "ar",
    )


def check_data(config: ModelConfig, tokenizer_hash: str | None, data: TokenSource) -> None:
    """Refuse data that this model cannot read: other tokens, or longer rows."""
    if tokenizer_hash is not None and data.tokenizer.hash != tokenizer_hash:
        raise UserError(
            "The data was tokenised with another tokenizer than the model's: "
            "prepare it again with --tokenizer MODEL_FOLDER."
        )
    if data.length > config.length:
        raise UserError(
            f"The data has rows of {data.length} tokens, but the model reads at most "
            f"{config.length}: prepare it again with --length {config.length} or less."
        )
