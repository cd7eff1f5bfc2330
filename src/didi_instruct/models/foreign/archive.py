"""The zip file that `torch.save` writes: where each storage lies, and views without copies."""

import itertools
import mmap
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from didi_instruct.errors import UserError
from didi_instruct.models.tensor_files import shown

MAX_PICKLE = 64 << 20
"""Bytes of structure that are worth reading; the weights are not in the pickle."""

_LEGACY = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_ENCRYPTED = 1


@dataclass(frozen=True)
class Extent:
    """Extent of an entry's content in the file."""

    start: int
    size: int


class Archive:
    """The entries of a torch file, checked against each other and against the file's size."""

    def __init__(self, path: Path) -> None:
        self.path = path
        _refuse_other_formats(path)
        entries = _extents(path)
        pickles = [name for name in entries if name.endswith("/data.pkl")]
        if len(pickles) != 1 or any(name.endswith("/constants.pkl") for name in entries):
            what = "a TorchScript program" if pickles else "a zip file without data.pkl"
            if len(pickles) > 1:
                what = f"a zip file with {len(pickles)} data.pkl"
            raise UserError(
                f"{path} is {what}, not a checkpoint: give a file that `torch.save` wrote."
            )
        root = pickles[0].removesuffix("data.pkl")
        self._pickle = entries[pickles[0]]
        self.storages = {
            name.removeprefix(f"{root}data/"): extent
            for name, extent in entries.items()
            if name.startswith(f"{root}data/")
        }
        """Extent of each storage, by its key."""
        order = entries.get(f"{root}byteorder")
        if order is not None and self._bytes(Extent(order.start, min(order.size, 16))) != b"little":
            raise UserError(
                f"{path} was saved on a big-endian machine: load it there and save it as "
                "safetensors."
            )

    def pickle(self) -> bytes:
        """Return the pickle that says what the storages are."""
        if self._pickle.size > MAX_PICKLE:
            raise UserError(
                f"{self.path}: its pickle has {self._pickle.size} bytes, more than any checkpoint "
                "needs for names and shapes: save the weights alone, as safetensors."
            )
        return self._bytes(self._pickle)

    def storage(self, key: str, num_bytes: int) -> Tensor:
        """Return the first bytes of a storage, uint8 (num_bytes,): mapped, copied when written to.

        Each storage has a map of its own, so what is dropped is unmapped, and a copy of one tensor
        is not a copy of the file.
        """
        extent = self.storages[key]
        assert 0 <= num_bytes <= extent.size
        if num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        skip = extent.start % mmap.ALLOCATIONGRANULARITY
        with self.path.open("rb") as file:
            pages = mmap.mmap(
                file.fileno(), skip + num_bytes, access=mmap.ACCESS_COPY, offset=extent.start - skip
            )
        return torch.frombuffer(pages, dtype=torch.uint8, count=num_bytes, offset=skip)

    def is_aligned(self, key: str, item_size: int) -> bool:
        """Return True if numbers of that size can be read where the storage lies."""
        return self.storages[key].start % item_size == 0

    def _bytes(self, extent: Extent) -> bytes:
        with self.path.open("rb") as file:
            file.seek(extent.start)
            return file.read(extent.size)


def _refuse_other_formats(path: Path) -> None:
    try:
        with path.open("rb") as file:
            head = file.read(len(_LEGACY))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error
    if head == _LEGACY:
        raise UserError(
            f"{path} has torch's format from before version 1.6, which cannot be read without "
            "running it: where you trust it, load it with torch and save it again."
        )
    try:
        is_zip = zipfile.is_zipfile(path)
    except Exception as error:  # damaged bytes can fail anywhere in there
        raise _damaged(path, str(error)) from error
    if not is_zip:
        raise UserError(
            f"{path} is no torch checkpoint (no zip file), or it is truncated: fetch it again."
        )


def _extents(path: Path) -> dict[str, Extent]:
    """Return where each entry's content lies, refusing what `torch.save` never writes."""
    entries: dict[str, Extent] = {}
    spans: list[tuple[int, int]] = []
    try:
        with zipfile.ZipFile(path) as archive, path.open("rb") as file:
            for info in archive.infolist():
                if info.filename in entries:
                    raise _damaged(path, f"it has two entries `{shown(info.filename)}`")
                if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & _ENCRYPTED:
                    raise _damaged(path, f"`{shown(info.filename)}` is compressed or encrypted")
                if info.compress_size != info.file_size:
                    raise _damaged(path, f"`{shown(info.filename)}` has two sizes")
                start = _content_start(path, file, info.header_offset)
                entries[info.filename] = Extent(start, info.file_size)
                spans.append((info.header_offset, start + info.file_size))
            spans.append((archive.start_dir, archive.start_dir))
    except UserError:
        raise
    except Exception as error:  # damaged bytes can fail anywhere in zipfile
        raise _damaged(path, str(error)) from error
    spans.sort()
    if any(end > start for (_, end), (start, _) in itertools.pairwise(spans)):
        raise _damaged(path, "its entries overlap")
    return entries


def _content_start(path: Path, file: BinaryIO, header: int) -> int:
    file.seek(header)
    raw = file.read(_LOCAL_HEADER.size)
    if len(raw) < _LOCAL_HEADER.size:
        raise _damaged(path, "an entry lies outside the file")
    signature, name, extra = _LOCAL_HEADER.unpack(raw)
    if signature != b"PK\x03\x04":
        raise _damaged(path, "an entry has no header")
    return header + _LOCAL_HEADER.size + int(name) + int(extra)


def _damaged(path: Path, reason: str) -> UserError:
    reason = shown(reason or "its directory is damaged", 200).rstrip(".")
    return UserError(f"{path} is not as torch writes checkpoints: {reason}. Fetch it again.")
