import contextlib
import json
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.kills import kills
from tests.random_models import randomise

from didi_instruct.config.model import ModelConfig, ScheduleConfig
from didi_instruct.data.files import AtomicFile, sha256_file
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import UserError
from didi_instruct.models import tensor_files
from didi_instruct.models.ar import ARModel
from didi_instruct.models.checkpoint import load_model, save_model
from didi_instruct.models.discriminator import build_discriminator
from didi_instruct.models.dit import DiT, build_model
from didi_instruct.models.quantised import StoredWeights

CONFIG = ModelConfig(
    layers=2, hidden=16, heads=2, cond_dim=8, vocab_size=11, length=12,
    schedule=ScheduleConfig(name="cosine", eps=0.0),
)  # fmt: skip
OTHER = ModelConfig(layers=3, hidden=8, heads=1, cond_dim=8, vocab_size=11)
TOKENS = torch.randint(10, (2, 7), generator=torch.Generator().manual_seed(1))
WORDS = Tokenizer.from_words([f"w{n}" for n in range(10)])
FILES = (
    "config.json", "model.safetensors", "discriminator.safetensors", "tokenizer.json",
    "tokenizer_config.json",
)  # fmt: skip


def network(seed=0, config=CONFIG):
    return randomise(build_model(config), seed).eval()


def save(folder):
    discriminator = randomise(build_discriminator(CONFIG), 7)
    return save_model(folder, network(), CONFIG, WORDS, discriminator, {"from": "a test"})


def rewrite(folder, name, tensors):
    """Replace a tensor file and make config.json agree, as someone else's tool would."""
    path = folder / name
    save_file({k: v.contiguous() for k, v in tensors.items()}, path)
    record = {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
    edit(folder, lambda c: c["files"].update({name: record}))


def edit(folder, change):
    content = json.loads((folder / "config.json").read_text())
    change(content)
    (folder / "config.json").write_text(json.dumps(content))


def error_of(folder, **options):
    with pytest.raises(UserError) as caught:
        load_model(folder, **options)
    message = str(caught.value)
    assert message.isprintable()
    return message


@pytest.fixture
def folder(tmp_path):
    return save(tmp_path / "model")


@torch.no_grad()
def test_round_trip_is_bit_identical(folder):
    loaded = load_model(folder)
    pairs = [
        (loaded.model, network()),
        (loaded.discriminator, randomise(build_discriminator(CONFIG), 7)),
    ]
    for found, expected in pairs:
        assert not found.training
        for key, value in expected.state_dict().items():
            if not key.endswith(("weight_u", "weight_v")):  # drawn at random in each
                assert torch.equal(found.state_dict()[key], value), key
    assert torch.equal(loaded.model(TOKENS), network()(TOKENS))
    assert (loaded.config, loaded.provenance) == (CONFIG, {"from": "a test"})
    assert loaded.tokenizer.hash == WORDS.hash
    loaded.model.train().vocab_embed.embedding.add_(1)  # the mapped file stays as it is
    assert torch.equal(load_model(folder).model(TOKENS), network()(TOKENS))
    assert {p.name for p in folder.iterdir()} == set(FILES)
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) == set(network().state_dict())
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize("kind", ["duo", "ar"])
@torch.no_grad()
def test_other_kinds_round_trip(tmp_path, kind):
    """Given as a state dict, too: then the file is the same."""
    config = ModelConfig(kind=kind, layers=1, hidden=16, heads=2, cond_dim=8, vocab_size=10)
    model = network(3, config)
    save_model(tmp_path / "a", model, config, WORDS if kind == "duo" else None)
    loaded = load_model(tmp_path / "a")
    assert isinstance(loaded.model, ARModel if kind == "ar" else DiT)
    assert torch.equal(loaded.model(TOKENS % 9), model(TOKENS % 9))
    assert loaded.discriminator is None
    save_model(tmp_path / "b", model.state_dict(), config)
    digests = {sha256_file(tmp_path / name / "model.safetensors") for name in "ab"}
    assert len(digests) == 1


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


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_file_read_in_parts_is_the_same_file(folder, monkeypatch, dtype):
    """Read a few numbers at a time or all at once, cast or not, every tensor is itself."""
    opened = []
    monkeypatch.setattr(tensor_files, "NUMBERS_AT_ONCE", 500)
    monkeypatch.setattr(
        tensor_files, "safe_open", lambda *a, **k: opened.append(a) or safe_open(*a, **k)
    )
    path, kept = folder / "model.safetensors", "rotary_emb.inv_freq"
    parts, whole = StoredWeights(path, None).read("cpu", dtype, keep=[kept]), load_file(path)
    assert parts.keys() == whole.keys()
    for name, tensor in whole.items():
        assert torch.equal(parts[name], tensor.to(None if name == kept else dtype)), name
    assert len(opened) > 10


@pytest.mark.parametrize("links", [True, False])
def test_killed_save_leaves_a_whole_model(tmp_path, monkeypatch, links):
    """The old one until config.json is replaced, then the new one; the next save tidies up."""
    outcomes, folder, words = [], tmp_path / "m", Tokenizer.from_words(list("abcdefghij"))

    def prepare():
        shutil.rmtree(folder, ignore_errors=True)
        save(folder)

    def replace():
        save_model(folder, network(5), CONFIG, words, None, {"new": True})

    for _ in kills(monkeypatch, prepare, replace, links):
        for verify in (True, False):
            loaded = load_model(folder, verify=verify)
            new = "new" in loaded.provenance
            assert torch.equal(loaded.model(TOKENS), network(5 if new else 0)(TOKENS))
            assert loaded.tokenizer.hash == (words if new else WORDS).hash
            assert (loaded.discriminator is None) == new
        outcomes.append(new)
        save_model(folder, network(6), CONFIG)
        assert torch.equal(load_model(folder).model(TOKENS), network(6)(TOKENS))
        assert not list(folder.glob(".*"))
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {False, True}
    assert {p.name for p in folder.iterdir()} == set(FILES) - {"discriminator.safetensors"}


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
    assert {p.name for p in folder.iterdir()} == set(FILES)


