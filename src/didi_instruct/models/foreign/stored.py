"""Contents of a torch file's pickle: tensors not read yet, and notes of what was not run."""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from didi_instruct.models.foreign.archive import Archive
from didi_instruct.models.tensor_files import shown

_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "UntypedStorage": torch.uint8,
}
_TYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *_STORAGES.values(),
        *(torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2),
    )
}
_LARGEST = 1 << 48
"""No tensor has a dimension of this size; a product of a few such numbers is still cheap."""

MAX_TEXT = 4096
MAX_PARTS = 8
MAX_NUMBER = 1 << 60
"""Of keys: characters of a text, texts of a tuple, size of a number."""


class RefusedError(Exception):
    """Raised where a pickle is damaged or hostile; the message says how."""


@dataclass(frozen=True, eq=False)
class Inert:
    """A class or function that a pickle names, or (`called`) what a call of it would have made."""

    module: str
    name: str
    called: bool = False

    def __str__(self) -> str:
        """Name it on one line, in at most 80 characters."""
        return shown(f"{self.module[:80]}.{self.name[:80]}")

    def result(self) -> "Inert":
        """Return the note that stands for what a call would have made."""
        return Inert(self.module, self.name, called=True)


REPEATED = Inert("torch.Tensor", "expand", called=True)
"""A view whose elements share places: larger than its file may be, and wrong once written to."""


@dataclass(frozen=True, eq=False)
class Storage:
    """Numbers of one type in the archive."""

    key: str
    dtype: torch.dtype
    numel: int


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor of the file, not read yet; sizes and strides were checked against its storage."""

    key: str
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def read(self, archive: Archive) -> Tensor:
        """Return a view of the file, without copying (unless the file is not aligned)."""
        if 0 in self.shape:
            return torch.empty(self.shape, dtype=self.dtype)
        last = sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))
        raw = archive.storage(self.key, (self.offset + last + 1) * self.dtype.itemsize)
        if not archive.is_aligned(self.key, self.dtype.itemsize):
            raw = raw.clone()
        return raw.view(self.dtype).as_strided(self.shape, self.stride, self.offset)


def storage_of(pid: Any, sizes: dict[str, int]) -> Storage | Inert:
    """Turn a persistent id, which is how torch points to a storage, into a `Storage`.

    `sizes` has the bytes of every storage in the file.
    """
    if not isinstance(pid, tuple) or len(pid) != 5 or pid[0] != "storage":
        raise RefusedError("its pickle has a persistent id that is no storage")
    _, kind, key, _, numel = pid
    if not isinstance(kind, Inert) or type(key) is not str or type(numel) is not int:
        raise RefusedError("its pickle has a malformed storage")
    dtype = _STORAGES.get(kind.name) if kind.module.partition(".")[0] == "torch" else None
    if dtype is None:
        return kind.result()
    if key not in sizes:
        raise RefusedError(f"storage {key[:20]!r} is not in the file")
    if not 0 <= numel * dtype.itemsize <= sizes[key]:
        raise RefusedError(f"storage {key[:20]!r} is said to be larger than the file's")
    return Storage(key, dtype, numel)


def _tensor(function: Inert, arguments: tuple[Any, ...]) -> StoredTensor | Inert:
    """`_rebuild_tensor` and its successors: storage, offset, size, stride and more."""
    storage, offset, shape, stride = arguments[:4]
    if not isinstance(storage, Storage):  # of a type that no weight has
        return function.result()
    dtype, numel = storage.dtype, storage.numel
    if function.name == "_rebuild_tensor_v3":
        kind = arguments[6]
        if not isinstance(kind, Inert) or kind.module != "torch" or kind.name not in _TYPES:
            return function.result()
        dtype = _TYPES[kind.name]
        numel = numel * storage.dtype.itemsize // dtype.itemsize
    _check_view(offset, shape, stride, numel)
    if _repeats(shape, stride):
        return REPEATED
    return StoredTensor(storage.key, dtype, offset, shape, stride)


def _check_view(offset: Any, shape: Any, stride: Any, numel: int) -> None:
    """Refuse a view that reaches outside its storage."""
    if type(shape) is not tuple or type(stride) is not tuple or len(shape) != len(stride):
        raise RefusedError("a tensor has a malformed shape")
    numbers = (offset, *shape, *stride)
    if len(shape) > 64 or any(type(n) is not int or not 0 <= n < _LARGEST for n in numbers):
        raise RefusedError("a tensor has a negative or absurd offset, size or stride")
    last = sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    if 0 in shape:
        if prod(n for n in shape if n) >= _LARGEST:
            raise RefusedError(f"a tensor has no elements and the absurd shape {shape[:8]}")
    elif offset + last >= numel:
        raise RefusedError(f"a tensor of shape {shape[:8]} reaches outside its storage")


def _repeats(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Return True if elements of a view share a place, as after `expand`.

    None do if every stride is longer than all that the shorter ones reach.
    """
    reach = 0
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size > 1 and 0 not in shape:
            if step <= reach:
                return True
            reach += (size - 1) * step
    return False


