"""A job's key is what decides its result, and nothing else."""

import json
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

from didi_instruct.data.prepare import PrepareSettings, prepare
from didi_instruct.hub import sources
from didi_instruct.reproduce import jobs
from didi_instruct.reproduce.jobs import TASKS, Job, content, in_order, spread, stored

from .small_models import config_of, save

TEACHER = {"name": "teacher", "does": "pretrain", "recipe": "oracle-teacher"}


def teacher(*overrides, **changes):
    return Job(**{**TEACHER, "overrides": overrides, **changes})


def student(of, *overrides, name="student"):
    return Job(
        name=name,
        does="distill",
        recipe="oracle-sdtt",
        overrides=overrides,
        inputs={"teacher": of},
    )


@pytest.mark.parametrize(
    "override", ["train.steps=7", "train.seed=1", "optim.lr=1e-3", "model.hidden=64"]
)
def test_an_override_that_changes_what_is_learnt_changes_the_key(override):
    assert teacher(override).key != teacher().key


@pytest.mark.parametrize(
    "override", ["train.log_every=7", "train.save_every=7", "train.keep=1", "expect=nothing"]
)
def test_an_override_that_changes_what_is_told_or_kept_does_not(override):
    assert teacher(override).key == teacher().key


@pytest.mark.parametrize("override", ["watch.budgets=[]", "watch.samples=8", "watch.min_entropy=0"])
def test_how_a_student_is_watched_has_no_part_in_its_key(override):
    assert student("oracle", override).key == student("oracle").key


def test_a_key_is_of_the_settings_in_force_not_of_how_they_are_written():
    """The default written out, the last of two overrides and another name are the same work."""
    plain = teacher()
    assert teacher("train.seed=0").key == plain.key
    assert teacher("train.steps=3", f"train.steps={plain.settings().train.steps}").key == plain.key
    assert teacher(name="other").key == plain.key


def test_a_change_of_what_a_job_builds_on_changes_its_key():
    one, other = teacher("train.steps=7"), teacher("train.steps=8")
    assert student(one).key != student(other).key
    assert student(one).key == student(teacher("train.steps=7", name="another")).key


def test_options_and_version_are_part_of_a_key(monkeypatch):
    call = {"name": "call", "does": "m:f"}
    one = Job(**call, options={"num": 3})
    assert one.key != Job(**call, options={"num": 4}).key
    monkeypatch.setattr(jobs, "__version__", "9.9")
    assert one.key != Job(**call, options={"num": 3}).key


KEYS = {
    "quality": "6be7d47bcfb716d7",
    "texts": "e9356b38c5a6f265",
    "landscape": "44d3cc77b714f983",
    "anova": "0423b571254e9aac",
    "latency": "6a12c5ead53aa871",
    "zero_shot": "b1a28713b2de6fe1",
    "toy_zero_shot": "26fd52cee88da5ba",
    "way": "507ed51ea42bf855",
    "speeds": "17796a8c66bf76f8",
    "task": "130e7d4cb1ea281b",
    "adaptation": "cb20e1a5fc3c6db9",
    "cells": "5255b75e333637c5",
    "adopt": "913547c2976c704e",
    "write_proteins": "0f6af642225e3af9",
    "write_task_files": "395ff6cb8cd039e3",
}


@pytest.mark.parametrize("name", TASKS)
def test_keys_of_tasks_are_those_of_results_that_users_keep(name, monkeypatch):
    monkeypatch.setattr(jobs, "__version__", "0.0")
    assert (
        Job(name="j", does=name, options={"num": 3}, inputs={"model": "oracle"}).key == KEYS[name]
    )


@pytest.mark.parametrize("name", TASKS)
def test_every_task_is_a_function_of_the_package(name):
    module, _, function = TASKS[name].function.partition(":")
    assert callable(vars(import_module(module))[function])


def test_data_counts_by_its_content_not_by_its_path(tmp_path):
    for name, text in (("a", "one"), ("b", "one"), ("c", "two")):
        (tmp_path / f"{name}.txt").write_text(text)
    found = {n: teacher(f"data.source={tmp_path / n}.txt").key for n in "abc"}
    assert found["a"] == found["b"] != found["c"]


def test_prepared_data_counts_by_its_rows_not_by_the_files_they_came_from(tmp_path):
    keys = []
    for name, text in (("a", "one two"), ("b", "one two"), ("c", "one three")):
        lines = [json.dumps({"text": text * 40}) + "\n"] * 2
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
        source = str(tmp_path / f"{name}.jsonl")
        prepare(PrepareSettings(src=source, out=tmp_path / name, tokenizer="bytes", length=16))
        keys.append(stored(str(tmp_path / name)))
    assert keys[0] == keys[1] != keys[2]


