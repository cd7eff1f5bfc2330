"""`didi data prepare`: a corpus in, memory-mapped rows of tokens out.

The text is read once: as it comes it is tokenised and appended to the shards of the training part,
and where each piece ends is noted beside them. Which part is held out is known only at the end of
the corpus; its tokens then move to shards of their own. Learning a tokenizer takes one reading of
its own, or two where there are over `TOKENIZER_CHARACTERS` characters. The result depends on the
input and the settings alone: not on cores, batches or interruptions.
"""

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from didi_instruct.data import readers
from didi_instruct.data.corpus import (
    CorpusReader,
    Counts,
    LearningText,
    SplitPlan,
    checked_split,
)
from didi_instruct.data.files import no_space_as_user_error, require_space
from didi_instruct.data.manifest import (
    Layout,
    Long,
    Manifest,
    Rows,
    SourceScan,
    Split,
    SplitInfo,
    TokenizerInfo,
)
from didi_instruct.data.packing import TokenFiles, arrange, batches, encode_ahead
from didi_instruct.data.readers import Documents, Piece, ReadOptions, check_documents
from didi_instruct.data.resume import (
    WORK,
    PieceEnds,
    PrepareState,
    begin_work,
    check_settings,
    check_sources,
    discard_work,
    inspect_folder,
    publish,
)
from didi_instruct.data.sources import Source, find_sources
from didi_instruct.data.tokenizer import END_OF_TEXT, Tokenizer, residues_of
from didi_instruct.errors import Argument, UserError

TOKENIZER_CHARACTERS = 200_000_000
"""Characters that a tokenizer is learnt from; of a larger corpus it sees an even sample."""

_SHARD_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareSettings:
    """Settings of one preparation."""

    src: str
    """A file, a folder or `hf:NAME[:split]`."""
    tokenizer: str
    """`bytes`, `esm`, `bpe:N`, a tokenizer.json or its folder, or a Hugging Face id."""
    length: int
    """Tokens in a row."""
    out: Path
    """Folder to write."""
    field: str = "text"
    """Field of a record that has the text."""
    documents: Documents = "file"
    """What a document is in a .txt file."""
    rows: Rows = "stream"
    """What a row holds: a stretch of all documents joined, or one document and its end."""
    long: Long = "drop"
    """A document that does not fit a row of its own is left out, cut, or split into several."""
    valid: int | None = None
    """Documents to hold out, from the end; None for 1% of them, at least one."""
    shard_rows: int | None = None
    """Rows in a shard; None for about 64 MiB."""
    eot: str | None = None
    """Token that ends a document; None for the tokenizer's own."""
    overwrite: bool = False
    """Start over where the folder holds other data of this kind."""
    batch_characters: int = 1 << 20
    """Text tokenised at once: a matter of memory and speed, not of the result."""

    def __post_init__(self) -> None:
        """Refuse values that mean nothing."""
        if self.length < 1:
            raise UserError("{} is {}: use 1 or more.", Argument("length"), self.length)
        if self.valid is not None and self.valid < 0:
            raise UserError("{} is {}: use 0 or more.", Argument("valid"), self.valid)
        if self.shard_rows is not None and self.shard_rows < 1:
            raise UserError("{} is {}: use 1 or more.", Argument("shard_rows"), self.shard_rows)
        check_documents(self.documents)
        Layout(self.rows, self.long)  # refuses by itself
        if self.bpe_size is not None and self.eot not in (None, END_OF_TEXT):
            raise UserError(
                "{} is `{}`, but a bpe:N tokenizer has {}.", Argument("eot"), self.eot, END_OF_TEXT
            )

    @property
    def layout(self) -> Layout:
        """How documents lie in rows."""
        return Layout(self.rows, self.long)

    def reading(self, tokenizer: Tokenizer | None) -> ReadOptions:
        """How documents are read: as chains of residues where a tokenizer knows nothing else."""
        residues = "" if tokenizer is None else residues_of(tokenizer.vocabulary)
        return ReadOptions(field=self.field, documents=self.documents, residues=residues)

    def split(self, counts: Counts) -> SplitPlan:
        """Decide which part of a corpus is held out."""
        whole = self.rows == "document"
        return checked_split(self.src, counts, self.valid, whole_documents=whole)

    @property
    def bpe_size(self) -> int | None:
        """The N of `bpe:N`; None for a tokenizer that exists already."""
        if not self.tokenizer.startswith("bpe:"):
            return None
        size = self.tokenizer.removeprefix("bpe:")
        if not size.isascii() or not size.isdigit() or int(size) < 257:
            raise UserError(
                "{} is `{}`: use bpe:N with N of 257 or more, for 256 bytes and {}.",
                Argument("tokenizer"),
                self.tokenizer,
                END_OF_TEXT,
            )
        return int(size)


