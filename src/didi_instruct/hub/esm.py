"""ESM-2 models (DPLM) as a folder that `transformers` reads: tensors copied bit by bit.

The weights never become a network on the way, so nothing can be lost: not a type, not a tensor that
our own code has no use for. DPLM's training checkpoints have `model.net.` before every name.
"""

import shutil
from pathlib import Path

from torch import Tensor

from didi_instruct.data.files import (
    no_space_as_user_error,
    require_space,
)
from didi_instruct.errors import UserError
from didi_instruct.models.checkpoint import CONFIG, MODEL
from didi_instruct.models.foreign.folders import new_folder
from didi_instruct.models.masked_lm import recognise_masked_lm
from didi_instruct.models.native import WeightFiles
from didi_instruct.models.tensor_files import save_tensors, shown

PARTS = ("esm.", "lm_head.")
BESIDE = (
    CONFIG,
    "vocab.txt",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
)
"""Copied as they are, where they exist."""


def copy_esm(source: Path, folder: Path) -> Path:
    """Write the ESM-2 model of a folder to another, which does not exist yet or is empty."""
    found = recognise_masked_lm(source)
    kind = None if found is None else found.model_type
    if kind != "esm":
        raise UserError(
            f"{source} is `{kind}`, and `esm` holds ESM-2 models alone: copy the folder."
        )
    weights = WeightFiles(source).read()
    tensors = {name: tensor for name, tensor in weights.items() if name.startswith(PARTS)}
    if not all(any(name.startswith(part) for name in tensors) for part in PARTS):
        raise UserError(
            f"{source} is no whole ESM-2 masked LM: it needs tensors `esm.`, `lm_head.`."
        )
    odd = next((n for n, t in tensors.items() if not _is_plain(t)), None)
    if odd is not None:
        raise UserError(
            f"{source}: {shown(odd)} holds {tensors[odd].dtype}, which cannot be copied: cast the "
            "weights to float16 or wider first."
        )
    with no_space_as_user_error(folder):
        require_space(folder, sum(tensor.nbytes for tensor in tensors.values()))
        _write(source, folder, tensors)
    return folder


def _is_plain(tensor: Tensor) -> bool:
    """Whether its numbers are of a type that we write: whole, or real with 16 bits or more."""
    if tensor.is_floating_point():
        return tensor.itemsize > 1
    return not tensor.is_complex() and not tensor.is_quantized


def _write(source: Path, folder: Path, tensors: dict[str, Tensor]) -> None:
    with new_folder(folder) as hidden:
        save_tensors(hidden / MODEL, tensors)
        for name in BESIDE:
            if (source / name).is_file():
                shutil.copyfile(source / name, hidden / name)
