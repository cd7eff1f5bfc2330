"""The registry of metrics of samples, and those of text.

A new metric is one entry of `METRICS`: a function of a `Measuring`, its requirements, and its
columns.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from didi_instruct.config.schema import nearest
from didi_instruct.errors import MissingExtraError, UserError
from didi_instruct.evaluation.cache import measure_key, once
from didi_instruct.evaluation.diversity import (
    Tokens,
    self_bleu,
    unigram_entropy,
    unique_with_interval,
    word_ids,
)
from didi_instruct.evaluation.mauve import FEWEST, mauve_score
from didi_instruct.evaluation.measuring import (
    Context,
    Measured,
    Measuring,
    Metric,
    Row,
    mean_interval,
    measured_of_json,
    measured_to_json,
    nothing,
    plain,
)
from didi_instruct.evaluation.probes import (
    AR_LR,
    FEWEST_SAMPLES,
    STARTED_AR_LR,
    TEST_LR,
    Learner,
    ar_kl,
    two_sample,
)
from didi_instruct.evaluation.protein_metrics import PROTEIN_METRICS
from didi_instruct.evaluation.samples import SampleSet, constant_after_end, with_end
from didi_instruct.evaluation.scores import Judge
from didi_instruct.evaluation.stats import around
from didi_instruct.evaluation.table import BESIDE_VARIETY, PASSES, Column

AR_STEPS, TEST_STEPS = 2000, 1000
"""Training steps of the networks behind the AR-entropy bound and the two-sample test."""


def check_metrics(names: Sequence[str]) -> None:
    """Refuse metrics that are not known, and perplexity without entropy."""
    if not names:
        raise UserError(f"No metric is named. Known: {', '.join(METRICS)}.")
    for name in names:
        if name not in METRICS:
            raise UserError(f"`{name}` is not a metric.{nearest(name, list(METRICS))}")
    if "ppl" in names and "entropy" not in names:
        raise UserError("Perplexity alone proves nothing: add the metric entropy.")


def known_columns() -> list[Column]:
    """Columns of tables, in their order."""
    return [PASSES, *(column for metric in METRICS.values() for column in metric.columns)]


def measure_row(
    samples: SampleSet,
    metrics: Sequence[str],
    context: Context,
    *,
    folder: Path | None = None,
    progress: Callable[[int], None] | None = None,
) -> Measured:
    """Measure a row; with a `folder` for these samples, what it has is read and not taken again.

    `progress` is called with the number of samples done, as if all metrics took equally long.
    """
    finished = 0

    def tell(done: int, total: int) -> None:
        if progress is not None:
            progress(int(len(samples) * (finished + done / total) / len(metrics)))

    measuring = Measuring(samples, context, folder=folder, progress=tell)
    found = Measured(describe(samples, context.seed))
    for name in metrics:
        found |= measure(name, measuring)
        finished += 1
    return found


def measure(name: str, measuring: Measuring) -> Measured:
    """Compute one metric, or read it from the folder of these samples, where it is kept."""
    metric = METRICS[name]

    def compute() -> Measured:
        found = metric.compute(measuring)
        return replace(found, row={key: plain(value) for key, value in found.row.items()})

    if measuring.folder is None:
        return compute()
    return once(
        measuring.folder / f"{name}-{measure_key(*metric.dependencies(measuring.context))}.json",
        compute,
        write=measured_to_json,
        read=measured_of_json,
        lasts=lambda found: found.lasting,
    )


def describe(samples: SampleSet, seed: int = 0) -> Row:
    """Entries of a row before anything is measured; the seed is of intervals."""
    origin, count = samples.origin, len(samples)
    lengths = samples.lengths.double()
    short = origin.until_eot and origin.ends_with_text  # what fills a window is not written
    tokens = int(samples.lengths.sum()) if short else count * origin.length
    return {
        "model": origin.model,
        "fingerprint": origin.fingerprint,
        "sampler": origin.sampler,
        "options": None if origin.options is None else dict(origin.options),
        "steps": origin.steps,
        "nfe": origin.nfe,
        "passes": origin.passes,
        "disc_calls": origin.disc_calls,
        "temperature": origin.temperature,
        "top_p": origin.top_p,
        "num_samples": count,
        "length": origin.length,
        "mean_length": lengths.mean().item(),
        "mean_length_ci95": mean_interval(lengths, seed),
        "entropy_of": "text" if origin.until_eot else "window",
        "batch_size": origin.batch_size,
        "device": origin.device,
        "dtype": origin.dtype,
        "tokens_per_second": tokens / origin.seconds if origin.seconds else None,
        "seed": origin.seed,
        "bootstrap_seed": seed,
    }


def _perplexity(m: Measuring) -> Measured:
    scores = m.scores()
    nats, tokens = scores.nats.cpu().numpy(), scores.tokens.cpu().double().numpy()
    row: Row = {
        "ppl": scores.perplexity(),
        "ppl_ci95": None if np.isinf(nats).any() else scores.interval(m.context.seed),
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
        return nothing("unique_4gram", "no sample has 4 tokens")
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
    found = mauve_score(m.samples.texts, m.reference.texts, m.judge.features)
    texts = [found.samples, found.reference]
    return Measured({"mauve": found.value, "mauve_ci95": found.ci95, "mauve_texts": texts})


def _require_mauve() -> None:
    if find_spec("mauve") is None:
        raise MissingExtraError("The metric mauve", "eval")


def _path_kl(m: Measuring) -> Measured:
    """Nats per sequence; `path_kl_exact` says whether the judge knows the tokens' likelihood."""
    log_prob, judge, note = m.samples.log_prob, m.judge, ""
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
    if m.ends_early and judge.ends == "unknown":
        note = f"the judge {judge.name} has no token that ends a text: name one with --judge-end"
        return entropy | nothing("path_kl", note)
    scores = m.scores(ended=True)
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
    return (
        f"{cut} texts are longer than the context of {judge.max_length} tokens of the judge "
        f"{judge.name}, which read their beginning only: draw shorter ones (--length), use a judge "
        "with a longer context, or give what follows a price (--judge-beyond uniform)"
    )


