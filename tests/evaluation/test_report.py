"""A report shows what was measured, marks what misleads, and no text can break out of it."""

import html
import io
import re
import sys
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from rich.console import Console

from didi_instruct.errors import UserError
from didi_instruct.evaluation.evaluate import Evaluation
from didi_instruct.evaluation.metrics import TEXT_METRICS, known_columns
from didi_instruct.evaluation.report import Report, figures, short_names
from didi_instruct.evaluation.report.summary import HEAD, Summary, cut
from didi_instruct.evaluation.samples import REAL, Origin, SampleSet
from didi_instruct.evaluation.table import INEXACT_PATH_KL, interval

HOSTILE = (
    "</td></svg><script>alert(1)</script> | `x` **b** $a$ {{ s }} {% raw %} & \" ' [l](u) \\| _i_"
)
VOID = {"meta", "link", "br", "wbr", "img", "hr", "input"}


def row(model="student", nfe=8, temperature=1.0, top_p=1.0, **numbers):
    settings = {"temperature": temperature, "top_p": top_p, "sampler": "ancestral", "seed": 0}
    sizes = {"num_samples": 4, "length": 16, "passes": nfe - 0.1}
    return {"model": model, "steps": nfe, "nfe": nfe, **settings, **sizes, **numbers}


def measured(model, nfe, kl, entropy=5.0, **more):
    ends = {"path_kl_ci95": [kl - 1, kl + 1], "entropy_ci95": [entropy - 0.01, entropy + 0.01]}
    return row(
        model, nfe, ppl=10 * kl, ppl_ci95=[9 * kl, 11 * kl], entropy=entropy, path_kl=kl, **ends,
        **more,
    )  # fmt: skip


def sweep(model, nfe, kl, **more):
    return [
        measured(model, nfe, kl, 5.0, **more),
        measured(model, nfe, kl - 3, 4.95, temperature=0.9, **more),
        measured(model, nfe, kl - 2, 4.93, top_p=0.9, **more),
    ]


def texts_of(model, nfe, *texts, temperature=1.0, seed=0):
    origin = Origin(
        model=model, fingerprint="0" * 64, tokenizer=None, sampler="ancestral", steps=nfe, nfe=nfe,
        passes=1.0, disc_calls=0, temperature=temperature, top_p=1.0, seed=seed, length=2,
    )  # fmt: skip
    count = len(texts)
    tokens, lengths = torch.zeros(count, 2, dtype=torch.long), torch.full((count,), 2)
    return SampleSet(origin, tokens, texts, None, lengths)


def full(name="student"):
    delta = {"path_kl_vs_baseline": -9.0, "path_kl_vs_baseline_ci95": [-10.0, -8.0]}
    more = {"vsf": None, "vsf_note": f"why {name}", **delta}
    return Evaluation(
        rows=[r for n in (4, 8) for r in sweep(name, n, 100 / n, **more)],
        baseline=[r for n in (4, 8, 16) for r in sweep("teacher", n, 200 / n)],
        reference=row("valid", ppl=20.0, entropy=4.99),
        judge=name,
        samples=(texts_of(name, 4, name, "b " * HEAD), texts_of("teacher", 16, "c", "d")),
    )


def build(evaluation, title="student"):
    """The report of an evaluation, with as much from outside in it as there can be."""
    provenance = {"date": "today", "commit": title}
    return Report.build(evaluation, title, provenance=provenance, command=f"didi eval {title}")


def undrawn(evaluation, title="student"):
    """The report of an evaluation, without the time that figures take."""
    provenance = {"date": "today", "commit": title}
    return Report(Summary(evaluation, title, provenance, f"didi eval {title}"), [], [])


def summary(rows=(), **more):
    return Summary(Evaluation(rows=list(rows), **more), "")


def cells(s, group):
    """Each row of a group by title of its columns, with its name, setting and bold titles."""
    return [
        {c.title: c.value(e.row) for c in s.columns}
        | {"name": e.name, "setting": e.setting, "nfe": e.nfe}
        | {"bold": [c.value(e.row) for c in s.columns if c.field in e.bold]}
        for e in group.entries
    ]


def terminal(report, width=120):
    """Lines as a terminal of that width shows them."""
    console = Console(width=width, file=io.StringIO())
    console.print(report.to_terminal(width))
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


