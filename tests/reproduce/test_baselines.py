"""Rivals: who is measured and how, what is best by hand, what the log says of time, the plot."""

import json
import math
from dataclasses import replace
from itertools import pairwise
from statistics import fmean

import numpy as np
import pytest
import yaml

from didi_instruct.errors import UserError
from didi_instruct.evaluation.judges import OracleJudge
from didi_instruct.evaluation.measuring import Measured
from didi_instruct.reproduce import baseline_rows, baselines
from didi_instruct.reproduce.baseline_rows import (
    ABOVE,
    BASELINE,
    METRICS,
    STREAMS,
    WAYS,
    compared,
    settings_of,
    way_rows,
    with_values,
)
from didi_instruct.reproduce.baselines import BASELINE_ITEMS
from didi_instruct.reproduce.baselines_figure import draw_baselines
from didi_instruct.reproduce.experiments import command, make, write_only
from didi_instruct.reproduce.figures import PALETTE
from didi_instruct.reproduce.findings import (
    at_the_edge,
    gains,
    less_varied,
    of_like_lengths,
    of_other_lengths,
    summary,
    winners,
    without_vsf,
)
from didi_instruct.reproduce.jobs import Context
from didi_instruct.reproduce.measure import Found, Terms
from didi_instruct.reproduce.methods import PATH_FIRST, STUDENTS
from didi_instruct.reproduce.minutes import (
    DIDI,
    SHARED,
    bank_minutes,
    learning,
    training_minutes,
    training_texts,
    with_minutes,
)
from didi_instruct.reproduce.running import finished
from didi_instruct.reproduce.scale import Given, Training
from didi_instruct.reproduce.scales import find_scale
from didi_instruct.sampling.registry import SAMPLERS

from .kit import measuring_jobs, table_of
from .small_models import LANGUAGE, config_of, save, save_letters

ROLES = {way.role for way in WAYS}
SETTING = ("method", "nfe", "temperature", "top_p")


# Who is measured


def test_what_a_user_would_try_is_there():
    tried = {way.sampler for way in WAYS if way.role == "teacher"}
    assert {None, "confidence", "entropy", "margin", "remasking", "first-hitting"} <= tried
    assert any(way.options.get("order") == "streams" for way in WAYS)
    assert {"teacher", "ar", "sdtt", "dimo", "duo", "didi"} <= ROLES
    kinds = {"ar": "ar", "duo": "duo", "duo-teacher": "duo"}
    for way in WAYS:
        if way.sampler is not None:
            assert SAMPLERS[way.sampler].kind == kinds.get(way.role, "mdlm")


def test_a_model_that_another_one_began_as_is_not_sampled():
    found = settings_of({"teacher": "t", "path-first": "p", "path": "q"}, (4,))
    assert {setting.source for setting in found} == {"t", "q"}
    with pytest.raises(AssertionError, match="nobody"):
        settings_of({"teacher": "t", "nobody": "n"}, (4,))


def test_all_have_the_same_budgets_and_the_same_sweep():
    """The baselines have many steps too, and the plain one those that guidance takes in passes."""
    found = settings_of(
        {role: role for role in ROLES}, (4, 8), temperatures=(0.9,), top_ps=(0.8,), most_steps=32,
        costly=(18,),
    )  # fmt: skip
    sweep = [(1.0, 1.0), (0.9, 1.0), (1.0, 0.8)]
    more = {BASELINE: [18, 32], STREAMS: [32]}
    for way in WAYS:
        mine = [s for s in found if s.method == way.method]
        budgets = [None] if way.own_steps else [4, 8, *more.get(way.method, ())]
        above = [(ABOVE, 1.0)] if way.method in more else []
        if way.method == "MDLM, token by token":
            assert [(s.steps, s.temperature, s.top_p) for s in mine] == [(None, 1.0, 1.0)]
            continue
        assert sorted((s.steps or 0, (s.temperature, s.top_p)) for s in mine) == sorted(
            (nfe or 0, point) for nfe in budgets for point in (*sweep, *above)
        )


def test_what_learns_to_take_few_steps_is_measured_there():
    """Beside the baselines and all others that were trained, whose samplers take one step too."""
    found = settings_of({role: role for role in ROLES}, (4,), few=(1, 2))
    at_one = {s.method for s in found if s.steps == 1}
    trained = {way.method for way in WAYS if way.role != "teacher" and not way.own_steps}
    assert at_one == trained | {BASELINE, STREAMS}
    assert sorted(s.steps for s in found if s.method == "DiMO") == [1, 2, 4]


def test_some_rivals_alone_bring_what_they_start_from(tmp_path):
    """DUO its teacher, token matching the student before it, with equal minutes too."""
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "a b"}\n')
    whole = find_scale("small", Given(data=str(text), teacher="somewhere", judge="other"))
    some = whole.with_rivals(["duo", "token-matching"])
    assert set(some.rivals) == {"duo", "duo-teacher", "path", "token-matching"}
    assert set(some.left_out) == {"ar", "sdtt", "dimo", "jump"}
    assert some.model("duo").key == whole.model("duo").key
    assert some.model("token-matching").key == whole.model("token-matching").key
    (item,) = BASELINE_ITEMS
    for scale in (some, with_minutes(some, 1, dict.fromkeys((*STUDENTS, DIDI), 2.0))):
        inputs = {role for job in measuring_jobs(item, scale) for role in job.inputs}
        assert {"teacher", "didi", "judge", "duo", "duo-teacher"} <= inputs
        assert not inputs & set(some.left_out)
        (words,) = [note for note in table_of(item, scale, {}).notes if "--rivals" in note]
        assert words == "Left out by --rivals: ar, jump, sdtt, dimo."
        told = command(item, scale)
        assert told.endswith("--rivals duo-teacher,path,token-matching,duo"), told
        assert whole.with_rivals(told.rpartition(" ")[2].split(",")) == some
    assert command(item, whole).find("--rivals") == -1


