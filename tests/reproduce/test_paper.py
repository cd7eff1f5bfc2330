"""The paper's numbers are those that it prints."""

import os
import re
from pathlib import Path

import pytest

from didi_instruct.config.recipes import recipe_names
from didi_instruct.evaluation.corpora import CORPORA
from didi_instruct.reproduce import paper
from didi_instruct.reproduce.paper import NFES, Cell

BESIDE = Path(__file__).parents[2].parent / "shared" / "paper" / "didi-instruct.tex"
TEX = Path(os.environ.get("DIDI_PAPER", BESIDE))
needs_the_paper = pytest.mark.skipif(
    not TEX.is_file(), reason="the paper's source is not here: name it with DIDI_PAPER=FILE"
)


def test_a_handful_read_by_hand():
    full = paper.CUMULATIVE["ablation-cumulative-6-guidance"].cells
    assert full[8] == Cell(62.236, 5.17)
    assert full[128] == Cell(18.446, 5.15)
    assert paper.CUMULATIVE["ablation-cumulative-3-omega"].cells[16] == Cell(75.607, 5.22)
    assert paper.LEAVE_ONE_OUT["ablation-without-regularisation"].cells[32] == Cell(23.603, 5.20)
    assert paper.GENERATION["teacher"].cells[1024] == Cell(38.53, 5.22)
    assert paper.DIVERSITY["sdtt"][64] == pytest.approx((5.04e-3, 12.49e-2))
    assert paper.LATENCY["didi"] == (16, 2366.604, 0.432)
    assert paper.ANOVA[32] == {"h": 0.637, "candidates": 0.363}
    lambada = paper.CORPORA.index("lambada")
    assert paper.ZERO_SHOT["DiDi-Instruct"].ppl[lambada] == 53.62


def test_rows_are_named_as_the_project_names_them():
    assert {*paper.CUMULATIVE, *paper.LEAVE_ONE_OUT} <= set(recipe_names())
    assert tuple(CORPORA) == paper.CORPORA


def test_tables_repeat_each_other_where_the_paper_says_so():
    last = paper.CUMULATIVE["ablation-cumulative-6-guidance"].cells
    assert paper.LEAVE_ONE_OUT["ablation-all-tricks"].cells == last
    before = paper.CUMULATIVE["ablation-cumulative-5-regularisation"].cells
    assert paper.LEAVE_ONE_OUT["ablation-without-guidance"].cells == before
    speeds = paper.LATENCY
    ratio = speeds["didi"].tokens_per_second / speeds["ar"].tokens_per_second
    assert ratio == pytest.approx(13.2, abs=0.05), "as its text says"
    for row in speeds.values():  # both columns say the same
        assert 1024 / row.tokens_per_second == pytest.approx(row.seconds_per_1k, abs=2e-3)


# Against the source


@pytest.fixture(scope="module")
def source():
    return TEX.read_text(encoding="utf-8")


def table(source, label):
    """Numbers of a table's body, row by row; rows without numbers are left out."""
    start = source.index(rf"\label{{{label}}}")
    body = source[source.index(r"\midrule", start) : source.index(r"\bottomrule", start)]
    body = re.sub(r"\\(cmidrule|multirow|multicolumn)(\([^)]*\))?(\{[^}]*\}){1,2}", "", body)
    body = re.sub(r"\\times 10\^\{-\d\}|\^|GPT2|1K", "", body)
    rows = [re.findall(r"\d+(?:\.\d+)?", row) for row in re.split(r"\\\\", body)]
    return [[float(number) for number in row] for row in rows if row]


def by_budget(rows):
    return [[number for nfe in NFES for number in row.cells[nfe]] for row in rows.values()]


@needs_the_paper
@pytest.mark.parametrize(
    ("label", "rows"),
    [
        ("tab:cumulative:ablation", paper.CUMULATIVE),
        ("tab:leave_one_out_ablation_en", paper.LEAVE_ONE_OUT),
    ],
)
def test_ablations(source, label, rows):
    assert table(source, label) == by_budget(rows)


@needs_the_paper
def test_diversity(source):
    methods = paper.DIVERSITY.values()
    mauve = [[1000 * row[nfe].mauve for nfe in NFES] for row in methods]
    bleu = [[100 * row[nfe].self_bleu for nfe in NFES] for row in methods]
    printed = table(source, "tab:mauve_selfbleu")
    assert len(printed) == 8
    for found, ours in zip(printed, mauve + bleu, strict=True):
        assert found == pytest.approx(ours)


@needs_the_paper
def test_latency_and_zero_shot(source):
    assert table(source, "tab:latency_full") == [list(row) for row in paper.LATENCY.values()]
    rows = table(source, "table:zeroshot:ppl")
    assert rows == [list(row.ppl) for row in paper.ZERO_SHOT.values()]


@needs_the_paper
def test_anova(source):
    rows = table(source, "tab:fanova_results")
    for name, row in zip(("h", "candidates"), rows, strict=True):
        assert row == pytest.approx([100 * paper.ANOVA[nfe][name] for nfe in (8, 16, 32)])


@needs_the_paper
@pytest.mark.parametrize(
    "words",
    [
        "GPT-2 (1024 NFEs). Generative Perplexity=$37.50$",
        "perplexity of 38.53 and an entropy of 5.22",
        "62.2 (8 NFEs) to 18.4 (128 NFEs)",
        "final PPL of 15.62",
        "{5.17, 5.21, 5.18, 5.15, and 5.15}",
        r"$88.5\%$ (8 NFEs), $87.7\%$ (16 NFEs), $85.3\%$ (32 NFEs), $82.7\%$ (64 NFEs), "
        r"and $79.0\%$ (128 NFEs)",
        r"perplexity of 32.79, marking an 11.4\% improvement",
        r"at 64 NFEs, the student's PPL is $56.8\%$ lower, and at 128 NFEs, it is $61.2\%$ lower",
        r"the distilled model's PPL is $64.2\%$ lower",
        "5.52 vs.~5.75 at 16 NFEs",
        "5.43 vs. 5.43 at 512 NFEs",
        "5.40 vs. 5.32;",
        r"$h \in [0, 100]$ and $M \in \{1, 2, 4, 8, 16, 32\}$",
        "fixed budget of 16 NFEs and batch size 16",
        "generate 1{,}000 hyperparameter pairs",
        "from $[20, 60]$",
        "integer from $[1, 32]$",
        "RGAS with 16 generated sequences",
    ],
)
def test_what_only_the_text_says(source, words):
    """Those of SCALING, GENERATION, LANDSCAPE and the design, as the sentences have them."""
    assert words in " ".join(source.split())


@needs_the_paper
def test_numbers_above_the_samples(source):
    boxes = re.findall(
        r"SampleBox\{.*\$(\d+)\$ NFEs.*xity=\$([\d.]+)\$, Entropy=\$([\d.]+)", source
    )
    found = [(int(nfe), Cell(float(ppl), float(entropy))) for nfe, ppl, entropy in boxes]
    ours = [*paper.SAMPLES["teacher"].cells.items(), *paper.SAMPLES["didi"].cells.items()]
    assert found == ours
