"""Weights stored in fewer bytes than they are used in: bfloat16, or int8 with a scale per row.

`storage` in config.json says how. An int8 matrix `name` stands beside `name.scale`, one float32
per row; a network gets their product. Vectors, small matrices and buffers cost next to nothing and
keep their type. Which matrices are int8 is read from the file, not assumed.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Literal, cast, get_args

import torch
from torch import Tensor

from didi_instruct.errors import UserError
from didi_instruct.models.tensor_files import read_headers, read_tensors, shown

Storage = Literal["float32", "bfloat16", "int8"]
"""Type of the parameters in a file; all are read into float32, or into what is asked for."""
SCALE = ".scale"
LARGEST = 127
SMALLEST_MATRIX = 4096  # with fewer numbers, int8 saves too little to lose precision for
CLIPS = (0.7, 1.0, 31)  # tried for a row: from, up to (as part of its largest number), how many


def check_storage(storage: str) -> Storage:
    """Return the storage of that name, or refuse it."""
    if storage not in get_args(Storage):
        raise UserError(f"storage is `{storage}`: use one of {', '.join(get_args(Storage))}.")
    return cast("Storage", storage)


def pack(
    tensors: Mapping[str, Tensor], parameters: Collection[str], storage: Storage | None
) -> dict[str, Tensor]:
    """Return the tensors to write; `parameters` are stored as `storage`, buffers as they are."""
    packed = dict(tensors)
    for name in parameters if storage is not None else ():
        tensor = tensors[name]
        if storage == "int8" and tensor.ndim == 2 and tensor.numel() >= SMALLEST_MATRIX:
            if not tensor.isfinite().all():
                raise UserError(f"{name} holds numbers that are not finite: int8 has none such.")
            packed[name], packed[name + SCALE] = quantise(tensor.float())
        else:
            packed[name] = tensor.to(torch.bfloat16 if storage == "bfloat16" else torch.float32)
    return packed


def quantise(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Round a matrix (R, C) to int8 by least squares; return it and the scale of each row (R,).

    Each row is clipped at several places and rounded; each result gets the scale that fits it
    best, and the nearest to the row is kept.
    """
    largest = matrix.abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny)
    rows = matrix / largest[:, None]
    scale = torch.zeros_like(largest)
    numbers = torch.zeros(rows.shape, dtype=torch.int8, device=rows.device)
    least = torch.full_like(largest, torch.inf)
    for clip in torch.linspace(*CLIPS).tolist():
        tried = (rows * (LARGEST / clip)).round().clamp(-LARGEST, LARGEST)
        fitted = (rows * tried).sum(1) / tried.square().sum(1).clamp(min=1)
        error = (rows - tried * fitted[:, None]).square().sum(1)
        better = error < least
        least = torch.where(better, error, least)
        scale = torch.where(better, fitted * largest, scale)
        numbers = torch.where(better[:, None], tried.to(torch.int8), numbers)
    return numbers, scale


class StoredWeights:
    """A file of weights whose header has been read and checked; tensors are read on demand."""

    def __init__(self, path: Path, storage: Storage | None) -> None:
        self.path, self.storage = path, storage
        headers = read_headers(path, also=("I8",) if storage == "int8" else ())
        self.shapes = {name: shape for name, (_, shape) in headers.items()}
        self._scales: dict[str, tuple[int, ...]] = {}
        for name, (dtype, shape) in headers.items():
            if dtype != "I8":
                continue
            if len(shape) != 2 or headers.get(name + SCALE) != ("F32", shape[:1]):
                raise UserError(
                    f"{path}: {shown(name)} has 8 bits without a scale (float32) for each row: "
                    "fetch the file again, or write it with `didi convert --storage int8`."
                )
            self._scales[name + SCALE] = self.shapes.pop(name + SCALE)

    def read(
        self, device: torch.device | str, dtype: torch.dtype | None, keep: Collection[str] = ()
    ) -> dict[str, Tensor]:
        """Read all tensors: memory-mapped on the CPU, copied only to change device or type.

        `dtype` None is float32 where there is a `storage`, else each tensor's own type. Names in
        `keep` are not cast.
        """
        if dtype is None and self.storage is not None:
            dtype = torch.float32
        scales = dict(read_tensors(self.path, self._scales))
        tensors: dict[str, Tensor] = {}
        for name, tensor in read_tensors(self.path, self.shapes):
            if (scale := scales.get(name + SCALE)) is not None:
                tensor = tensor.to(device).float().mul_(scale.to(device)[:, None])
            tensors[name] = tensor.to(device, None if name in keep else dtype)
        return tensors