def test_no_folder_and_no_model(tmp_path, monkeypatch):
    assert error_of(tmp_path / "none") == f"{tmp_path / 'none'}: no such folder."
    killed = tmp_path / "killed"
    killed.mkdir()
    for _ in kills(monkeypatch, lambda: None, lambda: save(killed)):
        if not (killed / "config.json").exists():
            assert "it has no config.json" in error_of(killed)
    assert load_model(killed).tokenizer.hash == WORDS.hash
    assert error_of(tmp_path) == f"{tmp_path} is not a model folder: it has no config.json."
    (tmp_path / "config.json").write_text('{"architectures": ["GPT2"]}')
    assert "was not written by didi" in error_of(tmp_path)
    with pytest.raises(UserError, match="was not written by didi"):
        save_model(tmp_path, network(), CONFIG)


@pytest.fixture(scope="module")
def contents(tmp_path_factory):
    folder = save(tmp_path_factory.mktemp("whole") / "model")
    return {name: (folder / name).read_bytes() for name in FILES}


CHANGES = {
    "truncated": lambda data, at, byte: data[:at],
    "altered": lambda data, at, byte: data[:at] + bytes([data[at] ^ byte]) + data[at + 1 :],
    "longer": lambda data, at, byte: data[:at] + bytes([byte]) + data[at:],
}


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(
    name=st.sampled_from(FILES),
    at=st.floats(0, 1, exclude_max=True) | st.floats(0, 0.05),  # headers come first
    change=st.sampled_from(list(CHANGES)),
    byte=st.integers(1, 255),
    verify=st.booleans(),
)
def test_a_damaged_file_is_refused_in_one_line(contents, name, at, change, byte, verify):
    """Named wherever it is listed; a changed config.json, or a byte nobody verifies, may pass."""
    data = CHANGES[change](contents[name], int(at * len(contents[name])), byte)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for other, content in contents.items():
            (folder / other).write_bytes(data if other == name else content)
        if name == "config.json" or (not verify and change == "altered"):
            with contextlib.suppress(UserError):
                load_model(folder, verify=verify)
        else:
            word = "altered" if change == "longer" else change
            message = error_of(folder, verify=verify)
            assert message.startswith(str(folder / name))
            assert word in message


def test_a_missing_file_and_one_of_no_tensors_are_named(folder):
    path = folder / "model.safetensors"
    path.write_bytes(b"\xff" * path.stat().st_size)
    assert f"{path} is not a readable safetensors file" in error_of(folder, verify=False)
    path.unlink()
    assert f"{path} is missing" in error_of(folder)


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
        "Wanted: `mdlm` with 2 layers, hidden 16, 2 heads, vocab_size 11."
    )
    rewrite(folder, "model.safetensors", network(0, OTHER).state_dict())
    message = error_of(folder)
    assert "10 tensors unexpected (blocks.2." in message
    assert "and 7 more" in message


def test_integers_and_foreign_positions_are_no_weights(folder):
    tensors = load_file(folder / "model.safetensors")
    rewrite(folder, "model.safetensors", {**tensors, "output_layer.linear.bias": torch.arange(11)})
    assert "output_layer.linear.bias holds I64" in error_of(folder)
    tensors["rotary_emb.inv_freq"] = tensors["rotary_emb.inv_freq"] * 3
    rewrite(folder, "model.safetensors", tensors)
    assert "rotary positions with base 10,000" in error_of(folder)


RECORD = {"bytes": 1, "sha256": "0"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(version=2), "has format version 2, but this didi reads up to 1"),
        (lambda c: c.update(version="x"), "has format version 'x'"),
        (lambda c: c.update(storage="int4"), "`storage` is 'int4'"),
        (lambda c: c.update(storage={"bits": 4}), "or upgrade didi if a newer one wrote it."),
        (lambda c: c["model"].update(layer=2), "`model.layer` is not a setting. Did you mean"),
        (lambda c: c["model"].pop("kind"), "`model.kind` is missing"),
        (lambda c: c["model"].update(heads=["\x1b"] * 999), "`model.heads` is ['\\x1b"),
        (lambda c: c["model"].update(hidden=15), "model.hidden is 15 with 2 heads"),
        (lambda c: c["model"].update(length=2**20 + 1), "`model.length` is 1048577"),
        (lambda c: c["discriminator"].update(length=10**12), "`discriminator.length` is 10000"),
        (lambda c: c["model"].update(layers=10**9), "missing (blocks.999999999.norm1.weight)"),
        (lambda c: c["model"].update(heads=4), "rotary_emb.inv_freq (4,) for (2,)"),
        (lambda c: c["files"].pop("model.safetensors"), "does not list model.safetensors"),
        (lambda c: c["files"].update({"../x": RECORD}), "lists '../x'"),
        (lambda c: c.update(files=3), "`files` is 3"),
        (lambda c: c["files"]["tokenizer.json"].pop("bytes"), "tokenizer.json.bytes` is missing"),
        (lambda c: c.update(provenance=[]), "`provenance` is []"),
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
    path = folder / "tokenizer.json"
    record = {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
    edit(folder, lambda c: c["files"].update({"tokenizer.json": record}))
    assert "no room for the mask" in error_of(folder)


def test_wrong_weights_are_not_even_saved(tmp_path):
    with pytest.raises(UserError, match="10 tensors unexpected"):
        save_model(tmp_path / "m", network(0, OTHER), CONFIG)
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
