"""Prompts with answers, and texts that stand alone, read from files."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from didi_instruct.data.readers import ReadOptions, read_pieces, read_records
from didi_instruct.data.sources import Meter, Source, find_sources, readable
from didi_instruct.errors import UserError


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt and the answer to learn or to score."""

    prompt: str
    answer: str
    where: str
    """File and row, for errors."""


def read_examples(path: str | Path) -> Iterator[Example]:
    """Read the records of .jsonl files (gz, xz, zst): `prompt` and `answer`, both text.

    `path` is a file or a folder of them; other files of a folder are passed over.
    """
    sources = [source for source in find_sources(str(path)) if source.kind == "jsonl"]
    if not sources:
        raise UserError(f"{path}: prompts with answers are read from .jsonl (gz, xz, zst) files.")
    empty = True
    for source in sources:
        for example in _examples_of(source):
            empty = False
            yield example
    if empty:
        raise UserError(
            f"{path}: has no rows; write one a line, as "
            '{"prompt": "The capital of France is", "answer": " Paris"}.'
        )


def read_texts(path: str, options: ReadOptions) -> Iterator[Example]:
    """Read documents of any readable file, each as an answer without a prompt."""
    for source in find_sources(path):
        parts: list[str] = []
        number = 1
        for piece in read_pieces(source, options, Meter()):
            parts.append(piece.text)
            if piece.last:
                yield Example("", "".join(parts), f"{source.name}, document {number}")
                parts, number = [], number + 1


def _examples_of(source: Source) -> Iterator[Example]:
    with readable(source):
        for where, record in read_records(source, Meter()):
            prompt, answer = (text_of(record, field, where) for field in ("prompt", "answer"))
            yield Example(prompt, answer, where)


def text_of(record: Mapping[str, Any], field: str, where: str) -> str:
    """Return a field of a record, which has to hold some text."""
    if field not in record:
        known = ", ".join(f"`{name}`" for name in record) or "none"
        raise UserError(f"{where}: has no field `{field}`, only {known}: rename the one meant.")
    return checked_text(record[field], field, where)


def checked_text(text: Any, field: str, where: str) -> str:
    """Return a value that is some text; others are refused by the name of their field."""
    if not isinstance(text, str):
        raise UserError(f"{where}: `{field}` is {text!r:.40}, not text: write it in quotes.")
    if not text.strip():
        raise UserError(f"{where}: `{field}` is empty: fill it, or take the row out.")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # JSON can escape half of a surrogate pair
        raise UserError(
            f"{where}: `{field}` is not valid Unicode ({error.reason}): take the character out."
        ) from error
    return text