class Page(HTMLParser):
    """Tags in balance, ids, attributes and text of a page."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.attributes, self.text = [], Counter(), [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags[tag] += 1
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags[tag] += 1
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


# Rows


def test_the_plain_setting_and_the_best_by_path_kl_are_shown_and_the_rest_is_folded():
    evaluation = full()
    s = Summary(evaluation, "")
    assert [group.title for group in s.table] == ["4 steps", "8 steps", "16 steps"]
    found = [(r["name"], r["setting"], r["path KL"]) for r in cells(s, s.table[0])]
    assert found == [
        ("teacher", "plain", "50.000"), ("teacher", "best: T 0.9, the edge of the sweep", "47.000"),
        ("student", "plain", "25.000"), ("student", "best: T 0.9, the edge of the sweep", "22.000"),
    ]  # fmt: skip
    everything = [entry for group in s.sweep for entry in group.entries]
    assert len(everything) == len(evaluation.rows) + len(evaluation.baseline) == s.sweep_size


def test_without_path_kl_only_the_plain_setting_is_shown():
    s = summary([row(ppl=9.0, entropy=4.0), row(temperature=0.8, ppl=2.0, entropy=3.9)])
    (only,) = cells(s, s.table[0])
    assert (only["setting"], only["ppl"]) == ("plain", "9.00")


@pytest.mark.parametrize(
    ("ends", "bold"),
    [([7.0, 9.9], True), ([7.0, 10.0], False), ([7.0, 10.5], False), (None, False)],
)
def test_a_value_is_bold_only_where_intervals_are_apart(ends, bold):
    """Rows of the same model are no rivals, and perplexity is never bold."""
    mine = row("a", temperature=0.5, path_kl=8.0, path_kl_ci95=ends, ppl=1.0, ppl_ci95=[1.0, 1.0])
    worse = row("a", path_kl=8.5, path_kl_ci95=[8.0, 9.0])
    other = row("b", path_kl=11.0, path_kl_ci95=[10.0, 12.0], ppl=9.0, ppl_ci95=[9.0, 9.0])

    def in_bold(rows):
        s = summary(rows)
        return [value for r in cells(s, s.table[0]) for value in r["bold"]]

    assert in_bold([worse, mine, other]) == ["8.000"] * bold
    assert in_bold([mine]) == []


def test_higher_is_better_where_the_column_says_so():
    rows = [
        row("a", mauve=0.9, mauve_ci95=[0.85, 0.95]), row("b", mauve=0.5, mauve_ci95=[0.4, 0.6])
    ]  # fmt: skip
    s = summary(rows)
    assert [r["bold"] for r in cells(s, s.table[0])] == [["0.900"], []]


def test_a_model_that_is_its_own_baseline_is_one_line():
    baseline = [row("t", 8), row("t", 256)]
    teacher, student = summary([row("t", 8, vsf=1.0), row("s", 8)], baseline=baseline).rows.lines
    assert (teacher.is_baseline, student.is_baseline) == (True, False)
    assert teacher.budgets == [8, 256]
    assert teacher.plain(8)["vsf"] == 1.0


def labels(rows, **more):
    return [line.label for line in summary(rows, **more).rows.lines]


def test_samplers_seeds_options_sizes_and_weights_of_a_model_are_told_apart():
    rows = [row("m"), {**row("m"), "sampler": "guided"}, {**row("m"), "seed": 1}, row("n")]
    expected = ["m · ancestral · seed 0", "m · guided · seed 0", "m · ancestral · seed 1", "n"]
    assert labels(rows) == expected
    rows = [
        {**row("m"), "options": {"kappa": 0.1, "rounds": 2}},
        {**row("m"), "options": {"kappa": 0.5, "rounds": 2}},
        {**row("m"), "options": None},
        row("n"),
        {**row("n"), "num_samples": 64},
    ]
    assert labels(rows) == [
        "m · kappa 0.1, rounds 2", "m · kappa 0.5, rounds 2", "m", "n · 4 texts", "n · 64 texts",
    ]  # fmt: skip
    assert labels(rows[:2]) == ["m · kappa 0.1", "m · kappa 0.5"]
    old, new = texts_of("m", 8, "a"), texts_of("m", 8, "b")
    new = replace(new, origin=replace(new.origin, fingerprint="1" * 64))
    assert labels([row("m"), row("m")], samples=(old, new)) == [
        "m · weights 00000000", "m · weights 11111111",
    ]  # fmt: skip


def test_rows_are_one_only_where_they_are_equal():
    """Two files of one model and setting; a null, or what only one row knows, is no difference."""
    first = {**row("m", ppl=3.0, vsf=None), "file": "a.jsonl"}
    second = {**row("m", ppl=3.5), "file": "b.jsonl"}
    s = summary([first, second], baseline=[row("m", ppl=3.0, vsf=0.9)])
    assert [(line.label, [r["ppl"] for r in line.rows]) for line in s.rows.lines] == [
        ("m", [3.0]), ("m (2)", [3.5]),
    ]  # fmt: skip
    assert len(summary([first, second]).table[0].entries) == 2


def test_names_are_as_short_as_they_can_be():
    assert short_names(["/home/x/runs/a", "runs/b"]) == {"/home/x/runs/a": "a", "runs/b": "b"}
    assert short_names(["x/a/1", "x/b/1"]) == {"x/a/1": "a/1", "x/b/1": "b/1"}
    assert short_names(["a", "./a"]) == {"a": "a", "./a": "./a"}
    assert short_names([]) == {}


def test_rows_that_no_sampler_wrote_stand_below_without_steps():
    """Real chains that are the reference's own are shown once."""
    chains = {"steps": None, "nfe": None, "temperature": None, "top_p": None, "passes": None}
    file, real = row("file", entropy=2.0) | chains, row(REAL, entropy=3.0) | chains
    shuffled = row("shuffled", entropy=4.0) | chains
    s = summary([row(entropy=1.0), file], controls=(shuffled, real), reference=real)
    (below,) = s.not_sampled
    assert (below.title, [group.title for group in s.table]) == ("Not sampled", ["8 steps"])
    assert [(r["name"], r["nfe"], r["entropy"]) for r in cells(s, below)] == [
        ("file", None, "2.000"), ("shuffled", None, "4.000"), (REAL, None, "3.000"),
    ]  # fmt: skip


