"""Everything a report says, as plain data: findings, warnings, tables and texts.

Templates, terminal and figures show it and compute nothing of their own. A sweep has dozens of rows
per model; the main table shows two of each model and number of steps, the plain setting and the one
with the lowest path KL.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from didi_instruct.evaluation.measuring import Evaluation
from didi_instruct.evaluation.metrics import known_columns
from didi_instruct.evaluation.report.lines import (
    LOW_ENTROPY,
    LOW_VARIETY,
    SIGNS,
    Line,
    Rows,
    is_plain,
    length_of,
    setting,
    short_names,
)
from didi_instruct.evaluation.samples import SampleSet
from didi_instruct.evaluation.table import (
    MEAN_LENGTH,
    Column,
    Row,
    ends_early,
    interval,
    meaning,
)

TEXT_COLUMNS, NUM_TEXTS = 4, 3
HEAD = 600
"""Characters of a text shown at once; a text only a little longer is shown whole."""
CONTROL = re.compile(
    r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)
"""Characters that no form shows, or that would turn the direction of what follows them."""
DELTA = "path_kl_vs_baseline"


def clean(text: object) -> str:
    """Text with a replacement character for each control character."""
    return CONTROL.sub("\ufffd", str(text))


@dataclass(frozen=True, slots=True)
class Entry:
    """A row in its place of a table."""

    name: str
    row: Row
    setting: str
    """In words; empty where there is only one."""
    nfe: int | None = None
    is_baseline: bool = False
    doubt: str = ""
    bold: frozenset[str] = frozenset()
    """Fields in which it is better than all other models at this number of steps."""


@dataclass(frozen=True, slots=True)
class Group:
    """Rows to compare with each other: those with one number of steps, or those not sampled."""

    title: str
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class Statement:
    """A sentence, and what there is to say in detail."""

    head: str
    details: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Side:
    """Texts of one model in one setting: beginning and rest of each."""

    label: str
    steps: str
    texts: tuple[tuple[str, str], ...]


class Summary:
    """Contents of a report, computed once."""

    def __init__(
        self,
        evaluation: Evaluation,
        title: str,
        provenance: Mapping[str, Any] | None = None,
        command: str | None = None,
    ) -> None:
        rows = Rows(evaluation)
        columns = [c for c in known_columns() if any(r.get(c.field) is not None for r in rows.all)]
        columns += [MEAN_LENGTH] * any(map(ends_early, rows.all))
        self.title, self.command, self.rows, self.columns = title, command, rows, columns
        self.meanings = {column.title: meaning(column, rows.all) for column in columns}
        self.table = [
            _group(rows, nfe, _main_rows(rows.lines, nfe), columns) for nfe in rows.budgets
        ]
        self.sweep = [_group(rows, nfe, _every_row(rows.lines, nfe)) for nfe in rows.budgets]
        self.sweep_size = sum(len(line.rows) for line in rows.lines)
        self.not_sampled = _not_sampled(rows)
        self.footnotes = _footnotes(self.table, rows.controls)
        self.facts = _facts(rows, evaluation.judge)
        self.findings, self.basis = _findings(rows)
        self.warnings = [*_low_variety(rows, self.table), *_edges(rows.lines)]
        self.has_intervals = any(interval(row, c.field) for row in rows.all for c in columns)
        self.has_bold = any(column.better for column in columns)
        self.knows_variety = any(r.get(sign.field) is not None for sign in SIGNS for r in rows.all)
        self.low_entropy, self.low_variety = f"{LOW_ENTROPY:.0%}", f"{LOW_VARIETY:.0%}"
        self.judge_cut = max((row.get("judge_cut") or 0 for row in rows.all), default=0)
        self.sides, self.about_texts = _texts(evaluation)
        self.num_texts = min((len(side.texts) for side in self.sides), default=0)
        self.has_long_texts = any(rest for side in self.sides for _, rest in side.texts)
        self.origin = [*_origin(evaluation), *_flat(provenance or {})]


Shown = tuple[Line, Row, str]
"""A row of a table with its line and its setting in words."""


def _main_rows(lines: Sequence[Line], nfe: int) -> Iterator[Shown]:
    """The plain and the best row of each line."""
    for line in lines:
        plain, best = line.plain(nfe), line.best(nfe)
        if plain is None or best is None:
            continue
        edge = ", the edge of the sweep" if line.edge(nfe) else ""
        if len(line.at(nfe)) == 1:
            yield line, plain, "" if is_plain(plain) else setting(plain)
        elif plain is best and best.get("path_kl") is not None:
            yield line, plain, f"{setting(plain)}, the best{edge}"
        else:
            yield line, plain, setting(plain)
        if plain is not best:
            yield line, best, f"best: {setting(best)}{edge}"


def _every_row(lines: Sequence[Line], nfe: int) -> Iterator[Shown]:
    return ((line, row, setting(row)) for line in lines for row in line.at(nfe))


def _group(rows: Rows, nfe: int, shown: Iterable[Shown], columns: Sequence[Column] = ()) -> Group:
    """Rows with one number of steps; the best in each of the columns are bold."""
    shown = list(shown)
    bold = [(column.field, row) for column in columns for row in leaders(shown, column)]
    entries = []
    for line, row, words in shown:
        best_in = frozenset(field for field, leader in bold if leader is row)
        entries.append(
            Entry(line.label, row, words, nfe, line.is_baseline, rows.doubt(row), best_in)
        )
    return Group(steps(nfe), tuple(entries))


def _not_sampled(rows: Rows) -> list[Group]:
    """Controls and the reference text, below the rows of every table."""
    title = "Not sampled" if rows.controls else "Reference text"
    entries = []
    for row in (*rows.controls, *filter(None, [rows.reference])):
        name = ", ".join(filter(None, [row.get("model", ""), length_of(row)]))
        entries.append(Entry(name, row, title.lower()))
    return [Group(title, tuple(entries))] if entries else []


def leaders(shown: Sequence[Shown], column: Column) -> list[Row]:
    """The row of each length whose interval lies beyond those of all other lines."""
    if column.better is None:
        return []
    sign, found = (1 if column.better == "lower" else -1), []
    known = [(line, row) for line, row, _ in shown if row.get(column.field) is not None]
    for length in dict.fromkeys(row.get("length") for _, row in known):
        alike = [(line, row) for line, row in known if row.get("length") == length]
        line, row = min(alike, key=lambda pair: sign * pair[1][column.field])
        own = interval(row, column.field)
        others = [interval(r, column.field) for other, r in alike if other is not line]
        if own and others and all(
            ends and max(sign * e for e in own) < min(sign * e for e in ends) for ends in others
        ):  # fmt: skip
            found.append(row)
    return found


def steps(nfe: int) -> str:
    """A number of steps in words."""
    return f"{nfe} step{'' if nfe == 1 else 's'}"


def _series(words: Sequence[str]) -> str:
    """Words joined as in a sentence."""
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def _findings(rows: Rows) -> tuple[list[Statement], str]:
    """Which model is better than the baseline and where, and what the comparison rests on.

    It rests on the path KL at each model's best setting alone: where that difference was not
    measured, or has no interval, there is no verdict.
    """
    students = [line for line in rows.lines if not line.is_baseline]
    rivals = _series(rows.rivals) if rows.rivals else ""
    if not rows.lines:
        return [Statement("No model was sampled: the table describes texts as they are.")], ""
    if not rivals:
        return _without_baseline(rows), ""
    if not students:
        return [Statement(f"Every row is of the baseline, {rivals}: nothing is compared.")], ""
    found = [statement for line in students if (statement := _verdict(rows, line, rivals))]
    if found:
        return found, (
            f"Path KL is compared with that of {rivals} at equal steps, each model at its best "
            "setting. Differences are in nats per text, with 95% intervals; below 0 is better."
        )
    why = "the difference in path KL has no interval"
    if not any(row.get(DELTA) is not None for line in students for row in line.rows):
        why = "path KL was not compared at equal steps (it needs the metric path-kl and a judge)"
    return [Statement(f"There is no verdict against {rivals}: {why}.")], ""


def _verdict(rows: Rows, line: Line, rivals: str) -> Statement | None:
    """One model against the baseline; None where nothing can be said."""
    compared = [
        (nfe, row, ends)
        for nfe in line.budgets
        if (row := line.best(nfe)) is not None and (ends := interval(row, DELTA))
    ]
    places: dict[str, list[int]] = {"better": [], "not clearly different": [], "worse": []}
    for nfe, _, (low, high) in compared:
        kind = "better" if high < 0 else "worse" if low > 0 else "not clearly different"
        places[kind].append(nfe)
    parts = [f"{kind} at {_at(budgets)}" for kind, budgets in places.items() if budgets]
    shares = any(row.get("gap_closed") is not None for _, row, _ in compared)
    details, of_what, unit = [], " of the path-KL gap", " nats per text"
    for nfe, row, ends in compared:
        delta = "{:+.2f} [{:+.2f}, {:+.2f}]".format(row[DELTA], *ends) + unit
        delta = f"⚠ {delta}" if rows.doubt(row) else delta
        share = row.get("gap_closed")
        known = "an unknown share" if share is None else f"{share:.1%}"
        details.append(
            f"{known}{of_what} at {steps(nfe)} ({delta})" if shares else f"{delta} at {steps(nfe)}"
        )
        of_what = unit = ""  # said once
    if not compared:
        return None
    lead = "It recovers" if shares else "Its path KL differs by"
    than = f" from {rivals} at" if parts[0].startswith("not") else f" than {rivals} at"
    parts[0] = parts[0].replace(" at", than, 1)
    return Statement(f"{line.label} is {_series(parts)}.", (f"{lead} {_series(details)}.",))


def _at(budgets: Sequence[int]) -> str:
    return f"{_series([*map(str, budgets[:-1]), steps(budgets[-1])])}"


def _without_baseline(rows: Rows) -> list[Statement]:
    """Models beside each other: where the path KL of one is lower than that of all others."""
    lead = "There is no baseline (--against)"
    told = [c for c in known_columns() if c.field in ("ppl", "entropy", "path_kl")]
    if len(rows.lines) == 1:
        (line,) = rows.lines
        details = []
        for nfe in dict.fromkeys((rows.budgets[0], rows.budgets[-1])):
            plain = line.plain(nfe) or {}
            known = [c for c in told if plain.get(c.field) is not None]
            words = [f"{c.title} {c.value(plain)}" for c in known]
            details += [f"At {steps(nfe)}: {_series(words)}."] if words else []
        return [Statement(f"{lead}: the numbers of {line.label} stand alone.", tuple(details))]
    if not rows.has_path_kl:
        return [Statement(f"{lead} and no path KL: models cannot be ranked.")]
    details, path_kl = [], told[-1]
    for nfe in rows.budgets:
        best = [(line, row, "") for line in rows.lines if (row := line.best(nfe)) is not None]
        for row in leaders(best, path_kl):
            label = next(line.label for line, other, _ in best if other is row)
            value = f"{path_kl.value(row)} {path_kl.interval(row)}"
            details.append(f"At {steps(nfe)} {label} has the lowest path KL, {value}.")
    if details:
        return [Statement(f"{lead}: models are compared with each other.", tuple(details))]
    return [Statement(f"{lead}, and no model's path KL is clearly the lowest.")]


def _low_variety(rows: Rows, table: Sequence[Group]) -> Iterator[Statement]:
    """Rows of the main table whose numbers mislead."""
    found = [
        f"{e.name}, {group.title}{f', {setting(e.row)}' if e.setting else ''}: {e.doubt}."
        for group in table
        for e in group.entries
        if e.doubt
    ]
    names = {"ppl": "perplexity", "path_kl": "path KL"}
    lowered = [name for key, name in names.items() if any(r.get(key) is not None for r in rows.all)]
    effect = f", which can lower their {_series(lowered)}" if lowered else ""
    count = f"{len(found)} row{'' if len(found) == 1 else 's'}"
    head = f"⚠ Low variety: the texts of {count} vary too little{effect}."
    if found:
        yield Statement(head, tuple(found))


def _edges(lines: Sequence[Line]) -> Iterator[Statement]:
    """Models whose best setting is the last one tried."""
    found, has_baseline = [], False
    for line in lines:
        edges = [f"{steps(nfe)} ({edge})" for nfe in line.budgets if (edge := line.edge(nfe))]
        if edges:
            found.append(f"{line.label}: {', '.join(edges)}.")
            has_baseline |= line.is_baseline
    effect = ", and gains over a baseline that could do better are overstated" * has_baseline
    if found:
        yield Statement(
            f"⚠ The best setting is at the edge of the sweep: a wider one may find better{effect}.",
            tuple(found),
        )


def _facts(rows: Rows, judge: str | None) -> list[str]:
    """Facts that all rows share, in a few words each."""
    sampled = rows.sampled or rows.controls
    values = {
        name: ", ".join(map(str, sorted({r[name] for r in sampled if r.get(name) is not None})))
        for name in ("num_samples", "length", "sampler", "seed")
    }
    reference = rows.reference.get("model")
    up_to = "up to " * any(map(ends_early, sampled))
    found = [
        f"{values['num_samples']} texts per row" if sampled else "",
        f"{up_to}{values['length']} tokens each" if values["length"] else "",
        f"sampler {values['sampler']}" if values["sampler"] else "",
        f"seed {values['seed']}" if values["seed"] else "",
        f"judge {judge}" if judge else "no judge",
        f"reference {short_names([reference])[reference]}" if reference else "",
    ]
    return list(filter(None, found))


def _footnotes(table: Sequence[Group], controls: Sequence[Row]) -> list[str]:
    """Why values of the main table are missing, each reason once."""
    rows = [entry.row for group in table for entry in group.entries] + [*controls]
    notes = [column.note(row) for row in rows for column in known_columns()]
    return list(filter(None, dict.fromkeys(notes)))


def _origin(evaluation: Evaluation) -> Iterator[tuple[str, str]]:
    """Names and values of what the numbers were made from."""
    prints = {s.origin.model: s.origin.fingerprint for s in evaluation.samples}
    rows = [row for row in evaluation.rows if row["nfe"] is not None]
    baseline = {row["model"] for row in evaluation.baseline}
    for model in dict.fromkeys(row["model"] for row in (*rows, *evaluation.baseline)):
        weights = f" (sha256 {prints[model][:12]})" if model in prints else ""
        yield "baseline" if model in baseline else "model", model + weights
    yield "judge", evaluation.judge or "none"
    if evaluation.reference:
        yield "reference", str(evaluation.reference.get("model", ""))
    yield "seeds", ", ".join(sorted({str(row.get("seed")) for row in rows}))


def _flat(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value)
        elif value is not None:
            yield name, str(value)


def _texts(evaluation: Evaluation) -> tuple[list[Side], str]:
    """Texts of the models at few steps between the baseline's at few and at most steps."""
    usable = [s for s in evaluation.samples if any(text.strip() for text in s.texts)]
    if not usable:
        why = "the model has no tokenizer" if evaluation.samples else "none were kept"
        return [], f"There are no texts to show: {why}."
    chosen, left_out = _choose(usable, {row["model"] for row in evaluation.baseline})
    names, sides = short_names([s.origin.model for s in usable]), []
    for samples in chosen:
        origin = samples.origin
        words = steps(origin.nfe)
        if (origin.temperature, origin.top_p) != (1, 1):
            words += f", T {origin.temperature:g}, top-p {origin.top_p:g}"
        sides.append(Side(names[origin.model], words, tuple(map(cut, samples.texts[:NUM_TEXTS]))))
    seeds = sorted({s.origin.seed for s in chosen})
    note = (
        f"The first texts drawn with seed {seeds[0]}, not hand-picked; texts with the same number "
        "share their noise."
    )
    if len(seeds) > 1:
        told = ", ".join(map(str, seeds))
        note = f"The first texts of each model, not hand-picked; their seeds differ ({told})."
    if left_out:
        note += f" Not shown: {', '.join(names[model] for model in left_out)}."
    return sides, note


