"""Causal LMs with bidirectional attention: LLaDA, Dream and DiffuCoder, and any Llama or Qwen2.

The repositories of LLaDA and Dream bring Python files, which are never run: their networks are
`LlamaForCausalLM` and `Qwen2ForCausalLM` of `transformers` with `is_causal=False`, which every
attention implementation there heeds. Here are their config.json and tensors in the words of
`transformers`, and the ids that they never write.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import UserError
from didi_instruct.models.checkpoint import CONFIG, read_object
from didi_instruct.models.foreign.settings import positive_number, whole_number
from didi_instruct.models.masked_network import Family, SpecialIds, special_tokens
from didi_instruct.models.tensor_files import shown_value

Settings = Mapping[str, Any]

_TRANSFORMER = Family(trunk="model", head=("lm_head",), blocks="layers", ends=True)
CAUSAL = {"llama": _TRANSFORMER, "qwen2": _TRANSFORMER}
"""Causal LMs of `transformers` that can be bidirectional, by `model_type`."""

_MASKS = ("<|mdm_mask|>", "<|mask|>", "[MASK]", "<mask>")
# Of texts and of turns. They are marked as special, but models learnt to write them.
_ENDS = ("<|endoftext|>", "<|eot_id|>", "<|im_end|>", "<|end_of_text|>", "</s>")

_DREAM_LENGTH = 2048  # tokens that Dream was trained on; its config.json says 131,072

_LLADA_TENSOR = re.compile(r"model\.transformer\.(?:(blocks)\.(\d{1,6})\.)?(\w+)\.weight")
_LLADA_ENDS = {"wte": "model.embed_tokens", "ln_f": "model.norm", "ff_out": "lm_head"}
_LLADA_PARTS = {
    "attn_norm": "input_layernorm",
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj",
    "ff_norm": "post_attention_layernorm",
    "ff_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "ff_out": "mlp.down_proj",
}
# What LLaDA's code can build beside a Llama, and each setting's value for a Llama.
_LLADA_NEEDS = {
    "block_type": "llama",
    "activation_type": "silu",
    "layer_norm_type": "rms",
    "rope": True,
}
_LLADA_ALLOWS = {
    "alibi": False,
    "attention_layer_norm": False,
    "bias_for_layer_norm": False,
    "block_group_size": 1,
    "clip_qkv": None,
    "include_bias": False,
    "include_qkv_bias": False,
    "input_emb_norm": False,
    "layer_norm_with_affine": True,
    "scale_logits": False,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Foreign:
    """A family that has words of its own for a causal LM of `transformers`."""

    layout: str
    family: Family
    settings: Callable[[Path, Settings], dict[str, Any]]  # config.json as `transformers` has it
    rename: Callable[[str], str]  # a tensor's name there
    tokenizer: str  # class of transformers where there is no tokenizer.json
    size: int  # ids of the published models,
    mask: int  # and the mask's among them


def _llada_settings(path: Path, settings: Settings) -> dict[str, Any]:
    """LLaDA's config.json as that of a Llama."""
    if {"num_experts", "n_experts"} & settings.keys():
        raise UserError(
            f"{path}: it is a mixture of experts (LLaDA-MoE), which is not supported: use a dense "
            "LLaDA."
        )
    for name, value in (_LLADA_NEEDS | _LLADA_ALLOWS).items():
        found = settings.get(name, None if name in _LLADA_NEEDS else value)
        if found != value:
            raise UserError(
                f"{path}: `{name}` is {shown_value(found)}, and only LLaDA with `{name}` "
                f"{value!r} is supported."
            )
    hidden, heads = (whole_number(path, settings, name) for name in ("d_model", "n_heads"))
    kv_heads = heads
    if settings.get("multi_query_attention"):
        kv_heads = 1
    elif settings.get("n_kv_heads") is not None:
        kv_heads = whole_number(path, settings, "n_kv_heads")
    if settings.get("mlp_hidden_size") is not None:
        inner = whole_number(path, settings, "mlp_hidden_size")
    else:
        inner = whole_number(path, settings, "mlp_ratio") * hidden
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": whole_number(path, settings, "n_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
        "vocab_size": whole_number(path, settings, "embedding_size", "vocab_size"),
        "max_position_embeddings": whole_number(path, settings, "max_sequence_length"),
        "rms_norm_eps": positive_number(path, settings, "rms_norm_eps"),
        "rope_theta": positive_number(path, settings, "rope_theta"),
        "tie_word_embeddings": bool(settings.get("weight_tying", False)),
        "attention_dropout": settings.get("attention_dropout", 0.0),
        **_ids(settings),
    }


