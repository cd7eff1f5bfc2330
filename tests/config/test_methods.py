"""Rounds of SDTT and DUO: whole ones where their length is said, shared evenly where not."""

import pytest

from didi_instruct.config.methods import DuoConfig, Rounds, SdttConfig


@pytest.mark.parametrize(("count", "total"), [(1, 1), (3, 3), (7, 7), (7, 9), (7, 1000), (5, 64)])
def test_iterations_are_shared_evenly_and_in_order(count, total):
    """Every round is there, one after the other, and none has two iterations above another."""
    rounds = Rounds(count, total)
    places = [rounds.of(step) for step in range(total)]
    assert places == sorted(places)
    sizes = [places.count(number) for number in range(count)]
    assert sum(sizes) == total
    assert max(sizes) - min(sizes) <= 1
    begun = [step for step in range(total) if rounds.begins(step)]
    assert begun == [places.index(number) for number in range(1, count)]


@pytest.mark.parametrize("kind", [SdttConfig, DuoConfig])
def test_rounds_of_a_said_length_are_those_of_whole_division(kind):
    rounds = kind(steps=64, iterations=20).rounds(100)
    assert rounds.count == 5
    assert [rounds.of(step) for step in range(100)] == [step // 20 for step in range(100)]


@pytest.mark.parametrize(
    ("settings", "total", "count"),
    [
        (SdttConfig(), 1000, 7),
        (SdttConfig(), 3, 3),
        (SdttConfig(steps=16), 1000, 4),
        (DuoConfig(), 1000, 5),
        (DuoConfig(), 2, 2),
        (DuoConfig(steps=4), 1000, 3),
    ],
)
def test_unsaid_rounds_are_the_published_ones_or_as_many_as_can_be(settings, total, count):
    assert settings.rounds(total).count == count