def test_a_folder_is_told_apart_by_the_files_in_it(tmp_path):
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("same")
    assert content(str(tmp_path / "one")) == content(str(tmp_path / "other"))
    (tmp_path / "third").mkdir()
    (tmp_path / "third" / "renamed").write_text("same")
    assert content(str(tmp_path / "third")) != content(str(tmp_path / "one"))
    assert content("oracle") == "oracle"


def test_a_bank_that_is_given_counts_by_its_texts(tmp_path):
    """One that is not given follows from the teacher and the settings."""

    def key(*overrides):
        return student("oracle", *overrides).key

    for name, texts in (("a", "one"), ("b", "one"), ("c", "two")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokens").write_text(texts)
    found = {n: key(f"reference.bank={tmp_path / n}") for n in "abc"}
    assert found["a"] == found["b"] != found["c"]
    assert key() not in found.values()


def test_a_tokenizer_counts_by_its_file(tmp_path):
    (tmp_path / "text.txt").write_text("some text")
    for name, text in (("a", "{}"), ("b", "{}"), ("c", "[]")):
        (tmp_path / f"{name}.json").write_text(text)
    data = f"data.source={tmp_path / 'text.txt'}"
    found = {n: teacher(data, f"data.tokenizer={tmp_path / n}.json").key for n in "abc"}
    assert found["a"] == found["b"] != found["c"]
    assert teacher(data, "data.tokenizer=bytes").key != teacher(data).key


def test_a_shipped_name_is_the_weights_behind_it(tmp_path, monkeypatch):
    """Name and path are one model; other weights under the same name are another."""
    folders = {n: Path(save(tmp_path / n, config_of(), seed=s)) for s, n in enumerate("ab")}
    keys = {}
    for name, folder in folders.items():
        monkeypatch.setattr(sources, "shipped", lambda f=folder: {"stories/teacher": f})
        keys[name] = student("stories/teacher").key
        assert keys[name] == student(str(folder)).key
    assert keys["a"] != keys["b"]


def test_texts_of_a_shipped_name_are_not_the_model_of_that_name(tmp_path, monkeypatch):
    model = Path(save(tmp_path / "model", config_of()))
    monkeypatch.setattr(sources, "shipped", lambda: {"stories": model})
    keys = []
    for name, text in (("here", "one"), ("there", "two")):
        (tmp_path / name / "stories").mkdir(parents=True)
        (tmp_path / name / "stories" / "a.txt").write_text(text)
        monkeypatch.chdir(tmp_path / name)
        stored.cache_clear()
        measure = Job(name="m", does="m:f", inputs={"model": "x", "reference": "stories"})
        keys.append((teacher("data.source=stories").key, measure.key))
    stored.cache_clear()
    assert keys[0][0] != keys[1][0]
    assert keys[0][1] != keys[1][1]


def test_jobs_come_after_their_needs_and_only_once():
    base = teacher("train.steps=7")
    again = teacher("train.steps=7", name="again")
    first, second = student(base, "train.seed=0"), student(again, "train.seed=1")
    measure = Job(name="m", does="m:f", inputs={"model": first, "rival": second})
    order = in_order([measure, second])
    assert [job.name for job in order] == ["teacher", "student", "student", "m"]
    assert order[1].key != order[2].key


def test_what_is_done_needs_nobody_any_more():
    """A table goes on from results alone: what they were made of may be gone, or lie elsewhere."""
    base = teacher("train.steps=7")
    first, second = student(base, "train.seed=0"), student(base, "train.seed=1")
    one, two = (Job(name=n, does="m:f", inputs={"model": of}) for n, of in ((
        "one", first), ("two", second)))  # fmt: skip

    def names(*done):
        keys = [job.key for job in done]
        return [job.name for job in in_order([one, two], lambda job: job.key in keys)]

    assert names(one, two) == ["one", "two"]
    assert names(one) == ["one", "teacher", "student", "two"], "the other's student alone"
    assert names(one, first) == ["student", "one", "teacher", "student", "two"]
    assert names(one, two, base) == ["one", "two"], "nothing between is there"


def test_a_job_that_is_spread_comes_after_its_parts_and_keeps_its_key():
    job = Job(name="table", does="a.module:rows", options={"num": 3}, timed=True)
    shared = spread(job, 3)
    assert shared.key == job.key, "what is done is done, however it was shared"
    assert [one.name for one in in_order([shared])] == [
        "table-part1", "table-part2", "table-part3", "table",
    ]  # fmt: skip
    assert len({one.key for one in in_order([shared])}) == 4
    assert [one.options["part"] for one in shared.before] == [[0, 3], [1, 3], [2, 3]]
    assert shared.timed
    assert not any(one.timed for one in shared.before), "they may run at the same time"
    assert spread(job, 1) is job


def test_what_one_has_timed_is_timed_for_all():
    """A student that another one starts from comes first as its need, and is timed by itself."""
    first = teacher()
    asked = [student(first), replace(first, timed=True)]
    assert [(job.name, job.timed) for job in in_order(asked)] == [
        ("teacher", True),
        ("student", False),
    ]
