"""The registry of measures of samples, and those of text.

A new measure is one entry of `METRICS`: what computes it, and what it needs.
"""

import math
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from didi_instruct.errors import UserError
from didi_instruct.evaluation.diversity import (
    Tokens,
    self_bleu,
    unigram_entropy,
    unique_with_interval,
    word_ids,
)
from didi_instruct.evaluation.judges import CausalJudge, Judge
from didi_instruct.evaluation.mauve import mauve_score
from didi_instruct.evaluation.measuring import (
    Measured,
    Measuring,
    Metric,
    Row,
    has_end,
    nothing,
    plain,
)
from didi_instruct.evaluation.probes import (
    AR_LR,
    STARTED_AR_LR,
    TEST_LR,
    Learner,
    ar_kl,
    two_sample,
)
from didi_instruct.evaluation.protein_metrics import PROTEIN_METRICS
from didi_instruct.evaluation.samples import constant_after_end, with_end
from didi_instruct.evaluation.stats import around
from didi_instruct.evaluation.table import COLUMNS, Column

AR_STEPS, TEST_STEPS = 2000, 1000
"""Training steps of the networks behind the AR-entropy bound and the two-sample test."""


def measure(name: str, measuring: Measuring) -> Measured:
    """Take one measure."""
    found = METRICS[name].compute(measuring)
    return replace(found, row={key: plain(value) for key, value in found.row.items()})


def _perplexity(m: Measuring) -> Measured:
    scores = m.scores()
    nats, tokens = scores.nats.cpu().numpy(), scores.tokens.cpu().double().numpy()
    row: Row = {
        "ppl": scores.perplexity(),
        "ppl_ci95": None if np.isinf(nats).any() else scores.interval(m.yardstick.seed),
        "judge_cut": scores.cut,
        "judge_tokens": int(tokens.sum()),
    }
    if not math.isfinite(row["ppl"]):
        row["ppl_note"] = _impossible(nats)
    return Measured(row, {"nats": nats, "tokens": tokens})


def _impossible(nats: NDArray[np.float64]) -> str:
    number = int(np.isinf(nats).sum())
    return f"the judge finds {number} samples impossible" if number else "too large for a number"


def _entropy(m: Measuring) -> Measured:
    values = unigram_entropy(m.samples.tokens, m.samples.lengths)
    row = {"entropy": values.mean().item(), "entropy_ci95": m.interval(values)}
    return Measured(row, {"entropy": values.numpy()})


def _unique(m: Measuring) -> Measured:
    if int(m.samples.lengths.max()) < 4:
        note = "no sample has 4 tokens"
        return Measured(
            {"unique_4gram": None, "unique_4gram_ci95": None, "unique_4gram_note": note}
        )
    found = unique_with_interval(m.samples.tokens, 4, m.samples.lengths)
    return Measured({"unique_4gram": found.value, "unique_4gram_ci95": found.ci95})


def _self_bleu(m: Measuring) -> Measured:
    return _resemblance(m, "self_bleu", m.samples.tokens, m.samples.lengths)


def _self_bleu_of_words(m: Measuring) -> Measured:
    return _resemblance(m, "self_bleu_words", word_ids(m.samples.texts))


def _resemblance(m: Measuring, name: str, texts: Tokens, lengths: Tensor | None = None) -> Measured:
    """Self-BLEU of texts in tokens or in words."""
    if len(m.samples) < 2:
        return nothing(name, "one sample has no others to resemble")
    found = self_bleu(texts, lengths=lengths)
    ends = found.ci95 or m.interval(found.values)  # no spread: texts that are all alike
    return Measured({name: found.mean, f"{name}_ci95": plain(ends)})


def _mauve(m: Measuring) -> Measured:
    judge = m.yardstick.judge
    if not isinstance(judge, CausalJudge):
        raise UserError(
            "MAUVE compares features of a causal language model: give one as --judge, "
            "or leave out the metric mauve."
        )
    found = mauve_score(m.samples.texts, m.reference.texts, judge.features)
    texts = [found.samples, found.reference]
    return Measured({"mauve": found.value, "mauve_ci95": found.ci95, "mauve_texts": texts})


