import itertools
from functools import partial

import pytest
import torch

from didi_instruct.data.oracle import OracleLanguage
from didi_instruct.errors import UserError
from didi_instruct.process.schedule import LogLinear
from didi_instruct.sampling.ancestral import ancestral
from didi_instruct.sampling.blocks import blocks
from didi_instruct.sampling.chain import Canvas, Chain, Draw, Purpose
from didi_instruct.sampling.first_hitting import first_hitting
from didi_instruct.sampling.ordered import ordered
from didi_instruct.sampling.remasking import remasking
from didi_instruct.sampling.uniform_state import uniform_state

from .enumeration import all_masked, all_states, assert_follows, masked_step, texts_of

V, L = 3, 4
LANGUAGE = OracleLanguage.tiny()


@pytest.mark.parametrize("block_length", [1, 2, 3])
@pytest.mark.parametrize("steps", [1, 2])
def test_the_samples_follow_the_enumerated_law(block_length, steps):
    sampler = partial(ancestral, LANGUAGE.denoiser, LogLinear(0.0), steps=steps)
    canvas = Canvas.blank(20_000, L, V)
    result = blocks(sampler, canvas, block_length=block_length, settings=Draw(seed=7))
    mass = all_masked(LANGUAGE)
    starts = range(0, L, block_length)
    for start, n in itertools.product(starts, range(steps)):
        columns = torch.arange(L)
        block = (columns >= start) & (columns < start + block_length)
        mass = masked_step(LANGUAGE, mass, 1 / (steps - n), positions=block)
    assert_follows(result.tokens, texts_of(mass, V, L), V)
    assert result.nfe == steps * len(starts)


def test_blocks_of_an_exact_sampler_are_exact():
    sampler = partial(first_hitting, LANGUAGE.denoiser, LogLinear(0.0))
    canvas = Canvas.blank(20_000, L, V)
    result = blocks(sampler, canvas, block_length=2, settings=Draw(seed=8))
    assert_follows(result.tokens, LANGUAGE.log_prob(all_states(V, L)).exp(), V)
    torch.testing.assert_close(result.log_prob, LANGUAGE.log_prob(result.tokens))
    assert result.nfe == L


@pytest.mark.parametrize("block_length", [4, 9])
def test_a_single_block_is_the_sampler_itself(block_length):
    sampler = partial(ancestral, LANGUAGE.denoiser, LogLinear(0.0), steps=3)
    canvas = Canvas.blank(9, L, V)
    whole, block = sampler(canvas), blocks(sampler, canvas, block_length=block_length)
    assert torch.equal(block.tokens, whole.tokens)
    assert torch.equal(block.log_prob, whole.log_prob)
    assert (block.nfe, block.passes) == (whole.nfe, whole.passes)


@pytest.mark.parametrize(
    "sampler",
    [
        partial(ancestral, LANGUAGE.denoiser, LogLinear(0.0), steps=3),
        partial(ordered, LANGUAGE.denoiser, steps=2),
        partial(ordered, LANGUAGE.denoiser, threshold=0.9),
        partial(remasking, LANGUAGE.denoiser, LogLinear(0.0), steps=6, eta=0.7),
        partial(first_hitting, LANGUAGE.denoiser, LogLinear(0.0)),
    ],
    ids=lambda sampler: sampler.func.__name__,
)
def test_a_block_is_finished_before_the_next_begins(sampler):
    tokens = torch.tensor([[3, 3, 3, 3], [3, 1, 3, 2], [3, 3, 3, 3]])
    seen = []
    result = blocks(
        sampler, Canvas(tokens, V, torch.arange(3)), block_length=2, callback=seen.append
    )
    for step in seen:
        later_begun = (step.tokens[:, 2:] != tokens[:, 2:]).any()
        assert not (later_begun and (step.tokens[:, :2] == V).any())
    # Once finished, a block stays: not even re-masking returns to it.
    finished = [step.tokens[:, :2] for step in seen if not (step.tokens[:, :2] == V).any()]
    assert all(torch.equal(tokens, finished[0]) for tokens in finished)
    assert len(seen) == result.nfe


def test_a_block_without_masks_takes_no_steps():
    tokens = torch.tensor([[3, 3, 1, 2], [0, 3, 1, 2]])
    sampler = partial(ancestral, LANGUAGE.denoiser, LogLinear(0.0), steps=3)
    result = blocks(sampler, Canvas(tokens, V, torch.arange(2)), block_length=2)
    assert result.nfe == 3
    assert torch.equal(result.tokens[:, 2:], tokens[:, 2:])


def test_every_block_has_its_own_noise():
    """Also where numbers do not belong to positions, such as the choice among candidates."""
    numbers = []

    def sampler(canvas):
        chain = Chain(LANGUAGE.denoiser, canvas, Draw(), steps=1)
        numbers.append(chain.uniforms(Purpose.SELECT, 0))
        return ancestral(LANGUAGE.denoiser, LogLinear(0.0), canvas, steps=1)

    blocks(sampler, Canvas.blank(5, L, V), block_length=1)
    assert len(numbers) == 4
    assert torch.cat(numbers).unique().numel() == 4 * 5 * L


def test_a_sampler_without_path_probability_gives_none():
    sampler = partial(ordered, LANGUAGE.denoiser, steps=1)
    assert blocks(sampler, Canvas.blank(2, L, V), block_length=2).log_prob is None


def test_what_has_no_blocks_is_refused():
    with pytest.raises(UserError, match="block_length is 0"):
        blocks(None, Canvas.blank(1, L, V), block_length=0)
    sampler = partial(uniform_state, LANGUAGE.denoiser, LogLinear(0.0), steps=2)
    with pytest.raises(UserError, match="no mask to show"):
        blocks(sampler, Canvas.blank(1, L, V), block_length=2)
