"""What people see of damaged and of hostile files: one printable line each, an error of theirs."""

import argparse
import json
import zipfile

import pytest
import torch
from safetensors.torch import save_file

from didi_instruct.errors import UserError
from didi_instruct.models.checkpoint import is_ours, load_model, read_manifest, save_model
from didi_instruct.models.dit import DiT
from didi_instruct.models.foreign.reading import load_foreign, recognise
from didi_instruct.models.foreign.writing import write_foreign
from didi_instruct.models.tensor_files import check_shapes

from .reference import hub_config, hub_folder, lightning_file, prefixed, weights
from .test_reading import CORE, OURS

ODD = "\x1b[2J\x1b]0;name\x07\n\ud800" + "a" * 3000


def line_of(action, *arguments):
    """The message of an error: one line that any terminal can print."""
    with pytest.raises(UserError) as caught:
        action(*arguments)
    message = str(caught.value)
    assert message.isprintable()
    assert len(message.encode()) < 900
    return message


@pytest.mark.parametrize(
    "state",
    [
        {ODD: torch.ones(2)},
        {f"{ODD}{n}.vocab_embed.embedding": torch.ones(2, 2) for n in range(2)},
        {f"{n}{ODD}.vocab_embed.embedding": torch.ones(2, 2) for n in range(20)},
        {f"{ODD}.vocab_embed.embedding": argparse.Namespace()},
        {f"{ODD}.{k}": v for k, v in CORE.items() if "bias" not in k},
        {**CORE, f"blocks.0.{ODD}": torch.ones(2)},
        {**CORE, "blocks.0.norm1.weight": torch.ones((1,) * 60)},
        {**CORE, "blocks." + "9" * 3000 + ".norm1.weight": torch.ones(2)},
    ],
)
def test_names_of_tensors(tmp_path, state):
    torch.save(state, tmp_path / "x.pt")
    line_of(recognise, tmp_path / "x.pt")


def test_names_left_out(tmp_path):
    path = lightning_file(tmp_path / "x.ckpt", prefixed("backbone.", CORE) | {ODD: torch.ones(1)})
    assert all(note.isprintable() and len(note) < 300 for note in recognise(path).notes)


def test_block_numbers_of_any_length():
    """Python refuses to read a number of more than 4,300 digits."""
    shapes = {"vocab_embed.embedding": (5, 4), "blocks." + "9" * 5000 + ".norm1.weight": (4,)}
    line_of(check_shapes, "file", shapes, {"a": (1,)}, "another")


@pytest.mark.parametrize(
    "value",
    [ODD, [[ODD]] * 1000, 10**4000, {ODD: ODD}, json.loads("[" * 200 + "]" * 200)],
    ids=["text", "list", "number", "group", "nested"],
)
def test_values_of_settings(tmp_path, value):
    for setting in ("n_heads", "dropout", "model_type"):
        if setting != "model_type" or not isinstance(value, str):
            path = hub_folder(tmp_path, prefixed("backbone.", CORE), hub_config(**{setting: value}))
            assert f"`{setting}` is" in line_of(recognise, path)
    save_model(tmp_path / "ours", DiT(OURS), OURS)
    good = json.loads((tmp_path / "ours" / "config.json").read_text())
    for change in ({"version": [value]}, {"files": [value]}, {ODD: 1}, {"files": {ODD: {}}}):
        (tmp_path / "ours" / "config.json").write_text(json.dumps(good | change))
        line_of(read_manifest, tmp_path / "ours")


def test_a_flipped_byte_in_the_directory(tmp_path):
    """Whichever it is, the file is read or refused, never another error."""
    path = tmp_path / "x.pt"
    torch.save({"a": torch.ones(3)}, path)
    good = path.read_bytes()
    for at in range(good.index(b"PK\x01\x02"), len(good)):
        for flip in (0x01, 0x80, 0xFF):
            path.write_bytes(good[:at] + bytes([good[at] ^ flip]) + good[at + 1 :])
            with pytest.raises(UserError):
                recognise(path)


