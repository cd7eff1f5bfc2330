"""Shapes of models, and lengths of texts as people write them."""

import pytest
import torch

from didi_instruct.config.distill import DistillConfig
from didi_instruct.config.model import NEVER, ModelConfig, law_of_lengths, read_lengths
from didi_instruct.config.schema import parse
from didi_instruct.errors import UserError
from didi_instruct.process.masking import LengthLaw


@pytest.mark.parametrize(
    ("text", "expected"),
    [("3-6", {3, 4, 5, 6}), ("5", {5}), ("2, 7,4", {2, 4, 7}), ("8-8", {8}), ("2,2,4", {2, 4})],
)
def test_lengths_are_drawn_evenly_and_no_others(text, expected):
    """Probabilities are 1 / K exactly on the lengths named, and 0 elsewhere."""
    assert set(read_lengths(text)) == expected
    law = LengthLaw(law_of_lengths(text, 9))
    found = law.log_prob(torch.arange(10)).exp()
    exact = [1 / len(expected) if n in expected else 0 for n in range(10)]
    assert found.tolist() == pytest.approx(exact, rel=1e-15, abs=0)
    numbers = torch.linspace(0, 1 - 1e-9, 1001, dtype=torch.float64)
    assert set(law.draw(numbers).tolist()) == expected
    assert law.allows(torch.arange(10)).nonzero().squeeze(1).tolist() == sorted(expected)


@pytest.mark.parametrize(
    "text", ["", "0", "0-5", "6-3", "a", "3-", "-3", "3-5,9", "3;4", "1.5", "3,,4", "1e2"]
)
def test_what_names_no_lengths_is_refused(text):
    with pytest.raises(UserError, match=r"give a range \(100-500\) or a list"):
        read_lengths(text)


@pytest.mark.parametrize("text", ["1-10", "10,3", "1-999999999"])
def test_lengths_beyond_the_model_are_refused(text):
    with pytest.raises(UserError, match="the model reads at most 9 tokens"):
        law_of_lengths(text, 9)


def test_a_model_knows_the_longest_text_that_it_draws():
    """Its windows are as wide; counted lengths may be any that the model reads."""
    shape = {"layers": 1, "hidden": 8, "heads": 2, "vocab_size": 9, "length": 9, "end_id": 0}
    assert ModelConfig(**shape, lengths=law_of_lengths("2-5", 9)).longest == 5
    assert ModelConfig(**shape, lengths=(0, 3, 1, *[0] * 7)).longest == 9
    assert ModelConfig(**shape | {"end_id": None}).longest == 9
    for lengths in ((NEVER,) * 10, (0,) * 10, (1, *[NEVER] * 9), (-2, *[1] * 9)):
        with pytest.raises(UserError, match="has to count the texts of 0 to 9 tokens"):
            ModelConfig(**shape, lengths=lengths)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lengths": "500-100"}, "give a range"),
        ({"lengths": "data"}, "lengths=data takes those of real text: name it"),
        (
            {"method": "duo", "lengths": "3-5", "data": {"source": "x"}},
            "texts of method=duo fill their windows",
        ),
        (
            {"lengths": "3-5", "data": {"source": "x"}, "reference": {"source": "data"}},
            "compares with texts of the data's lengths: use lengths=data",
        ),
    ],
)
def test_a_recipe_says_lengths_that_its_texts_can_have(values, message):
    with pytest.raises(UserError, match=message):
        parse(DistillConfig, values, where="recipe")


def test_a_whole_number_of_yaml_is_a_length():
    assert parse(DistillConfig, {"lengths": 100}, where="recipe").lengths == "100"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 0}, "layers is 0"),
        ({"hidden": 100, "heads": 3}, "whole, even width"),
        ({"dropout": 1.0}, "dropout"),
        ({"vocab_size": 1}, "vocab_size"),
    ],
)
def test_impossible_shapes_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        ModelConfig(**changes)
