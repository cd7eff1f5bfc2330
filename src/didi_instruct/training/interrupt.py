"""Ctrl-C and SIGTERM as a wish to stop after the current step, not as an accident."""

import signal
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self

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
