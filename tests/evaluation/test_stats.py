import math

import numpy as np
import pytest

from didi_instruct.evaluation import stats
from didi_instruct.evaluation.stats import (
    Noise,
    Resampling,
    aligned,
    around,
    bootstrap,
    mean_and_error,
    reflected,
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
    interval = bootstrap(values, seed=3)
    monkeypatch.setattr(stats, "HELD_AT_ONCE", 100)
    assert Resampling().means(values, Noise(0, 30)) == pytest.approx(expected, rel=1e-12)
    assert bootstrap(values, seed=3) == interval != bootstrap(values, seed=4)
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
    assert reflected(900.0, np.array([])) is None


def test_a_mean_its_error_and_its_normal_interval():
    """Deviations 1, 1 and -2 from 5: variance 3, so the error is √(3/3)."""
    assert mean_and_error([6.0, 6.0, 3.0]) == pytest.approx((5.0, 1.0))
    assert mean_and_error([6.0]) == (6.0, math.inf)
    assert around(2.0, 0.5) == pytest.approx([1.02, 2.98])
    assert around(2.0, math.inf) is around(math.nan, 0.5) is None


def test_columns_that_some_lack_are_left_out():
    found = aligned(np.arange(6.0).reshape(2, 3), np.full((2, 2), 7.0))
    np.testing.assert_array_equal(found, [[[0, 1], [3, 4]], [[7, 7], [7, 7]]])


def test_the_bootstrap_interval_covers_the_mean():
    """1,200 normal data sets of 100 values.

    The percentile interval of the mean is nearly mean ± 1.96 s/√n, s the root mean square
    deviation, which covers with the probability that |t| < 1.95 at 99 degrees of freedom, 94.6%;
    0.2% less because its ends are quantiles of 1,000 draws. Tolerance 4 standard errors (0.027),
    a false-alarm rate of 6e-5 over seeds.
    """
    data = np.random.default_rng(0).normal(3.0, 2.0, size=(1200, 100))
    intervals = np.array([bootstrap(x, seed=i) for i, x in enumerate(data)])
    covered = (intervals[:, 0] < 3) & (intervals[:, 1] > 3)
    assert covered.mean() == pytest.approx(0.944, abs=0.027)


def test_the_bootstrap_takes_any_statistic():
    """A ratio of sums: values spread by 0.2, weighted by lengths.

    Their standard error is 0.2/√400 · √(1 + cv²), or 0.0104.
    """
    generator = np.random.default_rng(0)
    tokens = generator.integers(50, 150, size=400)
    nats = tokens * generator.normal(3.0, 0.2, size=400)
    table = np.stack([nats, tokens], 1)
    low, high = bootstrap(table, statistic=lambda t: t[..., 0].sum(1) / t[..., 1].sum(1))
    assert low < nats.sum() / tokens.sum() < high
    assert (high - low) / 2 / 1.96 == pytest.approx(0.0104, rel=0.25)
