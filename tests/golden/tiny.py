"""Tiny models in files, made of numpy's random numbers alone.

Goldens and comparisons of versions read these folders. Nothing of the package writes them, so they
stay the same bytes whatever the package becomes: they are the layout that `didi.load` promises.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

Tensors = dict[str, NDArray[np.float32]]

MASK, PAD = -2, -1
"""In given tokens: what is to be written, whatever a model's own mark for it is; nothing at all."""


def _words(text: str) -> list[str]:
    return text.split()


ORACLE_WORDS = _words(
    "( ) [ ] { } Anna Boris Clara David Emma Felix Grace Hugo this every greets follows helps "
    "ignores these many greet follow help ignore wild sleepy furry cat horse cats horses salty "
    "stormy sunken boat sailor boats sailors sweet spicy buttery cook pie cooks pies loud jazzy "
    "tuneful singer drum singers drums quietly often today again slowly gladly outside twice "
    "somehow anyway"
)
"""The 64 words of the built-in language, in the order of their ids."""
END = "<|endoftext|>"
END_WORDS = [*(f"w{n}" for n in range(24)), END]
"""A language whose texts end."""
END_ID = END_WORDS.index(END)
WINDOW = 16
"""Tokens of a window, where each text has its own."""
LENGTHS = [0, 0, 0, 2, 4, 6, 9, 12, 9, 7, 5, 4, 3, 0, 2, 1, 1]

SHAPE = {
    "kind": "mdlm",
    "layers": 2,
    "hidden": 16,
    "heads": 2,
    "cond_dim": 8,
    "vocab_size": 65,
    "masks": 1,
    "length": 32,
    "dropout": 0.0,
    "time_conditioning": False,
    "learned_positions": False,
    "end_id": None,
    "lengths": [],
    "order": "random",
    "schedule": {"name": "log-linear", "eps": 0.0},
}
_WINDOWS = {
    "vocab_size": 26,
    "length": WINDOW,
    "learned_positions": True,
    "end_id": END_ID,
    "lengths": LENGTHS,
}
_TIMED = {"time_conditioning": True, "schedule": {"name": "log-linear", "eps": 1e-3}}

MODELS: dict[str, dict[str, object]] = {
    "plain": {},
    "timed": {**_TIMED, "learned_positions": True},
    "cosine": {"time_conditioning": True, "schedule": {"name": "cosine", "eps": 1e-3}},
    "streams": {"order": "streams", "learned_positions": True},
    "windows": _WINDOWS,
    "codes": {"masks": 4, "vocab_size": 68},
    "coded-windows": {**_WINDOWS, "masks": 3, "vocab_size": 28, "order": "streams"},
    "duo": {**_TIMED, "kind": "duo", "vocab_size": 64},
    "ar": {"kind": "ar"},
    "ar-ends": {"kind": "ar", "vocab_size": 26, "length": WINDOW, "end_id": END_ID},
    "other": {},
    "other-windows": _WINDOWS,
}
"""What each model changes of `SHAPE`; every one has weights of its own."""
GUIDED = ("plain", "timed", "streams", "windows", "codes", "coded-windows")
"""Models that bring a discriminator."""
MASKED_LMS = {"bert": (6, 15), "esm": (4, 24)}
"""Masked LMs of `transformers`: the first token that a text may have, the one behind the last."""
BERT_WORDS = [*_words("[PAD] [UNK] [CLS] [SEP] [MASK] [unused0]"), *(f"w{n}" for n in range(9))]
ESM_LETTERS = _words(
    "<cls> <pad> <eos> <unk> L A G V S E R T I D P K Q N F Y M H W C X B U Z O . - <null_1> <mask>"
)


def shape_of(name: str) -> dict[str, object]:
    """Settings of a model by name, as `config.json` has them."""
    return {**SHAPE, **MODELS[name]}


def write_all(folder: Path) -> Path:
    """Write every model in `folder / name`, and `lines.txt`."""
    write_models(folder, MODELS)
    for name in MASKED_LMS:
        _write_masked_lm(folder / name, name)
    write_texts(folder / "lines.txt")
    return folder


