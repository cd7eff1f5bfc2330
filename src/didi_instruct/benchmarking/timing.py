"""Time cases in turns, so that whatever slows the machine slows all of them alike."""

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import nn

from didi_instruct.errors import UserError, first_line

MEMORY_ERRORS = (RuntimeError, MemoryError)
"""Raised where memory runs out: by torch, in many wordings, and by Python."""
SEEDS = 2
"""Seeds that runs alternate between. The warm-up uses the same ones, since a seed decides shapes.
"""
Progress = Callable[[int, int], None]
"""Called before each run, and at the end, with the runs that are done and all there are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A piece of work to time."""

    name: str
    run: Callable[[int], object]
    """Takes a seed. An integer that it returns is the number of steps it took."""
    batch: int
    length: int
    steps: int
    """Expected steps, used where `run` does not return a number."""
    batches: int = 1
    """Batches of texts per run."""
    networks: tuple[nn.Module, ...] = ()
    """Networks whose weights count towards its memory."""
    peak_elsewhere: Callable[[], int] | None = None
    """Peak GPU memory in bytes of its last run in another process."""
    note: str | None = None
    """Note shown with the row."""

    @classmethod
    def impossible(cls, name: str, batch: int, length: int, steps: int, why: Exception) -> "Case":
        """Return a case that could not be built, and fails for that reason when it is run."""
        reason = first_line(why)

        def run(seed: int) -> None:
            raise RuntimeError(reason)

        return cls(name=name, run=run, batch=batch, length=length, steps=steps)


@dataclass(slots=True)
class Timing:
    """Measurements of a case."""

    seconds: list[float] = field(default_factory=list)
    peak: int | None = None
    """Bytes of GPU memory: weights, what is kept between runs and the most that a run adds."""
    held: int = 0
    """Bytes of GPU memory kept between runs."""
    steps: int | None = None
    """Steps of the last run, if it returned them."""
    busy: float | None = None
    """Seconds of a run in which the GPU was working."""
    failure: str | None = None
    """Reason why it did not run, in one line."""

    @property
    def median(self) -> float | None:
        """Median of the seconds; None if it did not run."""
        return statistics.median(self.seconds) if self.seconds else None

    def run(self, case: Case, seed: int) -> None:
        """Run the case once and keep the steps it returns."""
        result = case.run(seed)
        if isinstance(result, int):
            self.steps = result


def time_cases(
    cases: Sequence[Case],
    repeat: int,
    device: torch.device,
    progress: Progress | None = None,
    *,
    warm_up: int | None = None,
    busy: bool = False,
    measure_held: bool = True,
) -> list[Timing]:
    """Warm each case up, then time rounds of all of them.

    Compilation happens in the warm-up: by default twice on a GPU, where a second run may bring new
    shapes, and once elsewhere. A case that fails, usually for want of memory, is left out of later
    rounds and keeps the reason; only a `UserError` ends the run. With `busy` a last, untimed run of
    each case measures how long the GPU works. `measure_held=False` leaves out the memory kept
    between runs, whose measurement empties the cache around a run.
    """
    timings = [Timing() for _ in cases]
    warm_up = warm_up or (2 if device.type == "cuda" else 1)
    total, done = len(cases) * (warm_up + repeat), 0
    for turn in range(-warm_up, repeat):
        for case, timing in zip(cases, timings, strict=True):
            if progress is not None:
                progress(done, total)
            done += 1
            if timing.failure is None:
                _take_turn(case, timing, turn, device, measure_held)
    if busy and device.type == "cuda":
        for case, timing in zip(cases, timings, strict=True):
            if timing.failure is None:
                with suppress(*MEMORY_ERRORS):
                    timing.busy = _seconds_busy(case, timing)
    if progress is not None:
        progress(total, total)
    return timings


def _take_turn(
    case: Case, timing: Timing, turn: int, device: torch.device, measure_held: bool
) -> None:
    """Run a case once; negative turns are the warm-up."""
    seed = turn % SEEDS
    try:
        if turn < -1 and measure_held:
            timing.held = max(0, timing.held + _bytes_held(case, timing, seed, device))
            return
        seconds, peak = _timed_run(case, timing, seed, device)
    except UserError:
        raise
    except Exception as error:  # of any kind: the other rows are worth having
        timing.failure = first_line(error)
        timing.seconds.clear()
        timing.peak = None
    if timing.failure is not None:
        empty(device)  # after the except block, which holds the tensors of the failed run
    elif turn >= 0:  # the last turn of the warm-up takes back the memory that was emptied
        timing.seconds.append(seconds)
        if device.type == "cuda":
            elsewhere = 0 if case.peak_elsewhere is None else case.peak_elsewhere()
            total = _bytes_of_weights(case) + timing.held + peak + elsewhere
            timing.peak = max(timing.peak or 0, total)


def _timed_run(case: Case, timing: Timing, seed: int, device: torch.device) -> tuple[float, int]:
    """Return the seconds of a run and the most bytes it added."""
    cuda, before = device.type == "cuda", 0
    if cuda:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    started = time.perf_counter()
    timing.run(case, seed)
    if cuda:
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - started
    peak = torch.cuda.max_memory_allocated(device) - before if cuda else 0
    return seconds, peak


def _bytes_held(case: Case, timing: Timing, seed: int, device: torch.device) -> int:
    """Run untimed; return the bytes that stay reserved.

    Reserved, since memory inside a CUDA graph no longer counts as allocated.
    """
    empty(device)
    cuda = device.type == "cuda"
    before = torch.cuda.memory_reserved(device) if cuda else 0
    timing.run(case, seed)
    empty(device)
    return torch.cuda.memory_reserved(device) - before if cuda else 0


def _seconds_busy(case: Case, timing: Timing) -> float | None:
    """Seconds in which a kernel or copy of a run was under way; None without a profiler's data."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        timing.run(case, 0)
        torch.cuda.synchronize()
    spans = [
        (event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if event.device_type.name == "CUDA"
    ]
    return covered(spans) / 1e6 if spans else None


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, end = 0.0, -float("inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def _bytes_of_weights(case: Case) -> int:
    tensors = {id(t): t for n in case.networks for t in (*n.parameters(), *n.buffers())}
    return sum(t.numel() * t.element_size() for t in tensors.values())


def empty(device: torch.device) -> None:
    """Release cached GPU memory that nothing holds."""
    if device.type == "cuda":
        gc.collect()
        with suppress(RuntimeError):  # of a GPU that has failed, as its row says
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
