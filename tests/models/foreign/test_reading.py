import argparse
import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from didi_instruct.config.model import ModelConfig
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import UserError
from didi_instruct.models.ar import ARModel
from didi_instruct.models.checkpoint import save_model
from didi_instruct.models.dit import DiT
from didi_instruct.models.foreign.layouts import find_discriminator
from didi_instruct.models.foreign.reading import load_foreign, recognise
from didi_instruct.models.foreign.stores import open_store
from didi_instruct.models.foreign.writing import write_foreign

from .folders import WORDS
from .reference import (
    COND,
    HEADS,
    HIDDEN,
    LAYERS,
    LENGTH,
    VOCAB,
    critic_weights,
    hub_config,
    hub_folder,
    lightning_file,
    logits,
    prefixed,
    scores,
    sdtt_config,
    weights,
)

TOKENS = torch.randint(VOCAB, (3, 9), generator=torch.Generator().manual_seed(1))
SIGMA = torch.tensor([0.02, 0.7, 6.9])
CORE = weights()
OTHER = weights(5)
OURS = ModelConfig(
    layers=LAYERS, hidden=HIDDEN, heads=HEADS, cond_dim=COND, vocab_size=VOCAB, length=LENGTH,
    dropout=0.1,
)  # fmt: skip


def compiled(tensors):
    """Names after `torch.compile` of the whole network and, before that, of one block."""
    return {
        f"backbone._orig_mod.{name}".replace("blocks.1.", "blocks.1._orig_mod."): value
        for name, value in tensors.items()
    }


LAYOUTS = {
    "mdlm-hub": lambda at: hub_folder(at / "m", prefixed("backbone.", CORE), hub_config()),
    "mdlm-hub seeing time": lambda at: hub_folder(
        at / "m", prefixed("backbone.", CORE), hub_config(time_conditioning=True)
    ),
    "mdlm-hub pickled": lambda at: hub_folder(
        at / "m", prefixed("backbone.", CORE), hub_config(), pickled=True
    ),
    "sdtt-hub": lambda at: hub_folder(at / "s", compiled(CORE), sdtt_config()),
    "sdtt-hub twice": lambda at: hub_folder(
        at / "s", prefixed("backbone.backbone.", CORE), sdtt_config(time_conditioning=True)
    ),
    "didi-instruct": lambda at: hub_folder(at / "d", CORE, None, critic_weights()),
    "didi-instruct file": lambda at: lightning_file(
        at / "last.ckpt",
        prefixed("backbone.", OTHER)
        | prefixed("discriminator.", critic_weights())
        | prefixed("student_ema.", CORE)
        | {"reward_baseline": torch.tensor(0.0)},
    ),
    "lightning": lambda at: lightning_file(at / "best.ckpt", prefixed("backbone.", OTHER), CORE),
    "lightning sedd": lambda at: lightning_file(
        at / "sedd.ckpt", prefixed("backbone.", OTHER), CORE
    ),
    "core": lambda at: hub_folder(at / "c", CORE, hub_config(model_type=None)),
}


@torch.no_grad()
@pytest.mark.parametrize("name", LAYOUTS)
def test_logits_are_those_of_the_reference(name, tmp_path):
    path = LAYOUTS[name](tmp_path)
    found = recognise(path)
    loaded = load_foreign(path)
    assert found.layout == name.split()[0]
    assert loaded.config == found.config
    assert loaded.provenance["foreign"]["layout"] == found.layout
    sees_time = name in ("mdlm-hub seeing time", "sdtt-hub twice", "lightning sedd")
    assert loaded.config.time_conditioning == sees_time
    wanted = logits(CORE, TOKENS, SIGMA, sees_time=sees_time)
    torch.testing.assert_close(loaded.model(TOKENS, SIGMA), wanted[..., :-1], rtol=1e-5, atol=1e-5)
    assert found.has_discriminator == name.startswith("didi")
    if found.has_discriminator:
        wanted = scores(critic_weights(), TOKENS, SIGMA)
        torch.testing.assert_close(
            loaded.discriminator(TOKENS, SIGMA), wanted, rtol=1e-5, atol=1e-5
        )
    for key, value in CORE.items():
        assert torch.equal(loaded.model.state_dict()[key], value), key


def test_time_reaches_the_reference():
    """Else parity with and without time conditioning would be one test, not two."""
    seeing = logits(CORE, TOKENS, SIGMA, sees_time=True)
    assert (seeing - logits(CORE, TOKENS)).abs().max() > 0.1


def test_our_parameters_are_in_the_reference_order():
    """EMA weights come as a bare list in this order."""
    assert list(DiT(OURS).state_dict()) == list(CORE)


