"""Pictures and the gallery show the structures that they are given."""

import csv
import json
import re
from itertools import combinations

import numpy as np
import pytest

from didi_instruct.errors import UserError
from didi_instruct.proteins.folding import Folded, FoldSettings, fold
from didi_instruct.proteins.gallery import Chain, file_names, render_gallery, write_structures
from didi_instruct.proteins.pictures import (
    Panel,
    confidence_colour,
    draw_structures,
    principal_view,
    smooth_curve,
)
from didi_instruct.proteins.structures import Trace

DARK, LIGHT, YELLOW, ORANGE = "#0053d6", "#65cbf3", "#ffdb13", "#ff7d45"


@pytest.fixture(scope="module")
def folds(folding, chains, tmp_path_factory):
    settings = FoldSettings(source=folding[0], cache=tmp_path_factory.mktemp("cache"))
    return fold([*chains, "AC-D"], settings)


def points(length=30, seed=0):
    return np.random.default_rng(seed).normal(size=(length, 3)).cumsum(0)


def handedness(x):
    """Signs of the volumes of tetrahedra: a reflection changes all of them."""
    return np.sign([np.linalg.det(x[n + 1 : n + 4] - x[n]) for n in range(len(x) - 3)])


@pytest.mark.parametrize("seed", range(5))
def test_the_view_is_a_rotation_with_the_widest_axes_first(seed):
    x = points(seed=seed)
    view = principal_view(x)
    for i, j in combinations(range(len(x)), 2):
        assert np.linalg.norm(x[i] - x[j]) == pytest.approx(np.linalg.norm(view[i] - view[j]))
    assert (handedness(x) == handedness(view)).all()
    spread = view.var(0)
    assert spread[0] > spread[1] > spread[2]
    assert (view[0, 0] <= 0, view[0, 1] >= 0) == (True, True)


def test_a_curve_passes_its_residues_and_keeps_to_a_line():
    x = points()
    curve = smooth_curve(x, 6)
    np.testing.assert_allclose(curve[::6], x, atol=1e-12)
    line = np.arange(5.0)[:, None] * [[1.0, 2.0, 3.0]]
    np.testing.assert_allclose(smooth_curve(line, 4), np.arange(17)[:, None] / 4 * [[1.0, 2, 3]])


def test_colours_change_where_alphafolds_do():
    values = [100, 90.01, 90, 70.01, 70, 50.01, 50, 0]
    expected = [DARK, DARK, LIGHT, LIGHT, YELLOW, YELLOW, ORANGE, ORANGE]
    assert [confidence_colour(value) for value in values] == expected


def pixels(path, colour):
    """Share of the coloured pixels that are nearest in hue to a colour of the legend."""
    from matplotlib.image import imread

    image = imread(path)[..., :3].reshape(-1, 3)
    vivid = image[np.ptp(image, axis=1) > 0.25]
    palette = np.array(
        [[int(c[i : i + 2], 16) / 255 for i in (1, 3, 5)] for c in (DARK, LIGHT, YELLOW, ORANGE)]
    )
    nearest = np.abs(vivid[:, None] - palette).sum(-1).argmin(1)
    return (nearest == (DARK, LIGHT, YELLOW, ORANGE).index(colour)).mean()


@pytest.mark.parametrize(("plddt", "colour"), [(95, DARK), (30, ORANGE)])
def test_a_picture_has_the_colour_of_its_confidence(tmp_path, plddt, colour):
    trace = Trace("A" * 30, points(), np.full(30, float(plddt)))
    panels = [Panel(trace, f"30 residues\npLDDT {plddt}")] * 7
    draw_structures(panels, tmp_path / "a.png", title="$all$ alike")
    assert pixels(tmp_path / "a.png", colour) > 0.6


