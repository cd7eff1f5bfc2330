"""Answers in OpenAI's form: texts as clients get them, what was used, pieces of a stream."""

import math
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from didi_instruct.sampling.state import PAD
from didi_instruct.sampling.trace import find_end, output_ids
from didi_instruct.serving.jobs import Canvas, Done
from didi_instruct.serving.schemas import Chat, Completion, Infill
from didi_instruct.serving.served import Served

UNFINISHED = "\ufffd"
"""Stands where a character lacks tokens."""


def cut_at(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """The text before the first of the stops, and whether there is one."""
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    return (text[: min(places)], True) if places else (text, False)


def held_back(text: str, stops: Sequence[str]) -> int:
    """Characters at the end of a text that may yet turn out to belong to a stop."""
    longest = 0
    for stop in stops:
        for size in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:size]):
                longest = size
                break
    return longest


@dataclass
class Answer:
    """One request's answer, as its client asked for it."""

    served: Served
    body: Completion | Infill | Chat
    before: Sequence[str] = ("",)
    """What each prompt is, which is not part of an answer."""
    after: str = ""
    id: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def object(self) -> str:
        """Its name in OpenAI's form."""
        return "chat.completion" if isinstance(self.body, Chat) else "text_completion"

    def shown(self, index: int, whole: str, *, over: bool = True) -> tuple[str, bool]:
        """Cut a whole text for a client; return it, and True if a stop ended it."""
        before = self.before[index // self.body.n]
        text = whole[len(before) :] if whole.startswith(before) else whole
        if over and self.after and text.endswith(self.after):
            text = text[: -len(self.after)]
        text, stopped = cut_at(text, self.body.stops)
        return text, stopped

    def choices(self, done: Done) -> list[dict[str, Any]]:
        """The texts of a request, and why each ends."""
        return [self._choice(i, done) for i in range(len(done.texts))]

    def _choice(self, index: int, done: Done) -> dict[str, Any]:
        text, stopped = self.shown(index, done.texts[index])
        ends = isinstance(self.body, Infill) or self._end(index, done) is not None
        reason = "stop" if stopped or ends else "length"
        choice: dict[str, Any] = {"index": index, "finish_reason": reason, "logprobs": None}
        if isinstance(self.body, Chat):
            return choice | {"message": {"role": "assistant", "content": text}}
        return choice | {"text": text}

    def _end(self, index: int, done: Done) -> int | None:
        """Position at which a text ends; None: it fills its window."""
        eot_id = self.served.tokenizer.eot_id
        return find_end(done.tokens[index], eot_id, None, done.written[index])

    def usage(self, done: Done) -> dict[str, Any]:
        """Tokens read and written, up to the end of each text; a prompt counts once."""
        none, given, written = (PAD, self.served.tokenizer.eot_id), 0, 0
        for i, (row, marks) in enumerate(zip(done.tokens, done.written, strict=True)):
            text = list(zip(row, marks, strict=True))
            written += sum(mark and t not in none for t, mark in text[: self._end(i, done)])
            if i % self.body.n == 0:
                given += done.given(i)
        return {
            "prompt_tokens": given,
            "completion_tokens": written,
            "total_tokens": given + written,
            "passes": done.passes,
        }

    def whole(self, done: Done) -> dict[str, Any]:
        """The answer that is no stream, and the last canvas' of a stream of canvases."""
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.served.name,
            "choices": self.choices(done),
            "usage": self.usage(done),
            "didi": self._facts(done),
        }

    def _facts(self, done: Done) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "steps": self.body.steps,
            "nfe": done.nfe,
            "passes": done.passes,
            "seconds": done.seconds,
            "queued_seconds": done.queued,
            "seed": self.body.seed,
            "log_prob": done.log_prob,
        }
        if done.nats is not None:
            facts["perplexity"] = [_perplexity(nats) for nats in done.nats]
        return facts

    def canvas(self, canvas: Canvas) -> dict[str, Any]:
        """Event of a step: the text of each position, null where nothing is written yet."""
        pieces = self.served.pieces
        return {
            "object": "text_completion.canvas",
            "id": self.id,
            "step": canvas.step,
            "steps": canvas.steps,
            "passes": canvas.passes,
            "seconds": canvas.seconds,
            "choices": [
                {"index": i, "tokens": pieces.of(row)} for i, row in enumerate(canvas.tokens)
            ],
        }

    def chunk(self, index: int, text: str, reason: str | None) -> dict[str, Any]:
        """Event of a stream: what comes next of a text."""
        choice: dict[str, Any] = {"index": index, "finish_reason": reason, "logprobs": None}
        if isinstance(self.body, Chat):
            choice["delta"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        return self._event([choice])

    def last_chunk(self, done: Done) -> dict[str, Any]:
        """Event of a stream that tells what was used."""
        return self._event([]) | {"usage": self.usage(done)}

    def _event(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if isinstance(self.body, Chat) else "text_completion"
        event = {"id": self.id, "object": kind, "created": self.created, "model": self.served.name}
        return {**event, "choices": choices}


class Growing:
    """State of a stream of texts that grow from left to right."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self._sent: dict[int, str] = {}

    def chunks(self, canvas: Canvas) -> list[dict[str, Any]]:
        """Events for what is new, less what may yet change or be cut off."""
        found, answer = [], self.answer
        for i, row in enumerate(canvas.tokens):
            text, stopped = answer.shown(i, self._text(row), over=False)
            if not stopped:
                text = text.rstrip(UNFINISHED)
                text = text[: len(text) - held_back(text, answer.body.stops)]
            found += self._send(i, text, None)
        return found

    def rest(self, done: Done) -> list[dict[str, Any]]:
        """Events that end each text."""
        found = []
        for choice in self.answer.choices(done):
            text = choice["message"]["content"] if "message" in choice else choice["text"]
            found += self._send(choice["index"], text, choice["finish_reason"])
        return found

    def _text(self, row: list[int | None]) -> str:
        tokenizer = self.answer.served.tokenizer
        ids = [token for token in row if token is not None]
        return tokenizer.decode(output_ids(ids, tokenizer.eot_id))

    def _send(self, index: int, text: str, reason: str | None) -> list[dict[str, Any]]:
        sent = self._sent.get(index, "")
        new = text[len(sent) :] if text.startswith(sent) else ""
        self._sent[index] = sent + new
        return [self.answer.chunk(index, new, reason)] if new or reason else []


def _perplexity(nats: float) -> float | None:
    """exp, None where a number cannot hold it."""
    return math.exp(nats) if nats < 700 else None
