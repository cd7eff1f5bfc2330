import json
import os
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.random_models import randomise

from didi_instruct.config.model import ModelConfig, ScheduleConfig
from didi_instruct.data.files import AtomicFile, sha256_file
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import UserError
from didi_instruct.models import tensor_files
from didi_instruct.models.ar import ARModel
from didi_instruct.models.build import build_model
from didi_instruct.models.checkpoint import load_model, save_model
from didi_instruct.models.discriminator import Discriminator
from didi_instruct.models.dit import DiT
from didi_instruct.models.tensor_files import describe

CONFIG = ModelConfig(
    layers=2, hidden=16, heads=2, cond_dim=8, vocab_size=11, length=12,
    schedule=ScheduleConfig(name="cosine", eps=0.0),
)  # fmt: skip
TOKENS = torch.randint(10, (2, 7), generator=torch.Generator().manual_seed(1))
WORDS = Tokenizer.from_words([f"w{n}" for n in range(10)])


def network(seed=0, config=CONFIG):
    return randomise(build_model(config), seed).eval()


def rewrite(folder, name, tensors):
    """Replace a tensor file and make config.json agree, as someone else's tool would."""
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / name)
    content = json.loads((folder / "config.json").read_text())
    path = folder / name
    content["files"][name] = {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
    (folder / "config.json").write_text(json.dumps(content))


def edit(folder, change):
    content = json.loads((folder / "config.json").read_text())
    change(content)
    (folder / "config.json").write_text(json.dumps(content))


def error_of(folder, **options):
    with pytest.raises(UserError) as caught:
        load_model(folder, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.fixture
def folder(tmp_path):
    discriminator = randomise(Discriminator(CONFIG), 7)
    return save_model(
        tmp_path / "model", network(), CONFIG, WORDS, discriminator, {"from": "a test"}
    )


@torch.no_grad()
def test_round_trip_is_bit_identical(folder):
    loaded = load_model(folder)
    for key, value in network().state_dict().items():
        assert torch.equal(loaded.model.state_dict()[key], value), key
    for key, value in randomise(Discriminator(CONFIG), 7).state_dict().items():
        if not key.endswith(("weight_u", "weight_v")):  # drawn at random in each
            assert torch.equal(loaded.discriminator.state_dict()[key], value), key
    assert loaded.config == CONFIG
    assert loaded.provenance == {"from": "a test"}
    assert loaded.tokenizer.hash == WORDS.hash
    assert torch.equal(loaded.model(TOKENS), network()(TOKENS))
    assert not loaded.model.training
    assert not [p for p in folder.iterdir() if p.name.startswith(".")]


@pytest.mark.parametrize("kind", ["duo", "ar"])
@torch.no_grad()
def test_other_kinds_round_trip(tmp_path, kind):
    config = ModelConfig(kind=kind, layers=1, hidden=16, heads=2, cond_dim=8, vocab_size=10)
    tokenizer = WORDS if kind == "duo" else None
    save_model(tmp_path, network(3, config), config, tokenizer)
    loaded = load_model(tmp_path)
    assert isinstance(loaded.model, ARModel if kind == "ar" else DiT)
    assert torch.equal(loaded.model(TOKENS % 9), network(3, config)(TOKENS % 9))
    assert loaded.discriminator is None


@torch.no_grad()
def test_loaded_weights_can_be_trained_without_touching_the_file(folder):
    loaded = load_model(folder)
    loaded.model.train()
    loaded.model.vocab_embed.embedding.add_(1)
    assert torch.equal(load_model(folder).model(TOKENS), network()(TOKENS))


def test_file_is_plain_safetensors(folder):
    assert set(load_file(folder / "model.safetensors")) == set(network().state_dict())
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_state_dicts_are_accepted_too(folder, tmp_path):
    other = save_model(tmp_path / "other", network().state_dict(), CONFIG)
    assert sha256_file(other / "model.safetensors") == sha256_file(folder / "model.safetensors")


@torch.no_grad()
def test_16_bit_weights_on_disk(tmp_path):
    """They stay so, positions stay float32, and a wider type can be asked for at loading."""
    save_model(tmp_path, network().bfloat16(), CONFIG)
    loaded = load_model(tmp_path)
    assert {p.dtype for p in loaded.model.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in loaded.model.buffers()} == {torch.float32}
    assert torch.equal(loaded.model(TOKENS), network().bfloat16()(TOKENS))
    wide = load_model(tmp_path, dtype=torch.float32).model
    assert torch.equal(wide(TOKENS), network().bfloat16().float()(TOKENS))


def test_a_file_read_in_parts_is_the_same_file(folder, monkeypatch):
    """Read a few numbers at a time or all at once, cast or not, every tensor is itself."""
    whole = load_file(folder / "model.safetensors")
    opened = []

    def watched(*arguments, **options):
        opened.append(arguments)
        return safe_open(*arguments, **options)

    monkeypatch.setattr(tensor_files, "NUMBERS_AT_ONCE", 500)
    monkeypatch.setattr(tensor_files, "safe_open", watched)
    for dtype in (None, torch.bfloat16):
        parts = tensor_files.read_tensors(
            folder / "model.safetensors", "cpu", dtype, keep=["rotary_emb.inv_freq"]
        )
        assert parts.keys() == whole.keys()
        for name, tensor in whole.items():
            kept = dtype is None or name == "rotary_emb.inv_freq"
            assert torch.equal(parts[name], tensor if kept else tensor.to(dtype)), name
    assert len(opened) > 10


def test_saving_replaces_what_was_there(folder):
    save_model(folder, network(5), CONFIG)
    loaded = load_model(folder)
    assert torch.equal(loaded.model(TOKENS), network(5)(TOKENS))
    assert loaded.tokenizer is None
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize(
    ("links", "survived"),
    [*((True, n) for n in range(7)), *((False, n) for n in (3, 6, 8, 10))],
)
def test_killed_save_leaves_the_old_model_loadable(folder, monkeypatch, links, survived):
    """Die at each rename in turn, leaving temporary files behind as a killed process does.

    There are 2 renames inside the tokenizer, 4 files and config.json: 7. Without hard links, each
    of the 4 files is also moved aside: 11.
    """
    replace, count = os.replace, iter(range(100))

    def dying(source, target):
        if next(count) >= survived:
            raise KeyboardInterrupt
        replace(source, target)

    def no_links(*_):
        raise OSError

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", dying)
        patch.setattr(AtomicFile, "discard", lambda _: None)
        if not links:
            patch.setattr(os, "link", no_links)
        discriminator = randomise(Discriminator(CONFIG), 8)
        words = Tokenizer.from_words(list("abcdefghij"))
        with pytest.raises(KeyboardInterrupt):
            save_model(folder, network(5), CONFIG, words, discriminator, {"new": True})

    for verify in (True, False):
        loaded = load_model(folder, verify=verify)
        assert torch.equal(loaded.model(TOKENS), network(0)(TOKENS))
        assert loaded.tokenizer.hash == WORDS.hash
        assert loaded.provenance == {"from": "a test"}
    save_model(folder, network(6), CONFIG, WORDS)
    assert torch.equal(load_model(folder).model(TOKENS), network(6)(TOKENS))
    assert not [p for p in folder.iterdir() if p.name.startswith(".")]


def test_killed_first_save_is_no_model(tmp_path, monkeypatch):
    def dying(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", dying)
        with pytest.raises(KeyboardInterrupt):
            save_model(tmp_path, network(), CONFIG)
    assert "it has no config.json" in error_of(tmp_path)


def test_a_full_disk_is_one_clear_line(folder, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(AtomicFile, "write", full)
        with pytest.raises(UserError, match="disk is full"):
            save_model(folder, network(5), CONFIG)
        patch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 9, 0))
        with pytest.raises(UserError, match="make room"):
            save_model(folder, network(5), CONFIG)
    assert torch.equal(load_model(folder).model(TOKENS), network(0)(TOKENS))


def test_no_folder_and_no_model(tmp_path):
    assert error_of(tmp_path / "none") == f"{tmp_path / 'none'}: no such folder."
    assert error_of(tmp_path) == f"{tmp_path} is not a model folder: it has no config.json."
    (tmp_path / "config.json").write_text("{")
    assert "is not valid JSON" in error_of(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["GPT2"]}')
    assert "was not written by didi" in error_of(tmp_path)
    with pytest.raises(UserError, match="was not written by didi"):
        save_model(tmp_path, network(), CONFIG)


@pytest.mark.parametrize("name", ["model.safetensors", "discriminator.safetensors"])
@pytest.mark.parametrize("verify", [True, False])
def test_truncated_file(folder, name, verify):
    path = folder / name
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-5])
    expected = f"{path} is truncated: it has {size - 5} bytes, but config.json says {size}."
    assert error_of(folder, verify=verify) == expected
    path.unlink()
    assert f"{path} is missing" in error_of(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_flipped_byte(folder, name):
    path = folder / name
    before = sha256_file(path)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    message = error_of(folder)
    assert f"{path} was altered" in message
    assert before in message
    assert sha256_file(path) in message


def test_garbage_in_place_of_tensors(folder):
    path = folder / "model.safetensors"
    path.write_bytes(b"\xff" * path.stat().st_size)
    assert "is not a readable safetensors file" in error_of(folder, verify=False)


def test_missing_unexpected_and_misshapen_tensors_are_named(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["blocks.1.norm2.weight"]
    tensors["blocks.1.extra"] = torch.zeros(3)
    tensors["blocks.0.attn_out.weight"] = torch.zeros(16, 4)
    rewrite(folder, "model.safetensors", tensors)
    assert error_of(folder) == (
        f"{folder / 'model.safetensors'}: 1 tensor missing (blocks.1.norm2.weight); "
        "1 tensor unexpected (blocks.1.extra); "
        "1 tensor of the wrong shape (blocks.0.attn_out.weight (16, 4) for (16, 16)). "
        "Wanted: `mdlm` with 2 layers, hidden 16, 2 heads, vocab_size 11; "
        "the tensors look like a denoiser with 2 layers, hidden 16, vocab_size 11."
    )


def test_many_wrong_tensors_are_counted_and_the_architecture_recognised(folder):
    other = ModelConfig(layers=3, hidden=8, heads=1, cond_dim=8, vocab_size=11)
    rewrite(folder, "model.safetensors", network(0, other).state_dict())
    message = error_of(folder)
    assert "10 tensors unexpected (blocks.2." in message
    assert "and 7 more" in message
    assert "look like a denoiser with 3 layers, hidden 8, vocab_size 11." in message


def test_other_networks_are_recognised(folder):
    rewrite(folder, "model.safetensors", Discriminator(CONFIG).state_dict())
    assert "look like a discriminator with 2 layers" in error_of(folder)
    prefixed = {f"backbone.{k}": v for k, v in network().state_dict().items()}
    rewrite(folder, "model.safetensors", prefixed)
    assert "under the prefix `backbone.`" in error_of(folder)
    ar = ARModel(ModelConfig(kind="ar", layers=1, hidden=16, heads=2, vocab_size=11))
    assert describe({k: tuple(v.shape) for k, v in ar.state_dict().items()}) == (
        "a left-to-right model with 1 layers, hidden 16, vocab_size 11"
    )
    assert "`small`" in describe(
        {
            "vocab_embed.embedding": (50258, 768),
            "sigma_map.mlp.0.weight": (128, 256),
            "blocks.11.norm1.weight": (768,),
        }
    )
    assert "ESM" in describe({"esm.embeddings.word_embeddings.weight": (33, 640)})
    assert describe({"x": (1,)}) == "no network known here"


def test_integers_and_foreign_positions_are_no_weights(folder):
    tensors = load_file(folder / "model.safetensors")
    rewrite(folder, "model.safetensors", {**tensors, "output_layer.linear.bias": torch.arange(11)})
    assert "output_layer.linear.bias holds I64" in error_of(folder)
    tensors["rotary_emb.inv_freq"] = tensors["rotary_emb.inv_freq"] * 3
    rewrite(folder, "model.safetensors", tensors)
    assert "rotary positions with base 10,000" in error_of(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(version=2), "has format version 2, but this didi reads up to 1"),
        (lambda c: c.update(version="x"), "`version` is 'x'"),
        (lambda c: c.update(extra=1), "`extra` is not a setting."),
        (lambda c: c["model"].update(layer=2), "`model.layer` is not a setting. Did you mean"),
        (lambda c: c["model"].pop("heads"), "`model.heads` is missing"),
        (lambda c: c["model"].update(heads="2"), "`model.heads` is '2', but a whole number"),
        (lambda c: c["model"].update(kind="gpt"), "`model.kind` is 'gpt'"),
        (lambda c: c["model"].update(hidden=15), "model.hidden is 15 with 2 heads"),
        (lambda c: c["model"]["schedule"].update(name="x"), "`model.schedule.name` is 'x'"),
        (
            lambda c: c["model"].update(length=2**20 + 1),
            "`model.length` is 1048577",
        ),
        (
            lambda c: c["discriminator"].update(length=10**12),
            "`discriminator.length` is 10000",
        ),
        (lambda c: c["model"].update(layers=10**9), "look like a denoiser with 2 layers"),
        (lambda c: c["model"].update(heads=4), "rotary_emb.inv_freq (4,) for (2,)"),
        (lambda c: c["files"].pop("model.safetensors"), "does not list model.safetensors"),
        (lambda c: c["files"].update({"../x": {}}), "lists '../x'"),
        (lambda c: c.update(files=3), "`files` is 3"),
        (lambda c: c["files"]["tokenizer.json"].pop("bytes"), "needs `bytes` and `sha256`"),
        (lambda c: c.update(discriminator=None), "disagree"),
    ],
)
def test_settings_it_does_not_understand(folder, change, message):
    edit(folder, change)
    assert message in error_of(folder)


