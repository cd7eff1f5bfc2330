"""Likelihood of text under models by SOURCE: held-out rows, and the corpora of the zero-shot table.

How a corpus becomes rows, as in SEDD, MDLM and DUO: the corpus is detokenised, each document is
tokenised with the model's tokenizer and followed by end-of-text, all are joined in their order and
cut into rows of the model's length. A tail shorter than a row is dropped, so `tokens` says what was
measured. A perplexity is per token of that tokenizer, end-of-text included: it compares models only
where the tokenizer is the same.

Where this differs from the field: blank documents are left out (a third of WikiText's lines: to
the field each is one more end-of-text, which a model soon expects), and rows are cut as `didi data
prepare` cuts them (MDLM and DUO begin and end each row with an extra end-of-text, SEDD does not).
Of `scientific_papers` the field takes whole articles, so abstracts of PubMed and arXiv cannot be
compared with its numbers.
"""

import json
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from didi_instruct.data.dataset import TokenDataset, TokenSource, excerpt, open_data
from didi_instruct.data.files import no_space_as_user_error, write_atomic
from didi_instruct.data.manifest import Layout, Manifest, is_prepared
from didi_instruct.data.oracle import OracleLanguage, OracleSource
from didi_instruct.data.readers import ReadOptions
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import UserError
from didi_instruct.evaluation.cache import config_values, digest
from didi_instruct.evaluation.corpora import CORPORA, open_corpora
from didi_instruct.evaluation.measuring import Evaluation, Row, plain
from didi_instruct.hub.sources import peek_models
from didi_instruct.model import Model, load
from didi_instruct.process.masking import goes_on
from didi_instruct.training.likelihood import check_data

ROWS_AT_ONCE = 1024
DOCUMENTS_AT_ONCE = 64
VERSION = 2
"""Raised where the measure changes, so that old numbers are taken again."""
Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and of how much."""


def evaluate_likelihood(
    source: str,
    data: str,
    *,
    sequences: int,
    draws: int,
    batch_size: int,
    seed: int,
    reading: ReadOptions | None = None,
    tokenizer: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """NELBO of the model `source` on held-out rows of `data` (all rows if nothing is held out).

    `tokenizer` is for a model that brings none; `dtype` as in `load`.
    """
    model = load(source, device=device, dtype=dtype, tokenizer=tokenizer)
    length, documents = model.config.length, model.config.end_id is not None
    reading = reading or ReadOptions()
    rows = held_out(model.tokenizer, length, data, sequences, reading, documents)
    count = min(sequences, rows.num_sequences or sequences)
    noise = {"draws": draws, "batch_size": batch_size, "seed": seed}
    row = likelihood_row(source, model, rows, count, **noise, progress=progress)
    reference = _truth(rows, count) if isinstance(rows, OracleSource) else {}
    return Evaluation(rows=[row | {"data": data}], reference=reference)


def evaluate_zero_shot(
    sources: Sequence[str],
    *,
    out: Path,
    corpora: Sequence[str] = (),
    data: str | Path | None = None,
    sequences: int = 1024,
    draws: int = 8,
    batch_size: int = 32,
    seed: int = 0,
    tokenizer: str | None = None,
    device: str | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Likelihood of every corpus under every model, at most `sequences` rows of each.

    No `corpora` means all seven; `data` is a folder of their files, None the hub. All texts are
    read before anything is measured, so a wrong file is found at once. A corpus that is done is
    written to `out`, and not measured again for the same weights, rows, draws and seed.
    `tokenizer` is for models that bring none.
    """
    if min(sequences, draws, batch_size) < 1:
        raise UserError("sequences, draws and batch_size are 1 or more.")
    report = progress or (lambda stage, done, total: None)
    documents = open_corpora(corpora or CORPORA, data)
    models = peek_models(sources, tokenizer)
    if not models:
        raise UserError("Nothing to evaluate: name a model.")
    words = models[0].tokenizer
    if words is None:
        raise UserError(
            f"{models[0].source} has no tokenizer to read text with: name it with --tokenizer."
        )
    packed: dict[int, dict[str, Packed]] = {}
    for length in dict.fromkeys(model.config.length for model in models):
        packed[length] = {}
        for number, (name, texts) in enumerate(documents.items(), 1):
            packed[length][name] = pack(name, texts, words, length, sequences)
            report("Reading", number, len(documents))
    noise, rows = {"draws": draws, "seed": seed}, []
    for info in models:
        source, weights, model = info.source, info.found.fingerprint(), None
        for name, corpus in packed[info.config.length].items():
            key = (VERSION, weights, config_values(info.config), corpus.data.fingerprint, noise)
            path = out / "zero-shot" / f"{digest(*key)}.json"
            if not path.exists():
                model = model or load(info.found, device=device, tokenizer=info.given)
                stage = partial(report, f"{source} on {name}")
                _keep(path, _row_of(source, model, corpus, batch_size, noise, stage))
            where = {"corpus": name, "source": documents[name].source, "model": source}
            rows.append(where | _kept(path))
    return Evaluation(rows=rows)


