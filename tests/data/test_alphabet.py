"""Proteins as data: ESM's tokens, chains letter by letter, long ones split into rows."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

from didi_instruct.data import packing
from didi_instruct.data.dataset import open_data
from didi_instruct.data.oracle import OracleLanguage
from didi_instruct.data.prepare import PrepareSettings, prepare
from didi_instruct.data.readers import LONGEST_CHAIN
from didi_instruct.data.tokenizer import (
    AMINO_ACIDS,
    ESM_VOCABULARY,
    Tokenizer,
    amino_ids,
    is_protein,
    residues_of,
)
from didi_instruct.errors import UserError

pytestmark = pytest.mark.usefixtures("fast_disk")

EOS = 2
FASTA = ">a\nMKV\nLA\n>b\nGGXU\n>c long\nACDEFGHIKLMN\n>d\nw\n"


def prepared(folder: Path, content: str | bytes = FASTA, name: str = "a.fasta", **options) -> Path:
    data = content.encode() if isinstance(content, str) else content
    (folder / name).write_bytes(data)
    settings = {"tokenizer": "esm", "length": 5, "valid": 0, "rows": "document", "long": "split"}
    settings |= {"out": folder / "out"} | options
    prepare(PrepareSettings(src=str(folder / name), **settings))
    return settings["out"]


@pytest.mark.parametrize("text", ["MKVLA", AMINO_ACIDS, "XBUZO", "M", "AJC", "A<mask>C", "", "a1"])
def test_tokens_are_those_of_the_library(tmp_path: Path, text: str) -> None:
    """Ids, frame and unknown letters, of the tokenizer itself and of its tokenizer.json."""
    (tmp_path / "vocab.txt").write_text("\n".join(ESM_VOCABULARY))
    theirs = transformers.EsmTokenizer(str(tmp_path / "vocab.txt"))
    ours = Tokenizer.load("esm")
    ours.save(tmp_path / "saved")
    for tokenizer in (ours, Tokenizer.load(tmp_path / "saved")):
        ids = tokenizer.encode([text])[0]
        assert ids == theirs(text, add_special_tokens=False)["input_ids"]
        before, after = tokenizer.frame("<mask>")
        assert [*before, *ids, *after] == theirs(text)["input_ids"]
        assert tokenizer.eot_id == theirs.eos_token_id == EOS
        assert tokenizer.size == len(theirs) == 33
        if set(text) <= set(residues_of(tokenizer.vocabulary)):
            assert tokenizer.decode([*ids, EOS, EOS], stop_at_eot=True) == text


def test_the_tokenizer_is_the_same_in_every_process() -> None:
    """Python orders sets by a hash of its own in each."""
    code = "from didi_instruct.data.tokenizer import Tokenizer; print(Tokenizer.load('esm').hash)"
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert found == {Tokenizer.load("esm").hash + "\n"}


def test_which_vocabularies_are_of_proteins() -> None:
    known = Tokenizer.load("esm").vocabulary
    assert amino_ids(known) == set(range(4, 24))
    assert residues_of(known) == "".join(sorted(AMINO_ACIDS + "XBUZO"))
    for other in (Tokenizer.load("bytes"), OracleLanguage.default().tokenizer):
        assert not is_protein(other.vocabulary)
        assert residues_of(other.vocabulary) == ""


def test_long_chains_are_split_into_rows(tmp_path: Path) -> None:
    """Every residue once and in order, and an end only where a chain ends."""
    folder = prepared(tmp_path)
    rows, tokenizer = open_data(folder).ordered(0, 9).tolist(), Tokenizer.load(folder)
    texts = tokenizer.decode_batch(rows)
    assert texts == [
        "MKVLA",
        "GGXU<eos>",
        *("ACDEF", "GHIKL", "MN<eos><eos><eos>"),
        "W<eos><eos><eos><eos>",
    ]


def test_lower_case_and_white_space_are_no_matter(tmp_path: Path) -> None:
    one = prepared(tmp_path, ">a\nMKVL\n>b\nAC\n", out=tmp_path / "one")
    two = prepared(tmp_path, ">a\r\nmk vL\r\n\r\n>b\r\nA\tc\r\n", out=tmp_path / "two")
    rows = [open_data(folder).ordered(0, 9).tolist() for folder in (one, two)]
    assert rows[0] == rows[1]


BAD = {
    "gap.fasta": (">a\nMKV\n>b\nAC\nA-C\n", r"gap.fasta:5: '-' is no residue"),
    "stop.fasta": (">a\nMKV*\n", r"stop.fasta:2: '\*' is no residue"),
    "j.fasta": (">a\nMKV\n>b\nACJ\n", r"j.fasta:4: 'J' is no residue. Known are ABCDEFGHIKLMNOP"),
    "mask.fasta": (">a\nM<mask>\n", r"mask.fasta:2: '<' is no residue"),
    "none.fasta": (">a\nMKV\n>b\n\n>c\nA\n", r"none.fasta:3: an empty chain"),
    "last.fasta": (">a\nMKV\n>b\n", r"last.fasta:3: an empty chain"),
    "text.fasta": ("MKV\n", r"text.fasta:1: a sequence before the first `>` header: not FASTA"),
    "empty.fasta": ("", r"empty.fasta: the corpus is empty"),
    "long.fasta": (
        ">a\nMKV\n>b\n" + "A" * 60_000 + "\n" + "A" * (LONGEST_CHAIN - 59_999) + "\n",
        r"long.fasta:5: a chain of more than 100,000 residues",
    ),
    "dna.txt": ("MKV\nhttp\nMK7\n", r"dna.txt: document 3: '7' is no residue"),
    "seq.jsonl": ('{"text": "MKV"}\n{"text": "MJ"}\n', r"seq.jsonl: document 2: 'J' is no residue"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_chains_are_named_with_their_place(tmp_path: Path, name: str) -> None:
    content, message = BAD[name]
    with pytest.raises(UserError, match=message) as caught:
        prepared(tmp_path, content, name, documents="line")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists(), "nothing is written before all is read"


def test_a_file_of_any_length_is_not_split_in_memory(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(packing, "LONGEST_SPLIT", 40)
    with pytest.raises(UserError, match="has 40 tokens or more, too many to split"):
        prepared(tmp_path, "a" * 60 + "\n" + "b", "a.txt", tokenizer="bytes", documents="line")
