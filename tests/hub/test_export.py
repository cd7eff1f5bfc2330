"""From layout to layout, bit by bit; and what is refused before anything is written."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.models import masked_folders
from tests.models.foreign.folders import CORE, FOLDERS, WORDS
from tests.models.foreign.reference import (
    lightning_file,
    prefixed,
    weights,
)

import didi_instruct as didi
from didi_instruct.errors import UserError
from didi_instruct.hub.export import convert

ESM = {
    "esm.embeddings.word_embeddings.weight": torch.randn(7, 4, dtype=torch.float64),
    "esm.embeddings.position_ids": torch.arange(9)[None],
    "esm.encoder.layer.0.attention.self.query.weight": torch.randn(4, 4).bfloat16(),
    "lm_head.dense.weight": torch.randn(4, 4),
    "lm_head.bias": torch.randn(7),
}
ESM_CONFIG = {
    "model_type": "esm", "architectures": ["EsmForMaskedLM"], "vocab_size": 7, "hidden_size": 4,
    "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 12,
    "position_embedding_type": "rotary",
}  # fmt: skip


def identical(one, two):
    """Equal names, types and bits."""
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert two[name].dtype == tensor.dtype, name
        bits = (t.detach().reshape(-1).view(torch.uint8) for t in (tensor, two[name]))
        assert torch.equal(*bits), name


def esm_folder(folder, tensors, file="model.safetensors", config=ESM_CONFIG):
    folder.mkdir()
    if file.endswith(".safetensors"):
        save_file(tensors, folder / file)
    else:
        torch.save({"state_dict": tensors, "epoch": 3}, folder / file)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "vocab.txt").write_text("\n".join("abcdefg"))
    return folder


@pytest.mark.parametrize("layout", FOLDERS)
def test_there_and_back_through_our_layout_is_bit_identical(layout, tmp_path):
    there = FOLDERS[layout](tmp_path / "there")
    WORDS.save(there)
    ours = convert(there, tmp_path / "ours", "didi")
    assert didi.load(ours).provenance["foreign"]["layout"] == layout
    back = convert(ours, tmp_path / "back", layout)
    for name in ("model.safetensors", "discriminator.safetensors"):
        assert (there / name).exists() == (back / name).exists()
        if (there / name).exists():
            identical(load_file(there / name), load_file(back / name))
    assert didi.load(back).tokenizer.hash == WORDS.hash
    again = convert(back, tmp_path / "again", "didi")
    identical(load_file(ours / "model.safetensors"), load_file(again / "model.safetensors"))
    assert didi.load(again).config == didi.load(ours).config


def test_a_training_runs_file_gives_the_weights_asked_for(tmp_path):
    raw = weights(5)
    path = lightning_file(tmp_path / "last.ckpt", prefixed("backbone.", raw), CORE)
    for kind, expected in (("ema", CORE), ("raw", raw)):
        folder = convert(path, tmp_path / kind, "mdlm-hub", weights=kind)
        identical(load_file(folder / "model.safetensors"), prefixed("backbone.", expected))


def test_the_discriminator_is_left_out_only_if_said(tmp_path):
    there = FOLDERS["didi-instruct"](tmp_path / "there")
    with pytest.raises(UserError, match="no place for the discriminator.*--no-discriminator"):
        convert(there, tmp_path / "hub", "mdlm-hub")
    assert not (tmp_path / "hub").exists()
    convert(there, tmp_path / "hub", "mdlm-hub", discriminator=False)
    identical(load_file(tmp_path / "hub" / "model.safetensors"), prefixed("backbone.", CORE))
    assert (
        didi.load(convert(there, tmp_path / "o", "didi", discriminator=False)).discriminator is None
    )


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin", "last.ckpt"])
def test_esm_is_copied_to_the_bit(file, tmp_path):
    """Types, counters and all; DPLM's training checkpoints lose their prefix."""
    prefix = "" if file == "model.safetensors" else "model.net."
    more = {} if file == "model.safetensors" else {"other": torch.ones(1)}
    there = esm_folder(tmp_path / "there", prefixed(prefix, ESM) | more, file)
    back = convert(there, tmp_path / "back", "esm")
    identical(load_file(back / "model.safetensors"), ESM)
    for name in ("config.json", "vocab.txt"):
        assert (back / name).read_bytes() == (there / name).read_bytes()


def test_transformers_reads_the_copy(tmp_path):
    network = masked_folders.esm(tmp_path / "there")
    back = convert(tmp_path / "there", tmp_path / "back", "esm")
    again = transformers.EsmForMaskedLM.from_pretrained(back)
    identical(dict(network.named_parameters()), dict(again.named_parameters()))


