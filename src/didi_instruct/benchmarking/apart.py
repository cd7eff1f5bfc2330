"""A case in a process of its own: what it compiles, captures or breaks is its own affair.

It still takes its turns beside the others, by the same clock: a run is asked for and waited for,
and in between the process sleeps.
"""

import multiprocessing
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import torch

from didi_instruct.errors import first_line

LIMIT = 300.0
"""Seconds that a run may take, all that compiles included."""
PATIENCE = 10.0
"""Seconds that a process which is no longer needed has to end by itself."""

Run = Callable[[int], object]


class Apart:
    """A function of a seed that runs elsewhere; `make` builds it there, and has to be importable.

    The process starts with the first run. Where it ends without an answer, so does the run, with
    an error that names the signal or code.
    """

    def __init__(
        self, make: Callable[..., Run], *arguments: object, device: torch.device | None = None
    ) -> None:
        self._make, self._arguments, self._device = make, arguments, device
        self._process: BaseProcess | None = None
        self._line: Connection | None = None
        self.peak = 0
        """Bytes of GPU memory that it held at most in the last run."""

    def __call__(self, seed: int) -> None:
        """Run once there; return when it is done, the GPU included."""
        if self._line is None:
            self._start()
        assert self._line is not None
        assert self._process is not None
        try:
            self._line.send(seed)
            if not self._line.poll(LIMIT):
                self._process.kill()
                raise RuntimeError(f"no answer within {LIMIT:g} s")
            failure, self.peak = self._line.recv()
        except (EOFError, OSError):
            raise RuntimeError(self._last_words()) from None
        if failure is not None:
            raise RuntimeError(failure)

    def _start(self) -> None:
        # Spawned: a process with CUDA cannot be forked, and nothing of ours is to be there.
        context = multiprocessing.get_context("spawn")
        self._line, theirs = context.Pipe()
        given = theirs, torch.get_num_threads(), self._device, self._make, self._arguments
        self._process = context.Process(target=_serve, args=given, daemon=True)
        self._process.start()
        theirs.close()  # or nobody would notice that the other end is gone
        weakref.finalize(self, _end, self._process, self._line)

    def _last_words(self) -> str:
        assert self._process is not None
        self._process.join(PATIENCE)
        return f"its process ended with code {self._process.exitcode}"


def _end(process: BaseProcess, line: Connection) -> None:
    """Let a process end, which it does when nobody can ask any more."""
    line.close()
    process.join(PATIENCE)
    if process.is_alive():
        process.kill()
        process.join()


def _serve(
    line: Connection,
    threads: int,
    device: torch.device | None,
    make: Callable[..., Run],
    arguments: tuple[object, ...],
) -> None:
    """Build, then run as often as asked; answers are (what failed or None, bytes at most)."""
    torch.set_num_threads(threads)
    run: Run | None = None
    while True:
        try:
            seed = line.recv()
        except EOFError:
            return
        failure, peak = None, 0
        try:
            if run is None:
                run = make(*arguments)
            peak = _peak(run, seed, device)
        except Exception as error:  # told to who asked
            failure = first_line(error)
        line.send((failure, peak))


def _peak(run: Run, seed: int, device: torch.device | None) -> int:
    """Run to its end; return the bytes of GPU memory that were held at most."""
    if device is None or device.type != "cuda":
        run(seed)
        return 0
    with torch.cuda.device(device):
        torch.cuda.reset_peak_memory_stats()
        run(seed)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()
