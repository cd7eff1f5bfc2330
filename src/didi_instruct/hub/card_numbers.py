"""The numbers of a model card, from what `didi eval --json` wrote."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from didi_instruct.errors import UserError
from didi_instruct.hub.private import without_paths
from didi_instruct.models.checkpoint import read_json

SETTINGS = {
    "model": "model",
    "sampler": "sampler",
    "steps": "steps",
    "temperature": "temperature",
    "top_p": "top-p",
}
MEASURES = {
    "nelbo": "NELBO, nats per token",
    "nelbo_ppl": "NELBO perplexity",
    "ppl": "judge's perplexity",
    "entropy": "unigram entropy, nats",
    "mean_length": "tokens of a text",
    "path_kl": "path KL, nats per text",
    "gap_closed": "gap closed",
    "vsf": "vsF",
    "mauve": "MAUVE",
    "self_bleu": "Self-BLEU",
    "self_bleu_words": "Self-BLEU of words",
    "unique_4gram": "unique 4-grams",
    "c2st_auc": "two-sample AUC",
}
"""Columns by their key in a row; those that no row has are left out."""


def read_numbers(path: Path) -> dict[str, Any]:
    """Read what `didi eval --json` wrote."""
    value = read_json(path)
    rows = value.get("rows") if isinstance(value, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows) or not rows:
        raise UserError(f"{path} holds no rows: give a file that `didi eval --json` wrote.")
    return dict(value)


def table(evaluation: Mapping[str, Any]) -> Iterator[str]:
    """Lines of Markdown: who judged, and a row for each of the model and of its baseline."""
    baseline = evaluation.get("baseline")
    others = baseline if isinstance(baseline, list) else []
    rows = [without_paths(row) for row in (*evaluation["rows"], *others)]
    told = {key: name for key, name in SETTINGS.items() if _differs(key, rows)}
    told |= {k: name for k, name in MEASURES.items() if any(_is_number(r.get(k)) for r in rows)}
    yield _who(evaluation, rows)
    yield ""
    yield f"| {' | '.join(told.values())} |"
    yield "|--:" * len(told) + "|"
    for row in rows:
        yield f"| {' | '.join(_cell(row, key) for key in told)} |"


def _who(evaluation: Mapping[str, Any], rows: list[dict[str, Any]]) -> str:
    """One line: the judge, the number of texts, and what the intervals are."""
    counts = {row.get("num_samples") or row.get("num_sequences") for row in rows}
    known = sorted(count for count in counts if isinstance(count, int))
    many = f"{', '.join(map(str, known))} texts per row" if known else "Measured"
    judge = evaluation.get("judge")
    by = f", judged by `{without_paths(str(judge))}`" if judge else ""
    return f"{many}{by}; ± is half of a 95% interval."


def _differs(key: str, rows: list[dict[str, Any]]) -> bool:
    """Whether a setting tells rows apart; the number of steps is told anyway."""
    values = {str(row.get(key)) for row in rows}
    return len(values) > 1 or (key == "steps" and values != {"None"})


def _cell(row: Mapping[str, Any], key: str) -> str:
    value, interval = row.get(key), row.get(f"{key}_ci95")
    if value is None:
        return "–"
    if key in SETTINGS or not _is_number(value):
        return str(value).replace("|", "\\|").replace("<", "&lt;")
    ends = interval if isinstance(interval, (list, tuple)) else []
    if len(ends) == 2 and all(map(_is_number, ends)):
        return f"{value:.4g} ± {(ends[1] - ends[0]) / 2:.2g}"
    return f"{value:.4g}"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
