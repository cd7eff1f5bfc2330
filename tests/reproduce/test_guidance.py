"""RGAS over h and M: what a cell is, what the figures show, what matters by closed forms."""

import re

import pytest

import didi_instruct as didi
from didi_instruct.errors import UserError
from didi_instruct.evaluation.diversity import unigram_entropy
from didi_instruct.evaluation.judges import OracleJudge
from didi_instruct.reproduce.anova import PARAMETERS, design, draw_shares, shares
from didi_instruct.reproduce.guidance import draw_landscape, grid, guided_rows, sign_control
from didi_instruct.reproduce.measure import Terms

from .small_models import LANGUAGE, config_of, save

STRENGTHS = grid((-10.0, 10.0), (1, 3))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "guided"
    return save(folder, config_of(), discriminator=True)


@pytest.fixture(scope="module")
def rows(source, tmp_path_factory):
    terms = Terms(
        out=tmp_path_factory.mktemp("kept"), judge=OracleJudge(LANGUAGE), num=12, device="cpu"
    )
    return guided_rows(source, STRENGTHS, (4,), terms)


def row_at(rows, h, m):
    (found,) = [row for row in rows if (row["h"], row["candidates"]) == (h, m)]
    return found


def test_the_setting_without_guidance_is_always_there_and_is_ancestral(source, rows):
    assert STRENGTHS == [(0.0, 1), (-10.0, 1), (-10.0, 3), (10.0, 1), (10.0, 3)]
    plain = row_at(rows, 0, 1)
    tokens = didi.load(source, device="cpu").sample(num=12, steps=4, seed=0)
    nats = -LANGUAGE.log_prob(tokens)
    assert plain["ppl"] == pytest.approx((nats.sum() / tokens.numel()).exp().item())
    assert plain["entropy"] == pytest.approx(unigram_entropy(tokens).mean().item())
    assert plain["disc_calls"] == 0


def test_a_cell_is_one_h_and_one_number_of_candidates(source, rows):
    """Two of four steps tilt with the same h, the two others choose among M."""
    model = didi.load(source, device="cpu")
    for h, m in ((10.0, 1), (-10.0, 1), (10.0, 3)):
        options = {"h_start": h, "h_end": h, "candidates": m}
        tokens = model.sample(num=12, steps=4, seed=0, sampler="rgas", options=options)
        row = row_at(rows, h, m)
        assert row["entropy"] == pytest.approx(unigram_entropy(tokens).mean().item())
        assert row["disc_calls"] == 2 + (2 * m if m > 1 else 0)
        assert row["method"] == f"h {h:g}, M {m}"
    assert row_at(rows, 10, 1)["ppl"] != row_at(rows, -10, 1)["ppl"]
    assert row_at(rows, 10, 3)["passes"] > row_at(rows, 10, 1)["passes"] + 4


def test_the_control_of_the_sign_is_told_beside_none(rows):
    told = sign_control(rows)
    assert len(told) == 2
    three = [row_at(rows, h, 1) for h in (-10, 0, 10)]
    numbers = [float(n) for n in re.findall(r": ([\d.]+) /", told[0])]
    assert numbers == pytest.approx([row["ppl"] for row in three], rel=1e-3)
    assert "M = 3" in told[1]
    assert "h = 0" not in told[1], "that pair was not measured"


def with_ends(h, low, high):
    return cell(h, 1, (low + high) / 2, 5.0) | {"ppl_ci95": [low, high]}


@pytest.mark.parametrize(
    ("negative", "verdict"),
    [((12.0, 14.0), "holds"), ((6.0, 8.0), "fails"), ((8.0, 9.5), "within noise")],
)
def test_the_sign_has_a_verdict_where_intervals_part(negative, verdict):
    rows = [with_ends(-10.0, *negative), with_ends(0.0, 9.0, 11.0), with_ends(10.0, 9.0, 11.0)]
    (told,) = sign_control(rows)
    assert f"M = 1: {verdict}." in told
    (told,) = sign_control(rows[:2])
    assert "not known" in told, "nothing to set it against"


