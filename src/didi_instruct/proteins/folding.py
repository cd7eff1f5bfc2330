"""Folding of sequences by ESMFold: pLDDT and structures, kept on disk by sequence."""

import gzip
import json
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from didi_instruct.data.files import no_space_as_user_error, write_atomic
from didi_instruct.errors import UserError, first_line
from didi_instruct.models.tensor_files import shown
from didi_instruct.proteins.folding_model import FoldingFiles, load_folding, open_folding, predict
from didi_instruct.proteins.structures import (
    LONGEST,
    RESIDUE_ORDER,
    Structure,
    Trace,
    pdb_text,
    read_pdb,
)

Progress = Callable[[int, int], None]
"""Called with the chains that are done, and all."""

CONFIDENT = 70.0
"""pLDDT above which a chain counts as confidently folded."""

_VERSION = 1  # raised where a fold changes, so that kept ones are folded again
_OUT_OF_MEMORY = re.compile("out of memory|can't allocate memory|alloc_failed", re.IGNORECASE)
_LARGEST_CHUNK, _SMALLEST_CHUNK = 128, 16


@dataclass(frozen=True, kw_only=True, slots=True)
class FoldSettings:
    """Settings of folding; only `source`, `bf16` and `recycles` decide what comes out."""

    source: str | Path
    """Folder or Hugging Face id of an `EsmForProteinFolding`, such as facebook/esmfold_v1."""
    cache: str | Path
    """Folder where folds are kept, by sequence, weights and settings."""
    device: str = "cpu"
    bf16: bool = False
    """Run the language model in bfloat16: half its memory, nearly the same numbers."""
    chunk_size: int | None = None
    """Rows of the trunk's attention at a time: less memory, the same numbers; None: the model's."""
    tokens: int = 1024
    """Residues of a batch, padding counted; a longer chain is a batch of its own."""
    recycles: int | None = None
    """Passes of the trunk after the first; None: as trained (3 in esmfold_v1, so 4 passes)."""

    def __post_init__(self) -> None:
        """Refuse numbers out of range."""
        least = {"chunk_size": 1, "tokens": 1, "recycles": 0}
        given = {"chunk_size": self.chunk_size, "tokens": self.tokens, "recycles": self.recycles}
        for name, value in given.items():
            if value is not None and value < least[name]:
                raise UserError(f"folding: {name} is {value}: use {least[name]} or more.")


@dataclass(frozen=True, slots=True)
class Folded:
    """A folded chain, or the reason why it could not be folded."""

    sequence: str
    plddt: float | None
    """Mean over existing atoms, from 0 to 100; None if it was not folded."""
    residue_plddt: NDArray[np.float64] | None = None
    """Mean over the atoms of each residue (L,); NaN for unknown residues."""
    reason: str | None = None
    """Why there is no fold."""
    kept: Path | None = None
    """File of the fold in the cache."""

    def pdb(self) -> str:
        """Return the structure as a PDB file, with pLDDT (0 to 100) as B-factors."""
        if self.kept is None:
            raise UserError(f"{shown(self.sequence)} has no structure: {self.reason}.")
        record = _read_record(self.kept)
        if record is None:
            raise UserError(f"{self.kept} is gone or damaged: fold {shown(self.sequence)} again.")
        return str(record["pdb"])

    def trace(self) -> Trace:
        """Return the C-alpha atoms."""
        return read_pdb(self.pdb(), str(self.kept))


@dataclass(frozen=True, slots=True)
class FoldSummary:
    """Confidence of a set of chains; failed ones are counted and not averaged."""

    plddt: float | None
    above_70: float | None
    """Share of the folded chains with pLDDT above 70."""
    folded: int
    failed: int


def summarise(folds: Sequence[Folded]) -> FoldSummary:
    """Mean pLDDT of the chains that were folded, and the share of them above 70."""
    found = np.array([fold.plddt for fold in folds if fold.plddt is not None])
    failed = len(folds) - len(found)
    if not len(found):
        return FoldSummary(None, None, 0, failed)
    return FoldSummary(float(found.mean()), float((found > CONFIDENT).mean()), len(found), failed)


def fold(
    sequences: Sequence[str], settings: FoldSettings, progress: Progress | None = None
) -> list[Folded]:
    """Fold each distinct sequence once, or take it from the cache; results in the order given.

    A sequence that cannot be folded has no pLDDT and a reason. What was folded before an interrupt
    is kept. Several calls share a network if they go through one `Predictor`.
    """
    return Predictor(settings).fold(sequences, progress)


