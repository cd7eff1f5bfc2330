"""The AR-entropy bound and the two-sample test: closed forms, splits that do not leak, coverage."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from didi_instruct.config.model import ModelConfig
from didi_instruct.data.oracle import OracleLanguage
from didi_instruct.errors import TrainingError, UserError
from didi_instruct.evaluation import probes
from didi_instruct.evaluation.probes import (
    Learner,
    Split,
    ar_kl,
    ask,
    auc,
    fit,
    split_both,
    two_sample,
)
from didi_instruct.evaluation.quick_eval import path_gaps
from didi_instruct.evaluation.stats import mean_and_error
from didi_instruct.models.ar import ARModel
from didi_instruct.process.schedule import LogLinear
from didi_instruct.sampling.ancestral import ancestral
from didi_instruct.sampling.denoiser import function_denoiser
from didi_instruct.sampling.draw import DrawOptions
from didi_instruct.sampling.state import Canvas, State

TINY = Learner(layers=1, hidden=16, heads=2, steps=20, batch_size=32, lr=3e-3)
LONGER = replace(TINY, steps=60, lr=1e-2)
SMALL = Learner(hidden=64, steps=100, batch_size=32, lr=3e-3)


@pytest.fixture(scope="module")
def language():
    """64 words, L = 16."""
    return OracleLanguage.default(sentences=2)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def random_tokens(count=200, length=6, num_tokens=5, seed=0):
    return torch.randint(num_tokens, (count, length), generator=generator(seed))


# Learning: splits, and when to stop


@pytest.mark.parametrize("count", [64, 100, 999])
def test_a_split_is_a_partition(count):
    split = Split.draw(count, seed=4)
    assert torch.cat(split).sort().values.tolist() == list(range(count))
    assert len(split.held_out) == round(0.2 * count)
    assert len(split.valid) == round(0.1 * count)
    assert split.train.tolist() != Split.draw(count, seed=5).train.tolist()
    ordered = Split.in_order(count)
    assert torch.cat(ordered).tolist() == list(range(count))
    assert [len(part) for part in ordered] == [len(part) for part in split]


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


def test_training_ends_when_the_validation_has_turned_however_many_steps_are_planned():
    """A line through the origin, best at half of the slope that fits the rows it learns from.

    Validation falls, then rises for good: the best step is found, and 5 looks of 20 steps later
    all is over, where 20 looks in 100,000 steps would see the first one at step 5,000.
    """
    split, slope = Split.draw(100, seed=0), nn.Linear(1, 1, bias=False)
    nn.init.zeros_(slope.weight)
    learned = torch.full((100,), 2.0)
    learned[split.valid] = 1.0

    def loss(rows):
        return (slope.weight[0, 0] - learned[rows]).square() + 0.1

    seen = []
    best = fit(
        slope, loss, split, replace(TINY, steps=100_000, batch_size=16, lr=0.02), 999, seen.append
    )
    assert slope.weight.item() == pytest.approx(1, abs=0.3)
    assert best <= len(seen) <= best + 20 * (5 + 3)
    assert len(seen) < 400
    with pytest.raises(TrainingError, match="use a lr below"):
        fit(slope, lambda rows: loss(rows) * math.nan, split, TINY, 999, None)


class Table(nn.Module):
    """A number per row, drawn towards its target: what it learns of one says nothing of others."""

    def __init__(self, targets):
        super().__init__()
        self.guess, self.targets = nn.Parameter(torch.zeros(len(targets))), targets

    def loss(self, rows):
        return (self.guess[rows] - self.targets[rows]).square()


def test_the_network_is_left_as_it_validated_best(monkeypatch):
    """Rows that are learned by heart: validation never falls below where it began."""
    split = Split.draw(100, seed=1)
    table = Table(torch.randn(100, generator=torch.Generator().manual_seed(2)))
    looks = []
    monkeypatch.setattr(probes, "ask", lambda *args: looks.append(ask(*args)) or looks[-1])
    best = fit(table, table.loss, split, replace(TINY, steps=60, batch_size=16, lr=0.05), 7, None)
    found = [look.mean().item() for look in looks]
    assert best == 3 * (1 + found.index(min(found)))
    assert ask(table.loss, split.valid, 7).mean().item() == pytest.approx(min(found))
    assert table.guess[split.held_out].abs().max() == 0, "never learned from"


# The AR-entropy bound


def test_a_model_that_knows_the_language_makes_the_bound_tighter():
    """Independent words, of which few samples are at hand; the start learned from many others.

    From nothing the bound is at least 0.1 nats lower; with the start it is near the exact KL, and
    below it but for |z| < 4 (6e-5).
    """
    language = OracleLanguage.tiny()
    texts = torch.cartesian_prod(*[torch.arange(3)] * 4)
    log_q = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64).log()[texts].sum(1)
    exact = (log_q.exp() * (log_q - language.log_prob(texts))).sum().item()
    rows = torch.multinomial(log_q.exp(), 9000, replacement=True, generator=generator(2))
    many, few = texts[rows[:8000]], texts[rows[8000:]]
    config = ModelConfig(
        kind="ar", layers=1, hidden=16, heads=2, vocab_size=4, length=4, learned_positions=True
    )
    torch.manual_seed(0)
    start = ARModel(config)
    split = Split.draw(len(many), 0)
    learner = replace(TINY, steps=200, batch_size=64, lr=1e-2)
    fit(start, lambda r: -start.log_prob(many[r]) / 4, split, learner, 4096, None)
    before = {name: value.clone() for name, value in start.state_dict().items()}
    nats = -language.log_prob(few)
    few_steps = replace(TINY, steps=5, lr=3e-4)
    begun = ar_kl(few, nats, 3, few_steps, start=start)
    fresh = ar_kl(few, nats, 3, replace(few_steps, lr=2e-3))
    assert exact - 4 * begun.se - 0.05 < begun.kl_lower < exact + 4 * begun.se
    assert fresh.kl_lower < begun.kl_lower - 0.1
    assert all(torch.equal(value, before[name]) for name, value in start.state_dict().items())
    with pytest.raises(UserError, match="knows 3 tokens and 4 positions"):
        ar_kl(random_tokens(), torch.ones(200), 5, TINY, start=start)


def test_the_bound_reaches_the_enumerated_kl_where_the_law_is_easy_to_learn():
    """Independent words against a language of 81 texts; |z| < 4 (6e-5), and 0.05 nats to learn."""
    language = OracleLanguage.tiny()
    texts = torch.cartesian_prod(*[torch.arange(3)] * 4)
    weights = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
    log_q = weights.log()[texts].sum(1)
    exact = (log_q.exp() * (log_q - language.log_prob(texts))).sum().item()
    entropy = -(log_q.exp() * log_q).sum().item()

    rows = torch.multinomial(log_q.exp(), 8000, replacement=True, generator=generator(1))
    samples = texts[rows]
    nats = -language.log_prob(samples)
    result = ar_kl(samples, nats, 3, replace(TINY, steps=300, lr=1e-2))
    assert exact - 4 * result.se - 0.05 < result.kl_lower < exact + 4 * result.se
    assert result.cross_entropy == pytest.approx(entropy, abs=0.1)
    assert result.held_out == 1600


def test_two_steps_lie_between_nothing_and_the_path_kl(language):
    """Significantly: 4 standard errors on both sides. True samples show no distance (3e-5)."""
    canvas = Canvas.blank(2048, language.length, language.mask_id)
    denoiser, state = function_denoiser(language.denoiser, 64), State(canvas, DrawOptions(seed=3))
    samples = ancestral(denoiser, LogLinear(0.0), state, steps=2)
    upper, error = mean_and_error(path_gaps(samples, language.log_prob))
    result = ar_kl(samples.tokens, -language.log_prob(samples.tokens), 64, SMALL)
    assert 4 * result.se < result.kl_lower
    assert result.kl_lower + 4 * result.se < upper - 4 * error
    true = language.sample(2048, generator(5))
    result = ar_kl(true, -language.log_prob(true), 64, SMALL)
    assert result.kl_lower < 4 * result.se


def test_noise_cannot_be_learned_from_the_samples_it_is_measured_on():
    """A model that had seen them would fall below L log V; this one stays there, |z| < 4.

    What it learns by heart of the others makes it worse, so it stops, and goes back.
    """
    samples, seen = random_tokens(count=120, length=8, num_tokens=20), []
    uniform = torch.full((120,), 8 * math.log(20))
    learner = replace(TINY, hidden=64, steps=400, lr=1e-2)
    result = ar_kl(samples, uniform, 20, learner, progress=seen.append)
    assert -4 * result.se < result.cross_entropy - 8 * math.log(20) < 2
    assert seen == list(range(1, len(seen) + 1))
    assert len(seen) < 400


def test_the_judge_is_asked_about_the_held_out_samples_alone():
    """Collapsed samples cost nothing, and this judge knows the number of each row."""
    samples = torch.tensor([[3, 1, 2]]).expand(200, 3)
    learner = replace(TINY, steps=100, lr=1e-2, seed=9)
    result = ar_kl(samples, torch.arange(200.0), 5, learner)
    expected = mean_and_error(Split.draw(200, seed=9).held_out)
    assert result.cross_entropy < 0.05
    assert (result.kl_lower, result.se) == pytest.approx(expected, abs=0.05)
    assert result.held_out == 40


def test_the_seed_decides_and_the_global_stream_is_left_alone(monkeypatch):
    """Small passes change the memory, not the result."""
    samples, nats = random_tokens(), torch.zeros(200)
    state = torch.get_rng_state()
    first = ar_kl(samples, nats, 5, TINY)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(123)
    assert ar_kl(samples, nats, 5, TINY) == first
    assert ar_kl(samples, nats, 5, replace(TINY, seed=2)).kl_lower != first.kl_lower
    torch.set_rng_state(state)
    monkeypatch.setattr(probes, "LOGITS_AT_ONCE", 5 * 6 * 5)
    assert ar_kl(samples, nats, 5, TINY).kl_lower == pytest.approx(first.kl_lower, abs=1e-3)


def test_bad_samples_are_refused_with_the_remedy():
    samples, nats = random_tokens(), torch.zeros(200)
    with pytest.raises(UserError, match="are 10, too few .* draw 64 or more"):
        ar_kl(samples[:10], nats[:10], 5, TINY)
    with pytest.raises(UserError, match="samples of B are 20, too few .* draw 64 or more"):
        two_sample(samples, samples[:20], 5, TINY)
    for bad in (-1, 5):
        masked = samples.clone()
        masked[7, 2] = bad
        with pytest.raises(UserError, match="ids outside 0 to 4: masks and padding"):
            ar_kl(masked, nats, 5, TINY)
    for bad in (math.nan, math.inf):
        nats[3] = bad
        with pytest.raises(UserError, match="no finite -log p"):
            ar_kl(samples, nats, 5, TINY)


def ended_texts(count, seed=0):
    """Texts of 1 to 4 coin tosses, all lengths equally likely, then their end (2)."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(2, (count, 6), generator=generator)
    lengths = torch.randint(1, 5, (count,), generator=generator)
    return torch.where(torch.arange(6) < lengths[:, None], tokens, 2), lengths + 1


