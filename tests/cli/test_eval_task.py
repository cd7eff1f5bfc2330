"""`didi eval --task`: the table, the numbers, and what is refused before any work."""

import json

import pytest
from tests.random_models import DUO, save_random
from tests.tasks.test_mmlu_data import write
from tests.tasks.tiny_models import questions_of, texts_of, word_tokenizer

from didi_instruct.tasks.registry import TASKS
from didi_instruct.tasks.task import KEYS


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder to stand in, with two models and a task's data."""
    monkeypatch.chdir(tmp_path)
    questions, dev = questions_of(12), questions_of(2, seed=1)
    write(tmp_path / "data" / "test" / "small_talk_test.csv", questions)
    write(tmp_path / "data" / "dev" / "small_talk_dev.csv", dev)
    tokenizer = word_tokenizer(texts_of([*questions, *dev]))
    shape = {"tokenizer": tokenizer, "vocab_size": tokenizer.size + 1, "length": 48}
    save_random(tmp_path / "one", **shape)
    save_random(tmp_path / "ar", kind="ar", **shape)
    save_random(tmp_path / "duo", **DUO | shape | {"vocab_size": tokenizer.size})
    return tmp_path


def test_mmlu_has_a_table_and_numbers(didi, place):
    asked = ("--task", "mmlu", "--data", "data", "--shots", 1, "--draws", 2, "--limit", 10)
    code, out, err = didi("eval", "one", "ar", "duo", *asked, "--permute", "--json", "r.json")
    assert code == 0, err
    report = json.loads((place / "r.json").read_text())
    names = ["one", "ar", "duo", "untrained one", "untrained ar", "untrained duo", "chance"]
    assert [row["model"] for row in report["rows"]][:-1] == names
    assert [row["baseline"] for row in report["rows"]] == [
        *(None,) * 3, *("untrained",) * 3, "chance", "majority"
    ]  # fmt: skip
    for row in report["rows"]:
        assert {*KEYS, "baseline"} <= row.keys()
        assert (row["num"], row["split"]) == (10, "test")
        assert row["model"] in out
    assert report["settings"]["shots"] == 1
    assert report["settings"]["draws"] == 2
    assert {"commit", "torch"} & report["versions"].keys()
    assert report["tables"]["comparisons"][0]["models"] == ["one", "ar"]
    for note in report["notes"]:
        assert note in out
    assert "letters" in err
    assert "Wrote r.json" in out


def test_qa_writes_answers_in_steps(didi, place):
    row = {"prompt": "q1 ? A.", "answer": " c1.0 B."}
    (place / "qa.jsonl").write_text(json.dumps(row) + "\n")
    code, out, err = didi("eval", "one", "ar", "--task", "qa", "--data", "qa.jsonl", "--steps", 2)
    assert code == 0, err
    assert 'always "c1.0 B."' in out


REFUSED = {
    "no-task": (["one", "--shots", 2], "--shots needs --task NAME"),
    "other-flag": (
        ["one", "--task", "mmlu", "--judge", "oracle"],
        "--judge is not for --task mmlu",
    ),
    "no-data": (["one", "--task", "mmlu"], "--task mmlu needs its data: add --data DIR"),
    "unknown": (["one", "--task", "mmul", "--data", "data"], "Did you mean `mmlu`?"),
    "no-model": (["--task", "mmlu", "--data", "data"], "name one or more"),
    "nowhere": (["one", "--task", "mmlu", "--data", "nowhere"], "nowhere: no such file or folder"),
    "option": (["one", "--task", "qa", "--data", "data", "--shots", 1], "`shots` is not a setting"),
    "range": (["one", "--task", "mmlu", "--data", "data", "--shots", 9], "shots is 9: use 0 to 5"),
    "steps": (["one", "--task", "qa", "--data", "data", "--steps", "2,x"], "give numbers"),
    "pair": (
        ["one", "--task", "mmlu", "--data", "data", "--option", "x=1"],
        "`x` is not a setting",
    ),
    "words": (["words", "--task", "mmlu", "--data", "data"], "_test.csv:2: words cannot read it"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name, didi, place):
    if name == "words":
        save_random(place / "words")
    arguments, message = REFUSED[name]
    code, _, err = didi("eval", *arguments)
    assert code == 2, err
    assert message in err
    assert err.count("\n") == 1


def test_every_task_is_complete():
    for name, task in TASKS.items():
        assert task.name == name
        assert task.help
        task.options()
        assert len({column.key for column in task.columns}) == len(task.columns)


@pytest.mark.parametrize(
    ("task", "part", "told"),
    [
        ("mmlu", "mmlu.Scorer", "the same command begins anew"),
        ("mrpc", "mrpc.read_pairs", "seeds that are done are kept, the same command goes on"),
    ],
)
def test_ctrl_c_says_what_is_kept(didi, place, monkeypatch, task, part, told):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(f"didi_instruct.tasks.{part}", interrupted)
    code, _, err = didi("eval", "one", "--task", task, "--data", "data")
    assert code == 130
    assert told in err
