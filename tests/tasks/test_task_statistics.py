"""Intervals and paired comparisons against scipy's; accuracy and F1 by hand."""

import math

import numpy as np
import pytest
from scipy import stats
from scipy.stats import binomtest

from didi_instruct.tasks.statistics import (
    MOST_SEEDS,
    against_chance,
    compare,
    compare_all,
    f1,
    mcnemar,
    measure,
    over_seeds,
    wilson,
)


@pytest.mark.parametrize(("correct", "num"), [(0, 7), (3, 10), (100, 400), (5, 5)])
def test_wilsons_interval(correct, num):
    expected = binomtest(correct, num).proportion_ci(method="wilson")
    assert wilson(correct, num) == pytest.approx([expected.low, expected.high], abs=1e-9)


@pytest.mark.parametrize(("first", "second"), [(0, 0), (1, 9), (5, 5), (300, 240), (900, 1200)])
def test_mcnemars_test_is_the_binomial_one(first, second):
    total = first + second
    expected = binomtest(first, total).pvalue if total else 1.0
    assert mcnemar(first, second) == pytest.approx(expected, abs=1e-9)


def test_both_by_hand():
    """Of 10 questions that one model alone gets right 9 to 1: p = 2 (1 + 10) / 2^10."""
    assert mcnemar(9, 1) == mcnemar(1, 9) == pytest.approx(22 / 1024)
    assert mcnemar(3, 3) == mcnemar(0, 0) == 1.0
    ends = wilson(8, 10)  # where |p - 0.8| is 1.96 standard errors of p itself
    for p in ends:
        assert (0.8 - p) ** 2 == pytest.approx(1.959963984540054**2 * p * (1 - p) / 10)
    assert ends[0] < 0.8 < ends[1]


def test_a_difference_within_its_interval_is_none():
    """12 discordant questions of 100: the paired interval has the binomial's spread."""
    a, b = np.zeros(100), np.zeros(100)
    a[:50], b[:44], b[60:66] = 1, 1, 1
    row, said = compare("one", a, "two", b)
    assert row["difference"] == 0
    assert row["mcnemar_p"] == 1
    low, high = row["difference_ci95"]
    assert (low, high) == pytest.approx((-0.068, 0.068), abs=0.006)
    assert said.startswith("No difference in accuracy between one and two")
    row, said = compare("one", b, "two", np.zeros(100))
    assert (row["difference"], row["better"]) == (0.5, "one")
    assert compare("two", np.zeros(100), "one", b)[0]["better"] == "one"
    assert said.startswith("one is more accurate than two (+50.0 points")
    assert compare("two", np.zeros(100), "one", b)[1] == said
    rows, sentences = compare_all({"one": a, "two": b, "three": a})
    assert [row["models"] for row in rows] == [["one", "two"], ["one", "three"], ["two", "three"]]
    assert len(sentences) == 3


def test_a_difference_needs_both_its_interval_and_its_test():
    """5 questions of 1,000 that one model alone gets right: p is 1/16, the interval above 0."""
    a, b = np.zeros(1000), np.zeros(1000)
    a[:5] = 1
    row, said = compare("one", a, "two", b)
    assert row["difference_ci95"][0] > 0
    assert row["better"] is None
    assert row["mcnemar_p"] == pytest.approx(1 / 16)
    assert said.startswith("No difference")


def test_baselines_are_not_compared_with_each_other():
    right = {name: np.zeros(3) for name in ("one", "noise", "other")}
    rows, _ = compare_all(right, baselines=["noise", "other"])
    assert [row["models"] for row in rows] == [["one", "noise"], ["one", "other"]]


def test_guessing_is_named():
    intervals = {"one": [0.2, 0.3], "two": [0.26, 0.3], "three": [0.1, 0.25]}
    rows = [{"model": name, "accuracy_ci95": ends} for name, ends in intervals.items()]
    [said] = against_chance(rows, 0.25)
    assert said == "Not told from guessing, since 25.0% lies in their intervals: one; three."
    [said] = against_chance(rows[:1], 0.25)
    assert said.endswith("lies in its interval: one.")
    assert against_chance(rows[1:2], 0.25) == []


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