def _path_kl(m: Measuring) -> Measured:
    """Nats per sequence; `path_kl_exact` says whether the judge knows the tokens' likelihood."""
    log_prob, judge, note = m.samples.log_prob, m.yardstick.judge, ""
    assert judge is not None
    if log_prob is None:
        note = (
            "the probability of the path is not known: the sampler has none, or none was asked for"
        )
    elif m.ends_early and not m.samples.origin.ends_with_text:
        note = (
            "the path has the probability of whole windows, or of texts whose length was given, "
            "but the texts end before: it does not have that of their end"
        )
    if log_prob is None or note:
        return nothing("path_entropy", note) | nothing("path_kl", note)
    entropy = Measured(
        {"path_entropy": -log_prob.mean().item(), "path_entropy_ci95": m.interval(-log_prob)}
    )
    if m.ends_early and not has_end(judge):
        note = f"the judge {judge.name} has no token that ends a text: name one with --judge-end"
        return entropy | nothing("path_kl", note)
    scores = m.scores(ending=True)
    if scores.cut:
        return entropy | nothing("path_kl", _too_long(judge, scores.cut))
    nats = scores.nats.cpu()
    gaps = nats + log_prob
    row: Row = {
        "path_kl": gaps.mean().item(),
        "path_kl_ci95": m.interval(gaps),
        "path_kl_exact": judge.exact,
    }
    if not math.isfinite(row["path_kl"]):
        row["path_kl_note"] = _impossible(nats.numpy())
    return entropy | Measured(row, {"path_gap": gaps.numpy()})


def _too_long(judge: Judge, cut: int) -> str:
    """Why a judge that read parts of texts cannot be compared with the entropy of whole ones."""
    reads = f" of {judge.max_length} tokens" if isinstance(judge, CausalJudge) else ""
    return (
        f"{cut} texts are longer than the context{reads} of the judge {judge.name}, which read "
        "their beginning only: draw shorter ones (--length), use a judge with a longer context, or "
        "give what follows a price (--judge-beyond uniform)"
    )


def knows_texts(judge: Judge) -> bool:
    """Whether a judge gives texts their likelihood, not a bound of it.

    A causal LM gives that of one way to cut a text into its tokens, which is nearly all of it for
    texts such as its own; what it misses makes path KL and the AR bound too high (`…_exact`).
    """
    return judge.exact or isinstance(judge, CausalJudge)


def _ar_bound(m: Measuring) -> Measured:
    y = m.yardstick
    assert y.judge is not None
    if not knows_texts(y.judge):
        raise UserError(
            f"The AR-entropy bound needs a judge that knows the likelihood of texts, which "
            f"{y.judge.name} does not: use `oracle` or a left-to-right model, "
            "or leave out the metric ar-kl."
        )
    scores = m.scores(ending=True)
    if scores.cut:
        return nothing("ar_kl", _too_long(y.judge, scores.cut))
    found = ar_kl(
        constant_after_end(m.samples.tokens, m.samples.lengths),
        scores.nats,
        y.num_tokens,
        learner=Learner(steps=AR_STEPS, lr=STARTED_AR_LR if y.ar_start else AR_LR, seed=y.seed),
        counts=with_end(m.samples.tokens, m.samples.lengths),
        device=torch.device(y.device),
        progress=lambda step: m.tell("AR-entropy bound", step, AR_STEPS),
        start=y.ar_start.network if y.ar_start else None,
    )
    return Measured(
        {
            "ar_kl_exact": y.judge.exact,
            "ar_kl": found.kl_lower,
            "ar_kl_se": found.se,
            "ar_kl_ci95": around(found.kl_lower, found.se),
            "ar_kl_samples": found.held_out,
        }
    )


def _two_sample(m: Measuring) -> Measured:
    y = m.yardstick
    found = two_sample(
        constant_after_end(m.samples.tokens, m.samples.lengths),
        constant_after_end(m.reference.tokens, m.reference.lengths),
        y.num_tokens,
        learner=Learner(steps=TEST_STEPS, lr=TEST_LR, seed=y.seed),
        counts=(
            with_end(m.samples.tokens, m.samples.lengths),
            with_end(m.reference.tokens, m.reference.lengths),
        ),
        device=torch.device(y.device),
        progress=lambda step: m.tell("Two-sample test", step, 3 * TEST_STEPS),
    )
    row = {"c2st_auc": found.auc, "c2st_auc_ci95": found.auc_ci95, "c2st_samples": found.held_out}
    return Measured(row)


METRICS: dict[str, Metric] = {
    "ppl": Metric(_perplexity, judge=True, per_judge=True),
    "entropy": Metric(_entropy),
    "unique-4gram": Metric(_unique, counts=True),
    "self-bleu": Metric(_self_bleu, counts=True),
    "self-bleu-words": Metric(_self_bleu_of_words, counts=True),
    "mauve": Metric(_mauve, judge=True, reference=True, per_judge=True, counts=True),
    "path-kl": Metric(_path_kl, judge=True, per_judge=True, path=True),
    "ar-kl": Metric(_ar_bound, judge=True, per_judge=True, learns=True),
    "c2st": Metric(_two_sample, reference=True, learns=True, counts=True),
    **PROTEIN_METRICS,
}


def known_columns() -> list[Column]:
    """Columns of tables: those of text, then those that metrics bring."""
    return [*COLUMNS, *(column for metric in METRICS.values() for column in metric.columns)]
