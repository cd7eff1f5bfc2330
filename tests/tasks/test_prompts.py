"""Prompts with answers: how they are read, and where they are cut."""

import gzip
import json
import lzma
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import UserError
from didi_instruct.tasks.encoding import encode
from didi_instruct.tasks.prompts import read_examples

GPT2 = Path(__file__).parents[2].parent / "shared" / "data" / "gpt2_tokenizer"
ROWS = [{"prompt": "What? Answer:", "answer": " A"}, {"prompt": "So?", "answer": "yes", "id": 3}]


@pytest.fixture(scope="module")
def merging():
    """Bytes, two of which merge across what may be a cut: `fo`, and a space with its letter."""
    characters = pre_tokenizers.ByteLevel.alphabet()
    vocabulary = {c: n for n, c in enumerate(sorted(characters))}
    vocabulary |= {"fo": 256, "Ġa": 257}
    backend = Backend(models.BPE(vocabulary, [("f", "o"), ("Ġ", "a")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return Tokenizer(backend)


@given(prompt=st.text("foa b\n", max_size=12), answer=st.text("foa b\n", min_size=1, max_size=8))
def test_prompt_and_answer_are_the_whole_text_and_no_answer_is_in_the_prompt(
    merging, prompt, answer
):
    found = encode(prompt, answer, merging)
    assert found.prompt + found.answer == merging.encode([prompt + answer])[0]
    # Every token of the prompt is one that the prompt alone would begin with.
    assert merging.encode([prompt.rstrip()])[0][: len(found.prompt)] == found.prompt


def test_spaces_move_to_the_answer_and_a_token_across_the_cut_is_learnt(merging):
    """`x ` and `a` are `x` and ` a`; of `f` and `oa`, the token `fo` belongs to the answer."""
    assert encode("x ", "a", merging) == encode("x", " a", merging)
    assert encode("x ", "a", merging).answer == [257]
    assert encode("xf", "ob", merging).answer[0] == 256


def test_letters_are_one_token_of_gpt2():
    if not GPT2.is_dir():
        pytest.skip("GPT-2's vocabulary is not here")
    tokenizer = Tokenizer.load(GPT2)
    for letter, wanted in zip("ABCD", [317, 347, 327, 360], strict=True):
        assert encode("What?\nAnswer:", f" {letter}", tokenizer).answer == [wanted]
        assert encode("What?\nAnswer: ", letter, tokenizer).answer == [wanted]


def write(path, rows):
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    openers = {".gz": gzip.compress, ".xz": lzma.compress}
    if path.suffix == ".zst":
        lines = pytest.importorskip("zstandard").compress(lines)
    path.write_bytes(openers.get(path.suffix, bytes)(lines))
    return path


@pytest.mark.parametrize("ending", ["", ".gz", ".xz", ".zst"])
def test_files_are_read_with_their_rows(tmp_path, ending):
    path = write(tmp_path / f"q.jsonl{ending}", ROWS)
    found = list(read_examples(path))
    assert [(one.prompt, one.answer) for one in found] == [(r["prompt"], r["answer"]) for r in ROWS]
    assert [one.where for one in found] == [f"q.jsonl{ending}:1", f"q.jsonl{ending}:2"]
    (tmp_path / "notes.txt").write_text("passed over")
    assert [one.answer for one in read_examples(tmp_path)] == [" A", "yes"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "target": "b"}, "q.jsonl:2: has no field `answer`, only `prompt`, `targ"),
        ({"prompt": " \n", "answer": "b"}, "q.jsonl:2: `prompt` is empty: fill it"),
        ({"prompt": "a", "answer": ""}, "q.jsonl:2: `answer` is empty: fill it"),
        ({"prompt": "a", "answer": 3}, "q.jsonl:2: `answer` is 3, not text: write it in quotes"),
        (["a", "b"], "q.jsonl:2: not a JSON object"),
        ({"prompt": "\ud800", "answer": "b"}, "q.jsonl:2: `prompt` is not valid Unicode"),
    ],
)
def test_a_bad_row_is_named(tmp_path, row, message):
    path = write(tmp_path / "q.jsonl", [ROWS[0], row])
    with pytest.raises(UserError, match=message) as caught:
        list(read_examples(path))
    assert "\n" not in str(caught.value)


def test_files_without_rows_and_of_other_kinds_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"empty.jsonl: has no rows; write one a line"):
        list(read_examples(write(tmp_path / "empty.jsonl", [])))
    (tmp_path / "q.txt").write_text("a")
    with pytest.raises(UserError, match=r"q.txt: prompts with answers are read from .jsonl"):
        list(read_examples(tmp_path / "q.txt"))
    with pytest.raises(UserError, match="no such file or folder"):
        list(read_examples(tmp_path / "none.jsonl"))
