"""Cases timed in turns, so that whatever slows the machine slows all of them alike."""

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import nn

from didi_instruct.errors import UserError, first_line

TOO_LARGE = (RuntimeError, MemoryError)
"""What is raised where memory ends: by torch, which may say it in many ways, and by Python."""
SEEDS = 2
"""Seeds that runs go through: those of the warm-up, since a seed decides shapes."""
Progress = Callable[[str, int, int], None]
"""Told the case that runs next, and how many of how many runs are done."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Something to time."""

    name: str
    run: Callable[[int], object]
    """Do it once; the number is a seed. A whole number that it returns is the steps it took."""
    batch: int
    length: int
    steps: int
    """That are expected; what a run says counts."""
    batches: int = 1
    """Batches of texts that a run makes."""
    networks: tuple[nn.Module, ...] = ()
    """What it needs in memory whatever it does."""
    elsewhere: Callable[[], int] | None = None
    """Bytes of GPU memory that its last run held at most in another process."""
    note: str | None = None
    """What a reader of the row has to know."""

    @classmethod
    def impossible(cls, name: str, batch: int, length: int, steps: int, why: Exception) -> "Case":
        """One that could not even be built, and fails for the same reason."""
        reason = first_line(why)

        def run(seed: int) -> None:
            raise RuntimeError(reason)

        return cls(name=name, run=run, batch=batch, length=length, steps=steps)


@dataclass(slots=True)
class Timing:
    """What was measured of a case."""

    seconds: list[float] = field(default_factory=list)
    peak: int | None = None
    """Bytes of GPU memory: its networks, what it keeps between runs, the most a run adds."""
    held: int = 0
    """Bytes that it keeps between runs."""
    steps: int | None = None
    """That a run took, if it said so."""
    busy: float | None = None
    """Seconds of a run in which the GPU did something, if asked."""
    failure: str | None = None
    """Why it did not run, in a line."""

    @property
    def median(self) -> float | None:
        """Of the seconds, if it ran."""
        return statistics.median(self.seconds) if self.seconds else None


def time_cases(
    cases: Sequence[Case],
    repeat: int,
    device: torch.device,
    progress: Progress | None = None,
    *,
    warm_up: int | None = None,
    busy: bool = False,
    weigh: bool = True,
) -> list[Timing]:
    """Warm each case up, then time rounds of all of them.

    What compiles does so in the warm-up; by default twice on a GPU, since the shapes of a second
    run may be new, and once elsewhere. A case that fails (memory, most of the time) is left out of
    what follows, and says why; only what the user can mend ends all. With `busy` a last, untimed
    run of each tells how long a GPU worked. Without `weigh` nobody asks what a case keeps in
    memory, for which memory is emptied around it.
    """
    timings = [Timing() for _ in cases]
    warm_up = warm_up or (2 if device.type == "cuda" else 1)
    total, done = len(cases) * (warm_up + repeat), 0
    for turn in range(-warm_up, repeat):
        for case, timing in zip(cases, timings, strict=True):
            if progress is not None:
                progress(case.name, done, total)
            done += 1
            if timing.failure is None:
                _take_turn(case, timing, turn, device, weigh)
    if busy and device.type == "cuda":
        for case, timing in zip(cases, timings, strict=True):
            if timing.failure is None:
                with suppress(*TOO_LARGE):
                    timing.busy = _seconds_busy(case, timing, 0)
    if progress is not None:
        progress("done", total, total)
    return timings


def _take_turn(case: Case, timing: Timing, turn: int, device: torch.device, weigh: bool) -> None:
    """Run a case once; turns below 0 are the warm-up."""
    try:
        if turn < -1 and weigh:
            timing.held = max(0, timing.held + _kept(case, timing, turn % SEEDS, device))
            return
        seconds, peak = _timed(case, timing, turn % SEEDS, device)
    except UserError:
        raise
    except Exception as error:  # whatever it is, the other rows are worth having
        timing.failure = first_line(error)
        timing.seconds.clear()
        timing.peak = None
    if timing.failure is not None:
        empty(device)  # out here nothing holds the tensors of the failed run any more
    elif turn >= 0:  # in the turn before, memory that was given back is taken again
        timing.seconds.append(seconds)
        if device.type == "cuda":
            there = 0 if case.elsewhere is None else case.elsewhere()
            timing.peak = max(timing.peak or 0, _weights(case) + timing.held + peak + there)


def _run(case: Case, timing: Timing, seed: int) -> None:
    result = case.run(seed)
    if isinstance(result, int):
        timing.steps = result


def _timed(case: Case, timing: Timing, seed: int, device: torch.device) -> tuple[float, int]:
    """Seconds of a run, and the bytes it added at most."""
    cuda = device.type == "cuda"
    before = 0
    if cuda:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    started = time.perf_counter()
    _run(case, timing, seed)
    if cuda:
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - started
    peak = torch.cuda.max_memory_allocated(device) - before if cuda else 0
    return seconds, peak


def _kept(case: Case, timing: Timing, seed: int, device: torch.device) -> int:
    """Run untimed; return the bytes that stay with the case.

    By what is reserved: the memory inside of a CUDA graph is no longer counted as allocated.
    """
    empty(device)
    cuda = device.type == "cuda"
    before = torch.cuda.memory_reserved(device) if cuda else 0
    _run(case, timing, seed)
    empty(device)
    return torch.cuda.memory_reserved(device) - before if cuda else 0


def _seconds_busy(case: Case, timing: Timing, seed: int) -> float | None:
    """Seconds in which at least one kernel or copy of a run was under way; None: nobody may see."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        _run(case, timing, seed)
        torch.cuda.synchronize()
    spans = [
        (event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if event.device_type.name == "CUDA"
    ]
    return covered(spans) / 1e6 if spans else None


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """How much of a line is covered by spans that may overlap."""
    total, end = 0.0, -float("inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def _weights(case: Case) -> int:
    tensors = {id(t): t for n in case.networks for t in (*n.parameters(), *n.buffers())}
    return sum(t.numel() * t.element_size() for t in tensors.values())


def empty(device: torch.device) -> None:
    """Give back what nobody holds on a GPU."""
    if device.type == "cuda":
        gc.collect()
        with suppress(RuntimeError):  # of a GPU that has failed, which its row has told
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