@pytest.mark.parametrize(("names", "words"), [(["sdt"], "--rivals sdt: at"), ([], "--rivals : at")])
def test_a_rival_that_nobody_knows_is_refused_with_those_there_are(names, words):
    with pytest.raises(UserError, match=f"{words}.* there are ar, duo-teacher, jump"):
        find_scale("toy", Given()).with_rivals(names)


def test_a_budget_is_not_drawn_twice():
    found = settings_of({"teacher": "t"}, (4, 8), few=(2,), costly=(8, 16), most_steps=16)
    for method, budgets in ((BASELINE, [2, 4, 8, 16]), (STREAMS, [2, 4, 8, 16])):
        assert [s.steps for s in found if s.method == method] == budgets


def test_mauve_is_that_of_plain_settings():
    found = settings_of({"teacher": "t"}, (4,), temperatures=(0.9,), top_ps=(0.9,))
    for setting in found:
        plain = (setting.temperature, setting.top_p) == (1.0, 1.0)
        assert ("mauve" in setting.without) == (not plain)


def test_a_student_of_dimo_starts_as_it_was_distilled(tmp_path):
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({"dimo": {"random": 0.25, "noise": 0.5}}))
    models = {"teacher": "t", "dimo": str(tmp_path)}
    (student,) = [s for s in settings_of(models, (2,)) if s.method == "DiMO"]
    assert student.options == {"random": 0.25, "noise": 0.5}
    (student,) = [s for s in settings_of(models | {"dimo": "hub/id"}, (2,)) if s.method == "DiMO"]
    assert student.options == {}


def test_many_steps_have_a_model_of_their_own_where_there_is_one():
    models = {"teacher": "t", "didi": "few", "didi-late": "many"}
    found = settings_of(models, (8, 32), late_from=32)
    assert {s.steps: s.source for s in found if s.more["role"] == "didi"} == {8: "few", 32: "many"}
    assert {s.source for s in found if s.more["role"] == "teacher"} == {"t"}


def test_without_a_teacher_there_is_nothing_to_compare_with():
    with pytest.raises(UserError, match="need a teacher"):
        settings_of({"sdtt": "s"}, (4,))


# Numbers

HEATS = (0.7, 0.6, 0.5)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Random ones; the student is a copy of the teacher."""
    folder = tmp_path_factory.mktemp("models")
    masked = {role: save(folder / role, config_of()) for role in ("teacher", "sdtt", "dimo")}
    kinds = {"ar": "ar", "duo": "duo", "duo-teacher": "duo"}
    others = {role: save(folder / role, config_of(kind)) for role, kind in kinds.items()}
    others["didi"] = save(folder / "didi", config_of(), discriminator=True, steers=0.01)
    for role, steps in (("sdtt", 30), ("duo", 30), ("duo-teacher", 60)):
        write_log(folder / role, {"step": steps, "iterations_per_second": 0.5})
    train = {"train": {"steps": 60, "batch_size": 8}}
    (folder / "sdtt" / "recipe.yaml").write_text(yaml.safe_dump(train))
    return masked | others


@pytest.fixture(scope="module")
def drawn(models, tmp_path_factory):
    """Rows of every way to sample them, each by itself, as a job keeps them."""
    terms = Terms(
        out=tmp_path_factory.mktemp("kept"), judge=OracleJudge(LANGUAGE), metrics=METRICS, num=8,
        device="cpu",
    )  # fmt: skip
    sweep = {"temperatures": HEATS, "most_steps": 16, "costly": (6,)}
    ways = [way.method for way in WAYS if way.role in models]
    rows = [row for method in ways for row in way_rows(method, models, (2, 4), terms, **sweep)]
    return json.loads(json.dumps(rows, allow_nan=False))


@pytest.fixture(scope="module")
def rows(drawn):
    return compared(drawn, 16)


def of(rows, method, nfe=None):
    return [row for row in rows if row["method"] == method and nfe in (None, row["nfe"])]


def test_a_student_that_is_its_teacher_gains_nothing(rows):
    at = ("nfe", "temperature", "top_p")
    owns = {tuple(row[name] for name in at): row for row in of(rows, "MDLM, ancestral")}
    for copy in of(rows, "SDTT"):
        own = owns[tuple(copy[name] for name in at)]
        for name in ("ppl", "entropy", "path_kl", "self_bleu", "unique_4gram"):
            assert copy[name] == own[name]
        assert copy["path_kl_vs_baseline"] == own["path_kl_vs_baseline"] >= 0
    assert [row["vsf"] for row in of(rows, "SDTT")] == pytest.approx([1] * 2 * (1 + len(HEATS)))
    for nfe in (2, 4):
        assert min(row["path_kl_vs_baseline"] for row in of(rows, BASELINE, nfe)) == 0
    assert all(row["is_baseline"] == (row["method"] == "MDLM, ancestral") for row in rows)


def test_every_row_stands_beside_the_teacher_in_streams_too(rows):
    """The second baseline lies on its own frontier and closes nothing of its own gap."""
    for nfe in (2, 4):
        streams = of(rows, "MDLM, streams order", nfe)
        assert [row["streams_vsf"] for row in streams] == pytest.approx([1] * len(streams))
        assert len(streams) == 1 + len({*HEATS, ABOVE})
        best = min(row["path_kl"] for row in streams)
        plain = of(rows, "MDLM, ancestral", nfe)
        for row in (*streams, *plain):
            assert row["streams_path_kl_vs_baseline"] == pytest.approx(row["path_kl"] - best)
    assert not any("streams_passes" in name or "streams_vsf_passes" in name for name in rows[0])


def by_hand(rows, nfe, row):
    """Perplexity over that of the line between the baseline's neighbours in entropy."""
    line = sorted((r["entropy"], math.log(r["ppl"])) for r in of(rows, BASELINE, nfe))
    (low, left), (high, right) = next(
        pair for pair in pairwise(line) if pair[0][0] <= row["entropy"] <= pair[1][0]
    )
    share = (row["entropy"] - low) / (high - low)
    return row["ppl"] / math.exp((1 - share) * left + share * right)


