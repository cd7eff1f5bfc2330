"""A report shows what was measured, marks what misleads, and no text can break out of it."""

import html
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import didi_instruct
from didi_instruct.errors import UserError
from didi_instruct.evaluation.provenance import commit, provenance, versions
from didi_instruct.evaluation.report import Content, render_terminal, write_report
from didi_instruct.evaluation.report.blocks import blocks_of, sweep_of
from didi_instruct.evaluation.report.lines import lines_of, short_names
from didi_instruct.evaluation.report.plots import draw_plots
from didi_instruct.evaluation.report.texts import HEAD, cut, side_by_side
from didi_instruct.evaluation.report.verdict import verdict
from didi_instruct.evaluation.report.words import doubts, edges, facts, main_columns, reading
from didi_instruct.evaluation.samples import Origin, SampleSet
from didi_instruct.evaluation.table import COLUMNS

HOSTILE = "</td></svg><script>alert(1)</script> | `x` **b** $a$ %%body%% & \" ' [l](u) \\| _i_"
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
    return Content(
        title=name,
        rows=[
            r
            for n in (4, 8)
            for r in sweep(
                name,
                n,
                100 / n,
                vsf=None,
                vsf_note=f"why {name}",
                path_kl_vs_baseline=-9.0,
                path_kl_vs_baseline_ci95=[-10.0, -8.0],
            )
        ],
        baseline=[r for n in (4, 8, 16) for r in sweep("teacher", n, 200 / n)],
        reference=row("valid", ppl=20.0, entropy=4.99),
        judge=name,
        samples=[texts_of(name, 4, name, "b " * HEAD), texts_of("teacher", 16, "c", "d")],
        provenance={"date": "today", "commit": name},
        command=f"didi eval {name}",
    )


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


def test_the_plain_setting_and_the_best_by_path_kl_are_shown_the_rest_is_folded():
    content = full()
    blocks = blocks_of(content, COLUMNS)
    assert [block.nfe for block in blocks] == [4, 8, 16]
    shown = [(e.line.label, e.setting, e.row["path_kl"]) for e in blocks[0].entries]
    assert shown == [
        ("teacher", "plain", 50), ("teacher", "best: T 0.9, the edge of the sweep", 47),
        ("student", "plain", 25), ("student", "best: T 0.9, the edge of the sweep", 22),
    ]  # fmt: skip
    everything = [entry.row for block in sweep_of(content) for entry in block.entries]
    assert len(everything) == len(content.rows) + len(content.baseline)
    assert all(any(r is other for other in everything) for r in content.rows)


def test_without_path_kl_only_the_plain_setting_is_shown():
    rows = [row(ppl=9.0, entropy=4.0), row(temperature=0.8, ppl=2.0, entropy=3.9)]
    (block,) = blocks_of(Content(title="", rows=rows), COLUMNS)
    assert [(e.setting, e.row["ppl"]) for e in block.entries] == [("plain", 9.0)]


@pytest.mark.parametrize(
    ("ends", "bold"),
    [
        ([7.0, 9.9], True),
        ([7.0, 10.0], False),
        ([7.0, 10.5], False),
        (None, False),
    ],
)
def test_a_value_is_bold_only_where_intervals_are_apart(ends, bold):
    """Rows of the same model are no rivals, and perplexity is never bold."""
    mine = row("a", temperature=0.5, path_kl=8.0, path_kl_ci95=ends, ppl=1.0, ppl_ci95=[1.0, 1.0])
    worse = row("a", path_kl=8.5, path_kl_ci95=[8.0, 9.0])
    other = row("b", path_kl=11.0, path_kl_ci95=[10.0, 12.0], ppl=9.0, ppl_ci95=[9.0, 9.0])
    (block,) = blocks_of(Content(title="", rows=[worse, mine, other]), COLUMNS)
    leads = {(e.line.label, e.row["path_kl"]): e.leads for e in block.entries}
    assert leads["a", 8.0] == ({"path_kl"} if bold else set())
    assert {key for key, found in leads.items() if not found} >= {("a", 8.5), ("b", 11.0)}
    (alone,) = blocks_of(Content(title="", rows=[mine]), COLUMNS)
    assert not alone.entries[0].leads


