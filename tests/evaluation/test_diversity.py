import math
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

import didi_instruct
from didi_instruct.data.oracle import OracleLanguage
from didi_instruct.errors import UserError
from didi_instruct.evaluation.diversity import (
    self_bleu,
    unigram_entropy,
    unique_with_interval,
    word_ids,
)


def ngrams(text, n):
    return [tuple(text[i : i + n]) for i in range(len(text) - n + 1)]


def plain_self_bleu(texts, n=5):
    """The definition, with dictionaries: every sample against every other."""
    scores = []
    for i, text in enumerate(texts):
        others = [other for j, other in enumerate(texts) if j != i]
        precisions = []
        for order in range(1, n + 1):
            best = Counter()
            for other in others:
                best |= Counter(ngrams(other, order))
            matches = sum((Counter(ngrams(text, order)) & best).values())
            precisions.append((matches or 0.1) / max(1, len(text) - order + 1))
        closest = min((len(other) for other in others), key=lambda m: (abs(m - len(text)), m))
        if not set(text) & {token for other in others for token in other}:
            scores.append(0.0)
            continue
        penalty = min(1.0, math.exp(1 - closest / len(text)))
        scores.append(penalty * math.prod(precisions) ** (1 / n))
    return scores


def nltk_self_bleu(texts, n=5):
    bleu = pytest.importorskip("nltk.translate.bleu_score")
    return [
        bleu.sentence_bleu(
            texts[:i] + texts[i + 1 :],
            texts[i],
            weights=(1 / n,) * n,
            smoothing_function=bleu.SmoothingFunction().method1,
        )
        for i in range(len(texts))
    ]


def random_texts(seed):
    """A few samples of 0 to 20 tokens; a small alphabet brings ties and repeats."""
    generator = np.random.default_rng(seed)
    alphabet, longest = generator.integers(1, 9), generator.choice([4, 8, 20])
    lengths = generator.integers(0, longest + 1, size=generator.integers(2, 8))
    return [generator.integers(alphabet, size=k).tolist() for k in lengths]


EDGE_CASES = {
    "shorter than five tokens": [[1, 2, 3], [1, 2, 3, 4, 5, 6], [1], [2, 3]],
    "an empty sample": [[], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6]],
    "all empty": [[], [], []],
    "no overlap": [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12], [13, 14]],
    "one without overlap": [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [6, 7, 8, 9, 10]],
    "a tie in length, the shorter wins": [[1, 2, 3, 4, 5], [1] * 3, [1, 2, 3, 4, 5, 6, 7]],
    "only longer references": [[1, 2, 3], [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 7]],
    "only shorter references": [[1, 2, 3, 4, 5, 6, 7, 8], [1, 2], [2, 3, 4]],
    "duplicates": [[1, 2, 3, 4, 5, 6]] * 3,
    "two samples": [[1, 2, 3, 4, 5, 6], [1, 2, 3, 9, 5, 6]],
    "clipped to the second": [[1] * 9, [1] * 4 + [2] * 5, [1] * 2 + [3] * 7],
    "two at the top": [[1] * 6, [1] * 6, [1, 2, 3, 4, 5, 6]],
    "ids beyond 32 bits": [[2**40, 2**40 + 1, 5, 2**40], [2**40, 2**40 + 1, 5, 6]],
}


@pytest.mark.parametrize("reference", [plain_self_bleu, nltk_self_bleu])
class TestSelfBleuIsTheDefinition:
    @pytest.mark.parametrize("texts", EDGE_CASES.values(), ids=EDGE_CASES.keys())
    def test_on_edge_cases(self, reference, texts):
        assert self_bleu(texts).values == pytest.approx(reference(texts), abs=1e-9)

    def test_on_random_texts(self, reference):
        for seed in range(150):
            texts = random_texts(seed)
            n = 1 + seed % 6
            expected = reference(texts, n)
            assert self_bleu(texts, n).values == pytest.approx(expected, abs=1e-9), seed


