"""LLaDA and Dream from folders in their own key names, against a plain forward pass."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from didi_instruct.errors import UserError
from didi_instruct.model import Model
from didi_instruct.models.checkpoint import load_model, save_model
from didi_instruct.models.discriminator import Discriminator
from didi_instruct.models.masked_lm import load_masked_lm
from didi_instruct.models.native import WeightFiles, load_transformers

from . import causal_folders
from .causal_folders import BIDIRECTIONAL, LENGTH, MASK, SIZE, WORDS, dream, llada
from .plain_causal import PLAIN

SHAPE = {
    "layers": causal_folders.LAYERS, "heads": causal_folders.HEADS,
    "kv_heads": causal_folders.KV_HEADS, "theta": causal_folders.THETA, "eps": causal_folders.EPS,
}  # fmt: skip
WRITTEN = [WORDS.index(word) for word in WORDS if word not in ("<|start|>", "<|mdm_mask|>")]


def some_text(rows, length, seed=1):
    """Words that may be written, and our masks, which are id SIZE."""
    known = torch.tensor([*WRITTEN, SIZE, SIZE])
    generator = torch.Generator().manual_seed(seed)
    return known[torch.randint(len(known), (rows, length), generator=generator)]


def plain(family, weights, row):
    """Logits (L, V) of one text by the plain forward pass, with its own mask for ours."""
    return PLAIN[family](weights, row.masked_fill(row == SIZE, MASK), **SHAPE).float()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", BIDIRECTIONAL)
@torch.no_grad()
def test_logits_are_those_of_the_plain_forward_pass(tmp_path, family, tied):
    """Within 1e-5, each text alone and in a batch with a longer one."""
    weights = BIDIRECTIONAL[family](tmp_path, tied)
    network = load_masked_lm(tmp_path).model
    text, lengths = some_text(3, LENGTH), [LENGTH, 5, 1]
    attended = torch.arange(LENGTH) < torch.tensor(lengths)[:, None]
    whole, padded = network(text), network(text, None, attended)
    assert whole.shape == (3, LENGTH, SIZE)
    for n, length in enumerate(lengths):
        expected = plain(family, weights, text[n])
        assert expected.std() > 0.1
        torch.testing.assert_close(whole[n][:, WRITTEN], expected[:, WRITTEN], atol=1e-5, rtol=1e-5)
        alone = plain(family, weights, text[n, :length])
        torch.testing.assert_close(
            padded[n, :length][:, WRITTEN], alone[:, WRITTEN], atol=1e-5, rtol=1e-5
        )


@pytest.mark.parametrize("attention", ["eager", "sdpa", "flex_attention"])
@pytest.mark.parametrize("family", BIDIRECTIONAL)
@torch.no_grad()
def test_every_position_sees_later_ones(tmp_path, family, attention):
    """With each attention of transformers; a causal one would leave the first logits alone."""
    BIDIRECTIONAL[family](tmp_path)
    network = load_masked_lm(tmp_path).model
    before = network(some_text(1, 6))
    network.network.config._attn_implementation = attention
    text = some_text(1, 6)
    other = text.clone()
    other[0, -1] = WRITTEN[1] if text[0, -1] != WRITTEN[1] else WRITTEN[2]
    seen = torch.ones(1, 6, dtype=torch.bool)
    torch.testing.assert_close(network(text), before, atol=1e-5, rtol=1e-5)
    for attended in (None, seen, seen & (torch.arange(6) != 3)):
        change = network(text, None, attended) - network(other, None, attended)
        assert (change[0, :, WRITTEN].abs().amax(-1)[:3] > 1e-3).all()


@pytest.mark.parametrize("family", BIDIRECTIONAL)
def test_ends_of_texts_are_written_and_other_special_tokens_never(tmp_path, family):
    BIDIRECTIONAL[family](tmp_path)
    loaded = load_masked_lm(tmp_path)
    assert set(range(SIZE)) - set(loaded.model.ids.banned) == set(WRITTEN)
    assert loaded.tokenizer.eot == "<|endoftext|>"
    assert (loaded.config.mask_id, loaded.config.length) == (SIZE, LENGTH)
    samples = Model(loaded.model, loaded.config, loaded.tokenizer).sample(num=64, steps=3, seed=0)
    assert set(samples.unique().tolist()) <= set(WRITTEN)


@pytest.mark.parametrize("family", BIDIRECTIONAL)
@torch.no_grad()
def test_bfloat16_is_kept_and_nothing_is_copied(tmp_path, family):
    BIDIRECTIONAL[family](tmp_path, dtype=torch.bfloat16)
    network = load_masked_lm(tmp_path).model
    assert {p.dtype for p in network.parameters()} == {torch.bfloat16}
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("this system does not list what is mapped")
    lines = [line for line in maps.read_text().splitlines() if str(tmp_path) in line]
    spans = [tuple(int(n, 16) for n in line.split()[0].split("-")) for line in lines]
    for parameter in network.parameters():
        assert any(start <= parameter.data_ptr() < stop for start, stop in spans)
    wide = load_masked_lm(tmp_path, dtype=torch.float32).model
    text = some_text(2, 6)
    torch.testing.assert_close(network(text).float(), wide(text), atol=0.15, rtol=0.1)


@pytest.mark.parametrize("masks", [1, 3])
@pytest.mark.parametrize("family", BIDIRECTIONAL)
@torch.no_grad()
def test_our_folder_holds_the_same_network(tmp_path, family, masks):
    """Bidirectional, shifted where it was, with the end of a text."""
    (tmp_path / "theirs").mkdir()
    BIDIRECTIONAL[family](tmp_path / "theirs")
    loaded = load_masked_lm(tmp_path / "theirs")
    network = loaded.model
    if masks > 1:
        network = network.with_masks(torch.randn(masks - 1, network.config.hidden))
    save_model(tmp_path / "ours", network, network.config, loaded.tokenizer)
    again = load_model(tmp_path / "ours")
    text, attended = some_text(3, 6), torch.arange(6) < torch.tensor([[6], [2], [4]])
    for seen in (None, attended):
        assert torch.equal(again.model(text, None, seen), network(text, None, seen))
    assert again.tokenizer.eot == loaded.tokenizer.eot
    assert again.config == network.config


def test_a_tokenizer_in_two_files_is_read_as_qwen_s(tmp_path):
    """Dream brings vocab.json and merges.txt; digits are split one by one, unlike GPT-2's."""
    dream(tmp_path, mask_token_id=8, eos_token_id=6)
    (tmp_path / "tokenizer.json").unlink()
    letters = ["1", "2", "12", "a", "Ġ", "Ġa"]
    vocabulary = {letter: n for n, letter in enumerate(letters)}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n1 2\nĠ a\n")
    added = {"6": "<|endoftext|>", "7": "<|start|>", "8": "<|mask|>"}
    settings = {
        "tokenizer_class": "DreamTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]},
        "added_tokens_decoder": {n: {"content": w, "special": True} for n, w in added.items()},
        "mask_token": "<|mask|>", "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>",
        "unk_token": None,
    }  # fmt: skip
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "tokenization_dream.py").write_text("raise SystemExit(9)")
    loaded = load_masked_lm(tmp_path)
    assert loaded.tokenizer.encode(["12 a", "a<|mask|>"]) == [[0, 1, 5], [3, 8]]
    assert loaded.tokenizer.eot_id == 6
    assert loaded.model.ids.banned == (7, *range(8, SIZE))