def test_higher_is_better_where_the_column_says_so():
    rows = [
        row("a", mauve=0.9, mauve_ci95=[0.85, 0.95]), row("b", mauve=0.5, mauve_ci95=[0.4, 0.6])
    ]  # fmt: skip
    (block,) = blocks_of(Content(title="", rows=rows), COLUMNS)
    assert [entry.leads for entry in block.entries] == [{"mauve"}, set()]


def test_low_entropy_is_doubted_against_text_or_else_against_the_plain_baseline():
    baseline = [row("t", entropy=5.0), row("t", temperature=0.5, entropy=4.0), row("t", 16)]
    rows = [row("a", entropy=4.91), row("b", entropy=4.89, ppl=3.0), row("c", 16, entropy=4.0)]
    content = Content(title="", rows=rows, baseline=baseline)
    assert doubts(content)[1:] == [
        "b, 8 steps: entropy 4.890 is 2.2% below the plain baseline's 5.000."
    ]
    assert "can lower their perplexity." in doubts(content)[0]
    real = row("valid", 32, entropy=4.5)
    found = doubts(Content(title="", rows=rows, baseline=baseline, reference=real))
    assert found[1:] == ["c, 16 steps: entropy 4.000 is 11.1% below the reference text's 4.500."]
    assert doubts(Content(title="", rows=rows)) == []
    assert any("nothing here tells" in line for line in reading(Content(title="", rows=rows)))


def test_repetition_is_doubted_too_and_marked_at_the_row(tmp_path):
    """Against the text, or else the plain baseline at its most steps; at an equal number of them.

    5% is tolerated: 0.38 and 0.63 are 5%, 0.379 and 0.631 are more.
    """
    numbers = {"fine": (0.3801, 0.6299), "few": (0.379, 0.6), "alike": (0.4, 0.631)}
    rows = [row(m, unique_4gram=u, self_bleu=b, path_kl=1.0) for m, (u, b) in numbers.items()]
    real = row("valid", unique_4gram=0.4, self_bleu=0.6)
    content = Content(title="", rows=rows, reference=real)
    expected = [
        "few, 8 steps: 4-grams 0.379 is 5.2% below {} 0.400.",
        "alike, 8 steps: Self-BLEU 0.631 is 5.2% above {} 0.600.",
    ]
    assert doubts(content)[1:] == [line.format("the reference text's") for line in expected]
    assert "can lower their path KL." in doubts(content)[0]
    assert doubts(replace(content, reference={**real, "num_samples": 9})) == []
    few = row("t", 8, unique_4gram=0.1, self_bleu=0.9)
    most = row("t", 64, unique_4gram=0.4, self_bleu=0.6)
    against = Content(title="", rows=rows, baseline=[few, most])
    found = doubts(against)[1:]
    assert [line for line in found if line[0] != "t"] == [
        line.format("the plain baseline's") for line in expected
    ]
    page, text = write_report(tmp_path, content)
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
    head, *lines = edges(Content(title="", rows=[*inside, *cold, *narrow]))
    assert lines == ["b: 8 steps (T 0.6).", "c: 8 steps (top-p 0.9)."]
    assert "a wider sweep may find better." in head
    assert "overstated" in edges(Content(title="", rows=inside, baseline=cold))[0]
    assert edges(Content(title="", rows=inside)) == []
    assert edges(Content(title="", rows=[row("a", temperature=0.6, path_kl=1.0)])) == []