def write_models(folder: Path, names: Iterable[str]) -> None:
    """Write models of our own layout, each in `folder / name`."""
    for name in names:
        config, seed = shape_of(name), [11, list(MODELS).index(name)]
        words, end = (END_WORDS, END) if config["end_id"] is not None else (ORACLE_WORDS, None)
        write_model(folder / name, config, seed, guided=name in GUIDED, words=words, end=end)


def write_texts(path: Path) -> None:
    """Write documents of one line, in the words of the models that have windows."""
    random = np.random.default_rng(7)
    lines = []
    for _ in range(160):
        count = random.integers(3, WINDOW - 1)
        start, stride = random.integers(24), random.integers(1, 6)
        lines.append(" ".join(f"w{(start + stride * n) % 24}" for n in range(count)))
    path.write_text("\n".join(lines) + "\n")


def write_model(
    folder: Path,
    config: dict[str, object],
    seed: Sequence[int],
    *,
    guided: bool,
    words: Sequence[str],
    end: str | None = None,
) -> None:
    """Write a model of random weights and a tokenizer of words, maybe with a discriminator."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(seed)
    save_file(_network(config, random), folder / "model.safetensors")
    write_tokenizer(folder, words, end)
    if guided:
        tensors = _trunk(config, random) | _head(config, random)
        save_file(tensors, folder / "discriminator.safetensors")
    seal(folder, config, guided=guided)


def add_discriminator(folder: Path) -> None:
    """Give a model folder a discriminator: the model's own trunk and a random head."""
    config = json.loads((folder / "config.json").read_text())["model"]
    tensors = load_file(folder / "model.safetensors")
    trunk = {n: t for n, t in tensors.items() if not n.startswith("output_layer.")}
    head = _head(config, np.random.default_rng(23))
    save_file(trunk | head, folder / "discriminator.safetensors")
    seal(folder, config, guided=True)


