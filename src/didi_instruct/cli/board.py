"""How the jobs of a grid stand: a table on a terminal, elsewhere a line when something changes."""

import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Self

from didi_instruct.cli.progress import SECONDS_BETWEEN_LINES, clock

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from didi_instruct.reproduce.grid import Standing

WAITING_SHOWN = 6
"""Jobs of the table that have not begun; more would push the running one away."""
WORDS = {"kept": "done before"}


class ProgressBoard:
    """Shows a grid while it is open."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        from rich.console import Console

        console = Console(stderr=True)
        self._display: _Live | _Lines
        self._display = _Live(console, clock) if console.is_terminal else _Lines(clock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._display.stop()

    def show(self, standings: "Sequence[Standing]", changed: "Standing") -> None:
        """One of the jobs has changed."""
        self._display.show(standings, changed)


class _Clock:
    """When each running job began."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._began = clock, dict[str, float]()

    def seconds(self, standing: "Standing") -> float:
        if standing.state != "running":
            return standing.seconds
        began = self._began.setdefault(standing.job.key, self._clock())
        return self._clock() - began


class _Live:
    """A table that is drawn anew."""

    def __init__(self, console: "Console", clock: Callable[[], float]) -> None:
        from rich.live import Live

        self._clock = _Clock(clock)
        self._live = Live(console=console, refresh_per_second=4)
        self._live.start()

    def show(self, standings: "Sequence[Standing]", changed: "Standing") -> None:
        self._live.update(self._table(standings))

    def _table(self, standings: "Sequence[Standing]") -> "Table":
        from rich.table import Table
        from rich.text import Text

        table = Table("job", "state", "time", "", caption=summary(standings), box=None)
        first = [s for s in standings if s.state in ("running", "failed", "blocked")]
        waiting = [s for s in standings if s.state == "waiting"]
        for one in (*first, *waiting[:WAITING_SHOWN]):
            seconds = self._clock.seconds(one)
            told = Text(one.note, overflow="ellipsis", no_wrap=True)
            table.add_row(one.job.name, one.state, clock(seconds) if seconds else "", told)
        return table

    def stop(self) -> None:
        self._live.stop()


class _Lines:
    """Plain lines: where a job begins and ends, and how far it is every few seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._now, self._clock = clock, _Clock(clock)
        self._next, self._states = 0.0, dict[str, str]()

    def show(self, standings: "Sequence[Standing]", changed: "Standing") -> None:
        key, now = changed.job.key, self._now()
        seconds = self._clock.seconds(changed)
        if self._states.get(key) == changed.state and now < self._next:
            return
        self._states[key], self._next = changed.state, now + SECONDS_BETWEEN_LINES
        note = f": {changed.note}" if changed.note else ""
        print(
            f"{summary(standings)} | {changed.job.name} {changed.state}"
            f"{f' {clock(seconds)}' if seconds >= 1 else ''}{note}",
            file=sys.stderr,
        )

    def stop(self) -> None:
        pass


def summary(standings: "Sequence[Standing]") -> str:
    """Count the jobs of each state."""
    counts = Counter(WORDS.get(s.state, s.state) for s in standings if s.state != "running")
    order = ("done", "done before", "failed", "blocked", "waiting")
    parts = [f"{counts[state]} {state}" for state in order if counts[state]]
    return f"{len(standings)} jobs: {', '.join(parts)}" if parts else f"{len(standings)} jobs"