def test_the_verdict_is_that_of_the_intervals_at_the_best_setting():
    def against(nfe, value, ends, **more):
        delta = {"path_kl_vs_baseline": value, "path_kl_vs_baseline_ci95": ends}
        return row("runs/s", nfe, path_kl=10 + value, **delta, **more)

    rows = [
        against(1, -2.0, [-3.0, -1.0]),
        against(1, -1.0, [-1.1, -0.9], temperature=0.9),
        against(2, -0.5, [-1.0, 0.0], entropy=4.0),
        against(4, 1.0, [0.5, 1.5]),
        against(8, 1.5, [0.5, 2.5]),
        against(16, 1.5, None),
    ]
    content = Content(title="", rows=rows, baseline=[row("t"), row("t", 2, entropy=5.0)])
    head, clause = verdict(content)
    assert "against t at equal steps" in head
    assert clause == (
        "s is better at 1 step (-2.00 [-3.00, -1.00]), not told apart at 2 steps "
        "(⚠ -0.50 [-1.00, +0.00]), worse at 4 (+1.00 [+0.50, +1.50]) and 8 steps "
        "(+1.50 [+0.50, +2.50])"
    )
    assert verdict(replace(content, rows=rows[-1:])) == []
    assert verdict(replace(content, baseline=[])) == []
    assert verdict(Content(title="", rows=[row()], baseline=[row("t")])) == []


def test_a_model_that_is_its_own_baseline_is_one_line():
    rows = [row("t", 8, vsf=1.0), row("s", 8)]
    content = Content(title="", rows=rows, baseline=[row("t", 8), row("t", 256)])
    teacher, student = lines_of(content)
    assert (teacher.is_baseline, student.is_baseline) == (True, False)
    assert teacher.budgets == [8, 256]
    assert teacher.plain(8)["vsf"] == 1.0


def test_samplers_and_seeds_of_a_model_are_told_apart():
    rows = [row("m"), {**row("m"), "sampler": "guided"}, {**row("m"), "seed": 1}, row("n")]
    labels = [line.label for line in lines_of(Content(title="", rows=rows))]
    assert labels == [
        "m · ancestral · seed 0",
        "m · guided · seed 0",
        "m · ancestral · seed 1",
        "n",
    ]


def test_options_sizes_and_weights_of_a_model_are_told_apart():
    rows = [
        {**row("m"), "options": {"kappa": 0.1, "rounds": 2}},
        {**row("m"), "options": {"kappa": 0.5, "rounds": 2}},
        {**row("m"), "options": None},
        row("n"),
        {**row("n"), "num_samples": 64},
    ]
    assert [line.label for line in lines_of(Content(title="", rows=rows))] == [
        "m · kappa 0.1, rounds 2", "m · kappa 0.5, rounds 2", "m", "n · 4 texts", "n · 64 texts",
    ]  # fmt: skip
    assert [line.label for line in lines_of(Content(title="", rows=rows[:2]))] == [
        "m · kappa 0.1", "m · kappa 0.5",
    ]  # fmt: skip
    old, new = texts_of("m", 8, "a"), texts_of("m", 8, "b")
    new = replace(new, origin=replace(new.origin, fingerprint="1" * 64))
    trained = Content(title="", rows=[row("m"), row("m")], samples=[old, new])
    assert [line.label for line in lines_of(trained)] == [
        "m · weights 00000000", "m · weights 11111111",
    ]  # fmt: skip


def test_rows_are_one_only_where_they_are_equal():
    """Two files of one model and setting; a null, or what only one row knows, is no difference."""
    first = {**row("m", ppl=3.0, vsf=None), "file": "a.jsonl"}
    second = {**row("m", ppl=3.5), "file": "b.jsonl"}
    again = row("m", ppl=3.0, vsf=0.9)
    lines = lines_of(Content(title="", rows=[first, second], baseline=[again]))
    assert [(line.label, [r["ppl"] for r in line.rows]) for line in lines] == [
        ("m", [3.0]), ("m (2)", [3.5]),
    ]  # fmt: skip
    content = Content(title="", rows=[first, second])
    assert sum(len(block.entries) for block in blocks_of(content, COLUMNS)) == 2


def test_names_are_as_short_as_they_can_be():
    assert short_names(["/home/x/runs/a", "runs/b"]) == {"/home/x/runs/a": "a", "runs/b": "b"}
    assert short_names(["x/a/1", "x/b/1"]) == {"x/a/1": "a/1", "x/b/1": "b/1"}
    assert short_names(["a", "./a"]) == {"a": "a", "./a": "./a"}
    assert short_names([]) == {}