def _ar_bound(m: Measuring) -> Measured:
    judge, context = m.judge, m.context
    scores = m.scores(ended=True)
    if scores.cut:
        return nothing("ar_kl", _too_long(judge, scores.cut))
    found = ar_kl(
        constant_after_end(m.samples.tokens, m.samples.lengths),
        scores.nats,
        context.num_tokens,
        learner=Learner(
            steps=AR_STEPS, lr=STARTED_AR_LR if context.start else AR_LR, seed=context.seed
        ),
        counts=with_end(m.samples.tokens, m.samples.lengths),
        device=torch.device(context.device),
        progress=lambda step: m.tell(step, AR_STEPS),
        start=context.start.network if context.start else None,
    )
    return Measured(
        {
            "ar_kl_exact": judge.exact,
            "ar_kl": found.kl_lower,
            "ar_kl_se": found.se,
            "ar_kl_ci95": around(found.kl_lower, found.se),
            "ar_kl_samples": found.held_out,
        }
    )


def _two_sample(m: Measuring) -> Measured:
    both = (m.samples, m.reference)
    ours, theirs = (constant_after_end(texts.tokens, texts.lengths) for texts in both)
    counts: Any = tuple(with_end(texts.tokens, texts.lengths) for texts in both)
    found = two_sample(
        ours,
        theirs,
        m.context.num_tokens,
        learner=Learner(steps=TEST_STEPS, lr=TEST_LR, seed=m.context.seed),
        counts=counts,
        device=torch.device(m.context.device),
        progress=lambda step: m.tell(step, 3 * TEST_STEPS),
    )
    row = {"c2st_auc": found.auc, "c2st_auc_ci95": found.auc_ci95, "c2st_samples": found.held_out}
    return Measured(row)


