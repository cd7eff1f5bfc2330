"""Prompts with answers on disk: encoded once, memory-mapped afterwards.

A run needs no more memory for a longer file, and goes on without the file that it was made from.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from itertools import islice
from pathlib import Path

import numpy as np

from didi_instruct.data.files import AtomicFile, no_space_as_user_error, sha256_file, write_atomic
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import UserError
from didi_instruct.seeding import mix
from didi_instruct.tasks.answers import ROW, TOKEN, AnswerRows, Window
from didi_instruct.tasks.encoding import Encoded, encode_rows
from didi_instruct.tasks.prompts import Example

MANIFEST, TOKENS, INDEX = "answers.json", "answers-tokens.bin", "answers-index.bin"
FORMAT = {"format": "didi-answers", "version": 1}
AT_ONCE = 1024
"""Examples that are encoded together."""
CHANGED = "changed since the run began: bring back what it began with, or choose another --out."


@dataclass(frozen=True)
class Prepared:
    """What was written: content of the manifest."""

    examples: str
    """Hash of the examples."""
    settings: str
    """Hash of tokenizer and window."""
    rows: int
    tokens: int
    cut: int
    """Rows that were cut."""
    dropped: int
    """Rows that were left out."""
    sha256: str
    """Of the tokens."""


class ExampleHash:
    """Hash of prompts and answers in order; where they stand does not matter."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def add(self, example: Example) -> None:
        """Take one more into account."""
        for text in (example.prompt, example.answer):
            encoded = text.encode()
            self._digest.update(len(encoded).to_bytes(8, "little") + encoded)

    @property
    def value(self) -> str:
        """Hexadecimal hash of all that were added."""
        return self._digest.hexdigest()


def open_answers(
    read: Callable[[], Iterable[Example]] | None,
    folder: Path,
    tokenizer: Tokenizer,
    window: Window,
    *,
    seed: int = 0,
    valid: int | None = None,
    begun: bool = False,
) -> tuple[AnswerRows, AnswerRows | None, Prepared]:
    """Encode examples into a folder, unless they are there, and open training and held-out rows.

    `valid` rows are held out, by default 1%: those whose prompts have the smallest hashes, so that
    equal prompts stay together. `read` of None takes what is there. A run that has `begun` refuses
    other examples than it began with.
    """
    prepared, settings = _read_manifest(folder), _settings(tokenizer, window)
    if prepared is None and read is None:
        raise UserError(f"{folder}: has no {MANIFEST}: give the data again.")
    if prepared is not None and begun and prepared.settings != settings:
        raise UserError(f"{folder}: the model's tokenizer or window, or answers.*, {CHANGED}")
    if read is not None:
        same = prepared is not None and prepared.settings == settings
        if prepared is None or not same or _hash(read()) != prepared.examples:
            if prepared is not None and begun:
                raise UserError(f"{folder}: the prompts and answers {CHANGED}")
            prepared = _write(read(), folder, tokenizer, window)
    assert prepared is not None
    tokens, index = _open_files(folder, prepared)
    train, held_out = _split(index, valid)
    mark = _digest(prepared.examples, settings, str(seed), str(len(held_out)))[:16]
    rows = AnswerRows(tokens, train, tokenizer, window, seed=seed, fingerprint=mark)
    if not len(held_out):
        return rows, None, prepared
    return rows, AnswerRows(tokens, held_out, tokenizer, window, fingerprint=mark), prepared


def _write(
    examples: Iterable[Example], folder: Path, tokenizer: Tokenizer, window: Window
) -> Prepared:
    """Encode and write all examples; the manifest comes last."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).unlink(missing_ok=True)
    hashed, digest = ExampleHash(), hashlib.sha256()
    rows = start = cut = dropped = 0
    tokens, index = AtomicFile(folder / TOKENS), AtomicFile(folder / INDEX)
    try:
        with no_space_as_user_error(folder):
            for example, encoded in _encoded(examples, tokenizer):
                hashed.add(example)
                fitted, was_cut = window.fit(encoded, example.where, tokenizer)
                if not fitted.answer:
                    dropped += 1
                    continue
                sizes = len(fitted.prompt), len(fitted.answer)
                key = mix("held-out", example.prompt or example.answer)
                entry = np.array((start, *sizes, key), ROW)
                data = np.array(fitted.prompt + fitted.answer, TOKEN).tobytes()
                index.write(entry.tobytes())
                tokens.write(data)
                digest.update(data)
                rows, start, cut = rows + 1, start + sum(sizes), cut + was_cut
            if not rows:
                raise UserError(
                    f"The data has no rows that fit the {window.length} tokens that the model "
                    "reads: add rows, or cut them (data.long=cut)."
                )
            tokens.commit()
            index.commit()
            settings = _settings(tokenizer, window)
            counts = rows, start, cut, dropped
            made = Prepared(hashed.value, settings, *counts, digest.hexdigest())
            content = json.dumps(FORMAT | asdict(made), indent=1) + "\n"
            write_atomic(folder / MANIFEST, content.encode())
    finally:
        tokens.discard()
        index.discard()
    return made


def _encoded(
    examples: Iterable[Example], tokenizer: Tokenizer
) -> Iterator[tuple[Example, Encoded]]:
    """Encode examples, `AT_ONCE` together."""
    left = iter(examples)
    while batch := list(islice(left, AT_ONCE)):
        pairs = [(one.prompt, one.answer) for one in batch]
        found = encode_rows(pairs, [one.where for one in batch], tokenizer)
        yield from zip(batch, found, strict=True)


def _hash(examples: Iterable[Example]) -> str:
    hashed = ExampleHash()
    for example in examples:
        hashed.add(example)
    return hashed.value


def _settings(tokenizer: Tokenizer, window: Window) -> str:
    """Hash of what decides the tokens, beside the examples."""
    banned = ",".join(map(str, sorted(window.banned)))
    parts = (window.length, window.long, window.end, window.fill, banned, window.skips)
    return _digest(tokenizer.hash, *map(str, parts))


def _digest(*parts: str) -> str:
    return hashlib.sha256("/".join(parts).encode()).hexdigest()


def _read_manifest(folder: Path) -> Prepared | None:
    """Read what a folder says about its answers; None where it says nothing that is whole."""
    try:
        content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if FORMAT.items() <= content.items():
            return Prepared(**{field.name: content[field.name] for field in fields(Prepared)})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    return None


def _open_files(folder: Path, prepared: Prepared) -> tuple[np.ndarray, np.ndarray]:
    """Map the tokens, and read the index of rows."""
    try:
        index = np.fromfile(folder / INDEX, ROW)
        whole = len(index) == prepared.rows and sha256_file(folder / TOKENS) == prepared.sha256
    except OSError:
        whole = False
    if not whole:
        raise UserError(f"{folder}: its tokens are damaged: delete the folder, or choose --out.")
    return np.memmap(folder / TOKENS, TOKEN, mode="r", shape=(prepared.tokens,)), index


def _split(index: np.ndarray, valid: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Training rows in the order of the file, and held-out ones in the order of their hashes."""
    count = -(-len(index) // 100) if valid is None else valid
    order = np.argsort(index["key"], kind="stable")
    keys = index["key"][order]
    if 0 < count < len(index):
        count = int(np.searchsorted(keys, keys[count - 1], side="right"))
    if count >= len(index):
        if valid is None:
            count = 0  # a single prompt: nothing can be held out
        else:
            raise UserError(
                f"data.valid is {valid}, and with rows of the same prompts that is all "
                f"{len(index)} rows: hold out fewer, or add rows."
            )
    return index[np.sort(order[count:])], index[order[:count]]