@dataclass(frozen=True, slots=True)
class PrepareProgress:
    """How far a stage has come, in bytes of the corpus."""

    stage: Literal["learn tokenizer", "tokenise"]
    done: int
    total: int
    """0 where it is not known."""


@dataclass(frozen=True, slots=True)
class PrepareResult:
    """The data in a folder."""

    folder: Path
    manifest: Manifest
    already_prepared: bool
    """Nothing was to be done."""


Report = Callable[[PrepareProgress], None]


def prepare(
    settings: PrepareSettings, progress: Report | None = None, tokenizer: Tokenizer | None = None
) -> PrepareResult:
    """Tokenise and pack a corpus into `settings.out`, or go on where an earlier run stopped.

    `tokenizer` is what `settings.tokenizer` names, where it is loaded already.
    """
    folder, report = settings.out, progress or (lambda _: None)
    absent = [place for place in (folder, *folder.parents) if not place.exists()]
    sources = find_sources(settings.src)
    if tokenizer is None and settings.bpe_size is None:
        tokenizer = Tokenizer.load(settings.tokenizer, settings.eot)
    identity = _identity(settings, tokenizer)
    found = inspect_folder(folder, settings.overwrite)
    if isinstance(found, Manifest) and not settings.overwrite:
        check_settings(folder, found.settings, identity, "data prepared otherwise")
        check_sources(folder, "data prepared from other text", sources, found.sources)
        discard_work(folder)  # what a run that was killed at its very end has left
        return PrepareResult(folder, found, already_prepared=True)

    with _all_cores(), no_space_as_user_error(folder):
        if isinstance(found, PrepareState):
            tokenizer = _unfinished_tokenizer(settings, identity, found, sources)
            state = found
        else:
            state, tokenizer = _begin(settings, identity, sources, tokenizer, report)
        manifest = state.manifest or _finish(settings, state, sources, tokenizer, report, absent)
        publish(folder, manifest)
    return PrepareResult(folder, manifest, already_prepared=False)


