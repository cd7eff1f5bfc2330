import pytest
import torch

from didi_instruct.errors import UserError
from didi_instruct.process.masking import LengthLaw
from didi_instruct.sampling.denoiser import function_denoiser
from didi_instruct.sampling.infill import (
    Ending,
    Gap,
    Template,
    gap_lengths,
    parse_gaps,
    split_infill,
    stack,
)
from didi_instruct.sampling.state import PAD

MASK = 7


def counting(z, t):
    """A language in which position i holds token i mod 7: text has one right place."""
    place = torch.arange(z.shape[1]).expand_as(z) % 7
    return torch.full((*z.shape, 7), -20.0).scatter_(-1, place[..., None], 0.0)


COUNTING = function_denoiser(counting, 7)


def lengths_of(template, samples, seed=0, **options):
    """Lengths of the gaps in the language that counts, and passes."""
    return gap_lengths(template, COUNTING, MASK, seed, torch.as_tensor(samples), **options)


def test_infill_texts_are_cut_at_their_gaps():
    assert split_infill("Once ___ a time") == ["Once", " a time"]
    assert split_infill("___b____c") == ["", "b", "c"]
    with pytest.raises(UserError, match="no gap"):
        split_infill("Once upon __ a time")
    with pytest.raises(UserError, match="two gaps in a row"):
        split_infill("Once ___ ___ time")


def test_gaps_are_fixed_ranged_or_chosen():
    assert [parse_gaps(text, 1) for text in ("8", "4-12")] == [[Gap(8, 8)], [Gap(4, 12)]]
    assert parse_gaps("8", 2) == [Gap(8, 8)] * 2
    assert parse_gaps("8, 4-12", 2) == [Gap(8, 8), Gap(4, 12)]
    chosen = parse_gaps("auto,auto:2-5,auto:3", 3)
    assert chosen == [Gap(1, 16, chosen=True), Gap(2, 5, chosen=True), Gap(3, 3, chosen=True)]
    for text in ("", "x", "0", "5-2", "-3", "auto5-", "auto:"):
        with pytest.raises(UserError, match=r"gap|--gap"):
            parse_gaps(text, 1)
    with pytest.raises(UserError, match=r"--gap 1,2,3 has 3 gaps, the text 2"):
        parse_gaps("1,2,3", 2)


def test_rows_hold_given_tokens_and_masks_and_are_padded_at_the_end():
    template = Template([[1, 2], [5]], [Gap(1, 3)])
    rows = [template.lay_out([n], MASK) for n in (1, 3)]
    assert rows == [[1, 2, MASK, 5], [1, 2, MASK, MASK, MASK, 5]]
    assert stack(rows).tolist()[0] == [1, 2, MASK, 5, PAD, PAD]


def test_gaps_shrink_to_the_window():
    template = Template([[1, 2], [5], []], [Gap(1, 9, chosen=True), Gap(2, 9, chosen=True)])
    assert template.fit(10).gaps == [Gap(1, 3, chosen=True), Gap(2, 4, chosen=True)]
    assert template.fit(6).gaps == [Gap(1, 1, chosen=True), Gap(2, 2, chosen=True)]
    with pytest.raises(UserError, match="may have 11 tokens, the model reads 10"):
        Template([[1, 2], []], [Gap(1, 9)]).fit(10)
    with pytest.raises(UserError, match="has 6 tokens or more, the model reads 5"):
        template.fit(5)


@pytest.mark.parametrize("right", [1, 2, 5])
def test_a_model_chooses_the_length_that_fits_what_follows(right):
    """Tokens after the gap are right in one place only."""
    following = [(2 + right + i) % 7 for i in range(3)]
    template = Template([[0, 1], following], [Gap(1, 6, chosen=True)])
    assert lengths_of(template, range(20)) == ([[right]] * 20, 6)


def test_a_ranged_gap_is_drawn_evenly_and_belongs_to_the_sample():
    """4 lengths, 4,000 samples: binomial, 4.5 standard errors (7e-6 each)."""
    template = Template([[0], [1]], [Gap(2, 5)])
    lengths, passes = lengths_of(template, range(4000), seed=3)
    assert passes == 0
    counts = torch.bincount(torch.tensor(lengths).flatten())[2:]
    assert ((counts - 1000).abs() < 4.5 * (4000 * 0.25 * 0.75) ** 0.5).all()
    assert lengths_of(template, [17], seed=3)[0] == [lengths[17]]


def test_several_gaps_and_none_after_the_last():
    """After the last gap the end of text testifies; without one the length is drawn evenly."""
    template = Template([[], [3], []], [Gap(2, 2), Gap(1, 4, chosen=True)])
    lengths, _ = lengths_of(template, range(50))
    assert {a for a, _ in lengths} == {2}
    assert {b for _, b in lengths} == {1, 2, 3, 4}
    lengths, passes = lengths_of(template, range(50), eot_id=6)
    assert {b for _, b in lengths} == {3}
    assert passes == 4


def test_lengths_of_texts_have_a_say_where_they_have_windows():
    """No end is written there: the law of lengths alone decides the last gap, for no pass."""
    law = LengthLaw([0, 0, 0, 10**9, 0, 0, 0])
    template = Template([[0], []], [Gap(1, 5, chosen=True)], Ending(law, 6, 6))
    found = lengths_of(template, range(50), eot_id=6)
    assert found == ([[2]] * 50, 0)