def seal(folder: Path, config: dict[str, object], *, guided: bool) -> None:
    """Write `config.json`, which says what the other files are."""
    names = ("model.safetensors", "discriminator.safetensors", "tokenizer.json",
             "tokenizer_config.json")  # fmt: skip
    files = {
        path.name: {
            "bytes": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in (folder / name for name in names)
        if path.exists()
    }
    content = {
        "format": "didi",
        "version": 1,
        "model": config,
        "files": files,
        "discriminator": config if guided else None,
        "provenance": {},
    }
    (folder / "config.json").write_text(json.dumps(content, indent=2))


def write_tokenizer(folder: Path, words: Sequence[str], end: str | None) -> None:
    """Write a tokenizer of words between spaces."""
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    if end is not None:
        settings["eos_token"] = end
    _write_words(folder, words, [] if end is None else [end], settings)


def _write_words(
    folder: Path,
    words: Sequence[str],
    special: Sequence[str],
    settings: dict[str, object],
    post_processor: dict[str, object] | None = None,
) -> None:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": words.index(word), "content": word, **flags, "special": True} for word in special
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": post_processor,
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {word: n for n, word in enumerate(words)},
            "unk_token": "<unk>",
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _normal(random: np.random.Generator, name: str, *shape: int) -> NDArray[np.float32]:
    noise = random.standard_normal(shape)
    if "norm" in name:
        return (1 + 0.2 * noise).astype(np.float32)
    if name.endswith("linear.weight"):  # laws that leave something to chance
        return (noise * 0.15).astype(np.float32)
    return (noise * (0.3 if len(shape) > 1 else 0.1)).astype(np.float32)


def _trunk(config: dict[str, object], random: np.random.Generator) -> Tensors:
    width, cond = int(config["hidden"]), int(config["cond_dim"])  # type: ignore[call-overload]
    sees_time = config["kind"] != "ar"
    shapes: dict[str, tuple[int, ...]] = {"vocab_embed.embedding": (config["vocab_size"], width)}
    if config["learned_positions"]:
        shapes["position_embed.embedding"] = (config["length"], width)
    if sees_time:
        shapes |= {"sigma_map.mlp.0.weight": (cond, 256), "sigma_map.mlp.0.bias": (cond,)}
        shapes |= {"sigma_map.mlp.2.weight": (cond, cond), "sigma_map.mlp.2.bias": (cond,)}
    for n in range(config["layers"]):
        block = {
            "norm1.weight": (width,),
            "norm2.weight": (width,),
            "attn_qkv.weight": (3 * width, width),
            "attn_out.weight": (width, width),
            "mlp.0.weight": (4 * width, width),
            "mlp.0.bias": (4 * width,),
            "mlp.2.weight": (width, 4 * width),
            "mlp.2.bias": (width,),
        }
        if sees_time:
            block |= {"adaLN_modulation.weight": (6 * width, cond)}
            block |= {"adaLN_modulation.bias": (6 * width,)}
        shapes |= {f"blocks.{n}.{name}": shape for name, shape in block.items()}
    tensors = {name: _normal(random, name, *shape) for name, shape in shapes.items()}
    per_head = width // config["heads"]
    powers = np.arange(0, per_head, 2, dtype=np.float32) / np.float32(per_head)
    tensors["rotary_emb.inv_freq"] = (1.0 / np.float32(10000.0) ** powers).astype(np.float32)
    return tensors


def _network(config: dict[str, object], random: np.random.Generator) -> Tensors:
    tensors = _trunk(config, random)
    width, vocabulary = config["hidden"], config["vocab_size"]
    names: dict[str, tuple[int, ...]] = {
        "norm_final.weight": (width,),
        "linear.weight": (vocabulary, width),
        "linear.bias": (vocabulary,),
    }
    if config["kind"] != "ar":
        names |= {"adaLN_modulation.weight": (2 * width, config["cond_dim"])}
        names |= {"adaLN_modulation.bias": (2 * width,)}
    for name, shape in names.items():
        tensors[f"output_layer.{name}"] = _normal(random, name, *shape)
    if config["end_id"] is not None and config["kind"] == "mdlm":
        tensors["output_layer.linear.bias"][config["end_id"]] = -30.0
    return tensors


def _head(config: dict[str, object], random: np.random.Generator) -> Tensors:
    tensors: Tensors = {}
    for layer, outputs in ((0, config["hidden"]), (2, 1)):
        weight = random.standard_normal((outputs, config["hidden"])) * 0.3
        left, _, right = np.linalg.svd(weight)
        found = {
            "bias": random.standard_normal(outputs) * 0.1,
            "weight_orig": weight,
            "weight_u": left[:, 0],
            "weight_v": right[0],
        }
        for name, value in found.items():
            tensors[f"output_layer.main.{layer}.{name}"] = value.astype(np.float32)
    return tensors


_BODY = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 14,
}


def _write_masked_lm(folder: Path, name: str) -> None:
    import torch
    import transformers

    folder.mkdir(parents=True)
    network: transformers.PreTrainedModel
    if name == "bert":
        bert = transformers.BertConfig(**_BODY, vocab_size=len(BERT_WORDS) + 2)
        network = transformers.BertForMaskedLM(bert)
        frame = {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "[CLS]", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
                {"SpecialToken": {"id": "[SEP]", "type_id": 0}},
            ],
            "pair": [{"Sequence": {"id": text, "type_id": n}} for n, text in enumerate("AB")],
            "special_tokens": {
                word: {"id": word, "ids": [BERT_WORDS.index(word)], "tokens": [word]}
                for word in ("[CLS]", "[SEP]")
            },
        }
        _write_words(folder, BERT_WORDS, BERT_WORDS[:5], {"mask_token": "[MASK]"}, frame)
    else:
        esm = transformers.EsmConfig(
            **_BODY, vocab_size=33, mask_token_id=32, pad_token_id=1,
            position_embedding_type="rotary", token_dropout=True,
        )  # fmt: skip
        network = transformers.EsmForMaskedLM(esm)
        (folder / "vocab.txt").write_text("\n".join(ESM_LETTERS))
        (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "EsmTokenizer"}')
    random = np.random.default_rng([13, list(MASKED_LMS).index(name)])
    with torch.no_grad():
        for key, parameter in sorted(network.named_parameters()):
            if "norm" not in key.lower():
                noise = 0.3 * random.standard_normal(tuple(parameter.shape))
                parameter.copy_(torch.from_numpy(noise))
        network.get_output_embeddings().weight.mul_(0.5)
    network.save_pretrained(folder)
