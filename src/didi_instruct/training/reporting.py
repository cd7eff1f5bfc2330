"""Reports of a run: a live progress bar, plain lines, `log.jsonl`, TensorBoard."""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from didi_instruct.data.files import write_atomic


class Reporter:
    """Shows how a run goes on. This one shows nothing: processes but the main one have it."""

    def start(self, step: int, steps: int) -> None:
        """Training begins at `step` of `steps`."""

    def tick(self, step: int) -> None:
        """One more step is done."""

    def advance(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers of the latest logged step."""

    def measuring(self, step: int) -> None:
        """An evaluation begins."""

    def measured(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers of an evaluation."""

    def say(self, text: str) -> None:
        """Print one line."""

    def stop(self) -> None:
        """Training ends, however it ends."""


FORMATS = {
    "tokens_per_second": "{:,.0f} tokens/s",
    "iterations_per_second": "{:.3g} iterations/s",
    "mfu": "MFU {:.0%}",
}
"""Formats of numbers that are not shown as `name value`."""


def readable(values: Mapping[str, float], room: float = float("inf")) -> str:
    """Format the first numbers, as many as fit into `room` columns."""
    text = ""
    for name, value in values.items():
        more = FORMATS.get(name, name + " {:.4g}").format(value)
        longer = f"{text}  {more}" if text else more
        if len(longer) > room:
            break
        text = longer
    return text


def with_errors(values: Mapping[str, float]) -> str:
    """Format numbers of an evaluation, standard errors (`NAME_se`) beside what they belong to."""
    parts = []
    for name, value in values.items():
        if not name.endswith("_se"):
            error = values.get(f"{name}_se")
            parts.append(f"{name} {value:.4f}" + (f" ± {error:.4f}" if error else ""))
    return "  ".join(parts)


SECONDS_BETWEEN_LINES = 10.0
BAR_WIDTH = 20
COUNTERS_WIDTH = 14  # columns of the counter and the time left, but for the counter's digits
EVALUATING = " (evaluating)"


class TerminalReporter(Reporter):
    """A progress bar on a terminal; a plain line now and then elsewhere."""

    def __init__(
        self,
        title: str,
        *,
        shown: Sequence[str] | None = None,
        summary: Callable[[Mapping[str, float]], str] = with_errors,
    ) -> None:
        """Show the numbers named in `shown`, by default all; `summary` formats an evaluation."""
        self.title, self.shown, self.summary = title, shown, summary
        self.console = Console(file=sys.stderr, soft_wrap=True, highlight=False)
        self._bar: Progress | None = None
        self._started = self._last_line = -float("inf")
        self._first = self._steps = 0

    def start(self, step: int, steps: int) -> None:
        self._started, self._first, self._steps = time.monotonic(), step, steps
        if self.console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=BAR_WIDTH),
                MofNCompleteColumn(),
                TimeRemainingColumn(elapsed_when_finished=True),
                TextColumn("{task.fields[numbers]}"),
                console=self.console,
            )
            self._bar.add_task(self.title, total=steps, completed=step, numbers="")
            self._bar.start()

    def _update(self, **changes: Any) -> None:
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], **changes)

    def tick(self, step: int) -> None:
        self._update(completed=step, description=self.title)

    def advance(self, step: int, values: Mapping[str, float]) -> None:
        shown = values if self.shown is None else self.shown
        numbers = {name: values[name] for name in shown if name in values}
        now = time.monotonic()
        if self._bar is not None:
            # Counter and time left matter most: numbers take the room that is left.
            digits = 2 * len(str(self._steps))
            used = len(self.title + EVALUATING) + BAR_WIDTH + COUNTERS_WIDTH + digits
            self._update(completed=step, numbers=readable(numbers, self.console.width - used))
        elif now - self._last_line >= SECONDS_BETWEEN_LINES or step == self._steps:
            self._last_line = now
            rate = (step - self._first) / max(1e-9, now - self._started)
            left = (self._steps - step) / rate if rate else float("inf")
            self.console.print(
                f"{self.title}: step {step}/{self._steps}  {readable(numbers)}  {left:.0f} s left"
            )

    def measuring(self, step: int) -> None:
        self._update(description=self.title + EVALUATING)

    def measured(self, step: int, values: Mapping[str, float]) -> None:
        self.say(f"step {step}: {self.summary(values)}")

    def say(self, text: str) -> None:
        self.console.print(text, markup=False)

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class RunLog:
    """`log.jsonl`, one line per logged step, and TensorBoard beside it where it is installed."""

    def __init__(self, folder: Path, resume_from: int = 0, *, again: bool = False) -> None:
        """Continue after step `resume_from`; `again`: its evaluation will be repeated."""
        self.path = folder / "log.jsonl"
        if self.path.exists():
            # Steps after the checkpoint will be run again: their lines must not appear twice.
            write_atomic(self.path, _lines_until(self.path, resume_from, again).encode())
        self._file = self.path.open("a", encoding="utf-8")
        self._board = _tensorboard(folder, resume_from)

    def write(self, values: Mapping[str, float]) -> None:
        """Append one record with its `step`."""
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in values.items():
                if name != "step":
                    self._board.add_scalar(name, value, values["step"])

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        if self._board is not None:
            self._board.close()


def _lines_until(path: Path, step: int, again: bool) -> str:
    """Return the log up to a step, without that step's evaluation if it comes `again`."""
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
