"""Numbers that tell how a distillation is doing, and named causes when it goes wrong."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from didi_instruct.distillation.run import DistillTask

ENOUGH_TEXTS = 256  # for an average that tells a collapse
MOSTLY = 0.5  # share of steps above which something happens mostly
COLLAPSES = {
    "path_entropy": ("entropy", "nats per token"),
    "unique_4gram": ("variety", "of the 4-grams distinct"),
}
"""Name and unit of a collapse, by the metric that shows it."""


class Watcher:
    """Sees every log entry: warns once of each trouble, and stops a run that has collapsed."""

    def __init__(self, task: "DistillTask", say: Callable[[str], None]) -> None:
        self.task, self.say = task, say
        self._said: set[str] = set()
        self._step: int | None = None
        self._texts, self._variety = 0, 0.0

    def __call__(self, step: int, values: Mapping[str, float]) -> str | None:
        """Return why training must stop, or None."""
        if values.get("disc_waits", 0.0) > MOSTLY:
            self._warn(
                "saturated",
                f"step {step}: the discriminator is saturated (right at "
                f"{values['disc_sharpness']:.0%} of positions), so it waits for the student. If "
                "that lasts: lower discriminator.lr, or raise didi.rollout_steps or optim.lr.",
            )
        if values.get("at_chance", 0.0) > MOSTLY:
            self._warn(
                "chance",
                f"step {step}: the discriminator is at chance (accuracy "
                f"{values['disc_accuracy']:.2f}), so the student waits. If that lasts: raise "
                "discriminator.lr, discriminator.steps or discriminator.trainable_blocks.",
            )
        metric = self.task.entry.collapse_metric
        return None if metric is None else self._collapse(step, metric, values[metric])

    def _collapse(self, step: int, metric: str, value: float) -> str | None:
        """Compare the mean over many texts with the start; over few it swings by more than half."""
        config, start = self.task.config, float(self.task.variety_at_start)
        texts = config.train.batch_size * (1 if self._step is None else step - self._step)
        self._step, self._texts = step, self._texts + texts
        weight = texts / min(self._texts, max(ENOUGH_TEXTS, texts))
        self._variety += weight * (value - self._variety)
        few = self._texts < ENOUGH_TEXTS or step <= config.warmup
        if few or self._variety >= config.watch.min_entropy * start:
            return None
        name, unit = COLLAPSES[metric]
        return (
            f"{name} collapse, {self._variety:.3g} {unit} where it began with {start:.3g}. Try a "
            f"lower optim.lr or a higher {self.task.entry.restraint}; watch.min_entropy=0 lets it "
            "go on."
        )

    def _warn(self, cause: str, text: str) -> None:
        if cause not in self._said:
            self._said.add(cause)
            self.say(text)


def unique_ngrams(tokens: Tensor, visible: Tensor, n: int = 4) -> Tensor:
    """Return the share of distinct n-grams among the visible ones of a batch; 1 if there are none.

    It falls towards 0 when texts repeat themselves or each other. Tokens and `visible` are (B, L);
    an n-gram is visible if all its tokens are. The share is 0-d, float64.
    """
    if tokens.shape[1] < n:
        return torch.ones((), dtype=torch.float64, device=tokens.device)
    columns = [column.flatten() for column in tokens.unfold(1, n, 1).unbind(-1)]
    whole = visible.unfold(1, n, 1).all(-1).flatten()
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
    """Exponentially weighted mean; checkpoints keep its `state`."""

    def __init__(self, memory: float = 0.95) -> None:
        self.memory = memory
        self.state = torch.zeros(2, dtype=torch.float64)  # weighted sum, sum of the weights

    def add(self, value: float) -> float:
        """Add a number; return the mean."""
        now = torch.tensor([value, 1.0], dtype=torch.float64)
        self.state.mul_(self.memory).add_(now, alpha=1 - self.memory)
        return float(self.state[0] / self.state[1])

    def cautious(self, prior: float) -> float:
        """Return the mean with `prior` in place of the numbers not seen yet."""
        total, weight = self.state.tolist()
        return float(total + (1 - weight) * prior)
