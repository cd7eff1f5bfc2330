"""Naive sampling has the law of ours: else its speed would say nothing."""

import pytest
import torch
from tests.sampling.enumeration import (
    all_masked,
    all_states,
    ancestral_law,
    assert_follows,
    dense_tilt,
    follows,
    independent_step,
    law_of_reranking,
    law_of_tilting,
    texts_of,
)
from tests.sampling.toys import LINEAR, TINY, ToyGuide, toy_of

from didi_instruct.benchmarking.naive_sampling import NaiveSampler, draw_dense
from didi_instruct.data.oracle import OracleLanguage
from didi_instruct.process.masking import interleaved_times, interleaved_turns
from didi_instruct.process.schedule import Cosine, LogLinear
from didi_instruct.sampling import guided
from didi_instruct.sampling.draw import draw_tokens
from didi_instruct.sampling.guide import Guidance
from didi_instruct.sampling.state import Canvas, State

MASK = 3
BLANK = torch.full((20_000, 4), MASK)
TILTING = Guidance(h_start=1.0, h_end=4.0, split=1.0, clamp=0.3)


def sampler(steps, guidance=None, *, scale=1.0, language=TINY, schedule=LINEAR, order="random"):
    """Ancestral, or guided where there is guidance."""
    guided = {} if guidance is None else {"guide": ToyGuide(3, scale=scale), "guidance": guidance}
    return NaiveSampler(
        denoiser=language.denoiser, schedule=schedule, mask_id=MASK, steps=steps, order=order,
        **guided,
    )  # fmt: skip


def draw(*settings, start=BLANK, **more):
    return sampler(*settings, **more)(start, torch.Generator().manual_seed(1))


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("schedule", [LINEAR, LogLinear(1e-3), Cosine(0.0)])
def test_samples_follow_the_enumerated_law(steps, schedule):
    """Chi-square over 81 texts; the law of other steps must fail it."""
    drawn = draw(steps, schedule=schedule)
    assert_follows(drawn, ancestral_law(TINY, schedule, steps), 3)
    assert not follows(drawn, ancestral_law(TINY, schedule, 4 - steps), 3)


def law_of_streams(steps, guide=None):
    """Law over all texts where each step reveals the positions whose turn it is."""
    z, mass = all_states(4, 4), all_masked(TINY)
    turn = interleaved_turns(torch.ones(1, 4) > 0, steps)[0]
    times, scales = interleaved_times(LINEAR, steps), TILTING.scales(steps)
    stay = torch.nn.functional.one_hot(z, 4).double()
    for n in range(steps):
        logits = TINY.denoiser(z)
        if guide is not None:
            logits = dense_tilt(TINY.denoiser, guide, z, MASK, times[n], scales[n], TILTING)
        p = torch.nn.functional.pad(logits.softmax(-1), (0, 1))
        here = (z == MASK) & (turn == n)
        mass = independent_step(mass, torch.where(here[..., None], p, stay))
    return texts_of(mass, 3, 4)


@pytest.mark.parametrize("steps", [2, 3])
def test_the_order_of_a_model_is_kept(steps):
    """Chi-square over 81 texts; the law of a random order, or without tilting, must fail it."""
    plain, tilted = (draw(steps, g, order="streams") for g in (None, TILTING))
    assert_follows(plain, law_of_streams(steps), 3)
    assert_follows(tilted, law_of_streams(steps, ToyGuide(3)), 3)
    assert not follows(tilted, law_of_streams(steps), 3)
    assert not follows(plain, ancestral_law(TINY, LINEAR, steps), 3)


@pytest.mark.parametrize("order", ["random", "streams"])
def test_given_tokens_stay(order):
    drawn = draw(3, start=torch.tensor([[3, 1, 3, 2]]).expand(50, 4), order=order)
    assert bool((drawn[:, [1, 3]] == torch.tensor([1, 2])).all())
    assert int(drawn.max()) < MASK


def test_dense_draws_follow_their_law():
    """Chi-square against p itself; probability 0 is never drawn."""
    p = torch.tensor([0.5, 0.0, 1e-3, 0.2, 0.1, 0.1, 0.05, 0.049], dtype=torch.float64)
    drawn = draw_dense(p.expand(1, 40_000, 8), torch.Generator().manual_seed(3))
    assert_follows(drawn.view(-1, 1), p, 8)


@pytest.mark.parametrize("reward", ["sum", "mean"])
def test_dense_tilting_is_ours(reward, monkeypatch):
    """At every mask: theirs by a gradient over all logits, ours in closed form where needed."""
    z, guide, heard = torch.tensor([[3, 1, 3, 3], [3, 3, 3, 3], [0, 3, 2, 3]]), ToyGuide(3), []

    def listen(logits, *given):
        heard.append(logits)
        return draw_tokens(logits, *given)

    monkeypatch.setattr(guided, "draw_tokens", listen)
    guidance = Guidance(h_start=5.0, split=1.0, clamp=0.3, reward=reward)
    state = State(Canvas(z, MASK, torch.arange(3)))
    guided.rgas(toy_of(), LINEAR, guide, state, steps=1, guidance=guidance)
    logits, masked = TINY.denoiser(z), z == MASK
    theirs = sampler(1, guidance).tilted(logits, z, 1.0, 5.0)
    torch.testing.assert_close(theirs[masked], heard[0])
    assert float((theirs - logits)[masked].abs().max()) > 0.1
    torch.testing.assert_close(theirs[~masked], logits[~masked])


def test_tilting_has_the_enumerated_law():
    assert_follows(draw(2, TILTING), law_of_tilting(TINY, ToyGuide(3), TILTING, 2), 3)


@pytest.mark.parametrize(("score", "select"), [("sum", "sample"), ("mean", "best")])
def test_reranking_has_the_enumerated_law(score, select):
    """Two candidates, chi-square over 9 texts; one candidate must fail it."""
    language = OracleLanguage.tiny(num_tokens=3, slots=2, sentences=1)
    guidance = Guidance(candidates=2, split=0.0, score=score, select=select)
    law = law_of_reranking(language, ToyGuide(3, scale=2.0), guidance, 2)
    run = {"scale": 2.0, "language": language, "start": BLANK[:, :2]}
    assert_follows(draw(2, guidance, **run), law, 3)
    alone = draw(2, Guidance(candidates=1, split=0.0), **run)
    assert not follows(alone, law, 3)
