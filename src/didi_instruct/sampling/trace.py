"""Denoising traces: record every step of a sampler, and save them as HTML, GIF or JSON.

The callback `Trace` records token ids; `Trace.as_dict` adds their texts, and `replay` turns one
sample of it into the spans of text that the HTML page and the GIF show.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from importlib.util import find_spec
from itertools import chain, takewhile
from pathlib import Path
from typing import Any

from torch import Tensor

from didi_instruct.data.files import no_space_as_user_error, write_atomic
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import MissingExtraError, UserError
from didi_instruct.sampling.state import PAD, Snapshot

FORMAT = "didi-trace-1"
SUFFIXES = (".html", ".gif", ".json")
TEMPLATE = Path(__file__).with_name("trace.html.j2")

Decode = Callable[[Sequence[int]], str]  # token ids to text, such as `Tokenizer.decode`

_REPLACEMENT = "\ufffd"
_MOST_UNSETTLED = 16
"""Tokens decoded again in search of a character's end, which no character has so many of."""
_CONTROL_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
_CONTROL_PICTURES |= dict.fromkeys([*range(0x80, 0xA0), *range(0xD800, 0xE000)], 0xFFFD)
_CONTROL_PICTURES[0x7F] = 0x2421


def visible(text: str) -> str:
    """Replace control characters by visible symbols, so that text cannot steer a terminal."""
    return text.translate(_CONTROL_PICTURES)


def token_texts(ids: Sequence[int], decode: Decode, mask_id: int | None = None) -> list[str]:
    """Text of each position; joined, they are the decoded text.

    A character that takes several tokens belongs to the last of them, and the others have "".
    Masks and padding have "" too, and are left out before decoding.
    """
    texts = [""] * len(ids)
    shown = [i for i, token in enumerate(ids) if token not in (mask_id, PAD)]
    if shown:
        tokens = [ids[i] for i in shown]
        # A tokenizer may strip the space of a text's first word; after a mask it has to stay.
        context = tokens[:1] if mask_id in ids[: shown[0]] else []
        pieces = _split_at_tokens([*context, *tokens], decode)[len(context) :]
        for i, piece in zip(shown, pieces, strict=True):
            texts[i] = piece
    return texts


def _split_at_tokens(tokens: list[int], decode: Decode) -> list[str]:
    """Split the decoded text at token boundaries, decoding a few tokens at a time.

    tokens[:settled] decode to text[:settled_at], which ends with a whole character; tokens from
    `context` on are decoded, because the first of a text may look different.
    """
    text, pieces, prefix = decode(tokens), [], ""
    context = settled = settled_at = done = 0
    for k in range(len(tokens)):
        longer = decode(tokens[context : k + 1])[len(prefix) :]
        pairs = zip(longer, text[settled_at : settled_at + len(longer)], strict=False)
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        end = max(done, settled_at + common)
        pieces.append(text[done:end])
        done = end
        whole = common == len(longer) and not longer.endswith(_REPLACEMENT)
        if (longer and whole) or k - settled >= _MOST_UNSETTLED:
            context, settled, settled_at = settled, k + 1, done
            prefix = decode(tokens[context:settled])
    pieces[-1] += text[done:]
    return pieces


def find_end(
    row: Sequence[int],
    eot_id: int | None,
    mask_id: int | None,
    written: Sequence[bool] | None = None,
) -> int | None:
    """Position of the end-of-text token that ends the output, or None.

    It is the first end-of-text that was written (not given) after some text. If the last position
    was given, so was the end: then it is the first of the given end-of-text tokens that fill the
    rest of the window. `written` (L,) marks the positions to write; None: all.
    """
    ids = [i for i, token in enumerate(row) if token != PAD]
    if written is not None and ids and not written[ids[-1]]:
        filling = takewhile(lambda i: row[i] == eot_id and not written[i], reversed(ids))
        return min(filling, default=None)
    in_text = False
    for i in ids:
        if row[i] == eot_id and in_text and (written is None or written[i]):
            return i
        in_text = in_text or row[i] not in (eot_id, mask_id)
    return None


def output_ids(
    row: Sequence[int], eot_id: int | None, written: Sequence[bool] | None = None
) -> list[int]:
    """Tokens of a finished row up to its end, without padding and end-of-text tokens."""
    end = find_end(row, eot_id, None, written)
    return [token for token in row[:end] if token not in (PAD, eot_id)]


