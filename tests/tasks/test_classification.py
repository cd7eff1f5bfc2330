import math

import numpy as np
import pytest
from scipy import stats

from didi_instruct.tasks.classification import MOST_SEEDS, f1, measure, over_seeds


def test_f1_by_hand():
    """3 found, 1 missed, 2 false alarms: precision 3/5, recall 3/4, their harmonic mean 2/3."""
    assert f1(3, 1, 2) == pytest.approx(2 / (5 / 3 + 4 / 3))
    assert f1(0, 4, 0) == 0.0
    assert f1(0, 0, 0) == 0.0


def test_always_paraphrase_on_glue_s_validation_split():
    """279 of 408 pairs: accuracy 68.4%, F1 558/687 = 81.2%."""
    labels = np.arange(408) < 279
    found = measure(np.ones((2, 408)), labels)
    assert found.accuracy == pytest.approx(0.6838, abs=5e-5)
    assert found.f1 == pytest.approx(0.8122, abs=5e-5)
    assert found.f1_seeds == [558 / 687] * 2


@pytest.mark.parametrize("count", [2, 5, 12, MOST_SEEDS])
def test_the_interval_over_seeds_is_student_s(count):
    values = (0.5 + 0.01 * np.random.default_rng(count).normal(size=count)).tolist()
    expected = stats.t.interval(0.95, count - 1, np.mean(values), stats.sem(values))
    assert over_seeds(values) == pytest.approx(expected, rel=1e-5)


def test_the_interval_over_seeds_is_one_of_shares():
    assert over_seeds([0.7]) is None
    assert over_seeds([0.2, 0.9]) == [0.0, 1.0]


def test_measures_by_hand():
    """Two seeds on four pairs; the second takes the last one for a paraphrase."""
    labels = np.array([True, True, False, False])
    probs = np.array([[0.9, 0.4, 0.2, 0.1], [0.9, 0.4, 0.2, 0.6]])
    found = measure(probs, labels)
    assert found.accuracy_seeds == [0.75, 0.5]
    assert found.accuracy == 0.625
    assert found.f1_seeds == [2 / 3, 0.5]
    right = [[0.9, 0.4, 0.8, 0.9], [0.9, 0.4, 0.8, 0.4]]
    assert found.nll == pytest.approx(-np.log(right).mean())


def test_intervals_over_pairs_have_the_spread_of_a_mean():
    """Of 4,000 right or wrong answers: 1.96 √(p(1-p)/n) to 10%, which 1,000 resamples give."""
    labels = np.ones(4000, bool)
    probs = np.where(np.arange(4000) % 4, 0.8, 0.3)[None]
    low, high = measure(probs, labels).accuracy_ci95
    assert high - low == pytest.approx(2 * 1.96 * math.sqrt(0.75 * 0.25 / 4000), rel=0.1)
    assert low < 0.75 < high


def test_a_certain_error_costs_a_finite_number_of_nats():
    assert math.isfinite(measure(np.array([[0.0]]), np.array([True])).nll)
