"""Exponential moving average of a model's parameters."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from didi_instruct.models.dit import Trunk


def warmed_up(decay: float, step: int) -> float:
    """Return the decay at `step` (from 0): min(decay, (1 + step) / (10 + step)).

    A constant 0.9999 would still be 94% of the starting point after 600 steps.
    """
    return min(decay, (1 + step) / (10 + step))


def _local(tensor: Tensor) -> Tensor:
    """Return this process's part of a sharded tensor (DTensor), or the tensor itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        if hasattr(source, "full_tensor") and not hasattr(target, "to_local"):
            source = source.full_tensor()  # a sharded average into a whole model
        _local(target).copy_(_local(source))


class EMA:
    """Shadow copies, in float32, of all parameters of a model.

    The copies of sharded parameters (FSDP2) are sharded alike, and are updated shard by shard.
    """

    def __init__(self, model: nn.Module, decay: float = 0.9999) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"decay is {decay}: use 0 or more and less than 1")
        self.decay = decay
        self._model = model
        self.shadow: dict[str, Tensor] = {
            name: p.detach().to(torch.float32, copy=True) for name, p in model.named_parameters()
        }

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move the shadow towards the parameters: s ← d·s + (1 − d)·p with d of `warmed_up`."""
        shadows = [_local(s) for s in self.shadow.values()]
        values = [_local(p.detach()).float() for p in self._matching(self._model)]
        torch._foreach_lerp_(shadows, values, 1 - warmed_up(self.decay, step))

    @torch.no_grad()
    def copy_to(self, model: nn.Module) -> None:
        """Overwrite the parameters of a model with the averages."""
        _copy(self._matching(model), list(self.shadow.values()))
        _unfold(model)

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """Use the averages inside the block; the model's own parameters are back after it."""
        parameters = self._matching(model)
        own = [p.detach().clone() for p in parameters]
        try:
            self.copy_to(model)
            yield
        finally:
            with torch.no_grad():
                _copy(parameters, own)
            _unfold(model)

    def _matching(self, model: nn.Module) -> list[Tensor]:
        parameters = dict(model.named_parameters())
        if parameters.keys() != self.shadow.keys():
            differing = sorted(parameters.keys() ^ self.shadow.keys())
            raise ValueError(f"the average is of another model: {', '.join(differing[:3])}")
        return [parameters[name] for name in self.shadow]


def _unfold(model: nn.Module) -> None:
    """Drop constants that were folded from the weights just replaced."""
    for module in model.modules():
        if isinstance(module, Trunk):
            module.unfold()
