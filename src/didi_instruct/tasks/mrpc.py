"""MRPC: are two sentences paraphrases, told from frozen features of a network.

The states below the last block are frozen; the last block and a linear head on the mean of its
states learn (`features.py`). Always answering "paraphrase" is right in two of three pairs, so that
the row `majority` is what a network has to beat.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path

import numpy as np
import torch

from didi_instruct.config.model import ModelConfig
from didi_instruct.data.files import no_space_as_user_error, write_atomic
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import UserError
from didi_instruct.evaluation.cache import key
from didi_instruct.seeding import mix
from didi_instruct.tasks.baselines import untrained_of
from didi_instruct.tasks.features import (
    FilledWindow,
    Fitted,
    FrozenStates,
    Parts,
    Training,
    fit_classifier,
    frozen_states,
    network_digest,
)
from didi_instruct.tasks.pairs import SPLITS, TEST, TRAIN, Pair, read_pairs
from didi_instruct.tasks.statistics import (
    MOST_SEEDS,
    Labels,
    Measures,
    Probs,
    compare_all,
    f1,
    measure,
    over_seeds,
    wilson,
)
from didi_instruct.tasks.task import Column, NamedModel, Progress, Row, Task, TaskReport

VERSION = 1
"""Raised where fitting changes, so that older results are not read."""
MAJORITY = 'always "paraphrase"'
_HASHES = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class MrpcOptions:
    """Settings of MRPC; steps, batch_size, lr and weight_decay are the paper's."""

    split: str = TEST
    """Pairs to report on: `test`, or `validation` where the files have one, as GLUE's."""
    steps: int = 10_000
    """Steps of AdamW, at a constant rate."""
    batch_size: int = 8
    lr: float = 2e-5
    weight_decay: float = 0.01
    evaluations: int = 20
    """Evaluations on the dev pairs, evenly spaced; the weights of the best are kept."""
    dev_share: float = 0.1
    """Share of the train pairs cut off, by a hash of their text, for that choice."""
    seeds: int = 5
    """Runs that differ in the head's first weights and in the order of pairs."""
    seed: int = 0
    """The first of the seeds."""
    limit: int | None = None
    """Pairs at most of each split, the first ones; all if not said."""
    separator: str | None = None
    """Text between two sentences; the tokenizer's end of text or a line break if not said."""
    cache: str = "evals/features"
    """Folder of frozen states and results, which a second run reads; empty: keep nothing."""

    def __post_init__(self) -> None:
        """Refuse values outside their range."""
        if self.split not in SPLITS[1:]:
            raise UserError(f"split is `{self.split}`: use {' or '.join(SPLITS[1:])}.")
        for name in ("steps", "batch_size", "evaluations", "seeds"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}: use 1 or more.")
        if self.seeds > MOST_SEEDS:
            raise UserError(f"seeds is {self.seeds}: use {MOST_SEEDS} at most.")
        if self.limit is not None and self.limit < 1:
            raise UserError(f"limit is {self.limit}: use 1 or more.")
        if not 0 < self.dev_share < 1:
            raise UserError(f"dev_share is {self.dev_share}: use a number between 0 and 1.")
        if self.lr <= 0 or self.weight_decay < 0:
            raise UserError("lr is above 0 and weight_decay not below it: change them.")


def evaluate(
    models: Sequence[NamedModel], data: Path, options: MrpcOptions, progress: Progress
) -> TaskReport:
    """Fit and test each model, an untrained network of each shape, and the majority."""
    for entry in models:
        _check_dtype(entry)
    pairs, parts = _read(data, options)
    truth = np.array(parts.labels)[parts.test] == 1
    rows, notes, seeds = [], [], []
    probs: dict[str, Probs] = {}
    entries: list[tuple[NamedModel, str | None]] = [(entry, None) for entry in models]
    entries += [(entry, "untrained") for entry in untrained_of(models, options.seed)]
    for entry, baseline in entries:
        tokens, truncated = _encode(entry, pairs, options.separator)
        fitted = _fit_all(entry, tokens, parts, options, progress)
        probs[entry.name] = np.array([one.probs for one in fitted])
        measures = measure(probs[entry.name], truth, options.seed)
        more = {"baseline": baseline, "truncated": truncated}
        rows.append(_row(entry.name, options, measures, len(truth)) | more)
        for number, one in enumerate(fitted):
            seeds.append(_seed_row(entry.name, options.seed + number, one, measures, number))
        if baseline is None:
            notes += _over_seeds(entry.name, measures)
    rows.append(_majority(options, truth))
    # A pair counts by the share of a network's seeds that are right, as in its accuracy.
    right = {n: ((p >= 0.5) == truth).mean(0, dtype=np.float64) for n, p in probs.items()}
    right[MAJORITY] = truth.astype(np.float64)
    baselines = [row["model"] for row in rows if row["baseline"] is not None]
    compared, sentences = compare_all(right, options.seed, baselines)
    tables = {"seeds": seeds, "comparisons": compared}
    settings = asdict(options) | {"train": len(parts.train), "dev": len(parts.dev)}
    del settings["cache"]
    return TaskReport("mrpc", rows, notes, sentences, tables, settings)