def test_what_follows_an_end_costs_nothing_and_teaches_nothing():
    """Whatever it is, the bound is the same: to the last digit."""
    samples, counts = ended_texts(200)
    nats = torch.full((200,), 7.0)
    noise = torch.randint(3, samples.shape, generator=torch.Generator().manual_seed(1))
    other = torch.where(torch.arange(6) < counts[:, None], samples, noise)
    found = [ar_kl(table, nats, 3, learner=TINY, counts=counts) for table in (samples, other)]
    assert found[0] == found[1]
    assert ar_kl(other, nats, 3, TINY).cross_entropy > found[0].cross_entropy
    whole = torch.full_like(counts, 6)
    assert ar_kl(samples, nats, 3, TINY, counts=whole) == ar_kl(samples, nats, 3, TINY)


def test_the_entropy_of_texts_with_their_ends_is_learnt():
    """Log 4 for the length and log 2 for each of 2.5 tosses; |z| < 4 (6e-5), 0.08 nats to learn."""
    samples, counts = ended_texts(3000)
    nats = math.log(4) + (counts - 1).double() * math.log(2)
    result = ar_kl(samples, nats, 3, replace(TINY, steps=300, lr=1e-2), counts=counts)
    assert -0.08 < result.kl_lower < 4 * result.se
    judged = result.kl_lower + result.cross_entropy
    error = 1.118 * math.log(2) / math.sqrt(result.held_out)
    assert abs(judged - math.log(4) - 2.5 * math.log(2)) < 4 * error