def _first(_: Inert, arguments: tuple[Any, ...]) -> Any:
    """`_rebuild_parameter` and the like: the tensor comes first."""
    return arguments[0]


def _typed(function: Inert, arguments: tuple[Any, ...]) -> Any:
    """`_rebuild_from_type_v2`: a rebuilder, a subclass, the rebuilder's arguments, attributes."""
    rebuilder, _, inner, _ = arguments
    known = CALLS.get((rebuilder.module, rebuilder.name)) if type(rebuilder) is Inert else None
    if known is None or known not in (_tensor, _first) or type(inner) is not tuple:
        return function.result()
    return known(rebuilder, inner)


def _ordered(_: Inert, arguments: tuple[Any, ...]) -> dict[Any, Any]:
    pairs = arguments[0] if arguments else []
    if not isinstance(pairs, list) or any(len(pair) != 2 for pair in pairs):
        raise TypeError
    return {cheap_key(key): value for key, value in pairs}


def _members(_: Inert, arguments: tuple[Any, ...]) -> set[Any]:
    members = arguments[0] if arguments else []
    if not isinstance(members, list):
        raise TypeError
    return {cheap_key(member) for member in members}


def _frozen_members(function: Inert, arguments: tuple[Any, ...]) -> frozenset[Any]:
    return frozenset(_members(function, arguments))


def cheap_key(key: Any) -> Any:
    """Return a key that is cheap to hash and to compare; anything else becomes a note.

    A pickle names a key once and uses it millions of times: a long tuple or number would be hashed
    each time, a long text compared. Whole numbers from 2^61 - 1 on, and tuples of numbers, can be
    chosen to have one hash all, and a dictionary of such keys takes the square of their number.
    """
    if type(key) is tuple:
        is_cheap = len(key) <= MAX_PARTS and all(type(p) in (str, bytes) for p in key)
        is_cheap = is_cheap and all(len(p) <= MAX_TEXT for p in key)
    elif type(key) in (str, bytes):
        is_cheap = len(key) <= MAX_TEXT
    elif type(key) is int:
        is_cheap = abs(key) < MAX_NUMBER
    else:
        is_cheap = key is None or type(key) in (bool, float, Inert, StoredTensor)
    return key if is_cheap else Inert("", "key")


CALLS: dict[tuple[str, str], Callable[[Inert, tuple[Any, ...]], Any]] = {
    ("torch._utils", "_rebuild_tensor"): _tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor,
    ("torch._utils", "_rebuild_parameter"): _first,
    ("torch._utils", "_rebuild_parameter_with_state"): _first,
    ("torch._tensor", "_rebuild_from_type_v2"): _typed,
    ("collections", "OrderedDict"): _ordered,
    ("builtins", "set"): _members,
    ("__builtin__", "set"): _members,
    ("builtins", "frozenset"): _frozen_members,
    ("__builtin__", "frozenset"): _frozen_members,
}
"""What a pickle may call, and what happens instead."""