def test_texts_come_as_tensors_arrays_or_lists():
    table = np.random.default_rng(0).integers(5, size=(6, 12))
    ragged = [row[:k] for row, k in zip(table, [12, 3, 0, 7, 12, 9], strict=True)]
    lengths = torch.tensor([12, 3, 0, 7, 12, 9])
    expected = self_bleu([row.tolist() for row in ragged]).values
    for same in (
        self_bleu(ragged),
        self_bleu([torch.from_numpy(row) for row in ragged]),
        self_bleu(torch.from_numpy(table), lengths=lengths),
        self_bleu(table.astype(np.int32), lengths=lengths.tolist()),
    ):
        assert same.values.tolist() == expected.tolist()


def test_entropy_is_that_of_the_counts():
    tokens = torch.tensor([[7, 7, 7, 7], [0, 1, 2, 3], [5, 5, 9, 9], [1, 1, 1, 2]])
    skewed = -0.75 * math.log(0.75) - 0.25 * math.log(0.25)
    expected = [0, math.log(4), math.log(2), skewed]
    assert unigram_entropy(tokens).tolist() == pytest.approx(expected, abs=1e-12)
    shorter = unigram_entropy(tokens, torch.tensor([0, 3, 1, 4])).tolist()
    assert shorter == pytest.approx([0, math.log(3), 0, skewed], abs=1e-12)
    assert unigram_entropy(torch.empty(0, 8, dtype=torch.long)).shape == (0,)
    words = np.random.default_rng(0).zipf(1.3, size=200)
    p = np.unique(words, return_counts=True)[1] / 200
    assert unigram_entropy([words]).item() == pytest.approx(-(p * np.log(p)).sum(), rel=1e-12)


def test_the_distinct_share_at_its_ends():
    rows = torch.arange(40).view(4, 10)
    assert unique_with_interval(rows).value == 1
    assert unique_with_interval(rows[:1].repeat(5, 1)).value == 1 / 5
    assert unique_with_interval(torch.zeros(3, 9, dtype=torch.long)).value == 1 / 18


@pytest.mark.parametrize("n", [1, 2, 4])
def test_the_jackknife_leaves_out_one_sample_after_another(n):
    """One count gives what counting anew without each sample gives."""
    generator = np.random.default_rng(n)
    texts = [generator.integers(6, size=k).tolist() for k in (30, 12, 0, 9, 25, 18)]
    others = [texts[:i] + texts[i + 1 :] for i in range(len(texts))]
    without = np.array([unique_with_interval(each, n).value for each in others])
    half = 1.96 * math.sqrt(5 / 6 * ((without - without.mean()) ** 2).sum())
    found = unique_with_interval(texts, n)
    expected = (max(0, found.value - half), min(1, found.value + half))
    assert found.ci95 == pytest.approx(expected)


def test_the_interval_of_the_distinct_share_covers_its_mean():
    """1,000 sets of 40 samples of 8 tokens: common words in half of them, rare ones in the others.

    A word of an alphabet of K is in a sample with probability p = (1 - (1 - 1/K)^8) / 2, and among
    the distinct with 1 - (1 - p)^40, which gives the mean. 40 samples and 1.96 errors cover with
    about 94%; 4 standard errors are 3%, a false-alarm rate of 6e-5.
    """
    samples, length, common, rare = 40, 8, 60, 5000
    distinct = 0.0
    for words in (common, rare):
        p = (1 - (1 - 1 / words) ** length) / 2
        distinct += words * (1 - (1 - p) ** samples)
    mean, covered = distinct / (samples * length), 0
    for seed in range(1000):
        generator = np.random.default_rng(seed)
        odd = generator.random((samples, 1)) < 0.5
        draws = [generator.integers(words, size=(samples, length)) for words in (common, rare)]
        low, high = unique_with_interval(np.where(odd, common + draws[1], draws[0]), 1).ci95
        covered += low < mean < high
    assert covered / 1000 == pytest.approx(0.94, abs=0.03)


