"""Evaluation of a model by SOURCE on data by SOURCE."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from didi_instruct.api.model import Model, load
from didi_instruct.api.sources import is_prepared
from didi_instruct.data.dataset import TokenSource, open_data
from didi_instruct.data.excerpt import excerpt
from didi_instruct.data.files import write_atomic
from didi_instruct.data.manifest import Layout, Manifest
from didi_instruct.data.oracle import OracleLanguage, OracleSource
from didi_instruct.data.readers import ReadOptions
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import UserError
from didi_instruct.evaluation.describing import complete
from didi_instruct.evaluation.likelihood import check_data
from didi_instruct.evaluation.provenance import versions
from didi_instruct.models.masked_network import MaskedLM
from didi_instruct.process.masking import goes_on

ROWS_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class Report:
    """What `didi eval --json` writes."""

    model: str
    judge: str | None
    rows: list[dict[str, Any]]
    reference: dict[str, Any] = field(default_factory=dict)
    baseline: list[dict[str, Any]] = field(default_factory=list)
    """Rows of the model that `rows` are compared with."""

    def write(self, path: Path) -> None:
        """Write JSON, with the versions behind the numbers."""
        value = {
            "model": self.model,
            "judge": self.judge,
            "rows": [complete(row) for row in self.rows],
            "baseline": [complete(row) for row in self.baseline],
            "reference": self.reference,
            "versions": versions(),
        }
        write_atomic(path, (json.dumps(value, indent=1, allow_nan=False) + "\n").encode())


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
) -> Report:
    """NELBO of the model `source` on held-out rows of `data` (all rows if nothing is held out).

    `tokenizer` is for a model that brings none; `dtype` as in `load`.
    """
    model = load(source, device=device, dtype=dtype, tokenizer=tokenizer)
    reading = reading or ReadOptions()
    config = model.config
    documents = config.end_id is not None
    rows = held_out(model.tokenizer, config.length, data, sequences, reading, documents)
    count = min(sequences, rows.num_sequences or sequences)
    row = likelihood_row(
        source,
        model,
        rows,
        count,
        draws=draws,
        batch_size=batch_size,
        seed=seed,
        progress=progress,
    )
    row["data"] = data
    reference = _truth(rows, count) if isinstance(rows, OracleSource) else {}
    return Report(model=source, judge=None, rows=[row], reference=reference)


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
) -> dict[str, Any]:
    """Likelihood of the first `count` rows, as a row for JSON."""
    check_data(model.config, model.tokenizer.hash if model.tokenizer else None, rows)
    _check_writable(source, model, rows, count)
    _check_ends(source, model, rows, count)
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
    return {
        "nelbo": result.nats_per_token,
        "nelbo_ci95": _finite(result.ci95),
        "nelbo_ppl": result.ppl if math.isfinite(result.ppl) else None,
        "nelbo_ppl_ci95": _finite(result.ppl_ci95),
        "bound": result.bound,
        "num_sequences": result.sequences,
        "length": rows.length,
        "draws": result.draws,
        "seed": seed,
        "dtype": model.cast,
    }


def _check_writable(source: str, model: Model, rows: TokenSource, count: int) -> None:
    """Refuse text with tokens that a masked LM never writes.

    They have probability 0 in exact terms, and an arbitrary large cost in ours.
    """
    if not isinstance(model.network, MaskedLM):
        return
    found = [
        model.without_likelihood(rows.ordered(first, min(ROWS_AT_ONCE, count - first)))
        for first in range(0, count, ROWS_AT_ONCE)
    ]
    bad = torch.cat(found)
    if len(bad):
        first = int(bad[0])
        ends = first == rows.tokenizer.eot_id
        where = " Prepared data has one after each document." if ends else ""
        raise UserError(
            f"{len(bad)} of {count * rows.length} tokens of the text are such as {source} never "
            f"writes (`{rows.tokenizer.decode([first])}`, id {first}), so it has no likelihood of "
            f"the text: give text without them.{where}"
        )


def _check_ends(source: str, model: Model, rows: TokenSource, count: int) -> None:
    """Refuse rows of several texts, of which a model of one text a window would read the first."""
    end_id = model.config.end_id
    if end_id is None:
        return
    for first in range(0, count, ROWS_AT_ONCE):
        tokens = rows.ordered(first, min(ROWS_AT_ONCE, count - first))
        if goes_on(tokens, end_id):
            raise UserError(
                f"{source} reads one text a row, and the rows go on after an end of text: give "
                "text, or data prepared with `didi data prepare --rows document`."
            )


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


def _truth(rows: OracleSource, count: int) -> dict[str, Any]:
    """What the oracle knows: its entropy, and the exact likelihood of the very rows measured.

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


def _finite(interval: tuple[float, float]) -> list[float] | None:
    """An interval for JSON; one sequence has none."""
    return list(interval) if all(math.isfinite(end) for end in interval) else None