def test_every_h_has_its_negative():
    assert grid((0.0, 10.0), (4,)) == [(0.0, 1), (0.0, 4), (10.0, 4), (10.0, 1), (-10.0, 1)]


def cell(h, m, ppl, entropy, nfe=8):
    return {"h": h, "candidates": m, "ppl": ppl, "entropy": entropy, "nfe": nfe}


def test_the_heat_maps_say_the_numbers_and_frame_what_is_plain():
    known = [cell(0.0, 1, 20.0, 5.0), cell(0.0, 4, 15.5, 4.9), cell(30.0, 1, 9.123, 4.5)]
    figure = draw_landscape([*known, cell(30.0, 4, None, 4.25)], "a title")
    left, right = figure.axes
    places = {(t.get_position(), t.get_text()) for t in left.texts}
    assert places == {((0, 0), "20.0"), ((1, 0), "15.5"), ((0, 1), "9.12"), ((1, 1), "–")}
    assert {t.get_text() for t in right.texts} == {"5.000", "4.900", "4.500", "4.250"}
    for axis in (left, right):
        assert [label.get_text() for label in axis.get_yticklabels()] == ["0", "30"]
        assert {patch.get_xy() for patch in axis.patches} == {(-0.5, -0.5)}
    assert not list(draw_landscape(known[1:]).axes[0].patches), "nothing plain to frame"
    with pytest.raises(UserError, match="no rows"):
        draw_landscape([])


# What matters


def test_a_design_keeps_to_its_ranges():
    points = design(64, seed=1)
    assert all(20 <= h <= 60 and 1 <= m <= 32 for h, m in points)
    assert sorted(m for _, m in points) == sorted(2 * list(range(1, 33)))
    assert {m for _, m in design(16, 0, (0, 10), (1, 4))} == {1, 2, 3, 4}


def test_shares_are_those_of_the_numbers():
    """Perplexity by h alone and entropy by M alone at 8 NFE, the other way round at 16."""
    rows = []
    for h, m in design(64, 0, (0, 10), (1, 8)):
        rows.append(cell(h, m, 50 - h, 5 - m / 10) | {"num_samples": 4, "seed": 7})
        rows.append(cell(h, m, 50 - m, 5 - h / 10, nfe=16) | {"num_samples": 4, "seed": 7})
    rows.append(cell(5.0, 2, None, 5.0) | {"num_samples": 4, "seed": 7})
    found = {(r["nfe"], r["parameter"]): r for r in shares(rows, (0, 10), (1, 8))}
    assert len(found) == 2 * len(PARAMETERS)
    for nfe, strong in ((8, "h"), (16, "candidates")):
        assert found[nfe, strong]["ppl_share"] == pytest.approx(1, abs=0.01)
        assert found[nfe, strong]["entropy_share"] == pytest.approx(0, abs=0.01)
        assert found[nfe, "rest"]["ppl_share"] == pytest.approx(0, abs=0.01)
        low, high = found[nfe, strong]["ppl_share_ci95"]
        assert high - 0.05 < low <= found[nfe, strong]["ppl_share"] <= high
    assert (found[8, "h"]["points"], found[8, "h"]["points_without_number"]) == (64, 1)
    assert (found[16, "h"]["num_samples"], found[16, "h"]["seed"]) == (4, 7)


def test_the_bars_are_as_long_as_the_shares():
    values = {"h": 0.5, "candidates": 0.3, "rest": 0.2}
    rows = [{"nfe": 8, "parameter": name, "ppl_share": value} for name, value in values.items()]
    figure = draw_shares(rows, {8: {"h": 0.9, "candidates": 0.04}})
    lengths = [bar.get_width() for bar in figure.axes[0].patches]
    assert lengths == pytest.approx([0.9, 0.04, 0.06, 0.5, 0.3, 0.2])
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert names == ["8 NFE, paper", "8 NFE, ours"]
