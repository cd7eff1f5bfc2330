"""A corpus read from end to end: its pieces, their number, and which are held out."""

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from didi_instruct.data.files import sha256_file
from didi_instruct.data.manifest import SourceScan, Split
from didi_instruct.data.readers import Piece, ReadOptions, read_pieces
from didi_instruct.data.sources import Meter, Source
from didi_instruct.data.tokenizer import Tokenizer, train_tokenizer
from didi_instruct.errors import Argument, UserError

_MOST_HELD_OUT = 100_000
_REPORT_EVERY = 256


@dataclass(slots=True)
class Counts:
    """The size of a text, in documents, pieces and characters."""

    documents: int = 0
    """Those that have ended."""
    pieces: int = 0
    characters: int = 0

    def add(self, piece: Piece) -> None:
        """Count one more piece."""
        self.documents += piece.last
        self.pieces += 1
        self.characters += len(piece.text)


class CorpusReader:
    """Reads the pieces of all sources in order, and counts and hashes each file on the way."""

    def __init__(
        self, sources: Sequence[Source], options: ReadOptions, scans: Sequence[SourceScan] = ()
    ) -> None:
        """Begin behind the sources that `scans` describes."""
        self._sources, self._options = sources, options
        self.scans = list(scans)
        """Sources that were read to their end."""
        self.here = Counts()
        """The source being read, up to the last piece that was given."""
        self.meter = Meter(read=sum(scan.bytes or 0 for scan in scans))

    def pieces(self, skip: int = 0) -> Iterator[Piece]:
        """Yield all pieces that follow, except the first `skip`."""
        for source in self._sources[len(self.scans) :]:
            self.here = Counts()
            self.meter.digest = None if source.kind == "parquet" else hashlib.sha256()
            for piece in read_pieces(source, self._options, self.meter):
                self.here.add(piece)
                if skip:
                    skip -= 1
                else:
                    yield piece
            self.scans.append(self._scan(source))
            self.here = Counts()
        if skip:
            raise UserError(
                "The corpus has become shorter: start over ({}).", Argument("overwrite")
            )

    def _scan(self, source: Source) -> SourceScan:
        counts = self.here.documents, self.here.pieces, self.here.characters
        if source.path is None:
            return SourceScan(source.name, None, None, *counts)
        digest = self.meter.digest
        sha256 = sha256_file(source.path) if digest is None else digest.hexdigest()
        now = source.path.stat()
        if (now.st_size, now.st_mtime_ns) != (source.size, source.modified):
            raise UserError(f"{source.name}: changed while it was read: run the command again.")
        return SourceScan(source.name, source.size, sha256, *counts)


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """Which part of the corpus is held out: always the last one."""

    by: Literal["document", "piece"]
    """A corpus of one document is split between its pieces."""
    boundary: int
    """First document, or piece, that is held out."""
    total: int

    @property
    def splits(self) -> tuple[Split, ...]:
        """The splits that have documents."""
        return ("train", "valid") if self.boundary < self.total else ("train",)

    def is_train(self, document: int, piece: int) -> bool:
        """Tell whether a piece of a document, both counted from 0, is in the training part."""
        return (document if self.by == "document" else piece) < self.boundary

    def documents(self, split: Split) -> int:
        """Documents of a split; one that is split between its pieces counts in both."""
        if self.by == "piece":
            return 1
        return self.boundary if split == "train" else self.total - self.boundary


def split_at_end(documents: int, pieces: int, valid: int | None) -> SplitPlan:
    """Hold out the last `valid` documents, by default 1% of them, at least one.

    The boundary never moves back as a corpus grows: what is in the training part of its beginning
    is in the training part of the whole.
    """
    if valid == 0:
        return SplitPlan("document", documents, documents)
    if documents == 1 and valid in (None, 1):
        return SplitPlan("piece", pieces - max(1, pieces // 100), pieces)
    held_out = min(_MOST_HELD_OUT, max(1, documents // 100)) if valid is None else valid
    return SplitPlan("document", documents - held_out, documents)


def checked_split(
    src: str, counts: Counts, valid: int | None, *, whole_documents: bool
) -> SplitPlan:
    """Split the corpus `src`; refuse an empty one, and a split that leaves nothing to train on.

    With `whole_documents` a document is not split between its pieces either.
    """
    if counts.documents == 0:
        raise UserError(f"{src}: the corpus is empty, no document has any text.")
    plan = split_at_end(counts.documents, counts.pieces, valid)
    if plan.by == "piece" and plan.total == 1:
        raise UserError(
            "{}: is a single short document, of which no part can be held out: use {} or "
            "paragraph, add text, or hold out nothing with {}.",
            src,
            Argument("documents", "line"),
            Argument("valid", 0),
        )
    if plan.by == "piece" and whole_documents:
        raise UserError(
            "{}: is a single document, which {} keeps whole, so no part can be held out: use {} or "
            "paragraph, add text, or use {}.",
            src,
            Argument("rows", "document"),
            Argument("documents", "line"),
            Argument("valid", 0),
        )
    if plan.boundary <= 0:
        raise UserError(
            "{}: {} leaves nothing to train on: there are {} documents.",
            src,
            Argument("valid", valid),
            plan.total,
        )
    return plan


class LearningText:
    """Text to learn a tokenizer from: the training part, or an even sample of a large one.

    Up to `most` characters the corpus is read once. A larger one is counted to its end, and read
    again, at a regular stride.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        options: ReadOptions,
        valid: int | None,
        most: int,
        report: Callable[[int], None],
    ) -> None:
        """Learn from at most about `most` characters; `report` is told the bytes read."""
        self._sources, self._options, self._valid, self._most = sources, options, valid, most
        self._report = report
        self.counts = Counts()
        """What the corpus amounts to, once it has been read."""

    def learn(self, size: int) -> Tokenizer:
        """Learn a tokenizer of `size` ids."""
        pieces = self._read()
        try:
            return train_tokenizer(self._training_text(pieces), size)
        except _TooLargeError:
            for piece in pieces:
                self.counts.add(piece)
        return train_tokenizer(self._sample(), size)

    def _read(self) -> Iterator[Piece]:
        reader = CorpusReader(self._sources, self._options)
        for number, piece in enumerate(reader.pieces()):
            if number % _REPORT_EVERY == 0:
                self._report(reader.meter.read)
            yield piece

    def _training_text(self, pieces: Iterator[Piece]) -> Iterator[str]:
        """Yield each piece as soon as no longer corpus would hold it out."""
        waiting: deque[tuple[int, int, str]] = deque()
        for piece in pieces:
            waiting.append((self.counts.documents, self.counts.pieces, piece.text))
            self.counts.add(piece)
            if self.counts.characters > self._most:
                raise _TooLargeError
            plan = split_at_end(waiting[-1][0] + 1, self.counts.pieces, self._valid)
            while waiting and plan.is_train(*waiting[0][:2]):
                yield waiting.popleft()[2]

    def _sample(self) -> Iterator[str]:
        plan = split_at_end(self.counts.documents, self.counts.pieces, self._valid)
        stride, document = -(-self.counts.characters // self._most), 0
        for number, piece in enumerate(self._read()):
            if not plan.is_train(document, number):
                return
            if number % stride == 0:
                yield piece.text
            document += piece.last


class _TooLargeError(Exception):
    """There is more text than a tokenizer is learnt from."""
