"""One row of a table: what is measured of one set of samples."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from didi_instruct.errors import UserError
from didi_instruct.evaluation.ar_bound import ar_kl
from didi_instruct.evaluation.diversity import bootstrap, self_bleu, unigram_entropy, unique_ngrams
from didi_instruct.evaluation.judges import CausalJudge, Judge, Scores
from didi_instruct.evaluation.mauve import mauve_score
from didi_instruct.evaluation.samples import SampleSet
from didi_instruct.evaluation.two_sample import two_sample

Row = dict[str, Any]
AR_STEPS, TEST_STEPS = 2000, 1000
"""Training steps of the networks behind the AR-entropy bound and the two-sample test."""
Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and of how much."""


@dataclass(frozen=True, slots=True)
class Reference:
    """Real text, or a teacher with all its steps: what samples are compared with."""

    name: str
    texts: tuple[str, ...]
    tokens: Tensor
    """(M, L), in the model's own tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Yardstick:
    """What samples are measured with; the same for all rows of a table."""

    judge: Judge | None = None
    reference: Reference | None = None
    num_tokens: int = 0
    seed: int = 0
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class Metric:
    """A measure, and what it needs."""

    compute: Callable[["Measuring"], Row]
    judge: bool = False
    reference: bool = False
    per_judge: bool = False
    """Whether its value depends on the judge."""


class Measuring:
    """One set of samples under one yardstick; the judge is asked once."""

    def __init__(
        self, samples: SampleSet, yardstick: Yardstick, progress: Progress | None = None
    ) -> None:
        self.samples, self.yardstick, self._progress = samples, yardstick, progress
        self._scores: Scores | None = None

    def scores(self) -> Scores:
        """What the judge says."""
        if self._scores is None:
            assert self.yardstick.judge is not None
            self._scores = self.yardstick.judge.score(
                self.samples, lambda done, total: self.tell("Judging", done, total)
            )
        return self._scores

    def tell(self, stage: str, done: int, total: int) -> None:
        """Report progress, if anyone listens."""
        if self._progress is not None:
            self._progress(stage, done, total)

    @property
    def reference(self) -> Reference:
        """What to compare with."""
        assert self.yardstick.reference is not None
        return self.yardstick.reference


def _perplexity(m: Measuring) -> Row:
    scores = m.scores()
    low, high = scores.interval(m.yardstick.seed)
    return {"ppl": scores.perplexity(), "ppl_ci95": [low, high], "judge_cut": scores.cut}


def _entropy(m: Measuring) -> Row:
    values = unigram_entropy(m.samples.tokens, m.samples.lengths)
    return {"entropy": values.mean().item(), "entropy_ci95": _interval(m, values)}


def _unique(m: Measuring) -> Row:
    return {"unique_4gram": unique_ngrams(m.samples.tokens, 4, m.samples.lengths)}


def _self_bleu(m: Measuring) -> Row:
    found = self_bleu(m.samples.tokens, lengths=m.samples.lengths)
    return {"self_bleu": found.mean, "self_bleu_ci95": _interval(m, found.values)}


def _mauve(m: Measuring) -> Row:
    judge = m.yardstick.judge
    if not isinstance(judge, CausalJudge):
        raise UserError(
            "MAUVE compares features of a causal language model: give one as --judge, "
            "or leave out the metric mauve."
        )
    result = mauve_score(m.samples.texts, m.reference.texts, judge.features)
    return {"mauve": result.value, "mauve_texts": [result.samples, result.reference]}


def _path_kl(m: Measuring) -> Row:
    """Nats per sequence; `path_kl_exact` says whether the judge knows the tokens' likelihood."""
    log_prob = m.samples.log_prob
    if log_prob is None:
        return {"path_entropy": None, "path_kl": None}
    assert m.yardstick.judge is not None
    gaps = m.scores().nats.cpu() + log_prob
    return {
        "path_entropy": -log_prob.mean().item(),
        "path_kl": gaps.mean().item(),
        "path_kl_ci95": _interval(m, gaps),
        "path_kl_exact": m.yardstick.judge.exact,
    }


def _ar_bound(m: Measuring) -> Row:
    assert m.yardstick.judge is not None
    if not m.yardstick.judge.exact:
        raise UserError(
            f"The AR-entropy bound needs a judge that knows the likelihood of tokens, which "
            f"{m.yardstick.judge.name} does not: use `oracle` or a left-to-right model of didi, "
            "or leave out the metric ar-kl."
        )
    y = m.yardstick
    found = ar_kl(
        m.samples.tokens,
        m.scores().nats,
        y.num_tokens,
        steps=AR_STEPS,
        seed=y.seed,
        device=torch.device(y.device),
        progress=lambda step: m.tell("AR-entropy bound", step, AR_STEPS),
    )
    return {"ar_kl": found.kl_lower, "ar_kl_se": found.se}


def _two_sample(m: Measuring) -> Row:
    y = m.yardstick
    found = two_sample(
        m.samples.tokens,
        m.reference.tokens,
        y.num_tokens,
        steps=TEST_STEPS,
        seed=y.seed,
        device=torch.device(y.device),
        progress=lambda step: m.tell("Two-sample test", step, 3 * TEST_STEPS),
    )
    return {"c2st_auc": found.auc, "c2st_auc_ci95": list(found.auc_ci95)}


def _interval(m: Measuring, values: Tensor | np.ndarray) -> list[float] | None:
    """95% bootstrap interval of a mean over samples; one sample has none."""
    if len(values) < 2:
        return None
    return list(bootstrap(np.asarray(values), seed=m.yardstick.seed))


METRICS: Mapping[str, Metric] = {
    "ppl": Metric(_perplexity, judge=True, per_judge=True),
    "entropy": Metric(_entropy),
    "unique-4gram": Metric(_unique),
    "self-bleu": Metric(_self_bleu),
    "mauve": Metric(_mauve, judge=True, reference=True, per_judge=True),
    "path-kl": Metric(_path_kl, judge=True, per_judge=True),
    "ar-kl": Metric(_ar_bound, judge=True, per_judge=True),
    "c2st": Metric(_two_sample, reference=True),
}


def describe(samples: SampleSet) -> Row:
    """What a row says of its samples before anything is measured."""
    origin, count = samples.origin, len(samples)
    tokens = count * origin.length
    return {
        "model": origin.model,
        "sampler": origin.sampler,
        "steps": origin.steps,
        "nfe": origin.nfe,
        "passes": origin.passes,
        "disc_calls": origin.disc_calls,
        "temperature": origin.temperature,
        "top_p": origin.top_p,
        "num_samples": count,
        "length": origin.length,
        "mean_length": samples.lengths.double().mean().item(),
        "tokens_per_second": tokens / origin.seconds if origin.seconds else None,
        "seed": origin.seed,
    }


def check_comparable(sets: Sequence[SampleSet]) -> None:
    """Refuse samples whose numbers do not belong into one table."""
    if not sets:
        raise UserError("There are no samples to measure.")
    first = sets[0].origin
    for other in (s.origin for s in sets[1:]):
        if other.tokenizer != first.tokenizer:
            raise UserError(
                f"{first.model} and {other.model} have different tokenizers: entropy and n-grams "
                "count tokens, so they do not belong into one table. Evaluate them one by one."
            )
        if (other.length, other.until_eot) != (first.length, first.until_eot):
            raise UserError(
                f"Samples of {first.model} have {first.length} tokens and those of {other.model} "
                f"{other.length} (or end differently): entropy grows with length. Draw both alike."
            )