# Columns


def test_a_column_is_there_where_it_has_numbers():
    assert [*summary([row(ppl=3.0, path_kl=None), row(entropy=4.0)]).meanings] == [
        "passes", "ppl", "entropy",
    ]  # fmt: skip
    assert all(len(c.title) < 12 for metric in TEXT_METRICS for c in metric.columns)
    assert len({column.field for column in known_columns()}) == len(known_columns())


def test_an_interval_is_the_measured_one_where_it_is_finite():
    assert interval({"ppl": 3.0, "ppl_ci95": [2.0, 5.0], "ppl_se": 9.0}, "ppl") == (2.0, 5.0)
    for unknown in (
        {}, {"ppl": 3.0}, {"ppl": None, "ppl_ci95": [1, 2]}, {"ppl": 3.0, "ppl_ci95": None},
        {"ppl": 3.0, "ppl_ci95": [1.0, float("inf")]},
    ):  # fmt: skip
        assert interval(unknown, "ppl") is None


def test_cells_have_the_digits_of_their_column():
    (path_kl,) = (column for column in known_columns() if column.field == "path_kl")
    known = {"path_kl": -1.23456, "path_kl_ci95": [-2.0, 0.00049], "path_kl_note": "why"}
    shown = (path_kl.value(known), path_kl.interval(known), path_kl.note(known))
    assert shown == ("-1.235", "[-2.000, 0.000]", "why")
    assert (path_kl.value({}), path_kl.interval({}), path_kl.note({})) == ("–", "", "")


def test_path_kl_of_an_inexact_judge_is_explained_as_such():
    def explained(**more):
        return summary([row(path_kl=1.0, **more)]).meanings["path KL"]

    assert "upper bound" in explained(path_kl_exact=True)
    assert explained(path_kl_exact=False) == INEXACT_PATH_KL
    assert "may be negative" in INEXACT_PATH_KL
    for exact in (True, False):
        words = explained(path_kl_exact=exact)
        assert all(name in words for name in ("reward", "entropy", "4-grams", "Self-BLEU"))


