"""Networks as distillation runs them: devices, precision, processes, compilation, updates."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from didi_instruct.config.pretrain import OptimConfig, TrainConfig
from didi_instruct.models.network import logits_at
from didi_instruct.process.schedule import make_schedule
from didi_instruct.training.distributed import (
    World,
    compile_network,
    compiles,
    gradient_sync,
    parallelise,
    uses_bf16,
)
from didi_instruct.training.optim import Updater
from didi_instruct.transfer import sent

Metrics = dict[str, Tensor]
"""Numbers by name, 0-d each."""
Loss = tuple[Tensor, Metrics]
"""A pass's share of a loss, 0-d, and of numbers for the log."""

ROWS = 512
"""Numbers of rows of a matrix are filled up to a multiple of this: a GPU chooses a kernel by them,
which takes milliseconds of the host's time for one that it has not met."""


def pays_to_pad(device: torch.device) -> bool:
    """True where a good size makes a matrix product faster by more than padding costs."""
    return device.type == "cuda"


def flat_positions(where: Tensor, device: torch.device) -> tuple[Tensor, int]:
    """Flat indices of the selected positions (U, L) on a device, and their count.

    Where padding pays, the first index is repeated behind them.
    """
    at = where.flatten().nonzero().squeeze(1)
    count = len(at)
    if pays_to_pad(device):
        at = F.pad(at, (0, -count % ROWS))
    return sent(at, device), count


_iterating: ContextVar[bool] = ContextVar("didi_iterating", default=False)


@contextmanager
def iterating() -> Iterator[None]:
    """Within, outputs of passes stay valid until `Replica.release`."""
    token = _iterating.set(True)
    try:
        yield
    finally:
        _iterating.reset(token)


class _Root(nn.Module):
    """The module that DDP and FSDP wrap: calls a function with the network.

    Everything else a function needs is in its closure, where no wrapper casts or copies it.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, function: Callable[[Any], Any]) -> Any:
        return function(self.network)


class Replica:
    """A network on this process, replicated (DDP) or sharded (FSDP2); all processes call alike.

    Networks stay in evaluation mode: a student that drops units would not have the probabilities
    that its text was drawn with.
    """

    def __init__(self, network: Any, train: TrainConfig, world: World) -> None:
        self.network = network.to(world.device).eval()
        self.schedule = make_schedule(network.config.schedule)
        self.device, self.bf16 = world.device, uses_bf16(train, world.device)
        self._processes = world.size
        fsdp = train.strategy == "fsdp" and world.size > 1
        self.graphs = False
        """True where outputs of a pass lie in memory of a CUDA graph."""
        if compiles(train, world.device):
            self.graphs = train.compile == "graphs" and world.size == 1
            compile_network(self.network, sharded=fsdp, graphs=self.graphs)
        root: nn.Module = _Root(self.network)
        if fsdp or any(p.requires_grad for p in network.parameters()):
            root = parallelise(root, self.network.blocks, train.strategy, world, bf16=self.bf16)
        self._root = root

    def run(self, function: Callable[[Any], Any], *, sync: bool = True) -> Any:
        """Call a function of the network that returns tensors; every pass goes through here.

        `sync`: the backward pass of its result exchanges gradients (the last one does).
        """
        if not _iterating.get():  # an evaluation, which keeps nothing of a pass
            self.release()
        autocast = torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.bf16)
        with gradient_sync(self._root, sync), autocast:
            return self._root(function)

    def release(self) -> None:
        """Let passes that run as CUDA graphs reuse the memory of earlier ones, of all replicas."""
        if self.graphs:
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]

    def backward(self, loss: Tensor, *, sync: bool = True) -> None:
        """Accumulate the gradients of this process's share of a loss."""
        with gradient_sync(self._root, sync):
            # DDP and FSDP average over processes; the shares are already parts of a sum.
            (loss * self._processes).backward()  # type: ignore[no-untyped-call]

    # A denoiser at some positions (`LogitsAt`): z (U, L), t (U,), where (U, L) -> (R, V)

    def log_probs_with_grad(
        self, z: Tensor, t: Tensor, where: Tensor, *, sync: bool = True
    ) -> Tensor:
        """Log-probabilities, float32, with their gradient if gradients are on."""
        at, count = flat_positions(where, z.device)

        def forward(network: Any) -> Tensor:
            logits = logits_at(network, z, self.schedule.sigma(t), at)
            return logits.float()[:count].log_softmax(-1)

        log_probs: Tensor = self.run(forward, sync=sync)
        return log_probs

    @torch.no_grad()
    def log_probs(self, z: Tensor, t: Tensor, where: Tensor) -> Tensor:
        """Log-probabilities, float32."""
        return self.logits(z, t, where).float().log_softmax(-1)

    @torch.no_grad()
    def logits(self, z: Tensor, t: Tensor, where: Tensor) -> Tensor:
        """Logits as the network gives them, not normalised."""
        sigma, (at, count) = self.schedule.sigma(t), flat_positions(where, self.device)
        logits: Tensor = self.run(lambda network: logits_at(network, z, sigma, at))
        return logits[:count]


class Learner:
    """A network that learns: its replica, optimizer, learning-rate schedule and average."""

    def __init__(
        self,
        network: Any,
        optim: OptimConfig,
        train: TrainConfig,
        world: World,
        *,
        steps: int,
        ema: float = 0.0,
    ) -> None:
        self.replica = Replica(network, train, world)
        self.network = self.replica.network
        self.updater = Updater(self.network, optim, steps, ema, ema_warmup=train.ema_warmup)

    @property
    def bytes(self) -> int:
        """Size in a checkpoint: weights, average, moments, and the model to load."""
        return 5 * _bytes(self.network)

    def backward(self, loss: Tensor, *, sync: bool = True) -> None:
        self.replica.backward(loss, sync=sync)

    def update(self, step: int) -> Tensor:
        """Apply the gradients as update `step` and clear them; return their norm."""
        return self.updater.update(step)

    def drop_gradients(self) -> None:
        self.updater.optimizer.zero_grad(set_to_none=True)

    @contextmanager
    def averaged(self) -> Iterator[Any]:
        """The network with its averaged weights in place."""
        with self.updater.averaged():
            yield self.network

    def tensors(self) -> Mapping[str, Tensor]:
        """Everything that changes, by name: weights, average, moments."""
        return self.updater.tensors()


class FrozenCopy:
    """A copy that takes over the student's weights now and then and teaches it in between."""

    def __init__(self, network: Any, train: TrainConfig, world: World) -> None:
        self.replica = Replica(network.requires_grad_(False), train, world)
        self.network = self.replica.network

    @property
    def bytes(self) -> int:
        """Size in a checkpoint: weights alone."""
        return _bytes(self.network)

    @torch.no_grad()
    def take(self, student: Learner, *, average: bool = False) -> None:
        """Take over the weights of the student, or their average if it has one."""
        if average and student.updater.ema is not None:
            student.updater.ema.copy_to(self.network)
            return
        own = dict(student.network.named_parameters())
        for name, parameter in self.network.named_parameters():
            parameter.copy_(own[name])

    def tensors(self) -> Mapping[str, Tensor]:
        return {name: p.detach() for name, p in self.network.named_parameters()}


def _bytes(network: nn.Module) -> int:
    return sum(p.numel() * 4 for p in network.parameters())
