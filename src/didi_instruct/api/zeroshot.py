"""Zero-shot likelihood: models by SOURCE on the corpora; what was measured is kept in a folder."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from didi_instruct.api.candidates import Candidate, candidates
from didi_instruct.api.evaluate import Report, likelihood_row
from didi_instruct.api.model import load
from didi_instruct.api.open import fingerprint
from didi_instruct.data.files import no_space_as_user_error, write_atomic
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import UserError
from didi_instruct.evaluation.corpora import CORPORA, Documents, open_corpora
from didi_instruct.evaluation.scores import digest
from didi_instruct.evaluation.zeroshot import Packed, pack

VERSION = 2
"""Raised where the measure changes, so that old numbers are taken again."""
Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and of how much."""


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
) -> Report:
    """Likelihood of every corpus under every model, at most `sequences` rows of each.

    No `corpora` means all seven; `data` is a folder of their files, None the hub. All texts are
    read before anything is measured, so a wrong file is found at once. A corpus that is done is
    written to `out`, and not measured again for the same weights, rows, draws and seed.
    `tokenizer` is for models that bring none.
    """
    if min(sequences, draws, batch_size) < 1:
        raise UserError("sequences, draws and batch_size are 1 or more.")
    documents = open_corpora(corpora or CORPORA, data)
    models = candidates(sources, tokenizer)
    if not models:
        raise UserError("Nothing to evaluate: name a model.")
    words = models[0].tokenizer
    if words is None:
        raise UserError(
            f"{models[0].source} has no tokenizer to read text with: name it with --tokenizer."
        )
    packed = {
        length: dict(_read(documents, words, length, sequences, progress))
        for length in dict.fromkeys(model.config.length for model in models)
    }
    noise = {"draws": draws, "seed": seed}
    rows = []
    for model in models:
        texts = packed[model.config.length]
        weights = fingerprint(model.source)
        files = {n: _file(out, weights, model, corpus, noise) for n, corpus in texts.items()}
        missing = {name: corpus for name, corpus in texts.items() if not files[name].exists()}
        for name, row in _measure(model, missing, noise, batch_size, device, progress):
            _keep(files[name], row)
        for name, path in files.items():
            where = {"corpus": name, "source": documents[name].source, "model": model.source}
            rows.append(where | _kept(path))
    return Report(model=", ".join(sources), judge=None, rows=rows)


def _read(
    documents: Mapping[str, Documents],
    tokenizer: Tokenizer,
    length: int,
    sequences: int,
    progress: Progress | None,
) -> Iterator[tuple[str, Packed]]:
    for number, (name, texts) in enumerate(documents.items(), 1):
        yield name, pack(name, texts, tokenizer, length, sequences)
        if progress is not None:
            progress("Reading", number, len(documents))


def _measure(
    candidate: Candidate,
    texts: Mapping[str, Packed],
    noise: dict[str, int],
    batch_size: int,
    device: str | None,
    progress: Progress | None,
) -> Iterator[tuple[str, dict[str, Any]]]:
    if not texts:
        return
    source = candidate.source
    model = load(source, device=device, tokenizer=candidate.given)
    for name, corpus in texts.items():

        def tell(done: int, total: int, stage: str = f"{source} on {name}") -> None:
            if progress is not None:
                progress(stage, done, total)

        count = corpus.data.num_sequences
        row = likelihood_row(
            source, model, corpus.data, count, batch_size=batch_size, progress=tell, **noise
        )
        yield name, row | {"tokens": count * row["length"], "documents": corpus.documents}


def _file(out: Path, weights: str, model: Candidate, corpus: Packed, noise: dict[str, int]) -> Path:
    """Where a row is kept: named by all that it depends on."""
    name = digest(VERSION, weights, asdict(model.config), corpus.data.fingerprint, noise)
    return out / "zero-shot" / f"{name}.json"


def _keep(path: Path, row: dict[str, Any]) -> None:
    with no_space_as_user_error(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(row, allow_nan=False).encode())


def _kept(path: Path) -> dict[str, Any]:
    try:
        row = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}): delete it.") from error
    if not isinstance(row, dict):
        raise UserError(f"{path} is damaged (not a row of numbers): delete it.")
    return row