TEXT_METRICS = (
    Metric(
        name="ppl", compute=_perplexity, requires=("judge",),
        columns=(
            Column(
                "ppl", "ppl", "{:.2f}",
                "Perplexity: how surprised the judge is by each token. Lower is better only at "
                "equal entropy, since dull and repetitive texts surprise nobody.",
            ),
        ),
    ),
    Metric(
        name="entropy", compute=_entropy,
        columns=(
            Column(
                "entropy", "entropy", "{:.3f}",
                "Variety of the tokens within a text, in nats, mean over texts. Neither high nor "
                "low is good: it should match that of real text.",
            ),
            Column(
                "vsF", "vsf", "{:.3f}",
                "Perplexity divided by the lowest that the baseline reaches at equal steps and "
                "equal entropy with any temperature or top-p. Below 1 is a gain; lower is better.",
                "lower",
            ),
            Column(
                "vsF passes", "vsf_passes", "{:.3f}",
                "As vsF, against the baseline at equal forward passes instead of equal steps.",
                "lower",
            ),
        ),
    ),
    Metric(
        name="path-kl", compute=_path_kl, requires=("judge", "path"), of_samplers=True,
        columns=(
            Column(
                "path KL", "path_kl", "{:.3f}",
                "Distance in nats per text from the sampler's distribution to the judge's: the "
                "judge's cross-entropy minus the entropy of the draws, an upper bound of the KL "
                "divergence. Lower is better at any temperature, but " + BESIDE_VARIETY, "lower",
            ),
            Column(
                "Δ path KL", "path_kl_vs_baseline", "{:+.3f}",
                "Path KL minus that of the baseline's best setting at equal steps. Below 0 is a "
                "gain; lower is better.", "lower",
            ),
            Column(
                "gap closed", "gap_closed", "{:.1%}",
                "Share of the path KL that few steps cost the baseline and that this row "
                "recovers: 0% is the baseline at equal steps, 100% the baseline at its most "
                "steps, each at its best setting. Higher is better.", "higher",
            ),
        ),
    ),
    Metric(
        name="ar-kl", compute=_ar_bound, requires=("judge", "likelihood"),
        depends_on=("vocabulary", "start"), min_samples=FEWEST_SAMPLES, of_samplers=True,
        columns=(
            Column(
                "AR KL ≥", "ar_kl", "{:.3f}",
                "A lower bound of the KL divergence in nats per text, from a left-to-right model "
                "trained on the samples: the true distance is at least this, up to its interval. "
                "A low value proves nothing; a high one is bad.",
            ),
        ),
    ),
    Metric(
        name="c2st", compute=_two_sample, requires=("reference",),
        depends_on=("count", "vocabulary"), min_samples=FEWEST_SAMPLES,
        min_reference=FEWEST_SAMPLES,
        columns=(
            Column(
                "AUC", "c2st_auc", "{:.3f}",
                "How well a freshly trained classifier tells samples from the reference text: 0.5 "
                "is chance, 1 is always. Lower is better.", "lower",
            ),
        ),
    ),
    Metric(
        name="mauve", compute=_mauve, requires=("judge", "causal judge", "reference"),
        depends_on=("count",), min_samples=FEWEST, min_reference=FEWEST, prepare=_require_mauve,
        columns=(
            Column(
                "MAUVE", "mauve", "{:.3f}",
                "Overlap of samples and reference text in the judge's features, from 0 to 1. "
                "Higher is better.", "higher",
            ),
        ),
    ),
    Metric(
        name="self-bleu", compute=_self_bleu, depends_on=("count",),
        columns=(
            Column(
                "Self-BLEU", "self_bleu", "{:.3f}",
                "How much the texts repeat each other. Lower is more varied; it should match that "
                "of real text.",
            ),
        ),
    ),
    Metric(
        name="self-bleu-words", compute=_self_bleu_of_words, depends_on=("count",),
        columns=(
            Column(
                "BLEU, words", "self_bleu_words", "{:.3f}",
                "Self-BLEU over words as NLTK splits them, not over the model's tokens: the one "
                "that papers report.",
            ),
        ),
    ),
    Metric(
        name="unique-4gram", compute=_unique, depends_on=("count",),
        columns=(
            Column(
                "4-grams", "unique_4gram", "{:.3f}",
                "Share of distinct runs of four tokens among all runs of all texts. Higher is "
                "more varied; it should match that of real text.",
            ),
        ),
    ),
)  # fmt: skip
METRICS: dict[str, Metric] = {m.name: m for m in (*TEXT_METRICS, *PROTEIN_METRICS)}
"""Metrics by name, in the order of their columns."""
