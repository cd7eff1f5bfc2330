"""MMLU's questions: CSV files (with a header, or as first published) and the hub's Parquet.

test/SUBJECT_test.csv, dev/SUBJECT_dev.csv, val/SUBJECT_val.csv, auxiliary_train/*.csv
all/test-00000-of-00001.parquet, all/dev-…, all/validation-…, all/auxiliary_train-…
"""

import csv
import hashlib
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from didi_instruct.data.sources import Meter, Source, find_sources, open_decompressed, readable
from didi_instruct.errors import MissingExtraError, UserError, first_line
from didi_instruct.tasks.prompts import Example

LETTERS = "ABCD"
COLUMNS = ("question", "choice0", "choice1", "choice2", "choice3", "answer")

_SPLITS = {"dev": "dev", "val": "validation", "validation": "validation", "test": "test"}
_SPLITS |= {"auxiliary_train": "train"}
_CSV = re.compile(r"(?:.*/)?(?P<subject>[^/]+)_(?P<split>dev|val|test)\.csv(?:\.\w+)?")
_TRAIN_CSV = re.compile(r"(?:.*/)?(?P<split>auxiliary_train)/[^/]+\.csv(?:\.\w+)?")
_PARQUET = re.compile(r"(?:.*/)?(?P<split>dev|validation|test|auxiliary_train)-\d+-of-\d+\.parquet")


@dataclass(frozen=True, slots=True)
class Question:
    """A question with four choices."""

    subject: str
    """As files name it, `high_school_physics`; empty in the train split."""
    text: str
    choices: tuple[str, ...]
    answer: int
    where: str
    """File and row, for errors."""


@dataclass(frozen=True, slots=True)
class Mmlu:
    """The splits of MMLU, empty where a folder lacks them."""

    dev: list[Question]
    validation: list[Question]
    test: list[Question]
    train: list[Question]


def read_mmlu(folder: str | Path) -> Mmlu:
    """Read all splits of a folder, in the order of its files."""
    if not Path(folder).is_dir():
        raise UserError(f"{folder}: no such folder; give the folder of MMLU's files.")
    splits: dict[str, list[Question]] = {name: [] for name in _SPLITS.values()}
    for source, split, subject in _files(find_sources(str(folder))):
        with readable(source):
            read = _read_parquet(source) if source.kind == "parquet" else _read_csv(source, subject)
            splits[split].extend(read)
    if not splits["test"]:
        raise UserError(
            f"{folder}: has no test questions of MMLU; expected test/SUBJECT_test.csv or "
            "all/test-00000-of-00001.parquet below it."
        )
    return Mmlu(**splits)


def _files(sources: Iterable[Source]) -> list[tuple[Source, str, str]]:
    """Files with their split and subject; of the hub's configurations `all` alone, if it is there.

    A name that is none of MMLU's is passed over.
    """
    found = []
    for source in sources:
        name = "/" + source.name
        match = _CSV.fullmatch(name) or _TRAIN_CSV.fullmatch(name) or _PARQUET.fullmatch(name)
        if match is not None:
            parts = match.groupdict()
            found.append((source, _SPLITS[parts["split"]], parts.get("subject") or ""))
    whole = [entry for entry in found if f"/{entry[0].name}".endswith(".parquet")]
    whole = [entry for entry in whole if "/all/" in f"/{entry[0].name}"]
    return whole or found


def _read_csv(source: Source, subject: str) -> Iterator[Question]:
    """Read question, four choices and answer; a header is told by its last word, `answer`."""
    with open_decompressed(source, Meter()) as stream:
        rows = csv.reader(io.TextIOWrapper(stream, encoding="utf-8-sig", newline=""), strict=True)
        try:
            for number, row in enumerate(rows):
                where = f"{source.name}:{rows.line_num}"
                if number == 0 and row and row[-1].strip().lower() == "answer":
                    _check_header(row, where)
                elif row:
                    yield _of_row(row, subject, where)
        except csv.Error as error:
            raise UserError(
                f"{source.name}:{rows.line_num}: not CSV ({error}): quote it anew."
            ) from error
        except UnicodeDecodeError as error:
            raise UserError(
                f"{source.name}: not UTF-8 ({error.reason}): convert the file to UTF-8."
            ) from error


