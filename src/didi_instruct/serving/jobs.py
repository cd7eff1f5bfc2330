"""Requests on their way through the engine, and what becomes of them."""

import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

import greenlet

from didi_instruct.model import Model
from didi_instruct.sampling.generate import Request
from didi_instruct.sampling.registry import USUAL_STEPS, find_sampler
from didi_instruct.sampling.state import PAD, Snapshot
from didi_instruct.serving.passes import Pass

TOKEN_WORK = 32
"""Positions of a canvas that a token of a left-to-right model costs as much time as."""


class RefusedError(Exception):
    """The engine takes no request now: it is closing, or (`FullError`) full."""


class FullError(RefusedError):
    """Raised where the queue is full."""


class ExpiredError(Exception):
    """A request took longer than requests may."""


@dataclass(frozen=True, slots=True)
class Canvas:
    """The texts of a request after a step."""

    step: int
    """Steps taken; 0: what is given, and masks."""
    steps: int
    """Scheduled in all."""
    passes: float
    """Forward passes of the denoiser so far, per text."""
    seconds: float
    """Since the request was begun."""
    tokens: list[list[int | None]]
    """Of each text; None where nothing is written yet."""


@dataclass(frozen=True, slots=True)
class Done:
    """Texts of a request, and what they cost."""

    texts: list[str]
    """As `Model.generate` returns them."""
    tokens: list[list[int]]
    written: list[list[bool]]
    """Which of the tokens were not given."""
    eot_id: int | None
    """The id that ends a text and fills what is behind it."""
    log_prob: list[float] | None
    nats: list[float] | None
    """Nats per token of each text under the judge."""
    nfe: int
    passes: float
    queued: float
    """Seconds before the first pass was begun."""
    seconds: float
    """Seconds from then on."""

    def given(self, index: int) -> int:
        """Count the tokens of a text that its request brought, without ends and padding."""
        marks = zip(self.tokens[index], self.written[index], strict=True)
        return sum(not written and token not in (PAD, self.eot_id) for token, written in marks)


Watch = Callable[[Canvas], None]


@dataclass(eq=False, kw_only=True, slots=True)
class Job:
    """A request in the engine; cancelling its future ends it before its next pass."""

    name: str
    """The model's."""
    request: Request
    texts: int
    positions: int
    """Of its canvases, all texts together."""
    turn: int
    """Positions that a turn of its own costs; 0: its passes are run with those of others."""
    due: float
    """When the engine's clock should have finished it; the lowest is served first."""
    deadline: float
    watch: Watch | None = None
    judge: str | None = None
    future: Future[Done] = field(default_factory=Future)
    submitted: float = field(default_factory=time.monotonic)
    begun: float = 0.0
    work: greenlet.greenlet | None = None
    """The sampler; None before its first turn."""
    wanted: Pass | None = None
    """The pass it waits for."""
    passes: float = 0.0
    """So far, per text."""
    told: bool = False
    """True once the observer knows that it has begun."""

    @property
    def over(self) -> bool:
        """True when its sampler has returned."""
        return self.work is not None and self.work.dead

    @property
    def takes_turns(self) -> bool:
        """True while it goes on without a pass that others could join."""
        return self.turn > 0 and self.wanted is None

    def fail(self, error: BaseException) -> None:
        """Tell whoever waits."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


@dataclass(frozen=True, slots=True)
class Size:
    """How much work a request is, about."""

    texts: int
    positions: int
    """Of all texts."""
    turn: int
    """Positions that a turn of its own costs; 0: it joins others."""
    steps: int

    @classmethod
    def of(cls, request: Request, model: Model) -> "Size":
        """Return the size of a request for a model."""
        config, sampler = model.config, find_sampler(request.sampler, model.config.kind)
        texts, length = request.total, config.length
        if request.tokens is not None and request.tokens.ndim == 2:
            texts = request.num * len(request.tokens)
        if request.length is not None and config.end_id is None:
            length = min(request.length, length)
        steps = length if sampler.counts_tokens else request.steps or USUAL_STEPS
        if sampler.name == "blocks":
            block = request.options.get("block_length", 32)
            steps *= math.ceil(length / block) if type(block) is int and block > 0 else 1
        own = texts * (TOKEN_WORK if config.kind == "ar" else length)
        joins = config.kind != "ar" and sampler.name != "dimo"
        return cls(texts, texts * length, 0 if joins else own, steps)


def canvases(
    snapshot: Snapshot, mask_id: int, end_id: int | None, passes: float, seconds: float
) -> Iterator[Canvas]:
    """Yield the texts after a step; before those of the first, what a request starts from.

    The ends that fill a window behind a text are left out.
    """
    end_id = PAD if end_id is None else end_id
    own = snapshot.open | ((snapshot.tokens != PAD) & (snapshot.tokens != end_id))
    own = own.flip(1).cumsum(1).flip(1) > 0
    rows, open_ = snapshot.tokens.masked_fill(~own, PAD).tolist(), snapshot.open.tolist()
    if snapshot.index == 0:
        start = [
            [None if free else token for token, free in zip(row, opens, strict=True)]
            for row, opens in zip(rows, open_, strict=True)
        ]
        yield Canvas(0, snapshot.steps, 0.0, 0.0, [_shown(row, mask_id) for row in start])
    tokens = [_shown(row, mask_id) for row in rows]
    yield Canvas(snapshot.index + 1, snapshot.steps, passes, seconds, tokens)


def _shown(row: list[int | None], mask_id: int) -> list[int | None]:
    return [None if token == mask_id else token for token in row if token != PAD]
