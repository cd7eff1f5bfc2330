"""Columns of an evaluation: names, numbers, intervals, meaning; the same wherever it is shown."""

from dataclasses import dataclass
from typing import Literal

Better = Literal["lower", "higher"]


@dataclass(frozen=True, slots=True)
class Column:
    """One number of a row."""

    title: str
    field: str
    form: str
    meaning: str
    """One plain sentence or two: what it is, and which way is better."""
    better: Better | None = None
    """Which way is better whatever the other columns say; None where no way is."""


VARIETY = (
    "read it beside the measures of variety (entropy, 4-grams, Self-BLEU; latent entropy where the "
    "language is known)."
)
COLUMNS = (
    Column(
        "passes", "passes", "{:.1f}",
        "Forward passes that really ran per text; a backward pass counts as two.",
    ),
    Column(
        "ppl", "ppl", "{:.2f}",
        "Perplexity: how surprised the judge is by each token. Lower is better only at equal "
        "entropy, since dull and repetitive texts surprise nobody.",
    ),
    Column(
        "entropy", "entropy", "{:.3f}",
        "Variety of the tokens within a text, in nats, mean over texts. Neither high nor low is "
        "good: it should be that of real text.",
    ),
    Column(
        "path KL", "path_kl", "{:.3f}",
        "Distance in nats per text from the sampler's law to the judge's: the judge's "
        "cross-entropy minus the entropy of the draws, an upper bound of the KL divergence. Lower "
        "is better, whatever the temperature, but by itself it can reward texts that are a little "
        "too much alike: " + VARIETY,
        "lower",
    ),
    Column(
        "Δ path KL", "path_kl_vs_baseline", "{:+.3f}",
        "Path KL minus that of the baseline at equal steps and its best setting. Below 0 is a "
        "gain, lower is better.",
        "lower",
    ),
    Column(
        "gap closed", "gap_closed", "{:.1%}",
        "Share of the path KL that few steps cost the baseline and that this row wins back: 0% is "
        "the baseline at equal steps, 100% the baseline with its most steps, both at its best "
        "settings. Higher is better.",
        "higher",
    ),
    Column(
        "vsF", "vsf", "{:.3f}",
        "Perplexity divided by the lowest that the baseline reaches at equal steps and equal "
        "entropy with any temperature or top-p. Below 1 is a gain, lower is better.",
        "lower",
    ),
    Column(
        "vsF passes", "vsf_passes", "{:.3f}",
        "As vsF, against the baseline at equal forward passes instead of equal steps.",
        "lower",
    ),
    Column(
        "AR KL ≥", "ar_kl", "{:.3f}",
        "A lower bound of the KL divergence in nats per text, from a left-to-right model trained "
        "on the samples: the true distance is at least this, up to its interval. A low value "
        "proves nothing, a high one is bad.",
    ),
    Column(
        "AUC", "c2st_auc", "{:.3f}",
        "How well a fresh classifier tells samples from the reference text: 0.5 is not at all, 1 "
        "is always. Lower is better.",
        "lower",
    ),
    Column(
        "MAUVE", "mauve", "{:.3f}",
        "How far samples and reference text overlap in the judge's eyes, from 0 to 1. Higher is "
        "better.",
        "higher",
    ),
    Column(
        "Self-BLEU", "self_bleu", "{:.3f}",
        "How much the texts repeat each other. Lower is more varied; it should be that of real "
        "text.",
    ),
    Column(
        "BLEU, words", "self_bleu_words", "{:.3f}",
        "Self-BLEU of words as NLTK cuts them, not of the model's tokens: what papers print.",
    ),
    Column(
        "4-grams", "unique_4gram", "{:.3f}",
        "Share of runs of four tokens that differ, over all texts together. Higher is more varied; "
        "it should be that of real text.",
    ),
)  # fmt: skip
"""In the order in which they are shown."""

INEXACT_PATH_KL = (
    "The judge's cross-entropy of the texts minus the entropy of the sampler's draws, in nats per "
    "text. This judge knows the texts' likelihood only up to a bound, or in other tokens: "
    "differences between rows count, the value itself does not and may be negative. Lower is "
    "better, but by itself it can reward texts that are a little too much alike: " + VARIETY
)

NOT_SWEPT = (
    "Here the baseline has only its plain setting, and may do better at another: --frontier tries "
    "more."
)
MEAN_LENGTH = Column(
    "length", "mean_length", "{:.1f}",
    "Tokens of a text before its end, mean over texts. Neither high nor low is good: it should be "
    "that of real text.",
)  # fmt: skip
"""Shown only where texts end before their window."""
