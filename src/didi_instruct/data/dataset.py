"""Rows of tokens for training, in an endless shuffled order that is a pure function."""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from didi_instruct.data.files import sha256_file
from didi_instruct.data.manifest import MANIFEST_FILE, Layout, Manifest, Shard
from didi_instruct.data.packing import arrange
from didi_instruct.data.readers import Piece, ReadOptions, read_pieces
from didi_instruct.data.resume import PROGRESS_FILE
from didi_instruct.data.sources import Meter, find_sources
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import Argument, UserError

_PIECES_AT_ONCE = 64
_FEISTEL_ROUNDS = 8


class TokenSource(Protocol):
    """An endless stream of token rows; row i never depends on which rows were asked for before."""

    @property
    def length(self) -> int:
        """Tokens in a row."""

    @property
    def num_tokens(self) -> int:
        """Size of the vocabulary, V."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the ids."""

    @property
    def num_sequences(self) -> int | None:
        """Rows after which the stream begins anew; None for one that never does."""

    @property
    def fingerprint(self) -> str:
        """Differs between sources whose streams differ."""

    def rows(self, start: int, count: int) -> torch.Tensor:
        """Return rows start .. start + count - 1 of the stream, (count, length), int64."""

    def ordered(self, start: int, count: int) -> torch.Tensor:
        """Return rows in their own order, for evaluation."""


class TokenDataset:
    """One split of a prepared folder, memory-mapped: a TokenSource.

    Row i of the stream depends on (seed, i) alone, so the position that a checkpoint keeps is one
    integer, and each rank takes its slice. Every epoch has another order.
    """

    def __init__(
        self,
        shards: Sequence[np.ndarray],
        tokenizer: Tokenizer,
        seed: int = 0,
        name: str = "data",
        fingerprint: str = "",
    ) -> None:
        """Read rows from `shards`, arrays (rows, length); `name` is what errors call the data."""
        self.fingerprint = fingerprint
        self._shards = shards
        self._starts = np.cumsum([0, *(len(shard) for shard in shards)])
        self._name = name
        self.seed = seed
        self.tokenizer = tokenizer
        self.length: int = shards[0].shape[1]
        self.num_tokens: int = tokenizer.size
        self.num_sequences: int = int(self._starts[-1])

    def __repr__(self) -> str:
        return f"TokenDataset({self._name}, {self.num_sequences} rows of {self.length} tokens)"

    def rows(self, start: int, count: int) -> torch.Tensor:
        """Return rows start .. start + count - 1 of the shuffled stream, (count, length), int64."""
        if start < 0 or count < 0:
            raise ValueError(f"rows({start}, {count}): neither may be negative")
        return self._gather(shuffled(start, count, self.num_sequences, self.seed))

    def ordered(self, start: int, count: int) -> torch.Tensor:
        """Return rows in the order of the corpus, for evaluation; fewer at the end of the data."""
        if start < 0 or count < 0:
            raise ValueError(f"ordered({start}, {count}): neither may be negative")
        return self._gather(np.arange(start, min(start + count, self.num_sequences)))

    def _gather(self, indices: np.ndarray) -> torch.Tensor:
        tokens = np.empty((len(indices), self.length), np.int64)
        owners = np.searchsorted(self._starts, indices, side="right") - 1
        for owner in np.unique(owners):
            here = owners == owner
            tokens[here] = self._shards[owner][indices[here] - self._starts[owner]]
        if tokens.size and tokens.max() >= self.num_tokens:
            raise UserError(
                f"{self._name}: has token {tokens.max()}, but its tokenizer only "
                f"{self.num_tokens} ids: the shards are damaged, prepare the data again."
            )
        return torch.from_numpy(tokens)


