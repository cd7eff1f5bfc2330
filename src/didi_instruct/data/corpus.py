"""A corpus as one stream of numbered pieces: counted first, then split, then read again."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from didi_instruct.data.files import sha256_file
from didi_instruct.data.manifest import SourceScan, Split
from didi_instruct.data.readers import ReadOptions, read_pieces
from didi_instruct.data.sources import Meter, Source
from didi_instruct.errors import Argument, UserError

_MOST_HELD_OUT = 100_000
_REPORT_EVERY = 256


@dataclass(frozen=True, slots=True)
class Cursor:
    """A place between two pieces."""

    file: int = 0
    pieces: int = 0
    """Pieces of that file that lie before it."""


@dataclass(frozen=True, slots=True)
class PlacedPiece:
    """A piece and where it stands in the corpus."""

    text: str
    last: bool
    """It ends its document."""
    document: int
    number: int
    """Of the piece, counted over the whole corpus."""
    characters: int
    """Characters of the corpus up to its end."""
    after: Cursor
    """The place behind it."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Sources whose content was counted."""

    sources: Sequence[Source]
    options: ReadOptions
    scans: Sequence[SourceScan]

    @property
    def documents(self) -> int:
        """How many documents there are."""
        return sum(scan.documents for scan in self.scans)

    @property
    def pieces(self) -> int:
        """How many pieces they make."""
        return sum(scan.pieces for scan in self.scans)

    @property
    def characters(self) -> int:
        """How many characters they have."""
        return sum(scan.characters for scan in self.scans)

    def walk(self, start: Cursor | None = None) -> Iterator[PlacedPiece]:
        """Give the pieces from `start` on; those before it in its file are read and skipped."""
        start = start or Cursor()
        document = number = characters = 0
        for file, scan in enumerate(self.scans):
            if file >= start.file:
                pieces = self._walk_file(file, document, number, characters)
                yield from itertools.islice(pieces, start.pieces if file == start.file else 0, None)
            document += scan.documents
            number += scan.pieces
            characters += scan.characters

    def _walk_file(
        self, file: int, document: int, number: int, characters: int
    ) -> Iterator[PlacedPiece]:
        source, scan = self.sources[file], self.scans[file]
        expected = (document + scan.documents, scan.pieces)
        pieces = 0
        for piece in read_pieces(source, self.options, Meter()):
            characters += len(piece.text)
            after = Cursor(file, pieces + 1)
            yield PlacedPiece(piece.text, piece.last, document, number + pieces, characters, after)
            document, pieces = document + piece.last, pieces + 1
        if (document, pieces) != expected:
            raise UserError(f"{source.name}: changed while it was read: run the command again.")


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
        """In the order in which they are written."""
        return ("train", "valid") if self.boundary < self.total else ("train",)

    def split_of(self, piece: PlacedPiece) -> Split:
        """Tell the split of a piece."""
        place = piece.document if self.by == "document" else piece.number
        return "train" if place < self.boundary else "valid"

    def documents(self, split: Split) -> int:
        """How many documents a split has; one that is split between its pieces counts in both."""
        if self.by == "piece":
            return 1
        return self.boundary if split == "train" else self.total - self.boundary

    def first_file(self, split: Split, scans: Sequence[SourceScan]) -> int:
        """Find the file in which a split begins."""
        if split == "train":
            return 0
        by_document = self.by == "document"
        counts = (scan.documents if by_document else scan.pieces for scan in scans)
        ends = itertools.accumulate(counts)
        return next(file for file, end in enumerate(ends) if end > self.boundary)


def plan_split(corpus: Corpus, valid: int | None) -> SplitPlan:
    """Hold out the last `valid` documents, by default 1% of them, at least one."""
    documents, pieces = corpus.documents, corpus.pieces
    assert documents > 0
    if valid == 0:
        return SplitPlan("document", documents, documents)
    if documents == 1 and valid in (None, 1):
        if pieces == 1:
            raise UserError(
                "The corpus is a single short document, of which no part can be held out: use {} "
                "or paragraph, add text, or hold out nothing with {}.",
                Argument("documents", "line"),
                Argument("valid", 0),
            )
        return SplitPlan("piece", pieces - max(1, pieces // 100), pieces)
    if valid is None:
        valid = min(_MOST_HELD_OUT, max(1, documents // 100))
    if valid >= documents:
        raise UserError(
            "{} leaves nothing to train on: the corpus has {} documents.",
            Argument("valid", valid),
            documents,
        )
    return SplitPlan("document", documents - valid, documents)


def scan_sources(
    sources: Sequence[Source], options: ReadOptions, report: Callable[[int], None]
) -> list[SourceScan]:
    """Read everything once, so that bad input is refused before anything is written.

    `report` is told the bytes read so far, now and then.
    """
    meter = Meter()
    scans = []
    for source in sources:
        documents = pieces = characters = 0
        for piece in read_pieces(source, options, meter):
            documents += piece.last
            pieces += 1
            characters += len(piece.text)
            if pieces % _REPORT_EVERY == 0:
                report(meter.read)
        report(meter.read)
        if source.path is None:
            scans.append(SourceScan(source.name, None, None, documents, pieces, characters))
        else:
            digest = sha256_file(source.path)
            scan = SourceScan(source.name, source.size, digest, documents, pieces, characters)
            scans.append(scan)
    return scans
