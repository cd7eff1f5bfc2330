"""Work that a GPU does at the same time as other work."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@functools.cache
def side_stream(device: torch.device) -> Any:
    """Where passes warm up and are captured: one, since cuBLAS keeps memory for every stream."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@contextmanager
def beside(work: Callable[[], object], device: torch.device) -> Iterator[None]:
    """Queue some work, and whatever is done within, at the same time; what follows needs both.

    So one may wait for a number without waiting for the work.
    """
    if device.type != "cuda":
        work()
        yield
        return
    here, side = torch.cuda.current_stream(device), side_stream(device)
    side.wait_stream(here)
    work()
    try:
        with torch.cuda.stream(side):
            yield
    finally:
        here.wait_stream(side)
