"""Answers that models write: how many are right, over steps, and how they vary."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from didi_instruct.errors import UserError
from didi_instruct.sampling.state import Samples, Snapshot
from didi_instruct.tasks.encoding import Encoded
from didi_instruct.tasks.statistics import mean_interval, wilson
from didi_instruct.tasks.task import NamedModel, Progress, Row
from didi_instruct.tasks.writing import GREEDY_SAMPLERS, write_samples

Right = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class WritingOptions:
    """How answers are written, and when they are right."""

    steps: tuple[int, ...] = (16,)
    """Of writing an answer; several are as many rows."""
    samples: int = 1
    """Answers to each question. One is the likeliest; several are drawn, and their variety told."""
    sampler: str | None = None
    """By default that of the likeliest tokens, for several samples the plain one of the model."""
    sampler_options: dict[str, Any] = field(default_factory=dict)
    """`threshold` of the sampler `confidence`, for example."""
    temperature: float | None = None
    """By default 0 for one sample and 1 for several."""
    length: int | None = None
    """Tokens of an answer, which ends at an end of text; by default as many as the true one has."""
    regex: str | None = None
    """What counts of an answer: the first group, or all, of the last match, in the written and in
    the true one (which may be that alone). By default all of it."""

    def __post_init__(self) -> None:
        """Refuse numbers and patterns that make no sense."""
        counts = (*self.steps, self.samples, 1 if self.length is None else self.length)
        if not self.steps or min(counts) < 1:
            raise UserError("steps, samples and length are 1 or more.")
        if self.temperature is not None and not 0 <= self.temperature < np.inf:
            raise UserError(f"temperature is {self.temperature}: use 0 or more.")
        try:
            re.compile(self.regex or "")
        except re.error as error:
            raise UserError(f"regex is {self.regex!r}, which is no pattern ({error}).") from error


def final(text: str, regex: str | None) -> str | None:
    """The part of an answer that counts; None where a pattern does not match."""
    if regex is None:
        return text.strip()
    matches = list(re.finditer(regex, text, re.DOTALL))
    if not matches:
        return None
    last = matches[-1]
    return (last[1] if last.re.groups else last[0]).strip()


def measure_written(
    entry: NamedModel,
    pairs: Sequence[Encoded],
    answers: Sequence[str],
    options: WritingOptions,
    progress: Progress,
    *,
    seed: int,
    batch_tokens: int,
) -> Iterator[tuple[Row, Right]]:
    """A row, and the share of right answers to each question, for each number of steps."""
    true = [final(answer, options.regex) or answer.strip() for answer in answers]
    # A threshold decides by itself how many steps there are.
    counts = (None,) if "threshold" in options.sampler_options else options.steps
    for steps in counts:
        texts, samples = _write(entry, pairs, options, steps, progress, seed, batch_tokens)
        found = [final(text, options.regex) for text in texts]
        right = np.array(found).reshape(len(pairs), -1) == np.array(true)[:, None]
        share: Right = right.mean(1)
        tokens = options.length or float(np.mean([len(pair.answer) for pair in pairs]))
        row: Row = {
            "measure": "exact match" if options.regex is None else f"match of {options.regex}",
            "steps": steps,
            "samples": options.samples,
            "nfe": samples.nfe,
            "passes": samples.passes,
            "tokens_per_pass": tokens / max(samples.passes, 1e-9),
            "accuracy": float(share.mean()),
            "accuracy_ci95": wilson(float(right.sum()), right.size),
        }
        if options.samples > 1:
            # Answers to one question are alike: the interval is that of questions.
            low, high = mean_interval(share) or row["accuracy_ci95"]
            row["accuracy_ci95"] = [max(low, 0.0), min(high, 1.0)]
            row |= variety(np.array(texts).reshape(right.shape), right)
        yield row, share


def variety(texts: NDArray[Any], right: NDArray[np.bool_]) -> Row:
    """How the right answers (Q, S) to a question differ, on average over questions that have some.

    `distinct_right`: different texts among those of a question, over how many there are;
    `right_entropy`: entropy of the law of its right texts, in nats, which S samples bound by log S.
    """
    distinct, nats = [], []
    for row, good in zip(texts, right, strict=True):
        if good.any():
            counts = np.array(list(Counter(row[good].tolist()).values()), np.float64)
            shares = counts / counts.sum()
            distinct.append(len(counts) / counts.sum())
            nats.append(-float((shares * np.log(shares)).sum()))
    if not distinct:
        return {"distinct_right": None, "right_entropy": None}
    return {
        "distinct_right": float(np.mean(distinct)),
        "right_entropy": float(np.mean(nats)),
        "right_entropy_ci95": mean_interval(np.array(nats)),
    }


def _write(
    entry: NamedModel,
    pairs: Sequence[Encoded],
    options: WritingOptions,
    steps: int | None,
    progress: Progress,
    seed: int,
    batch_tokens: int,
) -> tuple[list[str], Samples]:
    """Answers as text, those of a question side by side, and how they were drawn."""
    model, several = entry.model, options.samples > 1
    assert model.tokenizer is not None
    done = 0

    def report(step: Snapshot) -> None:
        nonlocal done
        done += len(step.tokens) * (step.index + 1 == step.steps)
        progress(f"{entry.name}: writing", done, len(pairs) * options.samples)

    greedy = None if several else GREEDY_SAMPLERS[model.config.kind]
    temperature = options.temperature
    if temperature is None:
        temperature = 1.0 if several else 0.0
    repeated = [pair for pair in pairs for _ in range(options.samples)]
    ids, samples = write_samples(
        model,
        [pair.prompt for pair in repeated],
        [options.length or len(pair.answer) for pair in repeated],
        batch_tokens=batch_tokens,
        callback=report,
        steps=steps,
        sampler=options.sampler or greedy,
        options=options.sampler_options,
        temperature=temperature,
        seed=seed,
    )
    return model.tokenizer.decode_batch(ids, stop_at_eot=options.length is not None), samples
