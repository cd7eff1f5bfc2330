"""Two-sample test: whether a fresh classifier can tell two sets of samples apart.

It needs no likelihood, so it serves for any sampler. Two classifiers learn from the same samples of
both sets: a bidirectional network that is trained to tell them apart, and the log-ratio of two
left-to-right models, one of each set. (The ratio learns from every token, not from one label per
text, so it finds with a thousand samples what the other needs ten thousand for.) The one that does
better on validation samples is scored on held-out ones.

Equal laws give an AUC of 0.5 on average, whatever was learned, so long as what is held out does not
depend on what was learned from: then an interval above 0.5 is a difference that is really there, as
often as such an interval is right. The reverse does not hold: a difference may need more samples,
or a larger network.

Rows of a reference text are not independent: neighbours are of one document. So A and B are split
in their order, not at random, and the interval takes what neighbours have in common from the data
(`auc`). It cannot know what documents that were not held out are like: a reference of a few dozen
documents or more is covered as it should be, one of eight is not.

The defaults are for speed. On the oracle language (true samples against its exact denoiser in 8
steps, 1,024 of each) width 64 at lr 4e-3 was tried against width 128 at 2e-3: AUC 0.83 and 0.83,
0.79 and 0.78 with two seeds, errors 0.02, in a third of the time. Which of the two finds more with
few samples, or in text of many more words, is not known: seeds differ by more than they do.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from didi_instruct.config.model import ModelConfig
from didi_instruct.errors import UserError
from didi_instruct.evaluation.fitting import (
    Learner,
    Progress,
    Split,
    ask,
    check_counts,
    check_tokens,
    fit,
    fit_ar,
)
from didi_instruct.models.dit import DiT
from didi_instruct.models.layers import LayerNorm

STATES_AT_ONCE = 1 << 23
"""Numbers in the hidden states of a forward pass."""
COND_DIM = 32
"""Width of the trunk's time embedding, which is constant here."""
PARTS, T_OF_PARTS = 4, 3.182446
"""Parts in a row whose means tell how alike neighbours are, and Student's 97.5% quantile."""

Scores = Callable[[Tensor], Tensor]
"""High where a row looks like one of A: row numbers (R,) -> (R,) float64."""


@dataclass(frozen=True, slots=True)
class TwoSample:
    """How well held-out samples are told apart: 0.5 is not at all, 1 is always."""

    auc: float
    """Chance that a sample of A scores above one of B, ties counted half."""
    auc_ci95: tuple[float, float]
    """Over held-out samples, for the classifier as it is; neighbours in B may be alike."""
    accuracy: float
    """Mean of the shares of A and of B that are recognised."""
    classifier: str
    """`bidirectional` or `ratio`, whichever validated better."""
    train: int
    valid: int
    held_out: int
    """Samples of each split, A and B together."""


