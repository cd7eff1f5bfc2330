"""What a run tells: a live progress bar, plain lines, `log.jsonl`, TensorBoard."""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from didi_instruct.data.files import write_atomic


class Reporter(Protocol):
    """Sees a run from outside."""

    def start(self, step: int, steps: int) -> None:
        """Training begins at `step`."""

    def tick(self, step: int) -> None:
        """One more step is done."""

    def advance(self, step: int, values: Mapping[str, Any]) -> None:
        """Numbers of the latest logged step."""

    def measuring(self, step: int) -> None:
        """An evaluation begins."""

    def measured(self, step: int, values: Mapping[str, Any]) -> None:
        """Numbers of an evaluation."""

    def say(self, text: str) -> None:
        """Print one line."""

    def stop(self) -> None:
        """Training ends, however it ends."""


def readable(values: Mapping[str, Any], room: int | None = None) -> str:
    """Numbers as people read them, in the order given; the first of them that fit into `room`."""
    parts: list[str] = []
    for name, value in values.items():
        if name == "tokens_per_second":
            parts.append(f"{value:,.0f} tokens/s")
        elif name == "iterations_per_second":
            parts.append(f"{value:.3g} iterations/s")
        elif name == "mfu":
            parts.append(f"MFU {value:.0%}")
        elif isinstance(value, float):
            parts.append(f"{name} {value:.4g}")
        if room is not None and len("  ".join(parts)) > room:
            parts.pop()
            break
    return "  ".join(parts)


def with_errors(values: Mapping[str, Any]) -> str:
    """Numbers of an evaluation, errors (`NAME_se`) beside what they belong to."""
    parts = []
    for name, value in values.items():
        if name.endswith("_se"):
            continue
        error = values.get(f"{name}_se")
        parts.append(f"{name} {value:.4f}" + (f" ± {error:.4f}" if error else ""))
    return "  ".join(parts)


BAR, COUNTERS, EVALUATING = 20, 14, " (evaluating)"
"""Columns of the bar, and of the counter and the time left with their spaces; and a remark."""


class TerminalReporter:
    """A progress bar on a terminal; a plain line now and then elsewhere."""

    def __init__(
        self,
        title: str,
        *,
        seconds_between_lines: float = 10.0,
        shown: Sequence[str] | None = None,
        summary: Callable[[Mapping[str, Any]], str] = with_errors,
    ) -> None:
        """Title of the bar; `shown` names the numbers to show, by default all.

        `summary` makes the line of an evaluation.
        """
        self.shown, self.summary = shown, summary
        self.console = Console(file=sys.stderr, soft_wrap=True, highlight=False)
        self.title, self.pause = title, seconds_between_lines
        self._progress: Progress | None = None
        self._last_line, self._started, self._first, self._steps = -float("inf"), 0.0, 0, 0

    def start(self, step: int, steps: int) -> None:
        """Show the bar, or remember the time for the lines."""
        self._started, self._first, self._steps = time.monotonic(), step, steps
        if self.console.is_terminal:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=BAR),
                MofNCompleteColumn(),
                TimeRemainingColumn(elapsed_when_finished=True),
                TextColumn("{task.fields[numbers]}"),
                console=self.console,
            )
            self._task = self._progress.add_task(
                self.title, total=steps, completed=step, numbers=""
            )
            self._progress.start()

    def tick(self, step: int) -> None:
        """Move the bar."""
        if self._progress is not None:
            self._progress.update(self._task, completed=step, description=self.title)

    def advance(self, step: int, values: Mapping[str, Any]) -> None:
        """Move the bar, or print a line when the last one is old."""
        names = values if self.shown is None else [n for n in self.shown if n in values]
        numbers = {name: values[name] for name in names}
        if self._progress is not None:
            # Counter and time left matter most: numbers take the room that is left.
            used = len(self.title + EVALUATING) + BAR + 2 * len(str(self._steps)) + COUNTERS
            text = readable(numbers, max(0, self.console.width - used))
            self._progress.update(self._task, completed=step, numbers=text)
            return
        now = time.monotonic()
        if now - self._last_line >= self.pause or step == self._steps:
            self._last_line = now
            rate = (step - self._first) / max(1e-9, now - self._started)
            left = (self._steps - step) / rate if rate else float("inf")
            self.console.print(
                f"{self.title}: step {step}/{self._steps}  {readable(numbers)}  {left:.0f} s left"
            )

    def measuring(self, step: int) -> None:
        """Say beside the bar why it stands still."""
        if self._progress is not None:
            self._progress.update(self._task, description=self.title + EVALUATING)

    def measured(self, step: int, values: Mapping[str, Any]) -> None:
        """Print them above the bar."""
        self.say(f"step {step}: {self.summary(values)}")

    def say(self, text: str) -> None:
        """Print above the bar."""
        self.console.print(text, markup=False)

    def stop(self) -> None:
        """Take the bar off the screen's hands."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


class SilentReporter:
    """Says nothing: other ranks, tests."""

    def start(self, step: int, steps: int) -> None:
        """Nothing."""

    def tick(self, step: int) -> None:
        """Nothing."""

    def advance(self, step: int, values: Mapping[str, Any]) -> None:
        """Nothing."""

    def measuring(self, step: int) -> None:
        """Nothing."""

    def measured(self, step: int, values: Mapping[str, Any]) -> None:
        """Nothing."""

    def say(self, text: str) -> None:
        """Nothing."""

    def stop(self) -> None:
        """Nothing."""


class RunLog:
    """`log.jsonl`, one line per logged step, and TensorBoard beside it where it is installed."""

    def __init__(self, folder: Path, resume_from: int = 0, *, again: bool = False) -> None:
        """Go on after step `resume_from`; `again`: its evaluation will be made again."""
        self.path = folder / "log.jsonl"
        if self.path.exists():
            # Steps after the checkpoint will be run again: their lines must not appear twice.
            write_atomic(self.path, _lines_until(self.path, resume_from, again).encode())
        self._file = self.path.open("a", encoding="utf-8")
        self._board = _tensorboard(folder, resume_from)

    def write(self, values: Mapping[str, Any]) -> None:
        """Append one record with its `step`."""
        self._file.write(json.dumps(dict(values)) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in values.items():
                if name != "step" and isinstance(value, (int, float)):
                    self._board.add_scalar(name, value, values["step"])

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        if self._board is not None:
            self._board.close()


def _lines_until(path: Path, step: int, again: bool) -> str:
    if step == 0:
        return ""
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            entry = json.loads(line)
            if entry["step"] < step or (entry["step"] == step and ("lr" in entry or not again)):
                kept.append(line + "\n")
        except (ValueError, KeyError, TypeError):
            continue  # a line cut by a kill
    return "".join(kept)


def _tensorboard(folder: Path, purge_step: int) -> Any | None:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder / "tensorboard"), purge_step=purge_step + 1)