def test_texts_stand_between_few_and_most_steps_of_the_baseline():
    sets = [texts_of(m, n, "x") for m in ("a", "b", "c") for n in (16, 8)]
    sets += [texts_of("t", n, "x") for n in (8, 256, 16)]
    sets.insert(0, texts_of("a", 8, "cold", temperature=0.5))
    shown = side_by_side(Content(title="", rows=[], baseline=[row("t")], samples=sets))
    assert [(side.label, side.steps) for side in shown.sides] == [
        ("t", "8 steps"), ("a", "8 steps"), ("b", "8 steps"), ("t", "256 steps"),
    ]  # fmt: skip
    assert "Not shown: c." in shown.note
    alone = side_by_side(Content(title="", rows=[], samples=sets[:3]))
    assert [side.steps for side in alone.sides] == ["8 steps", "16 steps"]
    other = [texts_of("a", 8, "x", seed=1), texts_of("b", 8, "x", seed=2)]
    assert "seeds differ" in side_by_side(Content(title="", rows=[], samples=other)).note


def test_models_without_texts_say_so():
    content = Content(title="", rows=[row()], samples=[texts_of("a", 8, "", " ")])
    assert side_by_side(content).sides == ()
    assert "no tokenizer" in side_by_side(content).note


@pytest.mark.parametrize("text", ["word " * 400, "x" * 2000, "长" * 900, "a b\n\n" * 300])
def test_a_long_text_is_cut_without_losing_a_character(text):
    head, rest = cut(text)
    assert HEAD / 2 < len(head) <= HEAD
    assert "".join((head + rest).split()) == "".join(text.split())
    assert cut("short ") == ("short", "")
    assert cut("a\x00b\ud800") == ("a\ufffdb\ufffd", "")


@pytest.mark.filterwarnings("error")
def test_the_page_stands_alone_and_nothing_breaks_out_of_it(tmp_path):
    """Parsed by another library: tags in balance, no script, nothing fetched, the text intact."""
    pytest.importorskip("matplotlib")
    path, _ = write_report(tmp_path, full(HOSTILE))
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


def test_markdown_shows_the_same_text_and_nothing_more(tmp_path):
    """Rendered by another library, tables included."""
    markdown_it = pytest.importorskip("markdown_it")
    _, path = write_report(tmp_path, full(HOSTILE))
    rendered = (
        markdown_it.MarkdownIt("commonmark")
        .enable("table")
        .render(path.read_text(encoding="utf-8"))
    )
    page = Page(rendered)
    assert page.tags["script"] == page.tags["a"] == page.tags["code"] - 1 == 0
    assert "".join(page.text).count(HOSTILE) >= 4
    assert html.escape(HOSTILE, quote=False).replace('"', "&quot;") in rendered
    widths = [len(re.findall(r"<t[dh][ >]", line)) for line in rendered.split("<tr>")]
    assert set(widths[1:]) == {3 + len(main_columns(full())), 3}, "a pipe has made a cell"
    images = [value for name, value in page.attributes if name == "src"]
    assert images
    assert all((tmp_path / image).is_file() for image in images)


def test_equal_numbers_make_equal_files_and_old_plots_go(tmp_path):
    pytest.importorskip("matplotlib")
    write_report(tmp_path, full())
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert set(before) == {
        "report.html", "report.md", "report-nfe.png", "report-path-kl.png", "report-frontier.png",
    }  # fmt: skip
    write_report(tmp_path, full())
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    (tmp_path / "report-mine.png").touch()
    write_report(tmp_path, Content(title="", rows=[row(entropy=4.0)]))
    assert sorted(path.name for path in tmp_path.glob("*.png")) == [
        "report-mine.png", "report-nfe.png",
    ]  # fmt: skip
    with pytest.raises(UserError, match="nothing to report"):
        write_report(tmp_path / "new", Content(title="", rows=[]))
    assert not (tmp_path / "new").exists()