class Trace:
    """Sampler callback that records the first `keep` samples, over one or more batches.

    `about` (sampler, seed, …) is shown with the trace.
    """

    def __init__(
        self,
        mask_id: int,
        eot_id: int | None = None,
        *,
        keep: int = 4,
        about: Mapping[str, str | int | float] | None = None,
    ) -> None:
        self.mask_id, self.eot_id, self.keep = mask_id, eot_id, keep
        self.about = dict(about or {})
        self.samples: list[list[Snapshot]] = []
        self._batch: list[list[Snapshot]] = []

    def __call__(self, step: Snapshot) -> None:
        if step.index == 0:
            self._batch = [[] for _ in step.tokens[: self.keep - len(self.samples)]]
            self.samples += self._batch
        tables = (step.tokens, step.revealed, step.confidence, step.open)
        for i, steps in enumerate(self._batch):
            own = (table[i].to("cpu", copy=True) for table in tables)
            steps.append(Snapshot(step.index, step.steps, step.time, *own))

    def as_dict(self, decode: Decode) -> dict[str, Any]:
        """Content of the JSON file, from which the pictures are made too.

        A sample has the output `text`; the final `tokens` and their `pieces` of text, which join
        to the whole; the position `end` of the end-of-text token that ends the output; and the
        tokens at the `start`. A step has the positions `revealed` with their `tokens`, `pieces`
        and `confidence`, and the positions `masked` again.
        """
        return {
            "format": FORMAT,
            "about": self.about,
            "mask_id": self.mask_id,
            "pad_id": PAD,
            "eot_id": self.eot_id,
            "samples": [self._sample_as_dict(steps, decode) for steps in self.samples],
        }

    def _sample_as_dict(self, steps: list[Snapshot], decode: Decode) -> dict[str, Any]:
        first, final, mask_id = steps[0], steps[-1].tokens, self.mask_id
        start = first.tokens.masked_fill(first.revealed, mask_id)
        tokens, is_open = final.tolist(), first.open.tolist()
        pieces = token_texts(tokens, decode, mask_id)
        before, changes = start, []
        for step in steps:
            row, differs, is_mask = step.tokens, step.tokens != before, step.tokens == mask_id
            at = _positions((step.revealed | differs) & ~is_mask & (row != PAD))
            is_final = bool((row[at] == final[at]).all())
            texts = pieces if is_final else token_texts(row.tolist(), decode, mask_id)
            changes.append(
                {
                    "time": step.time,
                    "revealed": at,
                    "tokens": row[at].tolist(),
                    "pieces": [texts[i] for i in at],
                    "confidence": [float(f"{p:.4g}") for p in step.confidence[at].tolist()],
                    "masked": _positions(is_mask & differs),
                }
            )
            before = row
        output = output_ids(tokens, self.eot_id, is_open)
        return {
            "text": decode([token for token in output if token != mask_id]),
            "tokens": tokens,
            "pieces": pieces,
            "end": find_end(tokens, self.eot_id, mask_id, is_open),
            "start": start.tolist(),
            "start_pieces": token_texts(start.tolist(), decode, mask_id),
            "steps": changes,
        }

    def write(self, path: str | Path, tokenizer: Tokenizer | None) -> None:
        """Write .html, .json or .gif (the first sample only); token ids without a tokenizer."""
        from didi_instruct.sampling.trace_gif import render_gif

        path = Path(path)
        check_path(path)
        if not self.samples:
            raise UserError(f"{path}: no step was traced, there is nothing to write.")
        trace = self.as_dict(_join_ids if tokenizer is None else tokenizer.decode)
        render = {".html": render_html, ".gif": render_gif, ".json": render_json}
        with no_space_as_user_error(path.parent):
            write_atomic(path, render[path.suffix.lower()](trace))


def _join_ids(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))


def _positions(mask: Tensor) -> list[int]:
    return mask.nonzero().flatten().tolist()


def check_path(path: Path) -> None:
    """Refuse a path that no trace can be written to."""
    if path.suffix.lower() not in SUFFIXES:
        known = ", ".join(SUFFIXES)
        raise UserError(f"{path}: a trace is written as one of {known}, not `{path.suffix}`.")
    if not path.parent.is_dir():
        raise UserError(f"{path}: there is no folder {path.parent}.")
    if path.is_dir():
        raise UserError(f"{path}: is a folder, not a file.")
    if path.suffix.lower() == ".gif":
        require_pillow()


def require_pillow() -> None:
    if find_spec("PIL") is None:
        raise MissingExtraError("A GIF trace", "eval")


class SpanState(IntEnum):
    MASKED = 0
    PARTIAL = 1
    SHOWN = 2  # with its final text
    DRAFT = 3  # with another text


@dataclass(frozen=True, slots=True)
class Span:
    """Positions `first` to `last` (included), and the piece of the final text that they write."""

    first: int
    last: int
    text: str
    given: bool  # known before the first step
    eot: bool
    repeated_eot: bool  # an end-of-text right after another

    @property
    def parts(self) -> tuple[str, str, str]:
        """White space before, the word that is shown, white space after."""
        if self.eot:
            return ("", "·", " ") if self.repeated_eot else (" ", "end", " ")
        word = self.text.strip()
        return self.text.partition(word) if word else ("", "", self.text)


@dataclass(frozen=True, slots=True)
class Change:
    """State and text of a span after a step that touched it."""

    step: int  # from 1; 0 before the first step
    span: int
    state: SpanState
    confidence: float  # of the least certain token
    text: str


@dataclass(frozen=True, slots=True)
class Replay:
    """One sample as spans of text that change from step to step."""

    spans: list[Span]
    changes: list[list[Change]]  # of all spans before the first step; then touched by each step
    times: list[float]  # before the first step and after each step
    ends: list[int]  # spans that end the output as soon as they are shown

    def after(self, step: int) -> list[Change]:
        """Last change of every span after `step` steps."""
        last = list(self.changes[0])
        for change in chain.from_iterable(self.changes[1 : step + 1]):
            last[change.span] = change
        return last