def _check_dtype(entry: NamedModel) -> None:
    """Refuse weights of 16 bits, which steps of the paper's size would not move."""
    types = {weight.dtype for weight in entry.model.network.parameters()}
    if narrow := types - {torch.float32, torch.float64}:
        name = str(narrow.pop()).removeprefix("torch.")
        raise UserError(
            f"{entry.name}: its weights are {name}, but the last block learns in float32: use "
            "--dtype float32."
        )


# Pairs


def _read(data: Path, options: MrpcOptions) -> tuple[list[Pair], Parts]:
    """Read the pairs, and cut the dev pairs from those to train on."""
    splits = read_pairs(data)
    if options.split not in splits:
        raise UserError(
            f"{data}: has no {options.split} split, only {', '.join(splits)}: choose another."
        )
    train, test = splits[TRAIN][: options.limit], splits[options.split][: options.limit]
    pairs = [*train, *test]
    dev = [i for i, pair in enumerate(train) if _is_dev(pair, options.dev_share)]
    rest = sorted(set(range(len(train))) - set(dev))
    if not dev or not rest:
        raise UserError(
            f"{data}: dev_share {options.dev_share} of {len(train)} train pairs leaves "
            f"{len(rest)} to train on and {len(dev)} to choose by: change it, or raise limit."
        )
    labels, rows = [pair.label for pair in pairs], list(range(len(train), len(pairs)))
    return pairs, Parts(labels=labels, train=rest, dev=dev, test=rows)


def _is_dev(pair: Pair, share: float) -> bool:
    """Choose a pair by its text; the order of its sentences plays no part."""
    first, second = sorted((pair.first, pair.second))
    return mix("mrpc dev", first, second) % _HASHES < share * _HASHES


