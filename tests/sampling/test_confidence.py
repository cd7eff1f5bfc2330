import itertools
import math

import pytest
import torch

from didi_instruct.sampling.confidence import by_confidence, rank
from didi_instruct.sampling.denoiser import function_denoiser
from didi_instruct.sampling.state import PAD, Canvas, split_padding

from .enumeration import assert_follows, index
from .toys import TINY, Toy, blank, start, toy_of

V, L = 3, 4
TOY = toy_of()
BLANK = Canvas.blank(20_000, L, V)


def even(num_tokens):
    """A denoiser that knows nothing."""
    return function_denoiser(lambda z, t: torch.zeros(*z.shape, num_tokens), num_tokens)


def sureness(p, token, order):
    """What comes first, of these numbers the highest; p is a list of probabilities."""
    if order == "confidence":
        return p[token]
    if order == "entropy":
        return sum(q * math.log(q) for q in p)
    return sorted(p)[-1] - sorted(p)[-2]


def enumerated_law(order, kept):
    """Law of the texts, and steps; of the falling values `kept(values, step)` are kept."""
    states = {(V,) * L: 1.0}
    step = 0
    while any(V in state for state in states):
        following = {}
        p = TINY.denoiser(torch.tensor(list(states))).exp().tolist()
        for row, (state, mass) in enumerate(states.items()):
            masked = [i for i in range(L) if state[i] == V]
            for tokens in itertools.product(range(V), repeat=len(masked)):
                drawn = dict(zip(masked, tokens, strict=True))
                chance = mass * math.prod(p[row][i][v] for i, v in drawn.items())
                value = {i: sureness(p[row][i], v, order) for i, v in drawn.items()}
                places = sorted(masked, key=lambda i: (-value[i], i))
                new = list(state)
                for i in places[: kept([value[i] for i in places], step)]:
                    new[i] = drawn[i]
                following[tuple(new)] = following.get(tuple(new), 0.0) + chance
        states, step = following, step + 1
    law = torch.zeros(V**L, dtype=torch.float64)
    law[index(torch.tensor(list(states)), V)] = torch.tensor(list(states.values())).double()
    return law, step


@pytest.mark.parametrize("order", ["confidence", "entropy", "margin"])
@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_a_number_of_steps_gives_the_enumerated_law(order, steps):
    result = by_confidence(TOY, start(BLANK, seed=1), steps=steps, order=order)
    shares = {1: [4], 2: [2, 2], 3: [2, 1, 1], 4: [1, 1, 1, 1]}[steps]
    law, expected = enumerated_law(order, lambda values, n: shares[n])
    assert_follows(result.tokens, law, V)
    assert (result.nfe, result.log_prob) == (expected, None)


@pytest.mark.parametrize(
    ("order", "threshold"),
    [("confidence", 0.6), ("entropy", 0.7), ("margin", 0.4),
     ("confidence", 0.0), ("confidence", 1.0), ("entropy", 10.0), ("entropy", 0.0)],
)  # fmt: skip
def test_a_threshold_gives_the_enumerated_law(order, threshold):
    result = by_confidence(TOY, start(BLANK, seed=2), threshold=threshold, order=order)
    lowest = -threshold if order == "entropy" else threshold
    law, steps = enumerated_law(order, lambda values, n: max(1, sum(v >= lowest for v in values)))
    assert_follows(result.tokens, law, V)
    assert result.nfe == steps


def test_greedy_draws_still_have_an_order():
    """One token per step, always the surest of the denoiser's own law: a greedy search by hand."""
    seen = []
    result = by_confidence(TOY, blank(2, L, V, seen.append, temperature=0.0), steps=L)
    z = torch.full((1, L), V)
    for step in seen:
        p = TINY.denoiser(z).exp()[0].masked_fill((z[0] != V)[:, None], 0.0)
        place = int(p.max(-1).values.argmax())
        assert step.revealed.nonzero()[:, 1].tolist() == [place, place]
        z[0, place] = p[place].argmax()
        torch.testing.assert_close(step.confidence[0, place], p.max())
    assert torch.equal(result.tokens, z.expand(2, L))


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 7, 9])
def test_masks_are_spread_evenly_over_the_steps(steps):
    """Shares differ by one at most and the larger come first; a text with fewer masks rests."""
    tokens, seen = torch.tensor([[9] * 7, [9, 9, 9, 1, 1, 9, 9]]), []
    state = start(Canvas(tokens, 9, torch.arange(2)), seen.append)
    result = by_confidence(even(9), state, steps=steps)
    assert result.nfe == len(seen) == steps
    assert result.passes <= steps
    for row, masks in enumerate([7, 5]):
        shares = [int(step.revealed[row].sum()) for step in seen]
        assert sum(shares) == masks
        assert max(shares) - min(shares) <= 1
        assert shares == sorted(shares, reverse=True)


def test_equals_are_taken_from_the_left():
    seen = []
    by_confidence(even(5), blank(3, 6, 5, seen.append), steps=6)
    assert [step.revealed.nonzero()[:, 1].tolist() for step in seen] == [[n] * 3 for n in range(6)]
    value = torch.tensor([[0.5, 0.9, 0.5, 0.9]])
    masked = torch.tensor([[True, True, True, False]])
    assert rank(value, masked).tolist() == [[1, 0, 2, 3]]


def test_the_denoiser_is_told_the_masked_share_of_each_text():
    z, seen = torch.tensor([[5, 5, 1, 1], [5, 1, PAD, PAD], [PAD] * 4]), Toy(num_tokens=5)
    seen.function = lambda z, t: torch.zeros(*z.shape, 5)
    assert split_padding(z).masked_share(5).tolist() == [0.5, 0.5, 0.0]
    by_confidence(seen, start(Canvas(z, 5, torch.arange(3))), steps=2)
    assert [t.tolist() for _, t in seen.asked] == [[0.5, 0.5], [0.25]]
