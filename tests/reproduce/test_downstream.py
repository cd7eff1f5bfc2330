"""Items of downstream tasks: their files at toy scale, their jobs, and what their tables say."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from didi_instruct.config.model import ModelConfig
from didi_instruct.data.prepare import PrepareSettings, prepare
from didi_instruct.errors import UserError
from didi_instruct.model import Model
from didi_instruct.models.dit import build_model
from didi_instruct.reproduce import downstream, task_files
from didi_instruct.reproduce.costs import cost_of, model_of
from didi_instruct.reproduce.experiments import ITEMS
from didi_instruct.reproduce.jobs import Context
from didi_instruct.reproduce.running import RUN
from didi_instruct.reproduce.scale import Given
from didi_instruct.reproduce.scales import find_scale
from didi_instruct.reproduce.task_files import questions, write
from didi_instruct.tasks.mmlu_data import examples, read_mmlu
from didi_instruct.tasks.pairs import read_pairs

from .kit import measuring_jobs, table_of

TOY = find_scale("toy", Given())


@pytest.fixture
def written(tmp_path):
    """Writes the toy files of a task."""

    def make(name):
        context = Context(folder=tmp_path / name, shared=tmp_path, inputs={}, results={})
        count = write(context, data=name)["records"]
        return tmp_path / name / RUN, count

    return make


def test_toy_questions_have_the_answer_that_their_subject_asks_for(written):
    folder, count = written("mmlu")
    splits = read_mmlu(folder)
    assert len(splits.dev) + len(splits.test) == count
    assert {q.subject for q in splits.dev} == {"first_words", "last_words"}
    for question in splits.test:
        word = question.text.split()[0 if question.subject == "first_words" else -1]
        assert question.choices[question.answer] == word
        assert question.choices.count(word) == 1
    assert len(examples(splits.test)) == len(splits.test)


def test_toy_answers_are_spread_over_the_letters():
    """Uniform: of 1,000 questions each letter has 250 ± 66, false alarm 4e-6 in all."""
    counts = np.bincount([q.answer for q in questions(1000, seed=5)], minlength=4)
    assert abs(counts - 250).max() <= 66


def test_toy_pairs_are_paraphrases_as_labelled(written):
    folder, count = written("mrpc")
    splits = read_pairs(folder)
    pairs = [pair for split in splits.values() for pair in split]
    assert len(pairs) == count
    for pair in pairs:
        assert (pair.first.split()[:-1] == pair.second.split()) == bool(pair.label)


@pytest.mark.parametrize("name", ["mmlu", "pubmed"])
def test_models_are_measured_before_and_after_a_finetuning_of_each(name):
    [job] = measuring_jobs(ITEMS[name], TOY)
    roles = ["teacher", "sdtt", "duo", "didi", "ar"]
    assert list(job.options["labels"]) == [f"{s}-{r}" for s in ("before", "after") for r in roles]
    for role in roles:
        tuned = job.inputs[f"after-{role}"]
        assert tuned.inputs["model"].key == job.inputs[f"before-{role}"].key
        assert tuned.settings().reproduces.startswith("DiDi-Instruct")
        assert model_of(tuned) == model_of(job.inputs[f"before-{role}"])
        assert cost_of(tuned).training > 0


def test_a_finetuning_is_known_by_its_model_data_and_settings():
    [job] = measuring_jobs(ITEMS["pubmed"], TOY)
    tuned = job.inputs["after-teacher"]
    others = [
        replace(tuned, overrides=(*tuned.overrides, "optim.lr=2e-3")),
        replace(tuned, inputs=tuned.inputs | {"model": job.inputs["before-sdtt"]}),
        replace(tuned, inputs=tuned.inputs | {"data": TOY.tasks["mmlu"]}),
    ]
    assert len({tuned.key, *(other.key for other in others)}) == 4
    assert (
        replace(tuned, name="other", overrides=(*tuned.overrides, "train.keep=2")).key == tuned.key
    )


ROWS = [
    {"model": "MDLM, the teacher (before)", "accuracy": 0.25, "nll_choices": 1.4, "num": 100},
    {"model": "MDLM, the teacher (after)", "accuracy": 0.5, "nll_choices": 1.1, "num": 100},
    {"model": "DiDi-Instruct (after)", "accuracy": 0.45, "nll_choices": 1.2, "num": 100},
    {"model": "untrained MDLM, the teacher (before)", "accuracy": 0.2, "num": 100},
    {"model": "chance", "accuracy": 0.25, "nll_choices": math.log(4), "num": 100},
]


def test_a_table_has_stages_baselines_and_the_differences_that_matter():
    before, after, student = (row["model"] for row in ROWS[:3])
    compared = [
        {"models": [before, after], "difference_ci95": [-0.3, -0.2], "better": after},
        {"models": [before, student], "difference_ci95": [-0.3, -0.1], "better": student},
        {"models": [after, student], "difference_ci95": [-0.05, 0.15], "better": None},
        {"models": [after, ROWS[3]["model"]], "difference_ci95": [0.2, 0.4], "better": after},
    ]
    item = ITEMS["mmlu"]
    [job] = measuring_jobs(item, TOY)
    result = {"rows": ROWS, "notes": ["2 prompts were cut."], "compared": compared}
    table = table_of(item, TOY, {job.key: result})
    lines = {(row["method"], row["stage"]): row["accuracy"] for row in table.rows}
    assert lines["MDLM, the teacher", "after"] == 0.5
    assert lines["DiDi-Instruct", "after"] == 0.45
    assert lines["untrained MDLM, the teacher", None] == 0.2
    assert lines["chance", None] == 0.25
    notes = "\n".join(table.notes)
    told = [note for note in table.notes if note.startswith(f"{after} is better than")]
    assert len(told) == 1, "one note for each model, from the better one's side"
    assert f"{before} [+20.0%, +30.0%]; {ROWS[3]['model']} [+20.0%, +40.0%]" in told[0]
    assert f"{after} and: {student} [-5.0%, +15.0%]." in table.notes
    assert f"{student} is better" not in notes  # another method at another stage
    assert "or McNemar's p is 0.05 or more" in notes
    assert "2 prompts were cut." in notes
    printed = {(row["method"], row["stage"]): row["accuracy"] for row in table.paper}
    assert printed["DiDi-Instruct", "after"] == 0.251


def test_a_difference_in_nats_is_told_by_its_paired_interval():
    rng = np.random.default_rng(0)
    shared, noise = rng.normal(size=400), rng.normal(size=(2, 400)) / 100
    nats = {"a": shared + noise[0], "b": shared + 0.1 + noise[1], "c": shared + noise[1]}
    found = {tuple(pair["models"]): pair for pair in downstream._compare(nats)}
    assert found["a", "b"]["better"] == "a"
    assert found["b", "c"]["better"] == "c"
    assert found["a", "c"]["better"] is None  # 95%: seed 0 is none of the one in twenty
    low, high = found["a", "b"]["difference_ci95"]
    assert low < -0.1 < high
    assert high - low < 0.01  # paired: the spread of `shared` has no part in it


def test_files_of_tasks_are_found_by_their_names(tmp_path):
    (tmp_path / "mmlu" / "test").mkdir(parents=True)
    (tmp_path / "mmlu" / "test" / "law_test.csv").write_text("q,a,b,c,d,A\n")
    (tmp_path / "pubmed.jsonl.xz").touch()
    (tmp_path / "notes.txt").touch()
    found = task_files.find_tasks(str(tmp_path))
    assert found == {
        "mmlu": str(tmp_path / "mmlu"),
        "pubmed": str(tmp_path / "pubmed.jsonl.xz"),
    }
    assert task_files.learning_share(found) == ("answers.share=0.5",)
    assert task_files.scored_share(found) == {"sft_share": 0.5}
    train = tmp_path / "mmlu" / "auxiliary_train"
    train.mkdir()
    (train / "race.csv").write_text("q,a,b,c,d,A\n")
    assert task_files.learning_share(found) == ()
    assert task_files.scored_share(found) == {}
    (tmp_path / "pubmed.jsonl").touch()
    with pytest.raises(UserError, match="pubmed.jsonl and pubmed.jsonl.xz are both files"):
        task_files.find_tasks(str(tmp_path))


def test_jobs_of_tasks_are_known_by_all_their_options(monkeypatch):
    """A default that changes makes another job, where no option of the scale says otherwise."""
    before = {name: measuring_jobs(ITEMS[name], TOY)[0].key for name in ("mmlu", "mrpc")}
    [job] = measuring_jobs(ITEMS["mrpc"], TOY)
    assert job.options["settings"]["steps"] == TOY.task_options["mrpc"]["steps"]
    assert job.options["settings"]["weight_decay"] == 0.01
    assert "cache" not in job.options["settings"]
    more = {"mmlu": {"limit": 5}, "mrpc": {"weight_decay": 0.02}}
    options = {name: {**TOY.task_options[name], **more[name]} for name in more}
    changed = replace(TOY, task_options=options)
    for name, key in before.items():
        assert measuring_jobs(ITEMS[name], changed)[0].key != key


def test_the_paper_s_split_of_mrpc_is_taken_where_it_is(tmp_path):
    for name, expected in (("a", {}), ("b", {"split": "validation"})):
        (tmp_path / name / "mrpc").mkdir(parents=True)
        (tmp_path / name / "mrpc" / "train-00000-of-00001.parquet").touch()
        if name == "b":
            (tmp_path / name / "mrpc" / "validation-00000-of-00001.parquet").touch()
        tasks = task_files.find_tasks(str(tmp_path / name))
        assert task_files.printed_split(tasks) == expected
    scale = find_scale("paper", Given(tasks=str(tmp_path / "b")))
    assert measuring_jobs(ITEMS["mrpc"], scale)[0].options["settings"]["split"] == "validation"


def test_runs_that_held_out_other_rows_are_not_compared(tmp_path):
    text = tmp_path / "text.jsonl"
    text.write_text("".join(f'{{"text": "story {n} ends here."}}\n' for n in range(40)))
    runs = {}
    for name, valid in (("one", 8), ("same", 8), ("other", 6)):
        settings = {"src": str(text), "tokenizer": "bytes", "length": 16, "valid": valid}
        prepare(PrepareSettings(out=tmp_path / name / "data", **settings))
        runs[name] = str(tmp_path / name)

    def held_out(*names):
        inputs = {f"after-{name}": runs[name] for name in names}
        return downstream._held_out(
            Context(folder=tmp_path, shared=tmp_path, inputs=inputs, results={})
        )

    assert held_out("one", "same").num_sequences > 0
    with pytest.raises(UserError, match="other: its fine-tuning held out other rows"):
        held_out("one", "other")


def test_items_without_their_files_say_what_to_give(tmp_path):
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "Once."}\n')
    scale = find_scale("small", Given(data=str(text)))
    assert {"mmlu", "pubmed", "mrpc"} <= set(scale.apart)
    with pytest.raises(UserError, match="give --tasks DIR"):
        measuring_jobs(ITEMS["mmlu"], scale)
    with pytest.raises(UserError, match="has no mmlu/"):
        find_scale("small", Given(data=str(text), tasks=str(tmp_path)))


def test_small_models_for_tasks_read_streams(tmp_path):
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "Once."}\n')
    (tmp_path / "files" / "mrpc").mkdir(parents=True)
    scale = find_scale("small", Given(data=str(text), tasks=str(tmp_path / "files")))
    [job] = measuring_jobs(ITEMS["mrpc"], scale)
    teachers = [job.inputs[role].inputs["teacher"].key for role in ("sdtt", "didi")]
    assert teachers == [job.inputs["teacher"].key] * 2
    for role in ("teacher", "ar"):
        settings = job.inputs[role].settings()
        assert settings.data.rows == "stream"
        assert not settings.model.own_window


def test_adaptation_reads_the_rows_that_were_held_out(tmp_path, monkeypatch):
    """Nats of a uniform law are ln V for every row, whatever was drawn."""
    text = tmp_path / "text.jsonl"
    text.write_text("".join(f'{{"text": "story {n} ends here."}}\n' for n in range(40)))
    run = tmp_path / "run"
    settings = {"src": str(text), "tokenizer": "bytes", "length": 16, "valid": 8}
    prepare(PrepareSettings(out=run / "data", **settings))
    data = downstream.open_data(run / "data", "valid")
    config = ModelConfig(vocab_size=data.num_tokens + 1, length=16, layers=1, hidden=16, heads=2)
    torch.manual_seed(0)
    model = Model(build_model(config), config, data.tokenizer)
    with torch.no_grad():
        model.network.output_layer.linear.weight.zero_()
        model.network.output_layer.linear.bias.zero_()
    monkeypatch.setattr(downstream, "load", lambda source, device=None: model)
    context = Context(
        folder=tmp_path,
        shared=tmp_path,
        inputs={"before-teacher": "x", "after-teacher": str(run)},
        results={},
    )
    labels = {"before-teacher": "M, before", "after-teacher": "M, after"}
    found = downstream.adaptation(context, labels=labels, sequences=1000, draws=64, seed=0)
    before, after, untrained = found["rows"]
    assert before["num_samples"] == data.num_sequences
    # Only the number of masked positions is left to chance, with stratified times.
    assert before["nll"] == pytest.approx(math.log(data.num_tokens), rel=0.05)
    assert before["nll"] == after["nll"]  # the same noise
    assert found["compared"][0]["better"] is None
    assert untrained["model"] == "untrained M, before"
