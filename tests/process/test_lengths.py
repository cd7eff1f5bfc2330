"""Windows of one text each: ends, laws of lengths."""

import torch

from didi_instruct.process.masking import LengthLaw, before_end, goes_on, window


def test_before_end_stops_at_the_first_end():
    tokens = torch.tensor([[5, 6, 0, 0], [0, 7, 0, 1], [5, 6, 7, 8]])
    expected = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]]).bool()
    assert torch.equal(before_end(tokens, end_id=0), expected)


def test_rows_that_go_on_after_an_end_are_told():
    assert not goes_on(torch.tensor([[5, 6, 0, 0], [5, 6, 7, 8]]), end_id=0)
    assert goes_on(torch.tensor([[5, 6, 0, 0], [5, 0, 7, 0]]), end_id=0)


def test_window_has_masks_then_ends():
    rows = window(4, 9, 0, torch.tensor([1, 4]))
    assert rows.tolist() == [[9, 0, 0, 0], [9, 9, 9, 9]]


def test_length_law_adds_one_text_to_every_length_but_none():
    law = LengthLaw([0, 3, 0, 5])
    expected = torch.tensor([4, 1, 6], dtype=torch.float64) / 11
    assert torch.allclose(law.log_prob(torch.tensor([1, 2, 3])).exp(), expected)
    assert law.mean == (4 * 1 + 1 * 2 + 6 * 3) / 11


def test_draws_follow_the_law_and_a_floor():
    law = LengthLaw([0, 3, 0, 5])
    numbers = (torch.arange(1100, dtype=torch.float64) + 0.5) / 1100
    assert law.draw(numbers).bincount().tolist() == [0, 400, 100, 600]
    assert law.draw(numbers, shortest=2).bincount(minlength=4)[:2].sum() == 0
    given = law.log_prob(torch.tensor([2, 3]), shortest=2).exp()
    assert torch.allclose(given, torch.tensor([1, 6], dtype=torch.float64) / 7)
