"""Rivals: who is measured and how, what is best by hand, what the log says of time, the plot."""

import json

import pytest
import yaml

from didi_instruct.api.samplers import SAMPLERS
from didi_instruct.errors import UserError
from didi_instruct.evaluation.judges import OracleJudge
from didi_instruct.reproduce.baselines import (
    METRICS,
    WAYS,
    baseline_rows,
    settings_of,
    summary,
    winners,
)
from didi_instruct.reproduce.baselines_figure import draw_baselines
from didi_instruct.reproduce.equal_terms import Terms
from didi_instruct.reproduce.minutes import training_minutes

from .small_models import LANGUAGE, config_of, save

ROLES = {way.role for way in WAYS}


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


def test_all_have_the_same_budgets_and_the_same_sweep():
    found = settings_of(
        {role: role for role in ROLES}, (4, 8), temperatures=(0.9,), top_ps=(0.8,), most_steps=32
    )
    sweep = [(1.0, 1.0), (0.9, 1.0), (1.0, 0.8)]
    for way in WAYS:
        mine = [s for s in found if s.method == way.method]
        budgets = [None] if way.own_steps else [4, 8, *([32] if way is WAYS[0] else [])]
        assert [(s.steps, (s.temperature, s.top_p)) for s in mine] == [
            (nfe, point) for nfe in budgets for point in sweep
        ]


def test_a_student_of_dimo_starts_as_it_was_distilled(tmp_path):
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({"dimo": {"random": 0.25, "noise": 0.5}}))
    models = {"teacher": "t", "dimo": str(tmp_path)}
    (student,) = [s for s in settings_of(models, (2,)) if s.method == "DiMO"]
    assert student.options == {"random": 0.25, "noise": 0.5}
    (student,) = [s for s in settings_of(models | {"dimo": "hub/id"}, (2,)) if s.method == "DiMO"]
    assert student.options == {}


def test_without_a_teacher_there_is_nothing_to_compare_with():
    with pytest.raises(UserError, match="need a teacher"):
        settings_of({"sdtt": "s"}, (4,))


# Numbers


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Random models; the student is a copy of the teacher."""
    folder = tmp_path_factory.mktemp("models")
    masked = {role: save(folder / role, config_of()) for role in ("teacher", "sdtt", "dimo")}
    others = {role: save(folder / role, config_of(role)) for role in ("ar", "duo")}
    log = [{"step": 30, "iterations_per_second": 0.5}]
    (folder / "sdtt" / "log.jsonl").write_text(json.dumps(log[0]) + "\n")
    terms = Terms(
        out=folder / "kept", judge=OracleJudge(LANGUAGE), metrics=METRICS, num=8, device="cpu"
    )
    return baseline_rows(
        masked | others, (2, 4), terms, temperatures=(0.7,), top_ps=(), most_steps=16,
        timing_batch=2, timing_rounds=1,
    )  # fmt: skip


def of(rows, method, nfe=None):
    return [row for row in rows if row["method"] == method and nfe in (None, row["nfe"])]


def test_a_student_that_is_its_teacher_gains_nothing(rows):
    for own, copy in zip(of(rows, "MDLM, ancestral"), of(rows, "SDTT"), strict=False):
        for name in ("ppl", "entropy", "path_kl", "self_bleu", "unique_4gram"):
            assert copy[name] == own[name]
    assert [row["vsf"] for row in of(rows, "SDTT")] == pytest.approx([1] * 4)
    for nfe in (2, 4):  # its best setting is the baseline's
        assert min(row["path_kl_vs_baseline"] for row in of(rows, "SDTT", nfe)) == 0
    assert all(row["is_baseline"] == (row["method"] == "MDLM, ancestral") for row in rows)


def test_costs_stand_beside_the_quality(rows):
    """Thirty steps at half a step per second are a minute."""
    assert {row["training_minutes"] for row in of(rows, "SDTT")} == {1.0}
    assert {row["training_minutes"] for row in of(rows, "DiMO")} == {None}
    for row in rows:
        assert (row["tokens_per_second"] is None) == (row["temperature"] != 1)
        assert (row["num_samples"], row["seed"]) == (8, 0)
    assert {row["nfe"] for row in of(rows, "AR, the same trunk")} == {32}


def made(method, nfe, temperature, ppl, vsf, path_kl, own_steps=False):
    return {
        "method": method, "nfe": nfe, "temperature": temperature, "top_p": 1.0, "ppl": ppl,
        "entropy": 5.0 - 1 / ppl, "vsf": vsf, "path_kl": path_kl, "own_steps": own_steps,
        "role": "teacher" if method == "base" else method, "is_baseline": method == "base",
    }  # fmt: skip


MADE = [
    made("base", 8, 1.0, 50.0, 1.0, 9.0),
    made("base", 8, 0.9, 40.0, 1.0, 8.0),
    made("sdtt", 8, 1.0, 45.0, 1.1, 7.0),
    made("sdtt", 8, 0.9, 30.0, 0.8, 7.5),
    made("rgas", 8, 1.0, 20.0, None, None),
    made("ar", 256, 1.0, 10.0, 0.1, 0.1, own_steps=True),
]


def test_the_best_setting_stands_beside_the_plain_one():
    rows = {row["method"]: row for row in summary(MADE)}
    assert (rows["sdtt"]["ppl"], rows["sdtt"]["vsf"]) == (45.0, 1.1)
    assert (rows["sdtt"]["best_at"], rows["sdtt"]["best_vsf"]) == ([0.9, 1.0], 0.8)
    assert rows["sdtt"]["best_path_kl"] == 7.5
    assert (rows["rgas"]["best_at"], rows["rgas"]["best_vsf"]) == ([1.0, 1.0], None)
    other = {row["method"]: row for row in summary(MADE, ("path_kl",))}
    assert (other["sdtt"]["best_at"], other["sdtt"]["best_path_kl"]) == ([1.0, 1.0], 7.0)


def test_winners_share_a_budget():
    ending = "at 8 NFE, of 2 that have one, each at its best setting"
    assert winners(MADE) == [
        f"Lowest path KL {ending}: sdtt 7.00; base 8.00.",
        f"Lowest vsF {ending}: sdtt 0.80; base 1.00.",
    ]
    assert winners(MADE[:2]) == [], "nothing to win against"


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


# Minutes


def write_log(folder, *records):
    (folder / "log.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))


def test_minutes_of_a_distillation(tmp_path):
    """100 steps at 2/s, 50 at 0.5/s: 50 + 100 s; evaluations have no rate."""
    write_log(
        tmp_path,
        {"step": 0, "path_kl_8": 3.0},
        {"step": 100, "iterations_per_second": 2.0, "tokens_per_second": 1e9},
        {"step": 100, "path_kl_8": 2.0},
        {"step": 150, "iterations_per_second": 0.5, "tokens_per_second": 1e9},
    )
    assert training_minutes(tmp_path) == pytest.approx(150 / 60)


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
