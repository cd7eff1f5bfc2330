"""Trajectories against laws by enumeration: 3 tokens, 3 positions, a law for each state and time.

Chi-square tests have a false-alarm rate of `FALSE_ALARM` each.
"""

import itertools
import math

import pytest
import torch
from tests.sampling.enumeration import FALSE_ALARM, all_states, index, p_value

from didi_instruct.config.pretrain import TrainConfig
from didi_instruct.distillation.losses import score_path
from didi_instruct.distillation.replica import Replica
from didi_instruct.distillation.rollout import (
    Jump,
    Noise,
    as_denoiser,
    jump_step,
    rollout,
    row_index,
    texts_from,
    walk,
)
from didi_instruct.process.schedule import Cosine, LogLinear, make_schedule
from didi_instruct.sampling import draw as sampling_draw
from didi_instruct.sampling.ancestral import ancestral, plain
from didi_instruct.sampling.denoiser import function_denoiser
from didi_instruct.sampling.draw import DrawOptions
from didi_instruct.sampling.draw import invert as draw
from didi_instruct.sampling.state import Canvas

from .small import ALONE, Table, law_of, small_network

pytest.importorskip("scipy")
V = L = 3
MASKS = torch.full((1, L), V)
SCHEDULES = [LogLinear(0.0), LogLinear(0.2), Cosine(0.0)]
every_schedule = pytest.mark.parametrize("schedule", SCHEDULES, ids=str)


def draw_jump(log_probs, jump, numbers):
    """Tokens and log-probabilities of a jump, as a rollout draws them."""
    texts = texts_from(jump.z[jump.state], V)
    return plain(as_denoiser(log_probs))(texts, jump_step(jump, 0, numbers))


def draws(table):
    """Draws from a table's laws."""
    return plain(as_denoiser(table.log_probs))


def share(schedule, s, t=1.0):
    """Probability that a mask at t is revealed by s."""
    alpha_s, alpha_t = float(schedule.alpha(s)), float(schedule.alpha(t))
    return (alpha_s - alpha_t) / (1 - alpha_t)


def noise_of(count, seed=0, first=0):
    return Noise(seed, torch.arange(first, first + count))


def zeros(count):
    return torch.zeros(count, dtype=torch.long)


def times_of(count, *times):
    return torch.tensor(times, dtype=torch.float64).expand(count, -1)


def tau_of(count, value):
    return torch.full((count,), value, dtype=torch.float64)


def texts_of(law):
    """Law over texts of one over all states that has no masks left."""
    texts = law[(all_states(V + 1, L) < V).all(1)]
    torch.testing.assert_close(texts.sum(), torch.ones((), dtype=torch.float64))
    return texts


def path_log_prob(table, jumps, x):
    """Log-probability of all drawn tokens, text by text and position by position."""
    total = [0.0] * len(x)
    for jump in jumps:
        log_p = table(jump.z[jump.state], jump.t[jump.state])
        for text, position in jump.writes.nonzero().tolist():
            total[text] += float(log_p[text, position, x[text, position]])
    return torch.tensor(total, dtype=torch.float64)


# Walks


@every_schedule
def test_a_walk_has_the_law_of_ancestral_sampling(schedule):
    """Both follow the enumerated law of two steps over all 27 texts."""
    table, n = Table(), 20_000
    law = texts_of(law_of(table, MASKS[0], [1.0, 0.5], [share(schedule, 0.5), 1.0]))
    way = walk(draws(table), schedule, MASKS, zeros(n), times_of(n, 1, 0.5, 0), noise_of(n), V)
    denoiser, settings = function_denoiser(table, V), DrawOptions(seed=1)
    samples = ancestral(denoiser, schedule, Canvas.blank(n, L, V), steps=2, settings=settings)
    assert p_value(index(way.z, V), law) > FALSE_ALARM
    assert p_value(index(samples.tokens, V), law) > FALSE_ALARM


@every_schedule
def test_a_walk_that_stops_on_its_way_has_the_law_of_its_state(schedule):
    """Three steps to t = 0.2, over all 64 states, masks included."""
    table, n, times = Table(seed=1), 20_000, [1.0, 0.8, 0.5, 0.2]
    chances = [share(schedule, s, t) for t, s in itertools.pairwise(times)]
    law = law_of(table, MASKS[0], times[:-1], chances)
    way = walk(draws(table), schedule, MASKS, zeros(n), times_of(n, *times), noise_of(n, 3), V)
    assert p_value(index(way.z, V + 1), law) > FALSE_ALARM


