"""AR-entropy bound: how far a sampler's law is from a judge's at least, for any sampler.

A small left-to-right model, trained on some samples, is asked about others. Whatever it learned,
its cross-entropy on samples that it never saw is at least their entropy, so

    judge cross-entropy - cross-entropy of the AR model  <=  KL(sampler || judge)

up to the standard error over the held-out samples. A model that learned little makes the bound low,
never wrong. It needs the judge's exact -log p: an upper bound of that (a NELBO) proves nothing here.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from didi_instruct.config.model import ModelConfig
from didi_instruct.config.pretrain import OptimConfig
from didi_instruct.errors import TrainingError, UserError
from didi_instruct.models.ar import ARModel
from didi_instruct.seeding import mix
from didi_instruct.training.optim import Updater

FEWEST_SAMPLES = 64
"""Below, a split leaves too little to learn from and to measure."""
VALID, HELD_OUT = 0.1, 0.2
"""Shares of the samples."""
LOOKS, PATIENCE = 20, 5
"""Validations in a full training, and how many without progress end it."""
AT_ONCE = 1 << 26
"""Numbers in the largest tensor of a forward pass: 256 MiB of logits."""


@dataclass(frozen=True, slots=True)
class ArBound:
    """Nats per sequence, over the held-out samples."""

    cross_entropy: float
    """Of the samples under the AR model: an upper bound of their entropy."""
    judge_nats: float
    """Cross-entropy under the judge."""
    kl_lower: float
    """judge_nats - cross_entropy; below 0 it says nothing."""
    se: float
    """Standard error of kl_lower, over pairs."""
    train: int
    valid: int
    held_out: int
    """Samples of each split."""
    best_step: int
    """Step of training whose model was kept."""


def ar_kl(
    samples: Tensor,
    judge_nats: Tensor,
    num_tokens: int,
    *,
    layers: int = 2,
    hidden: int = 128,
    heads: int = 4,
    steps: int = 2000,
    batch_size: int = 64,
    lr: float = 1e-3,
    seed: int = 0,
    device: torch.device | str = "cpu",
    progress: Callable[[int], None] | None = None,
) -> ArBound:
    """Bound KL(sampler || judge) from below, given samples and the judge's -log p of each.

    Samples are independent draws; what does not count in a row, as after an end-of-text, is to be
    overwritten by one token. On a CPU the result is a function of the arguments; `progress` is
    told the steps done.

    Shapes: samples (N, L), ids below `num_tokens`; judge_nats (N,).
    """
    check_tokens(samples, num_tokens, "The samples")
    nats = judge_nats.double().cpu()
    if nats.shape != (len(samples),):
        raise ValueError(f"{len(samples)} samples, but the judge's nats are {tuple(nats.shape)}")
    if not bool(nats.isfinite().all()):
        raise UserError("The judge gave a sample no finite -log p: use another judge, or float32.")
    length = samples.shape[1]
    config = ModelConfig(
        kind="ar",
        layers=layers,
        hidden=hidden,
        heads=heads,
        vocab_size=num_tokens + 1,
        length=length,
        learned_positions=True,
    )
    split = Split.draw(len(samples), seed)
    with seeded_weights(seed):
        model = ARModel(config).to(device)
    tokens = samples.long().to(device)

    def loss(rows: Tensor) -> Tensor:
        """Nats per token of each of those samples."""
        return -model.log_prob(tokens[rows.to(device)]) / length

    best_step = fit(
        model,
        loss,
        split,
        optim=OptimConfig(lr=lr, warmup=min(100, steps // 10)),
        steps=steps,
        batch_size=batch_size,
        at_once=AT_ONCE // (length * num_tokens),
        seed=seed,
        progress=progress,
    )
    own = length * apply(loss, split.held_out, AT_ONCE // (length * num_tokens))
    judged = nats[split.held_out]
    gaps = judged - own
    return ArBound(
        cross_entropy=own.mean().item(),
        judge_nats=judged.mean().item(),
        kl_lower=gaps.mean().item(),
        se=gaps.std().item() / math.sqrt(len(gaps)),
        train=len(split.train),
        valid=len(split.valid),
        held_out=len(split.held_out),
        best_step=best_step,
    )


@dataclass(frozen=True, slots=True)
class Split:
    """Rows to learn from, to stop by and to measure on: every row in one of the three."""

    train: Tensor
    valid: Tensor
    held_out: Tensor

    @classmethod
    def draw(cls, count: int, seed: int) -> "Split":
        """Shuffle `count` rows and cut."""
        order = torch.randperm(count, generator=_stream(seed, "split"))
        held_out, valid = round(HELD_OUT * count), round(VALID * count)
        return cls(order[held_out + valid :], order[held_out : held_out + valid], order[:held_out])


def fit(
    network: nn.Module,
    loss: Callable[[Tensor], Tensor],
    split: Split,
    *,
    optim: OptimConfig,
    steps: int,
    batch_size: int,
    at_once: int,
    seed: int,
    progress: Callable[[int], None] | None = None,
) -> int:
    """Train a network until its validation loss no longer falls; return the step of the best.

    `loss` maps numbers of rows (R,) to the loss of each (R,); it sees at most `at_once` of them in
    a pass. The network is left with the weights that validated best.
    """
    if steps < 1 or batch_size < 1:
        raise UserError(f"steps is {steps} and batch_size is {batch_size}: use 1 or more of both.")
    updater = Updater(network, optim, steps, ema=0)
    every = max(1, steps // LOOKS)
    best, best_step, kept = math.inf, 0, {}
    order = torch.empty(0, dtype=torch.long)
    shuffle = _stream(seed, "order")
    for step in range(steps):
        while len(order) < batch_size:  # what is left of an epoch begins the next
            more = torch.randperm(len(split.train), generator=shuffle)
            order = torch.cat([order, split.train[more]])
        rows, order = order[:batch_size], order[batch_size:]
        for part in rows.split(max(1, at_once)):
            (loss(part).sum() / len(rows)).backward()
        updater.update(step)
        if progress is not None:
            progress(step + 1)
        if (step + 1) % every and step + 1 < steps:
            continue
        found = apply(loss, split.valid, at_once).mean().item()
        if found < best:
            best, best_step = found, step + 1
            kept = {name: value.clone() for name, value in network.state_dict().items()}
        elif step + 1 - best_step >= PATIENCE * every:
            break
    if not kept:
        raise TrainingError("The validation loss was never a number: use a smaller lr.")
    network.load_state_dict(kept)
    return best_step


@torch.no_grad()
def apply(function: Callable[[Tensor], Tensor], rows: Tensor, at_once: int) -> Tensor:
    """Ask a function of row numbers part by part, without gradients: (R,), float64, on the CPU."""
    return torch.cat([function(part).double().cpu() for part in rows.split(max(1, at_once))])


@contextmanager
def seeded_weights(seed: int) -> Iterator[None]:
    """Draw the weights of networks built inside from a stream of their own, on the CPU."""
    before = torch.default_generator.get_state()
    torch.default_generator.manual_seed(mix(seed, "init"))
    try:
        yield
    finally:
        torch.default_generator.set_state(before)


def check_tokens(tokens: Tensor, num_tokens: int, name: str) -> None:
    """Refuse what is not a table of enough texts."""
    if tokens.ndim != 2 or tokens.is_floating_point() or tokens.shape[1] == 0:
        raise ValueError(f"{name} are (N, L) token ids, not {tokens.dtype} {tuple(tokens.shape)}")
    if len(tokens) < FEWEST_SAMPLES:
        raise UserError(
            f"{name} are {len(tokens)}, too few to learn from some and measure on others: "
            f"draw {FEWEST_SAMPLES} or more, better thousands."
        )
    if tokens.min() < 0 or tokens.max() >= num_tokens:
        raise UserError(
            f"{name} hold ids outside 0 to {num_tokens - 1}: masks and padding are not text."
        )


def _stream(seed: int, purpose: str) -> torch.Generator:
    return torch.Generator().manual_seed(mix(seed, purpose))