# The two-sample test


def brute_force(a, b):
    return sum((x > y) + 0.5 * (x == y) for x in a for y in b) / (len(a) * len(b))


@pytest.mark.parametrize("seed", range(5))
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


def test_the_interval_covers_the_true_auc_as_often_as_it_says():
    """Normal scores one deviation apart; 1,000 intervals, their coverage within 4 errors (6e-5)."""
    numbers, truth = np.random.default_rng(0), 0.5 * (1 + math.erf(0.5))
    covered = 0
    for _ in range(1000):
        low, high = auc(numbers.normal(1, 1, 80), numbers.normal(0, 1, 120))[1]
        covered += low <= truth <= high
    assert abs(covered / 1000 - 0.95) < 4 * math.sqrt(0.95 * 0.05 / 1000)


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
    assert pytest.approx(stats.t.ppf(0.975, probes.PARTS - 1), abs=1e-6) == probes.T_OF_PARTS


def test_equal_laws_are_not_told_apart():
    """Five tests; each |z| < 4 (6e-5 false alarms each, 3e-4 in all)."""
    language = OracleLanguage.tiny()
    for seed in range(5):
        a, b = (language.sample(500, generator(s)) for s in (1000 + seed, 2000 + seed))
        result = two_sample(a, b, 3, replace(TINY, lr=4e-3, seed=seed))
        error = (result.auc_ci95[1] - result.auc_ci95[0]) / 3.92
        assert abs(result.auc - 0.5) < 4 * error


