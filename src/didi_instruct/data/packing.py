"""Pieces to tokens, tokens to rows, rows to shards."""

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from didi_instruct.data.corpus import Cursor, PlacedPiece, SplitPlan
from didi_instruct.data.files import AtomicFile
from didi_instruct.data.manifest import Layout, Long, Shard, Split
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import Argument, UserError

LONGEST_SPLIT = 1 << 24
"""Tokens of a document that is split into rows, which is in memory as a whole."""

_PIECE_COST = 64  # characters' worth of memory that even an empty piece takes in a batch


class SplitStream:
    """A stream of pieces, read up to the end of one split and then on to the next."""

    def __init__(self, plan: SplitPlan, pieces: Iterator[PlacedPiece]) -> None:
        self._plan, self._pieces = plan, pieces
        self._put_back: PlacedPiece | None = None

    def of(self, split: Split) -> Iterator[PlacedPiece]:
        """Give the pieces that come next, as long as they belong to `split`."""
        while (piece := self._put_back or next(self._pieces, None)) is not None:
            self._put_back = piece
            if self._plan.split_of(piece) != split:
                return
            self._put_back = None
            yield piece


class Stream:
    """Documents one after the other, each with its end-of-text: rows may be cut anywhere."""

    piece_cost = _PIECE_COST
    long = 0

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
            return []
        document, self._begun = self._begun, []
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


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Tokens for the rows from successive pieces, end-of-text tokens included."""

    tokens: np.ndarray
    ends: np.ndarray
    """Where in `tokens` each piece ends."""
    cursors: Sequence[Cursor]
    """The place in the corpus behind each piece."""
    long: Sequence[int]
    """Documents too long for a row, of all up to each piece."""
    characters: int
    """Characters of the corpus up to the end of the batch."""

    def split_at(self, position: int) -> tuple[Cursor, np.ndarray, int]:
        """Tell what continues after `position` tokens: a place, and tokens of a piece before it.

        The third is how many documents before that place were too long.
        """
        piece = int(np.searchsorted(self.ends, position, side="left"))
        return self.cursors[piece], self.tokens[position : self.ends[piece]], self.long[piece]


def encode_pieces(
    pieces: Iterable[PlacedPiece],
    tokenizer: Tokenizer,
    rows: Stream | OneDocument,
    dtype: str,
    batch_characters: int,
) -> Iterator[TokenBatch]:
    """Tokenise pieces in batches, and place their tokens as `rows` does."""
    for batch in _batches(pieces, batch_characters, rows.piece_cost):
        placed, long = [], []
        for piece, ids in zip(batch, tokenizer.encode([p.text for p in batch]), strict=True):
            placed.append(rows.place(ids, piece.last))
            long.append(rows.long)
        ends = np.cumsum([len(part) for part in placed])
        parts = itertools.chain.from_iterable(placed)
        tokens = np.fromiter(parts, dtype=dtype, count=int(ends[-1]))
        yield TokenBatch(tokens, ends, [p.after for p in batch], long, batch[-1].characters)


def _batches(
    pieces: Iterable[PlacedPiece], characters: int, piece_cost: int
) -> Iterator[list[PlacedPiece]]:
    batch: list[PlacedPiece] = []
    room = characters
    for piece in pieces:
        batch.append(piece)
        room -= len(piece.text) + piece_cost
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
