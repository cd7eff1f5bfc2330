"""The sentences of a report, the same in the page and in markdown."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from didi_instruct.evaluation.report.content import (
    LOW_ENTROPY,
    Content,
    blocks_of,
    has_path_kl,
    has_sweep,
    setting,
)
from didi_instruct.evaluation.table import COLUMNS, Column, interval, shown_columns

IN_THE_NAME = ("steps", "nfe", "temperature", "top_p")
"""Columns that the main table has no need of: its rows are grouped by steps and name settings."""


def budget(nfe: int) -> str:
    """A number of steps in words."""
    return f"{nfe} step{'' if nfe == 1 else 's'}"


def main_columns(content: Content) -> list[Column]:
    """Columns of the report's tables: those with numbers, or with reasons why there are none."""
    rows = content.everything()
    shown = shown_columns(rows)
    reasons = {c.field for c in COLUMNS if any(row.get(f"{c.field}_note") for row in rows)}
    return [c for c in COLUMNS if (c in shown or c.field in reasons) and c.field not in IN_THE_NAME]


def which_rows(content: Content) -> str:
    """Which rows the main table has, in words."""
    if not has_sweep(content):
        return "One row per model and number of steps."
    if has_path_kl(content):
        return (
            "Of each model and number of steps: the plain setting (temperature 1, top-p 1), and "
            "the setting of the sweep with the lowest path KL."
        )
    return (
        "The plain setting (temperature 1, top-p 1) of each model and number of steps; without "
        "path KL no setting can be called the best."
    )


def doubts(content: Content) -> list[str]:
    """A headline and the shown rows whose perplexity misleads; empty where none does."""
    found = [
        f"{entry.line.label}, {budget(block.nfe)}"
        + (f", {setting(entry.row)}" if entry.setting else "")
        + f": {entry.doubt}."
        for block in blocks_of(content, ())
        for entry in block.entries
        if entry.doubt
    ]
    if not found:
        return []
    measured = any(row.get("ppl") is not None for row in content.everything())
    head = "⚠ Perplexity not comparable" if measured else "⚠ Low variety"
    return [f"{head}: texts with less variety are easier to predict.", *found]


def footnotes(content: Content, columns: Sequence[Column]) -> list[str]:
    """Why values are missing in the main table, each reason once."""
    found = [
        note
        for block in blocks_of(content, ())
        for entry in block.entries
        for column in columns
        if (note := entry.row.get(f"{column.field}_note"))
    ]
    return list(dict.fromkeys(found))


def reading(content: Content) -> Iterator[str]:
    """What to know of all columns."""
    rows = content.everything()
    columns = main_columns(content)
    if any(interval(row, column.field) for row in rows for column in columns):
        yield (
            "Brackets are 95% intervals, from resampling the texts of a row; they do not cover "
            "another training run or another judge."
        )
    if any(column.better for column in columns):
        yield (
            "A value is bold where it is the best of its number of steps and its interval does not "
            "overlap that of any other model. Perplexity is never bold: it means little without "
            "the entropy beside it."
        )
    if content.reference or content.baseline:
        yield (
            f"⚠ marks rows whose entropy is more than {LOW_ENTROPY:.0%} below that of the "
            "reference text, or of the baseline's plain setting at equal steps."
        )
    else:
        yield (
            "There is neither a reference text nor a baseline (--reference, --against): nothing "
            "here tells whether the texts are varied enough."
        )
    if has_sweep(content) and has_path_kl(content):
        yield (
            "The best setting was chosen on the texts it is shown for, which flatters it a little, "
            "every model alike."
        )
    cut = max((row.get("judge_cut") or 0 for row in rows), default=0)
    if cut:
        yield f"The judge read only the beginning of up to {cut} texts per row."


def origin(content: Content) -> Iterator[tuple[str, str]]:
    """Names and values of where the numbers come from."""
    prints = {s.origin.model: s.origin.fingerprint for s in content.samples}
    baseline = {row["model"] for row in content.baseline}
    models = dict.fromkeys(row["model"] for row in (*content.rows, *content.baseline))
    for model in models:
        name = "baseline" if model in baseline else "model"
        yield name, model + (f" (sha256 {prints[model][:12]})" if model in prints else "")
    yield "judge", content.judge or "none"
    if content.reference:
        yield "reference", str(content.real.get("model", ""))
    yield "seeds", ", ".join(sorted({str(row.get("seed")) for row in content.rows}))
    yield from _flat(content.provenance)


def _flat(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value)
        elif value is not None:
            yield name, str(value)