@pytest.mark.parametrize("method", ["DiDi-Instruct", "DiDi-Instruct, h 10"])
@pytest.mark.parametrize(("nfe", "rival"), [(2, 6), (4, 16)])
def test_guidance_is_paid_at_equal_passes(rows, method, nfe, rival):
    """Two guided steps cost more than six of the baseline, and four more than sixteen do.

    (Of its steps the last ones reveal nothing of some texts, and are not run.)
    """
    row = of(rows, method, nfe)[0]
    costs = {n: max(r["passes"] for r in of(rows, BASELINE, n)) for n in (2, 4, 6, 16)}
    assert max(n for n, cost in costs.items() if cost <= row["passes"]) == rival
    assert (row["temperature"], row["path_kl"]) == (1.0, None)
    assert row["vsf"] == pytest.approx(by_hand(rows, nfe, row))
    assert row["vsf_passes"] == pytest.approx(by_hand(rows, rival, row))
    assert row["vsf"] != pytest.approx(row["vsf_passes"])
    for plain in of(rows, "DiDi-Instruct, unguided", nfe):
        assert plain["vsf_passes"] == plain["vsf"], "equal passes are equal NFE without guidance"


def test_costs_stand_beside_the_quality(rows):
    """Thirty steps at half a step per second are a minute."""
    assert {row["training_minutes"] for row in of(rows, "SDTT")} == {1.0}
    assert {row["training_minutes"] for row in of(rows, "DiMO")} == {None}
    assert {row["chain_minutes"] for row in of(rows, "SDTT")} == {1.0}
    assert {row["training_texts"] for row in of(rows, "SDTT")} == {60 * 8}
    assert {row["chain_minutes"] for row in of(rows, "DUO distilled")} == {3.0}, "1 + 2"
    assert {(row["num_samples"], row["seed"]) for row in rows} == {(8, 0)}
    assert {row["nfe"] for row in of(rows, "AR, the same trunk")} == {32}


def test_numbers_of_samples_stand_for_the_samples(drawn, rows):
    """Perplexity, entropy and path KL follow from what is kept, to the digits that are kept."""
    for kept, row in zip(drawn, rows, strict=True):
        values, known = kept["values"], {"ppl", "entropy"}
        assert "values" not in row
        nats = sum(values["nats"]) / sum(values["tokens"])
        assert math.exp(nats) == pytest.approx(row["ppl"], rel=1e-5)
        assert fmean(values["entropy"]) == pytest.approx(row["entropy"], rel=1e-5)
        if row["path_kl"] is not None:
            assert fmean(values["path_gap"]) == pytest.approx(row["path_kl"], rel=1e-4)
        assert known <= row.keys()


def test_texts_that_a_judge_finds_impossible_stay_so():
    """JSON has no infinity, so that it is null there."""
    row = with_values({"ppl": 1.0}, {"nats": np.array([1.0, np.inf]), "tokens": np.array([3.0, 4])})
    assert row["values"] == {"nats": [1.0, None], "tokens": [3.0, 4.0]}
    assert json.loads(json.dumps(row, allow_nan=False)) == row


def test_intervals_are_of_the_seed_that_rows_name(drawn, rows):
    """As those of the same rows measured by themselves, whose resamples it also seeds."""
    (other, *_) = of(compared([row | {"bootstrap_seed": 5} for row in drawn], 16), "DiMO", 2)
    (usual, *_) = of(rows, "DiMO", 2)
    assert other["path_kl_best"] == usual["path_kl_best"]
    assert other["path_kl_best_ci95"] != usual["path_kl_best_ci95"]


def test_the_spread_of_lengths_is_that_of_the_judged_tokens(drawn):
    """Four of 10 and four of 22 tokens: 6 from their mean; none where nobody counted."""
    lengths = [10, 22] * 4
    first = drawn[0] | {"values": drawn[0]["values"] | {"tokens": lengths}}
    bare = {n: v for n, v in drawn[1]["values"].items() if n != "tokens"}
    found = compared([first, drawn[1] | {"values": bare}, *drawn[2:]], 16)
    assert found[0]["length_spread"] == pytest.approx(6 * (8 / 7) ** 0.5)
    assert found[1]["length_spread"] is None


def test_a_lost_way_leaves_the_others_as_they_are(drawn, rows):
    """Any but the baseline, without which nothing can be compared."""
    some = [row for row in drawn if row["method"] not in (STREAMS, "DiMO")]
    for row in compared(some, 16):
        (whole,) = [other for other in rows if all(other[n] == row[n] for n in SETTING)]
        lost = {name for name in whole if name.startswith("streams_")}
        assert row == {name: value for name, value in whole.items() if name not in lost}
    with pytest.raises(ValueError, match="MDLM, ancestral is missing"):
        compared([row for row in drawn if row["method"] != BASELINE], 16)


def test_a_judge_of_its_own_samples_has_no_place_on_a_frontier(models, tmp_path):
    """Its numbers are taken away before: those of its samples count no more either."""
    terms = Terms(out=tmp_path, judge=OracleJudge(LANGUAGE), metrics=METRICS, num=8, device="cpu")
    sweep = {"temperatures": HEATS, "most_steps": 32}  # as many as AR takes
    drawn = [
        row
        for method in (BASELINE, "AR, the same trunk")
        for row in way_rows(method, models, (2,), terms, **sweep)
    ]
    names = ("vsf", "vsf_best", "path_kl_best")
    judged = of(compared(drawn, 32), "AR, the same trunk")
    assert all(any(row.get(name) is not None for row in judged) for name in names)
    bare = {"ppl": None, "ppl_ci95": None, "path_kl": None, "path_kl_ci95": None}
    drawn = [row | bare if row["role"] == "ar" else row for row in drawn]
    for row in of(compared(drawn, 32), "AR, the same trunk"):
        assert not {name: row[name] for name in (*names, "vsf_best_note") if row.get(name)}


