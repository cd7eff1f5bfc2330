"""What the AR-entropy bound and the two-sample test learn with: splits, and when to stop."""

import math

import pytest
import torch
from torch import nn

from didi_instruct.errors import TrainingError
from didi_instruct.evaluation import probes
from didi_instruct.evaluation.probes import Learner, Split, ask, fit


def learner(**changes):
    settings = {
        "layers": 1, "hidden": 16, "heads": 2, "steps": 400, "batch_size": 16, "lr": 0.05,
        "seed": 0,
    }  # fmt: skip
    return Learner(**settings | changes)


class Table(nn.Module):
    """A number per row, drawn towards its target: what it learns of one says nothing of others."""

    def __init__(self, targets):
        super().__init__()
        self.guess, self.targets = nn.Parameter(torch.zeros(len(targets))), targets

    def loss(self, rows):
        return (self.guess[rows] - self.targets[rows]).square()


@pytest.mark.parametrize("count", [64, 100, 999])
def test_a_split_is_a_partition(count):
    split = Split.draw(count, seed=4)
    assert torch.cat(split).sort().values.tolist() == list(range(count))
    assert len(split.held_out) == round(0.2 * count)
    assert len(split.valid) == round(0.1 * count)
    assert split.train.tolist() != Split.draw(count, seed=5).train.tolist()
    ordered = Split.in_order(count)
    assert torch.cat(ordered).tolist() == list(range(count))
    assert [len(part) for part in ordered] == [len(part) for part in split]


def test_training_ends_when_the_validation_has_turned_however_many_steps_are_planned():
    """A line through the origin, best at half of the slope that fits the rows it learns from.

    Validation falls, then rises for good: the best step is found, and 5 looks of 20 steps later
    all is over, where 20 looks in 100,000 steps would see the first one at step 5,000.
    """
    split, slope = Split.draw(100, seed=0), nn.Linear(1, 1, bias=False)
    nn.init.zeros_(slope.weight)
    learned = torch.full((100,), 2.0)
    learned[split.valid] = 1.0

    def loss(rows):
        return (slope.weight[0, 0] - learned[rows]).square() + 0.1

    seen = []
    best = fit(slope, loss, split, learner(steps=100_000, lr=0.02), 999, seen.append)
    assert slope.weight.item() == pytest.approx(1, abs=0.3)
    assert best <= len(seen) <= best + 20 * (5 + 3)
    assert len(seen) < 400


def test_the_network_is_left_as_it_validated_best(monkeypatch):
    """Rows that are learned by heart: validation never falls below where it began."""
    split = Split.draw(100, seed=1)
    table = Table(torch.randn(100, generator=torch.Generator().manual_seed(2)))
    looks = []
    monkeypatch.setattr(probes, "ask", lambda *args: looks.append(ask(*args)) or looks[-1])
    best = fit(table, table.loss, split, learner(steps=60), 7, None)
    found = [look.mean().item() for look in looks]
    assert best == 3 * (1 + found.index(min(found)))
    assert ask(table.loss, split.valid, 7).mean().item() == pytest.approx(min(found))
    assert table.guess[split.held_out].abs().max() == 0, "never learned from"


def test_a_loss_that_is_never_a_number_is_said():
    split, table = Split.draw(100, seed=0), Table(torch.full((100,), math.nan))
    with pytest.raises(TrainingError, match="use a lr below"):
        fit(table, table.loss, split, learner(steps=5), 99, None)
