"""The processes of a run: one, or several under `torchrun`."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from didi_instruct.errors import UserError


@dataclass(frozen=True, slots=True)
class World:
    """This process's place among all of them, and its device."""

    device: torch.device
    rank: int = 0
    size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this process reports and writes."""
        return self.rank == 0

    def share(self, count: int) -> range:
        """Rows of a global batch that are this process's."""
        each = count // self.size
        return range(self.rank * each, (self.rank + 1) * each)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add up over the processes, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any process. All must call."""
        if self.size == 1:
            return flag
        return bool(self.sum(torch.tensor(int(flag))) > 0)

    def agree(self, number: int) -> int:
        """Return the main process's number, everywhere."""
        if self.size == 1:
            return number
        shared = torch.tensor(number)
        dist.broadcast(shared, src=0)
        return int(shared)

    def wait(self) -> None:
        """Return when every process has come here."""
        if self.size > 1:
            dist.barrier()


def pick_device(device: str | None = None) -> torch.device:
    """Return the device asked for, or this process's GPU if there is one."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise UserError(f"`{device}` is not a device. Use cpu, cuda or cuda:N.") from None
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise UserError("No CUDA device is here: use --device cpu.")
    return chosen


@contextmanager
def open_world(device: str | None = None) -> Iterator[World]:
    """Join the processes that `torchrun` started; alone, just pick the device."""
    chosen = pick_device(device)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield World(chosen)
        return
    # Flags and step numbers travel over gloo, so that reading them never waits for the GPU.
    backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
    dist.init_process_group(backend)
    try:
        yield World(chosen, dist.get_rank(), size)
    finally:
        dist.destroy_process_group()
