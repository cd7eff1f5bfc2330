"""Causal LMs made bidirectional: what they compute, what they learn, and what is refused."""

import pytest
import torch

import didi_instruct as didi
from didi_instruct.errors import UserError
from didi_instruct.hub.info import describe_source
from didi_instruct.hub.sources import peek_models
from didi_instruct.models.bidirectional import load_bidirectional

from . import causal_folders
from .causal_folders import LENGTH, SIZE, WORDS
from .plain_causal import dream_logits

CAUSAL = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "auto_map": None}
SHAPE = {
    "layers": causal_folders.LAYERS, "heads": causal_folders.HEADS,
    "kv_heads": causal_folders.KV_HEADS, "theta": causal_folders.THETA, "eps": causal_folders.EPS,
}  # fmt: skip


def qwen2(folder, tied=False, **changes):
    """A causal LM, whose tensors have Dream's names; it knows no mask."""
    return causal_folders.dream(folder, tied, **(CAUSAL | {"mask_token_id": None} | changes))


@pytest.mark.parametrize("tied", [False, True])
@torch.no_grad()
def test_it_is_the_plain_forward_pass_with_attention_both_ways(tmp_path, tied):
    """Logits for a position come from the one before; a mask is embedded as the mean of all ids."""
    weights = qwen2(tmp_path, tied)
    loaded = load_bidirectional(tmp_path)
    network, mask = loaded.model, SIZE
    assert (network.config.mask_id, network.config.length) == (SIZE + 1, LENGTH)
    assert mask in network.ids.banned
    words = weights["model.embed_tokens.weight"]
    weights["model.embed_tokens.weight"] = torch.cat([words, words.mean(0, keepdim=True)])
    text = torch.tensor([[3, 4, SIZE + 1, 0, SIZE + 1, 12]])
    expected = dream_logits(weights, text[0].clamp(max=mask), **SHAPE).float()
    written = sorted(set(range(SIZE)) - set(network.ids.banned))
    assert len(written) == len(WORDS) - 2  # no start, no mask of the tokenizer
    torch.testing.assert_close(
        network(text)[0, :, written], expected[:, written], atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("rows", ["stream", "document"])
def test_fine_tuning_makes_a_denoiser_of_it(tmp_path, rows):
    """It learns a text that has one continuation, from both sides; its folder is like any other."""
    (tmp_path / "causal").mkdir()
    qwen2(tmp_path / "causal", tied=rows == "stream")
    (tmp_path / "text.txt").write_text("w1 w2 w3 w4 w5\n" * 60)
    settings = {
        "task": "text", "bidirectional": True,
        "data": {"source": str(tmp_path / "text.txt"), "documents": "line", "rows": rows,
                 "length": 6, "valid": 4},
        "optim": {"lr": 1e-2, "warmup": 0},
        "train": {"steps": 80, "batch_size": 16, "eval_every": 0, "log_every": 40,
                  "save_every": 80, "ema": 0.0},
    }  # fmt: skip
    how = {"model": tmp_path / "causal", "device": "cpu"}
    result = didi.finetune(settings, out=tmp_path / "run", **how)
    before, after = (result.held_out[when]["valid_nats_per_token"] for when in ("before", "after"))
    assert after < before / 3
    tuned = didi.load(tmp_path / "run", device="cpu")
    assert tuned.config.length == 6
    known, end = tuned.tokenizer.encode(["w1", "w5"])
    text = torch.full((1, 5), tuned.mask_id)
    text[0, 0], text[0, 4] = known[0], end[0]
    guess = tuned.denoiser(text, 0.5)[0].argmax(-1)
    assert tuned.tokenizer.decode(guess[1:4]) == "w2 w3 w4"
    with pytest.raises(UserError, match="is for causal LMs of transformers"):
        didi.finetune(settings, out=tmp_path / "more", model=tmp_path / "run", device="cpu")


@pytest.mark.parametrize(
    ("changes", "length", "words"),
    [
        ({"model_type": "gpt2"}, None, "`model_type` llama or qwen2, and it has 'gpt2'"),
        ({"model_type": "Dream"}, None, "is bidirectional already: leave out `bidirectional`"),
        ({"auto_map": {"AutoModel": "code.A"}}, None, "code of its own, which is never run"),
        ({"use_sliding_window": True}, None, "`use_sliding_window` asks for a sliding window"),
        ({}, 99, "positions for 12 tokens: a length of 99 is too long"),
        ({"vocab_size": 2 * 10**9}, None, "and the weights have (16, 16, 2)"),
    ],
)
def test_what_cannot_be_made_bidirectional_is_refused(tmp_path, changes, length, words):
    qwen2(tmp_path, **changes)
    with pytest.raises(UserError) as caught:
        load_bidirectional(tmp_path, length=length)
    assert words in str(caught.value)


def test_a_causal_lm_is_no_denoiser_by_itself(tmp_path):
    """Nothing turns its attention around unasked; what can be done with it is said."""
    qwen2(tmp_path)
    for ask in (lambda: didi.load(tmp_path, device="cpu"), lambda: peek_models([str(tmp_path)])):
        with pytest.raises(UserError, match="is a causal LM.*--set bidirectional=true"):
            ask()
    facts = describe_source(str(tmp_path))
    assert facts["architecture"] == "Qwen2ForCausalLM"
    assert "bidirectional=true makes a denoiser" in facts["notes"][1]
