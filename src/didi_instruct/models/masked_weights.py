"""The weights of a masked LM: one file or several, read by our own readers, never unpickled."""

import json
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

from didi_instruct.errors import UserError
from didi_instruct.models.foreign.places import SUFFIXES, USUAL
from didi_instruct.models.foreign.stores import Store, open_store

PREFIX = "model.net."
"""Before the names in checkpoints that DPLM's training writes."""


def weight_files(folder: Path) -> list[Path]:
    """Return the files of weights of a folder; safetensors come first."""
    for name in USUAL:
        if (folder / name).is_file():
            return [folder / name]
        if (folder / f"{name}.index.json").is_file():
            return _listed(folder / f"{name}.index.json")
    others = sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES)
    if len(others) != 1:
        several = ", ".join(path.name for path in others[:3]) or "none"
        raise UserError(
            f"{folder} should hold {' or '.join(USUAL)}, or one other file of weights, but has "
            f"{several}: leave one there."
        )
    return others


def weight_stores(folder: Path) -> list[Store]:
    """Return the headers of all weights of a folder."""
    return [open_store(path) for path in weight_files(folder)]


def read_weights(stores: list[Store], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Return all weights by the names that `transformers` knows.

    They are memory-mapped; `dtype` casts each as it is read, so that the file is never in memory
    as a whole. Tables of frequencies keep their type.
    """
    names = [name for store in stores for name in store.headers]
    prefix = PREFIX if any(name.startswith(PREFIX) for name in names) else ""
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
