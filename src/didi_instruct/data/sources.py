"""Sources of text: files found by name, opened and decompressed as streams."""

import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, BinaryIO, Literal, cast

from didi_instruct.errors import MissingExtraError, UserError

if TYPE_CHECKING:
    import hashlib

Kind = Literal["text", "jsonl", "csv", "parquet", "fasta", "hub"]
Compression = Literal["gz", "xz", "zst"]

_KINDS: dict[str, Kind] = {
    ".txt": "text",
    ".jsonl": "jsonl",
    ".csv": "csv",
    ".parquet": "parquet",
    ".fasta": "fasta",
    ".fa": "fasta",
}
_COMPRESSIONS: dict[str, Compression] = {".gz": "gz", ".xz": "xz", ".zst": "zst"}
_READABLE = f"{', '.join(_KINDS)} (or one of these with {', '.join(_COMPRESSIONS)} behind it)"
_BUFFER = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One file of a corpus, or a Hugging Face dataset."""

    name: str
    """As errors and manifests call it: relative to the corpus, never an absolute path."""
    kind: Kind
    path: Path | None = None
    """None for a dataset of the hub."""
    compression: Compression | None = None
    size: int = 0
    """Bytes on disk."""
    modified: int | None = None
    """When the file was last written, in nanoseconds."""


@dataclass(slots=True)
class Meter:
    """Counts the bytes read from disk and, where asked to, hashes them."""

    read: int = 0
    digest: "hashlib._Hash | None" = None
    """Takes in all bytes of a file that is read from its beginning to its end."""


def find_sources(src: str) -> list[Source]:
    """List what `src` names: a file, a folder's files in the order of their paths, or `hf:NAME`.

    Hidden files and folders are passed over.
    """
    if not src.strip():
        raise UserError("No corpus is named: give a file, a folder or hf:NAME.")
    if src == "hf:":
        raise UserError("`hf:` needs the name of a dataset behind it: hf:NAME or hf:NAME:split.")
    if src.startswith("hf:"):
        return [Source(name=src, kind="hub")]
    root = Path(src)
    if root.is_file():
        source = _as_source(root, root.name)
        if source is None:
            raise UserError(f"{src}: this kind of file cannot be read; use {_READABLE}.")
        return [source]
    if not root.is_dir():
        raise UserError(f"{src}: no such file or folder.")
    named = sorted((path.relative_to(root).as_posix(), path) for path in root.rglob("*"))
    visible = ((name, path) for name, path in named if not f"/{name}".count("/."))
    found = (_as_source(path, name) for name, path in visible if path.is_file())
    sources = [source for source in found if source is not None]
    if not sources:
        raise UserError(f"{src}: the folder has no file to read; use {_READABLE}.")
    return sources


def _as_source(path: Path, name: str) -> Source | None:
    """Tell kind and compression by the file's ending; None where it is neither of ours."""
    compression = _COMPRESSIONS.get(path.suffix.lower())
    ending = path.with_suffix("").suffix if compression else path.suffix
    kind = _KINDS.get(ending.lower())
    if kind is None:
        return None
    stat = path.stat()
    return Source(
        name=name,
        kind=kind,
        path=path,
        compression=compression,
        size=stat.st_size,
        modified=stat.st_mtime_ns,
    )


@contextmanager
def open_decompressed(source: Source, meter: Meter) -> Iterator[BinaryIO]:
    """Open a file as a stream of its decompressed bytes; only plain files can be seeked in."""
    assert source.path is not None
    with io.BufferedReader(_MeteredFile(source.path, meter), _BUFFER) as raw:
        if source.compression is None:
            yield cast("BinaryIO", raw)
        elif source.compression == "gz":
            with gzip.GzipFile(fileobj=raw) as stream:
                yield cast("BinaryIO", stream)
        elif source.compression == "xz":
            with lzma.LZMAFile(raw) as stream:
                yield cast("BinaryIO", stream)
        else:
            with io.BufferedReader(_ZstdReader(cast("BinaryIO", raw)), _BUFFER) as buffered:
                yield cast("BinaryIO", buffered)
        if meter.digest is not None:  # what a format has no use for is still part of the file
            while raw.read(_BUFFER):
                pass


@contextmanager
def readable(source: Source) -> Iterator[None]:
    """Name the file in what can go wrong while reading it from disk and decompressing it."""
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError) as error:
        raise UserError(
            f"{source.name}: cannot be decompressed, it is damaged or incomplete ({error})."
        ) from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"{source.name}: cannot be read ({reason}).") from error


class _MeteredFile(io.FileIO):
    """A file that tells a meter how far it was read."""

    def __init__(self, path: Path, meter: Meter) -> None:
        super().__init__(path)
        self._meter = meter

    def readinto(self, buffer: bytearray | memoryview, /) -> int:  # type: ignore[override]
        count = super().readinto(buffer) or 0
        self._meter.read += count
        if self._meter.digest is not None:
            self._meter.digest.update(memoryview(buffer)[:count])
        return count


class _ZstdReader(io.RawIOBase):
    """Decompresses zstd frames; unlike the library's own reader it notices a missing end."""

    def __init__(self, raw: IO[bytes]) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise MissingExtraError("Reading .zst files", "data") from error
        self._raw = raw
        self._library_error = zstandard.ZstdError
        self._decompressor = zstandard.ZstdDecompressor()
        self._frame = self._decompressor.decompressobj()
        self._inside = False  # a frame has begun and not ended
        self._compressed = b""
        self._pending = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview, /) -> int:  # type: ignore[override]
        while not self._pending:
            # Small bites: a highly compressible kilobyte can become many megabytes.
            data = self._compressed or self._raw.read(1 << 12)
            if not data:
                if self._inside:
                    raise EOFError("the last zstd frame has no end")
                return 0
            try:
                self._pending = self._frame.decompress(data)
            except self._library_error as error:
                raise EOFError(str(error)) from error
            self._inside, self._compressed = not self._frame.eof, b""
            if self._frame.eof:
                self._compressed = self._frame.unused_data
                self._frame = self._decompressor.decompressobj()
        count = min(len(buffer), len(self._pending))
        buffer[:count] = self._pending[:count]
        self._pending = self._pending[count:]
        return count