def likelihood_row(
    source: str,
    model: Model,
    rows: TokenSource,
    count: int,
    *,
    draws: int,
    batch_size: int,
    seed: int,
    progress: Callable[[int, int], None] | None = None,
) -> Row:
    """Likelihood of the first `count` rows, as a row for JSON."""
    check_data(model.config, model.tokenizer.hash if model.tokenizer else None, rows)
    _check_texts(source, model, rows, count)
    result = model.likelihood(
        rows.ordered,
        sequences=count,
        draws=draws,
        batch_size=batch_size,
        seed=seed,
        progress=None if progress is None else (lambda done: progress(done, count)),
    )
    if not math.isfinite(result.nats_per_token):
        raise UserError(f"{source}: its loss is not a number here, its weights are damaged.")
    row = {
        "nelbo": result.nats_per_token,
        "nelbo_ci95": result.ci95,
        "nelbo_ppl": result.ppl,
        "nelbo_ppl_ci95": result.ppl_ci95,
        "bound": result.bound,
        "num_sequences": result.sequences,
        "length": rows.length,
        "draws": result.draws,
        "seed": seed,
        "dtype": model.cast,
    }
    return {name: plain(value) for name, value in row.items()}


def held_out(
    tokenizer: Tokenizer | None,
    length: int,
    data: str,
    sequences: int,
    reading: ReadOptions,
    documents: bool = False,
) -> TokenSource:
    """Held-out rows of data by SOURCE (all rows if nothing is held out).

    Text is read with the tokenizer, in rows of `length`; other data has its own of both. With
    `documents` a row holds one document and its end.
    """
    if data == "oracle":
        return OracleSource(OracleLanguage.default(), seed=0, split="valid")
    if is_prepared(Path(data)):
        manifest = Manifest.read(Path(data))
        if documents and manifest.layout.rows == "stream":
            raise UserError(
                f"{data} has rows of a stream, but each text of this model has a row of its own: "
                "prepare it again with --rows document."
            )
        held_out = manifest.splits.get("valid")
        return open_data(Path(data), "valid" if held_out and held_out.rows else "train")
    if tokenizer is None:
        raise UserError(
            f"{data} is text, and there is no tokenizer to read it with: name it with --tokenizer "
            "(a folder of the model, gpt2), or give a prepared folder."
        )
    layout = Layout(rows="document") if documents else None
    return excerpt(data, tokenizer, length, sequences, reading, layout)


@dataclass(frozen=True, slots=True)
class Packed:
    """Rows of one corpus in a model's tokens."""

    data: TokenDataset
    """Its fingerprint is that of the rows."""
    documents: int
    """Documents that begin in these rows."""


def pack(
    name: str, texts: Iterable[str], tokenizer: Tokenizer, length: int, rows: int | None = None
) -> Packed:
    """Join documents into rows of `length`, at most `rows`.

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
    parts = (tokenizer.hash, str(length), sha256(table.tobytes()).hexdigest())
    digest_of_rows = sha256("/".join(parts).encode()).hexdigest()[:16]
    data = TokenDataset([table], tokenizer, name=name, fingerprint=digest_of_rows)
    return Packed(data, bisect_left(starts, full * length))


def _truth(rows: OracleSource, count: int) -> dict[str, Any]:
    """The oracle's entropy, and the exact likelihood of the very rows measured.

    The second is what a bound on the same rows should be compared with: the luck of the draw
    cancels.
    """
    entropy, error = rows.language.entropy()
    exact = -rows.language.log_prob(rows.ordered(0, count)).mean().item()
    return {
        "source": "oracle",
        "entropy": entropy / rows.length,
        "entropy_se": error / rows.length,
        "exact_nll": exact / rows.length,
    }


def _check_texts(source: str, model: Model, rows: TokenSource, count: int) -> None:
    """Refuse text that has no likelihood: tokens never written, or several texts in a row.

    The first have probability 0 in exact terms, and an arbitrary large cost in ours; of the second
    a model of one text a window would read the first alone.
    """
    never, end_id = [], model.config.end_id
    for first in range(0, count, ROWS_AT_ONCE):
        tokens = rows.ordered(first, min(ROWS_AT_ONCE, count - first))
        never.append(model.without_likelihood(tokens))
        if end_id is not None and goes_on(tokens, end_id):
            raise UserError(
                f"{source} reads one text a row, and the rows go on after an end of text: give "
                "text, or data prepared with `didi data prepare --rows document`."
            )
    bad = torch.cat(never)
    if len(bad):
        token = int(bad[0])
        ends = token == rows.tokenizer.eot_id
        where = " Prepared data has one after each document." if ends else ""
        raise UserError(
            f"{len(bad)} of {count * rows.length} tokens of the text are such as {source} never "
            f"writes (`{rows.tokenizer.decode([token])}`, id {token}), so it has no likelihood of "
            f"the text: give text without them.{where}"
        )


def _row_of(
    source: str,
    model: Model,
    corpus: Packed,
    batch_size: int,
    noise: Mapping[str, int],
    progress: Callable[[int, int], None],
) -> Row:
    count = corpus.data.num_sequences
    row = likelihood_row(
        source, model, corpus.data, count, batch_size=batch_size, progress=progress, **noise
    )
    return row | {"tokens": count * row["length"], "documents": corpus.documents}


def _keep(path: Path, row: Row) -> None:
    with no_space_as_user_error(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(row, allow_nan=False).encode())


def _kept(path: Path) -> Row:
    try:
        row = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}): delete it.") from error
    if not isinstance(row, dict):
        raise UserError(f"{path} is damaged (not a row of numbers): delete it.")
    return row
