"""Trajectories and their scores against laws by enumeration: 3 tokens, 3 positions.

Chi-square tests have a false-alarm rate of `FALSE_ALARM` each. Reveals follow from frozen noise: a
position is written by time s once its number is below the share that s reveals.
"""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.sampling.enumeration import FALSE_ALARM, p_value

from didi_instruct.distillation.losses import score_path
from didi_instruct.distillation.rollout import rollout, walk
from didi_instruct.process.masking import revealed_shares
from didi_instruct.process.schedule import Cosine, LogLinear
from didi_instruct.sampling.draw import Noise, Purpose, law_of

from .small import law
from .tables import MASK, STATES, TEXTS, L, V, state_index, table, text_index, texts_of, walked_law

MASKS = torch.full((1, L), MASK)
LINEAR = LogLinear(0.0)
SCHEDULES = [LINEAR, LogLinear(0.2), Cosine(0.0)]
every_schedule = pytest.mark.parametrize("schedule", SCHEDULES, ids=str)


def share(schedule, s, t=1.0):
    """Probability that a mask at t is revealed by s."""
    alpha_s, alpha_t = schedule.alpha(torch.tensor([s, t], dtype=torch.float64)).tolist()
    return (alpha_s - alpha_t) / (1 - alpha_t)


def noise_of(count, seed=0, first=0):
    return Noise(seed, torch.arange(first, first + count))


def zeros(count):
    return torch.zeros(count, dtype=torch.long)


def same(count, *values):
    """The same times for all texts: (count,), or (count, K) if there are several."""
    times = torch.tensor(values, dtype=torch.float64).expand(count, -1)
    return times.squeeze(1) if len(values) == 1 else times


def rolled(network, n, tau, schedule=LINEAR, seed=5, **options):
    """A rollout of `n` texts from all masks."""
    tau = None if tau is None else same(n, tau)
    noise = noise_of(n, seed)
    return rollout(network.draw, schedule, MASKS, zeros(n), tau, noise, MASK, **options)


def walked(network, schedule, times, noise):
    """A walk from all masks along `times` (n, K + 1)."""
    order = noise.uniforms(L, Purpose.REVEAL)
    return walk(network.draw, schedule, MASKS, zeros(len(times)), times, order, noise, MASK)[0]


def fits(x, law_of_texts):
    return p_value(text_index(x), law_of_texts) > FALSE_ALARM


def follow(network, schedule, start, stops, noise, x):
    """Log-probability (B,) of x (B, L), text by text, and the states that each stop is left from.

    Shapes: start (B, L), stops (B, K), of which the last one writes all.
    """
    order = noise.uniforms(L, Purpose.REVEAL)
    shares = revealed_shares(schedule, stops)
    shares = torch.cat([shares, torch.full((len(x), 1), 2.0)], 1)
    total, states, z = torch.zeros(len(x), dtype=torch.float64), [], start
    for k in range(stops.shape[1]):
        states.append(z)
        log_p = network.law(z, stops[:, k])
        after = torch.where((start == MASK) & (order < shares[:, k + 1, None]), x, z)
        written = (z == MASK) & (after != MASK)
        total += (log_p.gather(-1, x[..., None]).squeeze(-1) * written).sum(1)
        z = after
    assert torch.equal(z, x)
    return total, states


# Laws


@every_schedule
@pytest.mark.parametrize("times", [(1, 0.5, 0), (1, 0.8, 0.5, 0.2)], ids=["to text", "on the way"])
def test_a_walk_follows_its_enumerated_law(schedule, times):
    """Over all 64 states: those of ancestral sampling, masks included."""
    network, n = table(1), 20_000
    chances = [share(schedule, s, t) for t, s in itertools.pairwise(times)]
    way = walked(network, schedule, same(n, *times), noise_of(n, 3))
    expected = walked_law(network, MASKS[0], times[:-1], chances)
    assert p_value(state_index(way.z), expected) > FALSE_ALARM


def test_a_walk_that_stands_still_takes_no_step():
    """Texts with times of their own; those at rest on the second step have the law without it."""
    network, n = table(), 20_000
    times = same(n, 1, 0.5, 0.5, 0).clone()
    times[::2, 2] = 0.25
    way = walked(network, LINEAR, times, noise_of(n, 4))
    still = walked_law(network, MASKS[0], [1.0, 0.5], [0.5, 1.0])
    goes_on = walked_law(network, MASKS[0], [1.0, 0.5, 0.25], [0.5, 0.5, 1.0])
    assert fits(way.z[1::2], texts_of(still))
    assert fits(way.z[::2], texts_of(goes_on))
    assert not fits(way.z[1::2], texts_of(goes_on))


