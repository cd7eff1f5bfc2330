"""Composition in closed form, and its floor by chance."""

import math
import random

import numpy as np
import pytest

from didi_instruct.data.tokenizer import AMINO_ACIDS
from didi_instruct.errors import UserError
from didi_instruct.proteins.chains import read_chains
from didi_instruct.proteins.composition import counts, divergence, floor, jensen_shannon


def write(tmp_path, sequences, name="a.fasta"):
    path = tmp_path / name
    path.write_text("".join(f">{n}\n{s}\n" for n, s in enumerate(sequences)))
    return read_chains(str(path))


def test_counts_of_known_strings():
    assert counts("AACAX", 1)[:3].tolist() == [3, 1, 0]
    pairs = counts("AACAXAA", 2)  # AA, AC, CA, AA; not AX, XA
    assert {int(i): int(pairs[i]) for i in np.flatnonzero(pairs)} == {0: 2, 1: 1, 20: 1}
    assert counts("YYY", 3)[-1] == counts("YYY", 3).sum() == 1
    assert counts("AC", 3).sum() == 0


def test_divergence_in_closed_form():
    a, c, half = np.array([3.0, 0]), np.array([0, 5.0]), np.array([1.0, 1])
    assert jensen_shannon(a, a * 7) == 0
    assert jensen_shannon(a, c) == pytest.approx(math.log(2))
    # Laws (1, 0) and (1/2, 1/2), mean (3/4, 1/4).
    expected = (math.log(4 / 3) + 0.5 * math.log(2 / 3) + 0.5 * math.log(2)) / 2
    assert jensen_shannon(a, half) == pytest.approx(expected)
    assert jensen_shannon(half, a) == pytest.approx(expected)


def test_a_fresh_sample_is_at_the_floor_and_another_law_above(tmp_path):
    """Seeded. 8n times the divergence is nearly χ² of 19 or 399 degrees of freedom.

    The bounds are three standard deviations of it, beyond which lies 1 sample in 300.
    """
    draw = random.Random(0)
    weights = range(1, 21)
    real = write(tmp_path, ["".join(draw.choices(AMINO_ACIDS, weights, k=100)) for _ in range(400)])
    fresh = ["".join(draw.choices(AMINO_ACIDS, weights, k=100)) for _ in range(20)]
    flat = ["".join(draw.choices(AMINO_ACIDS, k=100)) for _ in range(20)]
    for k, spread in ((1, 0.97), (2, 0.21)):
        found = divergence(fresh, real, k)
        assert found.value == pytest.approx(found.floor, rel=spread)
        assert divergence(flat, real, k).value > 2 * found.floor
        assert found.ci95[0] < found.value < found.ci95[1]


def test_more_chains_have_a_lower_floor(tmp_path):
    """Of 19 free shares the divergence of n residues is about 19 / 8n."""
    draw = random.Random(1)
    real = write(tmp_path, ["".join(draw.choices(AMINO_ACIDS, k=100)) for _ in range(2000)])
    for num in (5, 20):
        assert floor([100] * num, real, 1) == pytest.approx(19 / 8 / (100 * num), rel=0.3)


def test_a_file_without_k_mers_is_refused(tmp_path):
    with pytest.raises(UserError, match="no chain of 3 residues"):
        divergence(["MKVL"], write(tmp_path, ["MK"]), 3)


def test_a_floor_compares_a_chain_with_the_others_alone(tmp_path):
    """Of two chains without a common residue, each is ln 2 from the other."""
    real = write(tmp_path, ["A" * 20, "C" * 20])
    assert floor([20], real, 1) == pytest.approx(math.log(2))
    assert floor([7], write(tmp_path, ["AC" * 50], "b.fasta"), 1) < 0.02
