"""Prompts with answers: read from files, and cut into the tokens of either."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from didi_instruct.data.readers import ReadOptions, read_pieces, read_records
from didi_instruct.data.sources import Meter, Source, find_sources, readable
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import UserError


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt and the answer to learn or to score."""

    prompt: str
    answer: str
    where: str
    """File and row, for errors."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """Tokens of a prompt and of its answer; together, those of the whole text."""

    prompt: list[int]
    answer: list[int]


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
            prompt, answer = (_text(record, field, where) for field in ("prompt", "answer"))
            yield Example(prompt, answer, where)


def _text(record: dict[str, Any], field: str, where: str) -> str:
    """Return a field that holds some text."""
    if field not in record:
        known = ", ".join(f"`{name}`" for name in record) or "none"
        raise UserError(f"{where}: has no field `{field}`, only {known}: rename the one meant.")
    text = record[field]
    if not isinstance(text, str):
        raise UserError(f"{where}: `{field}` is {type(text).__name__}, but text is needed.")
    if not text.strip():
        raise UserError(f"{where}: `{field}` is empty: fill it, or take the row out.")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # JSON can escape half of a surrogate pair
        raise UserError(f"{where}: `{field}` is not valid Unicode ({error.reason}).") from error
    return text


def encode(prompt: str, answer: str, tokenizer: Tokenizer) -> Encoded:
    """Tokens of a prompt and its answer, encoded as one text and cut between them."""
    [encoded] = encode_all([(prompt, answer)], tokenizer)
    return encoded


def encode_all(pairs: Sequence[tuple[str, str]], tokenizer: Tokenizer) -> list[Encoded]:
    """`encode` for many pairs of prompt and answer, on all cores.

    White space that ends a prompt moves to its answer, since tokens of words mostly begin with
    their space. The answer begins at the first token that the prompt alone would not have, so all
    of its text is in it even where a token spans the cut.
    """
    prompts = [prompt.rstrip() for prompt, _ in pairs]
    whole = tokenizer.encode([prompt + answer for prompt, answer in pairs])
    alone = tokenizer.encode(prompts)
    return [_cut(text, prompt) for text, prompt in zip(whole, alone, strict=True)]


def _cut(text: list[int], prompt: list[int]) -> Encoded:
    shared = min(len(text), len(prompt))
    first = next((i for i in range(shared) if text[i] != prompt[i]), shared)
    return Encoded(text[:first], text[first:])
