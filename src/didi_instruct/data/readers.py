"""Read files as documents, and documents as pieces of bounded size.

A reader gives *fragments*, `(text, last)`: text in any portions, `last` where a document ends. So a
document can be far longer than memory. `cut_into_pieces` makes the portions regular again.
"""

import codecs
import csv
import io
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from shutil import copyfileobj
from typing import IO, Any, Literal, get_args

from didi_instruct.data.hub import stream_of
from didi_instruct.data.sources import Meter, Source, open_decompressed, readable
from didi_instruct.errors import Argument, MissingExtraError, UserError, first_line

Documents = Literal["file", "line", "paragraph"]
DOCUMENTS: tuple[Documents, ...] = get_args(Documents)


def check_documents(word: str) -> Documents:
    """Return the word if it says what a document is."""
    if word not in DOCUMENTS:
        raise UserError("{} is `{}`: use {}.", Argument("documents"), word, ", ".join(DOCUMENTS))
    return word


Fragment = tuple[str, bool]

PIECE_CHARACTERS = 1 << 14
"""Longest piece of a document that is tokenised at once."""

LONGEST_CHAIN = 100_000
"""Residues of a chain; the longest proteins known have about half as many."""

_CHUNK_BYTES = 1 << 20
# An unclosed quote would otherwise swallow the rest of a file of any size.
_CSV_FIELD_LIMIT = 1 << 27


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a document."""

    text: str
    last: bool
    """It ends its document."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadOptions:
    """Options that decide what counts as a document."""

    field: str = "text"
    """Field of a record, or column, that has the text."""
    documents: Documents = "file"
    """What a document is in a plain text file."""
    residues: str = ""
    """Letters that a document may have, where documents are proteins; empty: any text."""


def read_pieces(source: Source, options: ReadOptions, meter: Meter) -> Iterator[Piece]:
    """Read a source's documents as pieces; a document that is blank or empty is left out."""
    with readable(source):
        fragments = _READERS[source.kind](source, options, meter)
        if options.residues:
            fragments = _read_proteins(source, options, meter)
        yield from cut_into_pieces(fragments)


def cut_into_pieces(fragments: Iterable[Fragment]) -> Iterator[Piece]:
    """Regroup fragments into pieces of at most PIECE_CHARACTERS, which depend on the text alone."""
    buffer, whole = "", True
    for text, last in fragments:
        buffer += text
        start = 0
        while len(buffer) - start > PIECE_CHARACTERS:
            end = _cut_point(buffer, start)
            yield Piece(buffer[start:end], last=False)
            start, whole = end, False
        buffer = buffer[start:]
        if last:
            if not whole or buffer.strip():
                yield Piece(buffer, last=True)
            buffer, whole = "", True


def _cut_point(text: str, start: int) -> int:
    """Find where a piece that begins at `start` should end: before white space if possible.

    GPT-2's pre-tokenizer always splits before a run of white space, so a cut there does not change
    the tokens. The search covers the second half of the piece, to keep pieces long.
    """
    earliest, latest = start + PIECE_CHARACTERS // 2, start + PIECE_CHARACTERS
    for mark in ("\n", " "):
        position = text.rfind(mark, earliest, latest + 1)
        while position > earliest and text[position - 1].isspace():
            position -= 1
        if position > earliest:
            return position
    return latest


def _read_text(source: Source, options: ReadOptions, meter: Meter) -> Iterator[Fragment]:
    """Read a text file: exactly as it is, or by lines or paragraphs with any kind of line end."""
    if options.documents == "file":
        for chunk in _decoded_chunks(source, meter):
            yield chunk, False
        yield "", True
        return
    lines = _line_parts(_decoded_chunks(source, meter, universal_newlines=True))
    yield from lines if options.documents == "line" else _paragraphs(lines)


def _decoded_chunks(
    source: Source, meter: Meter, universal_newlines: bool = False
) -> Iterator[str]:
    """Decode a file strictly as UTF-8, chunk by chunk; a byte-order mark is dropped."""
    utf8 = codecs.getincrementaldecoder("utf-8")()
    newlines = io.IncrementalNewlineDecoder(None, translate=True)
    fed, first = 0, True
    with open_decompressed(source, meter) as stream:
        while data := stream.read(_CHUNK_BYTES):
            text = _decode(source, utf8, data, fed, final=False)
            fed += len(data)
            if first and text:
                text, first = text.removeprefix("\ufeff"), False
            yield newlines.decode(text) if universal_newlines else text
    text = _decode(source, utf8, b"", fed, final=True)
    yield newlines.decode(text, final=True) if universal_newlines else text


