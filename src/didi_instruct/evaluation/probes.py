"""Small networks trained on some rows, stopped by others and measured on a third part.

The AR-entropy bound and the two-sample test both learn from samples. What they claim holds however
little was learned, so long as no row that is measured on was ever learned from or stopped by, nor
one that depends on it.

AR-entropy bound: how far a sampler's law is from a judge's at least, for any sampler.

A small left-to-right model, trained on some samples, is asked about others. Whatever it learned,
its cross-entropy on samples that it never saw is at least their entropy, so

    judge cross-entropy - cross-entropy of the AR model  <=  KL(sampler || judge)

up to the standard error over the held-out samples. A model that learned little makes the bound low,
never wrong. It needs the judge's exact -log p: with an upper bound of that (a NELBO) the difference
proves nothing.

The defaults are for speed. On the oracle language (samples of its exact denoiser in 8 steps, one
seed) width 64 at lr 2e-3 gave 3.6 ± 0.4 nats from 1,024 samples and 3.93 ± 0.13 from 8,192, width
128 at 1e-3 gave 3.4 ± 0.4 and 3.94 ± 0.13 in about twice the time. Text of many more words may want
it wider.

Two-sample test: whether a fresh classifier can tell two sets of samples apart.

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

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from didi_instruct.config.model import ModelConfig
from didi_instruct.config.pretrain import OptimConfig
from didi_instruct.errors import TrainingError, UserError
from didi_instruct.models.ar import ARModel
from didi_instruct.models.dit import DiT
from didi_instruct.models.layers import LayerNorm
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


FROM_NOTHING, FROM_A_MODEL = 2e-3, 3e-4
"""Learning rates."""


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
    counts: Tensor | None = None,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    steps: int = 2000,
    batch_size: int = 64,
    lr: float | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
    start: ARModel | None = None,
) -> ArBound:
    """Bound KL(sampler || judge) from below, given samples and the judge's -log p of each.

    Samples are independent draws. `counts` tells how many tokens of a row are read, where a text
    ends before it: its end included, which the judge's nats then are as well. The samples are
    split, and the model made and trained, by the seed. With `start` it is a copy of that model
    that learns: of few samples of real language, one that knows it already learns more. It must
    never have seen these samples.

    Shapes: samples (N, L), ids below `num_tokens`; judge_nats and counts (N,).
    """
    check_tokens(samples, num_tokens, "The samples")
    nats = judge_nats.double().cpu()
    if nats.shape != (len(samples),):
        raise ValueError(f"{len(samples)} samples, but the judge's nats are {tuple(nats.shape)}")
    if not bool(nats.isfinite().all()):
        raise UserError("The judge gave a sample no finite -log p: use another judge, or float32.")
    split = Split.draw(len(samples), seed)
    rate = lr or (FROM_NOTHING if start is None else FROM_A_MODEL)
    learner = Learner(layers, hidden, heads, steps, batch_size, rate, seed)
    tokens = samples.long().to(device)
    read = check_counts(counts, tokens)
    log_prob, best_step = fit_ar(tokens, split, num_tokens, learner, progress, read, start)
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