@every_schedule
@pytest.mark.parametrize("steps", [1, 2])
def test_a_rollout_follows_its_enumerated_law(schedule, steps):
    """K steps to z_τ, then all that is left at once from the law at τ; z_τ has its law too."""
    network, n, tau = table(2), 20_000, 0.4
    times = torch.linspace(1, tau, steps + 1, dtype=torch.float64).tolist()
    chances = [share(schedule, s, t) for t, s in itertools.pairwise(times)]
    result = rolled(network, n, tau, schedule, steps=steps)
    assert fits(result.x, texts_of(walked_law(network, MASKS[0], times, [*chances, 1.0])))
    z, t, _ = network.calls[-1]
    assert bool((t == tau).all())
    # States that are text already may not be read: those come together, as the first cell.
    place = torch.full((n,), int(state_index(torch.zeros(L, dtype=torch.long))))
    left = state_index(z[(z == MASK).any(1)])
    place[: len(left)] = left
    before = walked_law(network, MASKS[0], times[:-1], chances)
    whole = (STATES == MASK).any(1)
    before = torch.where(whole, before, 0.0).index_fill(0, place[-1:], float(before[~whole].sum()))
    assert p_value(place, before) > FALSE_ALARM


def test_without_tau_a_rollout_is_one_step():
    network = table()
    result = rolled(network, 20_000, None)
    assert fits(result.x, texts_of(walked_law(network, MASKS[0], [1.0], [1.0])))
    assert [len(z) for z, _, _ in network.calls] == [1]


@pytest.mark.parametrize(
    ("tau", "turns"), [(0.9, [(0, 1, 2)]), (0.6, [(0,), (1, 2)]), (0.3, [(0,), (2,), (1,)])]
)
def test_in_streams_a_rollout_stops_on_the_path(tau, turns):
    """Three steps write the first, the last and the middle of three; τ cuts that short.

    A quarter of a whole round is revealed in each of the first two steps, so the path stops at 1,
    0.75 and 0.5. The law is a product of conditionals, and the path's probability is exact.
    """
    network = table(2)
    result = rolled(network, 20_000, tau, steps=3, order="streams")
    expected = torch.zeros(len(TEXTS), dtype=torch.float64)
    for place, text in enumerate(TEXTS):
        z, log_p = MASKS[0].clone(), 0.0
        for step, positions in enumerate(turns):
            laws = network.law(z[None], torch.tensor([1.0, 0.75, 0.5][step : step + 1]).double())[0]
            log_p += sum(float(law_of(laws[i][None])[0, text[i]]) for i in positions)
            z = torch.where(torch.isin(torch.arange(L), torch.tensor(positions)), text, z)
        expected[place] = math.exp(log_p)
    assert float(expected.sum()) == pytest.approx(1)
    assert fits(result.x, expected)
    own = expected[text_index(result.x)]
    torch.testing.assert_close(result.log_prob.exp(), own, rtol=1e-9, atol=0)


def test_a_shared_group_stands_at_one_state_and_jumps_apart():
    """Pairs of a group: z_τ the same, last jumps independent given it, over all 27² pairs."""
    network, groups, tau = table(4), 20_000, 0.6
    result = rolled(network, 2 * groups, tau, seed=8, shared=2)
    assert len(network.calls[-1][0]) <= groups
    before = walked_law(network, MASKS[0], [1.0], [1 - tau])
    finish = torch.stack([texts_of(walked_law(network, z, [tau], [1.0])) for z in STATES])
    pairs = torch.einsum("z,zx,zy->xy", before, finish, finish).flatten()
    drawn = text_index(result.x).view(groups, 2)
    assert p_value(drawn[:, 0] * len(TEXTS) + drawn[:, 1], pairs) > FALSE_ALARM


def test_prompts_stay_and_condition_the_rest():
    """Three prompts of one or two tokens, each with the enumerated law that starts from it."""
    network, each, chance = table(6), 8000, share(Cosine(0.0), 0.5)
    start = torch.tensor([[0, V, V], [V, 2, V], [1, V, 0]])
    owner, n = torch.arange(3).repeat_interleave(each), 3 * each
    given_noise = same(n, 0.5), noise_of(n, 9), MASK
    result = rollout(network.draw, Cosine(0.0), start, owner, *given_noise)
    assert torch.equal(result.written, (start == MASK)[owner])
    assert len(network.calls[0][0]) == 3
    for prompt in range(3):
        expected = texts_of(walked_law(network, start[prompt], [1.0, 0.5], [chance, 1.0]))
        assert fits(result.x[owner == prompt], expected)


# Bookkeeping


