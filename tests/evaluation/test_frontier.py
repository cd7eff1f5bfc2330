import math
from dataclasses import replace

import numpy as np
import pytest

from didi_instruct.errors import UserError
from didi_instruct.evaluation.compare import (
    Point,
    Setting,
    Vsf,
    curves,
    equal_nfe,
    equal_passes,
    log_vsf_resampled,
    sweep,
    vsf,
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
    """Perplexity of the frontier, from the ratio that a perplexity of 1 has to it."""
    ratio = vsf(point(1.0, entropy), baseline).value
    return None if ratio is None else 1 / ratio


TEACHER = [
    point(428, 4.942),
    point(260, 4.90, temperature=0.9),
    point(150, 4.80, temperature=0.8),
    point(240, 4.88, top_p=0.95),
    point(110, 4.70, top_p=0.9),
]


@pytest.mark.parametrize("entropy", [4.0, 4.03, 4.2, 4.41, 4.5])
def test_a_log_linear_sweep_is_interpolated_exactly(entropy):
    baseline = line(-10, 3.5, [4.0, 4.2, 4.3, 4.5])
    expected = math.exp(-10 + 3.5 * entropy)
    assert frontier(baseline, entropy) == pytest.approx(expected, rel=1e-12)
    result = vsf(point(0.7 * expected, entropy), baseline)
    assert result.value == pytest.approx(0.7, rel=1e-12)
    assert result.reason == ""


def test_between_two_settings_the_perplexity_is_their_weighted_geometric_mean():
    """A quarter of the way from 100 to 400, where a line through perplexities would say 175."""
    baseline = [point(100, 4.0, temperature=0.8), point(400, 4.4)]
    assert frontier(baseline, 4.1) == pytest.approx(100**0.75 * 400**0.25)


@pytest.mark.parametrize("entropy", [4.05, 4.25, 4.3, 4.35, 4.45])
def test_the_frontier_is_the_lower_of_two_crossing_sweeps(entropy):
    """Different settings, knots at different entropies; they cross at 4.3."""
    steep = line(-10 - 0.8 * 4.3, 4.3, [4.0, 4.2, 4.5])
    flat = line(-10, 3.5, [4.05, 4.3, 4.45], vary="top_p")
    lower = min(-13.44 + 4.3 * entropy, -10 + 3.5 * entropy)
    assert frontier([*steep, *flat], entropy) == pytest.approx(math.exp(lower))
    assert frontier([*flat[::-1], *steep[::-1]], entropy) == pytest.approx(math.exp(lower))


def test_sweeps_of_two_settings_or_budgets_are_not_joined():
    """A line from the lowest temperature to the lowest top-p would pass under both curves."""
    cold, nucleus, plain = (
        point(100, 4.0, temperature=0.5), point(120, 4.2, top_p=0.5), point(400, 4.4)
    )  # fmt: skip
    through_plain = 100**0.5 * 400**0.5
    assert frontier([cold, nucleus, plain], 4.2) == pytest.approx(120)
    assert frontier([cold, nucleus, plain], 4.1) == pytest.approx(100**0.75 * 400**0.25)
    assert frontier([cold, plain], 4.2) == pytest.approx(through_plain)
    assert frontier([cold, replace(plain, nfe=16)], 4.2) is None


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


def test_the_frontier_lies_on_its_own_points_and_ties_take_the_lower():
    for setting in TEACHER:
        ratio = vsf(setting, TEACHER).value
        assert ratio is not None
        assert ratio >= 1
    assert vsf(TEACHER[0], TEACHER).value == 1
    assert vsf(TEACHER[-1], TEACHER).value == 1
    assert vsf(point(100, 4.3), TEACHER).value is None
    twins = [point(100, 4.0, temperature=0.8), point(80, 4.0, temperature=0.9), point(90, 4.0)]
    assert frontier(twins, 4.0) == pytest.approx(80)
    assert frontier([*TEACHER, *TEACHER], 4.85) == frontier(TEACHER, 4.85)


def test_a_single_setting_compares_at_its_own_entropy_alone():
    only = [point(100, 4.5)]
    assert vsf(point(80, 4.5), only).value == pytest.approx(0.8)
    assert vsf(point(80, 4.5 + 1e-9), only).value is None
    assert vsf(point(80, 4.5 - 1e-9), only).value is None


def test_the_ratio_follows_changes_of_scale():
    """A unit of entropy or of perplexity changes nothing; only the order of settings matters."""
    student = point(200, 4.83)
    ratio = vsf(student, TEACHER).value
    assert ratio is not None

    def everywhere(change):
        return vsf(change(student), [change(p) for p in TEACHER]).value

    bits = everywhere(lambda p: replace(p, entropy=p.entropy / math.log(2) - 1))
    scaled = everywhere(lambda p: replace(p, perplexity=3 * p.perplexity))
    power = everywhere(lambda p: replace(p, perplexity=p.perplexity**0.5))
    warped = everywhere(lambda p: replace(p, temperature=p.temperature**5, top_p=p.top_p**3))
    assert [bits, scaled, warped] == pytest.approx([ratio] * 3)
    assert power == pytest.approx(ratio**0.5)


@pytest.mark.parametrize("entropy", [4.80, 4.85, 4.90, 4.94])
def test_a_second_sweep_never_raises_the_frontier(entropy):
    temperatures = frontier([p for p in TEACHER if p.top_p == 1], entropy)
    both = frontier(TEACHER, entropy)
    assert temperatures is not None
    assert both is not None
    assert both <= temperatures


@pytest.mark.parametrize(
    ("entropy", "words"),
    [
        (4.6, "below all that the baseline reaches (4.7 to 4.942)"),
        (4.95, "above all that the baseline reaches (4.7 to 4.942)"),
    ],
)
def test_outside_the_sweeps_there_is_no_value_but_a_reason(entropy, words):
    result = vsf(point(100, entropy), TEACHER)
    assert result.value is None
    assert words in result.reason


def test_gaps_empty_baselines_and_numbers_that_are_none_say_so():
    apart = line(0, 1, [4.0, 4.2]) + [replace(p, nfe=16) for p in line(0, 1, [4.5, 4.9])]
    assert vsf(point(9, 4.3), apart) == Vsf(
        None, "entropy 4.3 lies in a gap between the baseline's curves (4 to 4.2 and 4.5 to 4.9)"
    )
    assert vsf(point(9, 4.3), []).reason == "the baseline has no point to compare with"
    for bad in (point(math.nan, 4.3), point(math.inf, 4.3), point(9, math.nan), point(0, 4.3)):
        result = vsf(bad, TEACHER)
        assert result.value is None
        assert "nothing to compare" in result.reason


def test_a_setting_without_a_number_interrupts_its_curve():
    baseline = line(0, 1, [4.0, 4.2, 4.4, 4.6])
    baseline[1] = replace(baseline[1], perplexity=math.inf)
    assert frontier(baseline, 4.0) == pytest.approx(math.exp(4.0))
    assert frontier(baseline, 4.3) is None
    assert frontier(baseline, 4.5) == pytest.approx(math.exp(4.5))


def test_the_sets_to_compare_with():
    points = [
        point(p, 4.9, nfe=n, passes=c, temperature=t)
        for p, n, c, t in [
            (400, 8, 7.01, 1.0), (300, 8, 7.02, 0.9), (200, 16, 15.0, 1.0), (150, 32, 31.0, 1.0)
        ]
    ]  # fmt: skip
    assert equal_nfe(points, 8) == points[:2]
    assert equal_nfe(points, 9) == []
    assert equal_passes(points, 24.0) == [points[2]]
    assert equal_passes(points, 31.0) == [points[3]]
    assert equal_passes(points, 1000.0) == [points[3]]
    assert equal_passes(points, 6.0) == []
    for nearly in (6.95, 7.015, 7.2):
        assert equal_passes(points, nearly) == points[:2], "coins and batches make no other budget"


def test_a_sweep_lists_two_curves_that_meet():
    assert sweep([0.8, 1, 0.9, 0.8], [0.95, 1.0]) == [
        Setting(1.0, 1.0), Setting(0.8, 1.0), Setting(0.9, 1.0), Setting(1.0, 0.95),
    ]  # fmt: skip
    assert sweep([], []) == [(1.0, 1.0)]
    for temperature in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(UserError, match="temperature is .*: use more than 0"):
            sweep([temperature], [])
    for top_p in (0.0, 1.1, math.nan):
        with pytest.raises(UserError, match="top_p is .*: it is a share"):
            sweep([], [top_p])


def test_the_frontier_is_made_anew_in_every_resample():
    """Each resample gives what it gives alone, also where it leaves the curves or bends one."""
    generator = np.random.default_rng(0)

    def cloud(p):
        entropy = p.entropy + 0.05 * generator.normal(size=300)
        return np.stack([entropy, math.log(p.perplexity) + 0.2 * generator.normal(size=300)])

    *baseline, student = (replace(p, cloud=cloud(p)) for p in (*TEACHER, point(200, 4.9)))
    found = log_vsf_resampled(student, baseline)

    def alone(p, k):
        return replace(p, entropy=p.cloud[0, k], perplexity=math.exp(p.cloud[1, k]))

    for k, value in enumerate(found):
        expected = vsf(alone(student, k), [alone(p, k) for p in baseline]).value
        assert math.exp(value) == pytest.approx(expected or math.nan, nan_ok=True)
    assert 0 < np.isnan(found).mean() < 0.5
    assert log_vsf_resampled(student, TEACHER) is log_vsf_resampled(TEACHER[0], baseline) is None


def test_a_cloud_of_equal_settings_takes_the_lower():
    twins = [
        replace(point(p, 4.0, temperature=t), cloud=np.array([[4.0], [math.log(p)]]))
        for p, t in ((100, 0.8), (80, 0.9))
    ]
    assert log_vsf_resampled(twins[0], twins) == pytest.approx([math.log(100 / 80)])
