"""Any SOURCE becomes a model: folders of ours, public checkpoints, names on the hub."""

import json

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants
from tests.models import masked_folders
from tests.models.foreign.folders import CORE, WORDS
from tests.models.foreign.reference import (
    VOCAB,
    critic_weights,
    hub_config,
    hub_folder,
    lightning_file,
    logits,
    prefixed,
    scores,
    weights,
)

import didi_instruct as didi
from didi_instruct.data.files import sha256_file
from didi_instruct.errors import UserError
from didi_instruct.hub.info import describe_source
from didi_instruct.hub.sources import DidiFolder, find_source
from didi_instruct.models.checkpoint import load_model
from didi_instruct.models.foreign import hub

TOKENS = torch.randint(VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))
REVISION = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def released(tmp_path):
    """A release with a discriminator and a tokenizer, as a folder."""
    folder = hub_folder(tmp_path / "released", CORE, hub_config(), critic_weights())
    WORDS.save(folder)
    return folder


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A hub cache; anything that would use the network fails."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)

    def offline():
        raise ConnectionError("no network: its name cannot be looked up")

    monkeypatch.setattr(hub, "require_network", offline)
    home = tmp_path / "cache" / "models--someone--mdlm"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text(REVISION)
    folder = home / "snapshots" / REVISION
    hub_folder(folder, prefixed("backbone.", CORE), hub_config())
    WORDS.save(folder)
    return folder


def same_logits(model, tensors, sigma=None, **options):
    expected = logits(tensors, TOKENS, sigma, **options)[..., : VOCAB - 1]
    torch.testing.assert_close(model.denoiser(TOKENS, 0.4), expected, rtol=1e-4, atol=1e-4)


def test_a_foreign_folder_is_a_model_that_writes_and_is_measured(released):
    model = didi.load(released, device="cpu")
    same_logits(model, CORE)
    assert model.mask_id == VOCAB - 1
    assert model.discriminator is not None
    assert len(model.generate(num=2, steps=4, seed=0)) == 2
    assert model.sample(num=3, steps=4, seed=1, sampler="rgas").shape == (3, 16)
    assert 1 < float(model.nelbo(TOKENS % (VOCAB - 1))) < 30
    assert model.provenance["foreign"]["layout"] == "didi-instruct"
    assert model.provenance["foreign"]["source"] == str(released)


def test_the_weights_of_a_training_run_can_be_chosen(tmp_path):
    raw = weights(5)
    path = lightning_file(tmp_path / "last.ckpt", prefixed("backbone.", raw), CORE)
    same_logits(didi.load(path, device="cpu"), CORE)
    same_logits(didi.load(str(path), device="cpu", weights="raw"), raw)
    assert didi.load(path, family="duo").config.kind == "duo"


def test_the_time_reaches_the_discriminator_too(released):
    """σ = -log(1 - (1 - ε) t), written here from the schedule's definition."""
    model = didi.load(released, device="cpu", time_conditioning=True)
    sigma = -torch.log1p(-torch.full((2,), 0.4) * (1 - 1e-3))
    same_logits(model, CORE, sigma, sees_time=True)
    expected = scores(critic_weights(), TOKENS, sigma, sees_time=True)
    with torch.no_grad():
        found = model.discriminator.eval()(TOKENS, sigma)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    blind = scores(critic_weights(), TOKENS)
    assert not torch.allclose(found, blind, atol=1e-3)


def test_a_type_is_cast_on_loading(released):
    model = didi.load(released, device="cpu", dtype=torch.bfloat16)
    assert {p.dtype for p in model.network.parameters()} == {torch.bfloat16}
    assert model.network.rotary_emb.inv_freq.dtype == torch.float32


def test_a_name_on_the_hub_with_and_without_a_revision(cache):
    for source in ("someone/mdlm", f"someone/mdlm@{REVISION}"):
        model = didi.load(source, device="cpu")
        same_logits(model, CORE)
        told = model.provenance["foreign"]
        assert (told["source"], told["hub"]) == (source, "someone/mdlm")


def test_a_model_of_ours_comes_back_from_the_hub(cache, released):
    model = didi.load(released, device="cpu")
    for path in cache.iterdir():
        path.unlink()
    model.save(cache)
    again = didi.load("someone/mdlm", device="cpu")
    ours, theirs = model.network.state_dict(), again.network.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours | theirs)
    assert again.provenance == model.provenance


def test_weights_under_their_usual_name_are_their_folders(released, tmp_path):
    didi.load(released, device="cpu").save(tmp_path / "ours")
    origin = find_source(tmp_path / "ours" / "model.safetensors")
    assert origin == DidiFolder(str(tmp_path / "ours" / "model.safetensors"), tmp_path / "ours")
    assert didi.load(tmp_path / "ours" / "model.safetensors").tokenizer.hash == WORDS.hash


def test_fingerprints_tell_weights_and_settings_apart(released, tmp_path):
    didi.load(released, device="cpu").save(tmp_path / "ours")
    ours = tmp_path / "ours"
    assert find_source(ours).fingerprint() == sha256_file(ours / "model.safetensors")
    assert find_source(ours).digests().keys() == {p.name for p in ours.iterdir()} - {
        "config.json",
        "README.md",
    }
    first = find_source(released).fingerprint()
    assert first == find_source(str(released)).fingerprint()
    assert find_source(released).digests()["model.safetensors"] == sha256_file(
        released / "model.safetensors"
    )
    hub_folder(released, CORE, hub_config(time_conditioning=True), critic_weights())
    second = find_source(released).fingerprint()
    hub_folder(released, weights(3), hub_config(time_conditioning=True), critic_weights())
    assert len({first, second, find_source(released).fingerprint()}) == 3


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere", "`nowhere` is no file or folder here.*ships with didi.*owner/name.*the path"),
        ("./nowhere", "^./nowhere: no such file or folder"),
        ("runs/last.ckpt", "^runs/last.ckpt: no such file or folder"),
        ("a/b/c", "`a/b/c` is no file or folder here"),
        ("runs/mine", "runs/mine is no file or folder here. As a Hugging Face id: .*no network"),
    ],
)
def test_what_is_nowhere_says_where_it_was_sought(cache, source, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message) as caught:
        didi.load(source)
    assert "\n" not in str(caught.value)


