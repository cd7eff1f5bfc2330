"""Questions with choices, and answers that a model writes."""

import itertools
import json
import math

import numpy as np
import pytest
import torch
from tests.tasks.tiny_models import LENGTH, V, tiny

from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.tasks import qa
from didi_instruct.tasks.qa import QaOptions
from didi_instruct.tasks.task import NamedModel
from didi_instruct.tasks.written_answers import final, variety

WORDS = [f"w{n}" for n in range(V)]


def model_of(kind):
    model = tiny(kind)
    model.tokenizer = Tokenizer.from_words(WORDS)
    return model


def write(folder, rows):
    path = folder / "questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def report(model, path, **options):
    entry = NamedModel("mine", model)
    found = qa.evaluate([entry], path, QaOptions(**options), lambda *_: None)
    return found, {row["model"]: row for row in found.rows}


def text_of(ids):
    return " ".join(WORDS[i] for i in ids)


def test_the_likeliest_choice_is_that_of_all_texts(tmp_path):
    """An AR model's favourite among answers of one and two words, by enumeration."""
    model = model_of("ar")
    choices = [[a] for a in range(V)] + [[a, b] for a, b in itertools.product(range(V), repeat=2)]
    rows, right, by_byte, nats = [], 0, 0, []
    lengths = torch.tensor([len(f" {text_of(choice)}") for choice in choices])
    for prompt in itertools.product(range(V), repeat=2):
        whole = [torch.tensor([[*prompt, *choice]]) for choice in choices]
        log_p = torch.stack([model.network.log_prob(text)[0] for text in whole])
        log_p = (log_p - model.network.log_prob(torch.tensor([prompt]))).detach()
        gold = int((log_p if prompt[0] < 2 else log_p / lengths).argmax())  # either may be right
        right += int(log_p.argmax()) == gold
        by_byte += int((log_p / lengths).argmax()) == gold
        nats.append(-float(log_p[gold]))
        row = {"prompt": text_of(prompt), "choices": [" " + text_of(c) for c in choices]}
        rows.append(row | {"answer": gold})
    _, found = report(model, write(tmp_path, rows))
    assert found["mine"]["accuracy"] == pytest.approx(right / 25)
    assert found["mine"]["accuracy_per_byte"] == pytest.approx(by_byte / 25)
    assert right != by_byte
    assert found["mine"]["nll"] == pytest.approx(sum(nats) / 25, abs=1e-4)
    assert found["chance"]["accuracy"] == pytest.approx(1 / 30)
    assert found["untrained mine"]["baseline"] == "untrained"


@pytest.mark.parametrize("kind", ["ar", "masked", "masks", "windows", "duo"])
def test_greedy_answers_are_matched_exactly(kind, tmp_path):
    """A model is right where the answer is its own, and wrong elsewhere."""
    model = model_of(kind)
    prompts = list(itertools.product(range(1, V), repeat=2))
    rows = [
        {"prompt": text_of(prompt), "answer": f" {text_of(answer)}"}
        for prompt, answer in zip(prompts, greedy(model, prompts, kind), strict=True)
    ]
    *begin, last = rows[0]["answer"].split()
    wrong = WORDS[WORDS.index(last) % (V - 1) + 1]
    rows[0]["answer"] = f" {' '.join([*begin, wrong])}"
    _, found = report(model, write(tmp_path, rows), steps=(1,), draws=1)
    assert found["mine"]["accuracy"] == pytest.approx(15 / 16)
    assert found["mine"]["measure"] == "exact match"
    _, few = report(model, write(tmp_path, rows), steps=(1,), draws=1, batch_tokens=1)
    assert few["mine"]["accuracy"] == pytest.approx(15 / 16)


def greedy(model, prompts, kind):
    """Likeliest tokens by the network itself, two of an AR model.

    What several masks and a uniform-state model are told beside the text is noise, which belongs to
    a row; so they are asked through their samplers.
    """
    rows = torch.tensor(prompts)
    if kind == "ar":
        for _ in range(2):
            start = torch.full_like(rows[:, :1], model.config.vocab_size - 1)
            last = model.network(torch.cat([start, rows], 1))[:, -1]
            rows = torch.cat([rows, last.argmax(-1, keepdim=True)], 1)
        return rows[:, -2:].tolist()
    if kind in ("duo", "masks"):
        empty = model.config.vocab_size if kind == "duo" else model.mask_id
        rows = torch.cat([rows, torch.full_like(rows[:, :1], empty)], 1)
        sampler = "uniform-state" if kind == "duo" else "confidence"
        settings = {"temperature": 0.0, "sampler": sampler, "steps": 1}
        return model.sample(tokens=rows, **settings)[:, -1:].tolist()
    after = torch.zeros(len(rows), LENGTH - 3 if kind == "windows" else 0, dtype=torch.long)
    mask = torch.full_like(rows[:, :1], model.mask_id)
    logits = model.denoiser(torch.cat([rows, mask, after], 1), 1.0)[:, 2]
    return logits.argmax(-1, keepdim=True).tolist()


def test_the_nll_of_a_masked_models_answer_is_the_bound(tmp_path):
    model = model_of("masked")
    path = write(tmp_path, [{"prompt": "w1 w2", "answer": " w3"}])
    _, found = report(model, path)
    law = model.denoiser(torch.tensor([[1, 2, model.mask_id]]), 1.0)[0, -1].log_softmax(-1)
    assert found["mine"]["nll"] == pytest.approx(-float(law[3]), abs=1e-5)
    assert math.isfinite(found["untrained mine"]["nll"])


