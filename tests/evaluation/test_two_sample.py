import math

import numpy as np
import pytest
import torch

from didi_instruct.data.oracle import OracleLanguage
from didi_instruct.errors import UserError
from didi_instruct.evaluation import probes as module
from didi_instruct.evaluation.probes import auc, split_both, two_sample

TINY = {"layers": 1, "hidden": 16, "heads": 2, "steps": 20, "batch_size": 32}


def generator(seed):
    return torch.Generator().manual_seed(seed)


def random_tokens(count=200, length=6, num_tokens=5, seed=0):
    return torch.randint(num_tokens, (count, length), generator=generator(seed))


def brute_force(a, b):
    return sum((x > y) + 0.5 * (x == y) for x in a for y in b) / (len(a) * len(b))


@pytest.mark.parametrize("seed", range(20))
def test_the_auc_is_the_share_of_pairs_in_order(seed):
    """Few distinct scores bring ties, within a set and between the two."""
    numbers = np.random.default_rng(seed)
    a = numbers.integers(numbers.integers(1, 9), size=numbers.integers(2, 30))
    b = numbers.integers(numbers.integers(1, 9), size=numbers.integers(2, 30))
    value, (low, high) = auc(a, b)
    assert value == pytest.approx(brute_force(a.tolist(), b.tolist()), abs=1e-12)
    assert auc(b, a)[0] == pytest.approx(1 - value)
    assert 0 <= low <= value <= high <= 1
    assert auc(np.exp(a), np.exp(b))[0] == value, "only ranks count"


def test_the_extremes_of_the_auc():
    assert auc([2, 3], [0, 1]) == (1.0, (1.0, 1.0))
    assert auc([0, 1], [2, 3]) == (0.0, (0.0, 0.0))
    assert auc([5, 5], [5, 5, 5]) == (0.5, (0.5, 0.5))
    with pytest.raises(UserError, match="2 or more scores"):
        auc([1.0], [0.0, 2.0])


def test_the_interval_covers_the_true_auc_as_often_as_it_says():
    """Normal scores one deviation apart; 1,000 intervals, their coverage within 4 errors (6e-5)."""
    numbers, truth = np.random.default_rng(0), 0.5 * (1 + math.erf(0.5))
    covered = 0
    for _ in range(1000):
        low, high = auc(numbers.normal(1, 1, 80), numbers.normal(0, 1, 120))[1]
        covered += low <= truth <= high
    assert abs(covered / 1000 - 0.95) < 4 * math.sqrt(0.95 * 0.05 / 1000)


def test_equal_laws_are_not_told_apart():
    """Five tests; each |z| < 4 (6e-5 false alarms each, 3e-4 in all)."""
    language = OracleLanguage.tiny()
    for seed in range(5):
        a, b = (language.sample(500, generator(s)) for s in (1000 + seed, 2000 + seed))
        result = two_sample(a, b, 3, **TINY, seed=seed)
        error = (result.auc_ci95[1] - result.auc_ci95[0]) / 3.92
        assert abs(result.auc - 0.5) < 4 * error
        assert abs(result.accuracy - 0.5) < 4 * 0.5 / math.sqrt(200)


def test_words_drawn_alone_are_told_from_the_language():
    """Every word has the right law at its place: only the agreement between words is missing."""
    language = OracleLanguage.default(sentences=2)
    blank = torch.full((1, language.length), language.mask_id)
    marginals = language.denoiser(blank)[0].exp()
    alone = torch.multinomial(marginals, 1024, replacement=True, generator=generator(1)).T
    true = language.sample(1024, generator(2))
    steps = {"hidden": 64, "steps": 80, "batch_size": 32, "lr": 3e-3}
    result = two_sample(alone, true, language.num_tokens, **steps)
    assert result.auc > 0.8
    assert result.auc_ci95[0] > 0.8
    assert result.accuracy > 0.7
    assert result.train + result.valid + result.held_out == 2048
    assert result.held_out == 410


