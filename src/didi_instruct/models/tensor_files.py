"""Tensor files: writing safetensors as a stream, reading headers, telling architectures apart."""

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from didi_instruct.config.model import ARCHITECTURES
from didi_instruct.errors import UserError

LONGEST = 80
"""Characters of a name or a value that are shown."""

LISTED = 3
"""Tensors named in an error before the rest is only counted."""


def shown(text: str, most: int = LONGEST) -> str:
    """Return one printable line: no line breaks, escape sequences or halves of characters."""
    if len(text) > most:
        text = text[: most - 1] + "…"
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def shown_value(value: Any, most: int = LONGEST) -> str:
    """Return a value of a foreign file as Python writes it, on one printable line."""
    try:
        return shown(repr(value), most)
    except (ValueError, RecursionError):  # a number of too many digits, a list without a bottom
        return f"a {type(value).__name__} that is too large to show"


def first_few(names: Collection[str], show: Callable[[str], str] = shown) -> str:
    """Name a few of many, and count the rest."""
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(map(show, islice(names, LISTED))) + more


DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
}
"""Types a weight may have on disk, by their safetensors names."""

_ON_DISK = DTYPES | {
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Types that can be written: foreign models keep a few counters beside their weights."""

ALIGNMENT = 64
"""Bytes to which torch aligns the tensors it allocates on the CPU."""

NUMBERS_AT_ONCE = 16 << 20
"""Read between two openings of a file."""

Shapes = Mapping[str, tuple[int, ...]]
Headers = Mapping[str, tuple[str, tuple[int, ...]]]
"""Of each tensor its type, by its safetensors name, and its shape."""


Watch = Callable[[int, int], None]
"""Sees how many bytes of how many are written."""

_watch: ContextVar[Watch | None] = ContextVar("watch", default=None)


@contextmanager
def watching(watch: Watch | None) -> Iterator[None]:
    """Tell `watch` of all tensors written meanwhile, whoever writes them, file by file."""
    token = _watch.set(watch)
    try:
        yield
    finally:
        _watch.reset(token)


def write_tensors(
    write: Callable[[bytes | memoryview], None], tensors: Mapping[str, Tensor]
) -> tuple[int, str]:
    """Pass a safetensors file to `write`, tensor by tensor; return its size and SHA-256.

    One tensor at a time is in memory as bytes, and a full disk is met as the OSError it is.
    """
    digest = hashlib.sha256()

    def put(data: bytes | memoryview) -> None:
        digest.update(data)
        write(data)

    # Memory-mapped weights that are aligned like allocated ones give the same products to the bit;
    # the format allows no gaps, so tensors that would shift the others come last, wide types first.
    names = sorted(
        tensors,
        key=lambda name: (
            tensors[name].nbytes % ALIGNMENT != 0,
            -tensors[name].element_size(),
            name,
        ),
    )
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in names:
        tensor, end = tensors[name], offset + tensors[name].nbytes
        header[name] = {
            "dtype": _ON_DISK[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-(8 + len(encoded)) % ALIGNMENT)
    put(len(encoded).to_bytes(8, "little"))
    put(encoded)
    watch = _watch.get()
    for name in names:
        flat = tensors[name].detach().cpu().contiguous().view(-1)
        put(flat.view(torch.uint8).numpy().data)
        if watch is not None:
            watch(header[name]["data_offsets"][1], offset)
    return 8 + len(encoded) + offset, digest.hexdigest()


def read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of a safetensors file, from its header alone."""
    return {name: shape for name, (_, shape) in read_headers(path).items()}


def read_headers(path: Path, also: Collection[str] = ()) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Type and shape of every tensor; only real numbers are taken, and the types in `also`."""
    headers = {}
    with open_tensors(path) as file:
        for name in file.keys():  # noqa: SIM118 (a method of the file, not of a dict)
            part = file.get_slice(name)
            dtype = part.get_dtype()
            if dtype not in (*DTYPES.values(), *also):
                raise UserError(f"{path}: {shown(name)} holds {dtype}, not real numbers.")
            headers[name] = (dtype, tuple(part.get_shape()))
    return headers


@contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """Open a safetensors file; one that cannot be read is the user's to mend."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{path} is not a readable safetensors file: {shown(str(error), 200)}."
        ) from error


