"""Tables: seeds together, ours beside the paper's, and nothing lost on the way to a file."""

import csv
import io
import json
from dataclasses import replace

import pytest

from didi_instruct.reproduce.tables import (
    ENTROPY,
    NOTHING,
    PPL,
    Cell,
    Edition,
    Shown,
    Table,
    lay_out,
    over_seeds,
    show,
    to_csv,
    to_json,
    to_markdown,
    write_table,
)


def row(method, nfe, ppl, entropy=4.0, seed=0, **more):
    return {
        "method": method, "nfe": nfe, "ppl": ppl, "entropy": entropy, "seed": seed,
        "num_samples": 64, **more,
    }  # fmt: skip


EDITION = Edition(
    item="thing",
    where="Table 9",
    scale="toy",
    says="Scales differ.",
    judge="the oracle",
    provenance={"commit": "abc"},
    jobs=[{"name": "job", "key": "k", "seconds": 3.0}],
)


def test_three_seeds_have_their_range():
    rows = [
        row("a", 8, ppl, seed=seed, ppl_ci95=[0.0, 99.0])
        for seed, ppl in enumerate((10.0, 14.0, 12.0))
    ]
    cell = over_seeds(rows, "ppl")
    assert cell.mean == pytest.approx(1680 ** (1 / 3)), "of perplexities, by their logarithms"
    assert (cell.low, cell.high, cell.seeds) == (10.0, 14.0, 3)
    assert show(cell, PPL) == "11.89 ± 2"
    assert over_seeds(rows, "seed").mean == 1.0
    assert "half the range over 3 seeds, which is no" in to_markdown(
        Table(title="t", rows=rows), EDITION
    )


def test_two_seeds_keep_the_intervals_of_their_samples():
    """The range of two has one half of all chances to hold the truth, which ± would not say."""
    rows = [
        row("a", 8, 10.0, seed=0, ppl_ci95=[7.0, 12.0], role="teacher"),
        row("a", 8, 14.0, seed=1, ppl_ci95=[12.0, 15.0], role="teacher"),
    ]
    cell = over_seeds(rows, "ppl")
    assert cell.mean == pytest.approx(140**0.5)
    assert (cell.low, cell.high, cell.seeds) == (7.0, 15.0, 2)
    text = to_markdown(Table(title="t", rows=rows), EDITION)
    assert "both seeds' 95% intervals" in text
    assert "Seeds of a teacher's or an AR row are draws alone." in text
    bare = over_seeds([row("a", 8, 10.0), row("a", 8, 14.0, seed=1)], "ppl")
    assert (bare.low, bare.high) == (10.0, 14.0), "without intervals there is the range"
    apart = over_seeds([row("a", 8, 40.0), row("a", 8, 2500.0, seed=1)], "ppl")
    assert show(apart, PPL) == "316.2 [40, 2500]", "half of it would be more than the number"
    same = over_seeds([row("a", 8, 1.0, passes=4.0), row("a", 8, 1.0, passes=4.0)], "passes")
    assert show(same, PPL) == "4"


def test_one_seed_has_the_interval_of_its_samples():
    cell = over_seeds([row("a", 8, 10.0, ppl_ci95=[9.0, 12.0])], "ppl")
    assert (cell.low, cell.high) == (9.0, 12.0)
    assert show(cell, PPL) == "10 ± 1.5"
    assert show(Cell(0.25, 0.1, 0.5), Shown("gap", "gap", ".0%")) == "25% ± 20%"


@pytest.mark.parametrize("over", ["samples", "points of the design"])
def test_a_table_says_what_its_intervals_are_over(over):
    table = Table(title="t", rows=[row("a", 8, 10.0, ppl_ci95=[9.0, 12.0])], over=over)
    assert f"± is half of the 95% interval over {over}." in to_markdown(table, EDITION)


@pytest.mark.parametrize("value", [None, float("nan"), float("inf")])
def test_what_is_no_number_is_not_averaged(value):
    assert over_seeds([row("a", 8, value)], "ppl").mean is None
    assert over_seeds([row("a", 8, value), row("a", 8, 3.0, seed=1)], "ppl").mean == 3.0


def test_ours_stands_above_the_papers_in_the_same_columns():
    table = Table(
        title="t",
        rows=[row("a", 16, 2.0), row("a", 4, 3.0), row("b", 4, 5.0)],
        paper=[{"method": "a", "nfe": 16, "ppl": 38.0, "entropy": 5.2}],
    )
    titles, body = lay_out(table)
    assert titles == ["method", "of", "4 NFE", "16 NFE"]
    assert body == [
        ["a", "ours", "3 / 4.000", "2 / 4.000"],
        ["", "paper", NOTHING, "38 / 5.200"],
        ["b", "ours", "5 / 4.000", NOTHING],
    ]


