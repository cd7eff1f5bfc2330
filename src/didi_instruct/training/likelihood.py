"""Likelihood of held-out text: NELBO of a diffusion model, exact NLL of an AR model."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypedDict, Unpack

import torch

from didi_instruct.config.model import ModelConfig
from didi_instruct.data.dataset import TokenSource
from didi_instruct.errors import UserError
from didi_instruct.process.masking import LengthLaw, before_end, written
from didi_instruct.seeding import mix
from didi_instruct.training.objectives import Batch, Objective, make_objective

NOISE_CHUNK = 256
"""Sequences whose noise is drawn together."""

Loss = Callable[[Batch], torch.Tensor]
"""A network's part of an objective: nats per position of each sequence, (B,)."""
Rows = Callable[[int, int], torch.Tensor]
"""Rows of tokens, from a start, so many: (count, L)."""
LogLikelihood = Callable[[torch.Tensor], torch.Tensor]
"""Log p of texts (B, L), or a lower bound of it, wherever they are: (B,), float64."""


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


def evaluation_config(config: ModelConfig) -> ModelConfig:
    """Return the model's settings with eps = 0 where the network cannot tell.

    The bound is the same for every schedule that runs from 1 to 0; with eps > 0 it leaves out the
    tokens still visible at t = 1. A network without time conditioning sees only z, so the exact
    integral is free.
    """
    if config.kind == "mdlm" and not config.time_conditioning:
        return replace(config, schedule=replace(config.schedule, eps=0.0))
    return config


class Options(TypedDict, total=False):
    """How a likelihood is estimated; the defaults are those of `losses`."""

    draws: int
    batch_size: int
    seed: int
    device: torch.device | str
    progress: Callable[[int], None] | None


def likelihood(
    loss: Loss, config: ModelConfig, data: Rows, *, sequences: int, **options: Unpack[Options]
) -> Likelihood:
    """Estimate nats per token over `sequences` rows of `data`, as `nats_of_texts` does.

    Texts of lengths that the model never draws are left out, as `sequences` of the result says. The
    interval comes from the spread between sequences, which overstates the error a little, since
    their times are stratified.
    """
    nats, counts = nats_of_texts(loss, config, data, sequences=sequences, **options)
    if config.kind == "mdlm" and config.end_id is not None:
        drawn = LengthLaw(config.lengths).allows(counts.long().clamp(min=1))
        if not drawn.any():
            raise UserError(
                f"None of the {len(counts)} held-out texts has a length that the model draws: use "
                "others (data.source), or another law of lengths."
            )
        nats, counts = nats[drawn], counts[drawn]
    # Where texts differ in length, all tokens count alike: a ratio of two means.
    mean = (nats.sum() / counts.sum()).item()
    residual = (nats - mean * counts) / counts.mean()
    half = 1.96 * residual.std().item() / math.sqrt(len(nats)) if len(nats) > 1 else math.inf
    return Likelihood(
        nats_per_token=mean,
        ci95=(mean - half, mean + half),
        ppl=perplexity(mean),
        ppl_ci95=(perplexity(mean - half), perplexity(mean + half)),
        sequences=len(nats),
        draws=1 if config.kind == "ar" else options.get("draws", 1),
        bound=config.kind != "ar",
    )


