"""LLaDA and Dream as plain functions of their tensors, one text at a time, without transformers.

The descriptions are those of the papers and of the models' public code: RMSNorm before each part,
rotary positions on halves of a head, fewer heads of keys than of queries, SwiGLU, and attention of
every position to all others. Dream's queries, keys and values have biases, and its logits for a
position come from the one before; the first keeps its own.
"""

import math

import torch


def rms_norm(x, weight, eps):
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotated(x, theta):
    """Rotate one head (L, D): pairs (i, i + D/2) by position · theta^(-2i/D)."""
    length, width = x.shape
    out, half = x.clone(), width // 2
    for position in range(length):
        for i in range(half):
            angle = position * theta ** (-2 * i / width)
            a, b = x[position, i], x[position, i + half]
            out[position, i] = a * math.cos(angle) - b * math.sin(angle)
            out[position, i + half] = b * math.cos(angle) + a * math.sin(angle)
    return out


def attention(q, k, v, heads, kv_heads, theta):
    """Attention of all positions to all: q (L, d), k and v (L, kv_heads · D) -> (L, d)."""
    width, outputs = q.shape[1] // heads, []
    for head in range(heads):
        own = slice(head * width, (head + 1) * width)
        shared = head // (heads // kv_heads)
        keys = slice(shared * width, (shared + 1) * width)
        scores = rotated(q[:, own], theta) @ rotated(k[:, keys], theta).T / math.sqrt(width)
        outputs.append(scores.softmax(-1) @ v[:, keys])
    return torch.cat(outputs, 1)


def swiglu(x, gate, up, down):
    inner = x @ gate.T
    return (inner * torch.sigmoid(inner) * (x @ up.T)) @ down.T


def llada_logits(weights, ids, *, layers, heads, kv_heads, theta, eps):
    """Logits (L, V) of ids (L,), in float64."""
    w = {name.removeprefix("model.transformer."): t.double() for name, t in weights.items()}
    x = w["wte.weight"][ids]
    for n in range(layers):
        part = {k.split(".")[2]: t for k, t in w.items() if k.startswith(f"blocks.{n}.")}
        h = rms_norm(x, part["attn_norm"], eps)
        q, k, v = (h @ part[f"{name}_proj"].T for name in "qkv")
        x = x + attention(q, k, v, heads, kv_heads, theta) @ part["attn_out"].T
        h = rms_norm(x, part["ff_norm"], eps)
        x = x + swiglu(h, part["ff_proj"], part["up_proj"], part["ff_out"])
    head = w.get("ff_out.weight", w["wte.weight"])
    return rms_norm(x, w["ln_f.weight"], eps) @ head.T


def dream_logits(weights, ids, *, layers, heads, kv_heads, theta, eps):
    """Logits (L, V) of ids (L,), in float64."""
    w = {name.removeprefix("model."): t.double() for name, t in weights.items()}
    x = w["embed_tokens.weight"][ids]
    for n in range(layers):
        at = f"layers.{n}."
        h = rms_norm(x, w[f"{at}input_layernorm.weight"], eps)
        q, k, v = (
            h @ w[f"{at}self_attn.{name}_proj.weight"].T + w[f"{at}self_attn.{name}_proj.bias"]
            for name in "qkv"
        )
        x = x + attention(q, k, v, heads, kv_heads, theta) @ w[f"{at}self_attn.o_proj.weight"].T
        h = rms_norm(x, w[f"{at}post_attention_layernorm.weight"], eps)
        x = x + swiglu(h, *(w[f"{at}mlp.{name}_proj.weight"] for name in ("gate", "up", "down")))
    head = w.get("lm_head.weight", w["embed_tokens.weight"])
    logits = rms_norm(x, w["norm.weight"], eps) @ head.T
    return torch.cat([logits[:1], logits[:-1]])


PLAIN = {"llada": llada_logits, "dream": dream_logits}
