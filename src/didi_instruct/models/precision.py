"""In which type numbers are kept, whatever autocast or the weights' type."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn


def upcast(x: Tensor) -> Tensor:
    """Return x in float32, or in float64 if it is float64 already."""
    return x if x.dtype == torch.float64 else x.float()


def reads(layer: nn.Module) -> torch.dtype:
    """Type of what a linear layer takes in: it may keep its weights in another."""
    own: torch.dtype = getattr(layer, "reads", None) or layer.weight.dtype  # type: ignore[assignment]
    return own


def product_dtype(weight: Tensor) -> torch.dtype:
    """The type in which a product with a weight is made."""
    kind = weight.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return weight.dtype


def no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which operations keep the precision of their arguments."""
    if device.type == "meta":  # where autocast does not exist
        return nullcontext()
    return torch.autocast(device.type, enabled=False)
