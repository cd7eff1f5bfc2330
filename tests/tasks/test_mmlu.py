"""MMLU's accuracy: all of it where a model knows the answers, chance where it knows nothing."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import binomtest
from tests.tasks.test_mmlu_data import write
from tests.tasks.tiny_models import knowing, questions_of, texts_of, tiny, word_tokenizer

from didi_instruct.tasks import mmlu
from didi_instruct.tasks.baselines import untrained, untrained_of
from didi_instruct.tasks.mmlu import MmluOptions
from didi_instruct.tasks.mmlu_data import LETTERS, hashed, split_by_hash, with_shots
from didi_instruct.tasks.task import KEYS, NamedModel, merged

FALSE_ALARM = 1e-5
ROTATIONS = [[(place + turn) % 4 for place in range(4)] for turn in range(4)]


def quiet(stage, done, total):
    pass


def report(model, questions, folder, dev=(), **options):
    """A report, and the rows of it by the name of their model."""
    write(folder / "test" / "small_talk_test.csv", questions)
    if dev:
        write(folder / "dev" / "small_talk_dev.csv", dev)
    options = MmluOptions(**{"draws": 0} | options)
    found = mmlu.evaluate([NamedModel("mine", model)], folder, options, quiet)
    return found, {row["model"]: row for row in found.rows}


def test_who_knows_the_answers_has_them_all_and_noise_guesses(tmp_path):
    """The untrained network's letters are independent of the answers, so right by chance."""
    questions = questions_of(300)
    found, rows = report(knowing(questions), questions, tmp_path)
    assert rows["mine"]["accuracy"] == 1.0
    assert rows["mine"]["nll"] < 1e-3
    untrained = rows["untrained mine"]
    right = round(untrained["accuracy"] * 300)
    assert binomtest(right, 300, 0.25).pvalue > FALSE_ALARM
    assert untrained["nll_choices"] == pytest.approx(math.log(4), abs=0.05)
    assert untrained["baseline"] == "untrained"
    [note] = found.notes
    assert note == "Not told from guessing, since 25.0% lies in its interval: untrained mine."
    assert any(
        said.startswith("mine is more accurate than untrained mine") for said in found.differences
    )
    assert any(said.startswith("mine is more accurate than always") for said in found.differences)
    assert rows["chance"]["accuracy"] == 0.25
    assert rows["chance"]["nll_choices"] == math.log(4)
    [subject, _] = found.tables["subjects"]
    assert (subject["subject"], subject["num"], subject["accuracy"]) == ("small_talk", 300, 1.0)
    for row in found.as_json()["rows"]:
        assert {*KEYS, "baseline"} <= row.keys()
        assert row["task"] == "mmlu"


def test_rotating_the_choices_removes_a_letters_bias(tmp_path):
    """Who always says B is right as often as B is; over all rotations its choices tie."""
    questions = questions_of(40)
    share = sum(q.answer == 1 for q in questions) / 40
    biased = knowing(questions, ROTATIONS, letter="B")
    _, rows = report(biased, questions, tmp_path / "a")
    assert rows["mine"]["accuracy"] == pytest.approx(share)
    assert rows["mine"]["letters"] == pytest.approx({"A": 0, "B": 1, "C": 0, "D": 0})
    found, rows = report(biased, questions, tmp_path / "b", permute=True)
    assert rows["mine"]["accuracy"] == pytest.approx(0.25)
    assert rows["mine"]["nll_choices"] == pytest.approx(math.log(4), abs=1e-5)
    assert rows["mine"]["letters"]["B"] == pytest.approx(1)
    assert any("tie" in note for note in found.notes)
    _, rows = report(knowing(questions, ROTATIONS), questions, tmp_path / "c", permute=True)
    assert rows["mine"]["accuracy"] == 1.0


def test_the_most_frequent_letter_is_learnt_apart_from_what_is_scored(tmp_path):
    questions, dev = questions_of(30), questions_of(9, seed=5)
    answers = [q.answer for q in dev]
    letter = max(range(4), key=answers.count)
    _, rows = report(knowing(questions), questions, tmp_path, dev)
    expected = sum(q.answer == letter for q in questions) / 30
    assert rows[f"always {LETTERS[letter]}"]["accuracy"] == pytest.approx(expected)


