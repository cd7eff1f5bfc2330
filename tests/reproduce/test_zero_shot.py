"""The zero-shot table: ratios by hand, stand-ins that the real readers read, rows that add up."""

import math
from pathlib import Path

import pytest

import didi_instruct as didi
from didi_instruct.data.oracle import OracleLanguage
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.evaluation.corpora import find_corpora, open_corpora
from didi_instruct.evaluation.text_likelihood import pack
from didi_instruct.reproduce.minutes import learning
from didi_instruct.reproduce.paper import CORPORA
from didi_instruct.reproduce.task_files import sentences
from didi_instruct.reproduce.zero_shot import (
    mean_ratios,
    paper_rows,
    toy_models,
    with_ratios,
    write_corpora,
    write_text,
    zero_shot_rows,
)

from .small_models import save_letters


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpora")
    write_corpora(folder, num=12)
    return folder


def test_the_papers_ratios_by_hand():
    rows = {(row["method"], row["corpus"]): row for row in paper_rows()}
    assert len(rows) == 8 * 7
    ptb = rows["DiDi-Instruct", "ptb"]
    assert ptb["ratio_to_teacher"] == pytest.approx(107.03 / 95.26)
    assert rows["DUO distilled", "arxiv"]["ratio_to_teacher"] == pytest.approx(50.27 / 40.39)
    assert rows["MDLM", "ptb"]["ratio_to_teacher"] is None
    means = mean_ratios(paper_rows())
    product = math.prod(
        rows["DiDi-Instruct", c]["nelbo_ppl"] / rows["MDLM", c]["nelbo_ppl"] for c in CORPORA
    )
    assert means["DiDi-Instruct"] == pytest.approx(product ** (1 / 7))
    assert set(means) == {"DiDi-Instruct", "DUO distilled"}


def test_without_its_teachers_number_a_row_has_no_ratio():
    rows = [
        {"method": "student", "corpus": "ptb", "nelbo_ppl": 3.0},
        {"method": "student", "corpus": "lm1b", "nelbo_ppl": None},
        {"method": "teacher", "corpus": "lm1b", "nelbo_ppl": 2.0},
    ]
    found = with_ratios(rows, {"student": "teacher"})
    assert [row["ratio_to_teacher"] for row in found] == [None, None, None]
    assert mean_ratios(found) == {}


# Stand-ins


def test_sentences_are_of_the_language():
    found = sentences(9)
    assert len(found) == 9
    language = OracleLanguage.default()
    words = set(language.words)
    assert all(set(text.split()) < words for text in found)
    assert all(len(text.split()) == language.slots - 2 for text in found)
    assert not any(set("()[]{}") & set(text) for text in found)


def test_every_corpus_is_found_and_read_in_its_form(corpora):
    assert tuple(find_corpora(corpora)) == CORPORA
    read = {name: list(texts) for name, texts in open_corpora(CORPORA, corpora).items()}
    for number, name in enumerate(CORPORA):
        first = sentences(12, seed=1 + number)[0]
        texts = "\n".join(read[name])
        assert (first.lower() if name == "ptb" else first) in texts
    assert read["ptb"][0].endswith("? 1"), "<unk> and N, detokenised"
    assert ", well-known." in read["wikitext"][1]
    assert read["lm1b"][0] == f"{sentences(12, seed=3)[0]}."
    assert all(len(texts) >= 12 for texts in read.values())


def test_rows_are_likelihoods_of_those_texts(corpora, tmp_path):
    """PTB's perplexity is that of its rows under the model; a copy of the teacher costs 1."""
    one, other = (save_letters(tmp_path / name, seed) for seed, name in enumerate(("one", "other")))
    again = save_letters(tmp_path / "again", 0)
    rows = zero_shot_rows(
        {"teacher": one, "student": other, "copy": again},
        teacher_of={"student": "teacher", "copy": "teacher"},
        out=tmp_path, data=corpora, sequences=4, draws=2, seed=5, device="cpu",
    )  # fmt: skip
    assert [row["corpus"] for row in rows] == [*CORPORA] * 3
    texts = open_corpora(["ptb"], corpora)["ptb"]
    packed = pack("ptb", texts, Tokenizer.load("bytes"), 16, 4).data
    nelbo = didi.load(one, device="cpu").nelbo(packed.ordered(0, 4), seed=5, draws=2)
    assert rows[0]["nelbo_ppl"] == pytest.approx(math.exp(nelbo))
    assert (rows[0]["seed"], rows[0]["num_sequences"], rows[0]["tokens"]) == (5, 4, 64)
    assert rows[0]["source"] == "ptb.test.txt"
    assert not any(str(tmp_path) in str(row) for row in rows), "paths of this machine"
    ratios = mean_ratios(rows)
    assert ratios["copy"] == 1
    assert ratios["student"] != 1


def test_toy_models_learn_and_are_trained_once(tmp_path, monkeypatch):
    """Thirty steps on letters are better than guessing one of 257; a second call trains nothing."""
    write_text(tmp_path / "text.txt", num=400)
    found = toy_models(tmp_path, steps=30, device="cpu")
    words = Tokenizer.load("bytes")
    text = pack("it", sentences(40, seed=9), words, 64, 8).data.ordered(0, 8)
    teacher = didi.load(found["teacher"], device="cpu")
    assert teacher.nelbo(text) < 0.8 * math.log(257)
    assert didi.load(found["student"], device="cpu").discriminator is not None
    assert learning(Path(found["student"]))["updates"] == 1, "six steps, five of them warm-up"
    monkeypatch.setattr("didi_instruct.training.loop.Loop.run", None)
    assert toy_models(tmp_path, steps=30, device="cpu") == found
