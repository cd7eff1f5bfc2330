"""What samples are compared with: text, or samples of another model."""

import string
from types import SimpleNamespace

import pytest
import torch
from tests.evaluation.models import run, save

from didi_instruct.data.dataset import open_data
from didi_instruct.data.oracle import OracleLanguage
from didi_instruct.data.prepare import PrepareSettings, prepare
from didi_instruct.data.readers import ReadOptions
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import UserError
from didi_instruct.evaluation import evaluate as module
from didi_instruct.evaluation import metrics as registry
from didi_instruct.evaluation.diversity import self_bleu, unigram_entropy
from didi_instruct.evaluation.judges import CausalJudge, OracleJudge
from didi_instruct.evaluation.reference import Wanted, open_reference
from didi_instruct.evaluation.samples import read_samples
from didi_instruct.evaluation.text_likelihood import evaluate_likelihood, likelihood_row
from didi_instruct.model import load

LETTERS = Tokenizer.load("bytes")


@pytest.fixture
def no_drawing(monkeypatch):
    """No model is loaded, so nothing is drawn."""
    monkeypatch.setattr(module, "load", None)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    """Two models, and samples of both: few and many, short and long."""
    folder = tmp_path_factory.mktemp("shelf")
    save(folder / "letters", LETTERS, 258)
    save(folder / "words", OracleLanguage.default().tokenizer, 65)
    for name, model, settings in (
        ("few", "letters", {"steps": (2,), "num": 5}),
        ("many", "letters", {"steps": (8,), "num": 9, "seed": 1}),
        ("short", "letters", {"steps": (2,), "num": 5, "length": 16}),
        ("ended", "letters", {"steps": (2,), "num": 5, "until_eot": True}),
        ("words-few", "words", {"steps": (2,), "num": 5}),
        ("words-many", "words", {"steps": (32,), "num": 5, "seed": 1}),
    ):
        source = str(folder / model)
        run(source, folder / name, **settings)
        (path,) = (folder / name / "samples").iterdir()
        path.rename(folder / f"{name}.jsonl")
    (folder / "text.txt").write_text("".join(chr(97 + n % 26) for n in range(32 * 3)))
    return folder


def measure(shelf, tmp_path, reference, metrics=("entropy", "self-bleu"), name="few", **options):
    return run(
        [], tmp_path, metrics=tuple(metrics), samples=[shelf / f"{name}.jsonl"],
        reference=str(shelf / reference), **options,
    )  # fmt: skip


def test_samples_are_compared_with_samples_without_any_model(
    shelf, tmp_path, monkeypatch, no_drawing
):
    """As many as there are on the other side, and every number is of those."""
    seen = {}

    def two_sample(a, b, num_tokens, **settings):
        seen.update(a=a, b=b, num_tokens=num_tokens)
        return SimpleNamespace(auc=0.5, auc_ci95=(0.4, 0.6), held_out=4)

    monkeypatch.setattr(registry, "two_sample", two_sample)
    ask = ("entropy", "self-bleu", "c2st")
    found = measure(shelf, tmp_path, "many.jsonl", ask)
    ours, theirs = (read_samples(shelf / f"{name}.jsonl") for name in ("few", "many"))
    assert torch.equal(seen["a"], ours.tokens)
    assert torch.equal(seen["b"], theirs.tokens[:5])
    assert seen["num_tokens"] > max(int(seen["a"].max()), int(seen["b"].max()))
    row = found.reference
    assert row["entropy"] == pytest.approx(unigram_entropy(theirs.tokens[:5]).mean().item())
    assert row["self_bleu"] == pytest.approx(self_bleu(theirs.tokens[:5]).mean)
    assert (row["num_samples"], row["steps"], row["seed"]) == (5, 8, 1)
    assert row["tokens_per_second"] is None, "nine were drawn in that time"
    assert row["model"] == str(shelf / "many.jsonl")