def test_a_share_that_training_may_see_is_not_scored(tmp_path):
    """It tells which letter is frequent: C in that share, where the rest has more B."""
    questions = questions_of(60, seed=18)
    _, rows = report(knowing(questions), questions, tmp_path, sft_share=0.5)
    _, rest = split_by_hash(questions, 0.5)
    assert 0 < rows["mine"]["num"] == len(rest) < 60
    assert rows["always C"]["baseline"] == "majority"
    _, few = report(knowing(questions), questions, tmp_path, limit=7)
    assert few["mine"]["num"] == 7
    assert few["mine"]["accuracy"] == 1.0
    write(tmp_path / "val" / "small_talk_val.csv", questions[:5])
    with pytest.raises(ValueError, match="leave it out"):
        report(knowing(questions), questions, tmp_path, sft_share=0.5, split="validation")


def test_a_model_is_not_scored_on_what_it_was_fine_tuned_on(tmp_path):
    """Nor one that was fine-tuned again on other data; the rest of test, and validation, are."""
    questions = questions_of(40)
    model = knowing(questions)
    tuned = {"recipe": {"task": "mmlu", "answers": {"share": 0.5}}}
    again = {"recipe": {"task": "text"}, "finetuned_from": {"provenance": tuned}}
    write(tmp_path / "val" / "small_talk_val.csv", questions[:5])
    for provenance in (tuned, again):
        model.provenance = provenance
        for share in (None, 0.4):
            with pytest.raises(ValueError, match=r"mine was fine-tuned on .*--sft-share 0\.5"):
                report(model, questions, tmp_path, sft_share=share)
        report(model, questions, tmp_path, sft_share=0.5)
        report(model, questions, tmp_path, split="validation")
    model.provenance = {"recipe": {"task": "mmlu", "answers": {"share": None}}}
    report(model, questions, tmp_path)


def test_questions_whose_answer_is_blank_have_no_nll_of_text(tmp_path):
    """One of two is left out of the mean; of none there is no mean."""
    questions = questions_of(2)
    blank = mmlu.Question("small_talk", "q0 ?", ("", "c0.1", "c0.2", "c0.3"), 0, "made:0")
    _, rows = report(knowing(questions), [blank, questions[1]], tmp_path / "a", draws=1)
    assert rows["mine"]["nll_text_num"] == 1
    assert np.isfinite(rows["mine"]["nll_text"])
    found, rows = report(knowing(questions), [blank], tmp_path / "b", draws=1)
    assert rows["mine"]["nll_text"] is None
    found.write(tmp_path / "report.json")


def test_texts_whose_prompts_are_cut_are_counted(tmp_path):
    """A window of two has no room for the question behind which an answer stands."""
    questions = questions_of(3)
    found, rows = report(knowing(questions, length=2), questions, tmp_path, draws=1)
    assert rows["mine"]["nll_text_truncated"] == 3
    assert any("for the NLL of text 3 of 3 prompts lost" in note for note in found.notes)


def test_a_limit_takes_the_smallest_hashes():
    questions = questions_of(50)
    chosen, _ = mmlu._choose(mmlu.Mmlu([], [], questions, []), MmluOptions(limit=5), "folder")
    assert [hashed(q) for q in chosen] == sorted(hashed(q) for q in questions)[:5]


def test_shots_are_dropped_before_the_question_is_cut(tmp_path):
    """The end of a prompt is left, and the prompts that lost something are counted."""
    questions, dev = questions_of(3), questions_of(5, seed=1)
    dev = [mmlu.Question(q.subject, f"d{n} ?", q.choices, q.answer, "") for n, q in enumerate(dev)]
    tokenizer = word_tokenizer([*texts_of(questions, dev), *texts_of(dev)])
    whole = tokenizer.encode([with_shots(questions[0], dev, range(4))])[0]
    shot = tokenizer.encode([with_shots(dev[0], (), range(4))])[0]
    headline = len(with_shots(dev[0], (), range(4)).split("\n\n")[0].split())
    per_shot = len(shot) - headline + 1
    bare = len(whole) - 5 * per_shot

    def prompts(length):
        model = tiny("masked", vocab_size=tokenizer.size + 1, length=length)
        model.tokenizer = tokenizer
        shots = {"small_talk": dev}
        found = mmlu._encode(NamedModel("m", model), questions, shots, range(4))
        return [tokenizer.decode(c[0].prompt) for c in found[0]], *found[1:]

    def spaced(text):
        return " ".join(text.split())

    texts, truncated, cut = prompts(bare + 5 * per_shot + 1)
    assert (truncated, cut) == (0, 0)
    assert texts[1] == spaced(with_shots(questions[1], dev, range(4)))
    texts, truncated, cut = prompts(bare + 2 * per_shot + 2)
    assert (truncated, cut) == (3, 0)
    assert texts[1] == spaced(with_shots(questions[1], dev[3:], range(4)))
    texts, truncated, cut = prompts(bare - 3)
    assert (truncated, cut) == (3, 3)
    assert texts[1] == " ".join(with_shots(questions[1], (), range(4)).split()[4:])


