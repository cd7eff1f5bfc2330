"""What training reads: rows of tokens, in an endless shuffled order that is a pure function."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from didi_instruct.data.files import sha256_file
from didi_instruct.data.manifest import MANIFEST_FILE, Manifest, Shard
from didi_instruct.data.permutation import shuffled
from didi_instruct.data.resume import PROGRESS_FILE
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import Argument, UserError


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
        """What the ids mean."""

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