@pytest.mark.filterwarnings("error")
def test_plots_have_the_rows_numbers(monkeypatch):
    pytest.importorskip("matplotlib")
    import didi_instruct.evaluation.report.plots as module

    figures, as_png = [], module.as_png
    monkeypatch.setattr(module, "as_png", lambda figure: figures.append(figure) or as_png(figure))
    content = full()
    plots, notes = draw_plots(content)
    assert [plot.name for plot in plots] == ["path-kl", "nfe", "frontier"]
    assert notes == []
    for figure, field, kls in ((figures[1], "ppl", 0), (figures[0], "path_kl", 3)):
        scale = 10 if field == "ppl" else 1
        expected = {
            tuple((n, scale * (200 / n - kls)) for n in (4, 8, 16)),
            tuple((n, scale * (100 / n - kls)) for n in (4, 8)),
        }
        drawn = {
            tuple(zip(line.get_xdata(), line.get_ydata(), strict=True))
            for line in figure.axes[0].lines
            if line.get_marker() != "None"
        }
        assert drawn == expected
    assert [axis.get_title("left") for axis in figures[2].axes] == [
        "4 steps",
        "8 steps",
        "16 steps",
    ]
    best = {(4.95, 10 * (100 / 4 - 3)), (4.93, 10 * (100 / 4 - 2)), (5.0, 250.0)}
    curves = [set(zip(*line.get_data(), strict=True)) for line in figures[2].axes[0].lines]
    assert sum(curve < best and len(curve) == 2 for curve in curves) == 2
    assert len({axis.get_ylim() for axis in figures[2].axes}) == 1, "panels share their axes"


def test_plots_take_the_colours_of_the_page_and_are_whole():
    pytest.importorskip("matplotlib")
    plots, _ = draw_plots(full(HOSTILE))
    page = Path(sys.modules[write_report.__module__].__file__).with_name("page.html")
    known = set(re.findall(r"(--\w+):", page.read_text(encoding="utf-8")))
    for plot in plots:
        for svg in plot.svgs:
            tree = ElementTree.fromstring(
                svg.replace("<svg", '<svg xmlns:xlink="http://www.w3.org/1999/xlink"', 1)
            )
            assert tree.tag == "svg"
            assert not re.search(r"(fill|stroke): #", svg), "a colour that the dark does not change"
            assert set(re.findall(r"var\((--\w+)\)", svg)) <= known
            words = "".join(text.text or "" for text in tree.iter("text"))
            assert "script> | `x` **b** $a" in words
        assert plot.png[:8] == b"\x89PNG\r\n\x1a\n"
    formula = draw_plots(full("$x_1$"))[0][0].svgs[0]
    assert ">$x_1$</text>" in formula, "a name is no formula"


@pytest.mark.parametrize(("ppl", "drawn"), [(30.0, True), (0.5, False)])
def test_a_reference_that_would_flatten_the_plot_is_told_instead(ppl, drawn):
    pytest.importorskip("matplotlib")
    content = replace(full(), reference=row("valid", ppl=ppl, entropy=4.99))
    (_, steps, frontier), _ = draw_plots(content)
    assert ("Perplexity of the reference text is far off: 0.5." in steps.caption) is not drawn
    assert "Dashed" in steps.caption, "its entropy is near"
    assert ("Star" in frontier.caption) is drawn


def test_the_share_at_the_best_setting_is_drawn_where_it_is_known():
    pytest.importorskip("matplotlib")
    rows = [row(path_kl=2.0, gap_closed=0.5, gap_closed_best=0.75), row("b", path_kl=1.0)]
    (plot,), _ = draw_plots(Content(title="", rows=rows))
    assert "Gap closed, student: 0.75 at 8 steps." in plot.alt


