"""The paper's numbers are those that it prints."""

import os
import re
from pathlib import Path

import pytest

from didi_instruct.config.recipes import recipe_names
from didi_instruct.evaluation.corpora import CORPORA
from didi_instruct.reproduce import paper
from didi_instruct.reproduce.paper import NFES, Cell
from didi_instruct.reproduce.scale import Given
from didi_instruct.reproduce.scales import find_scale

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
    assert paper.GENERATION["didi"].cells[1024] == Cell(15.62)
    assert list(paper.SCALING_GAIN.items())[2:4] == [(32, 0.853), (64, 0.827)]
    assert paper.SCALING_GAIN[8] > paper.SCALING_GAIN[16] == 0.877
    assert paper.SCALING_GAIN[1024] == paper.SCALING_BELOW_MOST[1024] == 0.642
    assert (paper.SCALING_GAIN[128], paper.SCALING_BELOW_MOST[128]) == (0.79, 0.612)
    assert paper.SCALING["didi"].cells[16] == Cell(32.79, 5.52)
    for nfe, pair in ((16, [5.75, 5.52]), (512, [5.43, 5.43]), (1024, [5.32, 5.4])):
        assert [paper.SCALING[r].cells[nfe].entropy for r in ("teacher", "didi")] == pair
    assert (paper.LANDSCAPE_NFE, paper.LANDSCAPE_SAMPLES) == (16, 16)
    assert (paper.ANOVA_POINTS, *paper.ANOVA_SCALES, *paper.ANOVA_CANDIDATES) == (
        1000, 20, 60, 1, 32
    )  # fmt: skip
    derived = {
        "teacher": {16: 266.6, 64: 92.4, 128: 68.4, 1024: 37.0},
        "didi": {16: 32.79, 64: 16.0, 128: 14.4, 1024: 13.2},
    }
    for role, known in derived.items():
        cells = paper.SCALING[role].cells
        assert {nfe: cell.ppl for nfe, cell in cells.items() if cell.ppl} == known
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


def test_the_design_of_paper_scale_is_the_papers():
    scale = find_scale("paper", Given())
    assert scale.anova_points == paper.ANOVA_POINTS
    assert scale.anova_h == paper.ANOVA_SCALES
    assert scale.anova_candidates == paper.ANOVA_CANDIDATES
    assert scale.guided_samples == paper.LANDSCAPE_SAMPLES
    assert paper.LANDSCAPE_NFE in scale.guided_budgets
    assert tuple(paper.ANOVA) == scale.guided_budgets
    assert {role: row.nfe for role, row in paper.LATENCY.items()} == scale.latency


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


def percents(shares, *budgets):
    return [f"${100 * shares[nfe]:.1f}\\%$" for nfe in budgets]


def sentences():
    """Those of SCALING, GENERATION, LANDSCAPE and the design, with the numbers that are ours."""
    full, scaled = paper.GENERATION["didi"].cells, {k: v.cells for k, v in paper.SCALING.items()}
    teacher, below = paper.GENERATION["teacher"].cells[1024], paper.SCALING_BELOW_MOST
    rival = paper.GENERATION["gpt2"].cells[1024]
    yield f"GPT-2 (1024 NFEs). Generative Perplexity=${rival.ppl:.2f}$"
    yield f"perplexity of {teacher.ppl} and an entropy of {teacher.entropy}"
    yield f"{full[8].ppl:.1f} (8 NFEs) to {full[128].ppl:.1f} (128 NFEs)"
    yield f"At 1024 NFEs, \\method achieves a final PPL of {full[1024].ppl}"
    *first, last = [f"{full[nfe].entropy}" for nfe in NFES]
    yield f"{{{', '.join(first)}, and {last}}}"
    *gains, least = [
        f"{words} ({nfe} NFEs)"
        for nfe, words in zip(NFES, percents(paper.SCALING_GAIN, *NFES), strict=True)
    ]
    yield f"{', '.join(gains)}, and {least}"
    few = f"{100 * below[16]:.1f}\\% improvement over the 1024-step"
    yield f"perplexity of {scaled['didi'][16].ppl}, marking an {few}"
    some, more, most = percents(below, 64, 128, 1024)
    yield f"at 64 NFEs, the student's PPL is {some} lower, and at 128 NFEs, it is {more} lower"
    yield f"At the maximum of 1024 NFEs, the distilled model's PPL is {most} lower"
    (same,) = percents(paper.SCALING_GAIN, 1024)
    yield f"model's PPL is {same} lower than the base model's 1024-step result"
    pairs = {
        nfe: (scaled["didi"][nfe].entropy, scaled["teacher"][nfe].entropy) for nfe in (16, 512)
    }
    yield "{} vs.~{} at 16 NFEs".format(*pairs[16])
    yield "{} vs. {} at 512 NFEs".format(*pairs[512])
    many = scaled["didi"][1024].entropy, scaled["teacher"][1024].entropy
    yield "at 1024 NFEs ({:.2f} vs. {:.2f};".format(*many)
    scale = find_scale("paper", Given())
    counts = ", ".join(map(str, scale.candidates))
    low, high = min(scale.scales_h), max(scale.scales_h)
    yield f"$h \\in [{low:g}, {high:g}]$ and $M \\in \\{{{counts}\\}}$"
    yield f"budget of {paper.LANDSCAPE_NFE} NFEs and batch size {paper.LANDSCAPE_SAMPLES}"
    yield f"generate {paper.ANOVA_POINTS:,} hyperparameter pairs".replace(",", "{,}")
    yield "from $[{:g}, {:g}]$".format(*paper.ANOVA_SCALES)
    yield "integer from $[{}, {}]$".format(*paper.ANOVA_CANDIDATES)
    yield f"RGAS with {scale.guided_samples} generated sequences"
    yield "NFEs $={}, {}, {}$".format(*scale.guided_budgets)


@needs_the_paper
@pytest.mark.parametrize("words", list(sentences()))
def test_what_only_the_text_says(source, words):
    assert words in " ".join(source.split())


@needs_the_paper
def test_numbers_above_the_samples(source):
    boxes = re.findall(
        r"SampleBox\{.*\$(\d+)\$ NFEs.*xity=\$([\d.]+)\$, Entropy=\$([\d.]+)", source
    )
    found = [(int(nfe), Cell(float(ppl), float(entropy))) for nfe, ppl, entropy in boxes]
    ours = [*paper.SAMPLES["teacher"].cells.items(), *paper.SAMPLES["didi"].cells.items()]
    assert found == ours