@pytest.mark.parametrize("kind", ["bidirectional", "ratio"])
def test_both_classifiers_find_an_obvious_difference(kind, monkeypatch):
    """Sets of unequal size, told apart by one token. The other classifier is made blind."""
    a, b = random_tokens(count=150), random_tokens(count=450, seed=1)
    a[:, :3] = 4

    def zeros(rows):
        return torch.zeros(len(rows), dtype=torch.float64)

    if kind == "ratio":
        monkeypatch.setattr(module, "_fit_classifier", lambda *args: zeros)
    else:
        monkeypatch.setattr(module, "fit_ar", lambda *args: (zeros, 1))
    result = two_sample(a, b, 5, **TINY | {"steps": 60, "lr": 1e-2})
    assert result.classifier == kind
    assert result.auc > 0.95
    assert result.accuracy > 0.9


def styled(documents, seed, count=320, length=12, num_tokens=12):
    """Texts with a style each, and a reference of a few documents whose rows share their style.

    A style is a law of words, drawn from one law of styles: a row of either has the same law.
    """
    numbers = np.random.default_rng(seed)

    def write(styles):
        rows = [numbers.choice(num_tokens, size=length, p=style) for style in styles]
        return torch.from_numpy(np.stack(rows))

    single, shared = (numbers.dirichlet([0.5] * num_tokens, n) for n in (count, documents))
    return write(single), write(shared.repeat(count // documents, 0))


STYLED = TINY | {"steps": 60, "lr": 1e-2}


@pytest.mark.slow
def test_documents_that_were_never_seen_tell_nothing():
    """Ten documents, cut between the seventh, eighth and ninth: the AUC is 0.5 on average.

    The mean of 12 lies within 4.4 standard errors (Student's t: 1e-3 false alarms). Split at
    random, documents are learned from and measured on: of eight, the AUC was 0.69 to 0.89.
    """
    found = [two_sample(*styled(10, seed), 12, **STYLED, seed=seed).auc for seed in range(12)]
    error = np.std(found, ddof=1) / math.sqrt(len(found))
    assert abs(np.mean(found) - 0.5) < 4.4 * error


def test_a_reference_of_forty_documents_is_not_told_from_texts_of_its_law():
    """Intervals of 8 tests; at a coverage of 95% fewer than 5 hold 0.5 at a rate of 4e-4."""
    found = [two_sample(*styled(40, seed), 12, **STYLED, seed=seed) for seed in range(8)]
    assert sum(r.auc_ci95[0] <= 0.5 <= r.auc_ci95[1] for r in found) >= 5


def test_a_difference_is_found_beside_the_style_of_eight_documents():
    """Every second word repeats the one before, in the reference alone."""
    texts, reference = styled(8, seed=0)
    reference[:, 1::2] = reference[:, ::2]
    result = two_sample(texts, reference, 12, **STYLED | {"hidden": 32, "steps": 150})
    assert result.auc_ci95[0] > 0.6


@pytest.mark.parametrize("documents", [8, 205])
def test_the_interval_covers_the_truth_where_neighbours_are_alike(documents):
    """Normal scores, half of their variance shared within a document; 400 intervals.

    Coverage of 95% or more is asked for, less 4 errors (3e-5). DeLong's own interval covers 56%
    at 8 documents.
    """
    numbers, covered = np.random.default_rng(0), 0
    for _ in range(400):
        shared = np.resize(np.repeat(numbers.normal(size=documents), -(-205 // documents)), 205)
        b = math.sqrt(0.5) * (shared + numbers.normal(size=205))
        low, high = auc(numbers.normal(size=205), b, in_order=True)[1]
        covered += low <= 0.5 <= high
    assert covered / 400 > 0.95 - 4 * math.sqrt(0.95 * 0.05 / 400)


def test_the_quantile_is_students():
    stats = pytest.importorskip("scipy.stats")
    assert pytest.approx(stats.t.ppf(0.975, module.PARTS - 1), abs=1e-6) == module.T_OF_PARTS


@pytest.mark.parametrize(("count_a", "count_b"), [(100, 100), (64, 300), (300, 64)])
def test_the_splits_are_partitions_and_equal_places_stay_together(count_a, count_b):
    split_a, split_b = split_both(count_a, count_b)
    assert torch.cat(split_a).sort().values.tolist() == list(range(count_a))
    assert torch.cat(split_b).sort().values.tolist() == list(range(count_a, count_a + count_b))
    fewer = min(count_a, count_b)
    for rows_a, rows_b in zip(split_a, split_b, strict=True):
        places_a, places_b = set(rows_a.tolist()), set((rows_b - count_a).tolist())
        shared = set(range(fewer))
        assert places_a & shared == places_b & shared
    for split, count in ((split_a, count_a), (split_b, count_b)):
        assert abs(len(split.held_out) - 0.2 * count) <= 1.5
        assert abs(len(split.valid) - 0.1 * count) <= 1.5
        assert split.held_out.diff().eq(1).all(), "neighbours are measured on together"
        owner = torch.empty(count, dtype=torch.long)
        for part, rows in enumerate(split):
            owner[rows - min(map(min, split))] = part
        assert owner.diff().ne(0).sum() <= (2 if count == fewer else 4), "cut at few places"


def test_a_set_against_itself_is_even():
    """Every text of one is in the same split of the other, so all held-out scores pair up."""
    a = random_tokens()
    result = two_sample(a, a.clone(), 5, **TINY)
    assert result.auc == pytest.approx(0.5)


def test_duplicates_in_both_sets_do_no_harm():
    """Three texts make up both sets, so every split holds all of them."""
    texts = random_tokens(count=3)
    a, b = texts[torch.arange(200) % 3], texts[torch.arange(230) % 3]
    result = two_sample(a, b, 5, **TINY)
    assert result.auc_ci95[0] <= 0.5 <= result.auc_ci95[1]
    same = torch.zeros(100, 4, dtype=torch.long)
    assert two_sample(same, same, 5, **TINY).auc == 0.5


def test_the_seed_decides_and_progress_counts_three_trainings():
    a, b, seen = random_tokens(), random_tokens(seed=1), []
    state = torch.get_rng_state()
    first = two_sample(a, b, 5, **TINY, seed=1, progress=seen.append)
    assert torch.equal(torch.get_rng_state(), state)
    assert seen == list(range(1, 61))
    assert two_sample(a, b, 5, **TINY, seed=1) == first
    assert two_sample(a, b, 5, **TINY, seed=2).auc != first.auc


def test_bad_input_is_refused_with_the_remedy():
    a = random_tokens()
    with pytest.raises(UserError, match="samples of B are 20, too few .* draw 64 or more"):
        two_sample(a, a[:20], 5, **TINY)
    with pytest.raises(UserError, match="samples of A hold ids outside 0 to 3"):
        two_sample(a, a, 4, **TINY)
    with pytest.raises(ValueError, match="6 and of 5 tokens"):
        two_sample(a, a[:, :5], 5, **TINY)


def test_what_pads_a_text_is_no_evidence():
    """Equal texts with other tokens after their ends are not told apart, and change no digit."""
    generator = torch.Generator().manual_seed(3)
    a, b = (torch.randint(5, (200, 6), generator=generator) for _ in range(2))
    counts = tuple(torch.randint(1, 7, (200,), generator=generator) for _ in range(2))
    found = []
    for fill in ((4, 4), (0, 1)):
        padded = [
            torch.where(torch.arange(6) < count[:, None], table, value)
            for table, count, value in zip((a, b), counts, fill, strict=True)
        ]
        found.append(two_sample(*padded, 5, counts=counts, **TINY))
    assert found[0] == found[1]
    assert two_sample(*padded, 5, **TINY | {"steps": 60, "lr": 1e-2}).auc > 0.7
