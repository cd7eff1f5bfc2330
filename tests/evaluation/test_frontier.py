"""The frontier against closed forms; every resample against itself alone."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from didi_instruct.errors import UserError
from didi_instruct.evaluation.frontier import (
    Point,
    Setting,
    curves,
    equal_passes,
    log_vsf,
    sweep,
    why_not,
)


def point(perplexity, entropy, *, nfe=8, passes=None, temperature=1.0, top_p=1.0):
    return Point(perplexity, entropy, nfe, nfe if passes is None else passes, temperature, top_p)


def line(offset, slope, entropies, vary="temperature"):
    """A sweep whose log-perplexity is offset + slope * entropy, entropy rising with the setting."""
    return [
        point(math.exp(offset + slope * h), h, **{vary: 0.5 + 0.1 * k})
        for k, h in enumerate(entropies)
    ]


def frontier(baseline, entropy):
    """Perplexity of the frontier, NaN where no curve reaches."""
    return math.exp(-log_vsf(point(1.0, entropy), baseline)[0])


TEACHER = [
    point(428, 4.942),
    point(260, 4.90, temperature=0.9),
    point(150, 4.80, temperature=0.8),
    point(240, 4.88, top_p=0.95),
    point(110, 4.70, top_p=0.9),
]


@pytest.mark.parametrize("entropy", [4.05, 4.2, 4.25, 4.3, 4.41, 4.45])
def test_the_frontier_is_the_lower_of_two_crossing_sweeps(entropy):
    """Each is interpolated exactly; knots at different entropies; they cross at 4.3."""
    steep = line(-10 - 0.8 * 4.3, 4.3, [4.0, 4.2, 4.5])
    flat = line(-10, 3.5, [4.05, 4.3, 4.45], vary="top_p")
    assert frontier(steep, entropy) == pytest.approx(math.exp(-13.44 + 4.3 * entropy), rel=1e-12)
    lower = min(-13.44 + 4.3 * entropy, -10 + 3.5 * entropy)
    assert frontier([*steep, *flat], entropy) == pytest.approx(math.exp(lower), rel=1e-12)


def test_sweeps_of_two_settings_or_budgets_are_not_joined():
    """A line from the lowest temperature to the lowest top-p would pass under both curves.

    A quarter of the way from 100 to 400 is their weighted geometric mean, where a line through
    perplexities would say 175.
    """
    cold, nucleus, plain = (
        point(100, 4.0, temperature=0.5), point(120, 4.2, top_p=0.5), point(400, 4.4)
    )  # fmt: skip
    assert frontier([cold, nucleus, plain], 4.2) == pytest.approx(120)
    assert frontier([cold, nucleus, plain], 4.1) == pytest.approx(100**0.75 * 400**0.25)
    assert frontier([cold, plain], 4.2) == pytest.approx(math.sqrt(100 * 400))
    assert math.isnan(frontier([cold, replace(plain, nfe=16)], 4.2))


def test_a_grid_of_both_settings_is_swept_along_each():
    """At top-p 0.9 the temperatures are a curve, at temperature 0.8 the top-p are another."""
    corner = point(90, 4.0, temperature=0.8, top_p=0.9)
    nucleus, cold = point(200, 4.4, top_p=0.9), point(300, 4.2, temperature=0.8)
    grid = [corner, nucleus, cold, point(500, 4.6)]
    assert [c for c in curves(grid) if corner in c] == [[corner, nucleus], [corner, cold]]
    assert frontier(grid, 4.2) == pytest.approx(math.sqrt(90 * 200))
    assert frontier([corner, cold], 4.1) == pytest.approx(math.sqrt(90 * 300))


def test_neighbours_are_those_of_the_sweep_not_of_the_entropy():
    """Noise bends the curve back: at 4.25 it passes three times, and the lowest passage counts."""
    baseline = [
        point(100, 4.0, temperature=0.7), point(300, 4.4, temperature=0.8),
        point(200, 4.1, temperature=0.9), point(900, 4.5),
    ]  # fmt: skip
    passages = [
        math.log(100) + (0.25 / 0.4) * math.log(3),
        math.log(200) + (0.15 / 0.3) * math.log(1.5),
        math.log(200) + (0.15 / 0.4) * math.log(4.5),
    ]
    assert frontier(baseline, 4.25) == pytest.approx(math.exp(min(passages)))


def test_a_curve_that_falls_with_its_setting_reaches_between_its_ends():
    """Entropy may fall where the temperature rises; a line has no direction."""
    baseline = [point(400, 4.4, temperature=0.8), point(100, 4.0, temperature=0.9)]
    assert frontier(baseline, 4.1) == pytest.approx(100**0.75 * 400**0.25)


def test_the_frontier_lies_on_its_own_points_and_ties_take_the_lower():
    ratios = [log_vsf(setting, TEACHER)[0] for setting in TEACHER]
    assert min(ratios) == ratios[0] == ratios[-1] == 0
    twins = [point(100, 4.0, temperature=0.8), point(80, 4.0, temperature=0.9)]
    assert frontier(twins, 4.0) == pytest.approx(80)
    for off in (-1e-9, 1e-9):
        assert math.isnan(frontier(twins, 4.0 + off))


def test_the_ratio_follows_changes_of_scale():
    """A unit of entropy or of perplexity changes nothing; only the order of settings matters."""
    student = point(200, 4.83)

    def everywhere(change):
        return log_vsf(change(student), [change(p) for p in TEACHER])[0]

    ratio = everywhere(lambda p: p)
    bits = everywhere(lambda p: replace(p, entropy=p.entropy / math.log(2) - 1))
    scaled = everywhere(lambda p: replace(p, perplexity=3 * p.perplexity))
    power = everywhere(lambda p: replace(p, perplexity=p.perplexity**0.5))
    warped = everywhere(lambda p: replace(p, temperature=p.temperature**5, top_p=p.top_p**3))
    assert [bits, scaled, warped, 2 * power] == pytest.approx([ratio] * 4)


points = st.builds(
    point,
    st.floats(2, 500),
    st.sampled_from([4.0, 4.25, 4.5, 5.0]),
    nfe=st.sampled_from([8, 16]),
    temperature=st.sampled_from([0.7, 0.8, 0.9, 1.0]),
    top_p=st.sampled_from([0.9, 1.0]),
)


sweeps = st.lists(points, max_size=8, unique_by=lambda p: (p.nfe, p.temperature, p.top_p))


@settings(deadline=None, derandomize=True, database=None, max_examples=80)
@given(points, sweeps, st.integers(0, 2**32), st.randoms())
def test_every_column_is_what_it_is_alone_in_whatever_order(own, baseline, seed, random):
    """The frontier is made anew in every resample, also where one leaves its curves or bends one.

    Without resamples of one point the data alone are compared.
    """
    generator = np.random.default_rng(seed)

    def resampled(p):
        noise = np.round(generator.normal(size=(2, 6)), 1)  # coarse, so that some coincide
        return replace(p, resamples=np.array([[p.entropy], [math.log(p.perplexity)]]) + noise / 4)

    def alone(p, k):
        entropy, log_perplexity = p.columns[:, k]
        return replace(p, entropy=entropy, perplexity=math.exp(log_perplexity), resamples=None)

    noisy, *others = (resampled(p) for p in (own, *baseline))
    found = log_vsf(noisy, others)
    expected = [log_vsf(alone(noisy, k), [alone(p, k) for p in others])[0] for k in range(7)]
    np.testing.assert_allclose(found, expected[: len(found)], rtol=0, atol=1e-12)
    assert len(found) == (7 if others else 1)
    random.shuffle(others)
    np.testing.assert_allclose(log_vsf(noisy, others), found, rtol=0, atol=1e-12)
    if others:
        np.testing.assert_array_equal(log_vsf(own, others), found[:1])


@settings(deadline=None, derandomize=True, database=None, max_examples=80)
@given(sweeps.filter(len), sweeps, st.sampled_from([4.0, 4.1, 4.25, 4.7]))
def test_a_further_budget_never_raises_the_frontier(some, more, entropy):
    """Settings of other budgets are curves of their own: none is bent, so the lowest can only fall.

    What an entropy that no curve reaches is told is why.
    """
    before = frontier(some, entropy)
    after = frontier([*some, *(replace(p, nfe=32) for p in more)], entropy)
    assert math.isnan(before) or after <= before * (1 + 1e-12)
    if math.isnan(before):
        assert f"entropy {entropy:g} " in why_not(entropy, some)


def test_outside_of_the_curves_there_is_a_reason():
    apart = line(0, 1, [4.0, 4.2]) + [replace(p, nfe=16) for p in line(0, 1, [4.5, 4.9])]
    reach = "(4 to 4.2 and 4.5 to 4.9)"
    assert why_not(3.9, apart) == f"entropy 3.9 is below all that the baseline reaches {reach}"
    assert why_not(4.95, apart) == f"entropy 4.95 is above all that the baseline reaches {reach}"
    gap = f"entropy 4.3 lies in a gap between the baseline's curves {reach}"
    assert why_not(4.3, apart) == gap
    assert why_not(4.3, []) == "the baseline has no point to compare with"
    assert "(4.7 to 4.942)" in why_not(4.6, TEACHER)


def test_the_largest_budget_that_is_not_dearer():
    points = [
        point(p, 4.9, nfe=n, passes=c, temperature=t)
        for p, n, c, t in [
            (400, 8, 7.01, 1.0), (300, 8, 7.02, 0.9), (200, 16, 15.0, 1.0), (150, 32, 31.0, 1.0)
        ]
    ]  # fmt: skip
    assert equal_passes(points, 24.0) == [points[2]]
    assert equal_passes(points, 31.0) == [points[3]]
    assert equal_passes(points, 30.7) == equal_passes(points, 1000.0) == [points[3]]
    assert equal_passes(points, 30.6) == [points[2]], "1% is nearly equal, more is not"
    assert equal_passes(points, 6.0) == []
    for nearly in (6.95, 7.015, 7.2):
        assert equal_passes(points, nearly) == points[:2], "coins and batches make no other budget"


def test_a_sweep_lists_two_curves_that_meet():
    assert sweep([0.8, 1, 0.9, 0.8], [0.95, 1.0]) == [
        Setting(1.0, 1.0), Setting(0.8, 1.0), Setting(0.9, 1.0), Setting(1.0, 0.95),
    ]  # fmt: skip
    assert sweep([], []) == [(1.0, 1.0)]
    for temperature in (0.0, math.nan, math.inf):
        with pytest.raises(UserError, match="temperature is .*: use more than 0"):
            sweep([temperature], [])
    for top_p in (0.0, 1.1, math.nan):
        with pytest.raises(UserError, match="top_p is .*: it is a share"):
            sweep([], [top_p])