def read_tensors(
    path: Path, device: torch.device | str, dtype: torch.dtype | None, keep: Iterable[str] = ()
) -> dict[str, Tensor]:
    """Return all tensors: memory-mapped on the CPU, and copied only to change device or type.

    `dtype` does not apply to the names in `keep`. A file is mapped as a whole, and its pages count
    as memory until the last of its tensors is gone. So it is opened again now and then: what was
    cast is let go, and never are both all of the file and all of the copies in memory.
    """
    kept = set(keep)
    tensors: dict[str, Tensor] = {}
    for names in in_groups(read_shapes(path)):
        with open_tensors(path) as file:
            for name in names:
                to = None if name in kept else dtype
                tensors[name] = file.get_tensor(name).to(device, to)
    return tensors


def in_groups(shapes: Shapes) -> Iterator[list[str]]:
    """Names of tensors, as many at a time as may be in memory twice."""
    group: list[str] = []
    size = 0
    for name, shape in shapes.items():
        group.append(name)
        size += prod(shape)
        if size >= NUMBERS_AT_ONCE:
            yield group
            group, size = [], 0
    yield group


@dataclass(frozen=True)
class Inferred:
    """What the shapes of a checkpoint's tensors say about the network they belong to."""

    role: str
    """`denoiser`, `discriminator` or `left-to-right model`."""
    layers: int
    hidden: int
    vocab_size: int
    cond_dim: int | None
    prefix: str
    """What precedes the core keys (docs/foreign.md)."""

    def __str__(self) -> str:
        """Describe it for an error message."""
        text = (
            f"a {self.role} with {self.layers} layers, hidden {self.hidden}, "
            f"vocab_size {self.vocab_size}"
        )
        shape = (self.layers, self.hidden, self.vocab_size)
        for name, known in ARCHITECTURES.items():
            if shape == (known.layers, known.hidden, known.vocab_size):
                text += f" (`{name}`)"
        return text + (f" under the prefix `{shown(self.prefix)}`" if self.prefix else "")


def infer(shapes: Shapes) -> Inferred | None:
    """Recognise the core keys (docs/foreign.md), under any prefix, by the tensors' shapes."""
    embeddings = [n for n in shapes if n.endswith("vocab_embed.embedding")]
    if not embeddings or len(shapes[embeddings[0]]) != 2:
        return None
    prefix = embeddings[0].removesuffix("vocab_embed.embedding")
    vocab_size, hidden = shapes[embeddings[0]]
    own = {n.removeprefix(prefix): s for n, s in shapes.items() if n.startswith(prefix)}
    numbers = [int(m[1]) for n in own if (m := re.match(r"blocks\.(\d{1,6})\.", n))]
    if any(n.startswith("output_layer.main.") for n in own):
        role = "discriminator"
    else:
        role = "denoiser" if "sigma_map.mlp.0.weight" in own else "left-to-right model"
    return Inferred(
        role=role,
        layers=max(numbers, default=-1) + 1,
        hidden=hidden,
        vocab_size=vocab_size,
        cond_dim=next(iter(own.get("sigma_map.mlp.0.weight", ())), None),
        prefix=prefix,
    )


def describe(shapes: Shapes) -> str:
    """Say in words which network some tensors look like."""
    inferred = infer(shapes)
    if inferred is not None:
        return str(inferred)
    if any("esm." in name or "lm_head." in name for name in shapes):
        return "an ESM-2 (DPLM) model"
    return "no network known here"


def check_shapes(path: Path, found: Shapes, expected: Shapes, wanted: str) -> None:
    """Refuse tensors that are not exactly those expected, naming what is wrong."""
    shared = [n for n in expected if n in found]
    problems = [
        _listed([n for n in expected if n not in found], "missing"),
        _listed([n for n in found if n not in expected], "unexpected"),
        _listed(
            [n for n in shared if found[n] != expected[n]],
            "of the wrong shape",
            lambda n: f"{shown(n)} {shown_value(found[n])} for {expected[n]}",
        ),
    ]
    if any(problems):
        raise UserError(
            f"{path}: {'; '.join(p for p in problems if p)}. "
            f"Wanted: {wanted}; the tensors look like {describe(found)}."
        )


def _listed(names: list[str], what: str, show: Callable[[str], str] = shown) -> str:
    if not names:
        return ""
    plural = "" if len(names) == 1 else "s"
    return f"{len(names)} tensor{plural} {what} ({first_few(names, show)})"
