"""Texts that have windows of their own: their path KL and their judges, by enumeration."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from tests.random_models import add_noise

import didi_instruct as didi
from didi_instruct.config.model import ModelConfig, ScheduleConfig
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import UserError
from didi_instruct.evaluation.drawing import draw_samples
from didi_instruct.evaluation.judges import JudgeConfig, open_judge
from didi_instruct.evaluation.measuring import Context, Measuring
from didi_instruct.evaluation.metrics import measure
from didi_instruct.evaluation.samples import SampleSet, text_lengths
from didi_instruct.hub.sources import find_source
from didi_instruct.models.checkpoint import save_model
from didi_instruct.models.dit import build_model
from didi_instruct.process.masking import LengthLaw
from didi_instruct.sampling.generate import Request

V, L, END, MASK = 3, 3, 2, 3
COUNTS = (0, 4, 1, 2)
TOKENIZER = Tokenizer.from_words(["a", "b", "<end>"], eot="<end>")
TEXTS = [text for n in range(L + 1) for text in itertools.product(range(END), repeat=n)]


def save(folder, **changes):
    """A random model."""
    torch.manual_seed(1)
    settings = {"kind": "mdlm", "end_id": END, "lengths": COUNTS} | changes
    if settings["kind"] == "ar":
        settings["lengths"] = ()
    config = ModelConfig(
        layers=1, hidden=16, heads=2, cond_dim=8, vocab_size=V + 1, length=L,
        learned_positions=True, schedule=ScheduleConfig(eps=0.0), **settings,
    )  # fmt: skip
    network = add_noise(build_model(config), 0.4)
    save_model(folder, network, config, tokenizer=TOKENIZER)
    return str(folder)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    save(folder / "random")
    save(folder / "ar", kind="ar")
    save(folder / "windows", end_id=None, lengths=())
    return folder


def padded(text):
    return [*text, *[END] * (L - len(text))]


def draw(shelf, tmp_path, name="random", **changes):
    model = didi.load(shelf / name, device="cpu")
    request = Request(**{"steps": 2, "num": 6, "batch_size": 2048} | changes)
    request = replace(request, steps=None) if name == "ar" else request
    (found,) = draw_samples(str(shelf / name), model, [request], folder=tmp_path)
    return found


def as_samples(like, texts):
    """Other texts in place of those that were drawn."""
    tokens = torch.tensor([padded(text) for text in texts])
    lengths = text_lengths(tokens, END, True)
    return SampleSet(like.origin, tokens, ("",) * len(texts), None, lengths)


def two_step_paths(folder):
    """All windows of all lengths in all orders: probability, log q given the order, the text.

    Either step reveals a position with chance 1/2.
    """
    model, law = didi.load(folder, device="cpu"), LengthLaw(COUNTS)
    paths = []
    for n in range(1, L + 1):
        log_n = law.log_prob(torch.tensor([n])).item()
        written = list(itertools.product(range(END), repeat=n))
        rows = torch.tensor([padded(words) for words in written])
        for first in itertools.product((False, True), repeat=n):
            shown = torch.tensor([*first, *[True] * (L - n)])
            start = torch.tensor([padded([MASK] * n)]).expand(len(rows), -1)
            states = [start, torch.where(shown, rows, MASK)]
            early, late = (model.denoiser(z, 0.5).double().log_softmax(-1) for z in states)
            log_p = torch.where(torch.tensor(first)[:, None], early[:, :n], late[:, :n])
            log_q = log_n + log_p.gather(-1, rows[:, :n, None]).squeeze(-1).sum(1)
            for words, log_path in zip(written, log_q.tolist(), strict=True):
                paths.append((0.5**n * math.exp(log_path), log_path, words))
    return paths


def test_the_path_kl_of_texts_bounds_their_kl(shelf, tmp_path):
    """Against an AR model of texts: exact KL <= enumerated path KL = that of samples.

    That all paths without a written end sum to 1 shows that none is ever written. |z| < 4 for
    entropy and path KL (6e-5 false alarms each).
    """
    judge = open_judge(shelf / "ar", device="cpu")
    drawn = draw(shelf, tmp_path, num=8192)
    nats = judge.score(as_samples(drawn, TEXTS)).ended.nats
    assert nats.neg().exp().sum().item() == pytest.approx(1, abs=1e-5)
    log_judge = {text: -value for text, value in zip(TEXTS, nats.tolist(), strict=True)}

    paths = two_step_paths(shelf / "random")
    assert sum(p for p, *_ in paths) == pytest.approx(1)
    law = dict.fromkeys(TEXTS, 0.0)
    for p, _, text in paths:
        law[text] += p
    exact = sum(q * (math.log(q) - log_judge[text]) for text, q in law.items() if q > 0)
    known = [(p, log_q, log_judge[text]) for p, log_q, text in paths]
    entropy = -sum(p * log_q for p, log_q, _ in known)
    bound = sum(p * (log_q - log_j) for p, log_q, log_j in known)
    assert 0 < exact < bound

    found = measure("path-kl", Measuring(drawn, Context(judge=judge))).row
    size = math.sqrt(len(drawn))
    spread = math.sqrt(sum(p * (log_q + entropy) ** 2 for p, log_q, _ in known))
    assert abs(found["path_entropy"] - entropy) < 4 * spread / size
    spread = math.sqrt(sum(p * (log_q - log_j - bound) ** 2 for p, log_q, log_j in known))
    assert abs(found["path_kl"] - bound) < 4 * spread / size
    assert found["path_kl_exact"]


def test_samples_end_where_they_do_and_say_so(shelf, tmp_path):
    """Without --until-eot; the length was drawn, unless one was asked for."""
    drawn = draw(shelf, tmp_path, "random", num=200)
    assert (drawn.origin.until_eot, drawn.origin.own_window) == (True, True)
    assert drawn.lengths.unique().tolist() == [1, 2, 3]
    for text, row, n in zip(drawn.texts, drawn.tokens.tolist(), drawn.lengths, strict=True):
        assert text.split() == ["ab"[word] for word in row[:n]]
        assert row[n:] == [END] * (L - n)
    fixed = draw(shelf, tmp_path, "random", num=50, length=2)
    assert (fixed.origin.own_window, fixed.lengths.unique().tolist()) == (False, [2])
    judge = open_judge(shelf / "ar", device="cpu")
    row = measure("path-kl", Measuring(fixed, Context(judge=judge))).row
    assert (row["path_kl"], row["path_entropy"]) == (None, None)
    assert "texts whose length was given" in row["path_kl_note"]
    whole = draw(shelf, tmp_path, "windows", num=50)
    assert (whole.origin.until_eot, whole.origin.own_window) == (False, False)
    left_to_right = draw(shelf, tmp_path, "ar", num=50)
    assert (left_to_right.origin.until_eot, left_to_right.origin.own_window) == (True, False)
    assert left_to_right.origin.ends_with_text


def test_the_path_of_a_left_to_right_model_of_texts_is_its_own_law(shelf, tmp_path):
    """Judged by itself every gap is zero: it prices the text and its end as it drew them."""
    judge = open_judge(shelf / "ar", device="cpu")
    drawn = draw(shelf, tmp_path, "ar", num=100)
    found = measure("path-kl", Measuring(drawn, Context(judge=judge)))
    assert abs(found.values["path_gap"]).max() < 1e-5


@pytest.mark.parametrize("text", [(0,), (1, 0), (0, 1, 1)])
def test_a_diffusion_model_of_texts_prices_their_length_and_words(shelf, tmp_path, text):
    """Its bound is -log p(n) and the mean over all orders of writing one word after another.

    |z| < 4 (6e-5 false alarms each); the spread over rows overstates the error.
    """
    model, n = didi.load(shelf / "random", device="cpu"), len(text)
    words = 0.0
    orders = list(itertools.permutations(range(n)))
    for order in orders:
        z = torch.tensor([padded([MASK] * n)])
        for place in order:
            words -= model.denoiser(z, 0.5).double().log_softmax(-1)[0, place, text[place]].item()
            z[0, place] = text[place]
    exact = words / len(orders) - LengthLaw(COUNTS).log_prob(torch.tensor([n])).item()

    judge = open_judge(shelf / "random", JudgeConfig(draws=8, batch_size=256), device="cpu")
    like = draw(shelf, tmp_path, "random")
    scores = judge.score(as_samples(like, [text] * 512))
    assert scores.tokens.tolist() == [n] * 512
    error = scores.nats.std().item() / math.sqrt(512)
    assert abs(scores.nats.mean().item() - exact) < 4 * error + 1e-6


def test_a_diffusion_model_judges_texts_that_end_as_its_own_do(shelf, tmp_path):
    """Its own, and those of others; what follows an end is not read; no text is empty."""
    judge = open_judge(shelf / "random", JudgeConfig(draws=2), device="cpu")
    drawn = draw(shelf, tmp_path, "random", num=40)
    found = measure("path-kl", Measuring(drawn, Context(judge=judge))).row
    assert found["path_kl"] > 0
    assert not found["path_kl_exact"]
    with_garbage = drawn.tokens.clone()
    late = torch.arange(L) > drawn.lengths[:, None]
    with_garbage[late] = 0
    scores = [judge.score(replace(drawn, tokens=t)).nats for t in (drawn.tokens, with_garbage)]
    assert torch.equal(*scores)
    empty = judge.score(as_samples(drawn, [(), (0,)])).nats
    assert empty.isinf().tolist() == [True, False]

    whole = replace(drawn, lengths=torch.full((40,), L))
    with pytest.raises(UserError, match=r"up to their first token 2.*draw them with until_eot"):
        judge.score(whole)
    windows = open_judge(shelf / "windows", device="cpu")
    with pytest.raises(UserError, match="or one whose texts have windows of their own"):
        windows.score(drawn)
    ended, whole = (find_source(shelf / name).peek() for name in ("random", "windows"))
    for name, model in (("ar", ended), ("random", ended), ("windows", whole)):
        open_judge(shelf / name, device="cpu").check(model)
    with pytest.raises(UserError, match="random writes texts that end before their window"):
        windows.check(ended)
