"""Plans: what each step reads and writes, by which numbers, and that nobody waits for them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.pretend_gpu import pretended

from didi_instruct.errors import UserError
from didi_instruct.process.schedule import Cosine, LogLinear
from didi_instruct.sampling import draw as draws
from didi_instruct.sampling.ancestral import ancestral
from didi_instruct.sampling.denoiser import LogitsDenoiser
from didi_instruct.sampling.draw import DrawOptions, Noise, Purpose
from didi_instruct.sampling.guide import Guidance
from didi_instruct.sampling.guided import read_all_masks, rgas
from didi_instruct.sampling.plan import (
    make_plan,
    random_turns,
    reveal_chances,
    step_codes,
    step_where,
    time_grid,
)
from didi_instruct.sampling.state import Canvas, State

from .toys import MASK, L, V, canvases, law

seeds = st.integers(0, 2**20)


def random_turn(canvas, steps, seed):
    """A turn for every position, those that are not written too."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(steps, canvas.tokens.shape, generator=generator)


def check_step(step, n, write, z, noise, masks):
    """A step writes what it should, by its own numbers and codes, and reads what it writes."""
    batch, length = z.shape
    assert step.index == n
    assert sorted(step.writes.tolist()) == write.flatten().nonzero().flatten().tolist()
    u = noise.uniforms(length, Purpose.TOKEN, n).flatten()
    assert torch.equal(step.u, u[step.writes])
    assert len(step.reads.unique()) == len(step.reads)
    if not len(step.writes):
        assert len(step.reads) == 0
        return
    states = torch.arange(batch) if step.states is None else step.states
    read = step.reads if step.row is None else step.reads[step.row]
    assert torch.equal(read % length, step.writes % length)
    text, owner = step.writes // length, states[read // length]
    assert torch.equal(z[owner], z[text])
    assert (step.codes is None) == (masks == 1)
    if masks > 1:
        codes = step_codes(noise, n, masks)[text]
        assert torch.equal(step.codes[read // length], codes)
    if step.row is None:
        assert torch.equal(owner, text)
        assert torch.equal(states, text.unique())
    else:
        distinct = 1 if masks == 1 else len(codes.unique())
        assert states.tolist() == [states[0]] * distinct
        assert len(step.reads) == distinct * len((step.writes % length).unique())


def are_alike(canvas, rows):
    both = torch.stack([canvas.tokens, canvas.open.long()], -1)[rows]
    return len(rows) > 1 and bool((both == both[:1]).all())


@law
@given(canvases(masks=(1, 2)), st.integers(1, 5), seeds, st.booleans())
def test_a_plan_writes_every_open_position_once_at_its_turn(canvas, steps, seed, begun):
    """And the first step that writes reads texts that are alike once, but for those begun."""
    state, turn = State(canvas, DrawOptions(seed=seed)), random_turn(canvas, steps, seed)
    times = [1.0, *torch.linspace(0.9, 0, steps).tolist()]
    plan = make_plan(state, turn, times, begun=begun)
    assert [step.time for step in plan] == times[:-1] == [step.t for step in plan]
    first = True
    for n, step in enumerate(plan):
        write = canvas.open & (turn == n)
        check_step(step, n, write, canvas.tokens, state.noise, canvas.masks)
        rows = write.any(1).nonzero().squeeze(1)
        assert (step.row is not None) == (first and not begun and are_alike(canvas, rows))
        first = first and not len(rows)
    order = torch.cat([step.writes for step in plan])
    assert order.sort().values.tolist() == canvas.open.flatten().nonzero().flatten().tolist()


@law
@given(canvases(masks=(1, 2)), st.integers(0, 9), seeds)
def test_a_single_step_writes_where_a_mask_says(canvas, n, seed):
    """From texts that are alike, one is read."""
    generator, state = torch.Generator().manual_seed(seed), State(canvas, DrawOptions(seed=seed))
    write = canvas.open & (torch.rand(canvas.tokens.shape, generator=generator) < 0.4)
    rows = write.any(1).nonzero().squeeze(1)
    for begun in (False, True):
        step = step_where(state, n, 0.5, write, begun=begun)
        check_step(step, n, write, canvas.tokens, state.noise, canvas.masks)
        assert step.t == 0.5
        assert (step.row is not None) == (not begun and are_alike(canvas, rows))


@law
@given(canvases(masks=(1, 2)), st.integers(1, 5), seeds, st.booleans())
def test_a_tilting_step_reads_all_masks_of_its_texts_and_first_those_it_writes(
    canvas, steps, seed, nothing
):
    """Of texts that write something alone; a step with h = 0 stays as it was."""
    times = [1.0, *torch.linspace(0.9, 0, steps).tolist()]
    turn = torch.where(canvas.open, random_turn(canvas, steps, seed), -1)
    plan = make_plan(State(canvas, DrawOptions(seed=seed)), turn, times, begun=canvas.masks > 1)
    scales = [0.0 if nothing and n == 0 else 2.0 for n in range(steps)]
    for n, (step, old) in enumerate(zip(read_all_masks(plan, turn, scales), plan, strict=True)):
        assert torch.equal(step.writes, old.writes)
        if not scales[n] or not len(old.writes):
            assert step is old
            continue
        states = torch.arange(len(turn)) if step.states is None else step.states
        found = (
            torch.zeros(len(states), L, dtype=torch.bool).view(-1).index_fill(0, step.reads, True)
        )
        assert len(step.reads) == found.sum()
        assert torch.equal(found.view(-1, L), turn[states] >= n)
        read = step.reads[: len(step.writes)] if step.row is None else step.reads[step.row]
        assert torch.equal(read % L, step.writes % L)
        if step.row is None:
            assert torch.equal(states[read // L], step.writes // L)


# Turns and times


@law
@given(st.integers(1, 30), seeds, st.sampled_from([1, 40, 2**21]))
def test_a_position_is_revealed_by_the_first_coin_that_allows_it(steps, seed, room):
    """Bit for bit, made ahead for few steps or for many."""
    noise = Noise(seed, torch.tensor([4, 0, 9]), (7,))
    chances = reveal_chances(LogLinear(0.0), time_grid("cosine", steps))
    kept, draws.NOISE_ELEMENTS = draws.NOISE_ELEMENTS, room
    try:
        turns = random_turns(noise, chances, 5)
    finally:
        draws.NOISE_ELEMENTS = kept
    expected = torch.full((3, 5), -1)
    for n in reversed(range(steps)):
        expected[noise.uniforms(5, Purpose.REVEAL, n) < chances[n]] = n
    assert torch.equal(turns, expected)
    assert int(turns.min()) >= 0


@pytest.mark.parametrize("num", [1, 2, 4])
@pytest.mark.parametrize("room", [1, 100, 2**21])
def test_numbers_of_candidates_are_those_made_in_time(num, room, monkeypatch):
    """Bit for bit; the first candidate has those of ancestral sampling."""
    monkeypatch.setattr(draws, "NOISE_ELEMENTS", room)
    noise = Noise(5, torch.tensor([4, 0, 9]), (7,))
    for purpose in (Purpose.REVEAL, Purpose.TOKEN):
        made = torch.cat(list(noise.of_steps(purpose, range(3, 9), 5, num)))
        streams = [[(purpose, n), *((purpose, n, m) for m in range(1, num))] for n in range(3, 9)]
        expected = [torch.stack([noise.uniforms(5, *s) for s in each]) for each in streams]
        assert torch.equal(made, torch.stack(expected))


@pytest.mark.parametrize("grid", ["uniform", "cosine", [1.0, 0.9, 0.2, 0.0]])
def test_grids_run_from_one_to_zero(grid):
    times = time_grid(grid, 3)
    assert (len(times), times[0], times[-1]) == (4, 1.0, 0.0)
    assert times == sorted(times, reverse=True)
    for schedule in (LogLinear(1e-3), Cosine(0.0)):
        chances = reveal_chances(schedule, times)
        assert chances[-1] == 1.0
        assert all(0 <= chance <= 1 for chance in chances)


def test_the_cosine_grid_takes_short_steps_first():
    assert time_grid("cosine", 3) == pytest.approx([1.0, 3**0.5 / 2, 0.5, 0.0])


@pytest.mark.parametrize("grid", ["linear", [1.0, 0.0], [1.0, 0.5, 0.6, 0.0], [0.9, 0.5, 0.2, 0.0]])
def test_other_grids_are_refused(grid):
    with pytest.raises(UserError, match="time grid"):
        time_grid(grid, 3)


# Waits


class OnGpu:
    """A guide without a network: every token has its worth."""

    num_tokens = V

    def __init__(self):
        self.table = torch.arange(V * V, device="cuda", dtype=torch.float64).view(V, V).sin()

    def denoiser(self):
        return LogitsDenoiser(lambda reads, t, at: self.table[at % V], V)

    def vectors(self, columns):
        return self.table

    def log_ratio(self, reads, t):
        return reads.tokens.double()

    def gradient(self, reads, t, mixture, counted):
        return mixture.vectors.sin()


@pytest.mark.parametrize(
    ("guidance", "each"),
    [(None, 0), (Guidance(split=1.0), 0), (Guidance(split=0.0, candidates=2), 1)],
    ids=["ancestral", "tilting", "re-ranking"],
)
@pytest.mark.parametrize("order", ["random", "streams"])
def test_no_step_of_a_plan_waits_for_a_gpu_and_one_of_reranking_once(
    guidance, each, order, monkeypatch
):
    """With given tokens: for the plan, for padding and for the result, however many steps."""
    found = []
    for steps in (4, 9):
        with pretended(monkeypatch) as gpu:
            tokens = torch.full((8, 20), MASK, device="cuda")
            tokens[:, 0] = torch.arange(8, device="cuda") % V
            state = State(Canvas(tokens, MASK, torch.arange(8, device="cuda")))
            toy, run = OnGpu(), {"state": state, "steps": steps, "order": order}
            gpu.waits.clear()
            if guidance is None:
                ancestral(toy.denoiser(), LogLinear(0.0), **run)
            else:
                rgas(toy.denoiser(), LogLinear(0.0), toy, guidance=guidance, **run)
        assert gpu.mixed == []
        found.append(gpu.waits)
    assert len(found[1]) - len(found[0]) == 5 * each, found[1]
    assert len(found[0]) <= 6 + 5 * each, found[0]
