"""The seven corpora of the paper's zero-shot table: where they are, and their documents as text.

A folder has a file of each, in the form it is usually handed around in; without a folder they come
from the Hugging Face hub, in the splits that the field measures. The hub's `scientific_papers` are
whole articles, while the files of PubMed and arXiv hold abstracts: their numbers do not compare.
"""

import csv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from didi_instruct.config.schema import nearest
from didi_instruct.data.hub import stream_of
from didi_instruct.data.readers import ReadOptions, read_pieces, read_records
from didi_instruct.data.sources import Compression, Meter, Source, readable
from didi_instruct.errors import UserError
from didi_instruct.evaluation import detokenize as rules
from didi_instruct.evaluation.detokenize import Rules, detokenize

_COMPRESSIONS: tuple[Compression, ...] = get_args(Compression)


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """One corpus: its file, its place on the Hugging Face hub, and what a document of it is."""

    files: tuple[str, ...]
    """Patterns of its file's name, the best first, without the ending of a compression.

    A .jsonl file has records and a .csv file rows; in any other a document is a line."""
    fields: tuple[str, ...] = ("text",)
    """Field of a record, or columns of a row, that make a document, joined by a space."""
    columns: tuple[str, ...] = ()
    """Columns of its .csv file, which has no header."""
    rules: Rules
    hub: str
    config: str
    split: str
    """The one that the field measures."""
    hub_field: str = "text"
    parquet: bool = False
    """On the hub it is a program to run, of which the hub has a copy in Parquet."""
    hub_rules: Rules | None = None
    """How to detokenise the hub's form, where it is another than the file's."""


def _papers(config: str, **file: Any) -> Corpus:
    return Corpus(
        **file,
        rules=rules.ABSTRACTS,
        hub="armanc/scientific_papers",
        config=config,
        split="validation",
        hub_field="article",
        parquet=True,
        hub_rules=rules.SCIENTIFIC_PAPERS,
    )


CORPORA: dict[str, Corpus] = {
    "ptb": Corpus(
        files=("ptb*test*.txt",), rules=rules.PTB, parquet=True, hub_field="sentence",
        hub="ptb-text-only/ptb_text_only", config="penn_treebank", split="validation",
    ),
    # The test set of WikiText-2 is that of WikiText-103; .tokens has <unk> for its rare words.
    "wikitext": Corpus(
        files=("wiki*test*.raw", "wiki*test*.tokens"), rules=rules.WIKITEXT,
        hub="Salesforce/wikitext", config="wikitext-103-raw-v1", split="validation",
    ),
    "lm1b": Corpus(
        files=("lm1b*test*.txt",), rules=rules.LM1B, parquet=True,
        hub="billion-word-benchmark/lm1b", config="plain_text", split="test",
    ),
    "lambada": Corpus(
        files=("lambada*test*.jsonl",), rules=rules.LAMBADA,
        hub="EleutherAI/lambada_openai", config="default", split="test",
    ),
    "ag_news": Corpus(
        files=("ag_news*test*.csv",), rules=rules.AG_NEWS,
        fields=("title", "description"), columns=("class", "title", "description"),
        hub="fancyzhx/ag_news", config="default", split="test",
    ),
    "pubmed": _papers("pubmed", files=("pubmed*.jsonl",)),
    "arxiv": _papers("arxiv", files=("arxiv*.jsonl",), fields=("abstract",)),
}  # fmt: skip
"""In the order of the paper's table."""


@dataclass(frozen=True, slots=True)
class Documents:
    """The documents of a corpus, detokenised, read anew each time; blank ones are left out."""

    name: str
    path: Path | None = None
    """Its file; None: the hub."""

    @property
    def source(self) -> str:
        """The file, or the hub's id."""
        return f"hf:{CORPORA[self.name].hub}" if self.path is None else str(self.path)

    def __iter__(self) -> Iterator[str]:
        corpus, table = CORPORA[self.name], CORPORA[self.name].rules
        if self.path is None:
            texts, table = _hub_texts(self.name, corpus), corpus.hub_rules or table
        else:
            texts = _file_texts(self.path, corpus)
        empty = True
        for text in texts:
            if text.strip():
                yield detokenize(text, table)
                empty = False
        if empty and self.path is not None:
            raise UserError(f"{self.path.name}: has no text.")


