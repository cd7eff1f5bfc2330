"""Memory of a distillation with adapters, and the device that it needs."""

import os
from dataclasses import dataclass

import torch

from didi_instruct.adapters.lora import adapted_layers
from didi_instruct.config.distill import DistillConfig
from didi_instruct.errors import UserError
from didi_instruct.hub import memory
from didi_instruct.models.causal_lm import CAUSAL
from didi_instruct.models.network import Network
from didi_instruct.training.distributed import CPU_TOKENS, World


@dataclass(frozen=True, kw_only=True, slots=True)
class RunBudget:
    """Memory that a run will take on one device, and how much is there."""

    parts: memory.Parts
    layers: int
    """Adapted ones."""
    numbers: int
    """Of an adapter."""
    texts: int
    """Of a pass of one process."""
    length: int
    """Tokens of a text."""
    device: str
    available: int
    fits: str = ""
    """Setting with which it would fit; empty if it does, or if none would."""

    @property
    def enough(self) -> bool:
        """True if the device has as much."""
        return self.parts["total"] <= self.available

    def check(self) -> None:
        """Refuse a run that does not fit its device."""
        if self.enough:
            return
        remedy = f"{self.fits} would fit" if self.fits else "a smaller text or device does not help"
        raise UserError(
            f"{self.device} has {_gb(self.available)} GB, and this run needs "
            f"{_gb(self.parts['total'])} GB: {remedy}."
        )


def budget_of(
    config: DistillConfig, network: Network, world: World, length: int
) -> RunBudget | None:
    """Memory of a run whose texts have `length` tokens.

    None where nothing is known of the network: other than LLaDA's and Dream's, or whole weights.
    """
    if not config.lora.rank or network.record is None:
        return None
    settings = network.record.settings
    if settings["model_type"] not in CAUSAL:
        return None
    weights = list(network.parameters())
    largest = max(weights, key=torch.Tensor.numel)
    shape = memory.CausalShape.of(settings, sum(p.numel() for p in weights), largest.itemsize)
    found = adapted_layers(network, config.lora)
    sizes = [each.in_features + each.out_features for block in found for each in block.values()]
    numbers, texts = config.lora.rank * sum(sizes), _texts(config, world, length)

    def total(texts: int, rank: int = config.lora.rank) -> int:
        few = numbers // config.lora.rank * rank
        return memory.distillation(shape, config, few, texts=texts, length=length)["total"]

    available, group = _memory_of(world.device), config.group_size
    fits = ""
    if total(texts) > available:
        smaller = [n for n in (texts >> k for k in range(1, 20)) if n >= group and not n % group]
        roomy = next((n for n in smaller if total(n) <= available), None)
        ranks = [rank for rank in (32, 16, 8, 4) if rank < config.lora.rank]
        low = next((rank for rank in ranks if total(group, rank) <= available), None)
        if roomy is not None:
            fits = f"train.micro_batch={roomy} ({_gb(total(roomy))} GB)"
        elif low is not None:
            fits = f"train.micro_batch={group} with lora.rank={low} ({_gb(total(group, low))} GB)"
    return RunBudget(
        parts=memory.distillation(shape, config, numbers, texts=texts, length=length),
        layers=len(sizes),
        numbers=numbers,
        texts=texts,
        length=length,
        device=str(world.device),
        available=available,
        fits=fits,
    )


def _texts(config: DistillConfig, world: World, length: int) -> int:
    """Texts of a pass of one process: whole groups."""
    share, size = len(world.share(config.train.batch_size)), config.train.micro_batch
    if size is None:
        size = share if world.device.type == "cuda" else CPU_TOKENS // length
    group = config.group_size
    return min(share, max(group, size // group * group))


def _memory_of(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f}"