def test_a_walk_knows_the_probability_of_its_tokens():
    table, n = Table(), 50
    times = times_of(n, 1, 0.6, 0.3, 0)
    way = walk(draws(table), LogLinear(0.0), MASKS, zeros(n), times, noise_of(n), V)
    expected = path_log_prob(table, way.jumps, way.z)
    torch.testing.assert_close(way.log_prob, expected, rtol=0, atol=1e-12)


def test_jumps_tell_where_each_token_was_drawn():
    """Every position once, from a state in which it was masked, at the step's time."""
    table, n = Table(), 200
    way = walk(
        draws(table),
        LogLinear(0.0),
        MASKS,
        zeros(n),
        times_of(n, 1, 0.6, 0.3, 0),
        noise_of(n),
        V,
    )
    assert torch.equal(sum(j.writes.int() for j in way.jumps), torch.ones(n, L).int())
    z = MASKS.expand(n, L)
    for jump, t in zip(way.jumps, [1.0, 0.6, 0.3], strict=True):
        assert torch.equal(jump.z[jump.state], z)
        assert bool((z[jump.writes] == V).all())
        assert torch.equal(jump.t, torch.full_like(jump.t, t))
        z = torch.where(jump.writes, way.z, z)
    assert len(way.jumps[0].z) == 1


def test_a_walk_that_stands_still_takes_no_step():
    """Texts with times of their own; those at rest on the second step have the law without it."""
    table, n = Table(), 20_000
    times = times_of(n, 1, 0.5, 0.5, 0).clone()
    times[::2, 2] = 0.25
    way = walk(draws(table), LogLinear(0.0), MASKS, zeros(n), times, noise_of(n, 4), V)
    assert not way.jumps[1].writes[1::2].any()
    assert way.jumps[1].writes[::2].any()
    still = texts_of(law_of(table, MASKS[0], [1.0, 0.5], [0.5, 1.0]))
    goes_on = texts_of(law_of(table, MASKS[0], [1.0, 0.5, 0.25], [0.5, 0.5, 1.0]))
    assert p_value(index(way.z[1::2], V), still) > FALSE_ALARM
    assert p_value(index(way.z[::2], V), goes_on) > FALSE_ALARM


# Rollouts


@every_schedule
@pytest.mark.parametrize("steps", [1, 2])
def test_a_rollout_follows_its_enumerated_law(schedule, steps):
    """K steps to z_τ, then all that is left at once from the law at τ; z_τ has its law too."""
    table, n, tau = Table(seed=2), 20_000, 0.4
    times = torch.linspace(1, tau, steps + 1, dtype=torch.float64).tolist()
    chances = [share(schedule, s, t) for t, s in itertools.pairwise(times)]
    result = rollout(
        table.log_probs, schedule, MASKS, zeros(n), tau_of(n, tau), noise_of(n, 5), V, steps=steps
    )
    before = law_of(table, MASKS[0], times[:-1], chances)
    after = texts_of(law_of(table, MASKS[0], times, [*chances, 1.0]))
    z_tau = result.jumps[-1].z[result.jumps[-1].state]
    assert len(result.jumps) == steps + 1
    assert p_value(index(z_tau, V + 1), before) > FALSE_ALARM
    assert p_value(index(result.x, V), after) > FALSE_ALARM


def test_without_tau_a_rollout_is_one_step():
    table, n = Table(), 20_000
    result = rollout(table.log_probs, LogLinear(0.0), MASKS, zeros(n), None, noise_of(n), V)
    law = texts_of(law_of(table, MASKS[0], [1.0], [1.0]))
    assert p_value(index(result.x, V), law) > FALSE_ALARM
    assert len(result.jumps) == len(table.calls) == 1
    assert [len(z) for z, _, _ in table.calls] == [1]