def test_a_gain_over_a_baseline_without_a_sweep_is_explained_as_such():
    rows = [row(gap_closed=0.5)]
    assert "--frontier" in summary(rows).meanings["gap closed"]
    rows.append(row(temperature=0.9))
    assert "--frontier" not in summary(rows).meanings["gap closed"]


def test_the_length_of_texts_is_shown_where_they_end_before_their_window():
    def told(**lengths):
        s = summary([row("m", length=32, **lengths)])
        return s.columns[-1].title, s.facts

    title, facts = told(mean_length=20.25, mean_length_ci95=[19.0, 21.0])
    assert title == "length"
    assert "up to 32 tokens each" in facts
    for lengths in ({"mean_length": 32.0}, {}):
        title, facts = told(**lengths)
        assert title != "length"
        assert "32 tokens each" in facts


# Findings


def against(nfe, value, ends, **more):
    delta = {"path_kl_vs_baseline": value, "path_kl_vs_baseline_ci95": ends}
    return row("runs/s", nfe, path_kl=10 + value, **delta, **more)


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        (
            [against(1, -2.0, [-3.0, -1.0]), against(1, -1.0, [-1.1, -0.9], temperature=0.9)],
            "s is better than t at 1 step. Its path KL differs by -2.00 [-3.00, -1.00] nats per "
            "text at 1 step.",
        ),
        (
            [against(2, -0.5, [-1.0, 0.0], entropy=4.0)],
            "s is not clearly different from t at 2 steps. Its path KL differs by ⚠ -0.50 [-1.00, "
            "+0.00] nats per text at 2 steps.",
        ),
        (
            [against(4, 1.0, [0.5, 1.5]), against(8, 1.5, [0.5, 2.5]), against(16, 1.5, None)],
            "s is worse than t at 4 and 8 steps. Its path KL differs by +1.00 [+0.50, +1.50] nats "
            "per text at 4 steps and +1.50 [+0.50, +2.50] at 8 steps.",
        ),
        (
            [
                against(1, -9.0, [-9.5, -8.5], gap_closed=0.981),
                against(4, -1.0, [-2.0, -0.5], gap_closed=0.5),
                against(8, 0.5, [-0.5, 1.5]),
                against(16, 1.0, [0.5, 1.5], gap_closed=-0.25),
            ],
            "s is better than t at 1 and 4 steps, not clearly different at 8 steps and worse at 16 "
            "steps. It recovers 98.1% of the path-KL gap at 1 step (-9.00 [-9.50, -8.50] nats per "
            "text), 50.0% at 4 steps (-1.00 [-2.00, -0.50]), an unknown share at 8 steps (+0.50 "
            "[-0.50, +1.50]) and -25.0% at 16 steps (+1.00 [+0.50, +1.50]).",
        ),
        ([against(16, 1.5, None)], "There is no verdict against t: the difference in path KL has "
         "no interval."),
        ([row("runs/s")], "There is no verdict against t: path KL was not compared at equal steps "
         "(it needs the metric path-kl and a judge)."),
        ([], "Every row is of the baseline, t: nothing is compared."),
    ],
)  # fmt: skip
def test_the_verdict_is_that_of_the_intervals_at_the_best_setting(rows, sentence):
    baseline = [row("t"), row("t", 2, entropy=5.0)]
    (finding,) = summary(rows, baseline=baseline).findings
    assert " ".join([finding.head, *finding.details]) == sentence


def test_without_a_baseline_models_are_compared_with_each_other_or_stand_alone():
    def found(*rows):
        (finding,) = summary(rows).findings
        return finding.head.removeprefix("There is no baseline (--against)"), finding.details

    def model(name, kl):
        return row(name, path_kl=kl, path_kl_ci95=[kl - 1, kl + 1])

    assert found(row("a")) == (": the numbers of a stand alone.", ())
    rows = [row("a", n, ppl=n / 4, path_kl=3.0 * n) for n in (4, 8, 16)]
    assert found(*rows) == (
        ": the numbers of a stand alone.",
        ("At 4 steps: ppl 1.00 and path KL 12.000.", "At 16 steps: ppl 4.00 and path KL 48.000."),
    )
    assert found(row("a"), row("b")) == (" and no path KL: models cannot be ranked.", ())
    assert found(model("a", 3.0), model("b", 3.5)) == (
        ", and no model's path KL is clearly the lowest.", (),
    )  # fmt: skip
    assert found(model("a", 9.0), model("b", 3.5)) == (
        ": models are compared with each other.",
        ("At 8 steps b has the lowest path KL, 3.500 [2.500, 4.500].",),
    )
    (finding,) = summary([row(REAL, entropy=3.0) | {"nfe": None}]).findings
    assert finding.head == "No model was sampled: the table describes texts as they are."