def _decode(
    source: Source, decoder: codecs.IncrementalDecoder, data: bytes, fed: int, final: bool
) -> str:
    """Decode the bytes from offset `fed` on, and those the decoder held back before them."""
    offset = fed - len(decoder.getstate()[0])
    try:
        return decoder.decode(data, final)
    except UnicodeDecodeError as error:
        raise UserError(
            f"{source.name}: not UTF-8 at byte {offset + error.start} ({error.reason}): "
            "convert the file to UTF-8."
        ) from error


def _line_parts(chunks: Iterable[str]) -> Iterator[Fragment]:
    r"""Give each line without its end, in portions: `(text, True)` where a line ends."""
    for chunk in chunks:
        *complete, rest = chunk.split("\n")
        for line in complete:
            yield line, True
        if rest:
            yield rest, False
    yield "", True  # the last line may lack its end; if not, this is one more empty line


def _paragraphs(lines: Iterable[Fragment]) -> Iterator[Fragment]:
    """Join the lines between blank ones."""
    held = ""  # the current line, as long as it could still turn out to be blank
    blank, inside = True, False
    for part, ends in lines:
        if blank and not (held + part).strip():
            held += part
        else:
            lead = ("\n" if inside else "") + held if blank else ""
            yield lead + part, False
            blank, inside, held = False, True, ""
        if ends:
            if blank and inside:
                yield "", True
                inside = False
            blank, held = True, ""
    if inside:
        yield "", True


def _read_proteins(source: Source, options: ReadOptions, meter: Meter) -> Iterator[Fragment]:
    """Read chains of residues: of a FASTA file errors name the line, else the document."""
    if source.kind == "fasta":
        found = _fasta_lines(source, meter)
        lines = ((f"{source.name}:{number}", text, last) for number, text, last in found)
        yield from _checked_chains(lines, options.residues, refuse_empty=True)
        return
    named = _numbered(source, _READERS[source.kind](source, options, meter))
    yield from _checked_chains(named, options.residues, refuse_empty=False)


def _checked_chains(
    fragments: Iterable[tuple[str, str, bool]], letters: str, *, refuse_empty: bool
) -> Iterator[tuple[str, bool]]:
    """Chains in upper case and without white space: (place, text, last) -> (text, last).

    `place` is what an error calls the text. A letter that is not among `letters` is refused, and so
    is a chain of more than `LONGEST_CHAIN` or, with `refuse_empty`, of no letters.
    """
    known, length = frozenset(letters), 0
    for place, text, last in fragments:
        chain = "".join(text.split()).upper()
        if odd := set(chain) - known:
            first = next(letter for letter in chain if letter in odd)
            raise UserError(
                f"{place}: {first!r} is no residue. Known are {letters}: write X for a residue "
                "that is not known, and leave out gaps and stops."
            )
        length += len(chain)
        if length > LONGEST_CHAIN:
            raise UserError(
                f"{place}: a chain of more than {LONGEST_CHAIN:,} residues, and no protein is as "
                "long: remove it, or start each chain with a `>` header."
            )
        if last and not length and refuse_empty:
            raise UserError(f"{place}: an empty chain: remove its header, or add its sequence.")
        yield chain, last
        length = 0 if last else length


def _numbered(source: Source, fragments: Iterable[Fragment]) -> Iterator[tuple[str, str, bool]]:
    """Give each fragment with the number of its document in words."""
    number = 1
    for text, last in fragments:
        yield f"{source.name}: document {number}", text, last
        number += last


def _read_fasta(source: Source, options: ReadOptions, meter: Meter) -> Iterator[Fragment]:
    """Read sequences: the lines after a `>` header, without white space."""
    for _, text, last in _fasta_lines(source, meter):
        yield text, last


def _fasta_lines(source: Source, meter: Meter) -> Iterator[tuple[int, str, bool]]:
    """Give the lines of sequences, each with its number; that of its header ends a sequence."""
    lines = _line_parts(_decoded_chunks(source, meter, universal_newlines=True))
    number, begun, at_start, header, started = 1, 1, True, False, False
    for part, ends in lines:
        if at_start and part:
            header = part.startswith(">")
            if header and started:
                yield begun, "", True
            begun = number if header else begun
            started = started or header
        if not header and part.strip():
            if not started:
                raise UserError(
                    f"{source.name}:{number}: a sequence before the first `>` header: not FASTA."
                )
            yield number, "".join(part.split()), False
        at_start = ends
        number += ends
        header = header and not ends
    if started:
        yield begun, "", True


