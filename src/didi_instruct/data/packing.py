"""Pieces to tokens, tokens to rows, rows to shards."""

import hashlib
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, TypeVar

import numpy as np

from didi_instruct.data.manifest import Layout, Long, Shard, Split
from didi_instruct.data.readers import Piece
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import Argument, UserError

T = TypeVar("T")

LONGEST_SPLIT = 1 << 24
"""Tokens of a document that is split into rows, which is in memory as a whole."""

_PIECE_COST = 64  # characters' worth of memory that even an empty piece takes in a batch
_COPIED_AT_ONCE = 1 << 22


class Stream:
    """Documents one after the other, each with its end-of-text: rows may be cut anywhere."""

    piece_cost = _PIECE_COST
    long = 0
    held = 0

    def __init__(self, eot_id: int) -> None:
        self._eot_id = eot_id

    def place(self, ids: list[int], last: bool) -> list[int]:
        """Tokens that the next piece adds to the rows; `last` where it ends a document."""
        return [*ids, self._eot_id] if last else ids


class OneDocument:
    """A row for each document: its tokens, then end-of-text up to the length.

    After the end of a text comes nothing but its end, so no token for padding is needed. A document
    that leaves no room for one end-of-text is too long (`when_long`): left out, cut to a row, or
    split into as many full rows as it fills and a last one for the rest, which ends as it does.
    """

    def __init__(self, eot_id: int, length: int, when_long: Long, long: int = 0) -> None:
        self._eot_id, self._length, self._when_long = eot_id, length, when_long
        # Of a document nothing is kept beyond what its rows can hold.
        self._most = LONGEST_SPLIT if when_long == "split" else length
        self._begun: list[int] = []
        self.piece_cost = _PIECE_COST + length  # a short document takes a whole row too
        self.long = long
        """Documents so far that were too long."""
        self.held = 0
        """Pieces of a document that has begun, which has no tokens in the rows before it ends."""

    def place(self, ids: list[int], last: bool) -> list[int]:
        """Tokens that the next piece adds to the rows: whole rows, or none yet, or none at all."""
        self._begun += ids[: self._most - len(self._begun)]
        if self._when_long == "split" and len(self._begun) == self._most:
            raise UserError(
                "A document has {:,} tokens or more, too many to split: use {}, or make several "
                "documents of it.",
                self._most,
                Argument("rows", "stream"),
            )
        if not last:
            self.held += 1
            return []
        document, self._begun, self.held = self._begun, [], 0
        if len(document) >= self._length:
            self.long += 1
            if self._when_long == "drop":
                return []
        return document + [self._eot_id] * (-len(document) % self._length)


def arrange(layout: Layout, eot_id: int | None, length: int, long: int = 0) -> Stream | OneDocument:
    """Begin a layout of rows; `long` is how many documents before were too long."""
    assert eot_id is not None
    if layout.rows == "stream":
        return Stream(eot_id)
    return OneDocument(eot_id, length, layout.long, long)


def batches(pieces: Iterable[Piece], characters: int, piece_cost: int) -> Iterator[list[Piece]]:
    """Group pieces into batches that cost about `characters` each."""
    batch: list[Piece] = []
    room = characters
    for piece in pieces:
        batch.append(piece)
        room -= len(piece.text) + piece_cost
        if room <= 0:
            yield batch
            batch, room = [], characters
    if batch:
        yield batch


def encode_ahead(
    batches: Iterable[tuple[list[Piece], T]], tokenizer: Tokenizer
) -> Iterator[tuple[list[Piece], T, list[list[int]]]]:
    """Yield each batch with the ids of its pieces; meanwhile the next one is read and encoded.

    Encoding leaves Python to itself, so both go on at the same time.
    """
    with ThreadPoolExecutor(1) as pool:
        waiting: deque[tuple[list[Piece], T, Future[list[list[int]]]]] = deque()
        for batch, mark in batches:
            encoded = pool.submit(tokenizer.encode, [piece.text for piece in batch])
            waiting.append((batch, mark, encoded))
            if len(waiting) == 2:
                batch, mark, encoded = waiting.popleft()
                yield batch, mark, encoded.result()
        for batch, mark, encoded in waiting:
            yield batch, mark, encoded.result()


class TokenFiles:
    """The tokens of one split as files of `capacity` tokens, the shards; the last is shorter.

    Tokens are only ever added, so a file that was cut short can go on from any point.
    """

    def __init__(self, folder: Path, split: Split, capacity: int, dtype: np.dtype) -> None:
        self._folder, self._split, self._capacity, self._dtype = folder, split, capacity, dtype
        self.tokens = 0
        self.hashes: list[str] = []
        """SHA-256 of each full file."""
        self._digest = hashlib.sha256()
        self._file: BinaryIO | None = None

    def path(self, index: int) -> Path:
        """Path of the file of that number."""
        return self._folder / f"{self._split}-{index:05d}.bin"

    def go_on(self, tokens: int, hashes: list[str]) -> None:
        """Cut the files back to `tokens` tokens, of which the full ones have these hashes."""
        full, rest = divmod(tokens, self._capacity)
        sizes = [self._capacity] * full + [rest] * (rest > 0)
        for index, size in enumerate(sizes):
            path, expected = self.path(index), size * self._dtype.itemsize
            found = path.stat().st_size if path.is_file() else -1
            if found < expected or (index < full and found != expected):
                raise UserError(
                    "{}: is missing or has another size than when the unfinished run wrote it: "
                    "start over ({}).",
                    path,
                    Argument("overwrite"),
                )
            os.truncate(path, expected)
        for path in self._folder.glob(f"{self._split}-*.bin"):
            if path not in {self.path(index) for index in range(len(sizes))}:
                path.unlink()
        self.tokens, self.hashes = tokens, list(hashes)
        if rest:
            self._digest.update(self.path(full).read_bytes())

    def add(self, tokens: np.ndarray) -> None:
        """Append tokens, file after file."""
        while len(tokens):
            index, filled = divmod(self.tokens, self._capacity)
            part, tokens = np.split(tokens, [self._capacity - filled])
            self._file = self._file or self.path(index).open("ab")
            self._file.write(part.data)
            self._digest.update(part.data)
            self.tokens += len(part)
            if filled + len(part) == self._capacity:
                self.close()
                self.hashes.append(self._digest.hexdigest())
                self._digest = hashlib.sha256()

    def flush(self) -> None:
        """Put all tokens on disk."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Put all tokens on disk and let go of the file; more can still be added."""
        if self._file is not None:
            try:
                self.flush()
            finally:
                self._file.close()
                self._file = None

    def read(self, start: int) -> Iterator[np.ndarray]:
        """Read the tokens from `start` on."""
        while start < self.tokens:
            index, offset = divmod(start, self._capacity)
            count = min(self._capacity - offset, self.tokens - start, _COPIED_AT_ONCE)
            size = self._dtype.itemsize
            yield np.fromfile(self.path(index), self._dtype, count, offset=offset * size)
            start += count

    def shards(self, rows: int, length: int) -> list[Shard]:
        """Describe the shards of the first `rows` rows; nothing is changed on disk."""
        full, rest = divmod(rows * length, self._capacity)
        found = [
            Shard(self.path(index).name, self._capacity // length, self.hashes[index])
            for index in range(full)
        ]
        if rest:
            with self.path(full).open("rb") as file:
                content = file.read(rest * self._dtype.itemsize)
            digest = hashlib.sha256(content).hexdigest()
            found.append(Shard(self.path(full).name, rest // length, digest))
        return found
