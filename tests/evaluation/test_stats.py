import math

import numpy as np
import pytest

from didi_instruct.evaluation import stats
from didi_instruct.evaluation.stats import (
    Noise,
    Resampling,
    around,
    reflected,
    share_with_value,
)


def test_a_resample_is_the_samples_with_repetitions():
    """Powers of 2 sum to one number per choice, which says how often each sample was drawn."""
    size, base = 7, 8
    powers = float(base) ** np.arange(size)
    sums = np.rint(size * Resampling(resamples=50).means(powers, Noise(0, size))).astype(int)
    counts = np.array([[(total // base**k) % base for k in range(size)] for total in sums])
    assert (counts.sum(1) == size).all()
    values = np.random.default_rng(0).normal(size=size)
    expected = [np.repeat(values, row).mean() for row in counts]
    found = Resampling(resamples=50).means(values, Noise(0, size))
    assert found == pytest.approx(np.array(expected))


def test_means_of_resamples_have_the_spread_of_the_mean():
    """Their variance is s²/n; of 4,000 it is known to 2.2% (normal), so 10% is over 4 sigmas."""
    values = np.random.default_rng(1).exponential(size=500)
    found = Resampling(resamples=4000).means(values, Noise(0, 500))
    assert found.var() == pytest.approx(values.var() / 500, rel=0.1)
    assert found.mean() == pytest.approx(
        values.mean(), abs=4 * values.std() / math.sqrt(500 * 4000)
    )


def test_sets_of_one_noise_are_resampled_together_and_others_apart():
    """Correlations of 1,000 pairs: 1, and 0 within 0.13 (4 sigmas, 6e-5 false alarms each)."""
    values, resampling = np.random.default_rng(2).normal(size=60), Resampling()
    first = resampling.means(values, Noise(3, 60))
    np.testing.assert_array_equal(Resampling().means(values, Noise(3, 60)), first)
    for other in (
        resampling.means(values, Noise(4, 60)),
        Resampling(seed=1).means(values, Noise(3, 60)),
    ):
        assert abs(np.corrcoef(first, other)[0, 1]) < 0.13


def test_memory_changes_nothing_and_sizes_must_agree(monkeypatch):
    values = np.random.default_rng(3).normal(size=30)
    expected = Resampling().means(values, Noise(0, 30))
    monkeypatch.setattr(stats, "WEIGHTS_AT_ONCE", 100)
    assert Resampling().means(values, Noise(0, 30)) == pytest.approx(expected, rel=1e-12)
    with pytest.raises(ValueError, match="30 values of 31 samples"):
        Resampling().means(values, Noise(0, 31))


def test_an_interval_is_reflected_and_needs_a_value_in_nearly_all_resamples():
    """Quantiles 24.975 and 974.025 of 0 .. 999; a value of 900, in their upper part, says low."""
    values = np.arange(1000.0)
    assert reflected(900.0, values) == pytest.approx([1800 - 974.025, 1800 - 24.975])
    values[:50] = np.nan
    ends = np.quantile(values[50:], [0.975, 0.025])
    assert reflected(900.0, values) == pytest.approx(1800 - ends)
    values[50] = np.inf
    assert reflected(900.0, values) is None
    assert share_with_value(values) == 0.949
    assert reflected(900.0, np.array([])) is None


def test_a_normal_interval():
    assert around(2.0, 0.5) == pytest.approx([1.02, 2.98])
    assert around(2.0, math.inf) is around(math.nan, 0.5) is None
