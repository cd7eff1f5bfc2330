"""The engine of `didi serve`: one thread owns the models and runs the steps of all requests.

Requests wait in a bounded queue. In a round each model runs one pass, made of the next passes of as
many requests as its budget of canvas positions allows, of any step counts and samplers; requests
come and go between passes. Samplers that evaluate no denoiser (left to right, DiMO) take turns of
about the same work.

Fairness: the clock counts work in full passes. A request is due when a lane of its own would have
finished it, which is known when it comes, since a sampler's steps are; whoever is due first is
served first. So short requests overtake long ones, equal ones are finished in the order in which
they came, and once a long one is due, nobody who comes later overtakes it.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import greenlet
import torch
from torch import Tensor

from didi_instruct.errors import UserError
from didi_instruct.model import Model
from didi_instruct.sampling.generate import Request, generate
from didi_instruct.sampling.state import PAD, Callback, Snapshot
from didi_instruct.serving.jobs import (
    Done,
    ExpiredError,
    FullError,
    Job,
    RefusedError,
    Size,
    Watch,
    canvases,
)
from didi_instruct.serving.passes import (
    LOGITS_AT_ONCE,
    Drawn,
    Pass,
    SharedDenoiser,
    is_out_of_memory,
    pause,
    run_together,
)

JUDGE_DRAWS = 8
"""Noise levels by which a diffusion model judges a text."""

log = logging.getLogger("didi_instruct.serving")


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """How much the engine takes on."""

    positions: int = 2048
    """Canvas positions of one pass; a request alone may have more."""
    queue: int = 256
    """Requests that wait or run."""
    seconds: float = 300.0
    """That a request may take, waiting included."""

    def __post_init__(self) -> None:
        """Refuse limits under which nothing can be served."""
        for name in ("positions", "queue", "seconds"):
            if not getattr(self, name) > 0:
                raise UserError(f"{name} is {getattr(self, name)}: use more than 0.")


class Observer(Protocol):
    """Receives events from the engine's thread; names are those of models."""

    def passed(self, name: str, requests: int, texts: int, tokens: int, seconds: float) -> None:
        """A pass of so many requests was run that read texts and drew tokens."""

    def began(self, name: str, seconds: float) -> None:
        """A request has taken its first step, so long after it came."""

    def ended(self, name: str, outcome: str, seconds: float, done: Done | None) -> None:
        """A request is over: `done`, `refused`, `failed`, `cancelled` or `expired`."""