def _llada_name(name: str) -> str:
    """Name in a Llama of a tensor of LLaDA; what is not known keeps its name, and is refused."""
    match = _LLADA_TENSOR.fullmatch(name)
    if match is None:
        return name
    blocks, number, part = match.groups()
    known = (_LLADA_PARTS if blocks else _LLADA_ENDS).get(part)
    if known is None:
        return name
    return f"model.layers.{number}.{known}.weight" if blocks else f"{known}.weight"


def _dream_settings(path: Path, settings: Settings) -> dict[str, Any]:
    """Dream's config.json as that of a Qwen2, whose words it has already."""
    if settings.get("use_sliding_window"):
        raise UserError(
            f"{path}: `use_sliding_window` is {shown_value(settings['use_sliding_window'])}, and "
            "only Dream with attention to the whole text is supported."
        )
    _check_rope(path, settings)
    longest = whole_number(path, settings, "max_position_embeddings")
    return {
        **settings,
        "model_type": "qwen2",
        "max_position_embeddings": min(longest, _DREAM_LENGTH),
        "layer_types": None,
        "tie_word_embeddings": bool(settings.get("tie_word_embeddings", False)),
        **_ids(settings),
    }


def _check_rope(path: Path, settings: Settings) -> None:
    """Refuse what tensors do not tell, and config.json does not say."""
    positive_number(path, settings, "rms_norm_eps")
    nested = settings.get("rope_parameters")
    positive_number(path, nested if isinstance(nested, Mapping) else settings, "rope_theta")
    whole_number(path, settings, "num_key_value_heads")


def _ids(settings: Settings) -> dict[str, Any]:
    names = ("mask_token_id", "pad_token_id", "eos_token_id")
    return {name: settings.get(name) for name in names}


FOREIGN = {  # by `model_type`
    "llada": Foreign(
        layout="llada",
        family=_TRANSFORMER,
        settings=_llada_settings,
        rename=_llada_name,
        tokenizer="PreTrainedTokenizerFast",
        size=126_464,
        mask=126_336,
    ),
    "Dream": Foreign(
        layout="dream",
        family=replace(_TRANSFORMER, shifted=True),
        settings=_dream_settings,
        rename=str,
        tokenizer="Qwen2Tokenizer",
        size=152_064,
        mask=151_666,
    ),
}


def is_causal(folder: Path) -> bool:
    """Tell whether a folder holds a causal LM of `transformers` that can be bidirectional."""
    return folder.is_dir() and read_object(folder / CONFIG).get("model_type") in [*CAUSAL]


def make_bidirectional(config: Any) -> None:
    """Let each position of a causal LM attend to all others, in place: its settings."""
    config.is_causal, config.use_cache = False, False
    config.pad_token_id = None  # whose embedding would not learn; in Dream it is the end of a text


def written_ids(
    folder: Path, settings: Settings, size: int, tokenizer: Tokenizer, family: Foreign
) -> SpecialIds:
    """Mask and never-written ids of a network with `size` ids; the ends of texts are written."""
    known, names = tokenizer.vocabulary, special_tokens(folder)
    mask = settings.get("mask_token_id")
    if mask is None:
        words = (names.get("mask_token", ""), *_MASKS)
        default = family.mask if size == family.size else None
        mask = next((known[word] for word in words if word in known), default)
    if type(mask) is not int or not 0 <= mask < size:
        raise UserError(
            f"{folder / CONFIG}: `mask_token_id` is {shown_value(mask)}, and its mask has to be "
            f"one of its {size} ids. Write the id there."
        )
    return never_written(folder, settings, size, tokenizer, mask)


def never_written(
    folder: Path, settings: Settings, size: int, tokenizer: Tokenizer, mask: int
) -> SpecialIds:
    """Special ids around a mask: no special token is written but those that end a text."""
    known, names = tokenizer.vocabulary, special_tokens(folder)
    ends = {known[word] for word in (*_ENDS, names.get("eos_token", "")) if word in known}
    for found in (settings, read_object(folder / "generation_config.json")):
        value = found.get("eos_token_id")
        ends |= {i for i in (value if isinstance(value, list) else [value]) if type(i) is int}
    banned = tokenizer.special_ids | {known[word] for word in names.values() if word in known}
    banned |= set(range(size)) - set(known.values())
    banned = banned - (ends & set(known.values())) | {mask}
    pad = settings.get("pad_token_id")
    pad = pad if type(pad) is int and 0 <= pad < size else mask
    return SpecialIds(mask, pad, (), (), tuple(sorted(banned)))
