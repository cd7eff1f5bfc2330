"""Budgets that a student learns to write in, and the steps of their paths."""

import torch
from torch import Tensor

from didi_instruct.config.model import Order
from didi_instruct.process.masking import interleaved_times
from didi_instruct.process.schedule import Schedule


def path_times(
    budgets: tuple[int, ...],
    where: Tensor,
    order: Order = "random",
    schedule: Schedule | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Walks to a random step of a random budget, chosen by `where` (U,) in [0, 1).

    Steps are equally long, or as the order asks for under the schedule. Returns the times of the
    walks (U, K + 1), K the same for all; start and end of the step that follows, (U,) each; and the
    budgets (U,).
    """
    place = where * len(budgets)
    which = place.long().clamp(max=len(budgets) - 1)
    budget = torch.tensor(budgets, device=where.device)[which]
    done = ((place - which) * budget).long().clamp(max=budget - 1)
    steps = torch.arange(max(budgets), device=where.device)
    size = max(budgets) + 1
    rows = [_times(count, order, schedule) for count in budgets]
    padded = [row + [0.0] * (size - len(row)) for row in rows]
    table = torch.tensor(padded, dtype=torch.float64, device=where.device)[which]
    times = table.gather(1, torch.minimum(steps, done[:, None]))
    t, after = table.gather(1, torch.stack([done, done + 1], 1)).unbind(1)
    return times, t, after, budget


def _times(steps: int, order: Order, schedule: Schedule | None) -> list[float]:
    """Times of a path in as many steps, from 1 to 0."""
    if order == "streams":
        assert schedule is not None, "how much is masked at a time depends on the schedule"
        return interleaved_times(schedule, steps)
    return [1 - n / steps for n in range(steps + 1)]
