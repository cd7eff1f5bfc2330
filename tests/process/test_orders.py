"""Orders in which positions are revealed."""

import itertools

import pytest
import torch

from didi_instruct.process.masking import (
    interleaved_numbers,
    interleaved_plan,
    interleaved_shares,
    interleaved_turns,
)


def test_eight_streams_by_hand():
    """Heads in two steps, then to the right, then the sixth, then those around it."""
    assert interleaved_plan(8) == (0, 2, 3, 4, 5, 7, 6, 7, 1, 2, 3, 4, 5, 7, 6, 7)
    assert [16 * share for share in interleaved_shares(8)] == [0, 1, 2, 4, 6, 8, 10, 12, 16]


@pytest.mark.parametrize("steps", range(1, 40))
def test_every_step_has_its_turn_and_neighbours_never_share_one(steps):
    plan = interleaved_plan(steps)
    assert set(plan) == set(range(steps))
    assert (interleaved_shares(steps)[0], interleaved_shares(steps)[-1]) == (0, 1)
    around = itertools.pairwise([*plan, plan[0]])
    together = sum(a == b for a, b in around)
    assert together == {1: 1, 2: 2}.get(steps, 0)


def test_only_open_positions_are_counted():
    """What is given does not begin a stream; turns of given positions mean nothing."""
    open = torch.tensor([[0, 0, 1, 1, 0, 1, 1, 1], [1] * 8]).bool()
    found = interleaved_turns(open, 4)
    assert found[0][open[0]].tolist() == [0, 3, 2, 3, 1]
    assert found[1].tolist() == [0, 3, 2, 3, 1, 3, 2, 3]


def test_numbers_fall_into_the_shares_of_their_steps():
    open, steps = torch.ones(3, 33, dtype=torch.bool), torch.tensor([4, 8, 5])
    found = interleaved_numbers(open, steps, (4, 5, 8))
    for row, count in zip(found, steps.tolist(), strict=True):
        edges = torch.tensor(interleaved_shares(count), dtype=torch.float64)
        step = torch.searchsorted(edges, row, right=True) - 1
        assert torch.equal(step, interleaved_turns(open[:1], count)[0])