def test_a_masked_lm_goes_to_our_layout_and_back(tmp_path):
    """Every parameter, bit by bit, as transformers reads them."""
    network = masked_folders.esm(tmp_path / "there")
    ours = convert(tmp_path / "there", tmp_path / "ours", "didi")
    again = transformers.EsmForMaskedLM.from_pretrained(convert(ours, tmp_path / "back", "esm"))
    identical(dict(network.named_parameters()), dict(again.named_parameters()))
    assert didi.load(tmp_path / "back", device="cpu").tokenizer is not None
    masked_folders.bert(tmp_path / "bert")
    bert = convert(tmp_path / "bert", tmp_path / "bert-ours", "didi")
    with pytest.raises(UserError, match="is `bert`, and `esm` holds ESM-2 models alone"):
        convert(bert, tmp_path / "dest", "esm")


def test_progress_counts_the_bytes_of_the_weights(tmp_path):
    seen = []
    there = FOLDERS["mdlm-hub"](tmp_path / "there")
    convert(
        there, tmp_path / "ours", "didi", progress=lambda done, total: seen.append((done, total))
    )
    size = sum(t.nbytes for t in CORE.values())
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert len(seen) == len(CORE)
    assert seen[-1] == (size, size)


@pytest.mark.parametrize(
    ("layout", "to", "message"),
    [
        ("mdlm-hub", "esm", "is a DiT, and `esm` holds ESM-2"),
        ("mdlm-hub", "duo-hub", "`duo-hub` holds `duo` models, and this is `mdlm`"),
        ("duo-hub", "didi-instruct", "`didi-instruct` holds `mdlm` models, and this is `duo`"),
        ("mdlm-hub", "mdlm_hub", "Did you mean `mdlm-hub`"),
        ("mdlm-hub", "gguf", "`gguf` is not a format. Known: didi"),
    ],
)
def test_impossible_conversions_leave_nothing(layout, to, message, tmp_path):
    there = FOLDERS[layout](tmp_path / "there")
    with pytest.raises(UserError, match=message):
        convert(there, tmp_path / "dest", to)
    assert {p.name for p in tmp_path.iterdir()} == {"there"}


def test_a_masked_lm_stays_what_it_is(tmp_path):
    there = esm_folder(tmp_path / "there", ESM)
    with pytest.raises(UserError, match="`mdlm-hub` cannot hold: it loads as it is.*esm"):
        convert(there, tmp_path / "dest", "mdlm-hub")
    for choice in ({"weights": "raw"}, {"family": "duo"}, {"tokenizer": "bytes"}):
        with pytest.raises(UserError, match="leave out"):
            convert(there, tmp_path / "dest", "esm", **choice)
    bert = esm_folder(tmp_path / "bert", ESM, config=ESM_CONFIG | {"model_type": "bert"})
    with pytest.raises(UserError, match="is `bert`, and `esm` holds ESM-2 models alone"):
        convert(bert, tmp_path / "dest", "esm")
    headless = {k: v for k, v in ESM.items() if "lm_head" not in k}
    trunk = esm_folder(tmp_path / "trunk", headless)
    with pytest.raises(UserError, match="no whole ESM-2 masked LM"):
        convert(trunk, tmp_path / "dest", "esm")
    assert not (tmp_path / "dest").exists()


@pytest.mark.parametrize("form", ["here", "link"])
@pytest.mark.parametrize("to", ["esm", "didi", "mdlm-hub"])
def test_an_empty_folder_is_filled_under_any_name(tmp_path, monkeypatch, form, to):
    """Where one stands, and where a link leads: the folder is the same one afterwards."""
    there = tmp_path / "there"
    if to == "esm":
        esm_folder(there, ESM)
    else:
        FOLDERS["mdlm-hub"](there)
    dest = tmp_path / "dest"
    dest.mkdir()
    (tmp_path / "link").symlink_to(dest)
    monkeypatch.chdir(dest)
    convert(there, "." if form == "here" else tmp_path / "link", to)
    assert (tmp_path / "link").is_symlink()
    assert {"config.json", "model.safetensors"} <= {p.name for p in dest.iterdir()}
    assert {p.name for p in tmp_path.iterdir()} == {"there", "dest", "link"}
    if to == "esm":
        assert Path("config.json").is_file()  # who stood there still does
        identical(load_file(dest / "model.safetensors"), ESM)


def test_types_that_cannot_be_written_are_refused_before(tmp_path):
    small = {**ESM, "esm.extra": torch.zeros(4).to(torch.float8_e4m3fn)}
    there = esm_folder(tmp_path / "there", small)
    with pytest.raises(UserError, match=r"esm\.extra holds torch\.float8_e4m3fn"):
        convert(there, tmp_path / "dest", "esm")
    assert {p.name for p in tmp_path.iterdir()} == {"there"}


def test_a_folder_that_holds_something_is_not_touched(tmp_path):
    there = FOLDERS["mdlm-hub"](tmp_path / "there")
    before = {p.name: p.read_bytes() for p in there.iterdir()}
    with pytest.raises(UserError, match="is not empty"):
        convert(there, there, "didi")
    assert {p.name: p.read_bytes() for p in there.iterdir()} == before
    (tmp_path / "empty").mkdir()
    assert didi.load(convert(there, tmp_path / "empty", "didi")).config.kind == "mdlm"
