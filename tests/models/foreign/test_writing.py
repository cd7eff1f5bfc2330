import json
import os
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from didi_instruct.config.model import ModelConfig
from didi_instruct.errors import UserError
from didi_instruct.models.checkpoint import LoadedModel, load_model, save_model
from didi_instruct.models.discriminator import build_discriminator
from didi_instruct.models.dit import build_model
from didi_instruct.models.foreign import writing
from didi_instruct.models.foreign.reading import load_foreign, recognise
from didi_instruct.models.foreign.writing import write_foreign

from .folders import CORE, FOLDERS, WORDS
from .reference import (
    COND,
    HEADS,
    HIDDEN,
    LAYERS,
    LENGTH,
    VOCAB,
    hub_config,
    logits,
    sdtt_config,
    weights,
)


def save_as_ours(loaded, folder):
    return load_model(
        save_model(
            folder, loaded.model, loaded.config, loaded.tokenizer, loaded.discriminator,
            loaded.provenance,
        )
    )  # fmt: skip


def same_files(a, b):
    for name in ("model.safetensors", "discriminator.safetensors"):
        assert (a / name).exists() == (b / name).exists()
        if (a / name).exists():
            one, two = load_file(a / name), load_file(b / name)
            assert one.keys() == two.keys()
            for key, value in one.items():
                assert two[key].dtype == value.dtype, key
                assert torch.equal(two[key].view(torch.uint8), value.view(torch.uint8)), key


@pytest.mark.parametrize("through_ours", [False, True])
@pytest.mark.parametrize("layout", FOLDERS)
def test_round_trip_is_bit_identical(layout, through_ours, tmp_path):
    there = FOLDERS[layout](tmp_path / "there")
    WORDS.save(there)
    loaded = load_foreign(there)
    if through_ours:
        loaded = save_as_ours(loaded, tmp_path / "ours")
    back = write_foreign(loaded, tmp_path / "back", layout)
    same_files(there, back)
    again = load_foreign(back)
    assert again.config == loaded.config
    assert again.tokenizer.hash == WORDS.hash
    assert recognise(back).layout == layout
    theirs, ours = (json.loads((f / "config.json").read_text()) for f in (there, back))
    fields = hub_config() if layout != "sdtt-hub" else sdtt_config()["model"]
    for field in fields.keys() & theirs.keys() - {"model_type"}:
        assert ours[field] == theirs[field], field
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


@torch.no_grad()
def test_padding_stays_closed_in_our_own_files(tmp_path):
    loaded = save_as_ours(load_foreign(FOLDERS["duo-hub"](tmp_path / "there")), tmp_path / "ours")
    tokens, sigma = torch.arange(VOCAB)[None, :LENGTH], torch.tensor([0.5])
    law = loaded.model(tokens, sigma).double().softmax(-1)
    assert law[..., -1].max() == 0
    wanted = logits(CORE, tokens, sigma, sees_time=True)[..., :-1].double().softmax(-1)
    torch.testing.assert_close(law[..., :-1], wanted, rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("layout", ["mdlm-hub", "sdtt-hub", "didi-instruct"])
def test_our_model_in_their_layout_has_the_reference_logits(layout, tmp_path):
    """Read as any user of the layout would: its file, its names, its network's arithmetic."""
    config = ModelConfig(
        layers=LAYERS, hidden=HIDDEN, heads=HEADS, cond_dim=COND, vocab_size=VOCAB, length=LENGTH,
    )  # fmt: skip
    model = build_model(config).eval()
    model.load_state_dict(weights(9))
    folder = write_foreign(LoadedModel(model, config), tmp_path / "out", layout)
    prefix = "" if layout == "didi-instruct" else "backbone."
    state = {
        name.removeprefix(prefix): value
        for name, value in load_file(folder / "model.safetensors").items()
    }
    tokens = torch.arange(12).view(2, 6)
    torch.testing.assert_close(logits(state, tokens)[..., :-1], model(tokens), rtol=1e-5, atol=1e-5)


def small(**changes):
    config = ModelConfig(layers=1, hidden=8, heads=2, cond_dim=4, vocab_size=5, length=6, **changes)
    return LoadedModel(build_model(config), config)


def with_critic(loaded, **changes):
    critic = build_discriminator(replace(loaded.config, **changes))
    return replace(loaded, discriminator=critic)


@pytest.mark.parametrize(
    ("loaded", "layout", "message"),
    [
        (small(learned_positions=True), "mdlm-hub", "no `learned_positions`"),
        (small(kind="ar"), "mdlm-hub", "this is `ar`"),
        (small(kind="duo"), "mdlm-hub", "holds `mdlm` models, and this is `duo`"),
        (small(), "duo-hub", "holds `duo` models"),
        (small(kind="duo"), "duo-hub", "`time_conditioning: false`"),
        (with_critic(small()), "sdtt-hub", "no place for a discriminator.*discriminator=False"),
        (with_critic(small(), time_conditioning=True), "didi-instruct", "differ from the model's"),
        (small(), "lightning", "no layout to write. Known: mdlm-hub"),
    ],
)
def test_what_a_layout_cannot_say_is_refused_before_writing(loaded, layout, message, tmp_path):
    with pytest.raises(UserError, match=message):
        write_foreign(loaded, tmp_path / "out", layout)
    assert list(tmp_path.iterdir()) == []


def test_a_discriminator_can_be_left_out(tmp_path):
    folder = write_foreign(with_critic(small()), tmp_path / "out", "mdlm-hub", discriminator=False)
    assert not recognise(folder).has_discriminator


def test_a_full_folder_is_left_alone(tmp_path):
    (tmp_path / "out").mkdir()
    write_foreign(small(), tmp_path / "out", "mdlm-hub")
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    with pytest.raises(UserError, match="is not empty"):
        write_foreign(small(), tmp_path / "out", "mdlm-hub")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before


def test_a_folder_may_be_where_one_stands_or_behind_a_link(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there")
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for folder in (".", tmp_path / "link"):
        write_foreign(small(), folder, "mdlm-hub")
        assert recognise(folder).config == small().config


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(writing, "save_tensors", fail)
    with pytest.raises(UserError, match="the disk is full"):
        write_foreign(small(), tmp_path / "out", "mdlm-hub")
    assert list(tmp_path.iterdir()) == []
