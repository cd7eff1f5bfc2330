"""Run a case in a process of its own, so that a crash costs its row alone.

Third-party code may compile, clear caches or crash there. It still takes its turns beside the other
cases, timed by the same clock; in between its process sleeps.
"""

import multiprocessing
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import torch

from didi_instruct.errors import first_line

Run = Callable[[int], object]


class Isolated:
    """A function of a seed that runs in a spawned process.

    The process starts with the first run and calls `make(*arguments)`, which has to be importable.
    If it ends without an answer, the run raises an error with its exit code (negative: a signal).
    """

    def __init__(
        self,
        make: Callable[..., Run],
        *arguments: object,
        device: torch.device | None = None,
        time_limit: float = 300.0,
        exit_limit: float = 10.0,
    ) -> None:
        self._given = torch.get_num_threads(), device, make, arguments
        self._time_limit, self._exit_limit = time_limit, exit_limit  # seconds
        self.process: BaseProcess | None = None
        self.peak = 0
        """Peak GPU memory of the last run, in bytes."""

    def __call__(self, seed: int) -> None:
        """Run once and wait for the end, of the GPU's work too."""
        if self.process is None:
            self._start()
        assert self.process is not None
        try:
            self._pipe.send(seed)
            if not self._pipe.poll(self._time_limit):
                self.process.kill()
                raise RuntimeError(f"no answer within {self._time_limit:g} s")
            failure, self.peak = self._pipe.recv()
        except (EOFError, OSError):
            self.process.join(self._exit_limit)
            code = self.process.exitcode
            raise RuntimeError(f"its process ended with code {code}") from None
        if failure is not None:
            raise RuntimeError(failure)

    def _start(self) -> None:
        # Spawned: a process that uses CUDA cannot be forked.
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, *self._given), daemon=True)
        self.process.start()
        theirs.close()  # while this end is open, nobody would notice that the other has closed
        weakref.finalize(self, _end, self.process, self._pipe, self._exit_limit)


def _end(process: BaseProcess, pipe: Connection, limit: float) -> None:
    """Close the pipe, on which the process ends by itself; kill it if it does not."""
    pipe.close()
    process.join(limit)
    if process.is_alive():
        process.kill()
        process.join()


def _serve(
    pipe: Connection,
    threads: int,
    device: torch.device | None,
    make: Callable[..., Run],
    arguments: tuple[object, ...],
) -> None:
    """Answer each seed with (the error's first line or None, peak GPU memory in bytes)."""
    torch.set_num_threads(threads)
    cuda, run = device is not None and device.type == "cuda", None
    place = torch.cuda.device(device) if cuda else nullcontext()
    while True:
        try:
            seed = pipe.recv()
        except EOFError:
            return
        failure, peak = None, 0
        try:
            if run is None:
                run = make(*arguments)
            with place:
                if cuda:
                    torch.cuda.reset_peak_memory_stats()
                run(seed)
                if cuda:
                    torch.cuda.synchronize()
                    peak = torch.cuda.max_memory_allocated()
        except Exception as error:
            failure = first_line(error)
        pipe.send((failure, peak))