@torch.no_grad()
def nats_of_texts(
    loss: Loss, config: ModelConfig, data: Rows, *, sequences: int, **options: Unpack[Options]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Nats of each of `sequences` rows of `data`, and its tokens: float64 (N,) each.

    Where each text has a window of its own, the nats are those of the text up to its end, the cost
    of its length included, and the tokens are those before the end. Banned tokens are given: they
    have no cost and are not counted.

    Times are stratified over chunks of sequences and all their draws, so the mean varies less than
    with independent ones. The batch size changes nothing but memory.
    """
    objective = make_objective(evaluation_config(config))
    if config.kind == "ar":
        options = {**options, "draws": 1}
    measured = losses(loss, objective, data, sequences=sequences, **options)
    nats, counts = [], []
    for tokens, mean in measured:
        written, length_nats = _lengths(config, tokens)
        nats.append(mean * tokens.shape[1] + length_nats)
        counts.append(written)
    return torch.cat(nats), torch.cat(counts)


def nelbo_judge(loss: Loss, config: ModelConfig, **options: Unpack[Options]) -> LogLikelihood:
    """Minus the NELBO of a diffusion model, or the exact log p of an AR model.

    The NELBO is estimated without bias, from 8 noise levels per text unless `draws` is given. The
    noise follows the row, so samplers that are compared row by row are judged under the same. Where
    texts have windows of their own they are judged up to their ends, the cost of their lengths
    included.
    """
    how: Options = {"draws": 8, **options}

    def judge(texts: torch.Tensor) -> torch.Tensor:
        def rows(start: int, count: int) -> torch.Tensor:
            return texts[start : start + count].cpu()

        nats, _ = nats_of_texts(loss, config, rows, sequences=len(texts), **how)
        return -nats

    return judge


@torch.no_grad()
def losses(
    loss: Loss,
    objective: Objective,
    data: Rows,
    *,
    sequences: int,
    draws: int = 1,
    batch_size: int = 64,
    seed: int = 0,
    device: torch.device | str = "cpu",
    progress: Callable[[int], None] | None = None,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Rows of `data` and their losses (B,), float64, in batches: means over draws.

    Noise depends on the seed and on a row's place alone, so two models, or one before and after
    training, are measured under the same noise.
    """
    for start in range(0, sequences, NOISE_CHUNK):
        count = min(NOISE_CHUNK, sequences - start)
        generator = torch.Generator().manual_seed(mix(seed, "likelihood", start))
        noise = objective.draw(count * draws, generator)
        for first in range(0, count, batch_size):
            tokens = data(start + first, min(batch_size, count - first))
            total = torch.zeros(len(tokens), dtype=torch.float64)
            for k in range(draws):
                rows = range(first * draws + k, (first + len(tokens)) * draws, draws)
                batch = objective.corrupt(tokens, *(n[rows] for n in noise))
                total += loss({k: v.to(device) for k, v in batch.items()}).double().cpu()
            yield tokens, total / draws
            if progress is not None:
                progress(start + first + len(tokens))


def _lengths(config: ModelConfig, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of each text, and what telling that costs a model that is given it: (B,) each."""
    free = torch.zeros(len(tokens), dtype=torch.float64)
    if config.end_id is None and not config.banned:
        return free + tokens.shape[1], free
    count = written(tokens, config.end_id, config.banned).sum(1)
    if config.end_id is not None and config.kind == "mdlm":
        length = before_end(tokens, config.end_id).sum(1)
        free = -LengthLaw(config.lengths).log_prob(length.clamp(min=1))
    return count.double(), free


def perplexity(nats_per_token: float) -> float:
    """exp, infinite where a float cannot hold it."""
    return math.exp(nats_per_token) if nats_per_token < 700 else math.inf


def check_data(config: ModelConfig, tokenizer_hash: str | None, data: TokenSource) -> None:
    """Refuse data that this model cannot read: other tokens, or longer rows."""
    if tokenizer_hash is not None and data.tokenizer.hash != tokenizer_hash:
        raise UserError(
            "The data was tokenised with another tokenizer than the model's: "
            "prepare it again with --tokenizer MODEL_FOLDER."
        )
    if data.num_tokens > config.num_tokens:
        raise UserError(
            f"The data has {data.num_tokens} token ids, but the model knows {config.num_tokens}: "
            "prepare it again with the model's tokenizer."
        )
    if data.length > config.length:
        raise UserError(
            f"The data has rows of {data.length} tokens, but the model reads at most "
            f"{config.length}: prepare it again with --length {config.length} or less."
        )