def open_corpora(names: Iterable[str], folder: str | Path | None = None) -> dict[str, Documents]:
    """Find the corpora of these names: their files in `folder`, or all of them on the hub."""
    wanted = list(names)
    for name in wanted:
        if name not in CORPORA:
            raise UserError(f"`{name}` is not a corpus.{nearest(name.lower(), list(CORPORA))}")
    if folder is None:
        return {name: Documents(name) for name in wanted}
    found = find_corpora(folder)
    missing = [name for name in wanted if name not in found]
    if missing:
        raise UserError(
            f"{folder}: has no file of {', '.join(missing)}: looked for {_looked_for(missing)}. "
            f"Add it, or choose: --corpora {','.join(found)}."
        )
    return {name: Documents(name, found[name]) for name in wanted}


def find_corpora(folder: str | Path) -> dict[str, Path]:
    """Tell which corpora have a file in `folder`, by the files' names."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder of corpora.")
    found = {name: path for name in CORPORA if (path := _find_file(folder, name)) is not None}
    if not found:
        raise UserError(f"{folder}: has none of the corpora: looked for {_looked_for(CORPORA)}.")
    return found


def _find_file(folder: Path, name: str) -> Path | None:
    endings = ("", *(f".{compression}" for compression in _COMPRESSIONS))
    for pattern in CORPORA[name].files:
        paths = [path for end in endings for path in folder.glob(pattern + end) if path.is_file()]
        if len({_plain_name(path) for path in paths}) > 1:
            names = ", ".join(sorted(path.name for path in paths))
            raise UserError(f"{folder}: has more than one file of {name} ({names}): keep one.")
        if paths:
            return paths[0]
    return None


def _looked_for(names: Iterable[str]) -> str:
    files = ", ".join(file for name in names for file in CORPORA[name].files)
    return f"{files} (or with {', '.join('.' + c for c in _COMPRESSIONS)} behind it)"


def _compression(path: Path) -> Compression | None:
    return next((c for c in _COMPRESSIONS if path.suffix == f".{c}"), None)


def _plain_name(path: Path) -> str:
    return path.name if _compression(path) is None else path.stem


def _file_texts(path: Path, corpus: Corpus) -> Iterator[str]:
    source = Source(name=path.name, kind="text", path=path, compression=_compression(path))
    ending = Path(_plain_name(path)).suffix
    if ending == ".jsonl":
        with readable(source):
            for place, record in read_records(source, Meter()):
                yield _text_of(record, corpus.fields[0], place)
    elif ending == ".csv":
        yield from _csv_texts(source, corpus)
    else:
        yield from _lines(source)


def _lines(source: Source) -> Iterator[str]:
    """Lines that are not blank, with any kind of line end."""
    line = ""
    for piece in read_pieces(source, ReadOptions(documents="line"), Meter()):
        line += piece.text
        if piece.last:
            yield line
            line = ""


def _csv_texts(source: Source, corpus: Corpus) -> Iterator[str]:
    rows = csv.reader((f"{line}\n" for line in _lines(source)), strict=True)
    columns = list(corpus.columns)
    try:
        for number, row in enumerate(rows, 1):
            named = [cell.strip().lower() for cell in row]
            if number == 1 and set(corpus.fields) <= set(named):  # some copies have a header
                columns = named
                continue
            if len(row) != len(columns):
                raise UserError(
                    f"{source.name} (row {number}): has {len(row)} columns instead of "
                    f"{len(columns)} ({', '.join(columns)})."
                )
            yield " ".join(row[columns.index(field)] for field in corpus.fields)
    except csv.Error as error:
        raise UserError(f"{source.name} (row {rows.line_num}): not CSV ({error}).") from error


def _hub_texts(name: str, corpus: Corpus) -> Iterator[str]:
    where = {"name": corpus.config}
    if corpus.parquet:  # the copies have a folder for each configuration
        where = {"data_dir": corpus.config, "revision": "refs/convert/parquet"}
    records = stream_of(
        corpus.hub,
        corpus.split,
        place=f"hf:{corpus.hub}",
        feature="Reading corpora from the hub, not from --data FOLDER,",
        what=name,
        or_else=f": try again, or give a folder with {_looked_for([name])}",
        where=where,
    )
    for record, place in records:
        yield _text_of(record, corpus.hub_field, place)


def _text_of(record: dict[str, Any], field: str, place: str) -> str:
    """Return a record's text; null counts as empty."""
    if field not in record:
        there = ", ".join(f"`{key}`" for key in record) or "no fields at all"
        raise UserError(f"{place}: has no field `{field}`, only {there}.")
    text = record[field]
    if text is not None and not isinstance(text, str):
        raise UserError(f"{place}: `{field}` is {type(text).__name__}, not text.")
    return text or ""
