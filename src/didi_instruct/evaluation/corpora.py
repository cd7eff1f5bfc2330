"""The seven corpora of the paper's zero-shot table: where they are, and their documents as text.

A folder has a file of each, in the form it is usually handed around in; without a folder they come
from the Hugging Face hub, in the splits that the field measures. The hub's `scientific_papers` are
whole articles, while the files of PubMed and arXiv hold abstracts: their numbers do
not compare.
"""

import csv
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from didi_instruct.config.schema import nearest
from didi_instruct.data.hub import stream_of
from didi_instruct.data.readers import ReadOptions, read_pieces
from didi_instruct.data.sources import Compression, Meter, Source
from didi_instruct.errors import UserError
from didi_instruct.evaluation import detokenize as rules
from didi_instruct.evaluation.detokenize import Rules, detokenize

_COMPRESSIONS: tuple[Compression, ...] = get_args(Compression)


@dataclass(frozen=True, slots=True)
class HubData:
    """Where a corpus is on the Hugging Face hub, in the split that the field measures."""

    name: str
    config: str
    split: str
    field: str = "text"
    revision: str | None = None
    """Of the hub's own Parquet copy, for a data set whose main branch is a program to run."""
    rules: Rules | None = None
    """How to detokenise it, where it is another form than the local file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """One corpus: the file it comes in, and what a document of it is."""

    files: tuple[str, ...]
    """Names of its file, the best first, without the ending of a compression.

    A .jsonl file has records and a .csv file rows; in any other, a document is a line."""
    fields: tuple[str, ...] = ("text",)
    """Fields of a record or columns of a row that make a document, joined by a space."""
    columns: tuple[str, ...] = ()
    """Columns of its .csv file, which has no header."""
    rules: Rules
    hub: HubData


_PARQUET = "refs/convert/parquet"


def _articles(config: str) -> HubData:
    name, table = "armanc/scientific_papers", rules.SCIENTIFIC_PAPERS
    return HubData(name, config, "validation", "article", _PARQUET, table)


CORPORA: dict[str, Corpus] = {
    "ptb": Corpus(
        files=("ptb*test*.txt",),
        rules=rules.PTB,
        hub=HubData(
            "ptb-text-only/ptb_text_only", "penn_treebank", "validation", "sentence", _PARQUET
        ),
    ),
    # The test set of WikiText-2 is that of WikiText-103; .tokens has <unk> for its rare words.
    "wikitext": Corpus(
        files=("wiki*test*.raw", "wiki*test*.tokens"),
        rules=rules.WIKITEXT,
        hub=HubData("Salesforce/wikitext", "wikitext-103-raw-v1", "validation"),
    ),
    "lm1b": Corpus(
        files=("lm1b*test*.txt",),
        rules=rules.LM1B,
        hub=HubData("billion-word-benchmark/lm1b", "plain_text", "test", "text", _PARQUET),
    ),
    "lambada": Corpus(
        files=("lambada*test*.jsonl",),
        rules=rules.LAMBADA,
        hub=HubData("EleutherAI/lambada_openai", "default", "test"),
    ),
    "ag_news": Corpus(
        files=("ag_news*test*.csv",),
        fields=("title", "description"),
        columns=("class", "title", "description"),
        rules=rules.AG_NEWS,
        hub=HubData("fancyzhx/ag_news", "default", "test"),
    ),
    "pubmed": Corpus(files=("pubmed*.jsonl",), rules=rules.ABSTRACTS, hub=_articles("pubmed")),
    "arxiv": Corpus(
        files=("arxiv*.jsonl",), fields=("abstract",), rules=rules.ABSTRACTS, hub=_articles("arxiv")
    ),
}
"""In the order of the paper's table."""


@dataclass(frozen=True, slots=True)
class Documents:
    """The documents of a corpus, detokenised, read anew each time; no `path` means the hub."""

    corpus: str
    path: Path | None = None

    def __iter__(self) -> Iterator[str]:
        if self.path is None:
            return load_corpus(self.corpus)
        return read_corpus(self.corpus, self.path)

    @property
    def source(self) -> str:
        """The file, or the hub's id."""
        return f"hf:{CORPORA[self.corpus].hub.name}" if self.path is None else str(self.path)


def corpus_named(name: str) -> Corpus:
    """Return the corpus of this name."""
    if name not in CORPORA:
        raise UserError(f"`{name}` is not a corpus.{nearest(name.lower(), list(CORPORA))}")
    return CORPORA[name]


def open_corpora(names: Iterable[str], folder: str | Path | None = None) -> dict[str, Documents]:
    """Find the corpora of these names: their files in `folder`, or all of them on the hub."""
    wanted = {name: corpus_named(name) for name in names}
    if folder is None:
        return {name: Documents(name) for name in wanted}
    found = find_corpora(folder)
    missing = {name: corpus for name, corpus in wanted.items() if name not in found}
    if missing:
        raise UserError(
            f"{folder}: has no file of {', '.join(missing)}: looked for "
            f"{_looked_for(missing.values())}. Add it, or choose: --corpora {','.join(found)}."
        )
    return {name: Documents(name, found[name]) for name in wanted}


