"""The networks of docs/foreign.md, as plain functions of a state dict, sharing no code with ours.

One sequence at a time, loops over heads and positions: slow, and easy to check against the text.
"""

import math

import torch
import torch.nn.functional as F


def layer_norm(x, weight):
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-5) * weight


def gelu_tanh(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def condition(state, sigma):
    """silu(time embedding): (cond_dim,)."""
    frequencies = torch.tensor([10_000 ** (-i / 128) for i in range(128)], dtype=torch.float64)
    angles = sigma * frequencies
    h = torch.cat([torch.cos(angles), torch.sin(angles)]).float()
    h = F.silu(state["sigma_map.mlp.0.weight"] @ h + state["sigma_map.mlp.0.bias"])
    return F.silu(state["sigma_map.mlp.2.weight"] @ h + state["sigma_map.mlp.2.bias"])


def rotated(x, width):
    """Rotate x (L, D): dimension i with i + D/2, by position · 10000^(-2i/D)."""
    out = x.clone()
    half = width // 2
    for position in range(x.shape[0]):
        for i in range(half):
            angle = position * 10_000 ** (-2 * i / width)
            a, b = x[position, i], x[position, i + half]
            out[position, i] = a * math.cos(angle) - b * math.sin(angle)
            out[position, i + half] = b * math.cos(angle) + a * math.sin(angle)
    return out


def attention(state, prefix, x, heads, causal):
    d = x.shape[1]
    width = d // heads
    q, k, v = (x @ state[f"{prefix}attn_qkv.weight"].T).split(d, dim=1)
    outputs = []
    for h in range(heads):
        part = slice(h * width, (h + 1) * width)
        scores = rotated(q[:, part], width) @ rotated(k[:, part], width).T / math.sqrt(width)
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf)
        outputs.append(scores.softmax(-1) @ v[:, part])
    return torch.cat(outputs, dim=1) @ state[f"{prefix}attn_out.weight"].T


def mlp(state, prefix, x):
    h = gelu_tanh(x @ state[f"{prefix}mlp.0.weight"].T + state[f"{prefix}mlp.0.bias"])
    return h @ state[f"{prefix}mlp.2.weight"].T + state[f"{prefix}mlp.2.bias"]


def block(state, n, x, heads, c=None, causal=False):
    prefix = f"blocks.{n}."
    d = x.shape[1]
    if c is None:
        shift1 = scale1 = shift2 = scale2 = torch.zeros(d)
        gate1 = gate2 = torch.ones(d)
    else:
        weight = state[f"{prefix}adaLN_modulation.weight"]
        m = weight @ c + state[f"{prefix}adaLN_modulation.bias"]
        shift1, scale1, gate1, shift2, scale2, gate2 = m.split(d)
    h = layer_norm(x, state[f"{prefix}norm1.weight"]) * (1 + scale1) + shift1
    x = x + gate1 * attention(state, prefix, h, heads, causal)
    h = layer_norm(x, state[f"{prefix}norm2.weight"]) * (1 + scale2) + shift2
    return x + gate2 * mlp(state, prefix, h)


def embedded(state, tokens):
    x = state["vocab_embed.embedding"][tokens]
    positions = state.get("position_embed.embedding")
    return x if positions is None else x + positions[: len(tokens)]


def trunk(state, config, tokens, sigma):
    c = condition(state, sigma if config.time_conditioning else 0.0)
    x = embedded(state, tokens)
    for n in range(config.layers):
        x = block(state, n, x, config.heads, c)
    return x, c


def dit_logits(state, config, tokens, sigma):
    """Logits over all ids: tokens (L,), sigma a number -> (L, vocab_size)."""
    x, c = trunk(state, config, tokens, sigma)
    m = state["output_layer.adaLN_modulation.weight"] @ c
    shift, scale = (m + state["output_layer.adaLN_modulation.bias"]).split(config.hidden)
    h = layer_norm(x, state["output_layer.norm_final.weight"]) * (1 + scale) + shift
    return h @ state["output_layer.linear.weight"].T + state["output_layer.linear.bias"]


def discriminator_logits(state, config, tokens, sigma):
    """Logit of every position: (L,)."""
    x, _ = trunk(state, config, tokens, sigma)
    for n in (0, 2):
        weight = state[f"output_layer.main.{n}.weight_orig"]
        u, v = (state[f"output_layer.main.{n}.weight_{name}"] for name in "uv")
        x = x @ (weight / (u @ weight @ v)).T + state[f"output_layer.main.{n}.bias"]
        x = F.silu(x) if n == 0 else x
    return x[:, 0]


def ar_logits(state, config, tokens):
    """Logits after each token, over all ids: (L, vocab_size)."""
    x = embedded(state, tokens)
    for n in range(config.layers):
        x = block(state, n, x, config.heads, causal=True)
    h = layer_norm(x, state["output_layer.norm_final.weight"])
    return h @ state["output_layer.linear.weight"].T + state["output_layer.linear.bias"]
