"""Rows of answers: a pure stream, held-out prompts, and what is on disk."""

import itertools

import numpy as np
import pytest
import torch

from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import UserError
from didi_instruct.tasks import answer_files
from didi_instruct.tasks.answer_files import INDEX, MANIFEST, TOKENS, open_answers
from didi_instruct.tasks.answers import Window
from didi_instruct.tasks.prompts import Example
from didi_instruct.training.answers import ANSWER, GIVEN, PADDING

BYTES = Tokenizer.load("bytes")
WINDOW = Window(length=12)
EXAMPLES = [Example(f"p{n % 20:02d}", "abcd"[: 1 + n % 4], f"q.jsonl:{n + 1}") for n in range(60)]


def opened(folder, examples=EXAMPLES, window=WINDOW, **options):
    read = None if examples is None else lambda: iter(examples)
    return open_answers(read, folder, BYTES, window, **options)


def texts(rows):
    """Prompt and answer of each row, by its parts."""
    found = []
    for tokens, part in rows:
        prompt, answer = (BYTES.decode(tokens[part == which]) for which in (GIVEN, ANSWER))
        assert (part[len(prompt) + len(answer) :] == PADDING).all()
        found.append((prompt, answer))
    return found


def test_an_epoch_has_every_row_once_and_a_row_its_place_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(answer_files, "AT_ONCE", 7)
    data, none, _ = opened(tmp_path, valid=0, seed=3)
    assert none is None
    epochs = [texts(data.rows(start, 60)) for start in (0, 60)]
    wanted = sorted((one.prompt, one.answer) for one in EXAMPLES)
    assert [sorted(epoch) for epoch in epochs] == [wanted, wanted]
    assert epochs[0] != epochs[1]
    assert texts(data.rows(55, 10)) == [*epochs[0][55:], *epochs[1][:5]]
    assert texts(opened(tmp_path, valid=0, seed=4)[0].rows(0, 60)) != epochs[0]
    assert texts(data.ordered(58, 9)) == [(e.prompt, e.answer) for e in EXAMPLES[58:]]


def test_rows_are_as_long_as_the_longest_that_was_asked_for(tmp_path):
    data, *_ = opened(tmp_path, valid=0)
    assert data.length == 7
    assert data.ordered(0, 1).shape == (1, 2, 4)
    assert data.ordered(0, 4).shape == (4, 2, 7)
    filled, *_ = opened(tmp_path / "filled", valid=0, window=Window(length=12, fill=256))
    rows = filled.ordered(0, 2)
    assert rows.shape == (2, 2, 12)
    assert rows[0].tolist() == [[*b"p00a", *[256] * 8], [1, 1, 1, ANSWER, *[GIVEN] * 8]]
    assert filled.lengths == (0, 0, 0, 0, 15, 15, 15, 15, 0, 0, 0, 0, 0)


def test_equal_prompts_are_held_out_together_in_an_order_of_chance(tmp_path):
    """Their answers differ, and play no part."""
    examples = [Example(one.prompt, f"{n:02d}", one.where) for n, one in enumerate(EXAMPLES)]
    train, valid, _ = opened(tmp_path, examples, valid=6)
    assert (train.num_sequences, valid.num_sequences) == (54, 6)
    sides = [{p for p, _ in texts(part.ordered(0, 60))} for part in (train, valid)]
    assert not sides[0] & sides[1]
    assert len(sides[1]) == 2
    usual = opened(tmp_path, examples)[1]
    assert usual.num_sequences == 3, "1% and its likes"
    with pytest.raises(UserError, match=r"data.valid is 60.*all 60 rows"):
        opened(tmp_path, examples, valid=60)


