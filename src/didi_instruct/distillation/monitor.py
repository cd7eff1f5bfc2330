"""Numbers that tell how a distillation is doing, and the memory its gates need."""

import torch
from torch import Tensor


def unique_ngrams(tokens: Tensor, visible: Tensor, n: int = 4) -> Tensor:
    """Distinct n-grams of a batch over all of them, where every token is visible; 1 if none is.

    Falls towards 0 when texts repeat themselves or each other.

    Shapes: tokens (B, L), visible (B, L) -> 0-d float64.
    """
    if tokens.shape[1] < n:
        return torch.ones((), dtype=torch.float64, device=tokens.device)
    windows = tokens.shape[1] - n + 1
    columns = [tokens[:, k : k + windows].flatten() for k in range(n)]
    whole = torch.stack([visible[:, k : k + windows] for k in range(n)]).all(0).flatten()
    # Sorted by one column after the other, the last one first, equal n-grams are neighbours, and
    # those that are not visible stand behind. A GPU is not waited for.
    order = torch.arange(len(whole), device=tokens.device)
    for column in (*reversed(columns), (~whole).byte()):
        order = order[column[order].argsort(stable=True)]
    kept = whole[order]
    differs = torch.stack([column[order].diff() != 0 for column in columns]).any(0)
    distinct = (differs & kept[1:]).sum() + kept[:1].sum()
    total = kept.sum()
    return torch.where(total > 0, distinct.double() / total.clamp(min=1), 1.0)


class RunningMean:
    """Mean that forgets: weights 1, m, m², … backwards; saved with a checkpoint."""

    def __init__(self, memory: float = 0.95) -> None:
        self.memory = memory
        self.state = torch.zeros(2, dtype=torch.float64)
        """Weighted sum, sum of the weights."""

    def add(self, value: float) -> float:
        """Take one more number in; return the mean."""
        now = torch.tensor([value, 1.0], dtype=torch.float64)
        self.state.mul_(self.memory).add_(now, alpha=1 - self.memory)
        return float(self.state[0] / self.state[1])

    def cautious(self, prior: float) -> float:
        """The mean where what has not been seen yet counts as `prior`."""
        total, weight = self.state.tolist()
        return float(total + (1 - weight) * prior)


class Totals:
    """Sums of named numbers over the parts of a batch."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def add(self, **values: Tensor) -> None:
        """Add 0-d tensors to what there is."""
        for name, value in values.items():
            value = value.detach().double()
            self._sums[name] = self._sums[name] + value if name in self._sums else value

    def stacked(self) -> tuple[list[str], Tensor]:
        """Names, and their sums as one vector."""
        return list(self._sums), torch.stack(list(self._sums.values()))
