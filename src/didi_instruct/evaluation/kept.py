"""What was measured, on disk: one JSON file for each measure, and one for what a judge said.

A file has the numbers of its row and those of each sample, so that rows can be compared later
without asking a judge again. It is written whole; two evaluations may share a folder.
"""

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from didi_instruct.data.files import no_space_as_user_error, write_atomic
from didi_instruct.evaluation.judges import Scores
from didi_instruct.evaluation.measuring import Measured, Measuring, Yardstick
from didi_instruct.evaluation.rows import METRICS, measure
from didi_instruct.evaluation.samples import SampleSet

VERSION = 5
"""Raised where a measure changes, so that old numbers are taken again."""

T = TypeVar("T")


def key(*parts: Any) -> str:
    """A short name for what a file holds."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:20]


def content_key(samples: SampleSet) -> str:
    """A short name for what is measured; two files of one model and setting may differ in it."""
    log_prob = [] if samples.log_prob is None else samples.log_prob.tolist()
    tables = (samples.tokens.tolist(), samples.lengths.tolist(), log_prob, samples.texts)
    origin = samples.origin
    return key(*tables, origin.tokenizer, origin.sampler, origin.until_eot, origin.ends_with_text)


def measure_once(name: str, measuring: Measuring, folder: Path) -> Measured:
    """Take a measure, or read it from the folder of these samples, where it is kept if it lasts."""
    path = folder / f"{name}-{key(VERSION, *_depends_on(name, measuring.yardstick))}.json"
    return _recalled(
        path,
        lambda: measure(name, measuring),
        _measured_to_json,
        _measured,
        lambda found: found.lasting,
    )


def judge_once(name: str, judge: str, make: Callable[[], Scores], folder: Path) -> Scores:
    """Ask the judge of that fingerprint, or read what it said."""
    path = folder / f"judge-{name}-{key(VERSION, judge)}.json"
    return _recalled(path, make, _scores_to_json, _scores)


def _depends_on(name: str, yardstick: Yardstick) -> list[Any]:
    """What a value depends on beside the samples."""
    metric, judge, reference = METRICS[name], yardstick.judge, yardstick.reference
    more = [yardstick.ar_start.fingerprint] if name == "ar-kl" and yardstick.ar_start else []
    more += [yardstick.chains.fingerprint] if metric.chains and yardstick.chains else []
    more += [yardstick.folding.fingerprint] if metric.folding and yardstick.folding else []
    return [
        judge.fingerprint if metric.per_judge and judge else None,
        reference.fingerprint if metric.reference and reference else None,
        yardstick.seed,
        yardstick.num_tokens if metric.learns else None,
        *more,
    ]


def _recalled(
    path: Path,
    make: Callable[[], T],
    write: Callable[[T], Any],
    read: Callable[[Any], T],
    lasts: Callable[[T], bool] = lambda _: True,
) -> T:
    """What a file holds, made and written now if there is none, or none that can be read."""
    try:
        return read(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        pass  # what is missing or damaged is made again
    found = make()
    if not lasts(found):
        return found
    with no_space_as_user_error(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(write(found), allow_nan=False).encode())
    return found


def _measured_to_json(found: Measured) -> Any:
    values = {name: _finite(numbers.tolist()) for name, numbers in found.values.items()}
    return {"row": found.row, "values": values}


def _measured(content: Any) -> Measured:
    values = {name: np.array(found, np.float64) for name, found in content["values"].items()}
    return Measured(dict(content["row"]), values)


def _scores_to_json(scores: Scores) -> Any:
    nats, tokens = _finite(scores.nats.tolist()), scores.tokens.tolist()
    return {"nats": nats, "tokens": tokens, "cut": scores.cut}


def _scores(content: Any) -> Scores:
    nats = [math.inf if nat is None else nat for nat in content["nats"]]
    return Scores(
        torch.tensor(nats, dtype=torch.float64), torch.tensor(content["tokens"]), content["cut"]
    )


def _finite(numbers: Sequence[float]) -> list[float | None]:
    """JSON has no infinity."""
    return [number if math.isfinite(number) else None for number in numbers]