def test_models_of_other_tokens_or_lengths_are_refused(models, tmp_path):
    """Each way is drawn by itself, and looked at beside the teacher for that alone."""
    letters = save_letters(tmp_path / "letters")
    short = save(tmp_path / "short", config_of(length=24))
    terms = Terms(out=tmp_path / "kept", judge=OracleJudge(LANGUAGE), metrics=METRICS, num=2)
    for other, words in ((letters, "do not belong in one table"), (short, "24 tokens and")):
        with pytest.raises(UserError, match=words):
            way_rows("SDTT", models | {"sdtt": other}, (2,), terms)
    assert not (tmp_path / "kept").exists(), "before anything is drawn"


def test_all_ways_are_measured_beside_the_teacher(models, tmp_path, monkeypatch):
    """What MAUVE reads depends on whether any model of the table has windows of its own."""
    asked = []

    def note(settings, terms, beside=()):
        asked.append(beside)
        return Found(settings, [Measured({"ppl": 1.0}) for _ in settings])

    monkeypatch.setattr(baseline_rows, "measure", note)
    terms = Terms(out=tmp_path, judge=OracleJudge(LANGUAGE), metrics=METRICS, num=2)
    way_rows("DUO distilled", models, (2,), terms)
    assert asked == [[models["teacher"]]]


