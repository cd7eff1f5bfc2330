"""MMLU's files in their three forms, its prompts, and the part cut off for training."""

import csv
import lzma

import pytest
from scipy.stats import binomtest
from tests.tasks.tiny_models import questions_of

from didi_instruct.tasks.mmlu_data import (
    COLUMNS,
    LETTERS,
    Question,
    examples,
    read_mmlu,
    split_by_hash,
    with_shots,
)

FALSE_ALARM = 1e-5
SKY = Question("high_school_physics", "Why is the sky blue? ", ("a", "b, c", 'the "d"', "4"), 2, "")
TWO = Question("high_school_physics", "Two\nlines", ("N/A", "None", "", "null"), 3, "")
LAW = Question("law", "Is it?", ("yes", "no", "so", "if"), 0, "")


def rows(questions, letters):
    return [(q.text, *q.choices, LETTERS[q.answer] if letters else q.answer) for q in questions]


def write(path, questions, *, header=True, letters=False):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerows([COLUMNS] * header)
        table.writerows(rows(questions, letters))


def at_hand(root):
    """With a header, the answer an index."""
    write(root / "test" / "high_school_physics_test.csv", [SKY, TWO])
    write(root / "test" / "law_test.csv", [LAW])
    write(root / "dev" / "law_dev.csv", [LAW])


def as_published(root):
    """Without a header, the answer a letter; one file compressed."""
    for split, short in (("test", "test"), ("dev", "dev")):
        physics = [SKY, TWO] if split == "test" else []
        for name, questions in (("high_school_physics", physics), ("law", [LAW])):
            path = root / "data" / split / f"{name}_{short}.csv"
            write(path, questions, header=False, letters=True)
    path = root / "data" / "test" / "law_test.csv"
    path.with_name("law_test.csv.xz").write_bytes(lzma.compress(path.read_bytes()))
    path.unlink()


def of_the_hub(root):
    """Parquet, all subjects in a file; beside it folders of the subjects, which repeat them."""
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    for folder in ("all", "law"):
        (root / folder).mkdir(parents=True)
        for split, questions in (("test", [SKY, TWO, LAW]), ("dev", [LAW])):
            table = {
                "question": [q.text for q in questions],
                "subject": [q.subject for q in questions],
                "choices": [list(q.choices) for q in questions],
                "answer": [q.answer for q in questions],
            }
            pq.write_table(pa.table(table), root / folder / f"{split}-00000-of-00001.parquet")


def plain(questions):
    return [(q.subject, q.text, q.choices, q.answer) for q in questions]


@pytest.mark.parametrize("form", [at_hand, as_published, of_the_hub])
def test_all_forms_hold_the_same_questions(form, tmp_path):
    form(tmp_path)
    found = read_mmlu(tmp_path)
    assert plain(found.test) == plain([SKY, TWO, LAW])
    assert plain(found.dev) == plain([LAW])
    assert found.train == found.validation == []


def test_the_other_splits_are_found_by_their_names(tmp_path):
    at_hand(tmp_path)
    write(tmp_path / "val" / "law_val.csv", [LAW])
    write(tmp_path / "auxiliary_train" / "race.csv", [SKY], header=False, letters=True)
    found = read_mmlu(tmp_path)
    assert plain(found.validation) == plain([LAW])
    assert [q.subject for q in found.train] == [""]
    assert found.train[0].where == "auxiliary_train/race.csv:1"
    assert with_shots(found.train[0], (), range(4)).startswith(
        "The following are multiple choice questions (with answers).\n\nWhy"
    )


PRINTED = """\
The following are multiple choice questions (with answers) about high school physics.

Two
lines
A. N/A
B. None
C. 
D. null
Answer: D

Is it?
A. yes
B. no
C. so
D. if
Answer: A

Why is the sky blue?
A. a
B. b, c
C. the "d"
D. 4
Answer:"""  # noqa: W291


def test_prompts_are_those_of_the_harness():
    assert with_shots(SKY, [TWO, LAW], range(4)) == PRINTED
    [example] = examples([SKY])
    first, _, _, last = PRINTED.split("\n\n")
    assert (example.prompt, example.answer) == (f"{first}\n\n{last}", " C")


def test_choices_can_be_rotated():
    turned = with_shots(LAW, (), [1, 2, 3, 0])
    assert turned.endswith("Is it?\nA. no\nB. so\nC. if\nD. yes\nAnswer:")


def test_a_part_is_cut_off_by_the_hash_of_the_text():
    """Equal texts stay together, whatever their order and files; the share is kept by chance."""
    questions = questions_of(2000)
    again = questions_of(2000, subject="another")[::-1]
    taken, rest = split_by_hash(questions, 0.3)
    assert sorted(q.text for q in [*taken, *rest]) == sorted(q.text for q in questions)
    assert {q.text for q in split_by_hash(again, 0.3)[0]} == {q.text for q in taken}
    assert binomtest(len(taken), 2000, 0.3).pvalue > FALSE_ALARM


BAD = {
    "no-files": (
        {"notes.txt": "none", "a_tests.csv": "none"},
        "no test questions of MMLU; expected test/SUBJECT_test.csv",
    ),
    "columns": ({"a_test.csv": "question,A,B,C,D,answer\nq,1,2,3,4,0\n"}, "a_test.csv:1: has the"),
    "fewer": ({"a_test.csv": "q,1,2,3,A\n"}, "a_test.csv:1: has 5 columns"),
    "answer": ({"a_test.csv": "q,1,2,3,4,A\nq,1,2,3,4,E\n"}, "a_test.csv:2: the answer is `E`"),
    "empty": ({"a_test.csv": "q,1,2,3,4,A\n , 1,2,3,4,A\n"}, "a_test.csv:2: the question is empty"),
    "quotes": ({"a_test.csv": 'q,1,2,3,4,A\n"q,1,2,3,4,A\n'}, "not CSV"),
    "bytes": ({"a_test.csv": b"q,1,2,3,4,\xff\n"}, "not UTF-8"),
    "parquet": ({"all/test-00000-of-00001.parquet": "none"}, "not a readable Parquet file"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_told_by_file_and_row(name, tmp_path):
    files, message = BAD[name]
    for path, content in files.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        content = content if isinstance(content, bytes) else content.encode()
        (tmp_path / path).write_bytes(content)
    with pytest.raises(ValueError, match=".") as error:
        read_mmlu(tmp_path)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_other_columns_of_parquet_are_named(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"train": [1]}), tmp_path / "test-00000-of-00001.parquet")
    with pytest.raises(ValueError, match="has the columns train; MMLU's are answer, choices"):
        read_mmlu(tmp_path)
    with pytest.raises(ValueError, match="no such folder"):
        read_mmlu(tmp_path / "nowhere")
