"""Progress of anything counted: a bar on a terminal, elsewhere a line now and then."""

import sys
import time
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.console import Console

    from didi_instruct.data.prepare import PrepareProgress
    from didi_instruct.sampling.state import Snapshot

SECONDS_BETWEEN_LINES = 10.0

_STAGES = {
    "learn tokenizer": "Learning the tokenizer",
    "tokenise": "Tokenising",
}
_UNITS = {"bytes": (1e6, "MB/s"), "characters": (1e6, "M characters/s")}


class ProgressBar:
    """Shows stages one after the other. Nothing appears before the first `update`."""

    def __init__(self) -> None:
        self._display: _Bars | _Lines | None = None
        self._stage: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._display is not None:
            self._display.stop(finished=kind is None)

    def update(self, stage: str, done: int, total: int | None, unit: str) -> None:
        """Show that `done` of `total` units of a stage are done."""
        if self._display is None:
            from rich.console import Console

            console = Console(stderr=True)
            self._display = _Bars(console) if console.is_terminal else _Lines()
        begins = stage != self._stage
        if begins:
            # A resumed stage does not begin at 0, so its start is kept for the rate.
            self._stage, self._since, self._first = stage, time.monotonic(), done
        elapsed = time.monotonic() - self._since
        speed = (done - self._first) / elapsed if elapsed > 0 else 0.0
        scale, name = _UNITS.get(unit, (1.0, f"{unit}/s"))
        self._display.show(stage, begins, done, total, speed, f"{speed / scale:,.1f} {name}")


class StepsBar(ProgressBar):
    """The progress of drawing samples, batch by batch; an open bar is a callback of samplers."""

    def __init__(self, batches: int, *, enabled: bool = True) -> None:
        super().__init__()
        self._batches, self._enabled, self._begun = batches, enabled, 0

    def __call__(self, step: "Snapshot") -> None:
        """Show that a step is done."""
        self._begun += step.index == 0
        if self._enabled:
            done = (self._begun - 1) * step.steps + step.index + 1
            total = max(done, self._batches * step.steps)
            self.update("Drawing", done, total, "steps")


class PrepareBar(ProgressBar):
    """The progress of preparing data; an open bar is the report that `prepare` takes."""

    def __call__(self, progress: "PrepareProgress") -> None:
        """Show the progress."""
        stage = _STAGES[progress.stage]
        self.update(stage, progress.done, progress.total or None, "bytes")


class BankBar(ProgressBar):
    """The progress of drawing a teacher's bank; an open bar is the report that it takes."""

    def __call__(self, done: int, total: int) -> None:
        """Show the progress."""
        self.update("Drawing the teacher's bank", done, total, "texts")


class _Bars:
    """Progress as a bar per stage."""

    def __init__(self, console: "Console") -> None:
        from rich import progress as rich

        columns = (
            rich.TextColumn("{task.description}"),
            rich.BarColumn(),
            rich.TaskProgressColumn(),
            rich.TextColumn("{task.fields[rate]}"),
            rich.TimeRemainingColumn(),
        )
        self._bars = rich.Progress(*columns, console=console)
        self._bars.start()

    def show(
        self, stage: str, begins: bool, done: int, total: int | None, speed: float, rate: str
    ) -> None:
        if begins:
            self._task = self._bars.add_task(stage, rate="")
        self._bars.update(self._task, completed=done, total=total, rate=rate)

    def stop(self, finished: bool) -> None:
        for task in self._bars.tasks if finished else ():
            self._bars.update(task.id, completed=task.total)
        self._bars.stop()


class _Lines:
    """Progress as plain lines: where each stage begins, then every few seconds."""

    def __init__(self) -> None:
        self._next = 0.0

    def show(
        self, stage: str, begins: bool, done: int, total: int | None, speed: float, rate: str
    ) -> None:
        now = time.monotonic()
        if not begins and now < self._next:
            return
        self._next = now + SECONDS_BETWEEN_LINES
        line = f"{stage}: {100 * done / total:.0f}%" if total else stage
        if not begins and speed > 0:
            line += f", {rate}"
            line += f", {clock((total - done) / speed)} left" if total else ""
        print(line, file=sys.stderr)

    def stop(self, finished: bool) -> None:
        pass


def clock(seconds: float) -> str:
    """Seconds as people read them."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