@torch.no_grad()
def test_raw_weights_of_a_lightning_file(tmp_path):
    path = LAYOUTS["lightning"](tmp_path)
    assert recognise(path).weights == ("ema", "raw")
    raw = load_foreign(path, weights="raw")
    assert torch.equal(raw.model.state_dict()["blocks.1.mlp.0.bias"], OTHER["blocks.1.mlp.0.bias"])
    assert raw.provenance["foreign"]["weights"] == "raw"
    without = lightning_file(tmp_path / "plain.ckpt", prefixed("backbone.", CORE))
    loaded = load_foreign(without)
    assert loaded.provenance["foreign"]["weights"] == "raw"
    assert any("no averaged weights" in note for note in loaded.provenance["foreign"]["notes"])


@torch.no_grad()
def test_duo_never_draws_its_padding(tmp_path):
    """The last id is noise but not text: probability 0 in float64, other logits the reference's."""
    config = hub_config(model_type="DUO", time_conditioning=None, pad_token_id=VOCAB - 1)
    path = hub_folder(tmp_path / "duo", prefixed("backbone.", CORE), config)
    loaded = load_foreign(path)
    assert recognise(path).layout == "duo-hub"
    assert loaded.config == replace(OURS, kind="duo", time_conditioning=True)
    out = loaded.model(TOKENS, SIGMA)
    wanted = logits(CORE, TOKENS, SIGMA, sees_time=True)
    torch.testing.assert_close(out[..., :-1], wanted[..., :-1], rtol=1e-5, atol=1e-5)
    assert (out.double() / 10).softmax(-1)[..., -1].max() == 0
    again = load_foreign(path, dtype=torch.float16).model(TOKENS, SIGMA)
    assert again.double().softmax(-1)[..., -1].max() == 0
    stored = load_file(path / "model.safetensors")["backbone.output_layer.linear.bias"]
    assert torch.equal(stored, CORE["output_layer.linear.bias"])


def test_duo_without_padding_keeps_all_its_ids(tmp_path):
    config = hub_config(model_type="DUO", time_conditioning=None)
    loaded = load_foreign(hub_folder(tmp_path / "x", prefixed("backbone.", CORE), config))
    bias = loaded.model.state_dict()["output_layer.linear.bias"]
    assert torch.equal(bias, CORE["output_layer.linear.bias"])
    WORDS.save(tmp_path / "x")  # one id fewer than the model: the last is padding
    assert load_foreign(tmp_path / "x").provenance["padding"]["id"] == VOCAB - 1


def test_what_nothing_tells_can_be_said(tmp_path):
    path = LAYOUTS["lightning"](tmp_path)
    assert any("uniform-state" in note for note in recognise(path).notes)
    found = recognise(path, family="duo")
    assert (found.config.kind, found.config.time_conditioning) == ("duo", True)
    assert not any("uniform-state" in note for note in found.notes)
    with pytest.raises(UserError, match="not a left-to-right model"):
        recognise(path, family="ar")


@torch.no_grad()
@pytest.mark.parametrize("pickled", [False, True])
def test_ar_starts_with_end_of_text(tmp_path, pickled):
    """Log P(x) of ours is the reference's, given the end-of-text token first."""
    state = weights(3, causal=True)
    words = Tokenizer.from_words([f"w{n}" for n in range(VOCAB - 2)] + ["<|endoftext|>"])
    path = hub_folder(tmp_path / "ar", prefixed("backbone.", state), pickled=pickled)
    words.save(path)
    before = {p.name: p.read_bytes() for p in path.iterdir()}
    loaded = load_foreign(path)
    assert isinstance(loaded.model, ARModel)
    text = TOKENS % (VOCAB - 1)
    given = torch.cat((torch.full_like(text[:, :1], VOCAB - 2), text[:, :-1]), dim=1)
    law = logits(state, given)[..., :-1].log_softmax(-1)
    wanted = law.gather(-1, text[..., None]).sum(dim=(1, 2))
    torch.testing.assert_close(loaded.model.log_prob(text), wanted, rtol=1e-5, atol=1e-5)
    assert {p.name: p.read_bytes() for p in path.iterdir()} == before


def test_ar_with_time_modulation_is_refused(tmp_path):
    path = hub_folder(tmp_path / "m", prefixed("backbone.", CORE), hub_config(causal=True))
    with pytest.raises(UserError, match="causal attention with a time embedding"):
        recognise(path)


