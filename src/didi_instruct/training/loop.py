"""The training loop: steps, logs, evaluations, checkpoints, and a clean stop on Ctrl-C."""

import math
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Protocol, Self

import torch
from torch.distributed.tensor import DTensor

from didi_instruct.config.pretrain import TrainConfig
from didi_instruct.data.files import require_space
from didi_instruct.errors import TrainingError, UserError
from didi_instruct.training.checkpoints import Checkpoint, Checkpoints
from didi_instruct.training.distributed import World
from didi_instruct.training.reporting import Reporter, RunLog, SilentReporter

PATIENCE = 2.0
"""Seconds after which another Ctrl-C is no longer part of the first."""


class Interrupt:
    """While active, a signal only sets `signal`, so that the step ends and the work is saved.

    Schedulers send SIGTERM more than once: the repetitions change nothing. A person who presses
    Ctrl-C again, some seconds later, wants out at once.
    """

    def __init__(self, say: Callable[[str], None] | None = None) -> None:
        self._say = say
        self.signal: int | None = None
        self._since = 0.0
        self._previous: dict[int, object] = {}

    def _remember(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signal is None:
            self.signal, self._since = number, now
            if self._say is not None:
                self._say("Stopping soon, to save first (Ctrl-C again: quit without).")
        elif number == signal.SIGINT and now - self._since > PATIENCE:
            raise KeyboardInterrupt

    def __enter__(self) -> Self:
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._remember)
        except ValueError:
            pass  # not the main thread: signals are someone else's
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]


Numbers = dict[str, torch.Tensor]


class Task(Protocol):
    """What is trained: one step at a time, all randomness a function of (seed, step)."""

    sharded: bool
    """Whether each process writes its own part of a checkpoint."""

    def step(self, step: int) -> Numbers:
        """Update the networks once; return 0-d tensors, those that mean something this time."""

    def describe(self, step: int, seconds: float, steps: int) -> dict[str, float]:
        """Extra numbers for the log: the learning rate `lr`, and rates."""

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Everything that changes, by name."""

    def prepare_to_load(self) -> None:
        """Make `tensors` list all that a checkpoint holds."""

    def write_model(self, folder: Path) -> None:
        """Write the product into a folder; all processes call."""

    def checkpoint_bytes(self) -> int:
        """Room that one checkpoint takes, about."""

    def identity(self) -> Mapping[str, Any]:
        """What a checkpoint belongs to, as plain values: the data, say."""


Tick = Callable[[], None]
"""Called now and then by what may take long, where it may be cut off: it raises to do so."""
Evaluate = Callable[[int, Tick], Mapping[str, float]]
"""Numbers of the networks as they are after some steps."""
Watch = Callable[[int, Mapping[str, float]], str | None]
"""Sees the numbers of every log entry; what it returns is why training must stop."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended."""

    step: int
    signal: int | None
    """The signal that interrupted it, or None if it is finished."""
    checkpoint: Path | None


class _CutOffError(Exception):
    """A signal came while something ran that can be made again."""


