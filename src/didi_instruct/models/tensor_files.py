"""Safetensors files: streamed writing, checked headers, shapes compared by name.

Names and values in these files may be anyone's: errors show them as one printable line.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from itertools import accumulate, islice
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from didi_instruct.data.files import AtomicFile
from didi_instruct.errors import UserError

# Types a weight may have on disk, by their safetensors names.
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16",
}  # fmt: skip
# Foreign models keep a few counters beside their weights.
_WRITABLE = DTYPES | {
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
MAX_SHOWN = 80  # characters of a name or a value that an error shows
MAX_LISTED = 3  # names that an error lists; the rest are counted
ALIGNMENT = 64  # bytes to which torch aligns the tensors it allocates on the CPU
NUMBERS_AT_ONCE = 16 << 20  # read between two openings of a file

Shapes = Mapping[str, tuple[int, ...]]
Headers = dict[str, tuple[str, tuple[int, ...]]]  # safetensors type and shape of each tensor
Watch = Callable[[int, int], None]  # called with the bytes written so far and in all
_watch: ContextVar[Watch | None] = ContextVar("watch", default=None)


def shown(text: str, most: int = MAX_SHOWN) -> str:
    """Return one printable line: no line breaks, escape sequences or lone surrogates."""
    if len(text) > most:
        text = text[: most - 1] + "…"
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def shown_value(value: Any) -> str:
    """Return the `repr` of a value of a foreign file as one printable line."""
    try:
        return shown(repr(value))
    except (ValueError, RecursionError):  # an integer of too many digits, a list nested too deeply
        return f"a {type(value).__name__} that is too large to show"


def first_few(names: Collection[str], show: Callable[[str], str] = shown) -> str:
    """List the first names and count the rest."""
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(map(show, islice(names, MAX_LISTED))) + more


@contextmanager
def watching(watch: Watch | None) -> Iterator[None]:
    """Report the progress of every file that `write_tensors` writes meanwhile."""
    token = _watch.set(watch)
    try:
        yield
    finally:
        _watch.reset(token)


def write_tensors(
    write: Callable[[bytes | memoryview], None], tensors: Mapping[str, Tensor]
) -> tuple[int, str]:
    """Pass a safetensors file to `write`, one tensor at a time; return its size and SHA-256.

    Memory-mapped weights that are aligned like allocated ones give bit-identical products. The
    format allows no gaps, so tensors that would shift the others come last, wide types first.
    """
    names = sorted(
        tensors,
        key=lambda n: (tensors[n].nbytes % ALIGNMENT != 0, -tensors[n].element_size(), n),
    )
    ends = dict(zip(names, accumulate(tensors[name].nbytes for name in names), strict=True))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for name, end in ends.items():
        tensor = tensors[name]
        header[name] = {
            "dtype": _WRITABLE[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [end - tensor.nbytes, end],
        }
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-(8 + len(encoded)) % ALIGNMENT)
    start = len(encoded).to_bytes(8, "little") + encoded
    total = max(ends.values(), default=0)

    digest = hashlib.sha256(start)
    write(start)
    watch = _watch.get()
    for name, end in ends.items():
        data = tensors[name].detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
        digest.update(data)
        write(data)
        if watch is not None:
            watch(end, total)
    return len(start) + total, digest.hexdigest()


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file that is there whole or not at all."""
    file = AtomicFile(path)
    try:
        write_tensors(file.write, tensors)
        file.commit()
    finally:
        file.discard()


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        reason = shown(str(error), 200)
        raise UserError(f"{path} is not a readable safetensors file: {reason}.") from error


def read_headers(path: Path, also: Collection[str] = ()) -> Headers:
    """Read type and shape of every tensor; types other than floats and `also` are refused."""
    headers = {}
    with _opened(path) as file:
        for name in file.keys():  # noqa: SIM118 (a method of the file, not of a dict)
            part = file.get_slice(name)
            dtype = part.get_dtype()
            if dtype not in (*DTYPES.values(), *also):
                raise UserError(f"{path}: {shown(name)} holds {dtype}, not real numbers.")
            headers[name] = (dtype, tuple(part.get_shape()))
    return headers


def read_tensors(path: Path, shapes: Shapes) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors on the CPU, memory-mapped, in the order of `shapes`.

    A file is mapped as a whole, and its pages count as memory until the last of its tensors is
    gone. Opened anew now and then, a file and a cast copy of it are never both in memory.
    """
    read = NUMBERS_AT_ONCE
    with ExitStack() as opened:
        for name, shape in shapes.items():
            if read >= NUMBERS_AT_ONCE:
                opened.close()
                file, read = opened.enter_context(_opened(path)), 0
            yield name, file.get_tensor(name)
            read += prod(shape)


def check_shapes(path: Path, found: Shapes, expected: Shapes, wanted: str) -> None:
    """Refuse missing, unexpected and misshapen tensors; `wanted` describes the network."""

    def misshapen(name: str) -> str:
        return f"{shown(name)} {shown_value(found[name])} for {expected[name]}"

    differ = [n for n in expected if n in found and found[n] != expected[n]]
    kinds = (
        ("missing", [n for n in expected if n not in found], shown),
        ("unexpected", [n for n in found if n not in expected], shown),
        ("of the wrong shape", differ, misshapen),
    )
    problems = [
        f"{len(names)} tensor{'' if len(names) == 1 else 's'} {what} ({first_few(names, show)})"
        for what, names, show in kinds
        if names
    ]
    if problems:
        raise UserError(f"{path}: {'; '.join(problems)}. Wanted: {wanted}.")