def test_a_teacher_with_all_its_steps_has_a_path_too(shelf, tmp_path):
    judge = OracleJudge(OracleLanguage.default())
    found = measure(shelf, tmp_path, "words-many.jsonl", ["path-kl"], "words-few", judge=judge)
    teacher = read_samples(shelf / "words-many.jsonl")
    nats = -OracleLanguage.default().log_prob(teacher.tokens)
    assert found.reference["path_kl"] == pytest.approx((nats + teacher.log_prob).mean().item())


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("words-few.jsonl", "words-few.jsonl was written with another tokenizer"),
        ("short.jsonl", "has texts of 16 tokens, and the samples have 32: draw both alike"),
        ("ended.jsonl", "32 tokens that end at their end-of-text, and the samples have 32: draw"),
        ("text.txt", "text.txt is text, and there is no tokenizer to read it with: .*--tokenizer"),
    ],
)
def test_a_reference_that_does_not_fit_is_refused(shelf, tmp_path, reference, message, no_drawing):
    with pytest.raises(UserError, match=message):
        measure(shelf, tmp_path, reference)
    if reference == "text.txt":
        return
    with pytest.raises(UserError, match=message):
        run(str(shelf / "letters"), tmp_path, reference=str(shelf / reference))


def test_a_shorter_reference_says_so_and_is_not_compared_by_what_counts_texts(shelf, tmp_path):
    """Three rows of text beside five samples: entropy compares, Self-BLEU does not."""
    found = measure(shelf, tmp_path, "text.txt", tokenizer="bytes")
    row = found.reference
    text = (shelf / "text.txt").read_bytes()
    tokens = torch.tensor(list(text)).view(3, 32)
    assert row["entropy"] == pytest.approx(unigram_entropy(tokens).mean().item())
    assert (row["num_samples"], row["self_bleu"], row["self_bleu_ci95"]) == (3, None, None)
    assert row["self_bleu_note"] == "depends on the number of texts: 3 here, 5 samples"
    assert found.rows[0]["self_bleu"] is not None


def test_text_of_other_tokens_is_refused(shelf, tmp_path):
    with pytest.raises(UserError, match="text.txt has other tokens than the samples"):
        measure(shelf, tmp_path, "text.txt", name="words-few", tokenizer="bytes")
    with pytest.raises(UserError, match="oracle has other tokens than the samples"):
        run([], tmp_path, samples=[shelf / "few.jsonl"], reference="oracle")


@pytest.mark.parametrize(("metric", "needed"), [("c2st", 64), ("mauve", 20)])
@pytest.mark.parametrize(("name", "texts"), [("many.jsonl", 9), ("text.txt", 3)])
def test_too_few_texts_are_refused_before_drawing(
    shelf, tmp_path, metric, needed, name, texts, no_drawing
):
    reference = str(shelf / name)
    judge = object.__new__(CausalJudge)
    judge.name, judge.end = "a judge of texts", None
    message = f"{name} has {texts} texts of 32 tokens, and the metric {metric} needs {needed}"
    with pytest.raises(UserError, match=message):
        run(
            str(shelf / "letters"), tmp_path, num=64, reference=reference, metrics=(metric,),
            judge=judge,
        )  # fmt: skip


def test_models_of_other_lengths_are_told_before_drawing(shelf, tmp_path):
    sources = [str(shelf / "letters"), save(tmp_path / "long", LETTERS, 258, length=48)]
    with pytest.raises(UserError, match="letters writes 32 tokens and .*long 48.*--length 32"):
        run(sources, tmp_path)
    with pytest.raises(UserError, match="--length 32"):
        run(sources[1:], tmp_path, baseline=sources[0])
    assert len(run(sources, tmp_path, steps=(2,), num=2, length=16).rows) == 2


def test_rows_of_text_are_as_long_as_the_samples(shelf):
    """Text is cut where samples end: six rows of 16 from what makes three of 32."""
    wanted = Wanted(
        num=99, length=16, until_eot=False, tokenizer_hash=LETTERS.hash, tokenizer=LETTERS
    )
    found = open_reference(str(shelf / "text.txt"), wanted, ReadOptions())
    assert "".join(found.texts) == (shelf / "text.txt").read_text()
    assert found.tokens.shape == (6, 16)


def test_rows_that_differ_in_number_are_refused_before_drawing(shelf, tmp_path, no_drawing):
    with pytest.raises(UserError, match="5 samples in one row and 6 in another.*self-bleu"):
        run(
            str(shelf / "letters"), tmp_path, num=6, metrics=("self-bleu",),
            samples=[shelf / "few.jsonl"],
        )  # fmt: skip


STORIES = [letter * n for n, letter in enumerate(string.ascii_lowercase * 3, start=1)][:40]
"""Of 1 to 40 letters, of which 31 and their end fit a window of 32."""


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """Models of one text a window, and texts: as they are, and prepared either way."""
    folder = tmp_path_factory.mktemp("own")
    lengths = (0, *range(1, 33))
    save(folder / "texts", LETTERS, 258, end_id=LETTERS.eot_id, lengths=lengths)
    save(folder / "letters", LETTERS, 258)
    (folder / "stories.txt").write_text("".join(f"{story}\n" for story in STORIES))
    for rows in ("stream", "document"):
        settings = PrepareSettings(
            src=str(folder / "stories.txt"), tokenizer="bytes", length=32, documents="line",
            rows=rows, valid=0, out=folder / rows,
        )  # fmt: skip
        prepare(settings)
    return folder