def _identity(settings: PrepareSettings, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Collect the settings that decide the result; two runs that agree here may be joined."""
    eot_id = None
    if tokenizer is not None:
        eot_id = TokenizerInfo.of(tokenizer, settings.tokenizer).eot_id
    return {
        "length": settings.length,
        "tokenizer": settings.tokenizer if tokenizer is None else f"sha256:{tokenizer.hash}",
        "eot_id": eot_id,
        "field": settings.field,
        "documents": settings.documents,
        "valid": settings.valid,
        "shard_rows": settings.shard_rows,
        "piece_characters": readers.PIECE_CHARACTERS,
        **settings.layout.settings,
    }


def _begin(
    settings: PrepareSettings,
    identity: dict[str, Any],
    sources: Sequence[Source],
    tokenizer: Tokenizer | None,
    report: Report,
) -> tuple[PrepareState, Tokenizer]:
    """Learn the tokenizer, where that is asked for, and begin an unfinished folder."""
    if tokenizer is None:
        assert settings.bpe_size is not None
        total = sum(source.size for source in sources)
        text = LearningText(
            sources,
            settings.reading(None),
            settings.valid,
            TOKENIZER_CHARACTERS,
            lambda read: report(PrepareProgress("learn tokenizer", read, total)),
        )
        tokenizer = text.learn(settings.bpe_size)
        settings.split(text.counts)  # an impossible one is refused before any text is tokenised
    state = PrepareState(
        identity,
        TokenizerInfo.of(tokenizer, settings.tokenizer),
        [(source.name, source.size, source.modified) for source in sources],
    )
    tokenizer.save(begin_work(settings.out))
    state.write(settings.out)
    return state, tokenizer


def _unfinished_tokenizer(
    settings: PrepareSettings, identity: dict[str, Any], state: PrepareState, sources: list[Source]
) -> Tokenizer:
    """Return the tokenizer of an unfinished run, if this one has the same settings and sources."""
    folder = settings.out
    check_settings(folder, state.settings, identity, "an unfinished run with other settings")
    what = "an unfinished run over other text"
    check_sources(folder, what, sources, state.scans, state.sources)
    path = folder / WORK / "tokenizer.json"
    place = folder / WORK if path.is_file() else folder  # stopped while files took their places
    tokenizer = Tokenizer.load(place, settings.eot)
    if tokenizer.hash != state.tokenizer.hash:
        raise UserError(
            "{}: changed since the unfinished run wrote it: start over ({}).",
            path,
            Argument("overwrite"),
        )
    return tokenizer


def _finish(
    settings: PrepareSettings,
    state: PrepareState,
    sources: Sequence[Source],
    tokenizer: Tokenizer,
    report: Report,
    absent: Sequence[Path],
) -> Manifest:
    """Tokenise the rest of the corpus, and record the description of the complete data.

    Where that fails the folders that were `absent` are so again.
    """
    with contextlib.closing(_Run(settings, state, sources)) as run:
        try:
            run.tokenise(tokenizer, report)
            manifest = run.divide()
        except UserError:
            # Bad input leaves no trace. Of the hub it may be the network that failed.
            if sources[0].kind != "hub" or not state.pieces:
                discard_work(settings.out)
                for place in absent:
                    place.rmdir()
            raise
    state.manifest = manifest
    state.write(settings.out)
    return manifest


class _Run:
    """The files of an unfinished run, which goes on where its state says."""

    def __init__(
        self, settings: PrepareSettings, state: PrepareState, sources: Sequence[Source]
    ) -> None:
        self._settings, self._state, self._sources = settings, state, sources
        work, dtype = settings.out / WORK, np.dtype(state.tokenizer.dtype)
        self._dtype = dtype
        row_bytes = settings.length * dtype.itemsize
        rows = settings.shard_rows or max(1, _SHARD_BYTES // row_bytes)
        self._train = TokenFiles(work, "train", rows * settings.length, dtype)
        self._valid = TokenFiles(work, "valid", rows * settings.length, dtype)
        self._ends = PieceEnds(work / "ends.bin", state.pieces)
        self._begin: list[int] = self._ends.read()[-1:].sum(0).tolist()
        self._train.go_on(self._begin[1], state.hashes)

    def close(self) -> None:
        for file in (self._train, self._valid, self._ends):
            file.close()

    def tokenise(self, tokenizer: Tokenizer, report: Report) -> None:
        """Append the tokens of all pieces to `train`, and record the state after each shard."""
        settings, state = self._settings, self._state
        documents, tokens, long = self._begin
        rows = arrange(settings.layout, state.tokenizer.eot_id, settings.length, long)
        reader = CorpusReader(self._sources, settings.reading(tokenizer), state.scans)
        total = sum(source.size for source in self._sources)

        def read() -> Iterator[tuple[list[Piece], tuple[int, int, int]]]:
            pieces = reader.pieces(state.skip)
            for batch in batches(pieces, settings.batch_characters, rows.piece_cost):
                yield batch, (len(reader.scans), reader.here.pieces, reader.meter.read)

        for batch, (files, pieces, done), encoded in encode_ahead(read(), tokenizer):
            placed, numbers, before = [], np.empty((len(batch), 3), np.int64), tokens
            for index, (piece, ids) in enumerate(zip(batch, encoded, strict=True)):
                placed.append(rows.place(ids, piece.last))
                documents += piece.last
                tokens += len(placed[-1])
                numbers[index] = documents, tokens, rows.long
            if before == 0:
                self._require_space(tokens, done, total)
            flat = itertools.chain.from_iterable(placed)
            self._train.add(np.fromiter(flat, self._dtype, tokens - before))
            self._ends.add(numbers)
            if len(self._train.hashes) > len(state.hashes):
                self._record(reader.scans[:files], pieces - rows.held)
            report(PrepareProgress("tokenise", done, total))
        state.scans, state.skip = reader.scans, 0
        report(PrepareProgress("tokenise", total, total))

    def _require_space(self, tokens: int, read: int, total: int) -> None:
        """Refuse a disk that is too small, judging by the first batch."""
        if all(source.kind not in ("hub", "parquet") for source in self._sources):
            size = tokens * self._dtype.itemsize * total / max(1, read)
            # One part in ten more than the sample says, as the rest may be harder to compress.
            require_space(self._settings.out, int(1.1 * size))

    def _record(self, scans: list[SourceScan], skip: int) -> None:
        self._train.flush()
        self._ends.flush()
        self._state.scans, self._state.skip = scans, skip
        self._state.hashes = list(self._train.hashes)
        self._state.write(self._settings.out)

    def divide(self) -> Manifest:
        """Copy the held-out part from the end of `train` to `valid`, and describe both.

        `train` keeps it until all is recorded, since the run may be stopped here too.
        """
        settings, state, ends = self._settings, self._state, self._ends.read()
        characters = sum(scan.characters for scan in state.scans)
        documents = int(ends[-1, 0]) if len(ends) else 0
        plan = settings.split(Counts(documents, len(ends), characters))
        pieces = plan.boundary
        if plan.by == "document":
            pieces = int(np.searchsorted(ends[:, 0], plan.boundary)) + 1
        _, boundary, train_long = ends[pieces - 1].tolist()
        _, total, long = ends[-1].tolist()
        parts: dict[Split, tuple[int, int]] = {
            "train": (boundary, train_long),
            "valid": (total - boundary, long - train_long),
        }
        for split in plan.splits:
            if parts[split][0] < settings.length:
                raise _no_row(settings, plan, split, *parts[split])
        self._train.close()
        self._valid.go_on(0, [])
        for part in self._train.read(boundary):
            self._valid.add(part)
        self._valid.close()
        splits: dict[str, SplitInfo] = {}
        for split, files in (("train", self._train), ("valid", self._valid)):
            tokens, long = parts[split]
            rows, dropped = divmod(tokens, settings.length)
            splits[split] = SplitInfo(
                plan.documents(split) if split in plan.splits else 0,
                rows * settings.length,
                rows,
                dropped,
                files.shards(rows, settings.length),
                long if settings.rows == "document" else None,
            )
        return Manifest(state.tokenizer, settings.length, splits, state.scans, state.settings)


def _no_row(
    settings: PrepareSettings, plan: SplitPlan, split: Split, tokens: int, long: int
) -> UserError:
    count = plan.documents(split)
    documents = "1 document" if count == 1 else f"{count} documents"
    length = Argument("length")
    if split == "train":
        part, remedy = f"training part ({documents})", UserError("add text or a shorter {}", length)
    elif plan.by == "piece":
        part = "held-out end of the document"
        remedy = UserError("use a shorter {}, or {}", length, Argument("valid", 0))
    else:
        part = f"held-out part ({documents})"
        remedy = UserError("hold out more ({}), or use a shorter {}", Argument("valid"), length)
    if long:
        return UserError(
            "{}: no document of the {} fits a row of {} with its end-of-text: use a larger {}, or "
            "cut documents with {} or split.",
            settings.src,
            part,
            settings.length,
            length,
            Argument("long", "cut"),
        )
    return UserError(
        "{}: the {} has {} tokens, fewer than one row of {}: {}.",
        settings.src,
        part,
        tokens,
        settings.length,
        remedy,
    )


@contextlib.contextmanager
def _all_cores() -> Iterator[None]:
    """Let the tokenizer use all cores, whatever the environment says; the result is the same."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "true"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
