"""The shuffled order is one: every place once, and no place favoured."""

import numpy as np
import pytest
from scipy import stats

from didi_instruct.data.dataset import permute

SIZES = [1, 2, 3, 4, 5, 7, 64, 65, 1000, 4097]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("key", ["0:0", "0:1", "12345:7"])
def test_every_position_is_hit_once(size: int, key: str) -> None:
    image = permute(np.arange(size), size, key)
    assert sorted(image.tolist()) == list(range(size))


@pytest.mark.parametrize("size", [7, 64, 1000])
def test_keys_give_different_orders(size: int) -> None:
    orders = {tuple(permute(np.arange(size), size, f"{s}:{e}")) for s in range(5) for e in range(4)}
    assert len(orders) == 20
    assert tuple(range(size)) not in orders


def test_a_position_is_mapped_alone_as_among_others() -> None:
    whole = permute(np.arange(1000), 1000, "k")
    some = np.array([999, 3, 3, 500])
    assert permute(some, 1000, "k").tolist() == whole[some].tolist()
    assert permute(np.array([], np.int64), 1000, "k").tolist() == []


def test_huge_sizes_need_no_memory() -> None:
    size = 3 * 10**15
    image = permute(np.arange(10_000), size, "k")
    assert len(set(image.tolist())) == 10_000
    assert image.min() >= 0
    assert image.max() < size


def test_every_image_is_equally_likely() -> None:
    """Over 2,800 keys, where each of 7 goes is uniform: 7 tests, false-alarm rate 1e-5 each."""
    images = np.stack([permute(np.arange(7), 7, f"0:{epoch}") for epoch in range(2800)])
    for position in range(7):
        counts = np.bincount(images[:, position], minlength=7)
        assert stats.chisquare(counts).pvalue > 1e-5


def test_neighbours_do_not_stay_together() -> None:
    """The distance of two neighbours is as in a random order: n/3 on average.

    Its standard error over 20,000 pairs is about 0.002 n; the bound is five of them.
    """
    size = 20_000
    image = permute(np.arange(size), size, "k")
    assert abs(np.abs(np.diff(image)).mean() / size - 1 / 3) < 0.01