def test_heads_come_from_the_frequencies_or_the_settings(tmp_path):
    bare = {k: v for k, v in prefixed("backbone.", CORE).items() if "inv_freq" not in k}
    loaded = load_foreign(hub_folder(tmp_path / "a", bare, hub_config()))
    assert loaded.config == OURS
    torch.testing.assert_close(
        loaded.model.rotary_emb.inv_freq, CORE["rotary_emb.inv_freq"], rtol=1e-6, atol=0
    )
    with pytest.raises(UserError, match="number of heads.*`n_heads`"):
        recognise(hub_folder(tmp_path / "b", bare))
    wide = weights(hidden=128)
    del wide["rotary_emb.inv_freq"]
    found = recognise(hub_folder(tmp_path / "c", wide))
    assert found.config.heads == 2
    assert any("64 wide" in note for note in found.notes)


def test_tokenizer_beside_the_weights(tmp_path):
    path = LAYOUTS["mdlm-hub"](tmp_path)
    assert load_foreign(path).tokenizer is None
    assert any("GPT-2's" in n for n in load_foreign(path).provenance["foreign"]["notes"])
    WORDS.save(path)
    assert load_foreign(path).tokenizer.hash == WORDS.hash
    assert load_foreign(path / "model.safetensors").tokenizer.hash == WORDS.hash
    Tokenizer.from_words([f"w{n}" for n in range(VOCAB)]).save(path)  # no room for the mask
    assert load_foreign(path).tokenizer is None


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtype_casts_weights_and_not_frequencies(tmp_path, dtype):
    for name in ("mdlm-hub", "lightning"):
        model = load_foreign(LAYOUTS[name](tmp_path), dtype=dtype).model
        assert {p.dtype for p in model.parameters()} == {dtype}
        assert model.rotary_emb.inv_freq.dtype == torch.float32


def test_pickled_settings_are_named_and_not_run(tmp_path):
    path = LAYOUTS["lightning"](tmp_path)
    lightning_file(
        path, prefixed("backbone.", CORE), hyper_parameters=argparse.Namespace(config={"a": 1})
    )
    assert "Pickled objects, not run: argparse.Namespace." in recognise(path).notes


