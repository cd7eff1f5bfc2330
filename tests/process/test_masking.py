"""Times, orders and lengths of the masked process; its equations are in `test_processes`."""

import itertools
import math

import pytest
import torch

from didi_instruct.process.masking import (
    LengthLaw,
    before_end,
    goes_on,
    interleaved_numbers,
    interleaved_plan,
    interleaved_shares,
    interleaved_times,
    interleaved_turns,
    posterior,
    reveal_probability,
    revealed_shares,
    stratified_times,
    window,
    with_code,
)
from didi_instruct.process.schedule import Cosine, LogLinear

from .reference import V


@pytest.mark.parametrize("mask_id", [V, 50257])
def test_mask_id_is_free(mask_id):
    """The id of the mask does not change the posterior, nor the type of its numbers."""
    p_x, z_t = torch.full((1, 2, V), 1 / V), torch.tensor([[1, mask_id]])
    alpha_s, alpha_t = torch.tensor([[[0.75]], [[0.5]]], dtype=torch.float64)
    found = posterior(z_t, p_x, alpha_s, alpha_t, mask_id)
    expected = torch.tensor([[0, 1, 0, 0], [1 / 6, 1 / 6, 1 / 6, 1 / 2]])
    torch.testing.assert_close(found[0], expected)


def test_reveal_probability_at_the_ends():
    """1 in the step to s = 0 (bit for bit), 0 for s = t, defined where nothing is masked."""
    alpha_t = torch.tensor([0.0, 0.3, 0.999, 1.0])
    assert reveal_probability(torch.ones(4), alpha_t).tolist() == [1.0] * 4
    assert reveal_probability(alpha_t, alpha_t).tolist() == [0.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize("schedule", [LogLinear(1e-3), Cosine(0.0)], ids=str)
def test_revealed_shares_are_of_what_time_1_masks(schedule):
    """From 0 at time 1 to 1 at time 0, bit for bit; between, 1 - masked / masked at time 1."""
    times = torch.tensor([1.0, 0.6, 0.2, 0.0], dtype=torch.float64)
    found, masked = revealed_shares(schedule, times), 1 - schedule.alpha(times)
    assert (found[0], found[-1]) == (0, 1)
    torch.testing.assert_close(found, 1 - masked / masked[0])


def test_masks_alone_carry_a_code():
    z = torch.tensor([[1, 7], [7, 7]])
    assert with_code(z, 7, 2).tolist() == [[1, 9], [9, 9]]
    assert with_code(z, 7, torch.tensor([0, 3])).tolist() == [[1, 7], [10, 10]]


class TestStratifiedTimes:
    @pytest.mark.parametrize("count", [1, 2, 7, 64])
    def test_they_fill_every_stratum_once(self, count):
        """Exactly one time in each [i / n, (i + 1) / n), float32, strictly inside (0, 1)."""
        generator = torch.Generator().manual_seed(7)
        for _ in range(20):
            t = stratified_times(count, generator)
            assert t.dtype == torch.float32
            assert bool(((t > 0) & (t < 1)).all())
            assert (t.double() * count).floor().long().sort().values.tolist() == list(range(count))

    def test_they_are_those_of_their_generator(self):
        """The same again, whatever else is drawn meanwhile."""
        one, other = (stratified_times(64, torch.Generator().manual_seed(9)) for _ in range(2))
        assert torch.equal(one, other)

    def test_they_never_round_to_an_end(self, monkeypatch):
        for number in (0.0, 1 - 2.0**-53):
            offsets = torch.tensor([number], dtype=torch.float64)
            monkeypatch.setattr(torch, "rand", lambda *_, offsets=offsets, **__: offsets)
            t = stratified_times(1, torch.Generator())
            assert 0 < t < 1
            assert 0 < 1 - t < 1

    def test_each_is_uniform_and_in_random_order(self):
        """The first row's time is uniform: mean and variance within 5 standard errors (1e-6)."""
        generator = torch.Generator().manual_seed(8)
        first = torch.stack([stratified_times(8, generator)[0] for _ in range(4000)]).double()
        assert abs(first.mean() - 1 / 2) < 5 * math.sqrt(1 / 12 / 4000)
        assert abs(first.var() - 1 / 12) < 5 * math.sqrt(1 / 180 / 4000)


class TestStreams:
    def test_eight_by_hand(self):
        """Heads in two steps, then to the right, then the sixth, then those around it."""
        assert interleaved_plan(8) == (0, 2, 3, 4, 5, 7, 6, 7, 1, 2, 3, 4, 5, 7, 6, 7)
        assert [16 * share for share in interleaved_shares(8)] == [0, 1, 2, 4, 6, 8, 10, 12, 16]

    def test_few_by_hand(self):
        """The second of two steps writes all but heads; three begin with the heads of two."""
        assert interleaved_plan(2) == (0, 1, 1, 1)
        assert interleaved_plan(3) == (0, 2, 1, 2)

    @pytest.mark.parametrize("steps", range(1, 40))
    def test_every_step_has_its_turn_and_neighbours_never_share_one(self, steps):
        plan = interleaved_plan(steps)
        assert set(plan) == set(range(steps))
        assert (interleaved_shares(steps)[0], interleaved_shares(steps)[-1]) == (0, 1)
        together = sum(a == b for a, b in itertools.pairwise([*plan, plan[0]]))
        assert together == {1: 1, 2: 2}.get(steps, 0)

    @pytest.mark.parametrize("steps", [1, 2, 3, 8])
    @pytest.mark.parametrize("schedule", [LogLinear(0.1), Cosine(1e-3)], ids=str)
    def test_its_times_mask_as_much_as_its_steps_leave(self, schedule, steps):
        times = interleaved_times(schedule, steps)
        shares = revealed_shares(schedule, torch.tensor(times, dtype=torch.float64))
        expected = torch.tensor(interleaved_shares(steps), dtype=torch.float64)
        torch.testing.assert_close(shares, expected, rtol=0, atol=1e-12)
        assert (times[0], times[-1]) == (1.0, 0.0)

    def test_only_open_positions_are_counted(self):
        """What is given does not begin a stream; turns of given positions mean nothing."""
        open = torch.tensor([[0, 0, 1, 1, 0, 1, 1, 1], [1] * 8]).bool()
        found = interleaved_turns(open, 4)
        assert found[0][open[0]].tolist() == [0, 3, 2, 3, 1]
        assert found[1].tolist() == [0, 3, 2, 3, 1, 3, 2, 3]

    def test_numbers_fall_into_the_shares_of_their_steps(self):
        open, steps = torch.ones(3, 33, dtype=torch.bool), torch.tensor([4, 8, 5])
        found = interleaved_numbers(open, steps, (4, 5, 8))
        for row, count in zip(found, steps.tolist(), strict=True):
            edges = torch.tensor(interleaved_shares(count), dtype=torch.float64)
            step = torch.searchsorted(edges, row, right=True) - 1
            assert torch.equal(step, interleaved_turns(open[:1], count)[0])


class TestWindows:
    def test_a_text_stops_at_its_first_end(self):
        tokens = torch.tensor([[5, 6, 0, 0], [0, 7, 0, 1], [5, 6, 7, 8]])
        expected = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]]).bool()
        assert torch.equal(before_end(tokens, end_id=0), expected)
        assert [goes_on(row[None], end_id=0) for row in tokens] == [False, True, False]
        assert goes_on(tokens, end_id=0)

    def test_a_window_has_masks_then_ends(self):
        rows = window(4, 9, 0, torch.tensor([1, 4]))
        assert rows.tolist() == [[9, 0, 0, 0], [9, 9, 9, 9]]

    def test_one_text_is_added_to_every_length_but_none(self):
        found = LengthLaw([0, 3, 0, 5]).log_prob(torch.tensor([1, 2, 3])).exp()
        assert torch.allclose(found, torch.tensor([4, 1, 6], dtype=torch.float64) / 11)

    def test_draws_follow_the_law_and_a_floor(self):
        law = LengthLaw([0, 3, 0, 5])
        numbers = (torch.arange(1100, dtype=torch.float64) + 0.5) / 1100
        assert law.draw(numbers).bincount().tolist() == [0, 400, 100, 600]
        assert law.draw(numbers, shortest=2).bincount().tolist() == [0, 0, 157, 943]
        given = law.log_prob(torch.tensor([2, 3]), shortest=2).exp()
        assert torch.allclose(given, torch.tensor([1, 6], dtype=torch.float64) / 7)

    def test_the_extreme_numbers_draw_the_extreme_lengths(self):
        """No text is empty, and none is longer than the longest."""
        law, edges = LengthLaw([0, 3, 0, 5]), torch.tensor([0, 1 - 2.0**-53], dtype=torch.float64)
        assert law.draw(edges).tolist() == [1, 3]
        assert law.draw(edges, shortest=2).tolist() == [2, 3]
