"""Tiny LLaDA and Dream with random weights, in their own key names, written without their code."""

import json

import torch
from safetensors.torch import save_file

from .masked_folders import write_tokenizer

WORDS = ["<|endoftext|>", "<|start|>", "<|mdm_mask|>", *(f"w{n}" for n in range(9)), "<|eot_id|>"]
LAYERS, HIDDEN, HEADS, KV_HEADS, INNER = 2, 16, 4, 2, 24
SIZE = len(WORDS) + 3  # rows of the embedding, of which the last three are no token's
MASK, LENGTH = WORDS.index("<|mdm_mask|>"), 12
THETA, EPS = 500.0, 1e-3  # with effects that a test sees
KEPT = HEADS // KV_HEADS  # heads of queries for each of keys

LLADA = {
    "architectures": ["LLaDAModelLM"], "model_type": "llada",
    "auto_map": {"AutoModel": "modeling_llada.LLaDAModelLM"},
    "activation_type": "silu", "alibi": False, "attention_dropout": 0.0, "block_group_size": 1,
    "block_type": "llama", "d_model": HIDDEN, "embedding_size": SIZE, "include_bias": False,
    "include_qkv_bias": False, "input_emb_norm": False, "layer_norm_type": "rms",
    "mask_token_id": MASK, "eos_token_id": 0, "pad_token_id": 0, "max_sequence_length": LENGTH,
    "mlp_hidden_size": INNER, "n_heads": HEADS, "n_kv_heads": KV_HEADS, "n_layers": LAYERS,
    "rms_norm_eps": EPS, "rope": True, "rope_theta": THETA, "scale_logits": False,
    "vocab_size": SIZE, "weight_tying": False,
}  # fmt: skip
DREAM = {
    "architectures": ["DreamModel"], "model_type": "Dream",
    "auto_map": {"AutoModel": "modeling_dream.DreamModel"},
    "hidden_act": "silu", "hidden_size": HIDDEN, "intermediate_size": INNER, "mask_token_id": MASK,
    "eos_token_id": 0, "pad_token_id": 0, "bos_token_id": 0, "max_position_embeddings": LENGTH,
    "num_attention_heads": HEADS, "num_hidden_layers": LAYERS, "num_key_value_heads": KV_HEADS,
    "rms_norm_eps": EPS, "rope_scaling": None, "rope_theta": THETA, "sliding_window": None,
    "use_sliding_window": False, "tie_word_embeddings": False, "vocab_size": SIZE,
}  # fmt: skip
_KEYS, _NARROW = HIDDEN // HEADS * KV_HEADS, (HIDDEN,)
_LLADA_BLOCK = {
    "q_proj": (HIDDEN, HIDDEN), "k_proj": (_KEYS, HIDDEN), "v_proj": (_KEYS, HIDDEN),
    "attn_out": (HIDDEN, HIDDEN), "ff_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN),
    "ff_out": (HIDDEN, INNER), "attn_norm": _NARROW, "ff_norm": _NARROW,
}  # fmt: skip
_DREAM_BLOCK = {
    "self_attn.q_proj.weight": (HIDDEN, HIDDEN), "self_attn.q_proj.bias": _NARROW,
    "self_attn.k_proj.weight": (_KEYS, HIDDEN), "self_attn.k_proj.bias": (_KEYS,),
    "self_attn.v_proj.weight": (_KEYS, HIDDEN), "self_attn.v_proj.bias": (_KEYS,),
    "self_attn.o_proj.weight": (HIDDEN, HIDDEN), "mlp.gate_proj.weight": (INNER, HIDDEN),
    "mlp.up_proj.weight": (INNER, HIDDEN), "mlp.down_proj.weight": (HIDDEN, INNER),
    "input_layernorm.weight": _NARROW, "post_attention_layernorm.weight": _NARROW,
}  # fmt: skip


def llada_weights(tied=False):
    """Tensors of LLaDA under its own names."""
    outside = {"wte": (SIZE, HIDDEN), "ln_f": _NARROW}
    outside |= {} if tied else {"ff_out": (SIZE, HIDDEN)}
    shapes = {f"model.transformer.{name}.weight": shape for name, shape in outside.items()}
    for n in range(LAYERS):
        for name, shape in _LLADA_BLOCK.items():
            shapes[f"model.transformer.blocks.{n}.{name}.weight"] = shape
    return _random(shapes)


def dream_weights(tied=False):
    """Tensors of Dream under its own names, which are Qwen2's."""
    shapes = {"model.embed_tokens.weight": (SIZE, HIDDEN), "model.norm.weight": _NARROW}
    shapes |= {} if tied else {"lm_head.weight": (SIZE, HIDDEN)}
    for n in range(LAYERS):
        for name, shape in _DREAM_BLOCK.items():
            shapes[f"model.layers.{n}.{name}"] = shape
    return _random(shapes)


def llada(folder, tied=False, dtype=torch.float32, **changes):
    """Write LLaDA, in one file; returns its tensors."""
    weights = {name: t.to(dtype) for name, t in llada_weights(tied).items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return _settle(folder, LLADA | {"weight_tying": tied} | changes, weights)


def dream(folder, tied=False, dtype=torch.float32, **changes):
    """Write Dream, in two files; returns its tensors."""
    weights = {name: t.to(dtype) for name, t in dream_weights(tied).items()}
    names, index = sorted(weights), {}
    for n in range(2):
        file = f"model-0000{n + 1}-of-00002.safetensors"
        save_file({k: weights[k] for k in names[n::2]}, folder / file, {"format": "pt"})
        index |= dict.fromkeys(names[n::2], file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return _settle(folder, DREAM | {"tie_word_embeddings": tied} | changes, weights)


BIDIRECTIONAL = {"llada": llada, "dream": dream}


def _random(shapes):
    """Weights of a size at which every logit depends visibly on the text; norms around 1."""
    generator = torch.Generator().manual_seed(7)
    weights = {n: torch.randn(shape, generator=generator) * 0.3 for n, shape in shapes.items()}
    return {n: t + 1 if "norm" in n or "ln_f" in n else t for n, t in weights.items()}


def _settle(folder, settings, weights):
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / f"modeling_{settings['model_type'].lower()}.py").write_text("raise SystemExit(9)")
    write_tokenizer(folder, WORDS)
    return weights