def _choose(usable: Sequence[SampleSet], rivals: set[str]) -> tuple[list[SampleSet], list[str]]:
    """Choose at most `TEXT_COLUMNS` sets, and name the models that have none."""
    by_model: dict[str, dict[int, SampleSet]] = defaultdict(dict)
    for samples in sorted(usable, key=lambda s: (s.origin.temperature, s.origin.top_p) != (1, 1)):
        by_model[samples.origin.model].setdefault(samples.origin.nfe, samples)
    models = list(dict.fromkeys(s.origin.model for s in usable))
    few = {model: by_model[model][min(by_model[model])] for model in models}
    most = {m: by_model[m][max(by_model[m])] for m in models if len(by_model[m]) > 1}
    first = [few[model] for model in models if model in rivals]
    last = [most[model] for model in models if model in rivals and model in most]
    others = [model for model in models if model not in rivals]
    room = max(0, TEXT_COLUMNS - len(first) - len(last))
    if not first:  # more steps of the same models, where there is room
        last = [most[model] for model in others[:room] if model in most]
    middle = [few[model] for model in others[:room]]
    return [*first, *middle, *last][:TEXT_COLUMNS], others[room:]


def cut(text: str) -> tuple[str, str]:
    """Beginning and rest of a text, parted between words; the rest of a short text is empty."""
    text = text.strip()
    if len(text) <= 1.2 * HEAD:
        return text, ""
    space = max(text.rfind(" ", 0, HEAD), text.rfind("\n", 0, HEAD))
    # Writing without spaces, or one endless word, is parted anywhere.
    place = space if space > HEAD // 2 else HEAD
    return text[:place].rstrip(), text[place:].lstrip()
