"""Zero-shot likelihood on the seven corpora of the paper (its table of zero-shot perplexities).

How text becomes rows, as in SEDD, MDLM and DUO: the corpus is detokenised, each document is
tokenised with the model's tokenizer and followed by end-of-text, all are joined in their order and
cut into rows of the model's length. A tail shorter than a row is dropped, so `tokens` says what was
measured. A perplexity is per token of that tokenizer, end-of-text included: it compares models only
where the tokenizer is the same.

Where this differs from the field: blank documents are left out (a third of WikiText's lines: to
the field each is one more end-of-text, which a model soon expects), and rows are cut as `didi data
prepare` cuts them (MDLM and DUO begin and end each row with an extra end-of-text, SEDD does not).
The field measures the splits that the hub entries below name; of `scientific_papers` it takes whole
articles, so abstracts of PubMed and arXiv cannot be compared with its numbers.
"""

import csv
import json
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from didi_instruct.config.model import ModelConfig
from didi_instruct.config.parse import nearest
from didi_instruct.data.dataset import TokenDataset
from didi_instruct.data.readers import ReadOptions, read_pieces
from didi_instruct.data.sources import Compression, Meter, Source
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import MissingExtraError, UserError
from didi_instruct.evaluation import detokenise as rules
from didi_instruct.evaluation.detokenise import Rules, detokenise
from didi_instruct.evaluation.likelihood import check_data, likelihood
from didi_instruct.training.objectives import Batch

DOCUMENTS_AT_ONCE = 64
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
    for name, corpus in wanted.items():
        if name not in found:
            raise UserError(f"{folder}: has no file of {name}: looked for {_looked_for([corpus])}.")
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
    return (detokenise(text, table) for text in texts if text.strip())


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
    try:
        import datasets
    except ImportError as error:
        raise MissingExtraError("Reading a Hugging Face dataset", "data") from error

    where = {"name": hub.config}
    if hub.revision is not None:  # the copies have a folder for each configuration
        where = {"data_dir": hub.config, "revision": hub.revision}
    try:
        records = datasets.load_dataset(hub.name, split=hub.split, streaming=True, **where)
        for number, record in enumerate(records, 1):
            yield _text_of(record, hub.field, f"hf:{hub.name} (record {number})")
    except UserError:
        raise
    except Exception as error:  # a network and a repository can fail in any way
        reason = (str(error) or type(error).__name__).strip().partition("\n")[0].rstrip(".")
        raise UserError(
            f"hf:{hub.name}: loading {name} from Hugging Face failed ({reason}): try again, or "
            f"give a folder with {_looked_for([CORPORA[name]])}."
        ) from error


@dataclass(frozen=True, slots=True)
class ZeroShotRow:
    """Likelihood of one corpus."""

    corpus: str
    perplexity: float
    ci95: tuple[float, float]
    """Of the perplexity; infinite where there is one row of tokens only."""
    nats_per_token: float
    tokens: int
    """Measured ones: whole rows only."""
    sequences: int
    """Rows of tokens."""
    documents: int
    """Documents that begin in these rows."""
    bound: bool
    """Whether the perplexity is an upper bound (diffusion) or exact (AR)."""
    draws: int
    """Noise levels tried per row."""
    seed: int


def zero_shot(
    model_loss: Callable[[Batch], torch.Tensor],
    config: ModelConfig,
    tokenizer: Tokenizer,
    corpora: Mapping[str, Iterable[str]],
    *,
    draws: int = 1,
    sequences: int | None = None,
    seed: int = 0,
    batch_size: int = 64,
    device: torch.device | str = "cpu",
    progress: Callable[[str, int, int], None] | None = None,
) -> list[ZeroShotRow]:
    """Measure a model on each corpus, a name and its documents: see `open_corpora`.

    `model_loss` is that of `likelihood`: batch -> nats per token of each sequence. At most
    `sequences` rows of each corpus are used, the first ones; None takes all. `progress` is told
    the corpus, the rows done and their number.
    """
    if min(draws, batch_size, 1 if sequences is None else sequences) < 1:
        raise UserError("sequences, draws and batch_size are 1 or more.")

    def measure(name: str, texts: Iterable[str]) -> ZeroShotRow:
        data, documents = pack(name, texts, tokenizer, config.length, sequences)
        check_data(config, None, data)
        count = data.num_sequences
        result = likelihood(
            model_loss,
            config,
            data.ordered,
            sequences=count,
            draws=draws,
            batch_size=batch_size,
            seed=seed,
            device=device,
            progress=None if progress is None else (lambda done: progress(name, done, count)),
        )
        if math.isnan(result.nats_per_token):
            raise UserError(f"{name}: the model's loss is not a number, its weights are damaged.")
        return ZeroShotRow(
            corpus=name,
            perplexity=result.ppl,
            ci95=result.ppl_ci95,
            nats_per_token=result.nats_per_token,
            tokens=count * data.length,
            sequences=count,
            documents=documents,
            bound=result.bound,
            draws=result.draws,
            seed=seed,
        )

    return [measure(name, texts) for name, texts in corpora.items()]


def pack(
    name: str, texts: Iterable[str], tokenizer: Tokenizer, length: int, rows: int | None = None
) -> tuple[TokenDataset, int]:
    """Join documents into rows of `length`, at most `rows`; also tell how many begin in them.

    No more documents are read than needed; the tail that fills no row is dropped.
    """
    if tokenizer.eot_id is None:
        raise UserError(
            "The model's tokenizer has no end-of-text token, so documents cannot be joined into "
            "rows: use a model whose tokenizer has one."
        )
    tokens: list[int] = []
    starts: list[int] = []
    remaining = iter(texts)
    while rows is None or len(tokens) < rows * length:
        batch = list(islice(remaining, DOCUMENTS_AT_ONCE))
        if not batch:
            break
        for ids in tokenizer.encode(batch):
            starts.append(len(tokens))
            tokens += [*ids, tokenizer.eot_id]
    full = len(tokens) // length if rows is None else min(rows, len(tokens) // length)
    if full == 0:
        raise UserError(
            f"{name}: its {len(starts)} documents have {len(tokens)} tokens, which do not fill "
            f"one row of {length}: use more text."
        )
    table = np.array(tokens[: full * length]).reshape(full, length)
    return TokenDataset([table], tokenizer, name=name), bisect_left(starts, full * length)
