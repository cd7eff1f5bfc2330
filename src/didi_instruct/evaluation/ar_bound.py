"""AR-entropy bound: how far a sampler's law is from a judge's at least, for any sampler.

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
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from didi_instruct.errors import UserError
from didi_instruct.evaluation.fitting import (
    Learner,
    Progress,
    Split,
    check_counts,
    check_tokens,
    fit_ar,
)
from didi_instruct.models.ar import ARModel

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
