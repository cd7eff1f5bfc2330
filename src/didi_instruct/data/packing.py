"""Pieces to tokens, tokens to rows, rows to shards."""

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from didi_instruct.data.corpus import Cursor, PlacedPiece
from didi_instruct.data.files import AtomicFile
from didi_instruct.data.manifest import Shard
from didi_instruct.data.tokenizer import Tokenizer

_PIECE_COST = 64  # characters' worth of memory that even an empty piece takes in a batch


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Tokens of successive pieces, end-of-text tokens included."""

    tokens: np.ndarray
    ends: np.ndarray
    """Where in `tokens` each piece ends."""
    cursors: Sequence[Cursor]
    """The place in the corpus behind each piece."""
    characters: int
    """Characters of the corpus up to the end of the batch."""

    def split_at(self, position: int) -> tuple[Cursor, np.ndarray]:
        """Tell what continues after `position` tokens: a place, and tokens of a piece before it."""
        piece = int(np.searchsorted(self.ends, position, side="left"))
        return self.cursors[piece], self.tokens[position : self.ends[piece]]


def encode_pieces(
    pieces: Iterable[PlacedPiece], tokenizer: Tokenizer, dtype: str, batch_characters: int
) -> Iterator[TokenBatch]:
    """Tokenise pieces in batches; end-of-text follows each document."""
    for batch in _batches(pieces, batch_characters):
        rows = tokenizer.encode([piece.text for piece in batch])
        for piece, row in zip(batch, rows, strict=True):
            if piece.last:
                assert tokenizer.eot_id is not None
                row.append(tokenizer.eot_id)
        ends = np.cumsum([len(row) for row in rows])
        tokens = np.fromiter(itertools.chain.from_iterable(rows), dtype=dtype, count=int(ends[-1]))
        cursors = [piece.after for piece in batch]
        yield TokenBatch(tokens, ends, cursors, batch[-1].characters)


def _batches(pieces: Iterable[PlacedPiece], characters: int) -> Iterator[list[PlacedPiece]]:
    batch: list[PlacedPiece] = []
    room = characters
    for piece in pieces:
        batch.append(piece)
        room -= len(piece.text) + _PIECE_COST
        if room <= 0:
            yield batch
            batch, room = [], characters
    if batch:
        yield batch


class ShardWriter:
    """Packs the tokens of one split into rows, and writes rows to shards of equal size.

    `shards` lists the finished ones; it may hold those of an earlier run.
    """

    def __init__(
        self, folder: Path, split: str, length: int, shard_rows: int, shards: list[Shard]
    ) -> None:
        self._folder, self._split, self._length = folder, split, length
        self._capacity = shard_rows * length
        self.shards = shards
        self._begin()

    def _begin(self) -> None:
        self._file: AtomicFile | None = None
        self._digest = hashlib.sha256()
        self._rows = 0
        self._tail = np.empty(0, np.uint16)  # tokens of the row that is not complete yet

    def add(self, tokens: np.ndarray) -> Iterator[int]:
        """Pack tokens; yield how many of them are used, each time a shard is finished."""
        used = 0
        while used < len(tokens):
            room = self._capacity - self._rows * self._length - len(self._tail)
            part = tokens[used : used + room]
            used += len(part)
            self._append(part)
            if len(part) == room:
                self._close()
                yield used

    def finish(self) -> int:
        """Close the last shard; return how many tokens are left over for want of a whole row."""
        dropped = len(self._tail)
        if self._rows:
            self._close()
        return dropped

    def discard(self) -> None:
        """Remove the shard that is not finished."""
        if self._file is not None:
            self._file.discard()

    def _append(self, tokens: np.ndarray) -> None:
        tokens = np.concatenate([self._tail.astype(tokens.dtype), tokens])
        rows = len(tokens) // self._length
        whole, self._tail = np.split(tokens, [rows * self._length])
        if rows == 0:
            return
        if self._file is None:
            self._file = AtomicFile(self._folder / self._name)
        self._rows += rows
        self._file.write(whole.data)
        self._digest.update(whole.data)

    @property
    def _name(self) -> str:
        return f"{self._split}-{len(self.shards):05d}.bin"

    def _close(self) -> None:
        assert self._file is not None
        self._file.commit()
        self.shards.append(Shard(self._name, self._rows, self._digest.hexdigest()))
        self._begin()
