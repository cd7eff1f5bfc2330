"""Settings of many samplers are measured as `didi eval` measures one, each once."""

from dataclasses import replace

import pytest

from didi_instruct.errors import UserError
from didi_instruct.evaluation import drawing
from didi_instruct.evaluation.evaluate import EvalConfig, evaluate
from didi_instruct.evaluation.judges import OracleJudge
from didi_instruct.evaluation.measuring import Measured, Metric
from didi_instruct.evaluation.metrics import METRICS
from didi_instruct.reproduce.measure import Setting, Terms, measure

from .small_models import LANGUAGE, config_of, save, save_letters


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    save(folder / "teacher", config_of())
    save(folder / "ar", config_of("ar"))
    save_letters(folder / "letters")
    return folder


def terms_of(out, **changes):
    usual = {"judge": OracleJudge(LANGUAGE), "num": 12, "device": "cpu"}
    return Terms(out=out, **usual | changes)


def settings_of(folder):
    teacher, ar = str(folder / "teacher"), str(folder / "ar")
    return [
        Setting(method="plain", source=teacher, steps=4),
        Setting(method="cool", source=teacher, steps=4, temperature=0.7),
        Setting(method="sure", source=teacher, steps=2, sampler="confidence", more={"mark": 1}),
        Setting(method="AR", source=ar),
    ]


def test_rows_are_those_of_an_evaluation_with_one_sampler(folder, tmp_path):
    rows = measure(settings_of(folder), terms_of(tmp_path / "a")).rows
    for row, setting in zip(rows, settings_of(folder), strict=True):
        config = EvalConfig(
            metrics=("ppl", "entropy"), steps=(setting.steps or 1,), num=12, device="cpu",
            sampler=setting.sampler, temperature=setting.temperature,
        )  # fmt: skip
        found = evaluate(setting.source, config, out=tmp_path / "b", judge="oracle")
        (alone,) = found.rows
        own = {"model", "method", "mark", "tokens_per_second"}
        assert {k: v for k, v in row.items() if k not in own} == {
            k: v for k, v in alone.items() if k not in own
        }
    assert [row["method"] for row in rows] == ["plain", "cool", "sure", "AR"]
    assert [row["nfe"] for row in rows] == [4, 4, 2, 32]
    assert rows[2]["mark"] == 1
    assert not any(str(folder) in str(row) for row in rows), "paths of this machine"


def test_a_setting_leaves_out_what_it_does_not_ask_for(folder, tmp_path):
    plain, cool, *_ = settings_of(folder)
    terms = terms_of(tmp_path, metrics=("ppl", "entropy", "self-bleu"))
    rows = measure([plain, replace(cool, without=("self-bleu",))], terms).rows
    assert rows[0]["self_bleu"] is not None
    assert rows[1]["self_bleu"] is None
    assert rows[1]["ppl"] is not None


def test_nothing_is_drawn_or_judged_twice(folder, tmp_path, monkeypatch):
    first = measure(settings_of(folder), terms_of(tmp_path)).rows
    monkeypatch.setattr(drawing, "_draw", None)
    monkeypatch.setattr(OracleJudge, "score", None)
    assert measure(settings_of(folder), terms_of(tmp_path)).rows == first


def test_parts_leave_nothing_to_the_whole(folder, tmp_path, monkeypatch):
    """Each setting is in one part; some parts may be empty."""
    parts = [measure(settings_of(folder), terms_of(tmp_path, part=(n, 6))).rows for n in range(6)]
    assert [len(rows) for rows in parts] == [1, 1, 1, 1, 0, 0]
    monkeypatch.setattr(drawing, "_draw", None)
    monkeypatch.setattr(OracleJudge, "score", None)
    whole = measure(settings_of(folder), terms_of(tmp_path)).rows
    assert whole == [row for rows in parts for row in rows]


def test_the_reference_is_that_of_an_evaluation(folder, tmp_path, monkeypatch):
    """As many texts as samples, of the same tokens: what MAUVE would see."""
    seen = Metric(
        name="seen",
        compute=lambda m: Measured({"seen": m.reference.tokens.tolist()}),
        requires=("reference",),
    )
    monkeypatch.setitem(METRICS, "seen", seen)
    (setting, *_), terms = settings_of(folder), {"metrics": ("entropy", "seen")}
    terms = terms_of(tmp_path / "a", reference="oracle", **terms)
    (row,) = measure([setting], terms).rows
    config = EvalConfig(metrics=terms.metrics, steps=(4,), num=12, reference="oracle", device="cpu")
    (alone,) = evaluate(setting.source, config, out=tmp_path / "b").rows
    assert row["seen"] == alone["seen"]
    assert len(row["seen"]) == 12


def test_what_cannot_share_a_table_is_refused(folder, tmp_path):
    letters = Setting(method="letters", source=str(folder / "letters"), steps=4)
    with pytest.raises(UserError, match="different tokenizers"):
        measure([*settings_of(folder), letters], terms_of(tmp_path))
    for wrong, words in (
        (Setting(method="AR", source=str(folder / "ar"), steps=4), "AR: leave out its steps"),
        (Setting(method="it", source=str(folder / "teacher")), "it: give it steps"),
    ):
        with pytest.raises(UserError, match=words):
            measure([wrong], terms_of(tmp_path))
    with pytest.raises(UserError, match="no setting"):
        measure([], terms_of(tmp_path))


def test_perplexity_never_goes_without_entropy(folder, tmp_path):
    with pytest.raises(UserError, match="add the metric entropy"):
        measure(settings_of(folder), terms_of(tmp_path, metrics=("ppl",)))
