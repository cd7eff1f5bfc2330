"""The sentences of a report, the same in the page and in markdown."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from didi_instruct.evaluation.measuring import Row
from didi_instruct.evaluation.report.blocks import blocks_of
from didi_instruct.evaluation.report.content import Content
from didi_instruct.evaluation.report.doubts import LOW_ENTROPY, LOW_VARIETY, SIGNS, edge
from didi_instruct.evaluation.report.lines import (
    has_path_kl,
    has_sweep,
    lines_of,
    setting,
    short_names,
)
from didi_instruct.evaluation.rows import known_columns
from didi_instruct.evaluation.table import Column, interval, shown_columns

IN_THE_NAME = ("steps", "nfe", "temperature", "top_p")
"""Columns that the main table has no need of: its rows are grouped by steps and name settings."""
MEAN_LENGTH = Column(
    "length",
    "mean_length",
    "{:.1f}",
    "Tokens of a text before its end, mean over texts. Neither high nor low is good: it should be "
    "that of real text.",
)
"""Shown where texts end before their window; elsewhere all rows have the same."""


def budget(nfe: int) -> str:
    """A number of steps in words."""
    return f"{nfe} step{'' if nfe == 1 else 's'}"


def main_columns(content: Content) -> list[Column]:
    """Columns of the report's tables: those with numbers."""
    rows = content.everything()
    shown = [c for c in shown_columns(rows, known_columns()) if c.field not in IN_THE_NAME]
    return shown + [MEAN_LENGTH] * any(map(_ends_early, rows))


def _ends_early(row: Row) -> bool:
    """Whether texts of a row are shorter than their window."""
    mean, length = row.get("mean_length"), row.get("length")
    return None not in (mean, length) and mean != length


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


def unwritten_title(content: Content) -> str:
    """Title of the rows that no sampler wrote."""
    return "Not sampled" if content.controls else "Reference text"


def facts(content: Content) -> list[str]:
    """What holds for all rows, in a few words each."""
    rows = [*content.rows, *content.baseline] or [*content.controls]
    found = [f"{_values(rows, 'num_samples')} texts per row"] if rows else []
    if _values(rows, "length"):
        most = "up to " * any(map(_ends_early, rows))
        found.append(f"{most}{_values(rows, 'length')} tokens each")
    if _values(rows, "sampler"):
        found.append(f"sampler {_values(rows, 'sampler')}")
    if _values(rows, "seed"):
        found.append(f"seed {_values(rows, 'seed')}")
    found.append(f"judge {content.judge}" if content.judge else "no judge")
    if content.reference:
        found.append(f"reference {short_names([content.real['model']])[content.real['model']]}")
    return found


def _values(rows: Sequence[Row], name: str) -> str:
    values = {row[name] for row in rows if row.get(name) is not None}
    return ", ".join(str(value) for value in sorted(values))


def doubts(content: Content) -> list[str]:
    """A headline and the shown rows whose numbers mislead; empty where none does."""
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
    names = {"ppl": "perplexity", "path_kl": "path KL"}
    rows = content.everything()
    flattered = [name for key, name in names.items() if any(r.get(key) is not None for r in rows)]
    effect = f", which can lower their {' and '.join(flattered)}" if flattered else ""
    return [f"⚠ Low variety: the texts of {_rows(len(found))} are too much alike{effect}.", *found]


def _rows(count: int) -> str:
    return f"{count} row{'' if count == 1 else 's'}"


def edges(content: Content) -> list[str]:
    """A headline and the models whose sweep ended too soon; empty where none did."""
    lines, found, of_baseline = lines_of(content), [], False
    for line in lines:
        places = [(nfe, edge(line, nfe)) for nfe in line.budgets]
        ends = [f"{budget(nfe)} ({words})" for nfe, words in places if words]
        if ends:
            found.append(f"{line.label}: {', '.join(ends)}.")
            of_baseline |= line.is_baseline
    if not found:
        return []
    effect = ", and gains against a baseline that may do better are overstated" * of_baseline
    return [
        f"⚠ The best of the sweep lies at its edge: a wider sweep may find better{effect}.",
        *found,
    ]


def footnotes(content: Content) -> list[str]:
    """Why values are missing in the main table, or whole columns, each reason once."""
    sampled = [entry.row for block in blocks_of(content, ()) for entry in block.entries]
    found = [
        note
        for row in (*sampled, *content.controls)
        for column in known_columns()
        if (note := row.get(f"{column.field}_note"))
    ]
    return list(dict.fromkeys(found))


def reading(content: Content) -> Iterator[str]:
    """What to know of all columns."""
    rows = content.everything()
    columns = main_columns(content)
    if any(interval(row, column.field) for row in rows for column in columns):
        yield (
            "Brackets are 95% intervals, from resampling the texts of a row. They are approximate: "
            "in simulations they covered 88 to 96%, least where the best of a baseline's many "
            "equal settings is chosen. They do not cover another training run or another judge."
        )
    if any(column.better for column in columns):
        yield (
            "A value is bold where it is the best of its number of steps and its interval does not "
            "overlap that of any other model. Perplexity is never bold: it means little without "
            "the entropy beside it."
        )
    if not any(row.get(sign.field) is not None for sign in SIGNS for row in rows):
        pass  # nothing that tells of variety was measured
    elif content.reference or content.baseline:
        yield (
            f"⚠ marks rows that vary too little: entropy more than {LOW_ENTROPY:.0%} below, "
            f"4-grams more than {LOW_VARIETY:.0%} below or Self-BLEU more than {LOW_VARIETY:.0%} "
            "above that of the reference text. Where that was not measured, the baseline's plain "
            "setting stands for it: for entropy at equal steps, else at its most steps."
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
