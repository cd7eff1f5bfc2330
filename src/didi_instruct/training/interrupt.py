"""Ctrl-C and SIGTERM as a wish to stop after the current step, not as an accident."""

import signal
from types import FrameType, TracebackType
from typing import Self


class Interrupt:
    """While active, the first signal only sets `signal`; a second one acts at once."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._previous: dict[int, object] = {}

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = number

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
