"""AR-entropy bound: how far a sampler's law is from a judge's at least, for any sampler.

A small left-to-right model, trained on some samples, is asked about others. Whatever it learned,
its cross-entropy on samples that it never saw is at least their entropy, so

    judge cross-entropy - cross-entropy of the AR model  <=  KL(sampler || judge)

up to the standard error over the held-out samples. A model that learned little makes the bound low,
never wrong. It needs the judge's exact -log p: with an upper bound of that (a NELBO) the difference
proves nothing.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from didi_instruct.config.model import ModelConfig
from didi_instruct.config.pretrain import OptimConfig
from didi_instruct.errors import TrainingError, UserError
from didi_instruct.models.ar import ARModel
from didi_instruct.seeding import mix
from didi_instruct.training.optim import Updater

FEWEST_SAMPLES = 64
"""Below, a split leaves too little to learn from and to measure on."""
VALID, HELD_OUT = 0.1, 0.2
"""Shares of the samples."""
LOOKS = 20
"""Validations in a full training."""
PATIENCE, WORSE = 5, 0.05
"""So many validations in a row, worse than the best by this share, end it. A plateau does not."""
LOGITS_AT_ONCE = 1 << 26
"""Logits of a forward pass: 256 MiB of them."""

Progress = Callable[[int], None]
"""Told the steps done."""


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
    """Standard error of kl_lower, over samples: both terms see the same."""
    train: int
    valid: int
    held_out: int
    """Samples of each split."""
    best_step: int
    """Step of training whose model was kept; if the last, more steps may raise the bound."""


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
    progress: Progress | None = None,
) -> ArBound:
    """Bound KL(sampler || judge) from below, given samples and the judge's -log p of each.

    Samples are independent draws. What does not count in a row, as after an end-of-text, is to be
    overwritten by one token. The samples are split, and the model made and trained, by the seed.

    Shapes: samples (N, L), ids below `num_tokens`; judge_nats (N,).
    """
    check_tokens(samples, num_tokens, "The samples")
    nats = judge_nats.double().cpu()
    if nats.shape != (len(samples),):
        raise ValueError(f"{len(samples)} samples, but the judge's nats are {tuple(nats.shape)}")
    if not bool(nats.isfinite().all()):
        raise UserError("The judge gave a sample no finite -log p: use another judge, or float32.")
    split = Split.draw(len(samples), seed)
    learner = Learner(layers, hidden, heads, steps, batch_size, lr, seed)
    log_prob, best_step = fit_ar(samples.long().to(device), split, num_tokens, learner, progress)
    own, judged = -log_prob(split.held_out), nats[split.held_out]
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


class Split(NamedTuple):
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


@dataclass(frozen=True, slots=True)
class Learner:
    """A small network and how it is trained."""

    layers: int
    hidden: int
    heads: int
    steps: int
    batch_size: int
    lr: float
    seed: int

    def __post_init__(self) -> None:
        """Refuse what cannot train."""
        for name in ("steps", "batch_size"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}: use 1 or more.")

    @contextmanager
    def weights(self) -> Iterator[None]:
        """Draw the weights of a network built inside from a stream of their own, on the CPU."""
        before = torch.default_generator.get_state()
        torch.default_generator.manual_seed(mix(self.seed, "init"))
        try:
            yield
        finally:
            torch.default_generator.set_state(before)


def fit_ar(
    tokens: Tensor, split: Split, num_tokens: int, learner: Learner, progress: Progress | None
) -> tuple[Callable[[Tensor], Tensor], int]:
    """Train an AR model on rows of `tokens` (N, L), where they are.

    Return its log-probability as a function of row numbers, (R,) -> (R,) float64, and the step of
    training that it comes from.
    """
    length = tokens.shape[1]
    config = ModelConfig(
        kind="ar",
        layers=learner.layers,
        hidden=learner.hidden,
        heads=learner.heads,
        vocab_size=num_tokens + 1,
        length=length,
        learned_positions=True,
    )
    with learner.weights():
        model = ARModel(config).to(tokens.device)
    at_once = LOGITS_AT_ONCE // (length * num_tokens)

    def nats_per_token(rows: Tensor) -> Tensor:
        return -model.log_prob(tokens[rows]) / length

    best_step = fit(model, nats_per_token, split, learner, at_once, progress)
    return lambda rows: -length * ask(nats_per_token, rows, at_once), best_step


def fit(
    network: nn.Module,
    loss: Callable[[Tensor], Tensor],
    split: Split,
    learner: Learner,
    at_once: int,
    progress: Progress | None,
) -> int:
    """Train a network while its validation loss falls; leave it as it validated best; return when.

    `loss` maps row numbers (R,), at most `at_once` of them, to the loss of each (R,).
    """
    steps, batch_size = learner.steps, learner.batch_size
    optim = OptimConfig(lr=learner.lr, warmup=min(100, steps // 10))
    updater = Updater(network, optim, steps, ema=0)
    every = max(1, steps // LOOKS)
    best, best_step, worse, kept = math.inf, 0, 0, {}
    shuffle, order = _stream(learner.seed, "order"), split.train[:0]
    for step in range(steps):
        while len(order) < batch_size:  # what is left of an epoch begins a batch of the next
            epoch = torch.randperm(len(split.train), generator=shuffle)
            order = torch.cat([order, split.train[epoch]])
        rows, order = order[:batch_size], order[batch_size:]
        for part in torch.split(rows, max(1, at_once)):
            (loss(part).sum() / batch_size).backward()  # type: ignore[no-untyped-call]
        updater.update(step)
        if progress is not None:
            progress(step + 1)
        if (step + 1) % every and step + 1 < steps:
            continue
        found = ask(loss, split.valid, at_once).mean().item()
        if found < best:
            best, best_step = found, step + 1
            kept = {name: value.clone() for name, value in network.state_dict().items()}
        worse = 0 if found <= best * (1 + WORSE) else worse + 1
        if worse == PATIENCE:
            break
    if not kept:
        raise TrainingError(f"The validation loss was never a number: use a lr below {learner.lr}.")
    network.load_state_dict(kept)
    return best_step


@torch.no_grad()
def ask(function: Callable[[Tensor], Tensor], rows: Tensor, at_once: int) -> Tensor:
    """Values of a function of row numbers, part by part: (R,) -> (R,), float64, on the CPU."""
    parts = torch.split(rows, max(1, at_once))
    return torch.cat([function(part).double().cpu() for part in parts])


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