def test_the_mask_is_found_by_setting_name_or_family(tmp_path):
    for change in ({}, {"mask_token_id": None}):
        llada(tmp_path, **change)
        assert load_masked_lm(tmp_path).model.ids.mask == MASK
    plain_words = [word if "mask" not in word else "w9" for word in WORDS]
    causal_folders.write_tokenizer(tmp_path, plain_words)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(UserError, match="`mask_token_id` is None, and its mask has to be one of"):
        load_masked_lm(tmp_path)
    llada(tmp_path, mask_token_id=SIZE)
    with pytest.raises(UserError, match=f"`mask_token_id` is {SIZE}, and"):
        load_masked_lm(tmp_path)


HUGE = 2 * 10**9


@pytest.mark.parametrize(
    ("family", "settings", "words"),
    [
        ("llada", {"embedding_size": HUGE}, f"({HUGE}, 16, 2), and the weights have (16, 16, 2)"),
        ("llada", {"n_layers": 10**5}, "100000), and the weights have"),
        ("llada", {"mlp_hidden_size": 10**9}, "gate_proj.weight (24, 16) for (1000000000, 16)"),
        ("llada", {"n_kv_heads": 4}, "k_proj.weight (8, 16) for (16, 16)"),
        ("llada", {"rope_theta": None}, "`rope_theta` is None, and has to be a number above 0"),
        ("llada", {"rms_norm_eps": "x"}, "`rms_norm_eps` is 'x'"),
        ("llada", {"d_model": True}, "`d_model` is True, and has to be a whole number"),
        ("llada", {"block_type": "sequential"}, "only LLaDA with `block_type` 'llama' is"),
        ("llada", {"rope": False}, "`rope` is False"),
        ("llada", {"alibi": True}, "`alibi` is True"),
        ("llada", {"include_qkv_bias": True}, "`include_qkv_bias` is True"),
        ("llada", {"num_experts": 64}, "a mixture of experts (LLaDA-MoE), which is not supported"),
        ("llada", {"max_sequence_length": 0}, "`max_sequence_length` is 0"),
        ("dream", {"vocab_size": HUGE}, f"({HUGE}, 16, 2), and the weights have (16, 16, 2)"),
        ("dream", {"intermediate_size": 10**9}, "(24, 16) for (1000000000, 16)"),
        ("dream", {"rope_theta": 0}, "`rope_theta` is 0"),
        ("dream", {"use_sliding_window": True}, "`use_sliding_window` is True"),
        ("dream", {"num_key_value_heads": None}, "`num_key_value_heads` is None"),
        ("dream", {"num_attention_heads": 3}, "16 with 3 heads"),
        ("dream", {"rope_scaling": {"rope_type": "nope"}}, "cannot build the network"),
        ("dream", {"model_type": "sdar"}, "code of its own, which is never run, and its family"),
    ],
)
def test_settings_that_do_not_fit_are_refused_before_a_number_is_read(
    tmp_path, monkeypatch, family, settings, words
):
    BIDIRECTIONAL[family](tmp_path, **settings)
    monkeypatch.setattr(WeightFiles, "read", pytest.fail)
    with pytest.raises(UserError) as caught:
        load_masked_lm(tmp_path)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("family", "name", "becomes", "words"),
    [
        ("llada", "model.transformer.ff_out.weight", None, "lacks tensors of LlamaForCausalLM (lm"),
        ("llada", "model.transformer.blocks.1.up_proj.weight", None, "layers.1.mlp.up_proj.weight"),
        ("llada", "model.transformer.ln_f.weight", "model.transformer.ln_f.bias", "lacks tensors"),
        ("llada", None, "model.transformer.blocks.0.q_norm.weight", "that LlamaForCausalLM does"),
        ("llada", None, "model.transformer.emb_norm.weight", "(model.transformer.emb_norm.weight)"),
        (
            "dream",
            "model.layers.0.self_attn.q_proj.bias",
            None,
            "lacks tensors of Qwen2ForCausalLM",
        ),
    ],
)
def test_missing_and_unknown_tensors_are_refused_before_a_number_is_read(
    tmp_path, monkeypatch, family, name, becomes, words
):
    weights = BIDIRECTIONAL[family](tmp_path)
    for path in tmp_path.glob("model*"):
        path.unlink()
    tensor = weights.pop(name) if name else torch.zeros(causal_folders.HIDDEN)
    if becomes:
        weights[becomes] = tensor
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    monkeypatch.setattr(WeightFiles, "read", pytest.fail)
    with pytest.raises(UserError) as caught:
        load_masked_lm(tmp_path)
    assert words in str(caught.value)


