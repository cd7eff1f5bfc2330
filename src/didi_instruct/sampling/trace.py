"""What a sampler did, step by step: a callback that remembers, and the files it writes."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from didi_instruct.data.files import no_space_as_user_error, write_atomic
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import UserError
from didi_instruct.sampling import trace_gif, trace_html
from didi_instruct.sampling.chain import PAD, Step
from didi_instruct.sampling.trace_text import Decode, find_end, output_ids, token_texts

FORMAT = "didi-trace-1"


@dataclass(frozen=True, slots=True)
class TracedStep:
    """What one step changed in one sample."""

    time: float
    """Where the step started, 1 to 0."""
    revealed: list[int]
    """Positions written."""
    tokens: list[int]
    """What was written there."""
    confidence: list[float]
    """What probability the denoiser gave to it."""
    masked: list[int]
    """Positions masked again."""


@dataclass(slots=True)
class TracedSample:
    """One sample on its way."""

    start: list[int]
    """Tokens before the first step."""
    written: list[bool] | None = None
    """Which positions were to write; None: all."""
    steps: list[TracedStep] = field(default_factory=list)

    def rows(self, mask_id: int) -> list[list[int]]:
        """Tokens before the first step, after it, after the second, …."""
        rows = [self.start]
        for step in self.steps:
            row = list(rows[-1])
            for position, token in zip(step.revealed, step.tokens, strict=True):
                row[position] = token
            for position in step.masked:
                row[position] = mask_id
            rows.append(row)
        return rows


class Trace:
    """A callback that keeps every step of the first samples; batches may follow each other."""

    def __init__(
        self,
        mask_id: int,
        eot_id: int | None = None,
        *,
        keep: int = 4,
        about: Mapping[str, str | int | float] | None = None,
    ) -> None:
        """Keep up to `keep` samples; `about` (sampler, seed, …) is written along."""
        if keep < 1:
            raise UserError(f"keep is {keep}: trace 1 sample or more.")
        self.mask_id, self.eot_id, self.keep = mask_id, eot_id, keep
        self.about = dict(about or {})
        self.samples: list[TracedSample] = []
        self._first, self._count, self._last = 0, 0, []  # type: int, int, list[list[int]]

    def __call__(self, step: Step) -> None:
        """Remember a step."""
        if step.index == 0:
            self._first = len(self.samples)
            self._count = min(self.keep - self._first, len(step.tokens))
        if self._count == 0:
            return
        tokens = step.tokens[: self._count].tolist()
        revealed = step.revealed[: self._count].tolist()
        confidence = step.confidence[: self._count].tolist()
        if step.index == 0:
            self._last = [self._before(*pair) for pair in zip(tokens, revealed, strict=True)]
            written = [None] * self._count if step.open is None else step.open.tolist()
            self.samples += [TracedSample(*pair) for pair in zip(self._last, written, strict=False)]
        for i, row in enumerate(tokens):
            change = self._change(step.time, self._last[i], row, revealed[i], confidence[i])
            self.samples[self._first + i].steps.append(change)
        self._last = tokens

    def _before(self, row: list[int], revealed: list[bool]) -> list[int]:
        """Undo the first step: what it wrote was masked."""
        return [self.mask_id if new else t for t, new in zip(row, revealed, strict=True)]

    def _change(
        self,
        time: float,
        before: list[int],
        row: list[int],
        revealed: list[bool],
        confidence: list[float],
    ) -> TracedStep:
        written = [
            i
            for i, token in enumerate(row)
            if token not in (self.mask_id, PAD) and (revealed[i] or token != before[i])
        ]
        return TracedStep(
            time,
            written,
            [row[i] for i in written],
            [float(f"{confidence[i]:.4g}") for i in written],
            [i for i, t in enumerate(row) if t == self.mask_id and before[i] != self.mask_id],
        )

    def as_dict(self, decode: Decode) -> dict[str, Any]:
        """Plain data: what the JSON file holds, and what the pictures are made from.

        A sample has `text`, the output; its `tokens` after all steps and the `pieces` of text
        that they wrote, which join to the whole; the position `end` of the end-of-text token that
        cuts it; the same at the `start` (of a model without masks, what the first step did not
        change). A step has the positions it `revealed`, and for these the `tokens`, `pieces` and
        `confidence`; and the positions it `masked` again.
        """
        return {
            "format": FORMAT,
            "about": self.about,
            "mask_id": self.mask_id,
            "pad_id": PAD,
            "eot_id": self.eot_id,
            "samples": [self._sample(sample, decode) for sample in self.samples],
        }

    def _sample(self, sample: TracedSample, decode: Decode) -> dict[str, Any]:
        start, *rows = sample.rows(self.mask_id)
        final = rows[-1]
        pieces = token_texts(final, decode, self.mask_id)
        steps = []
        for step, row in zip(sample.steps, rows, strict=True):
            settled = all(row[i] == final[i] for i in step.revealed)
            texts = pieces if settled else token_texts(row, decode, self.mask_id)
            steps.append(
                {
                    "time": step.time,
                    "revealed": step.revealed,
                    "tokens": step.tokens,
                    "pieces": [texts[i] for i in step.revealed],
                    "confidence": step.confidence,
                    "masked": step.masked,
                }
            )
        end = find_end(final, self.eot_id, self.mask_id, sample.written)
        output = output_ids(final, self.eot_id, sample.written)
        return {
            "text": decode([token for token in output if token != self.mask_id]),
            "tokens": final,
            "pieces": pieces,
            "end": end,
            "start": start,
            "start_pieces": token_texts(start, decode, self.mask_id),
            "steps": steps,
        }

    def write(self, path: str | Path, tokenizer: Tokenizer | None) -> None:
        """Write .html, .gif (the first sample) or .json; without a tokenizer, of token ids."""
        path = Path(path)
        check_path(path)
        if not self.samples:
            raise UserError(f"{path}: no step was traced, there is nothing to write.")
        decode = _numbers if tokenizer is None else tokenizer.decode
        data = _WRITERS[path.suffix.lower()](self.as_dict(decode))
        with no_space_as_user_error(path.parent):
            write_atomic(path, data)


def check_path(path: Path) -> None:
    """Refuse, before any work is done, a file that a trace cannot be written to."""
    if path.suffix.lower() not in _WRITERS:
        known = ", ".join(_WRITERS)
        raise UserError(f"{path}: a trace is written as one of {known}, not `{path.suffix}`.")
    if not path.parent.is_dir():
        raise UserError(f"{path}: there is no folder {path.parent}.")
    if path.is_dir():
        raise UserError(f"{path}: is a folder, not a file.")
    if path.suffix.lower() == ".gif":
        trace_gif.require_pillow()


def _json(trace: dict[str, Any]) -> bytes:
    return (json.dumps(trace, ensure_ascii=False) + "\n").encode("utf-8", "replace")


def _numbers(ids: Any) -> str:
    return " ".join(map(str, ids))


_WRITERS: dict[str, Callable[[dict[str, Any]], bytes]] = {
    ".html": trace_html.render,
    ".gif": trace_gif.render,
    ".json": _json,
}