@pytest.mark.parametrize("kind", ["masked", "duo", "ar"])
def test_every_kind_of_model_is_scored_with_shots_and_texts(kind, tmp_path):
    """Letters, and the text behind the question: finite, and the same when asked again."""
    questions, dev = questions_of(5), questions_of(2, seed=1)
    tokenizer = word_tokenizer(texts_of([*questions, *dev]))
    size = tokenizer.size + (kind != "duo")
    model = tiny(kind, vocab_size=size, length=64)
    model.tokenizer = tokenizer
    settings = {"shots": 1, "draws": 2, "permute": True}
    first, rows = report(model, questions, tmp_path, dev, **settings)
    again, _ = report(model, questions, tmp_path, dev, **settings)
    for a, b in zip(first.rows, again.rows, strict=True):
        a, b = ({k: v for k, v in row.items() if k != "questions_per_second"} for row in (a, b))
        assert a == b
    mine = rows["mine"]
    assert mine["nll"] > mine["nll_choices"] > 0
    assert mine["nll_text_exact"] == (kind == "ar")
    assert np.isfinite(mine["nll_text"])
    assert mine["one_token_letters"]


def test_letters_of_several_tokens_are_scored_by_the_bound(tmp_path):
    """Bytes: ` A` is two tokens, of which the first is the same for all."""
    from didi_instruct.data.tokenizer import Tokenizer

    questions = questions_of(3)
    model = tiny("masked", vocab_size=258, length=256)
    model.tokenizer = Tokenizer.load("bytes")
    found, rows = report(model, questions, tmp_path, draws=3)
    assert not rows["mine"]["one_token_letters"]
    assert any("cuts letters into several tokens" in note for note in found.notes)
    assert sum(rows["mine"]["letters"].values()) == pytest.approx(1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shots": 2}, "dev has 0 questions of `small_talk`, but shots is 2"),
        ({"split": "validation"}, "has no split validation"),
    ],
)
def test_what_a_folder_lacks_is_refused(options, message, tmp_path):
    questions = questions_of(3)
    with pytest.raises(ValueError, match=message):
        report(knowing(questions), questions, tmp_path, **options)


@pytest.mark.parametrize(
    "options", [{"shots": 6}, {"sft_share": 1.0}, {"limit": 0}, {"draws": -1}, {"batch_tokens": 0}]
)
def test_options_that_make_no_sense_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        MmluOptions(**options)


def test_models_of_one_shape_share_an_untrained_network(tmp_path):
    """Its weights are those of its seed, whatever model it was made for."""
    questions = questions_of(4)
    tokenizer = word_tokenizer(texts_of(questions))
    models = [
        tiny("masked", vocab_size=tokenizer.size + 1, length=64, order=order)
        for order in ("random", "streams")
    ]
    models.append(tiny("ar", vocab_size=tokenizer.size + 1, length=64))
    for model in models:
        model.tokenizer = tokenizer
    named = [NamedModel(name, model) for name, model in zip("abc", models, strict=True)]
    made = untrained_of(named, seed=1)
    assert [entry.name for entry in made] == ["untrained a", "untrained c"]
    again = untrained(models[1], seed=1)
    for mine, other in zip(
        made[0].model.network.parameters(), again.network.parameters(), strict=True
    ):
        assert torch.equal(mine, other)
    trained = models[0].network.vocab_embed.embedding
    assert not torch.equal(trained, made[0].model.network.vocab_embed.embedding)
    assert torch.equal(
        trained,
        tiny("masked", vocab_size=tokenizer.size + 1, length=64).network.vocab_embed.embedding,
    )


def test_a_remark_of_several_models_is_one_note():
    remarks = [("a", "cut."), ("b", "cut."), ("c", "cut."), ("a", "ties."), ("b", "ties.")]
    assert merged(remarks, 3) == ["All models: cut.", "a, b: ties."]
    assert merged([("a", "cut.")], 1) == ["a: cut."]
