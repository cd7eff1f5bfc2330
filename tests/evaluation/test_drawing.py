"""Samples are kept by all that they, and what they cost, depend on."""

import pytest
import torch
from tests.evaluation.models import run, save

import didi_instruct as didi
from didi_instruct.data.oracle import OracleLanguage
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.evaluation import cache
from didi_instruct.evaluation.drawing import draw_samples
from didi_instruct.evaluation.judges import OracleJudge
from didi_instruct.evaluation.samples import texts_of
from didi_instruct.evaluation.text_likelihood import evaluate_likelihood
from didi_instruct.sampling.generate import Request

PLAIN = {"steps": 4, "num": 6}


@pytest.fixture(scope="module")
def letters(tmp_path_factory):
    """A random denoiser that writes bytes, whose texts may end."""
    return save(tmp_path_factory.mktemp("model") / "letters", Tokenizer.load("bytes"), 258)


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    return save(tmp_path_factory.mktemp("model") / "words", OracleLanguage.default().tokenizer, 65)


def draw(folder, source, until_eot=False, **changes):
    model, request = didi.load(source, device="cpu"), Request(**PLAIN | changes)
    (found,) = draw_samples(source, model, [request], folder=folder, until_eot=until_eot)
    return found


@pytest.mark.parametrize(
    "change",
    [
        {"options": {"grid": "cosine"}},
        {"options": {"greedy_tail": True}},
        {"sampler": "confidence"},
        {"until_eot": True},
        {"batch_size": 2},
        {"seed": 1},
        {"length": 16},
        {"temperature": 0.5},
        {"top_p": 0.5},
        {"num": 7},
    ],
)
def test_another_setting_is_another_file(letters, tmp_path, change):
    plain, other = draw(tmp_path, letters), draw(tmp_path, letters, **change)
    assert len(list((tmp_path / "samples").iterdir())) == 2
    assert (len(plain), len(other)) == (6, change.get("num", 6))
    assert draw(tmp_path, letters).origin == plain.origin
    assert draw(tmp_path, letters, **change).origin == other.origin
    assert plain.origin != other.origin or len(plain) != len(other)


def test_an_option_that_is_the_usual_one_changes_nothing(letters, tmp_path):
    plain = draw(tmp_path, letters)
    usual = {"grid": "uniform", "order": "random"}
    said = draw(tmp_path, letters, options=usual, sampler="ancestral")
    assert plain.origin == said.origin
    assert plain.origin.options == usual | {"greedy_tail": False}
    assert len(list((tmp_path / "samples").iterdir())) == 1


def test_a_grid_of_times_is_told_as_it_is_read_again(letters, tmp_path):
    times = (1.0, 0.9, 0.5, 0.2, 0.0)
    drawn = draw(tmp_path, letters, options={"grid": times})
    assert drawn.origin.options["grid"] == list(times)
    assert (drawn.origin.batch_size, drawn.origin.device) == (64, "cpu")


def test_batches_change_the_cost_and_not_the_texts(letters, tmp_path):
    """Texts of one batch share the first pass, which sees masks alone: 6 pay 1, or 1 each."""
    together, alone = draw(tmp_path, letters), draw(tmp_path, letters, batch_size=1)
    assert torch.equal(together.tokens, alone.tokens)
    assert alone.origin.passes - together.origin.passes == pytest.approx(5 / 6)


def test_costs_of_different_batches_are_not_compared(words, tmp_path):
    """A model against itself: drawn alike it is on its frontier, drawn one by one nobody knows."""
    judge, ask = OracleJudge(OracleLanguage.default()), ("ppl", "entropy")
    draw(tmp_path, words, batch_size=1, num=12)
    (one_by_one,) = (tmp_path / "samples").iterdir()
    found = run(
        words, tmp_path, steps=(4,), num=12, metrics=ask, judge=judge, baseline=words,
        samples=[one_by_one],
    )  # fmt: skip
    alone, together = found.rows
    assert (alone["batch_size"], together["batch_size"]) == (1, 64)
    assert alone["vsf"] == together["vsf"] == together["vsf_passes"] == pytest.approx(1)
    assert (alone["vsf_passes"], alone["vsf_passes_ci95"]) == (None, None)
    assert "drawn in batches of 1 and the baseline in batches of 64" in alone["vsf_passes_note"]
    assert "--batch-size" in alone["vsf_passes_note"]