def error_of(path, **options):
    with pytest.raises(UserError) as caught:
        load_foreign(path, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_mismatch_says_what_differs(tmp_path):
    wrong = dict(CORE) | {"blocks.0.norm1.weight": torch.ones(3), "blocks.1.extra": torch.ones(1)}
    for n in range(2):
        for part in ("0.weight", "0.bias"):
            del wrong[f"blocks.{n}.mlp.{part}"]
    message = error_of(hub_folder(tmp_path / "m", prefixed("backbone.", wrong), hub_config()))
    assert "4 tensors missing (blocks.0.mlp.0.weight, blocks.0.mlp.0.bias" in message
    assert "and 1 more" in message
    assert "1 tensor unexpected (blocks.1.extra)" in message
    assert f"1 tensor of the wrong shape (blocks.0.norm1.weight (3,) for ({HIDDEN},))" in message
    assert f"(2 × {HIDDEN} × {HEADS}), vocabulary {VOCAB}" in message


def test_small_is_recognised_by_name(tmp_path):
    """Shapes alone: the tensors of a torch file may share one number."""
    with torch.device("meta"):
        shapes = {k: v.shape for k, v in DiT(ModelConfig()).state_dict().items()}
    zeros = torch.zeros(50258 * 768, dtype=torch.bfloat16)
    state = {f"backbone.{k}": zeros[: s.numel()].view(s) for k, s in shapes.items()}
    state["backbone.rotary_emb.inv_freq"] = 10_000 ** -(torch.arange(0, 64, 2) / 64)
    torch.save({"state_dict": state}, tmp_path / "any.ckpt")
    found = recognise(tmp_path / "any.ckpt")
    assert "`small` (12 × 768 × 12), vocabulary 50258" in found.description
    assert found.config == ModelConfig()


def test_settings_that_disagree_with_the_tensors(tmp_path):
    for field, name in (("n_heads", "heads"), ("cond_dim", "cond_dim"), ("n_blocks", "layers")):
        path = hub_folder(tmp_path / field, prefixed("backbone.", CORE), hub_config(**{field: 64}))
        assert f"says 64 for the {name}, but the tensors have" in error_of(path)
    path = hub_folder(tmp_path / "t", prefixed("backbone.", CORE), hub_config(n_heads="4"))
    assert "`n_heads` is '4', not of type int" in error_of(path)
    path = hub_folder(tmp_path / "l", prefixed("backbone.", CORE), hub_config(model_length=1 << 40))
    assert "not sensible" in error_of(path)


def test_averages_that_do_not_fit(tmp_path):
    state = prefixed("backbone.", CORE)
    path = lightning_file(tmp_path / "a.ckpt", state, dict(list(CORE.items())[:-1]))
    assert "`ema.shadow_params` has" in error_of(path)
    swapped = list(CORE.items())
    swapped[0], swapped[1] = swapped[1], swapped[0]
    path = lightning_file(tmp_path / "b.ckpt", state, dict(swapped))
    assert "ema.shadow_params.0 has shape" in error_of(path)
    load_foreign(path, weights="raw")
    path = lightning_file(tmp_path / "c.ckpt", prefixed("student_ema.", CORE))
    assert "holds only averaged weights" in error_of(path, weights="raw")


def test_a_mask_among_the_tokens_is_refused(tmp_path):
    """BERT's vocabulary, with which the one-billion-word models were trained."""
    path = tmp_path / "lm1b.ckpt"
    torch.save({"state_dict": prefixed("backbone.", weights(vocab=30_522))}, path)
    assert "whose mask is id 103" in error_of(path)
    assert recognise(path, family="duo").config.vocab_size == 30_522


@pytest.mark.parametrize("at_once", [1, 500])
def test_opening_a_file_again_changes_nothing(tmp_path, monkeypatch, at_once):
    monkeypatch.setattr("didi_instruct.models.tensor_files.NUMBERS_AT_ONCE", at_once)
    loaded = load_foreign(LAYOUTS["mdlm-hub"](tmp_path))
    for key, value in CORE.items():
        assert torch.equal(loaded.model.state_dict()[key], value), key


def test_other_refusals(tmp_path):
    assert "no such checkpoint" in error_of(tmp_path / "none")
    assert "one other file of weights" in error_of(tmp_path)
    path = tmp_path / "other.safetensors"
    save_file({"esm.embeddings.weight": torch.ones(2)}, path)
    assert "holds no network of the DiT family: it has esm.embeddings.weight." in error_of(path)
    path.write_bytes(b"nonsense")
    assert "not a readable safetensors file" in error_of(path)
    whole = prefixed("backbone.", CORE) | {"backbone.blocks.0.norm1.weight": torch.ones(32).long()}
    assert "not real numbers" in error_of(hub_folder(tmp_path / "i", whole, hub_config()))
    small = {k: v[:5] if k == "vocab_embed.embedding" else v for k, v in critic_weights().items()}
    assert "do not belong together" in error_of(hub_folder(tmp_path / "d", CORE, None, small))
    save_model(tmp_path / "ours", DiT(OURS), OURS)
    assert "was written by didi" in error_of(tmp_path / "ours")
    (tmp_path / "i" / "config.json").write_text("{")
    assert "not valid JSON" in error_of(tmp_path / "i")
    (tmp_path / "i" / "config.json").write_text(json.dumps([1]))
    assert "not a group of settings" in error_of(tmp_path / "i")


def test_of_two_discriminators_one_is_taken(tmp_path):
    """The one without an average's name; the other is left out, and said to be."""
    usual, other = critic_weights(), critic_weights(11)
    state = prefixed("critic_ema.", other) | prefixed("discriminator.", usual)
    path = lightning_file(tmp_path / "x.ckpt", prefixed("student_ema.", CORE) | state)
    loaded = load_foreign(path)
    for key, value in usual.items():
        assert torch.equal(loaded.discriminator.state_dict()[key], value), key
    assert any("Left out: critic_ema." in note for note in recognise(path).notes)
    store = open_store(path)
    assert find_discriminator(store) == {key: f"discriminator.{key}" for key in usual}

    path = hub_folder(tmp_path / "beside", CORE, hub_config(), state)
    assert any("Left out: critic_ema." in note for note in recognise(path).notes)


def test_an_ar_model_has_a_layout_of_its_own(tmp_path):
    path = hub_folder(tmp_path / "ar", prefixed("backbone.", weights(3, causal=True)))
    assert recognise(path).description.startswith("ar-hub: ar (")


@pytest.mark.parametrize("beside", [True, False])
def test_duo_with_a_discriminator_is_not_didi_instruct(tmp_path, beside):
    """A name that `write_foreign` would refuse the model under."""
    config = hub_config(model_type="DUO", time_conditioning=None)
    state, critic = prefixed("backbone.", CORE), critic_weights()
    if beside:
        path = hub_folder(tmp_path / "m", state, config, critic)
    else:
        path = hub_folder(tmp_path / "m", state | prefixed("discriminator.", critic), config)
    found = recognise(path)
    assert (found.layout, found.has_discriminator) == ("duo-hub", True)
    write_foreign(load_foreign(path), tmp_path / "out", found.layout, discriminator=False)
    nested = hub_folder(tmp_path / "n", state, sdtt_config(algo={"name": "duo"}))
    assert recognise(nested).layout == "duo-hub"