def test_chains_too_short_to_draw_leave_their_panel_empty(tmp_path):
    single = Trace("A", np.zeros((1, 3)), np.array([50.0]))
    pair = Trace("AA", np.array([[0.0, 0, 0], [3.8, 0, 0]]), np.array([50.0, 60.0]))
    draw_structures([Panel(single, "1"), Panel(pair, "2")], tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1000
    with pytest.raises(UserError, match="no structure to draw"):
        draw_structures([], tmp_path / "b.png")


# The gallery


def script(page, name):
    return json.loads(re.search(rf'id="{name}">(.*?)</script>', page, re.DOTALL)[1])


def test_a_gallery_holds_sequences_structures_and_files(folds):
    chains = [Chain(f"chain {n}", f, {"NFE": 8 * n}) for n, f in enumerate(folds)]
    page = render_gallery(chains, title="All of them")
    data = script(page, "data")
    sequences = re.findall(r'<p class="sequence">(.*?)</p>', page)
    assert [re.sub("<.*?>", "", found) for found in sequences] == [f.sequence for f in folds]
    for found, given in zip(data[:-1], folds, strict=False):
        assert found["pdb"] == given.pdb()
        trace = given.trace()
        centred = trace.positions - trace.positions.mean(0)
        np.testing.assert_allclose(np.reshape(found["xyz"], (-1, 3)), centred, atol=0.051)
        np.testing.assert_allclose(found["plddt"], trace.plddt, atol=0.51)
    assert data[-1] is None
    assert "Not folded: `-` at 3 is no residue (A to Z)." in page
    assert "<li>1 not folded</li>" in page
    assert "NFE 16" in page


def test_a_gallery_needs_no_network(folds):
    page = render_gallery([Chain("a", folds[0])])
    assert not re.search(r"(src|href)\s*=\s*[\"']|url\(|https?://|import\(|fetch\(", page)
    assert "default-src 'none'" in page


def test_names_cannot_break_the_page(folds):
    hostile = "</script><script>alert(1)</script>"
    page = render_gallery([Chain(hostile, folds[0], {hostile: hostile})], title=hostile)
    assert hostile not in page
    assert page.count("<script") == 3


def test_a_plot_spans_the_chain_from_0_to_100():
    plddt = np.array([0.0, 100.0, np.nan, 50.0])
    page = render_gallery([Chain("a", Folded("AAXA", None, plddt, "x"))])
    assert "polyline points" not in page
    from didi_instruct.proteins.gallery import _polyline

    assert _polyline(plddt) == "0.0,64.0 100.0,0.0 300.0,32.0"


def test_large_sets_are_shown_in_part(folds):
    chains = [Chain(f"c{n}", folds[n % 3]) for n in range(100)]
    page = render_gallery(chains, most=10)
    assert re.findall(r"<h2>c(\d+)</h2>", page) == [str(n) for n in range(0, 100, 10)]
    assert "<li>100 chains</li>" in page
    assert "<li>10 shown</li>" in page


def test_files_have_the_names_that_they_have_on_disk(folds):
    """Also where a page shows some of the chains, and names are alike."""
    chains = [Chain("same", folds[0]) for _ in range(9)]
    page = render_gallery(chains, most=3)
    names = file_names(chains)
    assert re.findall(r'data-file="(.*?)\.pdb"', page) == [names[0], names[3], names[6]]


def test_file_names_are_safe_and_distinct(folds):
    names = ["../up", "a b", "a/b", "A_B", "", "...", "a_b_8", "a b"]
    found = file_names([Chain(name, folds[0]) for name in names])
    assert found == ["up", "a_b", "a_b_3", "A_B_4", "chain_5", "chain_6", "a_b_8", "a_b_8_8"]


def test_files_of_a_set_are_written(folds, tmp_path):
    chains = [Chain(f"chain {n}", f, {"NFE": 8}) for n, f in enumerate(folds)]
    write_structures(chains, tmp_path / "out", title="Set")
    written = {p.relative_to(tmp_path / "out").as_posix() for p in (tmp_path / "out").rglob("*.*")}
    pdbs = {f"pdb/chain_{n}.pdb" for n in range(len(folds) - 1)}
    assert written == pdbs | {"plddt.csv", "structures.png", "gallery.html"}
    assert (tmp_path / "out/pdb/chain_0.pdb").read_text() == folds[0].pdb()
    rows = list(csv.DictReader((tmp_path / "out/plddt.csv").open()))
    assert [row["sequence"] for row in rows] == [f.sequence for f in folds]
    assert float(rows[0]["plddt"]) == pytest.approx(folds[0].plddt, abs=1e-4)
    assert (rows[-1]["plddt"], rows[-1]["reason"]) == ("", folds[-1].reason)
    write_structures(chains[-1:], tmp_path / "none")
    assert not (tmp_path / "none/structures.png").exists()
