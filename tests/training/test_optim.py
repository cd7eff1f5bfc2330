import math

import pytest
import torch
from torch import nn

from didi_instruct.config.train import OptimConfig
from didi_instruct.training.optim import Updater, learning_rate, make_optimizer


def test_schedules_start_and_end_where_they_should():
    cosine = OptimConfig(lr=1.0, schedule="cosine", warmup=10, final=0.1)
    assert learning_rate(0, 110, cosine) == pytest.approx(0.1)
    assert learning_rate(9, 110, cosine) == 1.0
    assert learning_rate(10, 110, cosine) == 1.0
    assert learning_rate(60, 110, cosine) == pytest.approx(0.1 + 0.9 * 0.5)
    assert learning_rate(110, 110, cosine) == pytest.approx(0.1)
    linear = OptimConfig(lr=1.0, schedule="linear")
    assert [learning_rate(s, 4, linear) for s in range(5)] == [1.0, 0.75, 0.5, 0.25, 0.0]
    constant = OptimConfig(lr=1.0, schedule="constant", final=0.0)
    assert learning_rate(99, 100, constant) == 1.0


def test_vectors_are_not_decayed():
    model = nn.Linear(3, 3)
    groups = make_optimizer(model, OptimConfig(weight_decay=0.5)).param_groups
    assert [(len(g["params"]), g["weight_decay"]) for g in groups] == [(1, 0.5), (1, 0.0)]


def test_an_update_is_clipped_adamw():
    """The first AdamW step moves every weight by lr, whatever the gradient; clipping is by norm."""
    model = nn.Linear(4, 1, bias=False)
    before = model.weight.detach().clone()
    config = OptimConfig(lr=0.1, schedule="constant", weight_decay=0.0, clip=1.0)
    updater = Updater(model, config, steps=10, ema=0.0)
    model.weight.grad = torch.tensor([[3.0, -4.0, 0.0, 0.0]])
    assert updater.update(0).item() == pytest.approx(5.0)
    moved = model.weight.detach() - before
    torch.testing.assert_close(moved, torch.tensor([[-0.1, 0.1, 0.0, 0.0]]), atol=1e-6, rtol=0)
    assert model.weight.grad is None
    assert updater.ema is None


def test_zero_clips_nothing():
    model = nn.Linear(2, 1, bias=False)
    updater = Updater(model, OptimConfig(clip=0.0), steps=1, ema=0.0)
    model.weight.grad = torch.full((1, 2), 1e6)
    assert math.isclose(updater.update(0).item(), 1e6 * 2**0.5, rel_tol=1e-6)