# Warnings


def warnings(rows, **more):
    return [[w.head, *w.details] for w in summary(rows, **more).warnings]


def test_low_entropy_is_doubted_against_text_or_else_against_the_plain_baseline():
    baseline = [row("t", entropy=5.0), row("t", temperature=0.5, entropy=4.0), row("t", 16)]
    rows = [row("a", entropy=4.91), row("b", entropy=4.89, ppl=3.0), row("c", 16, entropy=4.0)]
    ((head, *lines),) = warnings(rows, baseline=baseline)
    assert lines == ["b, 8 steps: entropy 4.890 is 2.2% below the plain baseline's 5.000."]
    assert "the texts of 1 row vary too little, which can lower their perplexity." in head
    ((_, *lines),) = warnings(rows, baseline=baseline, reference=row("valid", 32, entropy=4.5))
    assert lines == ["c, 16 steps: entropy 4.000 is 11.1% below the reference text's 4.500."]
    assert warnings(rows) == []


def test_repetition_is_doubted_too_and_marked_at_the_row(tmp_path):
    """Against the text, or else the plain baseline at its most steps; at an equal number of them.

    5% is tolerated: 0.38 and 0.63 are 5%, 0.379 and 0.631 are more.
    """
    numbers = {"fine": (0.3801, 0.6299), "few": (0.379, 0.6), "alike": (0.4, 0.631)}
    rows = [row(m, unique_4gram=u, self_bleu=b, path_kl=1.0) for m, (u, b) in numbers.items()]
    real = row("valid", unique_4gram=0.4, self_bleu=0.6)
    expected = [
        "few, 8 steps: 4-grams 0.379 is 5.2% below {} 0.400{}.",
        "alike, 8 steps: Self-BLEU 0.631 is 5.2% above {} 0.600{}.",
    ]
    ((head, *lines),) = warnings(rows, reference=real)
    assert lines == [line.format("the reference text's", "") for line in expected]
    assert "can lower their path KL." in head
    assert warnings(rows, reference={**real, "num_samples": 9}) == []
    few = row("t", 8, unique_4gram=0.1, self_bleu=0.9)
    most = row("t", 64, unique_4gram=0.4, self_bleu=0.6)
    ((_, *lines),) = warnings(rows, baseline=[few, most])
    assert [line for line in lines if line[0] != "t"] == [
        line.format("the plain baseline's", " at 64 NFE") for line in expected
    ]
    page, text = undrawn(Evaluation(rows=rows, reference=real)).write(tmp_path)
    marked = re.findall(r"⚠</span> (\w+)", page.read_text(encoding="utf-8"))
    assert marked == re.findall(r"\| ⚠ (\w+) \|", text.read_text(encoding="utf-8"))
    assert marked == ["few", "alike"]


def test_a_best_setting_at_the_edge_of_the_sweep_is_told():
    def swept(model, kls):
        return [
            row(model, temperature=t, top_p=p, path_kl=kl)
            for (t, p), kl in zip([(1, 1), (0.8, 1), (0.6, 1), (1, 0.9)], kls, strict=True)
        ]

    inside, cold, narrow = (
        swept(model, kls)
        for model, kls in {"a": (3, 1, 2, 4), "b": (3, 2, 1, 4), "c": (3, 2, 3, 1)}.items()
    )
    ((head, *lines),) = warnings([*inside, *cold, *narrow])
    assert lines == ["b: 8 steps (T 0.6).", "c: 8 steps (top-p 0.9)."]
    assert "a wider one may find better." in head
    assert "overstated" in warnings(inside, baseline=cold)[0][0]
    assert warnings(inside) == []
    assert warnings([row("a", temperature=0.6, path_kl=1.0)]) == []


# Texts