def test_fingerprints_tell_streams_apart(tmp_path):
    """Of examples, order, window, seed and what is held out; not of where rows stand."""
    marks = [
        opened(tmp_path / "a", valid=0)[0].fingerprint,
        opened(tmp_path / "b", EXAMPLES[::-1], valid=0)[0].fingerprint,
        opened(tmp_path / "c", valid=0, window=Window(length=11))[0].fingerprint,
        opened(tmp_path / "d", valid=0, seed=1)[0].fingerprint,
        opened(tmp_path / "e", valid=3)[0].fingerprint,
    ]
    assert len(set(marks)) == 5
    moved = [Example(e.prompt, e.answer, "elsewhere") for e in EXAMPLES]
    assert opened(tmp_path / "f", moved, valid=0)[0].fingerprint == marks[0]


def test_what_is_there_is_not_written_again(tmp_path):
    opened(tmp_path)
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    rows = opened(tmp_path)[0].rows(0, 5)
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
    assert torch.equal(opened(tmp_path, None, begun=True)[0].rows(0, 5), rows)
    with pytest.raises(UserError, match="the prompts and answers changed since the run began"):
        opened(tmp_path, EXAMPLES[1:], begun=True)
    with pytest.raises(UserError, match=r"answers\.\*, changed since the run began"):
        opened(tmp_path, window=Window(length=13), begun=True)
    assert opened(tmp_path, EXAMPLES[1:], valid=0)[0].num_sequences == 59


@pytest.mark.parametrize(("name", "change"), [*itertools.product((TOKENS, INDEX), ("cut", "gone"))])
def test_damaged_files_are_told(tmp_path, name, change):
    opened(tmp_path)
    if change == "gone":
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-24])
    with pytest.raises(UserError, match="its tokens are damaged"):
        opened(tmp_path, None)


def test_a_row_that_fails_leaves_nothing_that_looks_whole(tmp_path):
    bad = [*EXAMPLES, Example("p", "x" * 12, "q.jsonl:61")]
    with pytest.raises(UserError, match=r"q.jsonl:61: the answer has 12 tokens.*reads 12, prompt"):
        opened(tmp_path, bad)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match=f"has no {MANIFEST}: give the data again"):
        opened(tmp_path, None)


def test_long_prompts_are_cut_from_the_left_and_counted(tmp_path):
    long = [Example("0123456789", "abcd", "q.jsonl:1"), EXAMPLES[0]]
    data, _, prepared = opened(tmp_path, long, valid=0)
    assert prepared.cut == 1
    assert texts(data.ordered(0, 2)) == [("23456789", "abcd"), ("p00", "a")]
    with pytest.raises(UserError, match=r"q.jsonl:1: prompt and answer have 14 tokens"):
        opened(tmp_path, long, window=Window(length=12, long="refuse"))
    ended, *_ = opened(tmp_path, long, valid=0, window=Window(length=12, end=256))
    assert ended.ordered(0, 1)[0, 0].tolist() == [*b"3456789", *b"abcd", 256]
    assert (ended.ordered(0, 1)[0, 1] == ANSWER).sum() == 5


def test_a_token_that_the_model_never_writes_is_named(tmp_path):
    banned = Window(length=12, banned=frozenset(b"c"))
    with pytest.raises(UserError, match=r"q.jsonl:3: `answer` has the token 'c', which this model"):
        opened(tmp_path, window=banned)


def test_a_text_that_cannot_be_encoded_is_named(tmp_path):
    words = Tokenizer.from_words(["one", "two"])
    examples = [Example("one", " two", "q.jsonl:1"), Example("one", " three", "q.jsonl:2")]
    with pytest.raises(UserError, match=r"q.jsonl:2: The tokenizer cannot encode this text"):
        open_answers(lambda: examples, tmp_path, words, WINDOW)


def test_rows_of_a_long_file_stay_on_disk(tmp_path):
    """A stream holds its index in memory: 24 bytes a row."""
    data, *_ = opened(tmp_path, valid=0)
    assert isinstance(data._tokens, np.memmap)
    assert data._index.nbytes == 24 * 60
