"""Prompts with answers: likelihood among choices, or exact match of what a model writes."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from didi_instruct.data.readers import read_records
from didi_instruct.data.sources import Meter, find_sources, readable
from didi_instruct.errors import UserError
from didi_instruct.seeding import mix
from didi_instruct.tasks.baselines import untrained_of
from didi_instruct.tasks.encoding import Encoded, encode_pairs, fit
from didi_instruct.tasks.prompts import checked_text, text_of
from didi_instruct.tasks.scoring import TOKENS, Scorer, shares
from didi_instruct.tasks.statistics import against_chance, compare_all, mean_interval, wilson
from didi_instruct.tasks.task import Column, NamedModel, Progress, Row, Task, TaskReport
from didi_instruct.tasks.written_answers import WritingOptions, measure_written


@dataclass(frozen=True, kw_only=True, slots=True)
class QaOptions(WritingOptions):
    """Options of the task `qa`; those of writing are for rows without choices."""

    limit: int | None = None
    """Questions at most: those with the smallest hashes."""
    draws: int = 32
    """Draws for the likelihood of an answer of several tokens."""
    seed: int = 0
    """Of the draws, of writing and of the untrained network."""
    batch_tokens: int = TOKENS
    """Tokens of a forward pass."""

    def __post_init__(self) -> None:
        """Refuse numbers that make no sense."""
        WritingOptions.__post_init__(self)
        if min(self.draws, self.batch_tokens) < 1 or self.seed < 0:
            raise UserError("draws and batch_tokens are 1 or more, seed 0 or more.")
        if self.limit is not None and self.limit < 1:
            raise UserError(f"limit is {self.limit}: use 1 or more.")


@dataclass(frozen=True, slots=True)
class Item:
    """A prompt, its answer, and the choices, if there are any."""

    prompt: str
    answer: str
    choices: tuple[str, ...]
    where: str


def read_items(data: Path) -> list[Item]:
    """Read .jsonl files: `prompt`, `answer`, and `choices` in all rows or in none.

    With choices, an answer is one of them or its index from 0.
    """
    sources = [source for source in find_sources(str(data)) if source.kind == "jsonl"]
    items = []
    for source in sources:
        with readable(source):
            items += [_item(record, where) for where, record in read_records(source, Meter())]
    if not items:
        raise UserError(f"{data}: has no prompts with answers; give .jsonl (gz, xz, zst) files.")
    odd = next((i for i in items if bool(i.choices) != bool(items[0].choices)), None)
    if odd is not None:
        raise UserError(
            f"{odd.where}: only some rows have `choices`: keep those with and without apart."
        )
    return items


def _item(record: dict[str, Any], where: str) -> Item:
    prompt = text_of(record, "prompt", where)
    if "choices" not in record:
        return Item(prompt, text_of(record, "answer", where), (), where)
    choices: Any = record["choices"]
    answer: Any = record.get("answer")
    texts = isinstance(choices, list) and all(isinstance(text, str) for text in choices)
    if not texts or len(set(choices)) != len(choices) or len(choices) < 2:
        raise UserError(
            f"{where}: `choices` is {choices!r:.60}: make it a list of two or more different texts."
        )
    for choice in choices:
        checked_text(choice, "choices", where)
    if type(answer) is int and 0 <= answer < len(choices):
        answer = choices[answer]
    if answer not in choices:
        raise UserError(
            f"{where}: `answer` is {answer!r:.40}, which is none of the choices: use one of them, "
            f"or its index, 0 to {len(choices) - 1}."
        )
    return Item(prompt, answer, tuple(choices), where)


def evaluate(
    models: Sequence[NamedModel], data: Path, options: QaOptions, progress: Progress
) -> TaskReport:
    """Score models, an untrained network, guessing and the most frequent answer."""
    items = read_items(data)
    if options.limit is not None:
        items = sorted(items, key=lambda item: mix("qa", item.prompt))[: options.limit]
    measure = _among_choices if items[0].choices else _written
    chance = float(np.mean([1 / len(i.choices) for i in items])) if items[0].choices else None
    untrained = untrained_of(models, options.seed)
    rows, right, notes = [], {}, []
    for number, entry in enumerate([*models, *untrained]):
        begun, baseline = time.perf_counter(), "untrained" if number >= len(models) else None
        own = options if baseline is None else replace(options, steps=options.steps[:1])
        for row, share in measure(entry, items, own, progress):
            several = baseline is None and len(own.steps) > 1 and row.get("steps") is not None
            name = f"{entry.name}, {row['steps']} steps" if several else entry.name
            row["questions_per_second"] = len(items) / (time.perf_counter() - begun)
            begun, right[name] = time.perf_counter(), share
            rows.append(_common(name, share) | row | {"baseline": baseline})
    if chance is not None:
        notes += against_chance(rows, chance)
        row = {"model": "chance", "num": len(items), "accuracy": chance, "baseline": "chance"}
        rows.append(row)
    answer, count = Counter(item.answer for item in items).most_common(1)[0]
    always = f'always "{answer.strip()}"'
    right[always] = np.array([item.answer == answer for item in items], np.float64)
    rows.append(_common(always, right[always]) | {"baseline": "majority"})
    if count == 1:
        notes.append("No two answers are equal, so the most frequent one is any of them.")
    baselines = [*(entry.name for entry in untrained), always]
    compared, said_of_pairs = compare_all(right, options.seed, baselines)
    return TaskReport(
        task="qa",
        rows=rows,
        notes=notes,
        differences=said_of_pairs,
        tables={"comparisons": compared},
        settings={**asdict(options), "questions": len(items)},
    )


def _common(name: str, right: NDArray[np.float64]) -> Row:
    return {
        "model": name,
        "num": len(right),
        "accuracy": float(right.mean()),
        "accuracy_ci95": wilson(float(right.sum()), len(right)),
    }


def _encode(
    entry: NamedModel, items: Sequence[Item], answers: Sequence[str]
) -> tuple[list[Encoded], int]:
    """Tokens of prompts and answers that fit the window, and how many prompts were cut."""
    where, length = [item.where for item in items], entry.model.config.length
    pairs = [(item.prompt, answer) for item, answer in zip(items, answers, strict=True)]
    encoded = encode_pairs(entry, pairs, where)
    fitted = [fit(pair, length, place) for pair, place in zip(encoded, where, strict=True)]
    return fitted, sum(a.prompt != b.prompt for a, b in zip(encoded, fitted, strict=True))


def _scorer(entry: NamedModel, options: QaOptions) -> Scorer:
    return Scorer(
        entry.model, draws=options.draws, seed=options.seed, batch_tokens=options.batch_tokens
    )


def _among_choices(
    entry: NamedModel, items: Sequence[Item], options: QaOptions, progress: Progress
) -> Iterator[tuple[Row, NDArray[np.float64]]]:
    """Accuracy of the likeliest choice, by the whole answer and by the byte."""
    spread = [item for item in items for _ in item.choices]
    pairs, cut = _encode(entry, spread, [choice for item in items for choice in item.choices])
    encoded = iter(pairs)
    questions = [[next(encoded) for _ in item.choices] for item in items]
    found = _scorer(entry, options).choices(
        questions,
        [item.prompt for item in items],
        lambda done: progress(f"{entry.name}: choices", done, len(items)),
    )
    gold = [item.choices.index(item.answer) for item in items]
    per_byte = [
        log_p / torch.tensor([len(choice.encode()) for choice in item.choices])
        for log_p, item in zip(found, items, strict=True)
    ]
    nll = np.array([-float(log_p[g]) for log_p, g in zip(found, gold, strict=True)])
    among = [-float(p.log_softmax(0)[g]) for p, g in zip(found, gold, strict=True)]
    row: Row = {
        "measure": "likeliest choice",
        "accuracy_per_byte": float(_right(per_byte, gold).mean()),
        "nll": float(nll.mean()),
        "nll_ci95": mean_interval(nll),
        "nll_choices": float(np.mean(among)),
        "truncated": cut,
    }
    yield row, _right(found, gold)


def _right(found: Sequence[Tensor], gold: Sequence[int]) -> NDArray[np.float64]:
    return np.array([float(shares(p)[g]) for p, g in zip(found, gold, strict=True)])


def _written(
    entry: NamedModel, items: Sequence[Item], options: QaOptions, progress: Progress
) -> Iterator[tuple[Row, NDArray[np.float64]]]:
    """Right answers of those that a model writes, and NLL of the true ones."""
    answers = [item.answer for item in items]
    pairs, cut = _encode(entry, items, answers)
    if options.length is not None:
        room = entry.model.config.length - options.length
        if room < max(len(pair.prompt) for pair in pairs):
            raise UserError(
                f"length is {options.length}, and {entry.name} reads {entry.model.config.length} "
                "tokens: no room is left for the longest prompt."
            )
    nats = (
        -_scorer(entry, options)
        .answers(
            pairs,
            [item.prompt for item in items],
            lambda done: progress(f"{entry.name}: likelihood", done, len(items)),
        )
        .numpy()
    )
    common: Row = {
        "nll": float(nats.mean()),
        "nll_ci95": mean_interval(nats),
        "nll_per_token": float(nats.sum() / sum(len(pair.answer) for pair in pairs)),
        "truncated": cut,
    }
    written = measure_written(
        entry,
        pairs,
        answers,
        options,
        progress,
        seed=options.seed,
        batch_tokens=options.batch_tokens,
    )
    for row, right in written:
        yield common | row, right


TASK = Task(
    name="qa",
    help="prompts with answers (.jsonl): likeliest choice, or match of written answers",
    options=QaOptions,
    evaluate=evaluate,
    columns=(
        Column("accuracy", "accuracy", "percent"),
        Column("nfe", "NFE", "count"),
        Column("tokens_per_pass", "tokens a pass"),
        Column("distinct_right", "distinct", "percent"),
        Column("right_entropy", "entropy"),
        Column("accuracy_per_byte", "per byte", "percent"),
        Column("nll_choices", "NLL of choices"),
        Column("nll", "NLL of answer"),
        Column("nll_per_token", "per token"),
        Column("truncated", "cut", "count"),
        Column("questions_per_second", "per second"),
    ),
)
