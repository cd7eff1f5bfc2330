"""Facts about models for `didi info`, from headers and settings, without loading public weights."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from didi_instruct.adapters.files import SETTINGS, base_of
from didi_instruct.config.model import ModelConfig, architecture
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import UserError
from didi_instruct.hub import memory
from didi_instruct.hub.sources import (
    AdapterFolder,
    DidiFolder,
    LoadOptions,
    MaskedLMFolder,
    PublicCheckpoint,
    find_source,
)
from didi_instruct.models.causal_lm import CAUSAL, is_causal
from didi_instruct.models.checkpoint import ADAPTER, CONFIG, read_manifest, read_object
from didi_instruct.models.discriminator import build_discriminator
from didi_instruct.models.dit import count_parameters, parameters_of
from didi_instruct.models.foreign.layouts import FIRST, WeightSet, clean, find_discriminator
from didi_instruct.models.foreign.places import locate
from didi_instruct.models.foreign.reading import recognise
from didi_instruct.models.foreign.settings import whole_number
from didi_instruct.models.foreign.shapes import Family
from didi_instruct.models.foreign.stores import Header, Store, open_store
from didi_instruct.models.masked_lm import open_weights, read_tokenizer
from didi_instruct.models.native import WeightFiles
from didi_instruct.models.tensor_files import read_headers, shown

if TYPE_CHECKING:
    from didi_instruct.models.network import Network

Facts = dict[str, Any]

_BUFFERS = ("rotary_emb.inv_freq", "weight_u", "weight_v")
"""Tensors of a discriminator that are no parameters."""
_FIXED = ("inv_freq", "position_ids")
"""Tensors of a masked LM that are no parameters."""
_TIED = ("lm_head", "lm_head.decoder", "predictions.decoder", "vocab_projector")
"""Output layers of a masked LM that may be the embedding once more."""
_LEFT_TO_RIGHT = ("ForCausalLM", "LMHeadModel")
"""Ends of the names of classes that read from left to right."""
_TEXTS, _TOKENS, _RANK = 4, 512, 64
"""Texts, tokens of each at most, and the rank of adapters for which memory is told."""


def describe_architecture(name: str) -> Facts:
    """Facts about a named architecture, without allocating it."""
    config = architecture(name)
    critic = None if config.kind == "ar" else count_parameters(config, build_discriminator)
    return {"architecture": name, **_shape(config, count_parameters(config), critic)}


def describe_source(source: str, weights: WeightSet = "ema", family: Family | None = None) -> Facts:
    """Facts about any SOURCE; a file that holds nothing known is described by its tensors."""
    options, found = LoadOptions(weights=weights, family=family), find_source(source)
    if isinstance(found, PublicCheckpoint):
        causal = _causal_class(found.path)
        return _of_causal(found, causal) if causal else _of_checkpoint(found, options)
    options.refuse_choices(found.name)
    if isinstance(found, AdapterFolder):
        return _of_adapters(found)
    return _of_folder(found) if isinstance(found, DidiFolder) else _of_masked_lm(found)


def _of_folder(found: DidiFolder) -> Facts:
    """Facts about a folder that didi wrote, its files verified."""
    loaded = found.load(LoadOptions())
    network, critic = loaded.model, loaded.discriminator
    parameters = parameters_of(network)
    facts = {
        "architecture": loaded.config.kind,
        **_shape(loaded.config, parameters, None if critic is None else parameters_of(critic)),
    }
    if (record := cast("Network", network).record) is not None:
        facts["never_written"] = len(record.banned)
        itemsize = max(network.parameters(), key=Tensor.numel).itemsize
        facts |= _memory(record.settings, loaded.config, parameters, itemsize)
    facts["layout"] = "didi"
    facts["tokenizer_hash"] = loaded.tokenizer.hash if loaded.tokenizer else None
    facts["provenance"] = loaded.provenance
    return facts


def _of_adapters(found: AdapterFolder) -> Facts:
    """Facts about a base, and the adapters on it."""
    base, manifest = base_of(found.path), read_manifest(found.path)
    facts = describe_source(base)
    numbers = sum(prod(shape) for _, shape in read_headers(found.path / ADAPTER).values())
    settings = found.path / SETTINGS
    return facts | {
        "layout": "didi-adapters",
        "base": base,
        "rank": whole_number(settings, read_object(settings), "r"),
        "trainable_parameters": numbers,
        "provenance": manifest.provenance,
    }


def _of_checkpoint(source: PublicCheckpoint, options: LoadOptions) -> Facts:
    place = locate(source.path)
    store = open_store(place.model)
    try:
        found = recognise(source.path, options.weights, options.family)
    except UserError as error:
        if any(clean(name).endswith(FIRST) for name in store.headers):
            raise  # a network of the family, and something to mend
        return _of_unknown(store, str(error))
    critic = None
    if found.has_discriminator:
        beside = open_store(place.discriminator or place.model)
        keys = find_discriminator(beside).items()
        critic = sum(prod(beside.headers[n].shape) for k, n in keys if not k.endswith(_BUFFERS))
    folder = place.tokenizer_folder
    return {
        "architecture": found.config.kind,
        **_shape(found.config, count_parameters(found.config), critic),
        "layout": found.layout,
        "description": found.description,
        "weights": list(found.weights),
        "dtype": _common_type(store.headers.values()),
        "tokenizer_hash": None if folder is None else Tokenizer.load(folder).hash,
        "provenance": {"source": source.name},
        "notes": list(found.notes),
    }


def _of_masked_lm(source: MaskedLMFolder) -> Facts:
    found = source.found
    headers = open_weights(found).headers
    tied = found.settings.get("tie_word_embeddings", True)
    no_more = (*_FIXED, *(f"{name}.weight" for name in _TIED if tied))
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
        **_shape(found.config, parameters, None),
        **written,
        "layout": found.layout,
        "description": found.description,
        "dtype": _common_type(headers.values()),
        "provenance": {"source": source.name},
        **_memory(found.settings, found.config, parameters, widest.itemsize),
        "notes": notes,
    }


def _causal_class(path: Path) -> str | None:
    """Class of a causal LM of `transformers`, by the config.json of its folder."""
    try:
        names = read_object(path / CONFIG).get("architectures")
    except UserError:
        return None
    known = (n for n in (names if isinstance(names, list) else []) if isinstance(n, str))
    return next((name for name in known if name.endswith(_LEFT_TO_RIGHT)), None)


def _of_causal(source: PublicCheckpoint, name: str) -> Facts:
    """Facts about a model that is no denoiser, but judges the texts of one."""
    headers = WeightFiles(source.path).headers
    notes = ["A causal language model: use it as --judge in didi eval."]
    if is_causal(source.path):
        notes.append("didi finetune --set bidirectional=true makes a denoiser of it.")
    return {
        **_no_shape(name, sum(prod(h.shape) for h in headers.values() if h.is_weight)),
        "dtype": _common_type(headers.values()),
        "provenance": {"source": source.name},
        "notes": notes,
    }


def _of_unknown(store: Store, reason: str) -> Facts:
    """Tensors of a file that is no known model; numbered ones of one shape are one line."""
    kinds: Counter[tuple[str, tuple[int, ...], str]] = Counter(
        (shown(re.sub(r"\d+", "N", name[:120])), header.shape, _type(header))
        for name, header in store.headers.items()
    )
    return {
        **_no_shape("unknown", sum(prod(header.shape) for header in store.headers.values())),
        "notes": [reason],
        "tensors": [
            {"name": name, "shape": list(shape), "dtype": dtype, "count": count}
            for (name, shape, dtype), count in kinds.items()
        ],
        "not_tensors": [f"{shown(name)}: {shown(what)}" for name, what in store.blocked.items()],
        "not_run": [shown(name) for name in store.untouched],
    }


def _shape(config: ModelConfig, parameters: int, critic: int | None) -> Facts:
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
        "schedule": asdict(config.schedule),
        "megabytes_float32": round(parameters * 4 / 2**20),
        "megabytes_bfloat16": round(parameters * 2 / 2**20),
    }


def _no_shape(architecture: str, parameters: int) -> Facts:
    """Keys of every answer, of a model that is none of ours."""
    unknown = "trainable_parameters vocab_size mask_id length discriminator_parameters layout"
    return {
        "architecture": shown(architecture),
        "parameters": parameters,
        **dict.fromkeys(unknown.split()),
    }


def _memory(
    settings: Mapping[str, Any], config: ModelConfig, parameters: int, itemsize: int
) -> dict[str, dict[str, int]]:
    """Bytes of sampling and of distilling a bidirectional causal LM, by part.

    `settings` is its config.json in the words of `transformers`.
    """
    if settings["model_type"] not in CAUSAL:
        return {}
    shape = memory.CausalShape.of(settings, parameters, itemsize)
    texts = {"batch": _TEXTS, "length": min(_TOKENS, config.length)}
    parts = {
        "bytes_sampling": memory.sampling(shape, **texts),
        "bytes_adapters": memory.with_adapters(shape, **texts, rank=_RANK) | {"rank": _RANK},
        "bytes_copies": memory.three_copies(shape, **texts),
    }
    return {name: part | texts for name, part in parts.items()}


def _common_type(headers: Iterable[Header]) -> str | None:
    counts = Counter(map(_type, headers)).most_common(1)
    return counts[0][0] if counts else None


def _type(header: Header) -> str:
    return str(header.dtype).removeprefix("torch.")