@st.composite
def trips(draw):
    """Starts with some masks, texts that own them in any order, times, groups, a seed."""
    shared = draw(st.integers(1, 3))
    count = shared * draw(st.integers(1, 4))
    starts = draw(st.lists(st.sampled_from(STATES.tolist()), min_size=1, max_size=3))
    owner = [draw(st.integers(0, len(starts) - 1)) for _ in range(count // shared)]
    times = st.sampled_from([2.0**-24, 0.1, 0.5, 0.9, 1 - 2.0**-24])
    tau = [draw(times) for _ in owner]
    groups = torch.arange(count) // shared
    return (
        torch.tensor(starts),
        torch.tensor(owner)[groups],
        torch.tensor(tau, dtype=torch.float64)[groups],
        draw(st.integers(0, 2**20)),
        draw(st.integers(1, 3)),
        shared,
    )


@law
@given(trips())
def test_any_rollout_is_that_of_single_texts(trip):
    """Whatever it shares: probability, scores, calls; the same bits in parts, and from copies.

    Each step is one call, which reads distinct states where they are masked, and one at least, so
    that all processes of a sharded network call alike.
    """
    start, owner, tau, seed, steps, shared = trip
    noise, schedule = noise_of(len(owner), seed), LogLinear(1e-9)
    options = {"steps": steps, "shared": shared}
    network, dense = table(), table()
    result = rollout(network.draw, schedule, start, owner, tau, noise, MASK, **options)
    assert torch.equal(result.written, (start == MASK)[owner])
    assert torch.equal(result.x[~result.written], start[owner][~result.written])
    assert bool((result.x < V).all())

    group = torch.arange(len(owner)) // shared
    of_group = Noise(seed, (noise.samples[::shared] // shared)[group])
    fractions = torch.linspace(0, 1, steps + 1, dtype=torch.float64)
    stops = 1 + (tau[:, None] - 1) * fractions
    expected, states = follow(network, schedule, start[owner], stops, of_group, result.x)
    torch.testing.assert_close(result.log_prob, expected, rtol=0, atol=1e-6)

    for some in (slice(0, shared), slice(shared, None)):
        if len(owner[some]):  # a text does not depend on the others of its part
            given_noise = tau[some], Noise(seed, noise.samples[some]), MASK
            part = rollout(dense.draw, schedule, start, owner[some], *given_noise, **options)
            assert torch.equal(part.x, result.x[some])
            assert torch.equal(part.log_prob, result.log_prob[some])

    calls = network.calls[: steps + 1]
    assert len(network.calls) == len(calls)
    for (z, t, where), state, stop in zip(calls, states, stops.unbind(1), strict=True):
        assert len(z) >= 1
        assert bool((z[where] == MASK).all())
        known = {(*row.tolist(), time) for row, time in zip(state, stop.tolist(), strict=True)}
        assert {(*row.tolist(), time) for row, time in zip(z, t.tolist(), strict=True)} <= known
    assert len(calls[0][0]) <= len(start)
    assert len(calls[-1][0]) <= len(owner) // shared
    if shared == 1:
        scores = score_path(network, schedule, result.jumps, result.x, [None] * (steps + 1))
        torch.testing.assert_close(scores.log_prob.detach(), expected, rtol=0, atol=1e-4)
        everyone = torch.arange(len(owner))
        copies = rollout(dense.draw, schedule, start[owner], everyone, tau, noise, MASK, **options)
        assert torch.equal(copies.x, result.x)
        assert torch.equal(copies.log_prob, result.log_prob)


def test_states_from_which_nothing_is_drawn_are_not_read():
    """Of 400 texts that are nearly written when they stop, the last call reads the others."""
    network = table()
    result = rolled(network, 400, 0.1)
    order = noise_of(400, 5).uniforms(L, Purpose.REVEAL)
    left = (order >= share(LINEAR, 0.1)).any(1)
    assert len(network.calls[-1][0]) == left.sum() < 200
    assert torch.equal(result.x[left][network.calls[-1][0] != MASK],
                       network.calls[-1][0][network.calls[-1][0] != MASK])  # fmt: skip


@law
@given(st.integers(0, 2**30), st.integers(0, 1000), st.integers(1, 4), st.integers(1, 5))
def test_noise_belongs_to_a_text_and_groups_have_their_own(seed, first, size, count):
    noise = noise_of(3 * size, seed, first * size)
    assert noise.of_groups(size).samples.tolist() == [first, first + 1, first + 2]
    numbers = noise.uniforms(count, 1, 2)
    assert numbers.shape == (3 * size, count)
    assert bool(((numbers >= 0) & (numbers < 1)).all())
    alone = noise_of(1, seed, first * size + 2)
    assert torch.equal(numbers[2:3], alone.uniforms(count, 1, 2))
    others = noise.uniforms(count, 1, 3), noise_of(3 * size, seed + 1, first * size)
    assert not torch.equal(numbers, others[0])
    assert not torch.equal(numbers, others[1].uniforms(count, 1, 2))
