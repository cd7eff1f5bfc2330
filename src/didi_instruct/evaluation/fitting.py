"""Small networks trained on some rows, stopped by others and measured on a third part.

The AR-entropy bound and the two-sample test both learn from samples. What they claim holds however
little was learned, so long as no row that is measured on was ever learned from or stopped by, nor
one that depends on it.
"""

import copy
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
LOOKS, FARTHEST = 20, 20
"""Validations in a full training, at least; and steps from one to the next, at most."""
PATIENCE, WORSE = 5, 0.05
"""So many validations in a row, worse than the best by this share, end it. A plateau does not."""
LOGITS_AT_ONCE = 1 << 26
"""Logits of a forward pass: 256 MiB of them."""

Progress = Callable[[int], None]
"""Told the steps done."""


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

    @classmethod
    def in_order(cls, count: int) -> "Split":
        """Cut `count` rows as they stand: first, middle and last part.

        Rows of one document are neighbours, so a document is in two parts only at a boundary. Cut
        at random it would be in all three, and a network that knows it by heart would pass for
        one that has learned something.
        """
        last, middle = round(HELD_OUT * count), round(VALID * count)
        return cls(*torch.split(torch.arange(count), [count - middle - last, middle, last]))


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
    tokens: Tensor,
    split: Split,
    num_tokens: int,
    learner: Learner,
    progress: Progress | None,
    counts: Tensor | None = None,
    start: ARModel | None = None,
) -> tuple[Callable[[Tensor], Tensor], int]:
    """Train an AR model on rows of `tokens` (N, L), where they are.

    With `counts` (N,) only so many of the first tokens of each row are learned and priced. It
    begins as a copy of `start`, which knows such text already, or from nothing.

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
    if start is None:
        with learner.weights():
            model = ARModel(config).to(tokens.device)
    else:
        _check_start(start, num_tokens, length)
        model = copy.deepcopy(start).float().to(tokens.device).requires_grad_(True)
    at_once = LOGITS_AT_ONCE // (length * num_tokens)

    def nats_per_token(rows: Tensor) -> Tensor:
        count = None if counts is None else counts[rows]
        return -model.log_prob(tokens[rows], count) / length

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
    every = min(FARTHEST, max(1, steps // LOOKS))
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


def check_counts(counts: Tensor | None, tokens: Tensor) -> Tensor | None:
    """Tokens of each row that are to be read, (N,), where the rows are; None where that is all."""
    if counts is None:
        return None
    if counts.shape != tokens.shape[:1]:
        raise ValueError(f"{len(tokens)} rows, but counts are {tuple(counts.shape)}")
    found = counts.to(tokens.device)
    return None if bool((found == tokens.shape[1]).all()) else found


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


def _check_start(start: ARModel, num_tokens: int, length: int) -> None:
    """Refuse a model that cannot read the samples."""
    config = start.config
    if config.num_tokens != num_tokens or config.length < length:
        raise UserError(
            f"The left-to-right model to begin with knows {config.num_tokens} tokens and "
            f"{config.length} positions, the samples have {num_tokens} and {length}: use one that "
            "was trained on the same tokens."
        )


def _stream(seed: int, purpose: str) -> torch.Generator:
    return torch.Generator().manual_seed(mix(seed, purpose))