def _check_header(row: Sequence[str], where: str) -> None:
    if tuple(name.strip().lower() for name in row) != COLUMNS:
        raise UserError(
            f"{where}: has the columns {', '.join(row)}; MMLU's are {', '.join(COLUMNS)}: rename "
            "them."
        )


def _of_row(row: Sequence[str], subject: str, where: str) -> Question:
    if len(row) != len(COLUMNS):
        raise UserError(
            f"{where}: has {len(row)} columns, but a question, four choices and an answer are "
            f"{len(COLUMNS)}: add or quote what is missing."
        )
    return _question(subject, row[0], row[1:5], row[5], where)


def _question(subject: str, text: Any, choices: Any, answer: Any, where: str) -> Question:
    """Check a record; its answer is a letter or an index from 0."""
    if not isinstance(text, str) or not text.strip():
        raise UserError(f"{where}: the question is empty: fill it, or take the row out.")
    if not isinstance(choices, list) or len(choices) != 4:
        raise UserError(f"{where}: has no list of four choices: MMLU's questions have four.")
    word = str(answer).strip()
    known = [*LETTERS, *map(str, range(4))]
    if word not in known:
        raise UserError(f"{where}: the answer is `{word}`: use A, B, C, D or an index, 0 to 3.")
    return Question(subject, text, tuple(map(str, choices)), known.index(word) % 4, where)


def _read_parquet(source: Source) -> Iterator[Question]:
    """Read the hub's columns: subject, question, choices (a list) and answer (an index)."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise MissingExtraError("Reading MMLU from .parquet files", "data") from error

    needed = {"subject", "question", "choices", "answer"}
    with open_decompressed(source, Meter()) as stream:
        try:
            file = pq.ParquetFile(io.BytesIO(stream.read()))
            names = file.schema_arrow.names
            if not needed <= set(names):
                raise UserError(
                    f"{source.name}: has the columns {', '.join(names)}; MMLU's are "
                    f"{', '.join(sorted(needed))}: take the files of the configuration `all`."
                )
            records = (
                r for batch in file.iter_batches(columns=[*needed]) for r in batch.to_pylist()
            )
            for number, record in enumerate(records, 1):
                where = f"{source.name}:{number}"
                text, choices, answer = (record[n] for n in ("question", "choices", "answer"))
                yield _question(record["subject"] or "", text, choices, answer, where)
        except pa.ArrowException as error:
            raise UserError(
                f"{source.name}: not a readable Parquet file ({first_line(error)}): fetch it again."
            ) from error


def prompt_of(question: Question, order: Sequence[int] = range(4)) -> str:
    """The question as lm-evaluation-harness prints it, its choices in an order, up to `Answer:`."""
    choices = [question.choices[index] for index in order]
    lines = [f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=True)]
    return "\n".join([question.text.strip(), *lines, "Answer:"])


def headline(subject: str) -> str:
    """First line of a prompt, with the empty line behind it."""
    about = f" about {subject.replace('_', ' ')}" if subject else ""
    return f"The following are multiple choice questions (with answers){about}.\n\n"


def with_shots(question: Question, shots: Sequence[Question], order: Sequence[int]) -> str:
    """Headline, answered examples, and the question."""
    answered = (f"{prompt_of(shot)} {LETTERS[shot.answer]}\n\n" for shot in shots)
    return headline(question.subject) + "".join(answered) + prompt_of(question, order)


def examples(questions: Iterable[Question]) -> list[Example]:
    """Prompts without shots, with the letter to answer, for training."""
    return [
        Example(with_shots(q, (), range(4)), f" {LETTERS[q.answer]}", q.where) for q in questions
    ]


def split_by_hash(
    questions: Iterable[Question], share: float
) -> tuple[list[Question], list[Question]]:
    """Cut off a share of the questions: that part, and the rest.

    A question goes where the hash of its text says, so that equal texts stay together whatever
    their files are.
    """
    if not 0 < share < 1:
        raise UserError(f"The share to cut off is {share}: use more than 0 and less than 1.")
    taken: list[Question] = []
    rest: list[Question] = []
    for question in questions:
        (taken if hashed(question) < share else rest).append(question)
    return taken, rest


def hashed(question: Question) -> float:
    """A number in [0, 1) that depends on the text of the question alone."""
    digest = hashlib.sha256(question.text.strip().encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64