def test_what_cannot_be_drawn_is_explained():
    pytest.importorskip("matplotlib")
    plots, notes = draw_plots(Content(title="", rows=[row(entropy=4.0)]))
    assert [plot.name for plot in plots] == ["nfe"]
    assert "Perplexity was not measured" in plots[0].caption
    assert ["path KL" in notes[0], "--frontier" in notes[1]] == [True, True]
    plots, notes = draw_plots(Content(title="", rows=[row(ppl=4.0)]))
    assert plots == []
    assert "metric entropy" in notes[1]
    negative = [row(nfe=n, path_kl=-2.0, path_kl_exact=False, path_kl_ci95=None) for n in (1, 8)]
    plots, _ = draw_plots(Content(title="", rows=negative))
    assert [plot.name for plot in plots] == ["path-kl"]


def test_without_matplotlib_the_report_names_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    page, text = write_report(tmp_path, full())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "report.md"]
    assert 'pip install "didi-instruct[eval]"' in html.unescape(page.read_text())
    assert "didi-instruct&#91;eval&#93;" in text.read_text()


def git(folder, *words):
    subprocess.run(["git", "-C", folder, *words], check=True, capture_output=True)


def test_a_commit_is_named_only_where_git_keeps_the_package(tmp_path):
    try:
        git(tmp_path, "init")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("git is not there")
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    who = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
    git(tmp_path, *who, "commit", "--allow-empty", "-m", "x")
    assert commit(package) is None, "an installed package inside of another repository"
    git(tmp_path, "add", ".")
    git(tmp_path, *who, "commit", "-m", "y")
    head = subprocess.check_output(["git", "-C", tmp_path, "rev-parse", "HEAD"], text=True)
    assert commit(package) == head[:12]
    (package / "__init__.py").write_text("x = 1")
    assert commit(package) == f"{head[:12]}, with changes"
    assert commit(tmp_path / "nowhere") is None


def test_provenance_tells_versions_and_no_places():
    found = provenance()
    assert found["torch"] == torch.__version__
    assert found["didi-instruct"] == didi_instruct.__version__
    assert found["date"].endswith("UTC")
    assert versions().items() <= found.items(), "an evaluation's JSON names them alike"
    assert not any(re.search(r"(^|\s)/\w", value) for value in found.values())
    assert str(Path.home()) not in str(found)


@pytest.mark.parametrize("width", [60, 80, 120, 300])
def test_a_terminal_shows_what_fits_and_names_the_rest(width):
    """Perplexity and entropy always stand together; nothing is wider than the window but they."""
    lines = render_terminal(full(), width)
    start = next(i for i, line in enumerate(lines) if line.startswith("model"))
    head = lines[start]
    table = [line for line in lines[start:] if line[:1].islower() and line != "why student"]
    assert {"ppl", "entropy"} <= set(head.split())
    assert len({len(line) for line in table}) == 1, "aligned"
    bare = render_terminal(full(), 0)
    narrowest = len(next(line for line in bare if line.startswith("model")))
    assert len(head) <= max(width, narrowest)
    left = [line for line in lines if line.startswith("In the report, for want of room")]
    assert bool(left) == ("path KL" not in head or "Δ path KL" not in head)
    assert "teacher, baseline (best: T 0.9" in "\n".join(table)
    assert table[-1].split()[0] == "valid"
    assert any("student is better at 4" in line for line in lines[:start])
    assert "why student" in lines


def test_a_terminal_marks_rows_that_mislead():
    low = measured("student", 8, 5.0, entropy=3.0)
    content = Content(title="t", rows=[low], reference=row("valid", ppl=20.0, entropy=5.0))
    lines = render_terminal(content, 120)
    assert any(line.startswith("student ⚠") for line in lines)
    assert any(line.startswith("⚠ Low variety") for line in lines)


def test_how_long_texts_are_is_shown_where_they_end_before_their_window():
    def told(**lengths):
        content = Content(title="", rows=[row("m", length=32, **lengths)])
        return [c.title for c in main_columns(content)], facts(content)

    columns, found = told(mean_length=20.25, mean_length_ci95=[19.0, 21.0])
    assert columns[-1] == "length"
    assert "up to 32 tokens each" in found
    for lengths in ({"mean_length": 32.0}, {}):
        columns, found = told(**lengths)
        assert "length" not in columns
        assert "32 tokens each" in found