class PreparedData:
    """A folder of prepared data: its manifest and tokenizer, read once for all of its splits."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not (self.folder / MANIFEST_FILE).is_file():
            raise UserError(_not_prepared(self.folder))
        self.manifest = Manifest.read(self.folder)
        self.tokenizer = Tokenizer.load(self.folder)
        if self.tokenizer.hash != self.manifest.tokenizer.hash:
            raise UserError(
                f"{self.folder / 'tokenizer.json'}: is not the tokenizer that made the shards."
            )

    @property
    def splits(self) -> list[str]:
        """Names of the splits that have rows."""
        return [name for name, info in self.manifest.splits.items() if info.rows]

    def open(self, split: str, *, seed: int = 0, verify: bool = False) -> TokenDataset:
        """Open a split; with `verify`, read every shard and check its hash."""
        if split not in self.splits:
            raise UserError(
                "{}: has no {} rows, only {}: prepare the data again, with {} above 0 for a "
                "held-out part.",
                self.folder,
                split,
                ", ".join(self.splits) or "none",
                Argument("valid"),
            )
        records, length = self.manifest.splits[split].shards, self.manifest.length
        dtype = np.dtype(self.manifest.tokenizer.dtype)
        shards = [_map_shard(self.folder, record, length, dtype, verify) for record in records]
        parts = [self.tokenizer.hash, str(seed), *(record.sha256 for record in records)]
        fingerprint = hashlib.sha256("/".join(parts).encode()).hexdigest()[:16]
        name = f"{self.folder} ({split})"
        return TokenDataset(shards, self.tokenizer, seed, name, fingerprint)


def open_data(
    folder: str | Path, split: str = "train", seed: int = 0, verify: bool = False
) -> TokenDataset:
    """Open a split of a prepared folder; with `verify`, read every shard and check its hash."""
    return PreparedData(folder).open(split, seed=seed, verify=verify)


def _map_shard(
    folder: Path, shard: Shard, length: int, dtype: np.dtype, verify: bool
) -> np.ndarray:
    path = folder / shard.file
    if not path.is_file():
        raise UserError(f"{path}: this shard is missing: prepare the data again.")
    size, expected = path.stat().st_size, shard.rows * length * dtype.itemsize
    if size != expected:
        raise UserError(
            f"{path}: has {size} bytes instead of {expected}, it is damaged: "
            "prepare the data again."
        )
    if verify and sha256_file(path) != shard.sha256:
        raise UserError(
            f"{path}: its content is not what was written, it is damaged: prepare the data again."
        )
    return np.memmap(path, dtype, mode="r", shape=(shard.rows, length))


def _not_prepared(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder}: no such folder of prepared data."
    if (folder / PROGRESS_FILE).is_file():
        return f"{folder}: is not finished: run its `didi data prepare` again, it will go on."
    return f"{folder}: has no {MANIFEST_FILE}: make prepared data with `didi data prepare`."


def excerpt(
    src: str,
    tokenizer: Tokenizer,
    length: int,
    rows: int,
    options: ReadOptions | None = None,
    layout: Layout | None = None,
) -> TokenDataset:
    """Tokenise and pack as `didi data prepare` does, but only until `rows` rows are full.

    `layout` is that of the data a model learned from (`Manifest.layout`), a stream by default.
    """
    if tokenizer.eot_id is None:
        raise UserError(
            "The tokenizer has no end-of-text token, so documents cannot be joined into rows: "
            "give data prepared with a tokenizer that has one."
        )
    tokens: list[int] = []
    placing = arrange(layout or Layout(), tokenizer.eot_id, length)
    options = options or ReadOptions()
    pieces = (p for source in find_sources(src) for p in read_pieces(source, options, Meter()))
    for batch in _batches(pieces):
        for piece, ids in zip(batch, tokenizer.encode([p.text for p in batch]), strict=True):
            tokens += placing.place(ids, piece.last)
        if len(tokens) >= rows * length:
            break
    full = min(rows, len(tokens) // length)
    if full == 0 and placing.long:
        raise UserError(
            f"{src}: no document fits a row of {length} with its end-of-text: use shorter "
            "documents, or rows that cut them."
        )
    if full == 0:
        raise UserError(
            f"{src}: {len(tokens)} tokens do not fill one row of {length}: use a shorter length "
            "or more text."
        )
    table = np.array(tokens[: full * length]).reshape(full, length)
    return TokenDataset([table], tokenizer, name=src)


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    for piece in pieces:
        batch.append(piece)
        if len(batch) == _PIECES_AT_ONCE:
            yield batch
            batch = []
    if batch:
        yield batch


def permute(positions: np.ndarray, size: int, key: str) -> np.ndarray:
    """Map positions in [0, size) one to one to [0, size), in an order that `key` decides.

    A Feistel network is a bijection of numbers of an even number of bits, whatever its round
    function. Where the image is `size` or more it is mapped again (cycle walking) until it is not:
    the walk ends because it would come back to its start otherwise. At least a quarter of the
    domain is in range, so a walk takes four steps on average at worst.
    """
    half = max(1, (size - 1).bit_length() + 1 >> 1)
    keys = _round_keys(key)
    values = positions.astype(np.uint64)
    walking = np.arange(len(values))
    while len(walking):
        values[walking] = _feistel(values[walking], half, keys)
        walking = walking[values[walking] >= size]
    return values.astype(np.int64)


def shuffled(start: int, count: int, size: int, seed: int) -> np.ndarray:
    """Indices in [0, size) of rows start .. start + count - 1 of an endless shuffled stream.

    Row i depends on (seed, i) alone; every epoch has another order.
    """
    epochs, positions = np.divmod(np.arange(start, start + count), size)
    indices = np.empty_like(positions)
    for epoch in np.unique(epochs):
        now = epochs == epoch
        indices[now] = permute(positions[now], size, f"{seed}:{epoch}")
    return indices


def _feistel(values: np.ndarray, half: int, keys: np.ndarray) -> np.ndarray:
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right, key) & mask)
    return (left << shift) | right


def _mix(values: np.ndarray, key: np.uint64) -> np.ndarray:
    """Scramble 64 bits: the finaliser of SplitMix64 (Steele et al., 2014)."""
    values = (values ^ key) * np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values


def _round_keys(key: str) -> np.ndarray:
    digest = hashlib.blake2b(key.encode(), digest_size=8 * _FEISTEL_ROUNDS).digest()
    return np.frombuffer(digest, "<u8")
