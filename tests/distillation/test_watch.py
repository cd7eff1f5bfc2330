"""Numbers of how a distillation is doing, and what a collapse is told from."""

import pytest
import torch

from didi_instruct.distillation.methods import METHODS
from didi_instruct.distillation.watch import (
    COLLAPSES,
    ENOUGH_TEXTS,
    RunningMean,
    Watcher,
    unique_ngrams,
)

from .small import make_task

DRAWING = [name for name, entry in METHODS.items() if entry.collapse_metric]


def watched(method, start):
    changes = {"watch": {"min_entropy": 0.5}, "train": {"batch_size": ENOUGH_TEXTS}}
    task = make_task(method, changes)
    task.variety_at_start.fill_(start)
    return Watcher(task, lambda text: pytest.fail(text)), task.config.warmup + 1


@pytest.mark.parametrize("method", DRAWING)
def test_only_the_collapse_metric_counts(method):
    """Half of the start is enough, a little less is a collapse; the other number says nothing."""
    watcher, step = watched(method, 2.0)
    own = METHODS[method].collapse_metric
    (other,) = set(COLLAPSES) - {own}
    assert watcher(step, {own: 1.0, other: 0.0}) is None
    watcher, _ = watched(method, 2.0)
    reason = watcher(step, {own: 0.99, other: 9.0})
    what, unit = COLLAPSES[own]
    assert reason.startswith(f"{what} collapse, 0.99 {unit} where it began with 2. ")
    assert f"a higher {METHODS[method].restraint}; watch.min_entropy=0" in reason


def test_few_texts_tell_nothing():
    task = make_task("token-matching", {"train": {"batch_size": 64}})
    task.variety_at_start.fill_(2.0)
    watcher = Watcher(task, lambda text: pytest.fail(text))
    found = [watcher(step, {"path_entropy": 0.1}) for step in range(1, 6)]
    assert found[:3] == [None] * 3, "192 of 256 texts"
    assert "entropy collapse" in found[3]


def test_each_trouble_is_told_once():
    lines, trouble = [], {"path_entropy": 2.0, "disc_sharpness": 0.9, "disc_accuracy": 0.5}
    watcher = Watcher(make_task("didi"), lines.append)
    for step in range(1, 4):
        assert watcher(step, trouble | {"disc_waits": 0.5, "at_chance": 0.5}) is None
    assert lines == [], "half is not mostly"
    for step in range(4, 7):
        assert watcher(step, trouble | {"disc_waits": 0.6, "at_chance": 0.6}) is None
    assert [line.partition("(")[0] for line in lines] == [
        "step 4: the discriminator is saturated ",
        "step 4: the discriminator is at chance ",
    ]


def by_sets(tokens, visible, n):
    grams = [
        tuple(row[i : i + n])
        for row, seen in zip(tokens.tolist(), visible.tolist(), strict=True)
        for i in range(len(row) - n + 1)
        if all(seen[i : i + n])
    ]
    return len(set(grams)) / len(grams) if grams else 1.0


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize(("num", "hidden"), [(2, 0.0), (3, 0.1), (3, 0.5), (50_000, 0.1)])
def test_unique_ngrams_are_those_of_a_set(n, num, hidden):
    generator = torch.Generator().manual_seed(n)
    tokens = torch.randint(num, (6, 11), generator=generator)
    tokens[4] = tokens[1]
    visible = torch.rand(6, 11, generator=generator) >= hidden
    assert unique_ngrams(tokens, visible, n).item() == pytest.approx(by_sets(tokens, visible, n))


def test_ids_too_large_for_a_product_stay_apart():
    """Four ids below 2^20 as one number of 64 bits: the first would count modulo 16 alone."""
    tokens = torch.tensor([[0, 0, 0, 0], [16, 0, 0, 0], [0, 0, 0, 2**20 - 1]])
    assert unique_ngrams(tokens, torch.ones_like(tokens, dtype=torch.bool)).item() == 1.0


def test_a_running_mean_weighs_the_past_less_and_less():
    """Weights 1, m, m², … backwards, normalised, from the first number on; so after a resume."""
    values, mean = [0.3, 0.9, 0.1, 0.7], RunningMean(0.8)
    for count in range(1, 5):
        weights = [0.8**age for age in range(count)][::-1]
        expected = sum(w * v for w, v in zip(weights, values, strict=False)) / sum(weights)
        assert mean.add(values[count - 1]) == pytest.approx(expected, abs=1e-14)
    unseen = 0.8**4
    assert mean.cautious(0.5) == pytest.approx((1 - unseen) * expected + unseen * 0.5, abs=1e-14)
    resumed = RunningMean(0.8)
    resumed.state.copy_(mean.state)
    assert resumed.add(0.9) == mean.add(0.9)