def test_a_name_that_the_hub_does_not_know(cache, monkeypatch):
    monkeypatch.setattr(hub, "require_network", lambda: None)

    def unknown(*_, **__):
        response = type("Response", (), {"headers": {}, "request": None})()
        raise huggingface_hub.errors.RepositoryNotFoundError("404", response=response)

    monkeypatch.setattr(huggingface_hub, "list_repo_files", unknown)
    with pytest.raises(UserError, match="runs/mien is no file or folder here.*not on Hugging Face"):
        didi.load("runs/mien")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "averaged"}, "use `ema`"),
        ({"family": "mdlmm"}, "Did you mean `mdlm`"),
        ({"family": "ar"}, "not a left-to-right model"),
    ],
)
def test_choices_that_do_not_exist(released, options, message):
    with pytest.raises(UserError, match=message):
        didi.load(released, **options)


def test_a_folder_of_ours_leaves_no_choice(released, tmp_path):
    didi.load(released).save(tmp_path / "ours")
    with pytest.raises(UserError, match="one set of weights"):
        didi.load(tmp_path / "ours", weights="raw")
    with pytest.raises(UserError, match="leave out `family`"):
        didi.load(tmp_path / "ours", family="duo")


def test_an_ar_model_has_no_time_to_be_told(tmp_path):
    path = hub_folder(tmp_path / "ar", prefixed("backbone.", weights(causal=True)), None)
    with pytest.raises(UserError, match="no time embedding"):
        didi.load(path, time_conditioning=True)


def test_a_tokenizer_for_a_checkpoint_that_brings_none(tmp_path):
    there = hub_folder(tmp_path / "hub", prefixed("backbone.", CORE), hub_config())
    with pytest.raises(UserError, match="no tokenizer"):
        didi.load(there).generate(num=1, steps=2)
    WORDS.save(tmp_path / "words")
    model = didi.load(there, tokenizer=tmp_path / "words")
    assert len(model.generate(num=1, steps=2)[0].split()) == 16
    told = model.provenance["foreign"]
    assert told["tokenizer"] == str(tmp_path / "words")
    assert not any("tokenizer" in note for note in told["notes"])
    with pytest.raises(UserError, match="has 18 tokens, and the tokenizer `bytes` 257"):
        didi.load(there, tokenizer="bytes")
    model.save(tmp_path / "ours")
    with pytest.raises(UserError, match="has its own tokenizer"):
        didi.load(tmp_path / "ours", tokenizer=tmp_path / "words")


def test_folders_without_a_model(tmp_path):
    with pytest.raises(UserError, match="holds no model"):
        didi.load(tmp_path)
    (tmp_path / "checkpoints" / "step-00000010").mkdir(parents=True)
    with pytest.raises(UserError, match="has not finished; its latest checkpoint is .*step-0000"):
        didi.load(tmp_path)


def test_a_masked_lm_is_a_source_like_any_other(tmp_path):
    folder = tmp_path / "esm"
    masked_folders.esm(folder)
    model = didi.load(folder, device="cpu")
    assert set(model.generate(num=1, steps=4, seed=0)[0]) <= set("ACDEFGHIKLMNPQRSTVWYOU")
    assert float(model.nelbo(model.sample(num=2, steps=4, seed=0))) > 0
    assert model.provenance["foreign"]["layout"] == "esm"
    assert find_source(folder / "model.safetensors").path == folder
    assert {"model.safetensors", "config.json", "vocab.txt"} <= find_source(folder).digests().keys()
    with pytest.raises(UserError, match="no time embedding"):
        didi.load(folder, time_conditioning=True)
    model.save(tmp_path / "ours")
    again = didi.load(tmp_path / "ours", device="cpu")
    assert torch.equal(again.sample(num=3, steps=4), model.sample(num=3, steps=4))


def test_a_masked_lm_whose_settings_speak_of_another_is_no_source(tmp_path):
    """Everything that opens a model asks here: settings decide about memory only where they fit."""
    masked_folders.bert(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"vocab_size": 2 * 10**9}))
    for ask in (find_source, describe_source):
        with pytest.raises(UserError, match=r"are \(2000000000, 16, 2\), and the weights have"):
            ask(str(tmp_path))


def test_code_on_the_hub_is_not_run(cache):
    settings = {
        "model_type": "sdar", "architectures": ["SDARForCausalLM"], "vocab_size": 7,
        "hidden_size": 4, "auto_map": {"AutoModel": "code.SDARModel"},
    }  # fmt: skip
    (cache / "config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match="code of its own, which is never run"):
        didi.load("someone/mdlm")


def test_closed_padding_survives_our_folder(tmp_path):
    """DUO's last id is noise and never text: also after saving and loading as ours."""
    config = hub_config(model_type="DUO", time_conditioning=None, pad_token_id=VOCAB - 1)
    there = hub_folder(tmp_path / "duo", prefixed("backbone.", CORE), config)
    model = didi.load(there, device="cpu")
    model.save(tmp_path / "ours")
    for one in (model, didi.load(tmp_path / "ours", device="cpu")):
        assert int(one.sample(num=64, steps=4, seed=0).max()) < VOCAB - 1
    assert load_model(tmp_path / "ours").config == model.config
