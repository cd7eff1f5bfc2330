"""Intervals and paired comparisons against scipy's."""

import numpy as np
import pytest
from scipy.stats import binomtest

from didi_instruct.tasks.statistics import against_chance, compare, compare_all, mcnemar, wilson


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
    assert row["difference"] == 0.5
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
    assert row["mcnemar_p"] == pytest.approx(1 / 16)
    assert said.startswith("No difference")


def test_baselines_are_not_compared_with_each_other():
    right = {name: np.zeros(3) for name in ("one", "noise", "other")}
    rows, _ = compare_all(right, baselines=["noise", "other"])
    assert [row["models"] for row in rows] == [["one", "noise"], ["one", "other"]]


def test_guessing_is_named():
    assert against_chance("one", [0.2, 0.3], 0.25)
    assert against_chance("one", [0.26, 0.3], 0.25) is None