class Loop:
    """Runs a task in a folder."""

    def __init__(
        self,
        task: Task,
        config: TrainConfig,
        folder: Path,
        world: World,
        *,
        reporter: Reporter | None = None,
        evaluate: Evaluate | None = None,
        watch: Watch | None = None,
        remedy: str = "optim.lr",
        first_save: int = 0,
    ) -> None:
        """Put the parts together.

        `remedy` names the settings to lower when numbers overflow; `first_save` is a step to save
        at beside the usual ones, so that something is kept if a run goes wrong early.
        """
        self.task, self.config, self.folder, self.world = task, config, folder, world
        self.reporter: Reporter = reporter or SilentReporter()
        self.evaluate, self.watch, self.remedy = evaluate, watch, remedy
        self.first_save = first_save
        self.checkpoints = Checkpoints(folder / "checkpoints", config.keep, world)
        self._pending: list[Numbers] = []
        self._logged_at = 0.0
        self._last_saved: Path | None = None

    def resume(self) -> int:
        """Load the newest whole checkpoint; return the step to go on from."""
        found = self.checkpoints.latest(warn=self.reporter.say)
        if found is None:
            return 0
        self._load(found)
        self.reporter.say(f"Resuming from {found.folder}")
        return int(found.info["step"])

    def _load(self, checkpoint: Checkpoint) -> None:
        for name, now in self.task.identity().items():
            if checkpoint.info.get(name) != now:
                raise UserError(
                    f"{checkpoint.folder} was trained with {name} {checkpoint.info.get(name)}, "
                    f"now it is {now}: resume with what it began with, or choose another --out."
                )
        self.task.prepare_to_load()
        checkpoint.fill(self.task.tensors())
        self._last_saved = checkpoint.folder

    def run(self, start: int = 0, before: Mapping[str, float] | None = None) -> Outcome:
        """Train from step `start` to the end, or until a signal asks to stop.

        `before`: numbers of an evaluation before the first step, for the log.
        """
        if self.world.is_main:
            require_space(self.folder, self.task.checkpoint_bytes())
        # An evaluation follows the checkpoint of its step, if it was not cut off: make it again.
        again = start > 0 and self._evaluates(start, start >= self.config.steps)
        log = RunLog(self.folder, start, again=again) if self.world.is_main else None
        if log is not None and before and start == 0:
            log.write({"step": 0, **before})
        self.reporter.start(start, self.config.steps)
        self._logged_at = time.monotonic()
        try:
            with Interrupt(self.reporter.say) as interrupt:
                if again and not self._log_evaluation(start, log, interrupt):
                    return Outcome(start, interrupt.signal, self._last_saved)
                return self._run(start, interrupt, log)
        finally:
            self.reporter.stop()
            if log is not None:
                log.close()

    def _run(self, start: int, interrupt: Interrupt, log: RunLog | None) -> Outcome:
        for step in range(start, self.config.steps):
            self._pending.append(self.task.step(step))
            done = step + 1
            self.reporter.tick(done)
            last = done == self.config.steps
            stop = self.world.largest(interrupt.signal or 0)
            usual = done % self.config.save_every == 0 or done == self.first_save
            saves = last or stop or usual
            if saves or done % self.config.log_every == 0:
                self._log(done, log)
            if saves:
                self._save(done)
            if stop and not last:
                return Outcome(done, stop, self._last_saved)
            if self._evaluates(done, last) and not self._log_evaluation(done, log, interrupt):
                if not saves:
                    if self._pending:
                        self._log(done, log)
                    self._save(done)
                return Outcome(done, interrupt.signal, self._last_saved)
        return Outcome(max(start, self.config.steps), None, self._last_saved)

    def _evaluates(self, done: int, last: bool) -> bool:
        every = self.config.eval_every
        return self.evaluate is not None and (last or (every > 0 and done % every == 0))

    def _log(self, done: int, log: RunLog | None) -> None:
        """Fetch the numbers since the last call, refuse NaN, report their mean."""
        count, self._pending, pending = len(self._pending), [], self._pending
        # A number may be missing where it means nothing: a gradient norm while a network waits.
        names = [(row, name) for row, numbers in enumerate(pending) for name in numbers]
        fetched = torch.stack([pending[row][name].float() for row, name in names]).tolist()
        found: dict[str, list[float]] = {}
        for (row, name), value in zip(names, fetched, strict=True):
            if not math.isfinite(value):
                self._stop_at_nan(done - count + row + 1)
            found.setdefault(name, []).append(value)
        now = time.monotonic()
        values = {name: math.fsum(each) / len(each) for name, each in found.items()}
        values |= self.task.describe(done - 1, now - self._logged_at, count)
        self._logged_at = now
        if log is not None:
            log.write({"step": done, **values})
        self.reporter.advance(done, values)
        trouble = self.watch(done, values) if self.watch is not None else None
        if trouble is not None:
            raise TrainingError(f"Stopped at step {done}: {trouble} {self._last_good}")

    @property
    def _last_good(self) -> str:
        return f"Last good checkpoint: {self._last_saved or 'none yet'}."

    def _stop_at_nan(self, step: int) -> None:
        raise TrainingError(
            f"The loss, its gradient or a weight is not a number at step {step}; nothing was saved "
            f"since. {self._last_good} "
            f"Try --resume with a lower {self.remedy}, a lower optim.clip or train.precision=fp32."
        )

    def _log_evaluation(self, done: int, log: RunLog | None, interrupt: Interrupt) -> bool:
        """Evaluate; False where a signal cut it off. Several processes must end it together."""
        assert self.evaluate is not None
        started = time.monotonic()
        self.reporter.measuring(done)

        def tick() -> None:
            if interrupt.signal is not None and self.world.size == 1:
                raise _CutOffError

        try:
            result = dict(self.evaluate(done, tick))
        except _CutOffError:
            return False
        if not all(math.isfinite(value) for value in result.values()):
            self._stop_at_nan(done)
        self._logged_at += time.monotonic() - started
        if log is not None:
            log.write({"step": done, **result})
        self.reporter.measured(done, result)
        return True

    def _save(self, done: int) -> None:
        started = time.monotonic()
        tensors = self.task.tensors()
        # A last update may have overflowed although its loss and gradient were finite.
        if self.world.any(not all(_is_finite(t) for t in tensors.values())):
            self._stop_at_nan(done)
        self._last_saved = self.checkpoints.save(
            {"step": done, **self.task.identity()},
            tensors,
            sharded=self.task.sharded,
            write_model=None if self.task.sharded else self.task.write_model,
        )
        self._logged_at += time.monotonic() - started


def _is_finite(tensor: torch.Tensor) -> bool:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return bool(torch.isfinite(local).all())