LINES = ReadOptions(documents="line")


@pytest.mark.parametrize("data", ["stories.txt", "document"])
def test_each_text_of_a_reference_has_a_row_of_its_own(own, tmp_path, data):
    found = run(
        str(own / "texts"), tmp_path, steps=(2,), num=31, metrics=("entropy", "self-bleu"),
        reference=str(own / data), reading=LINES,
    )  # fmt: skip
    row, real = found.rows[0], found.reference
    assert (real["num_samples"], real["mean_length"]) == (31, 16)
    assert real["entropy"] == pytest.approx(0, abs=1e-12), "one letter each"
    assert (row["entropy_of"], real["entropy_of"], row["length"]) == ("text", "text", 32)
    drawn = found.samples[0]
    assert row["mean_length"] == drawn.lengths.double().mean().item() < 32
    assert row["entropy"] == pytest.approx(
        unigram_entropy(drawn.tokens, drawn.lengths).mean().item()
    )
    assert row["self_bleu"] == pytest.approx(self_bleu(drawn.tokens, lengths=drawn.lengths).mean)


@pytest.mark.parametrize("data", ["stories.txt", "document"])
def test_the_likelihood_is_of_texts(own, data):
    """Of 31 stories with their lengths, per letter: the same whichever way they are read."""
    noise = {"sequences": 99, "draws": 2, "batch_size": 8, "seed": 0}
    report = evaluate_likelihood(
        str(own / "texts"), str(own / data), reading=LINES, device="cpu", **noise
    )
    model = load(str(own / "texts"), device="cpu")
    table = torch.full((31, 32), LETTERS.eot_id)
    for row, story in zip(table, STORIES, strict=False):
        row[: len(story)] = torch.tensor(list(story.encode()))
    by_hand = model.likelihood(lambda i, n: table[i : i + n], sequences=31, draws=2, batch_size=8)
    assert report.rows[0]["num_sequences"] == 31
    assert report.rows[0]["nelbo"] == pytest.approx(by_hand.nats_per_token)


def test_a_stream_is_no_text_of_its_own(own, tmp_path):
    noise = {"sequences": 9, "draws": 1, "batch_size": 8, "seed": 0, "device": "cpu"}
    texts, stream = str(own / "texts"), str(own / "stream")
    with pytest.raises(UserError, match="rows of a stream.*prepare it again with --rows document"):
        evaluate_likelihood(texts, stream, **noise)
    with pytest.raises(UserError, match="rows of a stream"):
        run(texts, tmp_path, reference=stream)
    model = load(texts, device="cpu")
    rows = open_data(own / "stream")
    with pytest.raises(UserError, match="texts reads one text a row, and the rows go on after"):
        likelihood_row(texts, model, rows, 9, draws=1, batch_size=8, seed=0)
    assert evaluate_likelihood(str(own / "letters"), stream, **noise).rows[0]["nelbo"] > 0


def test_texts_and_windows_are_not_compared_before_drawing(own, tmp_path):
    sources = [str(own / "letters"), str(own / "texts")]
    with pytest.raises(UserError, match="texts writes texts that end and .*letters whole windows"):
        run(sources, tmp_path)
    assert len(run(sources, tmp_path, steps=(2,), num=2, until_eot=True).rows) == 2


def test_a_judge_that_cannot_price_an_end_is_refused_before_drawing(own, tmp_path, monkeypatch):
    texts, drawn = str(own / "texts"), {"steps": (2,), "num": 2}
    with monkeypatch.context() as patched:
        patched.setattr(module, "load", None)
        with pytest.raises(UserError, match="knows the probability of whole windows"):
            run(texts, tmp_path, metrics=("path-kl",), judge=str(own / "letters"))
        judge = object.__new__(CausalJudge)
        judge.name, judge.end = "endless", None
        with pytest.raises(UserError, match="the judge endless has no token for that.*--judge-end"):
            run(texts, tmp_path, metrics=("path-kl",), judge=judge)
    assert run(texts, tmp_path, metrics=("path-kl",), judge=texts, **drawn).rows[0]["path_kl"]