def test_settings_nested_without_end(tmp_path):
    """Beside a file that is given by its own name, too."""
    path = hub_folder(tmp_path / "m", prefixed("backbone.", CORE), hub_config())
    (path / "config.json").write_text('{"a":' * 100_000 + "1" + "}" * 100_000)
    assert not is_ours(path)
    for place in (path, path / "model.safetensors"):
        assert "not valid JSON" in line_of(recognise, place)
    assert "not valid JSON" in line_of(read_manifest, path)


def test_a_scalar_in_place_of_the_time_embedding(tmp_path):
    state = prefixed("backbone.", CORE | {"sigma_map.mlp.0.weight": torch.tensor(1.0)})
    message = line_of(recognise, hub_folder(tmp_path / "m", state, hub_config()))
    assert "sigma_map.mlp.0.weight () for" in message


@pytest.mark.parametrize(
    "padding", [{}, {"id": 99, "bias": 1.0}, {"id": -1, "bias": 1.0}, {"id": 18, "bias": "x"}]
)
def test_padding_that_no_model_has(tmp_path, padding):
    state, config = prefixed("backbone.", CORE), hub_config(model_type="DUO", pad_token_id=18)
    loaded = load_foreign(hub_folder(tmp_path / "m", state, config | {"time_conditioning": True}))
    loaded.provenance["padding"] = padding
    save_model(tmp_path / "ours", loaded.model, loaded.config, provenance=loaded.provenance)
    ours = load_model(tmp_path / "ours")
    message = line_of(write_foreign, ours, tmp_path / "out", "duo-hub")
    assert "`provenance.padding` is {" in message
    assert not (tmp_path / "out").exists()


def test_what_is_no_checkpoint_is_named(tmp_path):
    path = tmp_path / "x.ckpt"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("a/data.pkl", b"N.")
        file.writestr("b/data.pkl", b"N.")
    assert "a zip file with 2 data.pkl" in line_of(recognise, path)
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    for name in ("x.ckpt", "x.safetensors"):
        (tmp_path / name).write_bytes(pointer)
        assert "run `git lfs pull`" in line_of(recognise, tmp_path / name)


def test_views_that_repeat_their_numbers(tmp_path):
    """Beside the weights they do no harm; in place of one they are refused."""
    state, repeated = prefixed("backbone.", weights()), torch.zeros(1).expand(5)
    path = lightning_file(tmp_path / "x.ckpt", state, more=repeated, many=repeated.expand(9, 5))
    assert torch.equal(
        load_foreign(path).model.state_dict()["blocks.0.norm1.weight"],
        state["backbone.blocks.0.norm1.weight"],
    )
    bias = "backbone.output_layer.linear.bias"
    for view in (torch.zeros(1).expand(19), torch.zeros(99)[:1].expand(19)):
        lightning_file(path, state | {bias: view})
        assert f"{bias} is a view that repeats its numbers" in line_of(recognise, path)
    overlapping = torch.arange(50.0).as_strided((19, 32), (1, 1))
    lightning_file(path, state | {"backbone.vocab_embed.embedding": overlapping})
    assert "repeats its numbers" in line_of(recognise, path)


def test_frequencies_of_another_base(tmp_path):
    """Refused by `recognise` already; bfloat16's are those of base 10,000, rounded."""
    usual = CORE["rotary_emb.inv_freq"]
    for other in (usual * 3, 500_000 ** -(torch.arange(0, 8, 2) / 8), usual * torch.nan):
        state = prefixed("backbone.", CORE | {"rotary_emb.inv_freq": other})
        path = hub_folder(tmp_path / "m", state, hub_config())
        assert "other rotary frequencies" in line_of(recognise, path)
    state = prefixed("backbone.", CORE | {"rotary_emb.inv_freq": usual.bfloat16()})
    loaded = load_foreign(hub_folder(tmp_path / "m", state, hub_config()))
    assert torch.equal(loaded.model.rotary_emb.inv_freq, usual)
    assert loaded.model.rotary_emb.inv_freq.dtype == torch.float32


def test_errors_of_safetensors(tmp_path):
    """They quote the file."""
    path = tmp_path / "x.safetensors"
    save_file({"a" * 5000: torch.ones(2), "b": torch.ones(2)}, path)
    data = path.read_bytes()
    path.write_bytes(data.replace(b"[0,8]", b"[1,8]").replace(b"[8,16]", b"[9,16]"))
    assert "not a readable safetensors file" in line_of(recognise, path)
