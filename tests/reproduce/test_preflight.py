"""What a run needs is looked for before it starts."""

import pytest
import torch

from didi_instruct.data.prepare import PrepareSettings, prepare
from didi_instruct.errors import UserError
from didi_instruct.reproduce import preflight
from didi_instruct.reproduce.experiments import ITEMS
from didi_instruct.reproduce.scale import Given
from didi_instruct.reproduce.scales import find_scale

from .small_models import save_letters


@pytest.fixture
def no_hub(monkeypatch):
    """A hub that has one dataset and nothing else; it notes what it is asked."""
    asked = []

    def hub(name, kind):
        asked.append((name, kind))
        return "" if name == "Skylion007/openwebtext" else "not reached (Error)"

    monkeypatch.setattr(preflight, "_hub", hub)
    return asked


def test_at_paper_scale_data_tokenizer_and_judge_are_looked_for_on_the_hub(no_hub, tmp_path):
    scale = find_scale("paper", Given())
    found = {c.what: c for c in preflight.checks([ITEMS["figure-1"]], scale, tmp_path)}
    assert set(no_hub) == {
        ("Skylion007/openwebtext", "dataset"), ("openai-community/gpt2-large", "model"),
        ("gpt2", "tokenizer"),
    }  # fmt: skip
    assert not found["gpt2 (tokenizer on the hub)"].is_there
    assert found["hf:Skylion007/openwebtext (dataset on the hub)"].is_there
    missing = found["openai-community/gpt2-large (model on the hub)"]
    assert not missing.is_there
    assert "not reached" in missing.remedy


def cached(folder, name, file):
    """A file of a model as the hub's cache here keeps it."""
    repository = folder / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    (snapshot / file).write_text("{}")


@pytest.mark.parametrize(("file", "there"), [("tokenizer.json", True), ("config.json", False)])
def test_a_tokenizer_in_the_cache_is_there(monkeypatch, tmp_path, file, there):
    """Settings of a model alone read no text."""

    class NoNetwork:
        def model_info(self, name, timeout):
            raise OSError

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.HfApi", NoNetwork)
    cached(tmp_path, "gpt2", file)
    assert (preflight._hub("gpt2", "tokenizer") == "") == there
    assert (preflight._hub("gpt2", "model") == "") == (not there)


def test_prepared_texts_and_learnt_tokenizers_ask_for_none(no_hub, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "Once upon a time, a story."}\n' * 40)
    rows = tmp_path / "rows"
    prepare(PrepareSettings(src=str(tmp_path / "a.jsonl"), tokenizer="bytes", length=16, out=rows))
    for data in (str(rows), str(tmp_path / "a.jsonl")):
        scale = find_scale("small", Given(data=data, judge="owner/name"))
        list(preflight.checks([ITEMS["figure-1"]], scale, tmp_path / "out"))
    assert {kind for _, kind in no_hub} == {"model"}


def test_at_toy_scale_nothing_is_asked_of_anyone(no_hub, tmp_path):
    scale = find_scale("toy", Given())
    found = list(preflight.checks([ITEMS["figure-1"]], scale, tmp_path))
    assert not no_hub
    assert not any(c.what.startswith("GPU") for c in found)


def test_a_disk_that_is_too_small_is_told(monkeypatch, no_hub, tmp_path):
    """The 169M models alone need tens of gigabytes."""
    scale = find_scale("paper", Given())
    usage = preflight.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: usage._replace(free=10**9))
    disk = next(
        c
        for c in preflight.checks([ITEMS["figure-1"]], scale, tmp_path)
        if c.what.startswith("disk")
    )
    assert not disk.is_there


def test_only_items_that_need_an_extra_ask_for_it(monkeypatch, no_hub, tmp_path):
    monkeypatch.setattr(preflight, "find_spec", lambda name: None)
    scale = find_scale("toy", Given())

    def missing(name):
        found = preflight.checks([ITEMS[name]], scale, tmp_path)
        return {c.what.split()[0] for c in found if not c.is_there}

    assert missing("rgas-anova") == {"matplotlib", "optuna", "sklearn", "scipy"}
    assert missing("figure-1") == {"matplotlib"}


def test_zero_shot_without_files_needs_the_hub_and_its_library(monkeypatch, no_hub, tmp_path):
    monkeypatch.setattr(preflight, "find_spec", lambda name: None)
    (tmp_path / "a.jsonl").write_text('{"text": "A story."}')

    def lacking(**given):
        scale = find_scale("small", Given(data=str(tmp_path / "a.jsonl"), **given))
        found = preflight.checks([ITEMS["zero-shot"]], scale, tmp_path / "out")
        return {c.what.split()[0]: c.remedy for c in found if not c.is_there}

    found = lacking()
    assert "--corpora" in found["hf:Salesforce/wikitext"]
    assert "datasets" in found
    assert "disk:" not in found  # corpora are megabytes
    given = lacking(corpora=str(tmp_path))
    assert "datasets" not in given
    assert not any(name.startswith("hf:") for name in given)


def test_tokenizers_that_differ_are_told_before_a_run(no_hub, tmp_path):
    letters = save_letters(tmp_path / "letters")
    scale = find_scale("toy", Given(teacher=letters))
    found = list(preflight.checks([ITEMS["figure-1"]], scale, tmp_path / "out"))
    assert any("oracle language" in c.remedy for c in found if not c.is_there)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_small_scale_runs_on_a_cpu_only_for_who_asks_for_it(tmp_path):
    scale = find_scale("small", Given(data=str(tmp_path)))
    with pytest.raises(UserError, match="--device cpu"):
        preflight.require_gpu(scale)
    preflight.require_gpu(scale, "cpu")
    preflight.require_gpu(find_scale("toy", Given()))
    with pytest.raises(UserError, match="needs a GPU"):
        preflight.require_gpu(find_scale("paper", Given()), "cpu")


@pytest.mark.parametrize(
    "given",
    [
        Given(data="nowhere.jsonl"),
        Given(judge="./judge"),
        Given(teacher="runs/a/b"),
        Given(corpora="owner/name"),
    ],
)
def test_files_that_are_not_there_are_refused_at_once(given):
    with pytest.raises(UserError, match="no such file or folder"):
        preflight.check_given(given)


def test_names_of_the_hub_are_left_to_the_hub():
    preflight.check_given(
        Given(judge="owner/name", teacher="owner/name@main", data="hf:owner/name")
    )