def _encode(
    entry: NamedModel, pairs: Sequence[Pair], separator: str | None
) -> tuple[list[list[int]], int]:
    """Tokens of each pair, and how many pairs were cut to fit the window."""
    config, tokenizer = entry.model.config, entry.model.tokenizer
    if tokenizer is None:
        raise UserError(f"{entry.name}: brings no tokenizer; name it with --tokenizer.")
    window = config.length - (config.kind == "ar")  # its start symbol takes a position
    between = _separator(tokenizer, separator)
    firsts = tokenizer.encode([pair.first for pair in pairs])
    seconds = tokenizer.encode([pair.second for pair in pairs])
    if window < len(between) + 2:
        raise UserError(f"{entry.name}: its window of {config.length} has no room for a pair.")
    tokens, truncated = [], 0
    for first, second in zip(firsts, seconds, strict=True):
        room = window - len(between)
        if len(first) + len(second) > room:  # the longer one is cut first
            first = first[: max(room // 2, room - len(second))]
            second = second[: room - len(first)]
            truncated += 1
        tokens.append([*first, *between, *second])
    return tokens, truncated


def _separator(tokenizer: Tokenizer, text: str | None) -> list[int]:
    """Tokens between two sentences."""
    if text is not None:
        return tokenizer.encode([text])[0] if text else []
    if tokenizer.eot_id is not None:
        return [tokenizer.eot_id]
    known = next((word for word in ("[SEP]", "</s>") if word in tokenizer), "\n")
    return tokenizer.encode([known])[0]


# Fitting


def _fit_all(
    entry: NamedModel,
    tokens: Sequence[Sequence[int]],
    parts: Parts,
    options: MrpcOptions,
    progress: Progress,
) -> list[Fitted]:
    """Fit each seed, or read what was found before with the same weights, pairs and settings."""
    network = entry.model.network
    cache = Path(options.cache) if options.cache else None
    base = key(network_digest(network), tokens)
    training = Training(**{f.name: getattr(options, f.name) for f in fields(Training)})
    states: FrozenStates | None = None
    found = []
    for seed in range(options.seed, options.seed + options.seeds):
        name = key("mrpc", VERSION, base, asdict(parts), asdict(training), seed)
        path = None if cache is None else cache / f"mrpc-{name}.json"
        fitted = _kept(path)
        if fitted is None:
            if states is None:
                place = None if cache is None else cache / f"states-{base}.safetensors"
                stage = f"{entry.name}: frozen blocks"
                window = _own_window(entry.model.config)
                states = frozen_states(network, tokens, window, place, partial(progress, stage))
            stage = f"{entry.name}: seed {seed}"
            fitted = fit_classifier(
                network, states, parts, training, seed, partial(progress, stage)
            )
            _keep(path, fitted)
        found.append(fitted)
    return found


def _own_window(config: ModelConfig) -> FilledWindow | None:
    """Ends that fill the window behind a text, where a masked model never saw another form."""
    if config.end_id is None or config.kind != "mdlm":
        return None
    return FilledWindow(config.length, config.end_id)


def _kept(path: Path | None) -> Fitted | None:
    """Return what a file holds; None where there is none, or none that can be read."""
    try:
        return None if path is None else Fitted(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _keep(path: Path | None, fitted: Fitted) -> None:
    if path is not None:
        with no_space_as_user_error(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, json.dumps(asdict(fitted), allow_nan=False).encode())


# Rows


def _row(name: str, options: MrpcOptions, found: Measures, num: int) -> Row:
    return {
        "model": name,
        "split": options.split,
        "num": num,
        "accuracy": found.accuracy,
        "accuracy_ci95": found.accuracy_ci95,
        "accuracy_seeds_ci95": over_seeds(found.accuracy_seeds),
        "f1": found.f1,
        "f1_ci95": found.f1_ci95,
        "f1_seeds_ci95": over_seeds(found.f1_seeds),
        "nll_choices": found.nll,
        "nll_choices_ci95": found.nll_ci95,
        "seeds": len(found.f1_seeds),
        "steps": options.steps,
    }


def _seed_row(name: str, seed: int, fitted: Fitted, found: Measures, number: int) -> Row:
    return {
        "model": name,
        "seed": seed,
        "accuracy": found.accuracy_seeds[number],
        "f1": found.f1_seeds[number],
        "step": fitted.step,
        "dev_accuracy": fitted.dev_accuracy,
    }


def _majority(options: MrpcOptions, truth: Labels) -> Row:
    """Row of the answer "paraphrase" for every pair."""
    right = int(truth.sum())
    return {
        "model": MAJORITY,
        "split": options.split,
        "num": len(truth),
        "accuracy": right / len(truth),
        "accuracy_ci95": wilson(right, len(truth)),
        "f1": f1(right, 0, len(truth) - right),
        "baseline": "majority",
    }


def _over_seeds(name: str, found: Measures) -> list[str]:
    """Say how far seeds differ, which the intervals of the table, over pairs, do not."""
    number = len(found.accuracy_seeds)
    accuracy, score = over_seeds(found.accuracy_seeds), over_seeds(found.f1_seeds)
    if accuracy is None or score is None:
        return []
    return [
        f"{name}: 95% intervals over {number} seeds alone (Student's t) are [{accuracy[0]:.1%}, "
        f"{accuracy[1]:.1%}] for accuracy and [{score[0]:.1%}, {score[1]:.1%}] for F1."
    ]


TASK = Task(
    name="mrpc",
    help="paraphrases (MRPC): frozen features under a linear head; the last block learns too",
    options=MrpcOptions,
    evaluate=evaluate,
    counts="pairs",
    columns=(
        Column("accuracy", "accuracy", "percent"),
        Column("f1", "F1", "percent"),
        Column("nll_choices", "NLL of labels"),
        Column("truncated", "cut", "count"),
    ),
)
