"""What the end of a text costs a causal judge, and what lies beyond its context."""

import itertools
import json
import lzma
import math

import pytest
import torch
import transformers
from tests.evaluation.test_judges import (
    CONTEXT,
    SHARED,
    TEXTS,
    CausalJudge,
    by_hand,
    needs_stories,
    open_judge,
    reference,
    sample_set,
    tiny_model,
    tiny_tokenizer,
)
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from didi_instruct.errors import UserError
from didi_instruct.evaluation.measuring import Context, Measuring

LONG = " ".join(TEXTS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Llama: <s> (0) starts a text, </s> (1) ends it."""
    folder = tmp_path_factory.mktemp("judge") / "llama"
    tokenizer = tiny_tokenizer(start=True)
    tokenizer.save_pretrained(folder)
    tiny_model("llama", len(tokenizer)).save_pretrained(folder)
    return folder


def ended(texts, which):
    """Texts of which some end before a window of 4."""
    return sample_set(texts, lengths=[3 if end else 4 for end in which])


@pytest.mark.parametrize(("end", "ids"), [(None, 1), ("<s>", 0), ("7", 7), (7, 7)])
def test_the_end_of_a_text_is_priced_where_there_is_one(folder, end, ids):
    """By hand, token by token; texts alone cost what they did."""
    tokenizer, model = reference(folder)
    judge, plain = CausalJudge(folder, end=end), CausalJudge(folder)
    which = [True, False, True]
    samples = ended(TEXTS[:3], which)
    found = judge.score(samples).ended
    rows = [tokenizer(text)["input_ids"] for text in TEXTS[:3]]
    rows = [row + [ids] * end for row, end in zip(rows, which, strict=True)]
    assert found.nats.tolist() == pytest.approx([by_hand(model, row) for row in rows], rel=1e-5)
    assert found.tokens.tolist() == [len(row) - 1 for row in rows]
    torch.testing.assert_close(judge.score(samples).nats, plain.score(samples).nats)
    same = ids == 1
    assert (judge.fingerprint == plain.fingerprint) == same
    told = "" if same else f" (end {tokenizer.convert_ids_to_tokens(ids)})"
    assert judge.name == f"{folder}{told}"


def test_an_end_that_does_not_fit_into_the_context_is_cut(folder):
    tokenizer, _ = reference(folder)
    length = len(tokenizer(TEXTS[0], add_special_tokens=False)["input_ids"])
    for limit, cut in ((length + 1, 0), (length, 1)):
        judge = CausalJudge(folder, max_length=limit)
        assert judge.score(ended(TEXTS[:1], [True])).cut == 0
        assert judge.score(ended(TEXTS[:1], [True])).ended.cut == cut


@pytest.mark.parametrize("limit", [None, 10])
@pytest.mark.parametrize("ending", [False, True])
def test_tokens_beyond_the_context_are_equally_likely(folder, limit, ending):
    """By hand: what is read costs what it did, every other token the log of the vocabulary."""
    tokenizer, model = reference(folder)
    judge = CausalJudge(folder, max_length=limit, beyond="uniform")
    texts = (LONG, TEXTS[3])
    found = judge.score(ended(texts, [True, True]))
    found = found.ended if ending else found
    for text, nats, tokens in zip(texts, found.nats.tolist(), found.tokens.tolist(), strict=True):
        row = tokenizer(text)["input_ids"] + [1] * ending
        read = row[: 1 + (limit or CONTEXT)]
        rest = len(row) - len(read)
        assert (rest > 0) == (text == LONG)
        hand = by_hand(model, read) + rest * math.log(len(tokenizer))
        assert nats == pytest.approx(hand, rel=1e-5)
        assert tokens == len(row) - 1
    assert found.cut == 0
    assert judge.name == f"{folder} (uniform after {limit or CONTEXT} tokens)"
    assert judge.fingerprint != CausalJudge(folder, max_length=limit).fingerprint


@pytest.mark.parametrize("beyond", ["cut", "uniform"])
@pytest.mark.parametrize("bos", ["always", "never"])
def test_texts_and_their_ends_are_read_at_once(folder, beyond, bos):
    """One reading says what two say: of ends that fit, that do not, that are all there is."""
    judge = CausalJudge(folder, max_length=10, beyond=beyond, bos=bos)
    texts, which = ("", *TEXTS[:3], LONG, LONG), [True, True, False, True, True, False]
    found = judge.score(ended(texts, which))
    marked = [text + "</s>" * end for text, end in zip(texts, which, strict=True)]
    for one, texts_alone in ((found, texts), (found.ended, marked)):
        alone = judge.score(ended(texts_alone, [False] * 6))
        torch.testing.assert_close(one.nats, alone.nats, rtol=1e-5, atol=1e-5)
        assert one.tokens.equal(alone.tokens)
        assert one.cut == alone.cut


@pytest.mark.parametrize("ends", [True, False])
def test_a_judge_is_asked_once_for_texts_and_ends(folder, ends):
    judge = CausalJudge(folder)
    samples, read = ended(TEXTS[:3], [ends] * 3), []
    judge.model.register_forward_hook(lambda *_: read.append(1))
    measuring = Measuring(samples, Context(judge=judge))
    found = [measuring.scores(), measuring.scores(ended=True)]
    assert len(read) == 1
    assert (found[0].nats < found[1].nats).all() == ends
    judge.end = None  # then only the texts have a price
    alone = Measuring(samples, Context(judge=judge)).scores()
    torch.testing.assert_close(alone.nats, found[0].nats)


def test_an_end_that_the_model_does_not_know_is_none(tmp_path):
    """Its tokenizer names one: texts are judged without it."""
    tokenizer = tiny_tokenizer(start=True)
    tiny_model("llama", len(tokenizer)).save_pretrained(tmp_path)
    tokenizer.add_special_tokens({"eos_token": "<|never|>"})
    tokenizer.save_pretrained(tmp_path)
    judge = CausalJudge(tmp_path)
    assert judge.end is None
    samples = ended(TEXTS[:2], [True, True])
    found = Measuring(samples, Context(judge=judge)).scores()
    assert found.nats.equal(judge.score(samples).nats)


def test_a_damaged_judge_is_named_where_texts_end(folder):
    judge = CausalJudge(folder)
    judge.model.lm_head.weight.data.fill_(math.nan)
    measuring = Measuring(ended(TEXTS[:2], [True, True]), Context(judge=judge))
    with pytest.raises(UserError, match="answers with NaN"):
        measuring.scores()


def test_a_judge_with_an_end_and_a_uniform_tail_is_a_law_of_texts(tmp_path):
    """All texts of up to 4 letters of 2 with their ends, and all beginnings of 5, sum to 1.

    The judge reads 2 letters, and has 4 tokens: a start, an end, and two letters.
    """
    torch.manual_seed(0)
    words = {"<s>": 0, "</s>": 1, "a": 2, "b": 3}
    backend = Backend(models.WordLevel(words))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>"
    )
    tokenizer.save_pretrained(tmp_path)
    tiny_model("llama", 4).save_pretrained(tmp_path)
    judge = CausalJudge(tmp_path, bos="always", max_length=2, beyond="uniform")
    # The start may stand inside a text too, so it is a letter here.
    texts = [
        " ".join(text) for n in range(6) for text in itertools.product(("<s>", "a", "b"), repeat=n)
    ]
    ends = [len(text.split()) < 5 for text in texts]
    found = judge.score(ended(texts, ends)).ended
    assert found.cut == 0
    assert found.nats.neg().exp().sum().item() == pytest.approx(1, abs=1e-5)


def test_what_cannot_end_a_text_is_refused(folder, tmp_path):
    for end in ("nothing", "320", 320, -1, "-1"):
        with pytest.raises(UserError, match=f"has no token `{end}` to end a text with: use one of"):
            CausalJudge(folder, end=end)
    with pytest.raises(UserError, match="beyond is 'guess': use cut or uniform"):
        CausalJudge(folder, beyond="guess")
    for settings in ({"end": "<s>"}, {"beyond": "uniform"}):
        with pytest.raises(UserError, match="for judges of texts; oracle judges tokens"):
            open_judge("oracle", **settings)
    endless = tiny_tokenizer(start=True)
    endless.eos_token = None
    endless.save_pretrained(tmp_path)
    tiny_model("llama", len(endless)).save_pretrained(tmp_path)
    judge = CausalJudge(tmp_path)
    assert judge.end is None
    assert judge.score(ended(TEXTS, [True] * len(TEXTS))).cut == 0
    measuring = Measuring(ended(TEXTS, [True] * len(TEXTS)), Context(judge=judge))
    with pytest.raises(UserError, match="no token that ends a text: name one with --judge-end"):
        measuring.scores(ended=True)
    assert CausalJudge(tmp_path, end="</s>").end == 1


@needs_stories
def test_the_source_of_stories_ends_them_with_its_start_token():
    """Of 64 of its own, <s> costs 0.13 nats each and </s>, its tokenizer's end, 31.0."""
    with lzma.open(SHARED / "stories" / "train-00.jsonl.xz", "rt") as file:
        stories = [json.loads(next(file)) for _ in range(40)]
    texts = [story["text"] for story in stories if story["complete"]][:8]
    cost = {}
    for end in ("<s>", None):
        judge = open_judge(SHARED / "stories15m", temperature=0.8, collapse_spaces=True, end=end)
        samples = ended(texts, [True] * len(texts))
        scores = judge.score(samples)
        assert (scores.cut, scores.ended.cut) == (0, 0)
        cost[end] = (scores.ended.nats - scores.nats).mean().item()
    assert cost["<s>"] < 1
    assert cost[None] > 20