def test_tokenizer_needs_room_for_the_extra_id(folder, tmp_path):
    larger = Tokenizer.from_words([f"w{n}" for n in range(11)])
    with pytest.raises(UserError, match="11 ids and the model vocab_size 11: no room for the mask"):
        save_model(tmp_path / "other", network(), CONFIG, larger)
    larger.save(folder)
    record = {"bytes": (folder / "tokenizer.json").stat().st_size}
    record["sha256"] = sha256_file(folder / "tokenizer.json")
    edit(folder, lambda c: c["files"].update({"tokenizer.json": record}))
    assert "no room for the mask" in error_of(folder)


def test_wrong_weights_are_not_even_saved(tmp_path):
    other = ModelConfig(layers=3, hidden=8, heads=1, cond_dim=8, vocab_size=11)
    with pytest.raises(UserError, match="look like a denoiser with 3 layers"):
        save_model(tmp_path / "m", network(0, other), CONFIG)
    with pytest.raises(TypeError, match="JSON"):
        save_model(tmp_path / "m", network(), CONFIG, provenance={"x": torch.zeros(1)})
    assert not (tmp_path / "m").exists()


@pytest.mark.gpu
@torch.no_grad()
def test_loads_onto_a_gpu(folder):
    loaded = load_model(folder, device="cuda", dtype=torch.bfloat16)
    assert loaded.model.rotary_emb.cos.is_cuda
    logits = loaded.model(TOKENS.cuda()).float().cpu()
    expected = network()(TOKENS)
    assert (logits - expected).norm() < 0.05 * expected.norm()
    assert loaded.discriminator(TOKENS.cuda()).isfinite().all()
    save_model(folder, loaded.model, CONFIG)
    assert torch.equal(load_model(folder).model(TOKENS), loaded.model.cpu()(TOKENS))
