"""Networks of a distillation, each alone, replicated (DDP) or sharded (FSDP2), called one way."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from didi_instruct.config.pretrain import TrainConfig
from didi_instruct.distillation.rollout import Rows
from didi_instruct.models.dit import DiT, Trunk
from didi_instruct.process.schedule import Schedule
from didi_instruct.sampling.network import logits_at
from didi_instruct.training.distributed import (
    World,
    compile_network,
    compiles,
    gradient_sync,
    parallelise,
    uses_bf16,
)
from didi_instruct.transfer import sent

Tensors = dict[str, Tensor]
ROWS = 512
"""What the number of rows of a matrix is filled up to a multiple of: a GPU chooses a kernel by it,
which takes milliseconds of the host's time for one that it has not met."""


def pays_to_pad(device: torch.device) -> bool:
    """Whether a matrix of a good size is multiplied faster by more than what is added costs."""
    return device.type == "cuda"


def places(where: Tensor, device: torch.device) -> tuple[Tensor, int]:
    """Numbers of the selected positions (U, L), `filled`, on a device; and how many they are."""
    place = where.flatten().nonzero().squeeze(1)
    return sent(filled(place, device), device), len(place)


def filled(place: Tensor, device: torch.device) -> Tensor:
    """Numbers of positions, and some more of the first one where that pays."""
    return F.pad(place, (0, -len(place) % ROWS)) if pays_to_pad(device) else place


_iterating: ContextVar[bool] = ContextVar("didi_iterating", default=False)


@contextmanager
def iterating() -> Iterator[None]:
    """Within, what passes give stays until `Host.forget`."""
    token = _iterating.set(True)
    try:
        yield
    finally:
        _iterating.reset(token)


class _Root(nn.Module):
    """What DDP and FSDP wrap: calls a function with the network.

    Everything else a function needs is in its closure, where no wrapper casts or copies it.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, function: Callable[[Any], Tensors]) -> Tensors:
        return function(self.network)


class Host:
    """One network; every pass goes through `run`, on all processes alike.

    Networks stay in evaluation mode: a student that drops units would not have the probabilities
    that its text was drawn with.
    """

    def __init__(self, network: Trunk, train: TrainConfig, world: World) -> None:
        self.network = network.to(world.device).eval()
        self.device, self.bf16 = world.device, uses_bf16(train, world.device)
        self._processes = world.size
        fsdp = train.strategy == "fsdp" and world.size > 1
        self.graphs = False
        """Whether what a pass gives lies in memory of a CUDA graph."""
        if compiles(train, world.device):
            self.graphs = train.compile == "graphs" and world.size == 1
            how = "on" if train.compile == "graphs" and not self.graphs else train.compile
            compile_network(self.network, how, sharded=fsdp)
        root: nn.Module = _Root(self.network)
        if fsdp or any(p.requires_grad for p in network.parameters()):
            root = parallelise(root, self.network.blocks, train.strategy, world, bf16=self.bf16)
        self._root = root

    def run(self, function: Callable[[Any], Tensors], *, sync: bool = True) -> Tensors:
        """Call a function of the network that gives named tensors.

        `sync`: whether the backward pass of what it gives exchanges gradients (the last one does).
        """
        if not _iterating.get():  # an evaluation, which keeps nothing of a pass
            self.forget()
        with gradient_sync(self._root, sync), self.autocast():
            result: Tensors = self._root(function)
        return result

    def forget(self) -> None:
        """Let passes that run as CUDA graphs write to the memory of those before, of all hosts."""
        if self.graphs:
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]

    def backward(self, loss: Tensor, *, sync: bool = True) -> None:
        """Accumulate the gradients of this process's share of a loss."""
        with gradient_sync(self._root, sync):
            # DDP and FSDP average over processes; the shares are already parts of a sum.
            (loss * self._processes).backward()  # type: ignore[no-untyped-call]

    def autocast(self) -> torch.autocast:
        """The precision of passes."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.bf16)


def law(schedule: Schedule, z: Tensor, t: Tensor, where: Tensor) -> Callable[[DiT], Tensors]:
    """What to run for log-probabilities (R, V), float32, of the selected positions: `log_p`."""
    place, count = places(where, z.device)

    def forward(network: DiT) -> Tensors:
        logits = logits_at(network, z, schedule.sigma(t), place)
        return {"log_p": logits.float()[:count].log_softmax(-1)}

    return forward


def rows_of(host: Host, schedule: Schedule) -> Rows:
    """A hosted denoiser as the rows that rollouts ask for; no gradient."""
    logits = logits_of(host, schedule)
    return lambda z, t, where: logits(z, t, where).float().log_softmax(-1)


def logits_of(host: Host, schedule: Schedule) -> Rows:
    """The same without the sum over the vocabulary, for who normalises anyway."""

    @torch.no_grad()
    def rows(z: Tensor, t: Tensor, where: Tensor) -> Tensor:
        sigma, (place, count) = schedule.sigma(t), places(where, host.device)
        return host.run(lambda n: {"logits": logits_at(n, z, sigma, place)})["logits"][:count]

    return rows
