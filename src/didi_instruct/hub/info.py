"""Facts about models for `didi info`: what headers and settings tell, without loading weights."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from didi_instruct.config.model import ModelConfig, architecture
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import UserError
from didi_instruct.hub import budget
from didi_instruct.hub.sources import (
    DidiFolder,
    LoadOptions,
    MaskedLMFolder,
    PublicCheckpoint,
    find_source,
)
from didi_instruct.models.causal_lm import CAUSAL, is_causal
from didi_instruct.models.checkpoint import CONFIG, load_model
from didi_instruct.models.discriminator import build_discriminator
from didi_instruct.models.dit import count_parameters
from didi_instruct.models.foreign.layouts import FIRST, WeightSet, clean, find_discriminator
from didi_instruct.models.foreign.places import locate
from didi_instruct.models.foreign.reading import Found, recognise
from didi_instruct.models.foreign.shapes import Family
from didi_instruct.models.foreign.stores import Header, Store, open_store
from didi_instruct.models.masked_lm import open_weights, read_tokenizer
from didi_instruct.models.native import WeightFiles
from didi_instruct.models.tensor_files import shown

if TYPE_CHECKING:
    from didi_instruct.models.network import Network

BUFFERS = ("rotary_emb.inv_freq", "weight_u", "weight_v")
"""Tensors of a discriminator that are no parameters."""


FIXED = ("inv_freq", "position_ids")
TIED = ("lm_head", "lm_head.decoder", "predictions.decoder", "vocab_projector")
"""Tensors of a masked LM that are no parameters, and those that are the embedding once more."""


LEFT_TO_RIGHT = ("ForCausalLM", "LMHeadModel")
"""How the names of classes end that read from left to right."""

BATCH, TOKENS, RANK = 4, 512, 64
"""Texts, their tokens at most, and the rank of adapters for which memory is told."""

_SHAPE = ("vocab_size", "mask_id", "length", "discriminator_parameters")
"""What every answer has, though nothing is known."""


def describe_architecture(name: str) -> dict[str, Any]:
    """Facts about a named architecture, without allocating it."""
    config = architecture(name)
    critic = None if config.kind == "ar" else count_parameters(config, build_discriminator)
    return {"architecture": name, **_facts(config, count_parameters(config), critic)}


def describe_source(
    source: str, weights: WeightSet = "ema", family: Family | None = None
) -> dict[str, Any]:
    """Facts about any SOURCE; a file that holds nothing known is described by its tensors."""
    options = LoadOptions(weights=weights, family=family)
    found = find_source(source)
    if isinstance(found, PublicCheckpoint):
        causal = _causal(found.path)
        if causal is not None:
            return _describe_causal(found, causal)
        return _describe_foreign(found, weights, family)
    options.refuse_choices(found.name)
    if isinstance(found, DidiFolder):
        return describe_folder(str(found.path))
    return _describe_masked_lm(found)


def describe_folder(folder: str) -> dict[str, Any]:
    """Facts about a folder that didi wrote, its files verified."""
    loaded = load_model(Path(folder))
    network, critic = loaded.model, loaded.discriminator
    facts = _facts(loaded.config, _count(network), None if critic is None else _count(critic))
    facts = {"architecture": loaded.config.kind, **facts}
    if (record := cast("Network", network).record) is not None:
        facts["never_written"] = len(record.banned)
        itemsize = max(network.parameters(), key=Tensor.numel).itemsize
        facts |= _memory(record.settings, loaded.config, facts["parameters"], itemsize)
    facts["layout"] = "didi"
    facts["tokenizer_hash"] = loaded.tokenizer.hash if loaded.tokenizer else None
    facts["provenance"] = loaded.provenance
    return facts


def _describe_foreign(
    origin: PublicCheckpoint, weights: WeightSet, family: Family | None
) -> dict[str, Any]:
    place = locate(origin.path)
    store = open_store(place.model)
    try:
        found = recognise(origin.path, weights, family)
    except UserError as error:
        if any(clean(name).endswith(FIRST) for name in store.headers):
            raise  # a network of the family, and something to mend
        return _describe_unknown(store, str(error))
    critic = _critic_parameters(found) if found.has_discriminator else None
    folder = place.tokenizer_folder
    return {
        "architecture": found.config.kind,
        **_facts(found.config, count_parameters(found.config), critic),
        "layout": found.layout,
        "description": found.description,
        "weights": list(found.weights),
        "dtype": _common_type(store.headers.values()),
        "tokenizer_hash": None if folder is None else Tokenizer.load(folder).hash,
        "provenance": {"source": origin.name},
        "notes": list(found.notes),
    }


def _critic_parameters(found: Found) -> int:
    place = locate(found.path)
    store = open_store(place.discriminator or place.model)
    keys = find_discriminator(store)
    return sum(
        prod(store.headers[name].shape) for key, name in keys.items() if not key.endswith(BUFFERS)
    )


def _causal(path: Path) -> str | None:
    """Return the class of a causal LM of `transformers`, by the config.json of its folder."""
    try:
        settings = json.loads((path / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    names = settings.get("architectures") if isinstance(settings, dict) else None
    known = (n for n in (names if isinstance(names, list) else []) if isinstance(n, str))
    return next((name for name in known if name.endswith(LEFT_TO_RIGHT)), None)


def _describe_causal(origin: PublicCheckpoint, name: str) -> dict[str, Any]:
    """What is no denoiser, but judges the texts of one."""
    headers = WeightFiles(origin.path).headers
    notes = ["A causal language model: use it as --judge in didi eval."]
    if is_causal(origin.path):
        notes.append("didi finetune --set bidirectional=true makes a denoiser of it.")
    return {
        "architecture": shown(name),
        "parameters": sum(prod(h.shape) for h in headers.values() if h.is_weight),
        "trainable_parameters": None,
        **dict.fromkeys(_SHAPE),
        "layout": None,
        "dtype": _common_type(headers.values()),
        "provenance": {"source": origin.name},
        "notes": notes,
    }


def _describe_unknown(store: Store, reason: str) -> dict[str, Any]:
    """What a file holds that is no model known here; numbered tensors of one shape are one line."""
    kinds: Counter[tuple[str, tuple[int, ...], str]] = Counter(
        (shown(re.sub(r"\d+", "N", name[:120])), header.shape, _type(header))
        for name, header in store.headers.items()
    )
    return {
        "architecture": "unknown",
        "parameters": sum(prod(header.shape) for header in store.headers.values()),
        "trainable_parameters": None,
        **dict.fromkeys(_SHAPE),
        "layout": None,
        "notes": [reason],
        "tensors": [
            {"name": name, "shape": list(shape), "dtype": dtype, "count": count}
            for (name, shape, dtype), count in kinds.items()
        ],
        "not_tensors": [f"{shown(name)}: {shown(what)}" for name, what in store.blocked.items()],
        "not_run": [shown(name) for name in store.untouched],
    }


def _describe_masked_lm(origin: MaskedLMFolder) -> dict[str, Any]:
    found = origin.found
    headers = open_weights(found).headers
    tied = found.settings.get("tie_word_embeddings", True)
    no_more = (*FIXED, *(f"{name}.weight" for name in TIED if tied))
    parameters = sum(
        prod(header.shape)
        for name, header in headers.items()
        if header.is_weight and not name.endswith(no_more)
    )
    widest = max(headers.values(), key=lambda header: prod(header.shape))
    mask = f"Our mask is one more id, {found.config.mask_id}, which the network sees as its own"
    try:
        _, ids, _ = read_tokenizer(found)
        written, notes = {"never_written": len(ids.banned)}, [f"{mask}, {ids.mask}."]
    except UserError as error:
        written, notes = {}, [f"{mask}.", str(error)]
    return {
        "architecture": shown(found.model_type),
        **_facts(found.config, parameters, None),
        **written,
        "layout": found.layout,
        "description": found.description,
        "dtype": _common_type(headers.values()),
        "provenance": {"source": origin.name},
        **_memory(found.settings, found.config, parameters, widest.itemsize),
        "notes": notes,
    }


def _memory(
    settings: Mapping[str, Any], config: ModelConfig, parameters: int, itemsize: int
) -> dict[str, dict[str, int]]:
    """Bytes of sampling and of distilling a bidirectional causal LM, by part.

    `settings` is its config.json in the words of `transformers`.
    """
    if settings["model_type"] not in CAUSAL:
        return {}
    shape = budget.CausalShape.of(settings, parameters, itemsize)
    texts = {"batch": BATCH, "length": min(TOKENS, config.length)}
    parts = {
        "bytes_sampling": budget.sampling(shape, **texts),
        "bytes_adapters": budget.with_adapters(shape, **texts, rank=RANK) | {"rank": RANK},
        "bytes_copies": budget.three_copies(shape, **texts),
    }
    return {name: part | texts for name, part in parts.items()}


def _count(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


def _common_type(headers: Iterable[Header]) -> str | None:
    counts = Counter(map(_type, headers)).most_common(1)
    return counts[0][0] if counts else None


def _type(header: Header) -> str:
    return str(header.dtype).removeprefix("torch.")


def _facts(config: ModelConfig, parameters: int, critic: int | None) -> dict[str, Any]:
    shape = asdict(config)
    return {
        "parameters": parameters,
        "trainable_parameters": parameters,
        "vocab_size": config.vocab_size,
        "mask_id": config.mask_id,
        **({"masks": config.masks} if config.masks > 1 else {}),
        "length": config.length,
        "discriminator_parameters": critic,
        "layers": config.layers,
        "hidden": config.hidden,
        "heads": config.heads,
        "time_conditioning": config.time_conditioning,
        "schedule": shape["schedule"],
        "megabytes_float32": round(parameters * 4 / 2**20),
        "megabytes_bfloat16": round(parameters * 2 / 2**20),
    }