def test_texts_stand_between_few_and_most_steps_of_the_baseline():
    sets = [texts_of(m, n, "x") for m in ("a", "b", "c") for n in (16, 8)]
    sets += [texts_of("t", n, "x") for n in (8, 256, 16)]
    sets.insert(0, texts_of("a", 8, "cold", temperature=0.5))
    s = summary(baseline=[row("t")], samples=tuple(sets))
    assert [(side.label, side.steps) for side in s.sides] == [
        ("t", "8 steps"), ("a", "8 steps"), ("b", "8 steps"), ("t", "256 steps"),
    ]  # fmt: skip
    assert "Not shown: c." in s.about_texts
    alone = summary(samples=tuple(sets[:3]))
    assert [side.steps for side in alone.sides] == ["8 steps", "16 steps"]
    other = summary(samples=(texts_of("a", 8, "x", seed=1), texts_of("b", 8, "x", seed=2)))
    assert "seeds differ" in other.about_texts


def test_models_without_texts_say_so():
    s = summary([row()], samples=(texts_of("a", 8, "", " "),))
    assert s.sides == []
    assert "no tokenizer" in s.about_texts


@pytest.mark.parametrize("text", ["word " * 400, "x" * 2000, "长" * 900, "a b\n\n" * 300])
def test_a_long_text_is_cut_without_losing_a_character(text):
    head, rest = cut(text)
    assert HEAD / 2 < len(head) <= HEAD
    assert "".join((head + rest).split()) == "".join(text.split())
    assert cut("short ") == ("short", "")


# Forms


