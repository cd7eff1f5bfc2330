"""A yardstick is the same for all rows of a table, whoever asks and in whatever order."""

from dataclasses import replace
from itertools import permutations

import pytest
import torch
from tests.api.test_studio import save

from didi_instruct.api.plan import Plan
from didi_instruct.api.preflight import check_models
from didi_instruct.api.quality import evaluate_quality
from didi_instruct.api.yardstick import make_yardstick
from didi_instruct.data.prepare import PrepareSettings, prepare
from didi_instruct.data.readers import ReadOptions
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import UserError
from didi_instruct.evaluation.samples import read_samples, write_samples
from didi_instruct.hub.sources import peek_models

LETTERS = Tokenizer.load("bytes")


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    """Models of equal words, one of which has room for more, samples of each, and a text."""
    folder = tmp_path_factory.mktemp("shelf")
    for name, size in (("tight", 258), ("wide", 300)):
        source = save(folder / name, LETTERS, size)
        evaluate_quality(
            [source], Plan(steps=(2,), num=3), ["entropy"], out=folder / f"{name}-out", device="cpu"
        )
    (folder / "text.txt").write_text("".join(chr(97 + n % 26) for n in range(32 * 3)))
    return folder


def samples_of(shelf, name):
    (path,) = (shelf / f"{name}-out" / "samples").iterdir()
    return read_samples(path)


def models_of(shelf):
    """The second does not know what ends a text, as a masked LM that fills its window."""
    tight, wide = peek_models([str(shelf / "tight"), str(shelf / "wide")])
    return tight, replace(wide, tokenizer=LETTERS.endless())


def test_neither_the_order_nor_a_part_of_the_rows_changes_it(shelf):
    parts = [[samples_of(shelf, name) for name in part] for part in (("tight",), ("tight", "wide"))]
    for sets in parts:
        for models in permutations(models_of(shelf)):
            found, text = make_yardstick(
                sets, models, seed=-1, reference=str(shelf / "text.txt"), device="cpu"
            )
            assert found.num_tokens == models_of(shelf)[1].config.num_tokens
            assert "".join(found.reference.texts) == (shelf / "text.txt").read_text()
            assert torch.equal(found.reference.tokens, text.tokens)
            assert found.seed == (1 << 63) - 1, "as torch takes them"


def test_every_token_has_its_place_those_of_files_too(shelf, tmp_path):
    """A network that learns to measure has a row for each id: of models, samples and reference."""
    ours = samples_of(shelf, "tight")
    other = replace(ours, tokens=ours.tokens.clone())
    other.tokens[0, 0] = 400
    write_samples(tmp_path / "other.jsonl", other)
    models = peek_models([str(shelf / "tight")])
    alone, _ = make_yardstick([ours], models, seed=0, device="cpu")
    assert alone.num_tokens == models[0].config.num_tokens == 257
    beside, _ = make_yardstick([ours, other], models, seed=0, device="cpu")
    against, _ = make_yardstick(
        [ours], models, seed=0, reference=str(tmp_path / "other.jsonl"), device="cpu"
    )
    assert beside.num_tokens == against.num_tokens == 401


def test_a_reference_has_no_tokens_that_one_of_the_models_does_not_know(shelf, tmp_path):
    """Models without words of their own: only the number of ids tells."""
    sources = [save(tmp_path / name, None, size) for name, size in (("few", 101), ("many", 300))]
    settings = PrepareSettings(
        src=str(shelf / "text.txt"), tokenizer="bytes", length=32, valid=0, out=tmp_path / "data"
    )
    prepare(settings)
    unread = replace(samples_of(shelf, "tight").origin, tokenizer=None)
    sets = [replace(samples_of(shelf, "tight"), origin=unread)]
    reference, words = str(tmp_path / "data"), "has 257 token ids, but the model knows 100"
    for order in permutations(sources):
        with pytest.raises(UserError, match=words):
            make_yardstick(sets, peek_models(order), seed=0, reference=reference, device="cpu")
        with pytest.raises(UserError, match=words):  # and before anything is drawn
            check_models(order, None, Plan(steps=(2,)), reference, ReadOptions())