# The whole table


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A scale of seconds: random teacher, students of two steps, two seeds."""
    folder = tmp_path_factory.mktemp("tiny")
    toy = find_scale("toy", Given(seeds=2))
    brief = ("train.steps=2", "train.batch_size=4", "train.save_every=2", "optim.warmup=0")
    didi = ("discriminator.warmup=1", "discriminator.chance=0", "reference.rows=8")
    training = toy.models["sdtt"]
    sdtt = Training(training.recipe, (*training.overrides, *brief, "sdtt.iterations=1"))
    return folder, replace(
        toy, teacher=save(folder / "teacher", config_of()), models={"sdtt": sdtt},
        ablation=(*toy.ablation, *brief, *didi, "reference.steps=2"),
        among_rivals=("optim.lr=2e-5",), budgets=(2,), few=(1,), costly=(3,), most_steps=6,
        samples=8, temperatures=(0.7,), top_ps=(0.9,),
    )  # fmt: skip


@pytest.fixture(scope="module")
def whole(tiny):
    folder, scale = tiny
    outcome = make(BASELINE_ITEMS, scale, folder / "out", device="cpu")
    assert outcome.whole, (outcome.failures, outcome.made[0].error)
    return outcome.made[0].table


def test_the_table_has_all_that_the_scale_asks_for(tiny, whole):
    _, scale = tiny
    wanted = settings_of(
        {role: role for role in ("teacher", "sdtt", "didi")}, scale.budgets, few=scale.few,
        costly=scale.costly, most_steps=scale.most_steps, temperatures=scale.temperatures,
        top_ps=scale.top_ps,
    )  # fmt: skip
    asked = {(s.method, s.steps or 32, s.temperature, s.top_p) for s in wanted}
    for seed in (0, 1):
        rows = [row for row in whole.sweep if row["seed"] == seed]
        assert {tuple(row[name] for name in SETTING) for row in rows} == asked
        assert len(rows) == len(wanted)
        assert all(row["num_samples"] == 8 and row["self_bleu"] is not None for row in rows)
        for row in of(rows, "SDTT", 2):
            assert row["gap_closed"] is not None
            assert row["vsf_best"] is not None or row["vsf_best_note"]
            assert row["training_minutes"] > 0
            assert row["streams_gap_closed"] is not None
    first, second = ([row for row in whole.sweep if row["seed"] == seed] for seed in (0, 1))
    assert [row["ppl"] for row in first] != [row["ppl"] for row in second]


def test_each_seed_stands_beside_the_baseline_of_its_own(whole):
    for seed in (0, 1):
        rows = [row for row in whole.sweep if row["seed"] == seed]
        best = min(row["path_kl"] for row in of(rows, BASELINE, 2))
        for row in of(rows, "SDTT", 2):
            assert row["path_kl_vs_baseline"] == pytest.approx(row["path_kl"] - best)


def test_every_plain_row_has_a_speed_and_no_other(whole):
    """Students that are sampled as the teacher have its own; those of the second seed too."""
    rates = {}
    for row in whole.sweep:
        plain = (row["temperature"], row["top_p"]) == (1, 1)
        timed = plain and row["nfe"] != 3  # drawn to compare passes alone
        assert (row["tokens_per_second"] is None) == (not timed)
        assert (row["machine"] is None) == (not timed)
        if timed:
            rates.setdefault((row["method"], row["nfe"]), set()).add(row["tokens_per_second"])
    assert all(len(each) == 1 for each in rates.values())
    for method in ("SDTT", "DiDi-Instruct, unguided"):
        assert rates[method, 2] == rates[BASELINE, 2]
    assert rates["DiDi-Instruct", 2] == rates["DiDi-Instruct, h 10", 2] != rates[BASELINE, 2]


def test_speeds_are_those_of_the_first_seeds_models(tiny, monkeypatch):
    """Each job has the model that it times, and counts tokens as the table does."""
    _, scale = tiny
    jobs = [job for job in measuring_jobs(BASELINE_ITEMS[0], scale) if "methods" in job.options]
    assert [job.name for job in jobs] == ["speed-teacher", "speed-didi"]
    assert jobs[1].inputs["didi"].key == scale.rival("ablation-all-tricks", 0).key
    seen = []

    def note(settings, **options):
        seen.append((settings, options))
        return []

    monkeypatch.setattr(baseline_rows, "time_settings", note)
    sources = {"teacher": "t", "didi": "d"}
    context = Context(folder=None, shared=None, inputs=sources, results={}, device="cpu")
    for until_eot in (True, False):
        baseline_rows.speeds(context, **{**jobs[1].options, "until_eot": until_eot})
        settings, options = seen.pop()
        assert {setting.source for setting in settings} == {"d"}
        assert {setting.method for setting in settings} == {"DiDi-Instruct"}
        assert (options["until_eot"], options["device"]) == (until_eot, "cpu")


def test_the_figure_is_of_the_first_seed(tiny, whole, monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(baselines, "as_png", lambda figure: b"")
    monkeypatch.setattr(baselines, "draw_baselines", lambda rows, title: seen.append((rows, title)))
    BASELINE_ITEMS[0].draw(tiny[1], whole, tmp_path / "a.png")
    ((rows, title),) = seen
    assert {row["seed"] for row in rows} == {0}
    assert "seed 0" in title


def test_didi_among_the_rivals_is_tuned_as_they_are(tiny):
    _, scale = tiny
    job = scale.rival("ablation-all-tricks", 0)
    assert job.settings().optim.lr == 2e-5
    assert scale.ablated("ablation-all-tricks", 0).settings().optim.lr != 2e-5
    assert job.name == "didi-seed0"
    used = {
        given.key
        for one in measuring_jobs(BASELINE_ITEMS[0], scale)
        for role, given in one.inputs.items()
        if role == "didi"
    }
    assert used == {scale.rival("ablation-all-tricks", seed).key for seed in scale.seeds}


def test_rivals_of_stories_have_the_rates_that_were_best(tmp_path):
    """Of those in docs/log.md; the ablations keep theirs."""
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "a b"}\n')
    small = find_scale("small", Given(data=str(text), teacher="somewhere"))
    assert small.rival("ablation-all-tricks", 0).settings().optim.lr == 3e-5
    assert small.ablated("ablation-all-tricks", 0).settings().optim.lr == 1e-4
    dimo = small.model("dimo").settings()
    assert (dimo.optim.lr, dimo.dimo.aux_lr) == (2e-4, 1e-3)


def results_of(tiny, whole, *lost):
    """Results of the jobs that made the table, but for some."""
    folder, scale = tiny
    jobs = measuring_jobs(BASELINE_ITEMS[0], scale)
    return {job.key: finished(job, folder / "out").result for job in jobs if job.name not in lost}


def test_a_seed_without_its_baseline_is_left_out(tiny, whole):
    """The other one has its table; without any baseline there is none."""
    lost = ("baselines-mdlm-ancestral-seed1", "baselines-sdtt-seed0")
    table = table_of(BASELINE_ITEMS[0], tiny[1], results_of(tiny, whole, *lost))
    assert {row["seed"] for row in table.sweep} == {0}
    assert not of(table.sweep, "SDTT")
    lost = [f"baselines-mdlm-ancestral-seed{seed}" for seed in (0, 1)]
    with pytest.raises(ValueError, match="MDLM, ancestral is missing"):
        table_of(BASELINE_ITEMS[0], tiny[1], results_of(tiny, whole, *lost))
    assert table_of(BASELINE_ITEMS[0], tiny[1], {}).rows == []


def test_token_matching_waits_for_the_student_it_began_as_alone(tmp_path):
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "a b"}\n')
    small = find_scale("small", Given(data=str(text), teacher="somewhere"))
    paced = with_minutes(small, 1, dict.fromkeys((*STUDENTS, DIDI), 2.0))
    for scale, began in ((small, "path"), (paced, PATH_FIRST)):
        (inputs, *_) = [
            job.inputs
            for job in measuring_jobs(BASELINE_ITEMS[0], scale)
            if "token-matching" in job.inputs
        ]
        assert set(inputs) == {"teacher", "token-matching", began, "judge"}


def made(method, nfe, temperature, ppl, vsf, path_kl, own_steps=False, seed=0, wide=0.2):
    ends = {
        f"{name}_ci95": None if value is None else [value - wide, value + wide]
        for name, value in (("vsf", vsf), ("path_kl", path_kl))
    }
    return {
        "method": method, "nfe": nfe, "temperature": temperature, "top_p": 1.0, "ppl": ppl,
        "entropy": 5.0 - 1 / ppl, "vsf": vsf, "path_kl": path_kl, "own_steps": own_steps,
        "role": "teacher" if method == "base" else method, "is_baseline": method == "base",
        "path_kl_best": path_kl, "path_kl_best_ci95": ends["path_kl_ci95"],
        "path_kl_best_at": [temperature, 1.0], "seed": seed, **ends,
    }  # fmt: skip


BELOW = "entropy 4.9 is below all that the baseline reaches (5 to 6)"
MADE = [
    made("base", 8, 1.0, 50.0, 1.0, 9.0),
    made("base", 8, 0.9, 40.0, 1.0, 8.0),
    made("sdtt", 8, 1.0, 45.0, 1.1, 7.0),
    made("sdtt", 8, 0.9, 30.0, 0.8, 7.5),
    made("rgas", 8, 1.0, 20.0, None, None) | {"vsf_note": BELOW},
    made("ar", 256, 1.0, 10.0, 0.1, 0.1, own_steps=True),
    made("ar", 251, 0.9, 9.0, 0.1, 0.05, own_steps=True),
]


def test_the_lowest_path_kl_stands_beside_the_plain_setting():
    """The plain setting keeps its own vsF: a best one would be chosen on its own samples."""
    rows = {row["method"]: row for row in summary(MADE)}
    assert (rows["base"]["path_kl"], rows["base"]["path_kl_best"]) == (9.0, 8.0)
    assert rows["base"]["path_kl_best_ci95"] == [7.8, 8.2]
    assert rows["base"]["path_kl_best_at"] == [0.9, 1.0]
    assert (rows["sdtt"]["ppl"], rows["sdtt"]["vsf"]) == (45.0, 1.1)
    assert rows["rgas"]["path_kl_best"] is None


def test_a_step_per_token_is_one_row_however_long_its_texts_are():
    """At another temperature texts are shorter: 251 steps, where plain ones took 256."""
    (row,) = [row for row in summary(MADE) if row["method"] == "ar"]
    assert (row["nfe"], row["temperature"], row["path_kl_best"]) == (256, 1.0, 0.05)
    other = MADE[-1] | {"seed": 1, "temperature": 1.0}
    found = [(row["nfe"], row["seed"]) for row in summary([*MADE, other])][-2:]
    assert found == [(256, 0), (256, 1)], "one line, which the longest text names"


def test_winners_are_told_apart_by_intervals():
    """Ends 0.2 away part 7 from 8; ends 0.6 away do not."""
    begin = "Lowest path KL at 8 NFE in random order, of 2, each at its best setting: sdtt 7.00"
    assert winners(MADE) == [f"{begin} (6.80 to 7.20), below all others."]
    wide = [made(r["method"], 8, r["temperature"], 9.0, 1.0, r["path_kl"], wide=0.6) for r in MADE]
    assert winners(wide[:4]) == [
        f"{begin} (6.40 to 7.60), not told apart by intervals from base 8.00."
    ]
    assert winners(MADE[:2]) == [], "nothing to win against"


def test_orders_are_ranked_apart():
    """The bound of a random order is looser: streams would always win."""
    streams = {"options": {"order": "streams"}}
    other = [made(m, 8, 1.0, 9.0, 1.0, kl) | streams for m, kl in (("a", 1.0), ("b", 2.0))]
    told = winners([*MADE, *other])
    assert [words.partition(":")[0] for words in told] == [
        f"Lowest path KL at 8 NFE in {order} order, of 2, each at its best setting"
        for order in ("random", "streams")
    ]
    assert "sdtt 7.00" in told[0]
    assert "a 1.00" in told[1]
    assert winners([*MADE, other[0]]) == told[:1], "nothing to win against in streams"


def test_three_seeds_are_no_surer_than_one():
    """The range of three points is no interval: that of their samples counts."""
    rows = [
        made(method, 8, 1.0, 30.0, vsf, kl, seed=seed)
        for seed in range(3)
        for method, vsf, kl in (("base", 1.0, 8.0), ("sdtt", 0.9, 7.9))
    ]
    assert gains(rows)[0].endswith(": none.")
    assert "not told apart by intervals from base" in winners(rows)[0]


def test_a_gain_needs_an_interval_and_a_number_of_every_seed():
    """Two seeds at 0.7 and 0.8: no gain where one has no interval, no part where it has no vsF."""
    rows = [made("base", 8, 1.0, 30.0, 1.0, 8.0, seed=seed) for seed in (0, 1)]
    ours = [made("sdtt", 8, 1.0, 30.0, v, 7.0, seed=n, wide=0.1) for n, v in enumerate((0.7, 0.8))]
    assert "sdtt 0.750 (0.600 to 0.900)" in gains([*rows, *ours])[0]
    (told,) = gains([*rows, ours[0], ours[1] | {"vsf_ci95": None}])
    assert told.endswith("of 0 that have one: none.")
    lacking = ours[1] | {"vsf": None, "vsf_ci95": None, "vsf_note": BELOW, "path_kl_best": None}
    assert gains([*rows, ours[0], lacking]) == []
    assert winners([*rows, ours[0], lacking]) == [], "nobody else has it in both"
    (told,) = without_vsf([*rows, ours[0], lacking])
    assert told.endswith("reaches: sdtt (seed 1).")


def test_a_best_at_the_end_of_the_sweep_is_told():
    """Of MADE, whose lowest temperature is 0.9: the baseline and AR; nobody has a top-p."""
    (told,) = at_the_edge(MADE)
    assert told == "Best at the lowest temperature of the sweep, 0.9 (NFE): base (8); ar (256)."
    assert at_the_edge([row for row in MADE if row["temperature"] == 1]) == []


def test_a_lead_that_variety_was_given_up_for_is_told():
    """Each at its best setting, beside the baseline of its own order; not where intervals meet.

    Nor where path KL is no lower, or a looser bound.
    """
    streams = {"options": {"order": "streams"}}
    kinds = {
        BASELINE: (0.3, 0.5, 8.0, {}), "poor": (0.1, 0.7, 7.0, {}), "near": (0.1, 0.58, 7.0, {}),
        "worse": (0.1, 0.7, 8.5, {}), "loosely": (0.1, 0.7, 7.0, {"loose": True}),
        STREAMS: (0.3, 0.7, 6.0, streams), "ours": (0.3, 0.75, 5.0, streams),
        "rich": (0.3, 0.4, 5.0, streams),
    }  # fmt: skip
    rows = []
    for method, (plain, best, path_kl, more) in kinds.items():
        for heat, bleu in ((1.0, plain), (0.9, best)):
            row = made(method, 8, heat, 9.0, 1.0, path_kl) | more | {"path_kl_best_at": [0.9, 1.0]}
            rows.append(row | {"self_bleu": bleu, "self_bleu_ci95": [bleu - 0.05, bleu + 0.05]})
    (told,) = less_varied(rows)
    assert told.endswith("given up: poor (8 NFE 0.70 against 0.50).")
    (both,) = less_varied([*rows, *(row | {"seed": 1} for row in rows)])
    assert both.endswith("poor (8 NFE 0.70 against 0.50, seed 0; 8 NFE 0.70 against 0.50, seed 1).")
    assert less_varied([row for row in rows if row["method"] != "poor"]) == []
    assert less_varied([row for row in rows if row["method"] != BASELINE]) == []
    assert less_varied(MADE) == [], "nobody measured it"


def test_texts_of_another_length_are_told():
    """20% longer, by intervals that do not meet; not where they do."""
    long = {"mean_length": 120.0, "mean_length_ci95": [118.0, 122.0]}
    usual = {"mean_length": 100.0, "mean_length_ci95": [98.0, 102.0]}
    near = {"mean_length": 103.0, "mean_length_ci95": [101.0, 105.0]}
    rows = [MADE[0] | usual, MADE[2] | long, MADE[4] | near]
    (told,) = of_other_lengths(rows)
    assert told.endswith("not at equal terms: sdtt (+20%).")
    assert of_other_lengths([rows[0], rows[2]]) == []
    assert of_other_lengths(MADE) == [], "nobody counted"


def test_texts_of_more_even_lengths_are_told():
    """A third of the baseline's spread at 8 NFE, half at 4: where it is least; not nine tenths."""
    few = [row | {"nfe": 4} for row in MADE]
    spreads = ((MADE[0], 30.0), (MADE[2], 10.0), (MADE[4], 27.0), (few[0], 20.0), (few[2], 10.0))
    rows = [row | {"length_spread": spread} for row, spread in spreads]
    (told,) = of_like_lengths(rows)
    assert told.endswith(
        "(standard deviation, where it is least): sdtt (10 against 30 tokens at 8 NFE)."
    )
    assert of_like_lengths(rows[1:3]) == [], "no baseline"
    assert of_like_lengths(MADE) == [], "nobody counted"
    even = [row | {"length_spread": 0.0} for row in rows]
    assert of_like_lengths(even) == [], "all texts of a language are as long"