PLAIN = {"prompt": "w1", "answer": " w2"}
BAD = {
    "no-answer": ([{"prompt": "w1"}], "questions.jsonl:1: has no field `answer`, only `prompt`"),
    "empty": ([PLAIN, {"prompt": " ", "answer": " w1"}], "questions.jsonl:2: `prompt` is empty"),
    "no-choice": (
        [PLAIN | {"choices": [" w1", " w3"]}],
        "`answer` is ' w2', which is none of the choices: use one",
    ),
    "one-choice": ([PLAIN | {"choices": [" w2"]}], "make it a list of two or more different texts"),
    "mixed": ([PLAIN, PLAIN | {"choices": [" w2", " w3"]}], ":2: only some rows have `choices`"),
    "long": ([PLAIN, {"prompt": "w1", "answer": " w1" * 9}], ":2: the answer has 9 tokens"),
    "gone": ([{"prompt": "w1", "choices": [" w2", " w3"]}], ":1: `answer` is None, which is none"),
    "index": ([PLAIN | {"answer": 2, "choices": [" w2", " w3"]}], "`answer` is 2, which is none"),
    "blank": ([PLAIN | {"choices": [" w2", ""]}], ":1: `choices` is empty"),
    "number": ([PLAIN | {"prompt": 3}], ":1: `prompt` is 3, not text: write it in quotes"),
    "half": ([PLAIN | {"prompt": "\ud800"}], ":1: `prompt` is not valid Unicode"),
    "unknown": ([PLAIN, {"prompt": "w1", "answer": " owl"}], ":2: mine cannot read it"),
    "none": ([], "has no prompts with answers"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_told_by_file_and_row(name, tmp_path):
    rows, message = BAD[name]
    with pytest.raises(ValueError, match=".") as error:
        report(model_of("masked"), write(tmp_path, rows))
    assert message in str(error.value)


def test_answers_that_a_model_never_writes_are_refused(tmp_path):
    """The end of a window is given to a masked model, so no answer holds it."""
    path = write(tmp_path, [{"prompt": "w1", "answer": " w0"}])
    with pytest.raises(ValueError, match="has the token `w0`, which mine never writes"):
        report(model_of("windows"), path)


def test_answers_over_steps_are_rows_of_their_own(tmp_path):
    """Each with its steps, passes and tokens a pass; the untrained network has one."""
    rows = [{"prompt": "w1 w2", "answer": " w3 w1"}, {"prompt": "w2", "answer": " w1 w1"}]
    found, named = report(model_of("masked"), write(tmp_path, rows), steps=(1, 2), draws=1)
    assert {"mine, 1 steps", "mine, 2 steps", "untrained mine"} <= named.keys()
    for steps in (1, 2):
        row = named[f"mine, {steps} steps"]
        assert (row["nfe"], row["steps"]) == (steps, steps)
        assert row["tokens_per_pass"] == pytest.approx(2 / row["passes"])
    assert found.settings["steps"] == (1, 2)


def test_a_pattern_says_what_counts_of_an_answer():
    """The group of the last match; the true answer may be that alone."""
    assert final("1 + 2 = 3. So 4 = 4.", r"= (\d+)\.") == "4"
    assert final("so it is w2", "w\\d") == "w2"
    assert final("nothing", r"= (\d+)") is None
    assert final(" w1 ", None) == "w1"


def test_right_answers_are_told_apart(tmp_path):
    """Variety is that of the right ones: enumerated on a table."""
    texts = np.array([["a", "a", "b", "x"], ["x", "x", "x", "x"], ["c", "c", "c", "c"]])
    found = variety(texts, texts != "x")
    assert found["distinct_right"] == pytest.approx((2 / 3 + 1 / 4) / 2)
    entropy = -(2 / 3 * math.log(2 / 3) + 1 / 3 * math.log(1 / 3))
    assert found["right_entropy"] == pytest.approx(entropy / 2)
    assert variety(texts[1:2], texts[1:2] != "x")["distinct_right"] is None


def test_several_answers_are_drawn_and_accuracy_is_their_share(tmp_path):
    """By the law of the network: one token, by chance as often as it says."""
    model = model_of("masked")
    law = model.denoiser(torch.tensor([[1, 2, model.mask_id]]), 1.0)[0, -1].softmax(-1)
    path = write(tmp_path, [{"prompt": "w1 w2", "answer": " w3"}] * 2)
    _, found = report(model, path, samples=400, draws=1, steps=(1,))
    chance, error = float(law[3]), float((law[3] * (1 - law[3]) / 800) ** 0.5)
    assert found["mine"]["accuracy"] == pytest.approx(chance, abs=5 * error)
    assert found["mine"]["distinct_right"] < 0.1


def test_threshold_decoding_counts_the_passes_that_it_took(tmp_path):
    """All at once where every token passes, one by one where none does."""
    rows = [{"prompt": "w1 w2", "answer": " w3 w1 w2"}]
    for threshold, passes in ((0.0, 1), (1.0, 3)):
        options = {"sampler": "confidence", "sampler_options": {"threshold": threshold}}
        _, found = report(model_of("masked"), write(tmp_path, rows), steps=(8,), draws=1, **options)
        assert found["mine"]["passes"] == passes
        assert found["mine"]["tokens_per_pass"] == pytest.approx(3 / passes)


@pytest.mark.parametrize("bad", [{"steps": ()}, {"samples": 0}, {"regex": "("}, {"length": 0}])
def test_options_that_make_no_sense_are_refused(bad):
    with pytest.raises(ValueError, match="1 or more|no pattern"):
        QaOptions(**bad)
