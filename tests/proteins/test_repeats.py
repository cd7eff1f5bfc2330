"""Closed forms of what tells repeats."""

import math
import random

import pytest

from didi_instruct.data.tokenizer import AMINO_ACIDS
from didi_instruct.proteins.repeats import (
    commonest_share,
    is_low_complexity,
    longest_run,
    repeats,
    trimer_entropy,
)


@pytest.mark.parametrize(
    ("sequence", "share", "run"),
    [("AAAA", 1, 4), ("ACDE", 0.25, 1), ("AACCCA", 0.5, 3), ("ACCA", 0.5, 2), ("", 0, 0)],
)
def test_commonest_residue_and_longest_run(sequence, share, run):
    assert commonest_share(sequence) == share
    assert longest_run(sequence) == run


def test_entropy_of_3_mers():
    assert str(trimer_entropy("AAAAAA")) == str(trimer_entropy("MKV")) == "0.0"  # never -0.0
    assert trimer_entropy("AC") == 0
    assert trimer_entropy("ACDEF") == pytest.approx(math.log(3))  # ACD, CDE, DEF
    assert trimer_entropy("AAAAC") == pytest.approx(-2 / 3 * math.log(2 / 3) + math.log(3) / 3)
    period = 7  # 700 3-mers of 7 kinds
    assert trimer_entropy(("LAGVSER" * 101)[:702]) == pytest.approx(math.log(period))


def test_random_chains_are_not_of_low_complexity_and_noisy_repeats_are():
    """Seeded. A random chain of 200 has 198 3-mers of 8,000: 0.997 of the highest entropy."""
    draw = random.Random(0)
    usual = ["".join(draw.choices(AMINO_ACIDS, k=200)) for _ in range(100)]
    assert not any(map(is_low_complexity, usual))
    noisy = "".join(draw.choice(AMINO_ACIDS) if draw.random() < 0.2 else c for c in "LAGVSER" * 28)
    assert all(map(is_low_complexity, [noisy, "A" * 30, "AC" * 20]))
    assert not is_low_complexity("MKV")  # too short to tell


def test_all_measures_are_in_the_order_of_the_chains():
    found = repeats(["AAAAAAAA", "ACDEFGHI"])
    assert found.commonest.tolist() == [1, 0.125]
    assert found.longest_run.tolist() == [8, 1]
    assert found.trimer_entropy == pytest.approx([0, math.log(6)])
    assert found.low_complexity.tolist() == [1, 0]