def test_winners_are_those_of_all_seeds():
    """A second seed in which the first's winner is last: intervals of both meet the other's."""
    other = [
        made("base", 8, 1.0, 50.0, 1.0, 8.0, seed=1),
        made("sdtt", 8, 1.0, 50.0, 1.0, 12.0, seed=1),
    ]
    (path,) = winners([*MADE, *other])
    assert ": base 8.00 (7.80 to 8.20), not told apart by intervals from sdtt 9.50" in path


def test_a_gain_is_a_whole_interval_below_one():
    """At 0.7 with ends 0.2 away; not at 0.9, nor where the second seed has lost it."""
    sure, other = made("sdtt", 8, 1.0, 30.0, 0.7, 7.0), made("jump", 8, 1.0, 30.0, 0.9, 7.0)
    (told,) = gains([MADE[0], sure, other])
    assert told.endswith("at 8 NFE, of 2 that have one: sdtt 0.700 (0.500 to 0.900).")
    (told,) = gains([MADE[0], sure, made("sdtt", 8, 1.0, 30.0, 1.0, 7.0, seed=1)])
    assert told.endswith("of 1 that have one: none.")


def test_rows_without_vsf_say_why():
    assert without_vsf(MADE) == [
        "No vsF at 8 NFE, entropy below what the baseline's sweep reaches: rgas."
    ]