class Classifier(nn.Module):
    """A bidirectional trunk and a logit per position; their sum over √L is that of the text."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.trunk = DiT(config, head=False)
        self.output_layer = nn.Sequential(
            LayerNorm(config.hidden),
            nn.Linear(config.hidden, config.hidden),
            nn.SiLU(),
            nn.Linear(config.hidden, 1),
        )

    def forward(self, tokens: Tensor, count: Tensor | None = None) -> Tensor:
        """Logits, A over B: (B, L) -> (B,); with `count` (B,), of the first tokens of each."""
        read = None
        if count is not None:
            read = torch.arange(tokens.shape[1], device=tokens.device) < count[:, None]
        x, mods = self.trunk.embed(tokens), self.trunk.modulations()
        logits: Tensor = self.output_layer(self.trunk.trunk(x, mods, read)).squeeze(-1)
        if read is not None:
            logits = logits * read
        return logits.sum(1) / math.sqrt(tokens.shape[1])


def two_sample(
    a: Tensor,
    b: Tensor,
    num_tokens: int,
    *,
    counts: tuple[Tensor, Tensor] | None = None,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    steps: int = 1000,
    batch_size: int = 64,
    lr: float = 4e-3,
    seed: int = 0,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> TwoSample:
    """Train on some samples of A and B, score on others.

    Rows of A are independent draws; those of B are too, or follow each other in a text. `steps` are
    those of one network; there are three. Rows of one number in A and B go to the same split:
    samplers that share their noise do not leak. `counts` tells how many tokens of each row of A and
    of B are read, where texts end before it: what pads a text is no evidence.

    Shapes: a (N, L), b (M, L), ids below `num_tokens`; counts (N,) and (M,).
    """
    check_tokens(a, num_tokens, "The samples of A")
    check_tokens(b, num_tokens, "The samples of B")
    if a.shape[1] != b.shape[1]:
        raise ValueError(f"samples of {a.shape[1]} and of {b.shape[1]} tokens cannot be compared")
    tokens = torch.cat([a.long().cpu(), b.long().cpu()]).to(device)
    read = None if counts is None else check_counts(torch.cat(counts), tokens)
    split_a, split_b = split_both(len(a), len(b))
    learner = Learner(layers, hidden, heads, steps, batch_size, lr, seed)

    def stage(number: int) -> Progress | None:
        return progress and (lambda step: progress(number * steps + step))

    in_a, _ = fit_ar(tokens, split_a, num_tokens, learner, stage(0), read)
    in_b, _ = fit_ar(tokens, split_b, num_tokens, learner, stage(1), read)
    is_a = torch.arange(len(tokens), device=device) < len(a)
    both = _join(split_a, split_b)
    scores: dict[str, Scores] = {
        "bidirectional": _fit_classifier(tokens, read, is_a, both, num_tokens, learner, stage(2)),
        "ratio": lambda rows: in_a(rows) - in_b(rows),
    }
    valid = {name: (f(split_a.valid), f(split_b.valid)) for name, f in scores.items()}
    best = max(valid, key=lambda name: auc(*valid[name])[0])
    held_out = scores[best](split_a.held_out), scores[best](split_b.held_out)
    value, interval = auc(*held_out, in_order=True)
    return TwoSample(
        auc=value,
        auc_ci95=interval,
        accuracy=_accuracy(held_out, valid[best]),
        classifier=best,
        train=len(both.train),
        valid=len(both.valid),
        held_out=len(both.held_out),
    )


def auc(
    a: ArrayLike | Tensor, b: ArrayLike | Tensor, *, in_order: bool = False
) -> tuple[float, tuple[float, float]]:
    """Chance that a score of `a` is above one of `b`, ties half, and its 95% interval.

    The AUC is a mean over `a` of the share of `b` below each, and over `b` of the share of `a`
    above each; the variances of both add up (DeLong). Scores without any overlap leave no variance:
    [1, 1].

    With `in_order`, neighbours in `b` may be alike, and the variance of the mean over `b` is also
    taken from the means of four parts in a row, with Student's t for so few; the larger counts. In
    simulations with 205 scores of each kind this covered 97% where all were independent (DeLong
    94%), 95% where `b` was 8 documents, 89% at 4 and 74 to 79% at 2 (DeLong 56, 39 and 23 to 40%).
    """
    ours, theirs = np.asarray(a), np.asarray(b)
    fewest = PARTS if in_order else 2
    if min(len(ours), len(theirs)) < fewest:
        raise UserError(f"An AUC with an interval needs {fewest} or more scores of each kind.")
    below, above = _share_below(ours, theirs), 1 - _share_below(theirs, ours)
    value = float(below.mean())
    squares = [1.96**2 * shares.var(ddof=1) / len(shares) for shares in (below, above)]
    if in_order:
        means = np.array([part.mean() for part in np.array_split(above, PARTS)])
        squares[1] = max(squares[1], T_OF_PARTS**2 * means.var(ddof=1) / PARTS)
    half = math.sqrt(sum(squares))
    return value, (max(0.0, value - half), min(1.0, value + half))


def split_both(count_a: int, count_b: int) -> tuple[Split, Split]:
    """Split rows 0 .. count_a and count_a .. count_a + count_b in order, equal places alike.

    What the longer set has more is split backwards, so that its rows to measure on follow those
    that both have: it too is cut at few places.
    """
    fewer = min(count_a, count_b)
    more = max(count_a, count_b) - fewer
    shared = Split.in_order(fewer)
    rest = Split(*((fewer + more - 1 - rows).flip(0) for rows in Split.in_order(more)))
    longer = _join(shared, rest)
    split_a, split_b = (longer, shared) if count_a > count_b else (shared, longer)
    return split_a, _shift(split_b, count_a)


def _join(one: Split, two: Split) -> Split:
    return Split(*(torch.cat(parts) for parts in zip(one, two, strict=True)))


def _shift(split: Split, by: int) -> Split:
    return Split(*(rows + by for rows in split))


def _fit_classifier(
    tokens: Tensor,
    read: Tensor | None,
    is_a: Tensor,
    split: Split,
    num_tokens: int,
    learner: Learner,
    progress: Progress | None,
) -> Scores:
    """Train the bidirectional network; both sets weigh the same, whatever their size."""
    config = ModelConfig(
        kind="mdlm",
        layers=learner.layers,
        hidden=learner.hidden,
        heads=learner.heads,
        cond_dim=COND_DIM,
        vocab_size=num_tokens + 1,
        length=tokens.shape[1],
        learned_positions=True,
    )
    with learner.weights():
        network = Classifier(config).to(tokens.device)
    target = is_a.float()
    share = target.mean()
    weight = torch.where(is_a, 0.5 / share, 0.5 / (1 - share))

    def logits(rows: Tensor) -> Tensor:
        found: Tensor = network(tokens[rows], None if read is None else read[rows])
        return found

    def loss(rows: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(
            logits(rows), target[rows], weight[rows], reduction="none"
        )

    at_once = STATES_AT_ONCE // (tokens.shape[1] * learner.hidden)
    fit(network, loss, split, learner, at_once, progress)
    return lambda rows: ask(logits, rows, at_once)


def _share_below(ours: NDArray[Any], theirs: NDArray[Any]) -> NDArray[np.float64]:
    """Share of `theirs` below each of `ours`, ties half."""
    ranked = np.sort(theirs)
    below, upto = (np.searchsorted(ranked, ours, side) for side in ("left", "right"))
    return (below + upto) / (2 * len(ranked))


def _accuracy(held_out: tuple[Tensor, Tensor], valid: tuple[Tensor, Tensor]) -> float:
    """Balanced accuracy, with the threshold half-way between the medians of validation scores."""
    threshold = (valid[0].median() + valid[1].median()) / 2
    right = (held_out[0] > threshold).double().mean() + (held_out[1] <= threshold).double().mean()
    return right.item() / 2
