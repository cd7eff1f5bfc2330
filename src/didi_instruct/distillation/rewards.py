"""From the discriminator's log-ratios to advantages: Eq. (6) and (7) of the paper.

One sign everywhere: log-ratio is teacher over student, so the student maximises its reward.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


def rewards(log_ratio: Tensor, masked: Tensor, written: Tensor) -> Tensor:
    """Mean log-ratio over the masked positions of each text; over the written ones if none is.

    Shapes: all (B, L) -> (B,).
    """
    where = torch.where(masked.any(1, keepdim=True), masked, written)
    return torch.where(where, log_ratio, 0.0).sum(1) / where.sum(1).clamp(min=1)


@dataclass(frozen=True, slots=True)
class Advantages:
    """How much better each text did than those it is compared with."""

    values: Tensor
    """(B,)."""
    clip_fraction: Tensor
    """Share of them that was clipped."""


def advantages(
    reward: Tensor,
    group_size: int,
    *,
    baseline: str = "mean",
    scale: str = "group",
    eps: float = 1e-6,
    clip: float = 0.0,
) -> Advantages:
    """Centre rewards (B,) within groups of consecutive texts, scale, clip.

    `mean` with scale `group` standardises as in the paper (population variance); `leave-one-out`
    compares with the others of the group, so it is independent of the text's own tokens.
    """
    groups = reward.double().view(-1, group_size)
    centred = groups - groups.mean(1, keepdim=True)
    if scale == "group":
        divisor = centred.square().mean(1, keepdim=True).sqrt() + eps
    elif scale == "batch":
        divisor = centred.square().mean().sqrt() + eps
    else:
        divisor = torch.ones((), dtype=torch.float64, device=reward.device)
    if baseline == "leave-one-out":
        # r - mean of the others = (r - mean of all) * G / (G - 1)
        centred = centred * (group_size / (group_size - 1))
    values = (centred / divisor).flatten()
    if not clip:
        return Advantages(values, torch.zeros((), dtype=torch.float64, device=reward.device))
    clipped = values.clamp(-clip, clip)
    return Advantages(clipped, (clipped != values).double().mean())
