import itertools
import math

import pytest
import torch

from didi_instruct.data.oracle import OracleLanguage
from didi_instruct.errors import UserError
from didi_instruct.sampling.chain import PAD, Canvas, Draw, masked_share
from didi_instruct.sampling.ordered import ordered, rank

from .enumeration import assert_follows, index

V, L = 3, 4


def sureness(p, token, order):
    """What comes first, of these numbers the highest; p is a list of probabilities."""
    if order == "confidence":
        return p[token]
    if order == "entropy":
        return sum(q * math.log(q) for q in p)
    return sorted(p)[-1] - sorted(p)[-2]


def enumerated_law(language, order, kept):
    """Law of the texts; `kept(values, step)` says how many of the falling values are kept."""
    states = {(V,) * L: 1.0}
    step = 0
    while any(V in state for state in states):
        following = {}
        p = language.denoiser(torch.tensor(list(states))).exp().tolist()
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
    for state, mass in states.items():
        law[index(torch.tensor([state]), V)] = mass
    return law


@pytest.mark.parametrize("order", ["confidence", "entropy", "margin"])
@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_a_number_of_steps_gives_the_enumerated_law(order, steps):
    language = OracleLanguage.tiny()
    canvas = Canvas.blank(20_000, L, V)
    result = ordered(language.denoiser, canvas, steps=steps, order=order, settings=Draw(seed=1))
    shares = {1: [4], 2: [2, 2], 3: [2, 1, 1], 4: [1, 1, 1, 1]}[steps]
    law = enumerated_law(language, order, lambda values, n: shares[n])
    assert_follows(result.tokens, law, V)
    assert result.nfe == steps
    assert result.log_prob is None


@pytest.mark.parametrize(
    ("order", "threshold"), [("confidence", 0.6), ("entropy", 0.7), ("margin", 0.4)]
)
def test_a_threshold_gives_the_enumerated_law(order, threshold):
    language = OracleLanguage.tiny()
    canvas = Canvas.blank(20_000, L, V)
    result = ordered(
        language.denoiser, canvas, threshold=threshold, order=order, settings=Draw(seed=2)
    )
    lowest = -threshold if order == "entropy" else threshold
    law = enumerated_law(
        language, order, lambda values, n: max(1, sum(v >= lowest for v in values))
    )
    assert_follows(result.tokens, law, V)
    assert 1 < result.nfe <= L


def test_greedy_draws_still_have_an_order():
    """One token per step, always the surest of the denoiser's own law: a greedy search by hand."""
    language = OracleLanguage.tiny()
    seen = []
    canvas = Canvas.blank(2, L, V)
    greedy = Draw(temperature=0.0)
    result = ordered(language.denoiser, canvas, steps=L, settings=greedy, callback=seen.append)
    z = torch.full((1, L), V)
    for step in seen:
        p = language.denoiser(z).exp()[0].masked_fill((z[0] != V)[:, None], 0.0)
        place = int(p.max(-1).values.argmax())
        assert step.revealed.nonzero()[:, 1].tolist() == [place, place]
        z[0, place] = p[place].argmax()
        torch.testing.assert_close(step.confidence[0, place], p.max())
    assert torch.equal(result.tokens, z.expand(2, L))


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 7, 9])
def test_masks_are_spread_evenly_over_the_steps(steps):
    """Shares differ by one at most and the larger come first; a text with fewer masks rests."""
    tokens = torch.tensor([[9] * 7, [9, 9, 9, 1, 1, 9, 9]])
    seen = []

    def denoiser(z, t):
        return torch.zeros(*z.shape, 9)

    result = ordered(
        denoiser, Canvas(tokens, 9, torch.arange(2)), steps=steps, callback=seen.append
    )
    assert result.nfe == len(seen) == steps
    assert result.passes <= steps
    for row, masks in enumerate([7, 5]):
        shares = [int(step.revealed[row].sum()) for step in seen]
        assert sum(shares) == masks
        assert max(shares) - min(shares) <= 1
        assert shares == sorted(shares, reverse=True)


def test_equals_are_taken_from_the_left():
    seen = []

    def denoiser(z, t):
        return torch.zeros(*z.shape, 5)

    ordered(denoiser, Canvas.blank(3, 6, 5), steps=6, callback=seen.append)
    assert [step.revealed.nonzero()[:, 1].tolist() for step in seen] == [[n] * 3 for n in range(6)]
    value = torch.tensor([[0.5, 0.9, 0.5, 0.9]])
    masked = torch.tensor([[True, True, True, False]])
    assert rank(value, masked).tolist() == [[1, 0, 2, 3]]


def test_extreme_thresholds_take_one_step_and_one_token_at_a_time():
    language = OracleLanguage.tiny()
    for order, threshold, nfe in [
        ("confidence", 0.0, 1),
        ("confidence", 1.0, L),
        ("entropy", 10.0, 1),
        ("entropy", 0.0, L),
    ]:
        canvas = Canvas.blank(8, L, V)
        result = ordered(language.denoiser, canvas, threshold=threshold, order=order)
        assert result.nfe == nfe
        assert result.passes <= nfe


def test_the_denoiser_is_told_the_masked_share_of_each_text():
    z = torch.tensor([[5, 5, 1, 1], [5, 1, PAD, PAD], [PAD] * 4])
    assert masked_share(z, 5).tolist() == [0.5, 0.5, 0.0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "steps or a threshold"),
        ({"steps": 2, "threshold": 0.5}, "steps or a threshold"),
        ({"steps": 2, "order": "random"}, "`random` is not an order"),
        ({"threshold": 1.5}, "threshold is 1.5"),
        ({"threshold": math.nan}, "threshold is nan"),
        ({"threshold": -0.1, "order": "entropy"}, "threshold is -0.1"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        ordered(None, Canvas.blank(1, L, V), **arguments)
