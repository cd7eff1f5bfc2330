"""A best setting by vsF: half of the samples choose it, the other half tell how good it is."""

import math

import numpy as np
import pytest

from didi_instruct.evaluation.compare import best_by_vsf, compare

from .test_comparison import measured


def line(entropy):
    """Nats per token of the baseline at an entropy."""
    return entropy - 3.0


def flat(nats_even, nats_odd, entropy, **settings):
    """A row of 20 samples whose even and odd ones differ."""
    nats = np.where(np.arange(20) % 2, nats_odd, nats_even)
    return measured(nats=nats, entropy=np.full(20, entropy), **settings)


BASELINE = [
    flat(line(5.0), line(5.0), 5.0),
    flat(line(4.0), line(4.0), 4.0, temperature=0.5),
]


def test_one_half_chooses_and_the_other_tells():
    """The even samples prefer 0.8, by 0.3 nats to 0.1; the odd ones say that it loses 0.2."""
    rows = [
        flat(line(4.8) - 0.1, line(4.8) - 0.4, 4.8),
        flat(line(4.6) - 0.3, line(4.6) + 0.2, 4.6, temperature=0.8),
        flat(line(4.6) - 0.5, line(4.6) - 0.5, 4.6, temperature=0.8, sampler="other"),
    ]
    found = best_by_vsf(rows, BASELINE)
    assert [row["vsf_best"] for row in found] == pytest.approx(
        [math.exp(0.2), math.exp(0.2), math.exp(-0.5)]
    )
    assert [row["vsf_best_at"] for row in found] == [[0.8, 1.0]] * 3
    low, high = found[0]["vsf_best_ci95"]
    assert (low, high) == pytest.approx((math.exp(0.2), math.exp(0.2))), "no spread in a half"


def test_where_nothing_can_be_compared_nothing_is_chosen():
    beyond = flat(2.0, 2.0, 6.0)
    (row,) = best_by_vsf([beyond], BASELINE)
    assert (row["vsf_best"], row["vsf_best_ci95"]) == (None, None)
    assert "no setting has a vsF" in row["vsf_best_note"]
    alone = measured(gaps=np.arange(20.0))
    assert best_by_vsf([alone], BASELINE)[0]["vsf_best"] is None
    one = measured(nats=np.array([1.0]), entropy=np.array([4.5]))
    assert best_by_vsf([one], BASELINE)[0]["vsf_best"] is None


def test_a_best_setting_that_gains_nothing_has_no_gain():
    """80 samplers of 6 settings on the baseline's own line: the mean of log vsF is 0.

    With noise of 0.3 nats and 20 samples in a half, a mean of 80 has a standard error of
    0.3 / sqrt(20 · 80) = 0.0075: 0.03 is 4 sigmas, a false-alarm rate of 6e-5. Chosen and told on
    all samples the lowest of 6 lies 1.27 of 0.3 / sqrt(40), or 0.06, below.
    """
    honest, lucky = [], []
    for seed in range(80):
        generator = np.random.default_rng(seed)
        rows = [
            measured(
                nats=generator.normal(line(4.5), 0.3, 40),
                entropy=np.full(40, 4.5),
                temperature=1 - n / 20,
            )
            for n in range(6)
        ]
        honest.append(math.log(best_by_vsf(rows, BASELINE, seed)[0]["vsf_best"]))
        if seed < 20:
            lucky.append(math.log(min(row["vsf"] for row in compare(rows, BASELINE))))
    assert abs(np.mean(honest)) < 0.03
    assert np.mean(lucky) < -0.04