def test_words_drawn_alone_are_told_from_the_language(language):
    """Every word has the right law at its place: only the agreement between words is missing."""
    blank = torch.full((1, language.length), language.mask_id)
    marginals = language.denoiser(blank)[0].exp()
    alone = torch.multinomial(marginals, 1024, replacement=True, generator=generator(1)).T
    true = language.sample(1024, generator(2))
    result = two_sample(alone, true, language.num_tokens, replace(SMALL, steps=80))
    assert result.auc_ci95[0] > 0.8
    assert result.held_out == 410


@pytest.mark.parametrize("kind", ["bidirectional", "ratio"])
def test_both_classifiers_find_an_obvious_difference(kind, monkeypatch):
    """Sets of unequal size, told apart by one token. The other classifier is made blind."""
    a, b = random_tokens(count=150), random_tokens(count=450, seed=1)
    a[:, :3] = 4

    def zeros(rows):
        return torch.zeros(len(rows), dtype=torch.float64)

    if kind == "ratio":
        monkeypatch.setattr(probes, "fit_classifier", lambda *args: zeros)
    else:
        monkeypatch.setattr(probes, "fit_ar", lambda *args: zeros)
    result = two_sample(a, b, 5, LONGER)
    assert result.classifier == kind
    assert result.auc > 0.95


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


def test_a_reference_of_forty_documents_is_not_told_from_texts_of_its_law():
    """Intervals of 8 tests; at a coverage of 95% fewer than 5 hold 0.5 at a rate of 4e-4."""
    found = [two_sample(*styled(40, seed), 12, replace(LONGER, seed=seed)) for seed in range(8)]
    assert sum(r.auc_ci95[0] <= 0.5 <= r.auc_ci95[1] for r in found) >= 5


def test_a_set_against_itself_is_even():
    """Every text of one is in the same split of the other, so all held-out scores pair up."""
    a = random_tokens()
    result = two_sample(a, a.clone(), 5, TINY)
    assert result.auc == pytest.approx(0.5)


def test_the_seed_decides_and_progress_counts_three_trainings():
    a, b, seen = random_tokens(), random_tokens(seed=1), []
    state = torch.get_rng_state()
    first = two_sample(a, b, 5, TINY, progress=seen.append)
    assert torch.equal(torch.get_rng_state(), state)
    assert seen == list(range(1, 61))
    assert two_sample(a, b, 5, TINY) == first
    assert two_sample(a, b, 5, replace(TINY, seed=2)).auc != first.auc


def test_what_pads_a_text_is_no_evidence():
    """Equal texts with other tokens after their ends are not told apart, and change no digit."""
    stream = generator(3)
    a, b = (torch.randint(5, (200, 6), generator=stream) for _ in range(2))
    counts = tuple(torch.randint(1, 7, (200,), generator=stream) for _ in range(2))
    found = []
    for fill in ((4, 4), (0, 1)):
        padded = [
            torch.where(torch.arange(6) < count[:, None], table, value)
            for table, count, value in zip((a, b), counts, fill, strict=True)
        ]
        found.append(two_sample(*padded, 5, TINY, counts=counts))
    assert found[0] == found[1]
    assert two_sample(*padded, 5, LONGER).auc > 0.7