def test_what_an_older_version_kept_is_drawn_again(letters, tmp_path, monkeypatch):
    draw(tmp_path, letters)
    monkeypatch.setattr(cache, "SAMPLES_VERSION", 1)
    draw(tmp_path, letters)
    assert len(list((tmp_path / "samples").iterdir())) == 2


def test_progress_names_the_model_and_never_runs_backwards(words, tmp_path):
    told = []
    run(
        words, tmp_path, steps=(2, 4), num=6, metrics=("entropy", "self-bleu"), baseline=words,
        progress=lambda *step: told.append(step),
    )  # fmt: skip
    stages = list(dict.fromkeys(stage for stage, _, _ in told))
    assert stages == [f"Drawing {words}", f"Drawing {words}, the baseline", "Measuring 4 rows"]
    for stage in stages:
        steps = [(done, total) for name, done, total in told if name == stage]
        assert steps == sorted(steps)
        assert len({total for _, total in steps}) == 1
        assert (steps[0][0], steps[-1][0]) == (0, steps[-1][1])


def test_a_path_is_measured_where_a_metric_needs_it(tmp_path):
    """It costs a model with several masks passes, whose time is not that of sampling."""
    source = save(tmp_path / "codes", OracleLanguage.default().tokenizer, 68, masks=4)
    judge = OracleJudge(OracleLanguage.default())
    plain, measured = (
        run(source, tmp_path / "out", steps=(2,), num=6, metrics=metrics, judge=judge)
        for metrics in (("entropy",), ("entropy", "path-kl"))
    )
    assert torch.equal(plain.samples[0].tokens, measured.samples[0].tokens)
    assert plain.samples[0].log_prob is None
    assert measured.samples[0].log_prob.isfinite().all()
    assert plain.rows[0]["tokens_per_second"] > 0
    assert measured.rows[0]["tokens_per_second"] is None
    assert measured.rows[0]["path_kl"] > 0
    assert len(list((tmp_path / "out" / "samples").iterdir())) == 2


def test_with_one_mask_a_path_is_free_and_nothing_is_drawn_for_it(words, tmp_path):
    judge = OracleJudge(OracleLanguage.default())
    for metrics in (("entropy",), ("path-kl",)):
        run(words, tmp_path, steps=(2,), num=6, metrics=metrics, judge=judge)
    assert len(list((tmp_path / "samples").iterdir())) == 1


def test_the_model_says_what_ends_a_text_without_a_tokenizer():
    tokens = torch.tensor([[5, 7, 9, 9], [9, 9, 9, 9]])
    texts, lengths = texts_of(None, tokens, until_eot=True, end_id=9)
    assert (texts, lengths.tolist()) == (("", ""), [2, 0])


def test_rounded_weights_are_another_model(words, tmp_path):
    """In the row, in the key of what is kept, and in the likelihood of a text."""
    rows = {}
    for dtype in (None, "bfloat16"):
        found = run(words, tmp_path, steps=(4,), num=6, dtype=dtype)
        rows[dtype] = found.rows[0]
        assert found.rows[0]["dtype"] == dtype
    assert len({row["fingerprint"] for row in rows.values()}) == 2
    assert len(list((tmp_path / "samples").iterdir())) == 2
    noise = {"sequences": 8, "draws": 1, "batch_size": 8, "seed": 0}
    plain, rounded = (
        evaluate_likelihood(words, "oracle", **noise, device="cpu", dtype=dtype).rows[0]
        for dtype in (None, "bfloat16")
    )
    assert (plain["dtype"], rounded["dtype"]) == (None, "bfloat16")
    assert 0 < abs(rounded["nelbo"] - plain["nelbo"]) < 0.1 * plain["nelbo"]
