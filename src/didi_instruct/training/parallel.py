"""One module over several processes: replicated (DDP) or sharded (FSDP2)."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from didi_instruct.config.pretrain import Compile
from didi_instruct.models.ar import ARModel
from didi_instruct.models.compiling import compiled
from didi_instruct.models.dit import Trunk
from didi_instruct.training.world import World


def compile_network(model: Trunk | ARModel, how: Compile, *, sharded: bool) -> None:
    """Compile in place: the trunk as one graph, or every block alike.

    One graph fuses across blocks (65 against 68 to 71 ms per step of `small`, 32 x 1024, on an
    H200); FSDP gathers weights block by block, which a single graph would not let it do. Blocks are
    alike, so the compiler sees one.
    """
    if isinstance(model, Trunk) and not sharded and how != "blocks":
        model.compile_trunk(graphs=how == "graphs")
    else:
        for block in model.blocks:
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
