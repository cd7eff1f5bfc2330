"""The networks of docs/foreign.md as plain functions of named tensors, and files in its layouts.

Written from that text alone, without our layers: all positions and heads at once.
"""

import json
import math

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

LAYERS, HIDDEN, HEADS, COND, VOCAB, LENGTH = 2, 32, 4, 12, 19, 16


def weights(seed=0, *, causal=False, head=True, layers=LAYERS, hidden=HIDDEN, vocab=VOCAB):
    """Core keys in the order of a reference network's parameters; nothing is zero."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape, scale=None):
        scale = shape[-1] ** -0.5 if scale is None else scale
        return torch.randn(shape, generator=generator) * scale

    def norm():
        return 1 + draw(hidden, scale=0.2)

    out = {"vocab_embed.embedding": draw(vocab, hidden, scale=1.0)}
    if not causal:
        for n, width in ((0, 256), (2, COND)):
            out[f"sigma_map.mlp.{n}.weight"] = draw(COND, width, scale=2 * width**-0.5)
            out[f"sigma_map.mlp.{n}.bias"] = draw(COND, scale=0.3)
    width = HIDDEN // HEADS
    out["rotary_emb.inv_freq"] = 10_000 ** -(torch.arange(0, width, 2).double() / width).float()
    for n in range(layers):
        block = {
            "norm1.weight": norm(),
            "attn_qkv.weight": draw(3 * hidden, hidden),
            "attn_out.weight": draw(hidden, hidden),
            "norm2.weight": norm(),
            "mlp.0.weight": draw(4 * hidden, hidden),
            "mlp.0.bias": draw(4 * hidden, scale=0.3),
            "mlp.2.weight": draw(hidden, 4 * hidden),
            "mlp.2.bias": draw(hidden, scale=0.3),
        }
        if not causal:
            block["adaLN_modulation.weight"] = draw(6 * hidden, COND, scale=0.4)
            block["adaLN_modulation.bias"] = draw(6 * hidden, scale=0.4)
        out |= {f"blocks.{n}.{name}": value for name, value in block.items()}
    if head:
        out["output_layer.norm_final.weight"] = norm()
        out["output_layer.linear.weight"] = draw(vocab, hidden)
        out["output_layer.linear.bias"] = draw(vocab, scale=0.5)
        if not causal:
            out["output_layer.adaLN_modulation.weight"] = draw(2 * hidden, COND, scale=0.4)
            out["output_layer.adaLN_modulation.bias"] = draw(2 * hidden, scale=0.4)
    return out


def critic_weights(seed=7):
    """A discriminator whose two layers torch itself has normalised spectrally."""
    out = weights(seed, head=False)
    torch.manual_seed(seed)
    for n, outputs in ((0, HIDDEN), (2, 1)):
        layer = torch.nn.utils.spectral_norm(torch.nn.Linear(HIDDEN, outputs))
        for _ in range(3):
            layer(torch.randn(2, HIDDEN))
        state = {k: v.detach().clone() for k, v in layer.state_dict().items()}
        out |= {f"output_layer.main.{n}.{name}": value for name, value in state.items()}
    return out


def _norm(x, weight):
    mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, correction=0)
    return (x - mean) / (variance + 1e-5).sqrt() * weight


def _linear(w, name, x):
    y = x @ w[f"{name}.weight"].T
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def _rotate(x, frequencies):
    """Turn the pair (i, i + D/2) of x (B, L, H, D) by position · frequency i."""
    angle = torch.arange(x.shape[1])[:, None] * frequencies
    turn = torch.polar(torch.ones_like(angle), angle)[None, :, None]
    half = x.shape[-1] // 2
    turned = torch.complex(x[..., :half], x[..., half:]) * turn
    return torch.cat((turned.real, turned.imag), dim=-1)


def _attention(w, name, x, causal):
    b, length, d = x.shape
    q, k, v = _linear(w, f"{name}attn_qkv", x).view(b, length, 3, HEADS, d // HEADS).unbind(2)
    q, k = (_rotate(y, w["rotary_emb.inv_freq"]) for y in (q, k))
    scores = torch.einsum("blhd,bmhd->bhlm", q, k) / math.sqrt(d // HEADS)
    if causal:
        hidden = torch.arange(length)[None, :] > torch.arange(length)[:, None]
        scores = scores.masked_fill(hidden, -math.inf)
    mixed = torch.einsum("bhlm,bmhd->blhd", scores.softmax(-1), v).reshape(b, length, d)
    return _linear(w, f"{name}attn_out", mixed)


def _gelu(x):
    return x / 2 * (1 + torch.tanh((2 / math.pi) ** 0.5 * (x + 0.044715 * x**3)))


def _condition(w, sigma):
    frequencies = torch.exp(-math.log(10_000) * torch.arange(128) / 128)
    angles = sigma[:, None] * frequencies
    h = torch.cat((angles.cos(), angles.sin()), dim=1)
    return F.silu(_linear(w, "sigma_map.mlp.2", F.silu(_linear(w, "sigma_map.mlp.0", h))))


def _trunk(w, tokens, sigma, causal=False):
    x = w["vocab_embed.embedding"][tokens]
    c = None if causal else _condition(w, sigma)
    for n in range(LAYERS):
        name = f"blocks.{n}."
        if causal:
            shift1 = scale1 = shift2 = scale2 = torch.zeros(1)
            gate1 = gate2 = torch.ones(1)
        else:
            m = _linear(w, f"{name}adaLN_modulation", c)[:, None]
            shift1, scale1, gate1, shift2, scale2, gate2 = m.chunk(6, dim=-1)
        h = _norm(x, w[f"{name}norm1.weight"]) * (1 + scale1) + shift1
        x = x + gate1 * _attention(w, name, h, causal)
        h = _norm(x, w[f"{name}norm2.weight"]) * (1 + scale2) + shift2
        x = x + gate2 * _linear(w, f"{name}mlp.2", _gelu(_linear(w, f"{name}mlp.0", h)))
    return x, c


def logits(w, tokens, sigma=None, *, sees_time=False):
    """Logits (B, L, V) of all ids; without a time embedding the network is causal."""
    causal = "sigma_map.mlp.0.weight" not in w
    sigma = sigma if sees_time else torch.zeros(len(tokens))
    x, c = _trunk(w, tokens, sigma, causal)
    x = _norm(x, w["output_layer.norm_final.weight"])
    if not causal:
        shift, scale = _linear(w, "output_layer.adaLN_modulation", c)[:, None].chunk(2, dim=-1)
        x = x * (1 + scale) + shift
    return _linear(w, "output_layer.linear", x)


def scores(w, tokens, sigma=None, *, sees_time=False):
    """Logits (B, L) of the discriminator."""
    x, _ = _trunk(w, tokens, sigma if sees_time else torch.zeros(len(tokens)))
    for n in (0, 2):
        name = f"output_layer.main.{n}."
        weight = w[f"{name}weight_orig"]
        norm = w[f"{name}weight_u"] @ weight @ w[f"{name}weight_v"]
        x = x @ (weight / norm).T + w[f"{name}bias"]
        x = F.silu(x) if n == 0 else x
    return x[..., 0]


def prefixed(prefix, tensors):
    return {prefix + name: value for name, value in tensors.items()}


def hub_config(**changes):
    config = {
        "model_type": "mdlm", "vocab_size": VOCAB, "model_length": LENGTH, "hidden_dim": HIDDEN,
        "cond_dim": COND, "n_blocks": LAYERS, "n_heads": HEADS, "dropout": 0.1,
        "time_conditioning": False,
    }  # fmt: skip
    return {k: v for k, v in (config | changes).items() if v is not None}


def sdtt_config(**changes):
    model = {"hidden_size": HIDDEN, "cond_dim": COND, "length": LENGTH, "n_blocks": LAYERS}
    model |= {"n_heads": HEADS, "dropout": 0.1}
    return {"model": model, "time_conditioning": False, "parameterization": {}} | changes


def hub_folder(folder, tensors, config=None, critic=None, pickled=False):
    """A folder as on the hub; `pickled` for `pytorch_model.bin` in place of safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    if critic is not None:
        save_file(critic, folder / "discriminator.safetensors")
    return folder


def lightning_file(path, state, shadows=None, **more):
    """A Lightning checkpoint with all that surrounds the weights."""
    content = {"epoch": 1, "global_step": 10, "state_dict": state, "loops": {"fit_loop": {}}}
    content["optimizer_states"] = [{"state": {0: {"exp_avg": torch.zeros(3)}}}]
    if shadows is not None:
        averages = [v for k, v in shadows.items() if not k.endswith("inv_freq")]
        content["ema"] = {"decay": 0.9999, "num_updates": 10, "shadow_params": averages}
    torch.save(content | more, path)
    return path
