"""A design covers its ranges evenly, and shares of variance are those of closed forms."""

import math
import sys

import pytest

from didi_instruct.errors import MissingExtraError, UserError
from didi_instruct.reproduce.anova import Parameter, importances, latin_hypercube

H = Parameter(name="h", scale="linear", low=-1, high=1)
RATE = Parameter(name="rate", scale="linear", low=20, high=60)
M = Parameter(name="m", scale="integer", low=1, high=32)
POINTS = 200


def shares(parameters, function, seed=0, **options):
    points = latin_hypercube(parameters, POINTS, seed)
    values = [function(point) for point in points]
    return importances(parameters, points, values, **{"groups": 0, "trees": 32} | options)


# The design


def test_every_part_of_a_range_holds_one_point():
    points = latin_hypercube([H, RATE, M], 96, seed=3)
    for parameter in (H, RATE):
        parts = sorted(math.floor(96 * parameter.place(point[parameter.name])) for point in points)
        assert parts == list(range(96))
    assert sorted(point["m"] for point in points) == sorted(list(range(1, 33)) * 3)


def test_a_seed_is_a_design():
    assert latin_hypercube([H, M], 8, 1) == latin_hypercube([H, M], 8, 1)
    assert latin_hypercube([H, M], 8, 1) != latin_hypercube([H, M], 8, 2)


@pytest.mark.parametrize("parameter", [H, RATE, M], ids=lambda p: p.name)
def test_a_value_lies_where_it_was_taken(parameter):
    """Of whole numbers, which take parts of the range, in the middle of the part."""
    for place in (0.1, 0.5, 0.9):
        value = parameter.at(place)
        assert parameter.at(parameter.place(value)) == pytest.approx(value)
    assert [parameter.at(0), parameter.at(1)] == [parameter.low, parameter.high]


# The shares


def test_shares_of_a_sum_are_those_of_its_parts():
    """2 u + v with u, v even in [0, 1] has the variances 4/12 and 1/12: shares 0.8 and 0.2.

    u is the place of a real setting, v that of a whole number, (k - 1/2) / 32 with variance
    (1 - 1/1024) / 12. Tolerance 0.04: over ten seeds the error was 0.03 at most.
    """
    found = shares([RATE, M], lambda p: 2 * RATE.place(p["rate"]) + M.place(p["m"]))
    assert found.shares["rate"] == pytest.approx(0.8, abs=0.04)
    assert found.shares["m"] == pytest.approx(0.2, abs=0.04)
    assert found.rest == pytest.approx(1 - sum(found.shares.values()))


def test_what_acts_only_together_is_no_main_effect():
    """Of h g + h / sqrt(3) with h, g even in [-1, 1]: 1/9 together, 1/9 h alone, 0 g."""
    other = Parameter(name="g", scale="linear", low=-1, high=1)
    found = shares([H, other], lambda p: p["h"] * p["g"] + p["h"] / math.sqrt(3))
    assert found.shares["h"] == pytest.approx(0.5, abs=0.06)
    assert found.shares["g"] == pytest.approx(0.0, abs=0.03)
    assert found.rest == pytest.approx(0.5, abs=0.06)


def test_errors_say_how_far_another_design_may_be():
    """Four times the error covers the difference to a design of another seed.

    Deterministic: with these seeds. For normal errors the false-alarm rate would be 0.5%.
    """
    noisy = lambda p: p["h"] + math.sin(1e4 * p["h"] + 1e3 * p["m"])  # noqa: E731
    one = shares([H, M], noisy, seed=0, groups=8, trees=16)
    other = shares([H, M], noisy, seed=1, trees=16)
    for name in ("h", "m"):
        assert 0 < one.errors[name] < 0.2
        gap = abs(one.shares[name] - other.shares[name])
        assert gap < 4 * math.sqrt(2) * one.errors[name]


# What is refused


@pytest.mark.parametrize(
    "wrong",
    [
        {"scale": "linear", "low": 2, "high": 2},
        {"scale": "linear", "low": 0, "high": math.inf},
        {"scale": "integer", "low": 0.5, "high": 3},
    ],
)
def test_a_range_that_holds_nothing_is_refused(wrong):
    with pytest.raises(UserError, match="^it: "):
        Parameter(name="it", **wrong)


@pytest.mark.parametrize("values", [[1.0] * 9, [1.0] * 8 + [math.inf], [1.0, 2.0]])
def test_values_that_cannot_be_explained_are_refused(values):
    points = latin_hypercube([H, M], len(values))
    with pytest.raises(UserError, match="fANOVA"):
        importances([H, M], points, values)


@pytest.mark.parametrize("package", ["optuna", "sklearn"])
def test_without_a_package_it_names_the_extra(monkeypatch, package):
    """Optuna has no forest of its own, and would say so only once it is asked for one."""
    monkeypatch.setitem(sys.modules, package, None)
    points = latin_hypercube([H, M], 9)
    with pytest.raises(MissingExtraError, match=r"didi-instruct\[reproduce\]"):
        importances([H, M], points, list(range(9)))
