"""Pretraining on texts that have windows of their own."""

import json

import pytest
import torch

import didi_instruct as didi
from didi_instruct.data.dataset import open_data
from didi_instruct.data.prepare import PrepareSettings, prepare
from didi_instruct.errors import UserError
from didi_instruct.pretrain import pretrain
from didi_instruct.process.masking import before_end

TEXTS = ["ab", "abc", "abc", "b" * 7] * 8


def prepared(folder, rows):
    path = folder / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    settings = PrepareSettings(
        src=str(path), tokenizer="bytes", length=8, out=folder / rows, rows=rows, valid=4
    )
    prepare(settings)
    return str(folder / rows)


def recipe(source, kind="mdlm"):
    return {
        "model": {"kind": kind, "layers": 1, "hidden": 16, "heads": 2, "cond_dim": 8, "length": 8,
                  "own_window": True},
        "data": {"source": source},
        "train": {"steps": 3, "batch_size": 4, "save_every": 3, "ema": 0.0},
    }  # fmt: skip


def test_a_masked_model_knows_how_long_texts_are(tmp_path):
    """And writes none that is empty, none with an end inside; its likelihood is finite."""
    data = prepared(tmp_path, "document")
    pretrain(recipe(data), out=tmp_path / "run", device="cpu")
    model = didi.load(tmp_path / "run", device="cpu")
    end = model.tokenizer.eot_id
    assert model.config.end_id == end
    assert model.config.lengths == (0, 0, 7, 14, 0, 0, 0, 7, 0)
    tokens = model.sample(num=300, steps=2)
    lengths = before_end(tokens, end).sum(1)
    assert (tokens[~before_end(tokens, end)] == end).all()
    assert set(lengths.tolist()) <= set(range(1, 9))
    # 14 + 1 of 28 + 8 texts have 3 tokens: 125 of 300 are expected, 5 errors are 43.
    assert abs(int((lengths == 3).sum()) - 125) < 43
    asked = model.sample(num=2, steps=2, length=5)
    assert asked.shape == (2, 5)
    assert not asked.eq(end).any(), "all of it is text"
    begun = model.generate(num=20, steps=2, prompt="abc")
    assert all(text.startswith("abc") and len(text) > 3 for text in begun)
    rows = open_data(data, "valid").ordered(0, 4)
    assert torch.isfinite(model.nelbo(rows))


def test_a_gap_at_the_end_is_as_long_as_texts_are(tmp_path):
    """Its length follows the law of lengths given what there is; the window is filled with ends."""
    pretrain(recipe(prepared(tmp_path, "document")), out=tmp_path / "run", device="cpu")
    model = didi.load(tmp_path / "run", device="cpu")
    texts = model.generate(num=400, steps=2, infill="a___", gap="auto:1-7")
    lengths = torch.tensor([len(text) for text in texts]).bincount(minlength=9)
    # Of lengths 2 to 8, 7 + 14 + 7 texts and one more each: 15 of 35 have 3; 5 errors are 50.
    assert abs(int(lengths[3]) - 400 * 15 / 35) < 50
    middle = model.generate(num=5, steps=2, infill="a___b", gap="auto:1-3")
    assert all(text[0] == "a" and text[-1] == "b" for text in middle)


def test_a_left_to_right_model_learns_nothing_after_the_end(tmp_path):
    """Its likelihood of a text does not depend on how far the window goes on."""
    pretrain(recipe(prepared(tmp_path, "document"), "ar"), out=tmp_path / "run", device="cpu")
    model = didi.load(tmp_path / "run", device="cpu")
    assert model.config.lengths == ()
    end = model.tokenizer.eot_id
    rows = torch.tensor([[5, 6, end, end, end, end]])
    long, short = model.nelbo(rows), model.nelbo(rows[:, :3])
    torch.testing.assert_close(long, short, rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind", ["mdlm", "ar"])
def test_a_stream_is_refused(tmp_path, kind):
    with pytest.raises(UserError, match="rows of one text each.*--rows document"):
        pretrain(recipe(prepared(tmp_path, "stream"), kind), out=tmp_path / "run", device="cpu")


def test_texts_without_an_end_are_refused(tmp_path):
    with pytest.raises(UserError, match="own_window needs texts that end"):
        pretrain(recipe("oracle"), out=tmp_path / "run", device="cpu")