def test_at_toy_scale_the_papers_numbers_stand_apart():
    """No column holds both: a toy's perplexity beside GPT-2's invites the eye to compare."""
    table = Table(
        title="t",
        rows=[row("a", 8, 2.0, path_kl=1.0)],
        shown=(PPL, ENTROPY, Shown("path_kl", "path KL")),
        paper=[{"method": "a", "nfe": 8, "ppl": 38.0, "entropy": 5.2}],
    )
    text = to_markdown(table, EDITION)
    ours, theirs = text.split("In the paper, of another language")
    assert "| a | 2 / 4.000 / 1.00 |" in ours
    assert "| a | 38 / 5.200 |" in theirs
    assert "| a | ours | 2 /" in to_markdown(table, replace(EDITION, scale="small"))


def test_names_side_by_side_keep_their_order():
    numbers = [{"method": "a", "corpus": name, "x": 1.0} for name in ("wikitext", "ag_news")]
    table = Table(
        title="t", rows=numbers, across="corpus", across_title="", shown=(Shown("x", "x"),)
    )
    assert lay_out(table)[0] == ["method", "wikitext", "ag_news"]


def test_perplexity_without_entropy_is_no_table():
    with pytest.raises(AssertionError):
        Table(title="t", rows=[], shown=(PPL,))


def test_a_csv_has_every_row_with_its_seed_and_number_of_samples():
    table = Table(
        title="t",
        rows=[row("a", 4, 3.0, seed=0, ppl_ci95=[2.0, 4.0]), row("a", 4, 5.0, seed=1)],
        paper=[{"method": "a", "nfe": 8, "ppl": 38.0, "entropy": 5.2}],
    )
    found = list(csv.DictReader(io.StringIO(to_csv(table))))
    assert [(r["of"], r["nfe"], r["ppl"], r["seed"], r["num_samples"]) for r in found] == [
        ("ours", "4", "3.0", "0", "64"),
        ("ours", "4", "5.0", "1", "64"),
        ("paper", "8", "38.0", "", ""),
    ]
    assert found[0]["ppl_ci95"] == "2.0 4.0"


def test_files_for_programs_have_the_whole_sweep():
    """The table shows the plain row alone; the CSV and JSON have what it was chosen from."""
    swept = [row("a", 4, ppl, temperature=t) for t, ppl in ((1.0, 3.0), (0.9, 2.0))]
    table = Table(title="t", rows=swept[:1], sweep=swept)
    found = list(csv.DictReader(io.StringIO(to_csv(table))))
    assert [(r["temperature"], r["ppl"]) for r in found] == [("1.0", "3.0"), ("0.9", "2.0")]
    assert json.loads(to_json(table, EDITION))["rows"] == swept
    assert len(lay_out(table)[1]) == 1


def test_markdown_says_the_scale_the_judge_the_seeds_and_what_failed():
    table = Table(title="A | table", rows=[row("a|b", 4, 3.0)], shown=(PPL, ENTROPY))
    text = to_markdown(table, replace(EDITION, failed=["x: y"]))
    for words in ("Scales differ.", "Table 9", "the oracle", "seeds 0", "64 texts", "x: y", "abc"):
        assert words in text
    assert "a\\|b" in text


def test_files_hold_the_same_table(tmp_path):
    table = Table(title="t", rows=[row("a", 4, 3.0)])
    written = write_table(table, replace(EDITION, figure="thing.png"), tmp_path)
    assert [path.name for path in written] == ["thing.md", "thing.csv", "thing.json", "thing.png"]
    told = json.loads(written[2].read_text())
    assert told["rows"] == [row("a", 4, 3.0)]
    assert told["jobs"][0]["key"] == "k"
    assert "(thing.png)" in written[0].read_text()


def test_a_brief_table_has_our_columns_and_no_intervals():
    table = Table(
        title="t",
        rows=[row("a", 8, 1234.5, ppl_ci95=[1000.0, 1400.0])],
        paper=[{"method": "a", "nfe": n, "ppl": 33584.0, "entropy": 5.2} for n in (8, 16)],
    )
    titles, body = lay_out(table, brief=True)
    assert titles == ["method", "of", "8 NFE"]
    assert body == [["a", "ours", "1,234 / 4.000"], ["", "paper", "33,584 / 5.200"]]


def test_a_terminal_shows_the_few_that_a_wide_table_names():
    table = Table(
        title="t",
        rows=[row("a", 8, 2.0, path_kl=1.0)],
        across=None,
        shown=(PPL, ENTROPY, Shown("path_kl", "path KL")),
        brief=(Shown("path_kl", "path KL"),),
    )
    assert lay_out(table, brief=True) == (["method", "path KL"], [["a", "1.00"]])
    assert lay_out(table)[0] == ["method", "perplexity", "entropy", "path KL"]
