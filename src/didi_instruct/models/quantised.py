"""Weights kept in fewer bytes than they are used in: bfloat16, or 8 bits with a scale per row.

`storage` in config.json says how. A matrix `name` of 8-bit numbers stands beside `name.scale`, one
float32 per row; what a network gets is their product. Vectors, small matrices and buffers cost
next to nothing and keep their type. Which matrices are 8-bit is read from the file, not assumed.
"""

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from didi_instruct.errors import UserError
from didi_instruct.models.tensor_files import (
    Headers,
    in_groups,
    open_tensors,
    read_headers,
    read_shapes,
    read_tensors,
    shown,
)

Storage = Literal["float32", "bfloat16", "int8"]
"""How parameters are kept in a file; all of them are read into float32, or what is asked for."""

STORAGES: tuple[Storage, ...] = get_args(Storage)
SCALE = ".scale"
LARGEST = 127
"""Of an 8-bit number, on both sides of zero."""

SMALLEST_MATRIX = 4096
"""Numbers of a matrix below which 8 bits save too little to lose anything for."""

TIGHTEST, TRIES = 0.7, 31
"""Clipping tried for a row: from this part of its largest number up to all of it."""


def check_storage(storage: str) -> Storage:
    """Return a word that says how to store weights, or refuse it."""
    for known in STORAGES:
        if storage == known:
            return known
    raise UserError(f"storage is `{storage}`: use one of {', '.join(STORAGES)}.")


def pack(
    tensors: Mapping[str, Tensor], parameters: Collection[str], storage: Storage
) -> dict[str, Tensor]:
    """Return what is written for some tensors; those that are no parameters stay as they are."""
    packed = {}
    for name, tensor in tensors.items():
        if name not in parameters:
            packed[name] = tensor
        elif storage == "int8" and tensor.ndim == 2 and tensor.numel() >= SMALLEST_MATRIX:
            if not tensor.isfinite().all():
                raise UserError(f"{name} holds numbers that are not finite: int8 has none such.")
            packed[name], packed[name + SCALE] = quantise(tensor.float())
        else:
            packed[name] = tensor.to(torch.bfloat16 if storage == "bfloat16" else torch.float32)
    return packed


def quantise(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Round a matrix (R, C) to 8 bits; return the numbers and the scale of each row, (R,).

    Least squares: of some places to clip a row at, and with the best scale for the whole numbers
    that each gives, the one that is nearest to the row.
    """
    largest = matrix.abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny)
    rows = matrix / largest[:, None]
    scale = torch.zeros_like(largest)
    numbers = torch.zeros(rows.shape, dtype=torch.int8, device=rows.device)
    least = torch.full_like(largest, torch.inf)
    for clip in torch.linspace(TIGHTEST, 1.0, TRIES).tolist():
        tried = (rows * (LARGEST / clip)).round().clamp(-LARGEST, LARGEST)
        fitted = (rows * tried).sum(1) / tried.square().sum(1).clamp(min=1)
        error = (rows - tried * fitted[:, None]).square().sum(1)
        better = error < least
        least = torch.where(better, error, least)
        scale = torch.where(better, fitted * largest, scale)
        numbers = torch.where(better[:, None], tried.to(torch.int8), numbers)
    return numbers, scale


def stored_shapes(path: Path, storage: Storage | None) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors that `read_stored` returns, from the header alone."""
    if storage != "int8":
        return read_shapes(path)
    headers = read_headers(path, also=("I8",))
    scales = _scales(path, headers)
    return {name: shape for name, (_, shape) in headers.items() if name not in scales}


def read_stored(
    path: Path,
    storage: Storage | None,
    device: torch.device | str,
    dtype: torch.dtype | None,
    keep: Iterable[str] = (),
) -> dict[str, Tensor]:
    """Return all tensors of a file as a network wants them; `dtype` and `keep` as `read_tensors`.

    Without a `storage` the file's own types are the network's, and nothing is copied.
    """
    if storage is None:
        return read_tensors(path, device, dtype, keep)
    to = torch.float32 if dtype is None else dtype
    if storage != "int8":
        return read_tensors(path, device, to, keep)
    kept = set(keep)
    headers = read_headers(path, also=("I8",))
    scales = _scales(path, headers)
    tensors = {}
    for names in in_groups(stored_shapes(path, storage)):
        with open_tensors(path) as file:
            for name in names:
                tensor = file.get_tensor(name).to(device)
                if name + SCALE in scales:
                    scale = file.get_tensor(name + SCALE).to(device)
                    tensor = tensor.to(torch.float32).mul_(scale[:, None])
                tensors[name] = tensor if name in kept else tensor.to(to)
    return tensors


def _scales(path: Path, headers: Headers) -> set[str]:
    """Names of the scales, after checking that each 8-bit matrix has its own."""
    found = set()
    for name, (dtype, shape) in headers.items():
        if dtype != "I8":
            continue
        if len(shape) != 2 or headers.get(name + SCALE) != ("F32", shape[:1]):
            raise UserError(
                f"{path}: {shown(name)} has 8 bits without a scale (float32) for each row: "
                "fetch the file again, or write it with `didi convert --storage int8`."
            )
        found.add(name + SCALE)
    return found