@pytest.mark.parametrize("steps", [None, 1, 2])
def test_the_log_probability_is_that_of_the_path(steps):
    """Against a loop over the table, and through `score_path`, which rounds the laws to float32."""
    table, n, schedule = Table(), 60, LogLinear(1e-9)
    tau = None if steps is None else tau_of(n, 0.6)
    result = rollout(
        table.log_probs, schedule, MASKS, zeros(n), tau, noise_of(n, 2), V, steps=steps or 1
    )
    expected = path_log_prob(table, result.jumps, result.x)
    torch.testing.assert_close(result.log_prob, expected, rtol=0, atol=1e-12)
    scores = score_path(table, schedule, result.jumps, result.x, [None] * len(result.jumps))
    torch.testing.assert_close(scores.log_prob, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("timed", [False, True])
@torch.no_grad()
def test_a_network_scores_its_own_draws_as_it_drew_them(timed):
    """What a network reports on the way, and what `score_path` recomputes: float32 apart."""
    network = small_network(3, time_conditioning=timed)
    schedule = make_schedule(network.config.schedule)
    denoiser = Replica(network, TrainConfig(), ALONE).log_probs
    tau = torch.linspace(0.05, 0.95, 20, dtype=torch.float64)
    masks = torch.full((1, 8), 5)
    result = rollout(denoiser, schedule, masks, zeros(20), tau, noise_of(20), 5, steps=2)
    scores = score_path(network, schedule, result.jumps, result.x, [None] * 3)
    torch.testing.assert_close(scores.log_prob, result.log_prob, rtol=1e-6, atol=1e-6)
    assert (result.log_prob < -1).all()


@every_schedule
@pytest.mark.parametrize("steps", [1, 3])
def test_a_position_stays_masked_with_the_chance_of_the_process(schedule, steps):
    """(1 - α_τ) / (1 - α_1) of 60,000 coins within 4.5 standard errors: false alarm 7e-6."""
    table, n, tau = Table(), 20_000, 0.3
    result = rollout(
        table.log_probs, schedule, MASKS, zeros(n), tau_of(n, tau), noise_of(n, 6), V, steps=steps
    )
    chance = float((1 - schedule.alpha(tau)) / (1 - schedule.alpha(1.0)))
    masked = (result.jumps[-1].z[result.jumps[-1].state] == V).double().mean().item()
    assert abs(masked - chance) < 4.5 * (chance * (1 - chance) / (n * L)) ** 0.5


@pytest.mark.parametrize(
    ("tau", "turns"), [(0.9, [(0, 1, 2)]), (0.6, [(0,), (1, 2)]), (0.3, [(0,), (2,), (1,)])]
)
def test_in_streams_a_rollout_stops_on_the_path(tau, turns):
    """Three steps write the first, the last and the middle of three; τ cuts that short.

    A quarter of a whole round is revealed in each of the first two steps, so the path stops at 1,
    0.75 and 0.5. The law is a product of conditionals, and the path's probability is exact.
    """
    table, n = Table(seed=2), 20_000
    result = rollout(
        table.log_probs, LogLinear(0.0), MASKS, zeros(n), tau_of(n, tau), noise_of(n, 5), V,
        steps=3, order="streams",
    )  # fmt: skip
    law = torch.zeros(V**L, dtype=torch.float64)
    texts = torch.cartesian_prod(*[torch.arange(V)] * L)
    for place, text in enumerate(texts):
        z, log_p = MASKS[0].clone(), 0.0
        for step, positions in enumerate(turns):
            laws = table(z[None], torch.tensor([1.0, 0.75, 0.5][step : step + 1]).double())[0]
            log_p += sum(float(draws.law_of(laws[i][None])[0, text[i]]) for i in positions)
            z = torch.where(torch.isin(torch.arange(L), torch.tensor(positions)), text, z)
        law[place] = math.exp(log_p)
    assert float(law.sum()) == pytest.approx(1)
    assert p_value(index(result.x, V), law) > FALSE_ALARM
    torch.testing.assert_close(result.log_prob.exp(), law[index(result.x, V)], rtol=1e-9, atol=0)


# Groups that share a state


def test_a_shared_group_stands_at_one_state_and_jumps_apart():
    """Pairs of a group: z_τ the same, last jumps independent given it, over all 27² pairs."""
    table, groups, tau = Table(seed=4), 20_000, 0.6
    n = 2 * groups
    result = rollout(
        table.log_probs,
        LogLinear(0.0),
        MASKS,
        zeros(n),
        tau_of(n, tau),
        noise_of(n, 8),
        V,
        shared=2,
    )
    last = result.jumps[-1]
    assert last.z.shape == (groups, L)
    assert torch.equal(last.state, torch.arange(n) // 2)
    assert torch.equal(last.writes, (last.z == V)[last.state])
    kept = ~last.writes
    assert torch.equal(result.x[kept], last.z[last.state][kept])
    law = law_of(table, MASKS[0], [1.0], [1 - tau])
    assert p_value(index(last.z, V + 1), law) > FALSE_ALARM
    finish = torch.stack([texts_of(law_of(table, z, [tau], [1.0])) for z in all_states(V + 1, L)])
    pairs = torch.einsum("z,zx,zy->xy", law, finish, finish).flatten()
    drawn = index(result.x, V).view(groups, 2)
    assert p_value(drawn[:, 0] * V**L + drawn[:, 1], pairs) > FALSE_ALARM


def test_a_shared_group_reports_the_probability_of_the_whole_path():
    table, n = Table(), 24
    result = rollout(
        table.log_probs, LogLinear(0.0), MASKS, zeros(n), tau_of(n, 0.5), noise_of(n), V, shared=4
    )
    first, last = result.jumps
    before = path_log_prob(table, [first], last.z)
    expected = before.repeat_interleave(4) + path_log_prob(table, [last], result.x)
    torch.testing.assert_close(result.log_prob, expected, rtol=0, atol=1e-12)


# Bookkeeping


def random_jump(seed, states=5, texts=11):
    """Texts that own some of the states; every state has its masks, tokens are drawn at some."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.randint(V + 1, (states, L), generator=generator)
    t = torch.rand(states, generator=generator, dtype=torch.float64)
    owner = torch.randint(states, (texts,), generator=generator)
    where = (torch.rand(texts, L, generator=generator) < 0.5) & (z == V)[owner]
    numbers = torch.rand(texts, L, generator=generator, dtype=torch.float64)
    return Jump(z, t, owner, where, z == V), numbers


@pytest.mark.parametrize("seed", range(8))
def test_jumps_equal_a_dense_loop(seed):
    """`row_index` and the draws, each against text after text, position after position."""
    table = Table(seed=seed)
    jump, numbers = random_jump(seed)
    text, position = jump.writes.nonzero(as_tuple=True)
    for selected in (jump.masked, torch.ones_like(jump.masked)):
        cells = selected.nonzero().tolist()
        expected = [cells.index([int(jump.state[b]), i]) for b, i in jump.writes.nonzero().tolist()]
        assert row_index(selected, jump.state[text], position).tolist() == expected
    dense = table(jump.z[jump.state], jump.t[jump.state])
    tokens, log_p = [], []
    for text, position in jump.writes.nonzero().tolist():
        law = draws.law_of(dense[text, position][None])
        tokens.append(int(draw(law, numbers[text, position][None])))
        log_p.append(float(law[0, tokens[-1]]))
    drawn, reported = draw_jump(table.log_probs, jump, numbers)
    assert drawn.tolist() == tokens
    torch.testing.assert_close(reported, torch.tensor(log_p).double(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("elements", [1, 7, 20])
def test_laws_made_in_pieces_are_the_same(monkeypatch, elements):
    table, (jump, numbers) = Table(), random_jump(0, texts=30)
    whole = draw_jump(table.log_probs, jump, numbers)
    monkeypatch.setattr(sampling_draw, "LAW_ELEMENTS", elements)
    for one, other in zip(whole, draw_jump(table.log_probs, jump, numbers), strict=True):
        assert torch.equal(one, other)


def test_states_from_which_nothing_is_drawn_are_not_read():
    table, (jump, numbers) = Table(), random_jump(1)
    draw_jump(table.log_probs, jump, numbers)
    ((z, t, where),) = table.calls
    reads = torch.zeros_like(jump.masked)
    for text, position in jump.writes.nonzero().tolist():
        reads[jump.state[text], position] = True
    active = reads.any(1)
    assert 0 < active.sum() < len(active)
    assert torch.equal(z, jump.z[active])
    assert torch.equal(t, jump.t[active])
    assert torch.equal(where, reads[active])


def test_a_step_that_reveals_nothing_still_reads_one_state():
    """Each step is one call, on all processes of a sharded network; nothing is written."""
    table, n = Table(), 5
    way = walk(
        draws(table), LogLinear(0.0), MASKS, zeros(n), times_of(n, 1, 1, 1, 1), noise_of(n), V
    )
    assert torch.equal(way.z, MASKS.expand(n, L))
    assert torch.equal(way.log_prob, torch.zeros(n).double())
    assert len(table.calls) == 3
    for z, t, where in table.calls:
        assert torch.equal(z, MASKS)
        assert t.tolist() == [1.0]
        assert not where.any()


@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("tau", [2.0**-24, 0.5, 1 - 2.0**-24])
def test_a_rollout_calls_its_denoiser_once_per_step(steps, tau):
    """Even if z_τ is text already, or nothing was revealed on the way to it."""
    table, n = Table(), 6
    result = rollout(
        table.log_probs,
        LogLinear(0.0),
        MASKS,
        zeros(n),
        tau_of(n, tau),
        noise_of(n),
        V,
        steps=steps,
    )
    assert len(table.calls) == len(result.jumps) == steps + 1
    assert bool((result.x < V).all())
    assert len(table.calls[0][0]) == 1
    assert all(len(z) >= 1 for z, _, _ in table.calls)


# Prompts


def test_prompts_stay_and_condition_the_rest():
    """Three prompts of one or two tokens, each with the enumerated law that starts from it."""
    table, each = Table(seed=6), 8000
    start = torch.tensor([[0, V, V], [V, 2, V], [1, V, 0]])
    owner = torch.arange(3).repeat_interleave(each)
    result = rollout(
        table.log_probs, Cosine(0.0), start, owner, tau_of(3 * each, 0.5), noise_of(3 * each, 9), V
    )
    given = (start != V)[owner]
    assert torch.equal(result.x[given], start[owner][given])
    assert torch.equal(result.written, ~given)
    assert len(table.calls[0][0]) == 3
    chance = share(Cosine(0.0), 0.5)
    for prompt in range(3):
        law = texts_of(law_of(table, start[prompt], [1.0, 0.5], [chance, 1.0]))
        assert p_value(index(result.x[owner == prompt], V), law) > FALSE_ALARM


# Parts


@pytest.mark.parametrize(("shared", "prompts"), [(1, False), (3, False), (1, True), (3, True)])
def test_a_text_does_not_depend_on_the_others_of_its_part(shared, prompts):
    """24 texts at once and in parts of whole groups: the same bits."""
    table, n, seed = Table(), 24, 11
    tau = torch.linspace(0.1, 0.9, n // 3, dtype=torch.float64).repeat_interleave(3)
    start = torch.cat([torch.arange(n // 3)[:, None] % V, MASKS[:, 1:].expand(n // 3, -1)], 1)

    def part(indices):
        own, owner = MASKS, zeros(len(indices))
        if prompts:
            own, owner = start[indices[::3] // 3], torch.arange(len(indices)) // 3
        noise = Noise(seed, indices)
        return rollout(
            table.log_probs, Cosine(0.1), own, owner, tau[indices], noise, V, steps=2, shared=shared
        )

    whole = part(torch.arange(n))
    parts = [part(indices) for indices in torch.split(torch.arange(n), [3, 9, 6, 6])]
    assert torch.equal(torch.cat([p.x for p in parts]), whole.x)
    assert torch.equal(torch.cat([p.log_prob for p in parts]), whole.log_prob)
    assert len(torch.unique(index(whole.x, V))) > 5


def test_noise_belongs_to_a_text_and_groups_have_their_own():
    noise = noise_of(12, seed=3, first=24)
    groups = noise.of_groups(4)
    assert groups.indices.tolist() == [6, 7, 8]
    assert torch.equal(noise.uniforms(5, 1, 2)[3:5], noise_of(2, 3, first=27).uniforms(5, 1, 2))
    assert not torch.equal(noise.uniforms(5, 1, 2), noise.uniforms(5, 1, 3))
    assert not torch.equal(noise.uniforms(5, 1, 2), noise_of(12, 4, first=24).uniforms(5, 1, 2))