def test_the_interval_is_wide_where_only_coincidence_repeats():
    """One word of 2,000 in each of 100 samples: the variance is twice that of the occupancy law.

    Var = K(K-1)(1-2/K)^n + K(1-1/K)^n - K²(1-1/K)^2n for the number of distinct words. The mean of
    2,000 estimates has a standard error of 3% here; 12% are 4 of them (6e-5).
    """
    n, k = 100, 2000
    exact = k * (k - 1) * (1 - 2 / k) ** n + k * (1 - 1 / k) ** n - k**2 * (1 - 1 / k) ** (2 * n)
    estimates = []
    for seed in range(2000):
        found = unique_with_interval(np.random.default_rng(seed).integers(k, size=(n, 1)), 1)
        estimates.append(((found.value - found.ci95[0]) / 1.96 * n) ** 2)
    assert np.mean(estimates) / exact == pytest.approx(2, rel=0.12)


def test_the_distinct_share_of_few_or_equal_samples():
    rows = torch.arange(40).view(4, 10)
    assert unique_with_interval(rows) == (1, (1, 1))
    assert unique_with_interval(rows[:1]).ci95 is None
    assert unique_with_interval(rows[:2]).ci95 == (1, 1)
    assert unique_with_interval(rows[:1].repeat(5, 1)) == (0.2, (0.2, 0.2))
    holds_all = unique_with_interval(rows[:2], lengths=torch.tensor([10, 3]))
    assert (holds_all.value, holds_all.ci95) == (1, None)


def test_padding_is_not_text():
    with pytest.raises(AssertionError, match="padding"):
        self_bleu([[1, 2], [3, -1]])


@pytest.mark.parametrize("seed", range(12))
def test_the_interval_of_self_bleu_leaves_out_each_sample_and_counts_anew(seed):
    generator = np.random.default_rng(seed)
    number, length, words = (int(generator.integers(low, 12)) for low in (3, 1, 1))
    texts = generator.integers(words, size=(number, length))
    without = [self_bleu(np.delete(texts, i, 0)).mean for i in range(number)]
    half = 1.96 * math.sqrt((number - 1) * np.var(without))
    mean = self_bleu(texts).mean
    expected = max(0.0, mean - half), min(1.0, mean + half)
    assert self_bleu(texts).ci95 == pytest.approx(expected, abs=1e-12)
    assert self_bleu(texts[:2]).ci95 is None


def test_the_interval_of_self_bleu_covers_its_mean_at_this_number_of_samples():
    """300 sets of 64 texts of a known language; coverage of 95% or more, less 4 errors (3e-5).

    A bootstrap of the scores, which takes their references as given, covers 88%.
    """
    language = OracleLanguage.default()
    found = [
        self_bleu(language.sample(64, torch.Generator().manual_seed(seed))) for seed in range(300)
    ]
    truth = np.mean([result.mean for result in found])
    covered = np.mean([low <= truth <= high for low, high in (r.ci95 for r in found)])
    assert covered > 0.95 - 4 * math.sqrt(0.95 * 0.05 / 300)


def test_words_are_those_of_nltk_without_its_download():
    """As `nltk.word_tokenize` of one line: marks are words, a full stop is one at the end alone."""
    tokenize = pytest.importorskip("nltk.tokenize")
    texts = ['Don\'t go, he said. "Yes!" Mr. Smith left.', "He said: don't.", ""]
    ids = word_ids(texts)
    expected = [tokenize.word_tokenize(text, preserve_line=True) for text in texts]
    assert expected[1] == ["He", "said", ":", "do", "n't", "."]
    pairs = {(i, w) for row, words in zip(ids, expected, strict=True)
             for i, w in zip(row, words, strict=True)}  # fmt: skip
    assert len(pairs) == len({i for i, _ in pairs}) == len({w for _, w in pairs})


def test_self_bleu_of_words_is_that_of_nltk_from_text_to_number():
    """Tokenizer, 5-grams, equal weights, smoothing method 1: the paper's definition throughout."""
    tokenize = pytest.importorskip("nltk.tokenize")
    texts = [
        file.read_text()[:1500]
        for file in sorted(Path(didi_instruct.__file__).parent.glob("data/*.py"))
    ]
    words = [tokenize.word_tokenize(text, preserve_line=True) for text in texts]
    assert self_bleu(word_ids(texts)).values == pytest.approx(nltk_self_bleu(words), abs=1e-9)


def test_without_nltk_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "nltk.tokenize", None)
    with pytest.raises(UserError, match="Self-BLEU of words.*didi-instruct.eval"):
        word_ids(["a"])