def replay(trace: dict[str, Any], sample: dict[str, Any]) -> Replay:
    """Follow the spans of a sample of `Trace.as_dict` through its steps."""
    spans, mask_id = _find_spans(trace, sample), trace["mask_id"]
    span_at = {p: i for i, span in enumerate(spans) for p in range(span.first, span.last + 1)}
    row, pieces = list(sample["start"]), list(sample["start_pieces"])
    confidence = [1.0] * len(row)

    def observe(step: int, i: int) -> Change:
        part = slice(spans[i].first, spans[i].last + 1)
        if mask_id in row[part]:
            hidden = {mask_id, trace["pad_id"]}.issuperset(row[part])
            state = SpanState.MASKED if hidden else SpanState.PARTIAL
        else:
            state = SpanState.SHOWN if row[part] == sample["tokens"][part] else SpanState.DRAFT
        text = visible("".join(pieces[part])) if state == SpanState.DRAFT else spans[i].text
        return Change(step, i, state, min(confidence[part]), text)

    changes = [[observe(0, i) for i in range(len(spans))]]
    for n, step in enumerate(sample["steps"], start=1):
        for k, position in enumerate(step["revealed"]):
            row[position], pieces[position] = step["tokens"][k], step["pieces"][k]
            confidence[position] = step["confidence"][k]
        for position in step["masked"]:
            row[position], confidence[position] = mask_id, 1.0
        touched = {span_at[position] for position in (*step["revealed"], *step["masked"])}
        changes.append([observe(n, i) for i in sorted(touched)])
    end = sample["end"]
    ends = [i for i, s in enumerate(spans) if end is not None and s.eot and s.last >= end]
    return Replay(spans, changes, [*(step["time"] for step in sample["steps"]), 0.0], ends)


def _find_spans(trace: dict[str, Any], sample: dict[str, Any]) -> list[Span]:
    """Join tokens without a text of their own to the one that completes their character."""
    final, start, pieces = sample["tokens"], sample["start"], sample["pieces"]
    written = {position for step in sample["steps"] for position in step["revealed"]}
    spans: list[Span] = []
    first = 0
    for i, piece in enumerate(pieces):
        if not piece and i < len(pieces) - 1:
            continue
        part = range(first, i + 1)
        first = i + 1
        if all(final[p] == trace["pad_id"] for p in part):
            continue
        given = written.isdisjoint(part) and all(start[p] == final[p] for p in part)
        eot = final[i] == trace["eot_id"]
        repeated = eot and bool(spans) and spans[-1].eot
        spans.append(Span(part[0], i, visible(piece), given, eot, repeated))
    while spans and spans[-1].eot and spans[-1].given:
        spans.pop()  # they fill the window after a text whose length was given
    return spans


def render_json(trace: dict[str, Any]) -> bytes:
    """Render the dictionary of a trace as a file of one line."""
    return (json.dumps(trace, ensure_ascii=False) + "\n").encode("utf-8", "replace")


def render_html(trace: dict[str, Any]) -> bytes:
    """Render the dictionary of a trace as a page that plays it, without any other file.

    The final texts are in the page itself, to be read, printed and searched without its script,
    which only hides what is not yet written.
    """
    from jinja2 import Environment, StrictUndefined

    replays = [replay(trace, sample) for sample in trace["samples"]]
    about = dict(trace["about"])
    num_steps = [len(r.changes) - 1 for r in replays]
    num_tokens = [r.spans[-1].last + 1 for r in replays if r.spans]
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True
    )
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "separators": (",", ":")}
    page = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        title=about.pop("title", "Denoising, step by step"),
        facts=[f"{_range(num_steps)} steps", f"{_range(num_tokens)} tokens"]
        + [f"{name} {value}" for name, value in about.items()],
        samples=[r.spans for r in replays],
        data=[_script_data(r) for r in replays],
    )
    return page.encode("utf-8", "replace")


def _range(numbers: list[int]) -> str:
    low, high = min(numbers, default=0), max(numbers, default=0)
    return str(low) if low == high else f"{low}–{high}"


def _script_data(played: Replay) -> dict[str, Any]:
    """Input of the page's script; a change is [span, state, confidence, text of a draft]."""

    def pack(change: Change) -> list[Any]:
        draft = [change.text.strip()] if change.text != played.spans[change.span].text else []
        return [change.span, int(change.state), float(f"{change.confidence:.2g}"), *draft]

    start, *steps = played.changes
    return {
        "time": round(played.times[0], 4),
        "start": [pack(change) for change in start if change.state != SpanState.MASKED],
        "steps": [
            {"time": round(time, 4), "changes": [pack(change) for change in changes]}
            for time, changes in zip(played.times[1:], steps, strict=True)
        ],
        "ends": played.ends,
        "tokens": [span.last - span.first + 1 for span in played.spans],
    }
