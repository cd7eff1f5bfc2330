"""The training loop: steps, logs, evaluations, checkpoints, and a clean stop on Ctrl-C."""

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Protocol

import torch

from didi_instruct.config.train import TrainConfig
from didi_instruct.data.files import require_space
from didi_instruct.errors import TrainingError, UserError
from didi_instruct.training.checkpoints import Checkpoints
from didi_instruct.training.distributed import World, local
from didi_instruct.training.reporting import Reporter, RunLog

PATIENCE = 2.0  # seconds after which another Ctrl-C is no longer part of the first

Metrics = dict[str, torch.Tensor]


class Task(Protocol):
    """Training one step at a time, with all randomness a function of (seed, step)."""

    sharded: bool  # each process writes its own part of a checkpoint

    def step(self, step: int) -> Metrics:
        """Update the networks once; return 0-d tensors, those that mean something this time."""

    def describe(self, step: int, seconds: float, steps: int) -> dict[str, float]:
        """Extra numbers for the log: the learning rate `lr`, and rates."""

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Everything that changes, by name."""

    def write_model(self, folder: Path) -> None:
        """Write the product into a folder; all processes call."""

    def checkpoint_bytes(self) -> int:
        """Size of a checkpoint, about."""

    def identity(self) -> Mapping[str, Any]:
        """Plain values that a resumed run must share with its checkpoint: the data, say."""


Stop = Callable[[], int | None]
"""Returns the signal that asked the run to stop, if one has."""
Tick = Callable[[], None]
"""An evaluation calls it where it may be cut off, which it then is by an exception."""
Evaluate = Callable[[int, Tick], Mapping[str, float]]
"""Returns numbers of the networks after a number of steps."""
Watch = Callable[[int, Mapping[str, float]], str | None]
"""Sees the numbers of every log entry; returns why training must stop, or None."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended."""

    step: int
    signal: int | None  # that interrupted it; None if it is finished
    checkpoint: Path | None