def test_a_file_that_the_index_names_may_not_be_missing(tmp_path):
    dream(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(UserError, match="model-00002-of-00002.safetensors: no such file"):
        load_masked_lm(tmp_path)


def test_quantised_weights_are_refused(tmp_path):
    llada(tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    name = "model.transformer.blocks.0.q_proj.weight"
    weights[name] = weights[name].to(torch.int8)
    save_file(weights, path, {"format": "pt"})
    with pytest.raises(UserError, match="not real numbers of 16 bits or more"):
        load_masked_lm(tmp_path)


def test_a_folder_without_a_tokenizer_says_what_to_put_there(tmp_path):
    llada(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="has no tokenizer: put the model's tokenizer.json there"):
        load_masked_lm(tmp_path)


def test_a_library_that_would_stay_causal_is_refused(tmp_path, monkeypatch):
    """Versions 5.0 and 5.1 pass over `is_causal=False` without a word."""
    (tmp_path / "theirs").mkdir()
    llada(tmp_path / "theirs")
    loaded = load_masked_lm(tmp_path / "theirs")
    save_model(tmp_path / "ours", loaded.model, loaded.config, loaded.tokenizer)
    monkeypatch.setattr(load_transformers(), "__version__", "5.1.0")
    for ask in (lambda: load_masked_lm(tmp_path / "theirs"), lambda: load_model(tmp_path / "ours")):
        with pytest.raises(UserError, match=r"5.1.0 cannot .* pip install .transformers>=5.2"):
            ask()


@pytest.mark.parametrize("family", BIDIRECTIONAL)
@torch.no_grad()
def test_a_text_without_tokens_harms_no_other(tmp_path, family):
    BIDIRECTIONAL[family](tmp_path)
    network, text = load_masked_lm(tmp_path).model, some_text(2, 5)
    logits = network(text, None, torch.arange(5) < torch.tensor([[5], [0]]))
    torch.testing.assert_close(logits[0], network(text[:1])[0])
    assert logits.isfinite().all()


def test_a_record_cannot_ask_for_causal_attention(tmp_path):
    """Its settings say how the network is shaped, not which way it looks."""
    (tmp_path / "theirs").mkdir()
    llada(tmp_path / "theirs")
    loaded = load_masked_lm(tmp_path / "theirs")
    save_model(tmp_path / "ours", loaded.model, loaded.config, loaded.tokenizer)
    path, text = tmp_path / "ours" / "config.json", some_text(1, 6)
    content = json.loads(path.read_text())
    assert content["network"]["settings"]["is_causal"] is False
    del content["network"]["settings"]["is_causal"]
    path.write_text(json.dumps(content))
    with torch.no_grad():
        assert torch.equal(load_model(tmp_path / "ours").model(text), loaded.model(text))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", BIDIRECTIONAL)
@torch.no_grad()
def test_a_discriminator_on_its_trunk_is_saved_and_read(tmp_path, family, tied):
    """Shifted where the trunk is, and with its embeddings, though an output layer had them too."""
    (tmp_path / "theirs").mkdir()
    BIDIRECTIONAL[family](tmp_path / "theirs", tied)
    loaded = load_masked_lm(tmp_path / "theirs")
    critic = Discriminator.from_network(loaded.model).eval()
    save_model(tmp_path / "ours", loaded.model, loaded.config, loaded.tokenizer, critic)
    again, text = load_model(tmp_path / "ours").discriminator, some_text(2, 6)
    assert torch.equal(again(text), critic(text))
