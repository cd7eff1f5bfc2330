"""Processes of a run and their devices: one, or several under `torchrun` (DDP or FSDP2)."""

import inspect
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from didi_instruct.config.train import TrainConfig
from didi_instruct.errors import UserError
from didi_instruct.models.ar import ARModel
from didi_instruct.models.compile import compiled
from didi_instruct.models.discriminator import Discriminator
from didi_instruct.models.dit import DiT
from didi_instruct.models.network import Network

CPU_TOKENS = 8192  # of a forward pass on a CPU, where a recipe does not say
PATIENCE = timedelta(days=2)  # that other processes have while the main one prepares a corpus


@dataclass(frozen=True, slots=True)
class World:
    """This process's place among all of them, and its device; all call its methods together."""

    device: torch.device
    rank: int = 0
    size: int = 1
    patient: dist.ProcessGroup | None = None  # for flags: on the CPU, so it waits for no GPU

    @property
    def is_main(self) -> bool:
        """True in the one process that reports and writes."""
        return self.rank == 0

    def share(self, count: int) -> range:
        """Return this process's rows of a global batch."""
        each = count // self.size
        return range(self.rank * each, (self.rank + 1) * each)

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over the processes, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def gather(self, tensor: Tensor) -> Tensor:
        """Join the rows of all processes in the order of their ranks; all have as many."""
        if self.size == 1:
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor.contiguous())
        return torch.cat(parts)

    def largest(self, number: int) -> int:
        """Return the largest of all processes' numbers."""
        if self.size == 1:
            return number
        shared = torch.tensor(number)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=self.patient)
        return int(shared)

    def any(self, flag: bool) -> bool:
        """Return True if the flag is set in any process."""
        return self.largest(int(flag)) > 0

    def wait(self) -> None:
        """Return when every process has come here."""
        if self.size > 1:
            dist.barrier(group=self.patient)


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
    if chosen.type not in ("cpu", "cuda"):
        raise UserError(f"`{device}` is not a device to work on. Use cpu, cuda or cuda:N.")
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise UserError("No CUDA device is here: use --device cpu.")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise UserError(f"`{device}` is not here: {torch.cuda.device_count()} CUDA devices are.")
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
    dist.init_process_group("cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo")
    patient = dist.new_group(backend="gloo", timeout=PATIENCE)
    try:
        yield World(chosen, dist.get_rank(), size, patient)
    finally:
        dist.destroy_process_group()


def uses_bf16(config: TrainConfig, device: torch.device) -> bool:
    """Return True if forward passes run in bfloat16."""
    return config.precision == "bf16" or (config.precision == "auto" and device.type == "cuda")


def compiles(config: TrainConfig, device: torch.device) -> bool:
    """Return True if networks are compiled."""
    return config.compile == "on" or (config.compile != "off" and device.type == "cuda")


def shards(config: TrainConfig, world: World) -> bool:
    """Return True if networks are sharded over processes (FSDP2)."""
    return config.strategy == "fsdp" and world.size > 1


def shards_checkpoints(config: TrainConfig, world: World) -> bool:
    """Return True if each process writes its own part of a checkpoint."""
    return shards(config, world) and config.checkpoints == "sharded"


def compile_network(
    model: Network | Discriminator | ARModel, *, sharded: bool, graphs: bool = False
) -> None:
    """Compile in place: the trunk as one graph or, where it is sharded, every block alike.

    One graph fuses across blocks (65 against 68 to 71 ms per step of `small`, 32 x 1024, on an
    H200), but FSDP gathers weights block by block. Blocks are alike, so they compile once.
    `graphs` launches the trunk's passes as CUDA graphs.
    """
    network: Any = model.trunk if isinstance(model, Discriminator) else model
    if isinstance(network, DiT) and not sharded:
        network.trunk = compiled(network.trunk, graphs=graphs)  # type: ignore[method-assign]
    else:
        for block in network.blocks:
            block.forward = compiled(block.forward)


def parallelise(
    module: nn.Module, blocks: nn.ModuleList, strategy: str, world: World, *, bf16: bool
) -> nn.Module:
    """Wrap `module`, whose transformer blocks are `blocks`, for all processes of `world`."""
    if world.size == 1:
        return module
    if strategy == "ddp":
        ids = [world.device.index] if world.device.type == "cuda" else None
        # Buffers are constants, or follow from weights that are alike everywhere.
        known = inspect.signature(DistributedDataParallel).parameters
        name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        return DistributedDataParallel(module, device_ids=ids, **{name: False})  # type: ignore[arg-type]
    mesh = init_device_mesh(world.device.type, (world.size,))
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if bf16 else None, reduce_dtype=torch.float32
    )
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    # Resharded after every forward pass: an evaluation must not leave averaged weights behind.
    fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    return module


def shard_frozen(network: nn.Module, world: World) -> None:
    """Shard weights that do not learn over all processes, layer by layer, in place (FSDP2).

    Each linear layer and embedding gathers its own, so networks that share layers may call them
    from anywhere. Weights that two layers share stay whole.
    """
    mesh = init_device_mesh(world.device.type, (world.size,))
    layers = [m for m in network.modules() if isinstance(m, (nn.Linear, nn.Embedding))]
    seen = Counter(id(layer.weight) for layer in layers)
    for layer in layers:
        if seen[id(layer.weight)] == 1:
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)


@contextmanager
def gradient_sync(module: nn.Module, enabled: bool) -> Iterator[None]:
    """Within, backward passes exchange gradients only if `enabled` (the last micro-batch)."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(enabled)
        yield
    elif isinstance(module, DistributedDataParallel) and not enabled:
        with module.no_sync():
            yield
    else:
        yield


def local(tensor: Tensor) -> Tensor:
    """Return this process's part of a sharded tensor, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor from all processes; a plain tensor is whole."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
