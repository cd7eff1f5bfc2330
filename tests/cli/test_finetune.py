"""`didi finetune` at the command line: what it says, and one line for what is wrong."""

import json

import pytest
from tests.random_models import save_random


@pytest.fixture
def ready(tmp_path):
    """A model of the oracle language, and a file of questions about it."""
    save_random(tmp_path / "model")
    rows = [
        {"prompt": f"{adverb} Anna greets", "answer": " cats"}
        for adverb in ("often", "today", "again", "slowly")
    ]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows * 3))
    return tmp_path


def arguments(folder, *more, source="q.jsonl"):
    settings = ["train.steps=2", "train.batch_size=4", "train.save_every=1", *more]
    settings.append(f"data.source={folder / source}")
    chosen = [part for each in settings for part in ("--set", each)]
    return ["finetune", "finetune-answers", "--model", folder / "model", "--device", "cpu",
            "--out", folder / "run", *chosen]  # fmt: skip


def test_it_says_what_changed_and_what_comes_next(didi, ready):
    code, out, err = didi(*arguments(ready, "data.valid=3"))
    assert code == 0, err
    assert "9 prompts with answers to learn, 3 held out." in err
    assert f"Fine-tuned {ready / 'model'} for 2 steps." in out
    assert "nats per answer token (95%, the same noise)." in out
    assert f"Next: didi generate {ready / 'run'}" in out
    code, out, err = didi("info", ready / "run")
    assert f"finetuned-from {ready / 'model'}" in out
    code, out, _ = didi(*arguments(ready, "data.valid=3"), "--resume")
    assert code == 0
    assert "There is" in out
    code, _, err = didi(*arguments(ready))
    assert code == 2
    assert "already holds a run" in err


def test_one_held_out_row_is_enough(didi, ready):
    """Its spread is not known, which stops nothing."""
    lines = (ready / "q.jsonl").read_text().splitlines()[:4]
    (ready / "q.jsonl").write_text("\n".join(lines) + "\n")
    code, out, err = didi(*arguments(ready, "data.valid=1"))
    assert code == 0, err
    assert "Held out: " in out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "often Anna greets"}', "q.jsonl:1: has no field `answer`, only `prompt`"),
        ('{"prompt": " ", "answer": " cats"}', "q.jsonl:1: `prompt` is empty"),
        ('{"prompt": "often", "answer": " zebras"}', "q.jsonl:1: The tokenizer cannot encode"),
        ("prompt,answer", "q.jsonl:1: not JSON"),
        ("", "q.jsonl: has no rows; write one a line"),
    ],
)
def test_bad_data_is_one_line(didi, ready, line, message):
    (ready / "q.jsonl").write_text(line + "\n")
    code, _, err = didi(*arguments(ready))
    assert code == 2
    assert message in err
    assert len(err.strip().splitlines()) == 1


def test_mmlu_without_a_training_split_takes_a_share_of_test(didi, ready):
    """What `didi eval --task mmlu --sft-share` leaves to be scored is not trained on."""
    from didi_instruct.tasks.mmlu_data import read_mmlu, split_by_hash

    names = ["Anna", "Boris", "Clara", "David", "Emma", "Felix", "Grace", "Hugo"]
    for split in ("dev", "test"):
        (ready / "mmlu" / split).mkdir(parents=True)
        rows = [f"{name} {split},cats,pies,boats,drums,{n % 4}" for n, name in enumerate(names)]
        text = "\n".join(["question,choice0,choice1,choice2,choice3,answer", *rows])
        (ready / "mmlu" / split / f"animals_{split}.csv").write_text(text + "\n")
    save_random(ready / "model", tokenizer=byte_tokenizer(), vocab_size=258, length=160)
    how = arguments(ready, source="mmlu")
    how[1] = "finetune-mmlu"
    code, _, err = didi(*how)
    assert code == 2
    assert "has no training split (auxiliary_train)" in err
    code, _, err = didi(*how, "--set", "answers.share=0.5", "--set", "data.valid=0")
    assert code == 0, err
    taken, rest = split_by_hash(read_mmlu(ready / "mmlu").test, 0.5)
    assert taken
    assert rest
    assert f"{len(taken)} prompts with answers to learn" in err


def byte_tokenizer():
    from didi_instruct.data.tokenizer import Tokenizer

    return Tokenizer.load("bytes")