class BatchEngine:
    """Runs requests for some models in a thread of its own, their denoising steps together.

    A request's texts are those of `Model.generate`, whatever else is running.
    """

    def __init__(
        self,
        models: Mapping[str, Model],
        limits: Limits | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.models, self.limits, self.observer = dict(models), limits or Limits(), observer
        self._brings = {name: model.sampled() for name, model in self.models.items()}
        self._changed = threading.Condition()
        self._arrived: deque[Job] = deque()
        self._live: list[Job] = []
        self._count = 0
        self._clock = 0.0
        self._closing = self._abandons = False
        self._thread = threading.Thread(target=self._serve, name="didi-engine", daemon=True)
        self._thread.start()

    # For other threads

    @property
    def ready(self) -> bool:
        """True while requests are taken."""
        return self._thread.is_alive() and not self._closing

    @property
    def waiting(self) -> int:
        """Requests that wait or run."""
        return self._count

    def submit(
        self,
        name: str,
        request: Request,
        *,
        watch: Watch | None = None,
        judge: str | None = None,
        seconds: float | None = None,
    ) -> Job:
        """Queue a request for a model; `watch` sees each step, in the engine's thread.

        `judge` names a model of the engine that measures the texts.
        """
        size = Size.of(request, self.models[name])
        per_pass = self.limits.positions
        allowed = min(self.limits.seconds, seconds or self.limits.seconds)
        with self._changed:
            if not self.ready:
                raise RefusedError("the server is stopping")
            if self._count >= self.limits.queue:
                raise FullError(f"{self._count} requests wait already")
            job = Job(
                name=name,
                request=request,
                texts=size.texts,
                positions=size.positions,
                turn=size.turn,
                due=self._clock + size.steps * (size.turn or size.positions) / per_pass,
                deadline=time.monotonic() + allowed,
                watch=watch,
                judge=judge,
            )
            self._count += 1
            self._arrived.append(job)
            self._changed.notify()
        return job

    def close(self, seconds: float = 30.0) -> None:
        """Take no more requests, finish those that are here, and after so many seconds end them."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(seconds)
        self._abandons = True
        self._thread.join(5.0)

    # The engine's thread

    def _serve(self) -> None:
        # Gradients are off for the whole thread: what greenlets set would be seen by the others.
        with torch.no_grad():
            while True:
                with self._changed:
                    while not (self._arrived or self._live or self._closing):
                        self._changed.wait()
                    self._live.extend(self._arrived)
                    self._arrived.clear()
                if self._closing and (self._abandons or not self._live):
                    break
                try:
                    self._round()
                except Exception:
                    log.exception("A round of the engine failed; its requests are given up.")
                    self._give_up(RuntimeError("the engine failed"))
        self._give_up(RefusedError("the server has stopped"))

    def _round(self) -> None:
        """Run one pass of each model, and turns of requests that do not join, of as much work."""
        self._drop()
        self._live.sort(key=lambda job: job.due)
        work = 0
        joining = [job for job in self._live if not job.takes_turns]
        for name in dict.fromkeys(job.name for job in joining):
            work = max(work, self._pass(name, [job for job in joining if job.name == name]))
        alone, spent = deque(job for job in self._live if job.takes_turns and not job.over), 0
        while alone and spent < max(work, 1):
            job = alone.popleft()
            self._resume(job, None)
            self._tell_begun(job)
            spent += job.turn
            if job.takes_turns and not job.over:
                alone.append(job)
        self._clock += (work + spent) / self.limits.positions
        self._live = [job for job in self._live if not job.over]

    def _drop(self) -> None:
        """End what nobody waits for any more, and what has taken too long."""
        now, kept = time.monotonic(), []
        for job in self._live:
            if job.future.cancelled():
                self._end(job, None, "cancelled")
            elif now > job.deadline:
                self._end(job, ExpiredError("the request took too long"), "expired")
            else:
                kept.append(job)
        self._live = kept

    def _end(self, job: Job, error: Exception | None, outcome: str) -> None:
        if job.work is not None:
            job.work.throw(greenlet.GreenletExit)
        self._leave(job, outcome)
        if error is not None:
            job.fail(error)

    def _give_up(self, error: Exception) -> None:
        with self._changed:
            self._live.extend(self._arrived)
            self._arrived.clear()
        for job in self._live:
            if not job.over:
                self._end(job, error, "failed")
        self._live = []

    def _pass(self, name: str, jobs: Sequence[Job]) -> int:
        """Run the next passes of as many requests as fit; return the positions that were read."""
        limit, width = self.limits.positions, self.models[name].config.num_tokens
        chosen: dict[tuple[int, bool], list[tuple[Job, Pass]]] = {}
        size = entries = 0
        for job in jobs:
            expected = job.positions if job.wanted is None else job.wanted.positions
            if size and size + expected > limit:
                continue
            if job.work is None:
                self._resume(job, None)
            wanted = job.wanted
            if wanted is None or (entries and entries + len(wanted.at) * width > LOGITS_AT_ONCE):
                continue
            size, entries = size + wanted.positions, entries + len(wanted.at) * width
            chosen.setdefault(wanted.shape, []).append((job, wanted))
        denoiser = self._brings[name].denoiser
        for members in chosen.values():
            assert denoiser is not None
            begun, passes = time.monotonic(), [wanted for _, wanted in members]
            results = run_together(denoiser, passes)
            self._tell_pass(name, passes, time.monotonic() - begun)
            for job, wanted in members:
                self._tell_begun(job)
                job.passes += len(wanted.reads) / job.texts
                self._resume(job, results.pop(0))
        return size

    def _resume(self, job: Job, result: Drawn | Exception | None) -> None:
        """Let a request go on with what it waited for, until it waits again or is over."""
        if job.work is None:
            job.work, job.begun = greenlet.greenlet(self._run), time.monotonic()
            job.wanted = job.work.switch(job)
        elif isinstance(result, Exception):
            job.wanted = job.work.throw(result)
        else:
            job.wanted = job.work.switch(result)
        if job.over:
            job.wanted = None

    # Inside a request's greenlet

    def _run(self, job: Job) -> None:
        """Draw and measure a request's texts; whatever fails is told to it alone."""
        try:
            done = self._draw(job)
        except greenlet.GreenletExit:
            return
        except Exception as error:
            user = isinstance(error, UserError)
            if not user and not is_out_of_memory(error):
                log.error("A request for %s failed.", job.name, exc_info=error)
            self._leave(job, "refused" if user else "failed")
            job.fail(error)
            return
        taken = job.future.set_running_or_notify_cancel()
        self._leave(job, "done" if taken else "cancelled", done)
        if taken:
            job.future.set_result(done)

    def _draw(self, job: Job) -> Done:
        model, brings = self.models[job.name], self._brings[job.name]
        if brings.denoiser is not None:
            brings = replace(brings, denoiser=SharedDenoiser(brings.denoiser))
        config, tokenizer = model.config, model.tokenizer
        callback = _callback(job, model.mask_symbol, config.end_id)
        whole = generate(job.request, brings, callback)
        seconds = time.monotonic() - job.begun
        nats = None if job.judge is None else self._judge(job, whole.tokens)
        samples = whole.cut()
        tokens, written = samples.tokens.cpu(), samples.written
        assert written is not None
        return Done(
            texts=model.texts(tokens, written),
            tokens=tokens.tolist(),
            written=written.tolist(),
            eot_id=None if tokenizer is None else tokenizer.eot_id,
            log_prob=None if samples.log_prob is None else samples.log_prob.tolist(),
            nats=nats,
            nfe=samples.nfe,
            passes=samples.passes,
            queued=job.begun - job.submitted,
            seconds=seconds,
        )

    def _judge(self, job: Job, tokens: Tensor) -> list[float]:
        """Nats per token of each text (B, L) under the judge, in a turn of its own."""
        assert job.judge is not None
        judge, nats = self.models[job.judge], []
        job.turn = tokens.shape[1] * JUDGE_DRAWS
        for row in tokens:
            pause(None)
            nats.append(float(judge.nelbo(row[row != PAD][None], draws=JUDGE_DRAWS)))
        return nats

    # What others are told

    def _tell_pass(self, name: str, passes: Sequence[Pass], seconds: float) -> None:
        if self.observer is not None:
            texts = sum(len(wanted.reads) for wanted in passes)
            tokens = sum(len(wanted.step.u) for wanted in passes if wanted.step is not None)
            self.observer.passed(name, len(passes), texts, tokens, seconds)

    def _tell_begun(self, job: Job) -> None:
        if self.observer is not None and not job.told:
            self.observer.began(job.name, time.monotonic() - job.submitted)
        job.told = True

    def _leave(self, job: Job, outcome: str, done: Done | None = None) -> None:
        """Make room for another request, before anybody learns that this one is over."""
        with self._changed:
            self._count -= 1
        if self.observer is not None:
            self.observer.ended(job.name, outcome, time.monotonic() - job.submitted, done)


def _callback(job: Job, mask_id: int, end_id: int | None) -> Callback | None:
    """Callback of a request's steps: its watcher, and the engine where it takes turns."""
    if job.watch is None and not job.turn:
        return None

    def see(snapshot: Snapshot) -> None:
        if job.turn:
            job.passes += 1
        if job.watch is not None and not job.future.cancelled():
            seconds = time.monotonic() - job.begun
            for canvas in canvases(snapshot, mask_id, end_id, job.passes, seconds):
                job.watch(canvas)
        if job.turn:
            pause(None)

    return see