@contextmanager
def interruptible(say: Callable[[str], None]) -> Iterator[Stop]:
    """Finish the current step and checkpoint on SIGINT or SIGTERM.

    Schedulers send SIGTERM more than once: the repetitions change nothing. Ctrl-C pressed again
    more than `PATIENCE` seconds later raises KeyboardInterrupt.
    """
    caught: int | None = None
    since = 0.0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal caught, since
        now = time.monotonic()
        if caught is None:
            caught, since = number, now
            say("Stopping soon, to save first (Ctrl-C again: quit without).")
        elif number == signal.SIGINT and now - since > PATIENCE:
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield lambda: None  # only the main thread may handle signals
        return
    previous = {n: signal.signal(n, handle) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: caught
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class _CutOffError(Exception):
    """A signal came during an evaluation."""


@dataclass
class Loop:
    """Runs a task in a folder."""

    task: Task
    config: TrainConfig
    folder: Path
    world: World
    _: KW_ONLY
    reporter: Reporter = field(default_factory=Reporter)
    evaluate: Evaluate | None = None
    watch: Watch | None = None
    remedy: str = "optim.lr"  # settings to lower when numbers overflow
    first_save: int = 0  # a step to save at beside the usual ones, if a run goes wrong early

    def __post_init__(self) -> None:
        self.checkpoints = Checkpoints(self.folder / "checkpoints", self.config.keep, self.world)
        self._pending: list[Metrics] = []
        self._logged_at = 0.0
        self._last_saved: Path | None = None
        self._log: RunLog | None = None

    def resume(self) -> int:
        """Load the newest whole checkpoint; return the step to go on from."""
        found = self.checkpoints.latest(warn=self.reporter.say)
        if found is None:
            return 0
        for name, now in self.task.identity().items():
            if found.info.get(name) != now:
                raise UserError(
                    f"{found.folder} was trained with {name} {found.info.get(name)}, "
                    f"now it is {now}: resume with what it began with, or choose another --out."
                )
        found.fill(self.task.tensors())
        self._last_saved = found.folder
        self.reporter.say(f"Resuming from {found.folder}")
        return int(found.info["step"])

    def run(self, start: int = 0, before: Mapping[str, float] | None = None) -> Outcome:
        """Train from step `start` to the end, or until a signal asks to stop.

        `before`: numbers of an evaluation before the first step, for the log.
        """
        # An evaluation follows the checkpoint of its step, if it was not cut off: make it again.
        again = start > 0 and self._is_evaluated(start)
        if self.world.is_main:
            require_space(self.folder, self.task.checkpoint_bytes())
            self._log = RunLog(self.folder, start, again=again)
        if before and start == 0:
            self._write(0, before)
        self.reporter.start(start, self.config.steps)
        self._logged_at = time.monotonic()
        try:
            with interruptible(self.reporter.say) as stop:
                if again and not self._evaluate(start, stop):
                    return Outcome(start, stop(), self._last_saved)
                return self._train(start, stop)
        finally:
            self.reporter.stop()
            if self._log is not None:
                self._log.close()

    def _train(self, start: int, stop: Stop) -> Outcome:
        for step in range(start, self.config.steps):
            self._pending.append(self.task.step(step))
            done = step + 1
            self.reporter.tick(done)
            last = done == self.config.steps
            signalled = self.world.largest(stop() or 0)
            usual = done % self.config.save_every == 0 or done == self.first_save
            saves = last or signalled or usual
            if saves or done % self.config.log_every == 0:
                self._report(done)
            if saves:
                self._save(done)
            if signalled and not last:
                return Outcome(done, signalled, self._last_saved)
            if self._is_evaluated(done) and not self._evaluate(done, stop):
                if not saves:
                    self._report(done)
                    self._save(done)
                return Outcome(done, stop(), self._last_saved)
        return Outcome(max(start, self.config.steps), None, self._last_saved)

    def _report(self, done: int) -> None:
        """Report the mean of the numbers since the last report; refuse NaN."""
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        # A number may be missing where it means nothing: a gradient norm while a network waits.
        names = [(row, name) for row, metrics in enumerate(pending) for name in metrics]
        fetched = torch.stack([pending[row][name].float() for row, name in names]).tolist()
        found: dict[str, list[float]] = {}
        for (row, name), value in zip(names, fetched, strict=True):
            if not math.isfinite(value):
                self._stop_at_nan(done - len(pending) + row + 1)
            found.setdefault(name, []).append(value)
        now = time.monotonic()
        values = {name: math.fsum(each) / len(each) for name, each in found.items()}
        values |= self.task.describe(done - 1, now - self._logged_at, len(pending))
        self._logged_at = now
        self._write(done, values)
        self.reporter.advance(done, values)
        if self.watch is not None and (trouble := self.watch(done, values)) is not None:
            raise TrainingError(f"Stopped at step {done}: {trouble} {self._last_good}")

    def _is_evaluated(self, done: int) -> bool:
        every = self.config.eval_every
        usual = done >= self.config.steps or (every > 0 and done % every == 0)
        return self.evaluate is not None and usual

    def _evaluate(self, done: int, stop: Stop) -> bool:
        """Evaluate; False where a signal cut it off. Several processes must end it together."""
        assert self.evaluate is not None
        started = time.monotonic()
        self.reporter.measuring(done)

        def tick() -> None:
            if stop() is not None and self.world.size == 1:
                raise _CutOffError

        try:
            result = self.evaluate(done, tick)
        except _CutOffError:
            return False
        if not all(math.isfinite(value) for value in result.values()):
            self._stop_at_nan(done)
        self._logged_at += time.monotonic() - started
        self._write(done, result)
        self.reporter.measured(done, result)
        return True

    def _save(self, done: int) -> None:
        started = time.monotonic()
        tensors = self.task.tensors()
        # A last update may have overflowed although its loss and gradient were finite.
        if self.world.any(not all(bool(local(t).isfinite().all()) for t in tensors.values())):
            self._stop_at_nan(done)
        self._last_saved = self.checkpoints.save(
            {"step": done, **self.task.identity()},
            tensors,
            sharded=self.task.sharded,
            write_model=None if self.task.sharded else self.task.write_model,
        )
        self._logged_at += time.monotonic() - started

    def _write(self, step: int, values: Mapping[str, float]) -> None:
        if self._log is not None:
            self._log.write({"step": step, **values})

    @property
    def _last_good(self) -> str:
        return f"Last good checkpoint: {self._last_saved or 'none yet'}."

    def _stop_at_nan(self, step: int) -> NoReturn:
        raise TrainingError(
            f"The loss, its gradient or a weight is not a number at step {step}; nothing was saved "
            f"since. {self._last_good} "
            f"Try --resume with a lower {self.remedy}, a lower optim.clip or train.precision=fp32."
        )