def _lines(source: Source, meter: Meter) -> Iterator[tuple[int, str]]:
    """Decode a file line by line, each with its number and its end."""
    with open_decompressed(source, meter) as stream:
        for number, raw in enumerate(stream, 1):
            try:
                line = raw.decode("utf-8")
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{source.name}:{number}: not UTF-8 ({error.reason}): "
                    "convert the file to UTF-8."
                ) from error
            yield number, line.removeprefix("\ufeff") if number == 1 else line


def read_records(source: Source, meter: Meter) -> Iterator[tuple[str, dict[str, Any]]]:
    """Read one JSON object a line, each with its place; blank lines are skipped."""
    for number, line in _lines(source, meter):
        if not line.strip():
            continue
        place = f"{source.name}:{number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{place}: not JSON ({error}).") from error
        if not isinstance(record, dict):
            raise UserError(f"{place}: not a JSON object of fields in braces.")
        yield place, record


def _read_jsonl(source: Source, options: ReadOptions, meter: Meter) -> Iterator[Fragment]:
    """Read one field of JSON objects, one a line."""
    for place, record in read_records(source, meter):
        yield _text_of(record, options.field, place), True


def _read_csv(source: Source, options: ReadOptions, meter: Meter) -> Iterator[Fragment]:
    """Read comma-separated values with a header line."""
    csv.field_size_limit(_CSV_FIELD_LIMIT)
    rows = csv.reader((line for _, line in _lines(source, meter)), strict=True)
    try:
        header = next(rows, [])
        if not header:
            return
        column = _column(header, options.field, source.name)
        for row in rows:
            if row and column >= len(row):
                raise UserError(
                    f"{source.name}:{rows.line_num}: has {len(row)} columns, the header "
                    f"{len(header)}."
                )
            yield row[column] if row else "", True
    except csv.Error as error:
        raise UserError(f"{source.name}:{rows.line_num}: not CSV ({error}).") from error


def _read_parquet(source: Source, options: ReadOptions, meter: Meter) -> Iterator[Fragment]:
    """Read a column of strings, batch by batch."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise MissingExtraError("Reading .parquet files", "data") from error

    with open_decompressed(source, meter) as stream, tempfile.TemporaryFile() as unpacked:
        seekable: IO[bytes] = stream
        if source.compression is not None:  # the format is read from its end
            copyfileobj(stream, unpacked)
            seekable = unpacked
        try:
            file = pq.ParquetFile(seekable)
            names = list(file.schema_arrow.names)
            kind = file.schema_arrow.field(_column(names, options.field, source.name)).type
            kind = kind.value_type if pa.types.is_dictionary(kind) else kind
            if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
                raise UserError(f"{source.name}: `{options.field}` holds {kind}, not text.")
            for batch in file.iter_batches(batch_size=256, columns=[options.field]):
                for text in batch.column(0).to_pylist():
                    yield text or "", True
        except (pa.ArrowException, UnicodeDecodeError) as error:
            reason = first_line(error)
            raise UserError(f"{source.name}: not a readable Parquet file ({reason}).") from error


def _read_hub(source: Source, options: ReadOptions, meter: Meter) -> Iterator[Fragment]:
    """Stream a dataset from Hugging Face: `hf:NAME` or `hf:NAME:split`."""
    name, _, split = source.name.removeprefix("hf:").partition(":")
    feature = "Reading a Hugging Face dataset"
    for record, place in stream_of(name, split or "train", place=source.name, feature=feature):
        yield _text_of(record, options.field, place), True


def _column(names: list[str], field: str, place: str) -> int:
    if field not in names:
        raise UserError(
            "{}: has no field `{}`, only {}: name one with {}.",
            place,
            field,
            _listed(names),
            Argument("field"),
        )
    return names.index(field)


def _text_of(record: dict[str, Any], field: str, place: str) -> str:
    """Return a record's text; null counts as empty."""
    if field not in record:
        _column(list(record), field, place)
    text = record[field]
    if text is None:
        return ""
    if not isinstance(text, str):
        raise UserError(f"{place}: `{field}` is {type(text).__name__}, not text.")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # JSON can escape half of a surrogate pair
        raise UserError(f"{place}: `{field}` is not valid Unicode ({error.reason}).") from error
    return text


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "none"


_READERS: dict[str, Callable[[Source, ReadOptions, Meter], Iterator[Fragment]]] = {
    "text": _read_text,
    "jsonl": _read_jsonl,
    "csv": _read_csv,
    "parquet": _read_parquet,
    "fasta": _read_fasta,
    "hub": _read_hub,
}
