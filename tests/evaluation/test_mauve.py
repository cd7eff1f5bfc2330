import contextlib
import sys

import numpy as np
import pytest

from didi_instruct.errors import MissingExtraError, UserError
from didi_instruct.evaluation import mauve as ours
from didi_instruct.evaluation.mauve import mauve_score

TEXTS = [f"text {i}" for i in range(200)]
OTHERS = [f"other {i}" for i in range(150)]
COLLAPSED = ["text 3"] * 200


def cloud(texts, width=16, shift=0.0):
    """A normal vector per text, a function of the text alone; texts called `other` lie apart."""
    rows = []
    for text in texts:
        name, number = text.split()
        vector = np.random.default_rng([int(number), name == "other"]).normal(size=width)
        vector[0] += shift * (name == "other")
        rows.append(vector)
    return np.array(rows, dtype=np.float32)


def near(texts):
    return cloud(texts, shift=2.0)


def far(texts):
    return cloud(texts, shift=100.0)


@pytest.fixture
def library():
    return pytest.importorskip("mauve", reason="mauve-text is not installed")


@pytest.mark.parametrize(("seed", "work", "iterations"), [(25, 10**13, 500), (3, 1, 1)])
def test_the_result_is_the_librarys(library, seed, work, iterations, monkeypatch, capfd):
    """With the reference as `p` and samples as `q`, as is the custom.

    k-means is cut short by the sizes alone.
    """
    monkeypatch.setattr(ours, "WORK", work)
    found = mauve_score(TEXTS, OTHERS, near, seed=seed)
    assert capfd.readouterr() == ("", "")
    expected = library.compute_mauve(
        p_features=near(OTHERS), q_features=near(TEXTS), seed=seed, kmeans_max_iter=iterations
    )
    assert found.value == expected.mauve
    assert 0.05 < found.value < 0.95
    assert (found.samples, found.reference) == (200, 150)
    of_histograms = ours.mauve_interval(
        expected.mauve, expected.p_hist, expected.q_hist, num_p=150, num_q=200, seed=seed
    )
    assert found.ci95 == of_histograms


def test_the_area_under_a_resampled_curve_is_the_librarys(library):
    expected = library.compute_mauve(p_features=near(TEXTS), q_features=near(OTHERS))
    assert ours.area(expected.p_hist, expected.q_hist) == pytest.approx(expected.mauve)
    assert ours.area(expected.p_hist, expected.p_hist) == 1


def test_the_interval_covers_mauve_at_this_number_of_texts(library, monkeypatch):
    """80 pairs of histograms of 200 texts in 10 buckets, whose laws differ.

    Covered is the mean of MAUVE over 1,000 pairs. At a true coverage of 92.5% (measured on 1,000
    pairs), 63 of 80 or fewer have a false-alarm rate of 1e-4.
    """
    monkeypatch.setattr(ours, "RESAMPLES", 80)
    generator = np.random.default_rng(0)
    laws = np.arange(1.0, 11), np.arange(10.0, 0, -1)

    def draw():
        return [generator.multinomial(200, law / law.sum()) / 200 for law in laws]

    mean = np.mean([ours.area(*draw()) for _ in range(1000)])
    covered = 0
    for seed in range(80):
        pair = draw()
        value = ours.area(*pair)
        low, high = ours.mauve_interval(value, *pair, 200, 200, seed=seed)
        assert 0 <= low < value < high <= 1
        covered += low < mean < high
    assert covered > 63


@pytest.mark.parametrize("seed", range(4))
def test_equal_texts_score_one_and_disjoint_or_collapsed_ones_nearly_zero(library, seed):
    """Also where the library says 0.75 of two equal histograms, as it does for one of the seeds."""
    few = TEXTS[:20]
    equal, disjoint = (
        mauve_score(few, few, cloud, seed=seed),
        mauve_score(TEXTS, OTHERS, far, seed=seed),
    )
    assert equal.value == 1
    assert equal.ci95[0] < equal.ci95[1] == 1
    assert disjoint.value < 0.02
    assert disjoint.ci95[1] < 0.03
    assert mauve_score(COLLAPSED, TEXTS, cloud, seed=seed).value < 0.05


def test_the_first_texts_count_and_empty_ones_do_not(library, monkeypatch):
    asked = []
    monkeypatch.setattr(ours, "MOST", 102)

    def features(texts):
        asked.append(list(texts))
        return near(texts)

    found = mauve_score(["", " \n", *TEXTS], OTHERS, features)
    assert asked == [OTHERS[:102], TEXTS[:100]]
    assert (found.samples, found.reference) == (100, 102)
    assert found.value == mauve_score(TEXTS[:100], OTHERS[:102], near).value


def test_what_cannot_be_compared_is_refused(library):
    with pytest.raises(UserError, match="19 samples .* too few: give 20 or more"):
        mauve_score(TEXTS[:19], OTHERS, near)
    with pytest.raises(UserError, match="0 reference texts"):
        mauve_score(TEXTS, [""] * 50, near)
    with pytest.raises(UserError, match="look the same to the judge"):
        mauve_score(COLLAPSED, COLLAPSED, cloud)
    with pytest.raises(UserError, match="look the same to the judge"):
        mauve_score(TEXTS, OTHERS, lambda texts: np.zeros((len(texts), 4), np.float32))
    with pytest.raises(UserError, match="not finite"):
        mauve_score(TEXTS, OTHERS, lambda texts: np.full((len(texts), 4), np.nan, np.float32))


def test_without_the_library_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "mauve", None)
    with pytest.raises(MissingExtraError, match=r'pip install "didi-instruct\[eval\]"'):
        mauve_score(TEXTS, OTHERS, near)


def test_what_goes_wrong_inside_is_heard_again_outside(library, capfd):
    def features(texts):
        return np.full((len(texts), 4), len(texts), np.float32) + np.eye(len(texts), 4)

    def broken(*_, **__):
        sys.__stderr__.write("inside\n")
        sys.__stderr__.flush()
        raise ZeroDivisionError

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(ZeroDivisionError):
        patch.setattr(library, "compute_mauve", broken)
        mauve_score(TEXTS, OTHERS, features)
    print("outside", file=sys.stderr)  # noqa: T201
    assert capfd.readouterr().err == "outside\n"