def test_the_plot_has_every_plain_setting_at_its_place():
    figure = draw_baselines(MADE, "a title")
    (axis,) = figure.axes
    assert axis.get_title("left") == "8 NFE"
    large = {tuple(line.get_xydata()[0]) for line in axis.lines if line.get_markersize() > 5}
    plain = {(row["entropy"], row["ppl"]) for row in MADE if row["temperature"] == 1}
    assert large == plain
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    assert words == ["base", "sdtt", "rgas", "ar (256 NFE)"]
    with pytest.raises(UserError, match="no two methods"):
        draw_baselines([MADE[0]])
    many = [made(method, 64, 1.0, 5.0, 1.0, 1.0) | {"role": "teacher"} for method in ("base", "s")]
    assert len(draw_baselines([*MADE, *many]).axes) == 1, "nothing that was trained takes 64 steps"


def test_a_method_far_to_the_side_is_cut_and_named():
    """Plain entropies 5.00 to 5.07 and one of 2: the others keep the panel to themselves."""
    near = [made(f"m{n}", 8, 1.0, 40.0, 1.0, 7.0) | {"entropy": 5 + n / 100} for n in range(8)]
    far = made("poor", 8, 1.0, 9.0, None, None) | {"entropy": 2.0}
    figure = draw_baselines([*near, far])
    low, high = figure.axes[0].get_xlim()
    assert 4.9 < low < 5.0 < 5.07 < high < 5.2
    assert "outside to the side: poor" in figure.texts[0].get_text()
    assert "outside" not in draw_baselines(near).texts[0].get_text()
    assert figure.axes[0].get_xlabel() == "entropy, nats"
    colours = [line.get_color() for line in figure.legends[0].legend_handles]
    assert len(set(colours)) == len(colours)
    assert len(set(PALETTE)) >= sum(not way.own_steps for way in WAYS), "one for each"


def test_every_panel_has_a_scale_that_shows_its_methods():
    """What is far worse is out of view and named; what is far better is what a panel is for."""
    rows = [
        made(f"m{n}", nfe, 1.0, base + n, 1.0, 7.0)
        for nfe, base in ((1, 40_000), (4, 400), (8, 40), (16, 20))
        for n in range(8)
    ]
    bad, good = made("bad", 4, 1.0, 27_000.0, 9.0, 7.0), made("good", 1, 1.0, 500.0, 0.1, 7.0)
    figure = draw_baselines([*rows, bad, made("bad", 16, 1.0, 5000.0, 9.0, 7.0), good])
    views = {axis.get_title("left"): axis.get_ylim() for axis in figure.axes}
    assert views["1 NFE"][0] < 500 < 40_007 < views["1 NFE"][1]
    assert views["4 NFE"][0] < 400 < 407 < views["4 NFE"][1] < 27_000
    assert views["16 NFE"][1] < 40
    assert figure.texts[0].get_text().endswith("far above: bad (4, 16 NFE)")
    assert [axis.get_ylabel() for axis in figure.axes] == ["perplexity", "", "", "perplexity"]
    places = [axis.get_position() for axis in figure.axes]
    assert len({round(place.y0, 3) for place in places}) == 2, "rows of three"
    assert all(place.x0 > 0.03 and place.x1 < 1 and 0 < place.y0 < place.y1 < 1 for place in places)