def find_corpora(folder: str | Path) -> dict[str, Path]:
    """Tell which corpora have a file in `folder`, by the files' names."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder of corpora.")
    found = {name: _find_file(folder, name) for name in CORPORA}
    if not any(found.values()):
        raise UserError(
            f"{folder}: has none of the corpora: looked for {_looked_for(CORPORA.values())}."
        )
    return {name: path for name, path in found.items() if path is not None}


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


def _looked_for(corpora: Iterable[Corpus]) -> str:
    names = ", ".join(name for corpus in corpora for name in corpus.files)
    return f"{names} (or with {', '.join('.' + c for c in _COMPRESSIONS)} behind it)"


def _compression(path: Path) -> Compression | None:
    return next((c for c in _COMPRESSIONS if path.suffix == f".{c}"), None)


def _plain_name(path: Path) -> str:
    return path.name if _compression(path) is None else path.stem


def read_corpus(name: str, path: Path) -> Iterator[str]:
    """Read a corpus from its file: detokenised documents, blank ones left out."""
    corpus = corpus_named(name)
    readers = {".jsonl": _records, ".csv": _csv_rows}
    read = readers.get(Path(_plain_name(path)).suffix)
    texts = _lines(path) if read is None else read(path, corpus)
    documents = _detokenised(texts, corpus.rules)
    first = next(documents, None)
    if first is None:
        raise UserError(f"{path.name}: has no text.")
    yield first
    yield from documents


def _detokenised(texts: Iterable[str], table: Rules) -> Iterator[str]:
    return (detokenize(text, table) for text in texts if text.strip())


def _lines(path: Path) -> Iterator[str]:
    """Lines that are not blank, with any kind of line end."""
    source = Source(name=path.name, kind="text", path=path, compression=_compression(path))
    line = ""
    for piece in read_pieces(source, ReadOptions(documents="line"), Meter()):
        line += piece.text
        if piece.last:
            yield line
            line = ""


def _records(path: Path, corpus: Corpus) -> Iterator[str]:
    for number, line in enumerate(_lines(path), 1):
        place = f"{path.name} (record {number})"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{place}: not JSON ({error}).") from error
        yield " ".join(_text_of(record, field, place) for field in corpus.fields)


def _text_of(record: Any, field: str, place: str) -> str:
    """Return a record's text; null counts as empty."""
    if not isinstance(record, dict) or field not in record:
        there = ", ".join(f"`{key}`" for key in record) if isinstance(record, dict) else ""
        raise UserError(f"{place}: has no field `{field}`, only {there or 'no fields at all'}.")
    text = record[field]
    if text is not None and not isinstance(text, str):
        raise UserError(f"{place}: `{field}` is {type(text).__name__}, not text.")
    return text or ""


def _csv_rows(path: Path, corpus: Corpus) -> Iterator[str]:
    rows = csv.reader((f"{line}\n" for line in _lines(path)), strict=True)
    columns: Sequence[str] = corpus.columns
    try:
        for number, row in enumerate(rows, 1):
            named = [cell.strip().lower() for cell in row]
            if number == 1 and set(corpus.fields) <= set(named):  # some copies have a header
                columns = named
                continue
            if len(row) != len(columns):
                raise UserError(
                    f"{path.name} (row {number}): has {len(row)} columns instead of "
                    f"{len(columns)} ({', '.join(columns)})."
                )
            yield " ".join(row[columns.index(field)] for field in corpus.fields)
    except csv.Error as error:
        raise UserError(f"{path.name} (row {rows.line_num}): not CSV ({error}).") from error


def load_corpus(name: str) -> Iterator[str]:
    """Stream a corpus from the Hugging Face hub: detokenised documents, blank ones left out."""
    corpus = corpus_named(name)
    hub = corpus.hub
    table = corpus.rules if hub.rules is None else hub.rules
    return _detokenised(_hub_texts(name, hub), table)


def _hub_texts(name: str, hub: HubData) -> Iterator[str]:
    where = {"name": hub.config}
    if hub.revision is not None:  # the copies have a folder for each configuration
        where = {"data_dir": hub.config, "revision": hub.revision}
    records = stream_of(
        hub.name,
        hub.split,
        place=f"hf:{hub.name}",
        feature="Reading corpora from the hub, not from --data FOLDER,",
        what=name,
        or_else=f": try again, or give a folder with {_looked_for([CORPORA[name]])}",
        where=where,
    )
    for record, place in records:
        yield _text_of(record, hub.field, place)
