"""Measures of one set of samples, at their ends: few, equal, short or impossible texts."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from didi_instruct.errors import UserError
from didi_instruct.evaluation import metrics
from didi_instruct.evaluation.checks import check_comparable
from didi_instruct.evaluation.judges import CausalJudge, Scores
from didi_instruct.evaluation.measuring import KEYS, Context, Measuring, Reference, complete, plain
from didi_instruct.evaluation.metrics import METRICS, describe, measure
from didi_instruct.evaluation.samples import (
    Origin,
    SampleSet,
    constant_after_end,
    text_lengths,
    with_end,
)

EOT = 3
PLAIN = ("ppl", "entropy", "unique-4gram", "self-bleu", "path-kl")


def sample_set(tokens, *, until_eot=False, log_prob=None, sampler="ancestral", own_window=False):
    origin = Origin(
        model="m", fingerprint="f", tokenizer=None, sampler=sampler, steps=4, nfe=4, passes=4.0,
        disc_calls=0, temperature=1.0, top_p=1.0, seed=5, length=tokens.shape[1],
        until_eot=until_eot, seconds=2.0, own_window=own_window,
    )  # fmt: skip
    lengths = text_lengths(tokens, EOT, until_eot)
    texts = tuple(" ".join(map(str, row)) for row in tokens.tolist())
    return SampleSet(origin, tokens, texts, log_prob, lengths)


class CoinJudge:
    """Every token has probability 1/4, the forbidden one none."""

    name, fingerprint, exact, bound, reads_texts = "coin", "coin", True, False, False
    ends, max_length = "apart", 9

    def __init__(self, forbidden=-1, cut=0):
        self.forbidden, self.asked, self.cut = forbidden, [], cut

    def score(self, samples, progress=None):
        self.asked.append(samples.lengths.tolist())
        ended = self._scores(samples, with_end(samples.tokens, samples.lengths))
        return self._scores(samples, samples.lengths.clone(), ended)

    def _scores(self, samples, lengths, ended=None):
        nats = lengths.double() * math.log(4)
        nats[(samples.tokens == self.forbidden).any(1)] = math.inf
        return Scores(nats, lengths, self.cut, ended)


def row_of(samples, *names, judge=None, **context):
    measuring = Measuring(samples, Context(judge=judge or CoinJudge(), **context))
    found = {}
    for name in names:
        found |= measure(name, measuring).row
    json.dumps(found, allow_nan=False)
    return found


def random_tokens(count, length=12, seed=0):
    return torch.randint(3, (count, length), generator=torch.Generator().manual_seed(seed))


def test_every_mean_over_samples_has_its_interval():
    samples = sample_set(random_tokens(40), log_prob=torch.linspace(-20, -10, 40).double())
    row = row_of(samples, *PLAIN)
    for name in ("entropy", "unique_4gram", "self_bleu", "path_entropy", "path_kl"):
        low, high = row[f"{name}_ci95"]
        assert low < row[name] < high, name
    assert row["ppl"] == pytest.approx(4)
    assert row["ppl_ci95"] == pytest.approx([4, 4])
    assert row["judge_tokens"] == 40 * 12
    assert row["path_kl"] == pytest.approx(12 * math.log(4) - row["path_entropy"])
    about = describe(samples, seed=9)
    assert (about["num_samples"], about["seed"], about["bootstrap_seed"]) == (40, 5, 9)
    assert (about["mean_length"], about["mean_length_ci95"]) == (12, [12, 12])


def test_one_sample_has_numbers_and_no_intervals():
    samples = sample_set(random_tokens(1), log_prob=torch.tensor([-9.0]).double())
    row = row_of(samples, *PLAIN) | describe(samples)
    intervals = [name for name in row if name.endswith("_ci95")]
    assert len(intervals) == 7
    assert all(row[name] is None for name in intervals)
    assert row["self_bleu"] is None
    assert row["self_bleu_note"] == "one sample has no others to resemble"
    assert row["path_kl"] == pytest.approx(12 * math.log(4) - 9)


def test_equal_samples_have_intervals_without_width():
    """Two, and many: nothing varies, so nothing is NaN."""
    for count in (2, 30):
        tokens = torch.tensor([[0, 1, 2, 0, 1, 1, 2, 2]]).repeat(count, 1)
        row = row_of(sample_set(tokens, log_prob=torch.full((count,), -7.0).double()), *PLAIN)
        for name in ("ppl", "entropy", "unique_4gram", "self_bleu", "path_kl", "path_entropy"):
            assert row[f"{name}_ci95"] == pytest.approx([row[name]] * 2), name
        assert row["unique_4gram"] == 1 / count


def test_texts_without_tokens_are_no_mistake():
    """All end at once: they have no n-grams and resemble nobody; a judge has nothing to score."""
    tokens = torch.full((3, 6), EOT)
    row = row_of(sample_set(tokens, until_eot=True), "entropy", "unique-4gram", "self-bleu")
    assert (row["entropy"], row["self_bleu"], row["unique_4gram"]) == (0, 0, None)
    assert row["unique_4gram_note"] == "no sample has 4 tokens"


def test_what_a_judge_finds_impossible_is_said():
    tokens = random_tokens(10)
    tokens[:2, 0] = 2
    tokens[2:] = tokens[2:].clamp(max=1)
    samples = sample_set(tokens, log_prob=torch.full((10,), -9.0).double())
    row = row_of(samples, "ppl", "entropy", "path-kl", judge=CoinJudge(forbidden=2))
    assert (row["ppl"], row["ppl_ci95"], row["path_kl"], row["path_kl_ci95"]) == (None,) * 4
    assert row["ppl_note"] == row["path_kl_note"] == "the judge finds 2 samples impossible"
    assert row["path_entropy"] == 9


def test_texts_that_a_judge_cut_have_no_path_kl():
    """Its cross-entropy is of their beginning, the entropy of the draws of all of them."""
    samples = sample_set(random_tokens(10), log_prob=torch.full((10,), -9.0).double())
    measuring = Measuring(samples, Context(judge=CoinJudge(cut=3)))
    found = measure("ppl", measuring) | measure("path-kl", measuring)
    row = found.row
    assert (row["ppl"], row["judge_cut"]) == (pytest.approx(4), 3)
    assert (row["path_kl"], row["path_kl_ci95"], row["path_entropy"]) == (None, None, 9)
    assert (
        "3 texts are longer than the context of 9 tokens of the judge coin" in row["path_kl_note"]
    )
    assert "--length" in row["path_kl_note"]
    assert "--judge-beyond uniform" in row["path_kl_note"]
    assert "path_gap" not in found.values


def test_numbers_are_those_that_json_knows():
    assert plain(math.inf) is plain(math.nan) is plain((0.0, math.inf)) is None
    assert plain((1.0, 2.0)) == [1.0, 2.0]
    assert plain("text") == "text"


ENDED = torch.tensor([[0, 1, EOT, 2, EOT, 1], [0, 1, 2, 0, 1, 2], [EOT, 0, 0, 1, 1, 2]])


def test_what_follows_the_end_of_a_text_is_made_constant():
    lengths = text_lengths(ENDED, EOT, True)
    assert lengths.tolist() == [2, 6, 0]
    expected = [[0, 1, EOT, EOT, EOT, EOT], [0, 1, 2, 0, 1, 2], [EOT] * 6]
    assert constant_after_end(ENDED, lengths).tolist() == expected
    assert torch.equal(constant_after_end(ENDED, torch.full((3,), 6)), ENDED)


def test_networks_see_texts_and_the_judge_scores_the_same(monkeypatch):
    """Garbage after the end reaches neither network; the judge scores the end-of-text as well."""
    seen = {}

    def ar_kl(tokens, nats, num_tokens, **settings):
        seen["ar"], seen["nats"], seen["read"] = tokens, nats, settings["counts"].tolist()
        return type("Bound", (), {"kl_lower": 3.0, "se": 0.5, "held_out": 9})

    def two_sample(a, b, num_tokens, **settings):
        seen["a"], seen["b"] = a, b
        seen["both"] = [counts.tolist() for counts in settings["counts"]]
        return type("Test", (), {"auc": 0.5, "auc_ci95": (0.4, 0.6), "held_out": 8})

    monkeypatch.setattr(metrics, "ar_kl", ar_kl)
    monkeypatch.setattr(metrics, "two_sample", two_sample)
    samples, judge = sample_set(ENDED, until_eot=True), CoinJudge()
    other = ENDED.flip(0)
    lengths = text_lengths(other, EOT, True)
    reference = Reference("r", "f", samples.texts, other, lengths)
    row = row_of(samples, "ppl", "ar-kl", "c2st", judge=judge, reference=reference)
    constant = constant_after_end(ENDED, samples.lengths)
    assert torch.equal(seen["ar"], constant)
    assert torch.equal(seen["a"], constant)
    assert torch.equal(seen["b"], constant.flip(0))
    assert (seen["read"], seen["both"]) == ([3, 6, 1], [[3, 6, 1], [1, 6, 3]])
    assert seen["nats"].tolist() == pytest.approx([3 * math.log(4), 6 * math.log(4), math.log(4)])
    assert judge.asked == [[2, 6, 0]], "once"
    assert row["judge_tokens"] == 8
    assert row["ar_kl_ci95"] == pytest.approx([2.02, 3.98])
    assert (row["ar_kl_samples"], row["c2st_samples"]) == (9, 8)


def test_the_path_of_a_window_is_not_compared_with_a_text_that_ends():
    log_prob = torch.tensor([-5.0, -6.0, -4.0]).double()
    ended = sample_set(ENDED, until_eot=True, log_prob=log_prob)
    row = row_of(ended, "path-kl")
    assert (row["path_kl"], row["path_kl_ci95"]) == (None, None)
    assert row["path_kl_note"].startswith("the path has the probability of whole windows")
    whole = row_of(sample_set(ENDED, log_prob=log_prob), "path-kl")
    assert whole["path_kl"] == pytest.approx(6 * math.log(4) - 5)
    # A left-to-right sampler stops there: its path is that of the text and its end.
    origin = replace(ended.origin, sampler="autoregressive")
    left_to_right = row_of(replace(ended, origin=origin), "path-kl")
    assert left_to_right["path_kl"] == pytest.approx((3 + 6 + 1) / 3 * math.log(4) - 5)
    none = row_of(sample_set(ENDED), "path-kl")
    assert none["path_kl_note"].startswith("the probability of the path is not known")


def test_a_path_that_drew_the_length_is_that_of_the_text_and_its_end():
    """The judge prices the end where the window has one: the second text fills its window."""
    log_prob = torch.tensor([-5.0, -6.0, -4.0]).double()
    own = sample_set(ENDED, until_eot=True, log_prob=log_prob, own_window=True)
    judge = CoinJudge()
    row = row_of(own, "ppl", "path-kl", judge=judge)
    assert judge.asked == [[2, 6, 0]], "once"
    assert row["path_entropy"] == 5
    assert row["path_kl"] == pytest.approx((3 + 6 + 1) / 3 * math.log(4) - 5)
    assert row["judge_tokens"] == 8
    endless = object.__new__(CausalJudge)
    endless.name, endless.end = "endless", None
    row = row_of(own, "path-kl", judge=endless)
    assert (row["path_kl"], row["path_entropy"]) == (None, 5)
    assert row["path_kl_note"].endswith("no token that ends a text: name one with --judge-end")


def test_a_row_says_what_its_entropy_is_of():
    assert describe(sample_set(ENDED))["entropy_of"] == "window"
    ended = describe(sample_set(ENDED, until_eot=True))
    assert ended["entropy_of"] == "text"
    assert ended["mean_length"] == pytest.approx(8 / 3)
    assert ended["mean_length_ci95"][0] < 8 / 3 < ended["mean_length_ci95"][1]


def test_what_fills_a_window_is_not_counted_as_written():
    """Two seconds: for 18 tokens of three windows, or for the 8 of three texts."""
    windows = describe(sample_set(ENDED, until_eot=True))
    texts = describe(sample_set(ENDED, until_eot=True, own_window=True))
    assert (windows["tokens_per_second"], texts["tokens_per_second"]) == (9, 4)


def test_values_of_each_sample_come_with_the_row():
    samples = sample_set(random_tokens(6), log_prob=torch.arange(6).double())
    measuring = Measuring(samples, Context(judge=CoinJudge()))
    found = (
        measure("ppl", measuring) | measure("entropy", measuring) | measure("path-kl", measuring)
    )
    assert found.values.keys() == {"nats", "tokens", "entropy", "path_gap"}
    assert found.values["entropy"].mean() == found.row["entropy"]
    expected = np.arange(6) + 12 * math.log(4)
    assert found.values["path_gap"] == pytest.approx(expected)


def test_self_bleu_of_words_reads_texts_and_that_of_tokens_does_not():
    """Texts of other tokens and equal words resemble each other in words alone."""
    pytest.importorskip("nltk")
    samples = replace(sample_set(random_tokens(3)), texts=("one two three four five six",) * 3)
    row = row_of(samples, "self-bleu", "self-bleu-words")
    assert row["self_bleu_words"] == pytest.approx(1)
    assert row["self_bleu"] < 0.9
    alone = row_of(sample_set(random_tokens(1)), "self-bleu-words")
    assert alone["self_bleu_words"] is None


def windows(num=4, length=6, **settings):
    origin = Origin(
        model="m", fingerprint="f", tokenizer="t", sampler="ancestral", steps=4, nfe=4, passes=4.0,
        disc_calls=0, temperature=1.0, top_p=1.0, seed=0, length=length, **settings,
    )  # fmt: skip
    tokens = torch.zeros(num, length, dtype=torch.long)
    return SampleSet(origin, tokens, ("",) * num, None, torch.full((num,), length))


def test_tokens_lengths_and_ends_do_not_mix():
    one = windows()
    check_comparable([one, windows(5)], list(METRICS)[:2])
    other = replace(one, origin=replace(one.origin, tokenizer="u"))
    with pytest.raises(UserError, match="different tokenizers"):
        check_comparable([one, other])
    for other in (windows(length=5), windows(until_eot=True)):
        with pytest.raises(UserError, match="entropy grows with length"):
            check_comparable([one, other])


@pytest.mark.parametrize("metric", ["self-bleu", "unique-4gram", "mauve", "c2st"])
def test_numbers_that_depend_on_the_count_do_not_mix(metric):
    message = f"4 samples in one row and 5 in another.*the metric {metric} depends: .*--num"
    with pytest.raises(UserError, match=message):
        check_comparable([windows(4), windows(5)], ["entropy", metric])
    with pytest.raises(UserError, match=message):
        check_comparable([windows(4)], [metric], num=5)
    check_comparable([windows(4), windows(4)], [metric], num=4)
    check_comparable([windows(4), windows(5)], ["ppl", "entropy", "path-kl"], num=6)


def test_a_row_tells_settings_apart_and_has_every_key():
    options = {"grid": "cosine", "greedy_tail": False}
    row = describe(windows(options=options, batch_size=3, device="cpu"))
    names = ("fingerprint", "options", "batch_size", "device")
    assert [row[name] for name in names] == ["f", options, 3, "cpu"]
    full = complete({**row, "ppl": 2.0})
    assert full.keys() >= {*KEYS}
    assert (full["ppl"], full["mauve"], full["nfe"]) == (2.0, None, 4)
    assert "mauve" not in row