@dataclass
class Predictor:
    """A folding model that is checked when made, and read when a sequence is not in the cache."""

    settings: FoldSettings
    files: FoldingFiles = field(init=False)

    def __post_init__(self) -> None:
        """Open the source and the cache."""
        self.files = open_folding(self.settings.source)
        self._folder = Path(self.settings.cache)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"{self._folder} cannot hold folds ({error.strerror}): choose another folder."
            ) from error
        self._tokens = self.settings.tokens

    @cached_property
    def name(self) -> str:
        """The source as it was written."""
        return self.files.name

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the weights and of the settings that decide what comes out."""
        return sha256(json.dumps(self._identity, sort_keys=True).encode()).hexdigest()

    @cached_property
    def network(self) -> nn.Module:
        """The network on its device."""
        return load_folding(self.files, self.settings.device, self.settings.bf16)

    @cached_property
    def _identity(self) -> dict[str, Any]:
        recycles, passes = self.settings.recycles, self.files.passes
        return {
            "version": _VERSION,
            "weights": self.files.fingerprint(),
            "passes": passes if recycles is None else recycles + 1,
            "language_model": "bfloat16" if self.settings.bf16 else "float32",
        }

    def fold(self, sequences: Sequence[str], progress: Progress | None = None) -> list[Folded]:
        """Fold each distinct sequence once; results in the order given."""
        distinct = list(dict.fromkeys(sequences))
        found = {s: Folded(s, None, reason=r) for s in distinct if (r := _refusal(s))}
        for sequence in distinct:
            if sequence not in found and (kept := self._recall(sequence)):
                found[sequence] = kept
        # The longest come first: what memory allows is known early.
        missing = sorted((s for s in distinct if s not in found), key=lambda s: (-len(s), s))
        report = progress or (lambda done, total: None)
        report(len(found), len(distinct))
        while missing:
            size = max(1, self._tokens // len(missing[0]))
            batch, missing = missing[:size], missing[size:]
            for sequence, result in zip(batch, self._fold_batch(batch), strict=True):
                found[sequence] = self._keep(sequence, result)
            report(len(found), len(distinct))
        return [found[sequence] for sequence in sequences]

    def plddt(
        self, sequences: Sequence[str], progress: Progress | None = None
    ) -> list[float | None]:
        """Mean pLDDT of each chain, 0 to 100; None for one that could not be folded."""
        return [found.plddt for found in self.fold(sequences, progress)]

    def _fold_batch(self, batch: list[str]) -> list[Structure | str]:
        """Return a structure for each chain, or the reason why there is none."""
        result = self._attempt(batch)
        if isinstance(result, list):
            return [*result]
        if len(batch) > 1:
            half = len(batch) // 2
            if result.out_of_memory:
                self._tokens = max(1, half * len(batch[0]))
            return self._fold_batch(batch[:half]) + self._fold_batch(batch[half:])
        if result.out_of_memory:
            return [self._fold_in_chunks(batch)]
        return [result.reason]

    def _fold_in_chunks(self, batch: list[str]) -> Structure | str:
        """Fold a chain that needs too much memory alone, in ever smaller chunks."""
        trunk: Any = self.network.trunk
        before = trunk.chunk_size if self.settings.chunk_size is None else self.settings.chunk_size
        chunk = min(_LARGEST_CHUNK, (before or 2 * _LARGEST_CHUNK) // 2)
        while chunk >= _SMALLEST_CHUNK:
            result = self._attempt(batch, chunk)
            if isinstance(result, list):
                return result[0]
            if not result.out_of_memory:
                return result.reason
            chunk //= 2
        return f"out of memory: {len(batch[0])} residues are too many for {self.settings.device}"

    def _attempt(self, batch: list[str], chunk: int | None = None) -> "list[Structure] | _Failure":
        trunk: Any = self.network.trunk
        before = trunk.chunk_size
        trunk.set_chunk_size(chunk or self.settings.chunk_size or before)
        try:
            return predict(self.network, batch, self.settings.recycles)
        except (RuntimeError, MemoryError, ValueError, IndexError) as error:
            no_room = isinstance(error, MemoryError) or _OUT_OF_MEMORY.search(str(error))
            failure = _Failure(shown(first_line(error), 200), bool(no_room))
        finally:
            trunk.set_chunk_size(before)
        # Only here is the error gone, and with it the tensors that its frames held.
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return failure

    # Kept folds

    def _path(self, sequence: str) -> Path:
        name = sha256(f"{self.fingerprint}/{sequence}".encode()).hexdigest()[:32]
        return self._folder / f"{name}.json.gz"

    def _recall(self, sequence: str) -> Folded | None:
        path = self._path(sequence)
        record = _read_record(path)
        if record is None or record["sequence"] != sequence:
            return None
        residues = [np.nan if value is None else value for value in record["residue_plddt"]]
        return Folded(sequence, record["plddt"], np.array(residues, float), kept=path)

    def _keep(self, sequence: str, result: Structure | str) -> Folded:
        if isinstance(result, str):
            return Folded(sequence, None, reason=result)
        if not np.isfinite(result.plddt[result.exists]).all():
            return Folded(sequence, None, reason="its confidence is not a number")
        try:
            text = pdb_text(result)
        except ValueError as error:
            return Folded(sequence, None, reason=str(error))
        residues = [value if np.isfinite(value) else None for value in result.residue_plddt]
        record = {
            "sequence": sequence,
            "plddt": result.mean_plddt,
            "residue_plddt": residues,
            "pdb": text,
        }
        path = self._path(sequence)
        with no_space_as_user_error(path):
            write_atomic(path, gzip.compress(json.dumps(record).encode(), mtime=0))
        return Folded(sequence, result.mean_plddt, result.residue_plddt, kept=path)


@dataclass(frozen=True, slots=True)
class _Failure:
    reason: str
    out_of_memory: bool


def _refusal(sequence: str) -> str | None:
    """Say why a sequence cannot be folded; None if it can be."""
    if not sequence:
        return "it is empty"
    for place, letter in enumerate(sequence, start=1):
        if not "A" <= letter <= "Z":
            return f"`{shown(letter)}` at {place} is no residue (A to Z)"
    if set(sequence).isdisjoint(RESIDUE_ORDER):
        return "none of its residues is known"
    if len(sequence) > LONGEST:
        return f"it has {len(sequence)} residues, and a PDB file can number {LONGEST}"
    return None


def _read_record(path: Path) -> dict[str, Any] | None:
    """Return a kept fold; None if it is not there, or damaged (the checksum of gzip tells)."""
    try:
        record = json.loads(gzip.decompress(path.read_bytes()))
    except (OSError, EOFError, ValueError, zlib.error):
        return None
    fields = {"sequence", "plddt", "residue_plddt", "pdb"}
    return record if isinstance(record, dict) and fields <= record.keys() else None