@pytest.mark.filterwarnings("error")
def test_the_page_stands_alone_and_nothing_breaks_out_of_it(tmp_path):
    """Parsed by another library: tags in balance, no script, nothing fetched, the text intact."""
    pytest.importorskip("matplotlib")
    path, _ = build(full(HOSTILE), HOSTILE).write(tmp_path)
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert page.tags["script"] == page.tags["img"] == page.tags["link"] == page.tags["iframe"] == 0
    assert page.tags["h1"] == page.tags["main"] == page.tags["title"] == 1
    assert page.tags["figure"] == 3
    order = [text.index(part) for part in ("<h1>", 'class="verdict"', "<figure", "<table")]
    assert order == sorted(order), "what was found comes first, then the plots, then the table"
    assert "".join(page.text).count(HOSTILE) >= 4
    assert "".join(page.text).count(f"why {HOSTILE}") == 1, "a reason stands below the table, once"
    ids = [value for name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    links = [v for n, v in page.attributes if n in ("href", "src", "xlink:href")]
    assert all(link[0] == "#" and link[1:] in ids for link in links)
    assert all(name in ids for name in re.findall(r"url\(#([^)]*)\)", text))
    assert not re.search(r"https?://(?!www\.w3\.org/)|@import|url\((?!#)", text)
    assert text.count("viewBox") == page.tags["svg"] == 4
    assert {"lang": "en"}.items() <= dict(page.attributes).items()


def rendered(path):
    """Markdown as another library renders it, tables included."""
    markdown_it = pytest.importorskip("markdown_it")
    text = path.read_text(encoding="utf-8")
    return markdown_it.MarkdownIt("commonmark").enable("table").render(text)


def test_markdown_shows_the_same_text_and_nothing_more(tmp_path):
    report = build(full(HOSTILE), HOSTILE)
    text = rendered(report.write(tmp_path)[1])
    page = Page(text)
    assert page.tags["script"] == page.tags["a"] == page.tags["code"] - 1 == 0
    assert "".join(page.text).count(HOSTILE) >= 4
    assert html.escape(HOSTILE, quote=False).replace('"', "&quot;") in text
    images = [value for name, value in page.attributes if name == "src"]
    assert images
    assert all((tmp_path / image).is_file() for image in images)


@pytest.mark.parametrize(
    "name",
    [HOSTILE, "a\x00b\x1b[31mc\ud800", "א\u202eב", "x" * 5000, "one\ntwo | three", "``` \n```` x"],
)
def test_odd_names_and_texts_leave_every_form_whole(tmp_path, name):
    """Control characters, overrides of direction, endless words, new lines, fences."""
    report = undrawn(full(name), name)
    page, path = report.write(tmp_path)
    source = page.read_text(encoding="utf-8")
    text = rendered(path)
    for form in (source, path.read_text(encoding="utf-8"), "\n".join(terminal(report))):
        assert not re.search(r"[\x00\x1b\u202e]", form)
    assert Page(source).tags["table"] == 2
    assert Page(text).tags["table"] == 3
    assert Page(text).tags["pre"] == 1
    widths = [len(re.findall(r"<t[dh][ >]", line)) for line in text.split("<tr>")]
    assert set(widths[1:]) == {3 + len(report.summary.columns), 3}, "a pipe has made a cell"


def test_the_first_lines_say_what_was_found_and_the_last_how_to_read_it(tmp_path):
    def told(evaluation):
        return undrawn(evaluation).write(tmp_path)[1].read_text(encoding="utf-8")

    every = told(full())
    assert "student is better than teacher at 4 and 8 steps." in every.splitlines()[2]
    for words in ("with the lowest path KL.", "Brackets are", "is bold", "⚠ marks", "flatters"):
        assert every.count(words) == 1
    plain = told(
        Evaluation(rows=[row(entropy=4.0), row(temperature=0.8, entropy=4.0, judge_cut=3)])
    )
    for words in ("no setting can be called", "nothing here shows", "up to 3 texts per row"):
        assert plain.count(words) == 1
    assert not any(words in plain for words in ("Brackets", "is bold", "⚠ marks", "flatters"))
    assert "One row per model" in told(Evaluation(rows=[row(entropy=4.0)]))


def test_equal_numbers_make_equal_files_and_old_plots_go(tmp_path):
    pytest.importorskip("matplotlib")
    build(full()).write(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert set(before) == {
        "report.html", "report.md", "report-nfe.png", "report-path-kl.png", "report-frontier.png",
    }  # fmt: skip
    build(full()).write(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    (tmp_path / "report-mine.png").touch()
    build(Evaluation(rows=[row(entropy=4.0)])).write(tmp_path)
    assert sorted(path.name for path in tmp_path.glob("*.png")) == [
        "report-mine.png", "report-nfe.png",
    ]  # fmt: skip
    with pytest.raises(UserError, match="nothing to report"):
        build(Evaluation(rows=[]))


def test_the_terminal_shows_every_number_under_its_title():
    rows = [row("teacher", 8, ppl=428.123, gap_closed=0.456), row("runs/student", 16, ppl=7.0)]
    lines = terminal(undrawn(Evaluation(rows=rows, reference=row("valid", ppl=27.3, entropy=4.79))))
    assert [re.split(r"\s{2,}", line) for line in lines[1:]] == [
        ["model", "steps", "passes", "ppl", "entropy", "gap closed"],
        ["teacher", "8", "7.9", "428.12", "–", "45.6%"],
        ["student", "16", "15.9", "7.00", "–", "–"],
        ["valid", "–", "27.30", "4.790", "–"],
    ]


@pytest.mark.parametrize("width", [60, 80, 120, 300])
def test_a_terminal_shows_what_fits_and_names_the_rest(width):
    """Perplexity and entropy always stand together."""
    lines = terminal(undrawn(full()), width)
    start = next(i for i, line in enumerate(lines) if line.startswith("model"))
    head = lines[start]
    assert {"ppl", "entropy"} <= set(head.split())
    assert "…" not in "".join(lines), "no number is cut"
    assert all(len(line) <= width for line in lines)
    left = any(line.startswith("Only in the report") for line in lines)
    assert left == ("path KL" not in head or "Δ path KL" not in head)
    assert any("student is better than teacher at 4" in line for line in lines[:start])
    assert "why student" in lines
    if width > 60:
        assert "teacher, baseline (best: T 0.9, edge)" in "\n".join(lines)


def test_a_terminal_marks_rows_that_mislead():
    low, real = measured("student", 8, 5.0, entropy=3.0), row("valid", ppl=20.0, entropy=5.0)
    lines = terminal(undrawn(Evaluation(rows=[low], reference=real)))
    assert any(line.startswith("student ⚠") for line in lines)
    assert any(line.startswith("⚠ Low variety") for line in lines)


# Figures


@pytest.mark.filterwarnings("error")
def test_plots_have_the_rows_numbers(monkeypatch):
    pytest.importorskip("matplotlib")
    drawn, as_png = [], figures.as_png
    monkeypatch.setattr(figures, "as_png", lambda figure: drawn.append(figure) or as_png(figure))
    report = build(full())
    assert [plot.name for plot in report.plots] == ["path-kl", "nfe", "frontier"]
    assert report.missing_plots == []
    for figure, scale, less in ((drawn[1], 10, 0), (drawn[0], 1, 3)):
        lines = [line for line in figure.axes[0].lines if line.get_marker() != "None"]
        assert {tuple(zip(*line.get_data(), strict=True)) for line in lines} == {
            tuple((n, scale * (200 / n - less)) for n in (4, 8, 16)),
            tuple((n, scale * (100 / n - less)) for n in (4, 8)),
        }
    axes = drawn[2].axes
    assert [axis.get_title("left") for axis in axes] == ["4 steps", "8 steps", "16 steps"]
    best = {(4.95, 10 * (100 / 4 - 3)), (4.93, 10 * (100 / 4 - 2)), (5.0, 250.0)}
    curves = [set(zip(*line.get_data(), strict=True)) for line in axes[0].lines]
    assert sum(curve < best and len(curve) == 2 for curve in curves) == 2
    assert len({axis.get_ylim() for axis in axes}) == 1, "panels share their axes"


def test_plots_take_the_colours_of_the_page_and_are_whole():
    pytest.importorskip("matplotlib")
    style = Path(figures.__file__).with_name("style.css.j2").read_text(encoding="utf-8")
    known = set(re.findall(r"(--\w+):", style))
    for plot in build(full(HOSTILE)).plots:
        for svg in plot.svgs:
            tree = ElementTree.fromstring(
                svg.replace("<svg", '<svg xmlns:xlink="http://www.w3.org/1999/xlink"', 1)
            )
            assert tree.tag == "svg"
            assert not re.search(r"(fill|stroke): #", svg), "a colour that the dark does not change"
            assert set(re.findall(r"var\((--\w+)\)", svg)) <= known
            assert len(re.findall(r"<text", svg)) == len(re.findall(r"<text[^>]*var\(--ui\)", svg))
            words = "".join(text.text or "" for text in tree.iter("text"))
            assert "script> | `x` **b** $" in words
        assert plot.png[:8] == b"\x89PNG\r\n\x1a\n"
    formula = build(full("$x_1$")).plots[0].svgs[0]
    assert ">$x_1$</text>" in formula, "a name is no formula"


@pytest.mark.parametrize(("ppl", "drawn"), [(30.0, True), (0.5, False)])
def test_a_reference_that_would_flatten_the_plot_is_told_instead(ppl, drawn):
    pytest.importorskip("matplotlib")
    real = row("valid", ppl=ppl, entropy=4.99)
    _, steps, frontier = build(replace(full(), reference=real)).plots
    assert ("Perplexity of the reference text is far off: 0.5." in steps.caption) is not drawn
    assert "Dashed" in steps.caption, "its entropy is near"
    assert ("Star" in frontier.caption) is drawn


def test_the_share_at_the_best_setting_is_drawn_where_it_is_known():
    pytest.importorskip("matplotlib")
    rows = [row(path_kl=2.0, gap_closed=0.5, gap_closed_best=0.75), row("b", path_kl=1.0)]
    (plot,) = build(Evaluation(rows=rows)).plots
    assert "Gap closed, student: 0.75 at 8 steps." in plot.alt


def test_what_cannot_be_drawn_is_explained():
    pytest.importorskip("matplotlib")
    report = build(Evaluation(rows=[row(entropy=4.0)]))
    assert [plot.name for plot in report.plots] == ["nfe"]
    assert "Perplexity was not measured" in report.plots[0].caption
    assert ["path KL" in report.missing_plots[0], "--frontier" in report.missing_plots[1]] == [
        True, True,
    ]  # fmt: skip
    report = build(Evaluation(rows=[row(ppl=4.0)]))
    assert report.plots == []
    assert "metric entropy" in report.missing_plots[1]
    negative = [row(nfe=n, path_kl=-2.0, path_kl_exact=False, path_kl_ci95=None) for n in (1, 8)]
    assert [plot.name for plot in build(Evaluation(rows=negative)).plots] == ["path-kl"]


def test_without_matplotlib_the_report_names_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    page, text = build(full()).write(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "report.md"]
    assert 'pip install "didi-instruct[eval]"' in html.unescape(page.read_text())
    assert "didi-instruct&#91;eval&#93;" in text.read_text()