def test_what_lies_to_the_side_has_no_say_in_a_panels_scale():
    """Nor does a panel need a plain setting in view: all of its rows are drawn then."""
    rows = [
        made(f"m{n}", nfe, 1.0, 40.0 + n, 1.0, 7.0) | {"entropy": 5 + n / 100}
        for nfe in (4, 8)
        for n in range(8)
    ]
    side = [made("side", nfe, 1.0, 1.5, 1.0, 7.0) | {"entropy": 2.0} for nfe in (4, 16)]
    beside = made("other", 16, 1.0, 3.0, 1.0, 7.0) | {"entropy": 2.0}
    within = made("side", 16, 0.9, 30.0, 1.0, 7.0) | {"entropy": 5.0}
    figure = draw_baselines([*rows, *side, beside, within])
    views = {axis.get_title("left"): axis.get_ylim() for axis in figure.axes}
    assert views["4 NFE"][0] > 35
    assert views["16 NFE"][0] < 30 < views["16 NFE"][1]
    figure = draw_baselines([*rows, *side, beside])
    assert figure.axes[2].get_ylim()[0] < 1.5 < 3 < figure.axes[2].get_ylim()[1]


def test_the_table_says_all_that_was_found(tiny, whole, monkeypatch):
    """Every sentence that reads the sweep is in the notes."""
    folder, scale = tiny
    names = (
        "winners",
        "at_the_edge",
        "less_varied",
        "without_vsf",
        "of_other_lengths",
        "of_like_lengths",
    )
    for name in names:
        monkeypatch.setattr(baselines, name, lambda sweep, name=name: [f"found: {name}"])
    notes = write_only(BASELINE_ITEMS, scale, folder / "out").made[0].table.notes
    assert [note for note in notes if note.startswith("found")] == [f"found: {n}" for n in names]


# Minutes


def write_log(folder, *records):
    (folder / "log.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))


def test_minutes_of_a_distillation(tmp_path):
    """100 steps at 2/s, 50 at 0.5/s: 50 + 100 s; evaluations have no rate, a shared GPU no time."""
    tmp_path = tmp_path / "run"
    tmp_path.mkdir()
    write_log(
        tmp_path,
        {"step": 0, "path_kl_8": 3.0},
        {"step": 100, "iterations_per_second": 2.0, "tokens_per_second": 1e9},
        {"step": 100, "path_kl_8": 2.0},
        {"step": 150, "iterations_per_second": 0.5, "tokens_per_second": 1e9},
    )
    assert training_minutes(tmp_path) == pytest.approx(150 / 60)
    (tmp_path.parent / SHARED).touch()
    assert training_minutes(tmp_path) is None


def test_minutes_do_not_hold_what_compiles(tmp_path):
    """Ten steps in 50 s, most of them for kernels, then twenty at 2/s: 15 s. Fast ones count."""
    write_log(
        tmp_path,
        {"step": 10, "iterations_per_second": 0.2},
        {"step": 30, "iterations_per_second": 2.0},
    )
    assert training_minutes(tmp_path) == pytest.approx(15 / 60)
    write_log(tmp_path, {"step": 10, "iterations_per_second": 0.2})
    assert training_minutes(tmp_path) == pytest.approx(50 / 60), "nothing to tell it by"


def test_minutes_of_a_pretraining(tmp_path):
    """Batches of 8 rows of 16 tokens, 12 steps at 64 tokens per second: 24 s."""
    recipe = {"model": {"length": 16}, "train": {"batch_size": 8, "steps": 12}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    write_log(tmp_path, {"step": 12, "tokens_per_second": 64.0})
    assert training_minutes(tmp_path) == pytest.approx(12 * 8 * 16 / 64 / 60)


def test_a_model_that_was_not_trained_here_has_no_minutes(tmp_path):
    assert training_minutes(tmp_path) is None
    write_log(tmp_path, {"step": 3, "path_kl_8": 2.0})
    assert training_minutes(tmp_path) is None


# Learning


def test_updates_are_the_steps_in_which_a_student_did_not_wait(tmp_path):
    """Ten steps of warm-up, then 20 of which 6 in 10 wait; what was made again counts once."""
    write_log(
        tmp_path,
        {"step": 10, "student_waits": 1.0, "at_chance": 0.0, "disc_waits": 0.3},
        {"step": 30, "student_waits": 0.9, "at_chance": 0.9},
        {"step": 30, "student_waits": 0.6, "at_chance": 0.3},
        {"step": 30},
    )
    assert learning(tmp_path) == {
        "updates": 8, "updates_of": 30, "at_chance": pytest.approx(0.2),
        "saturated": pytest.approx(0.1),
    }  # fmt: skip


def test_what_has_no_discriminator_says_nothing_of_updates(tmp_path):
    assert learning(tmp_path) == {}
    write_log(tmp_path, {"step": 3, "loss": 2.0})
    assert learning(tmp_path) == {}
    assert training_texts(tmp_path) is None


def test_minutes_of_a_bank_are_those_of_its_drawing(tmp_path):
    run, bank = tmp_path / "job" / "run", tmp_path / "bank"
    run.mkdir(parents=True)
    bank.mkdir()
    assert bank_minutes(run) == 0.0, "nothing says that it read one"

    def tell(method, source):
        recipe = {"method": method, "reference": {"source": source, "bank": str(bank)}}
        (run / "recipe.yaml").write_text(yaml.safe_dump(recipe))

    for method, source in (("didi", "online"), ("dimo", "bank"), ("token-matching", "bank")):
        tell(method, source)
        assert bank_minutes(run) == 0.0, "it reads none"
    tell("didi", "bank")
    assert bank_minutes(run) is None, "the bank does not say"
    (bank / "drawn.json").write_text('{"seconds": 30.0}')
    assert bank_minutes(run) == 0.5
    (run.parent / SHARED).touch()
    assert bank_minutes(run) is None
