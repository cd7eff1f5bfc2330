"""The weights of a masked LM: one file or several, read by our own readers, never unpickled."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from didi_instruct.errors import UserError
from didi_instruct.models.foreign.places import SUFFIXES, USUAL
from didi_instruct.models.foreign.stores import Header, Store, open_store
from didi_instruct.models.manifest import CONFIG
from didi_instruct.models.masked_families import FoundMaskedLM, name_of
from didi_instruct.models.tensor_files import shown

PREFIX = "model.net."
"""Before the names in checkpoints that DPLM's training writes."""

SHARING = 100
"""Layers that may share one set of weights, as ALBERT's do, in families that are not known here."""

_LAYER = re.compile(r"(?:^|\.)(?:layers?|blocks|h)\.(\d{1,6})\.")


def weight_files(folder: Path) -> list[Path]:
    """Return the files of weights of a folder; safetensors come first."""
    for name in USUAL:
        if (folder / name).is_file():
            return [folder / name]
        if (folder / f"{name}.index.json").is_file():
            return _listed(folder / f"{name}.index.json")
    others = sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES)
    if len(others) != 1:
        several = ", ".join(shown(path.name) for path in others[:3]) or "none"
        raise UserError(
            f"{folder} should hold {' or '.join(USUAL)}, or one other file of weights, but has "
            f"{several}: leave one there."
        )
    return others


def weight_stores(folder: Path) -> list[Store]:
    """Return the headers of all weights of a folder."""
    return [open_store(path) for path in weight_files(folder)]


def headers_of(stores: list[Store]) -> dict[str, Header]:
    """Return the headers of all weights by the names that `transformers` knows."""
    prefix = _prefix(stores)
    return {
        name.removeprefix(prefix): header
        for store in stores
        for name, header in store.headers.items()
        if name.startswith(prefix)
    }


def check_headers(found: FoundMaskedLM, stores: list[Store]) -> None:
    """Refuse a config.json that speaks of another network than the weights beside it.

    It is compared before it decides about memory: a number in it costs nothing to write.
    """
    headers = headers_of(stores)
    if not headers:
        raise UserError(f"{stores[0].path} holds no tensors: fetch it again.")
    problems = "; ".join(_differences(found, headers))
    if problems:
        raise UserError(
            f"{found.path / CONFIG} does not fit the weights beside it: {problems}. Fetch both "
            "again."
        )


def _differences(found: FoundMaskedLM, headers: dict[str, Header]) -> Iterator[str]:
    """Say what differs: exactly for families known here, in others only what is impossible."""
    config, known = found.config, found.family.embedding
    tables = {name: h.shape for name, h in headers.items() if len(h.shape) == 2}
    layers = 1 + max((int(m[1]) for n in headers if (m := _LAYER.search(n))), default=-1)
    embedding = next((s for n, s in tables.items() if known and n.endswith(known)), None)
    rows = max((shape[0] for shape in tables.values()), default=0)
    if embedding is not None:
        rows, width = embedding
        if width != config.hidden:
            yield f"{name_of(found, 'hidden')} is {config.hidden}, its embedding has {width}"
    if rows < config.num_tokens or (embedding is not None and rows != config.num_tokens):
        what = "its embedding has" if embedding is not None else "no table has more than"
        yield f"{name_of(found, 'vocab_size')} is {config.num_tokens}, {what} {rows} rows"
    if layers != config.layers if known else config.layers > max(layers, SHARING):
        yield f"{name_of(found, 'layers')} is {config.layers}, its tensors are of {layers} layers"


def _prefix(stores: list[Store]) -> str:
    return PREFIX if any(n.startswith(PREFIX) for store in stores for n in store.headers) else ""


def read_weights(stores: list[Store], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Return all weights by the names that `transformers` knows.

    They are memory-mapped; `dtype` casts each as it is read, so that the file is never in memory
    as a whole. Tables of frequencies keep their type.
    """
    prefix = _prefix(stores)
    weights = {}
    for store in stores:
        for name, tensor in store.read(n for n in store.headers if n.startswith(prefix)):
            cast = tensor.is_floating_point() and not name.endswith("inv_freq")
            weights[name.removeprefix(prefix)] = tensor.to(dtype if cast else None)
    return weights


def common_dtype(weights: dict[str, Tensor]) -> torch.dtype:
    """Return the type of most of the numbers."""
    counts: Counter[torch.dtype] = Counter()
    for tensor in weights.values():
        if tensor.is_floating_point():
            counts[tensor.dtype] += tensor.numel()
    return counts.most_common(1)[0][0] if counts else torch.float32


def _listed(index: Path) -> list[Path]:
    """Return the files that an index names, all of them in its own folder."""
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        files = [index.with_name(name) for name in names]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{index} does not list files of weights: fetch it again.") from error
    missing = next((path for path in files if not path.is_file()), None)
    if missing is not None or not files:
        raise UserError(f"{index} lists {missing or 'nothing'}, which is not there: fetch it.")
    return files
