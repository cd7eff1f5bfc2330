"""Pairs of sentences with labels: MRPC as Microsoft's tables, or as GLUE's parquet files."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from didi_instruct.data.sources import Meter, Source, find_sources, open_decompressed, readable
from didi_instruct.errors import MissingExtraError, UserError, first_line

TRAIN, VALIDATION, TEST = SPLITS = ("train", "validation", "test")

_TABLES = {"msr_paraphrase_train.txt": TRAIN, "msr_paraphrase_test.txt": TEST}
_HEADER = ["Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"]
_PARQUET = re.compile(r"(train|validation|test)(-\d{5}-of-\d{5})?\.parquet")
_COLUMNS = ("sentence1", "sentence2", "label")


@dataclass(frozen=True, slots=True)
class Pair:
    """Two sentences, and whether one paraphrases the other."""

    first: str
    second: str
    label: int
    """1: a paraphrase."""


def read_pairs(data: Path) -> dict[str, list[Pair]]:
    """Read MRPC by split: `msr_paraphrase_*.txt` (gz, xz, zst), or GLUE's parquet files.

    `data` is the folder that holds them; each split is there once, `train` among them.
    """
    if not data.is_dir():
        raise UserError(f"{data}: is no folder; give the one with the files of MRPC.")
    found: dict[str, list[Source]] = {}
    for source in find_sources(str(data)):
        if split := _split_of(source):
            found.setdefault(split, []).append(source)
    if TRAIN not in found or len(found) < 2:
        names = ", ".join(s.name for sources in found.values() for s in sources) or "none of them"
        raise UserError(
            f"{data}: has {names}, but MRPC is {' and '.join(_TABLES)} (gz, xz, zst), or GLUE's "
            "train, validation and test in .parquet: put them there."
        )
    return {split: _read_split(data, split, found[split]) for split in SPLITS if split in found}


def _split_of(source: Source) -> str | None:
    """Return the split that a file holds, by its name, or None for other files."""
    assert source.path is not None
    name = source.path.name
    if source.kind == "parquet":
        match = _PARQUET.fullmatch(name)
        return match[1] if match else None
    return _TABLES.get(name.removesuffix(f".{source.compression}"))


def _read_split(data: Path, split: str, sources: list[Source]) -> list[Pair]:
    shards = all(source.kind == "parquet" and "-of-" in source.name for source in sources)
    if len(sources) > 1 and not shards:
        both = " and ".join(source.name for source in sources)
        raise UserError(f"{data}: {both} hold the same split, {split}: leave one of them.")
    pairs: list[Pair] = []
    for source in sources:
        with readable(source):
            read = _read_parquet if source.kind == "parquet" else _read_table
            pairs += read(source)
    if not pairs:
        raise UserError(f"{sources[0].name}: has no pairs: fetch it again.")
    return pairs


def _read_table(source: Source) -> Iterator[Pair]:
    """Read tab-separated lines under a header; quotation marks are part of the text."""
    with open_decompressed(source, Meter()) as stream:
        content = stream.read()
    try:
        text = content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{source.name}: not UTF-8 at byte {error.start}: fetch it again."
        ) from error
    # Sentences may hold other characters that Python takes for the end of a line.
    lines = text.replace("\r\n", "\n").removesuffix("\n").split("\n")
    header = lines[0].split("\t")
    if header != _HEADER:
        raise UserError(
            f"{source.name}:1: the columns are {', '.join(header)[:200]}, but MRPC has "
            f"{', '.join(_HEADER)}, separated by tabs: fetch it again."
        )
    for number, line in enumerate(lines[1:], 2):
        cells = line.split("\t")
        if len(cells) != len(_HEADER):
            raise UserError(
                f"{source.name}:{number}: has {len(cells)} columns instead of {len(_HEADER)}: mend "
                "the line, or fetch the file again."
            )
        yield _pair(cells[3], cells[4], cells[0], f"{source.name}:{number}")


def _read_parquet(source: Source) -> Iterator[Pair]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise MissingExtraError("Reading .parquet files", "data") from error
    if source.compression is not None:
        raise UserError(f"{source.name}: parquet is read as it is: unpack it first.")
    try:
        table = pq.read_table(source.path)
        if missing := [name for name in _COLUMNS if name not in table.column_names]:
            raise UserError(
                f"{source.name}: has no column {', '.join(missing)}, only "
                f"{', '.join(table.column_names)}: use the files of GLUE's mrpc."
            )
        rows = table.select(_COLUMNS).to_pylist()
    except (pa.ArrowException, UnicodeDecodeError) as error:
        reason = first_line(error)
        raise UserError(f"{source.name}: not a readable Parquet file ({reason}).") from error
    for number, row in enumerate(rows):
        first, second, label = (row[name] for name in _COLUMNS)
        yield _pair(first, second, label, f"{source.name}, row {number}")


def _pair(first: Any, second: Any, label: Any, where: str) -> Pair:
    if str(label) not in ("0", "1"):
        hidden = " (a label that GLUE hides: evaluate on another --split)" if label == -1 else ""
        raise UserError(f"{where}: the label is {label}{hidden}, and has to be 0 or 1: mend it.")
    for name, text in (("first", first), ("second", second)):
        if not isinstance(text, str) or not text.strip():
            raise UserError(f"{where}: the {name} sentence is empty: fill it, or take the row out.")
    return Pair(first.strip(), second.strip(), int(label))
