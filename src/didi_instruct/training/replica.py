"""Networks as training runs them: devices, precision, processes, compilation, updates."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from didi_instruct.config.train import OptimConfig, TrainConfig
from didi_instruct.models.network import logits_at
from didi_instruct.process.schedule import make_schedule
from didi_instruct.sampling.state import Reads
from didi_instruct.training.distributed import (
    World,
    compile_network,
    compiles,
    gradient_sync,
    parallelise,
    shards,
    uses_bf16,
    whole,
)
from didi_instruct.training.optim import EMA, Updater
from didi_instruct.transfer import sent

ROWS = 512
"""Numbers of rows of a matrix are filled up to a multiple of this: a GPU chooses a kernel by them,
which takes milliseconds of the host's time for one that it has not met."""


def pays_to_pad(device: torch.device) -> bool:
    """True where a good size makes a matrix product faster by more than padding costs."""
    return device.type == "cuda"


def padded(at: Tensor, device: torch.device) -> Tensor:
    """Flat positions (R,) on a device; where padding pays, position 0 is repeated behind them."""
    return sent(F.pad(at, (0, -len(at) % ROWS)) if pays_to_pad(device) else at, device)


_iterating: ContextVar[bool] = ContextVar("didi_iterating", default=False)
_exchanging: ContextVar[bool] = ContextVar("didi_exchanging", default=True)


@contextmanager
def _within(variable: ContextVar[bool], value: bool) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def iterating() -> AbstractContextManager[None]:
    """Within, outputs of passes stay valid until `Replica.release`."""
    return _within(_iterating, True)


def exchanging(enabled: bool) -> AbstractContextManager[None]:
    """Within, passes exchange gradients between processes only if `enabled`: the last pass does."""
    return _within(_exchanging, enabled)


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

    With settings of an optimizer it learns. Networks stay in evaluation mode: a student that drops
    units would not have the probabilities that its text was drawn with.
    """

    def __init__(
        self,
        network: Any,
        train: TrainConfig,
        world: World,
        optim: OptimConfig | None = None,
        *,
        steps: int = 0,
        ema: float = 0.0,
    ) -> None:
        """`steps` are those of the learning-rate schedule, `ema` the decay of the average."""
        self.network = network.to(world.device).eval()
        self.schedule = make_schedule(network.config.schedule)
        self.device, self.bf16 = world.device, uses_bf16(train, world.device)
        self._processes = world.size
        fsdp = shards(train, world)
        self.graphs = False
        """True where outputs of a pass lie in memory of a CUDA graph."""
        if compiles(train, world.device):
            self.graphs = train.compile == "graphs" and world.size == 1
            compile_network(self.network, sharded=fsdp, graphs=self.graphs)
        root: nn.Module = _Root(self.network)
        if fsdp or any(p.requires_grad for p in network.parameters()):
            root = parallelise(root, self.network.blocks, train.strategy, world, bf16=self.bf16)
        self._root = root
        self.updater: Updater | None = None
        if optim is not None:
            self.updater = Updater(self.network, optim, steps, ema, ema_warmup=train.ema_warmup)

    # Passes

    def run(self, function: Callable[[Any], Any]) -> Any:
        """Call a function of the network that returns tensors; every pass goes through here."""
        if not _iterating.get():  # an evaluation, which keeps nothing of a pass
            self.release()
        autocast = torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.bf16)
        with gradient_sync(self._root, _exchanging.get()), autocast:
            return self._root(function)

    def release(self) -> None:
        """Let passes that run as CUDA graphs reuse the memory of earlier ones, of all replicas."""
        if self.graphs:
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]

    def logits(self, reads: Reads, t: Tensor | float, at: Tensor) -> Tensor:
        """Logits (R, V) as `Denoiser.logits` gives them; `at` may be on the host."""
        count, at = len(at), padded(at, self.device)
        if not isinstance(t, Tensor):  # one time for all
            t = torch.full((len(reads),), t, dtype=torch.float64, device=self.device)
        sigma = self.schedule.sigma(t)
        logits: Tensor = self.run(
            lambda network: logits_at(network, reads.tokens, sigma, at, reads.attended)
        )
        return logits[:count]

    def log_probs(self, reads: Reads, t: Tensor | float, at: Tensor) -> Tensor:
        """Log-probabilities of the logits, float32."""
        return self.logits(reads, t, at).float().log_softmax(-1)

    # Learning

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradients of this process's share of a loss."""
        with gradient_sync(self._root, _exchanging.get()):
            # DDP and FSDP average over processes; the shares are already parts of a sum.
            (loss * self._processes).backward()  # type: ignore[no-untyped-call]

    def update(self, step: int) -> Tensor:
        """Apply the gradients as update `step` and clear them; return their norm."""
        assert self.updater is not None, "a network without an optimizer takes no steps"
        return self.updater.update(step)

    def drop_gradients(self) -> None:
        self.network.zero_grad(set_to_none=True)

    @property
    def ema(self) -> EMA | None:
        """The moving average of the weights, if there is one."""
        return None if self.updater is None else self.updater.ema

    @contextmanager
    def averaged(self) -> Iterator[Any]:
        """The network with its averaged weights in place, if there is an average."""
        with nullcontext() if self.ema is None else self.ema.applied():
            yield self.network

    @torch.no_grad()
    def take(self, student: "Replica", *, average: bool = False) -> None:
        """Take over the weights of a network of the same kind, or their average if it has one."""
        if average and student.ema is not None:
            student.ema.copy_to(self.network)
            return
        own = dict(student.network.named_parameters())
        for name, parameter in self.network.named_parameters():
            parameter.copy_(own[name])

    # Checkpoints

    @property
    def bytes(self) -> int:
        """Size in a checkpoint: weights alone, or with average, moments, and the model to load."""
        copies = 1 if self.updater is None else 5
        size: int = sum(p.numel() * 4 for p in self.network.parameters())
        return copies * size

    def tensors(self) -> Mapping[str, Tensor]:
        """Everything that changes, by name: weights, average, moments."""
        if self.updater is not None:
            return self.updater.tensors()
        return {name: p.detach() for name, p in self.network.named_parameters()}

    def product(self) -> dict[str, Tensor]:
        """A copy of the averaged weights and the buffers, gathered from all processes."""
        with self.averaged() as network:
            return {name: whole(t).detach().clone() for name, t in network.state_dict().items()}
