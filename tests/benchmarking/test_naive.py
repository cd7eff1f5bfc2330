"""The plain way of sampling has the law of ours, or its speed would say nothing."""

import itertools

import pytest
import torch

from didi_instruct.benchmarking.naive import (
    draw_dense,
    naive_ancestral,
    naive_rgas,
    tilt_dense,
)
from didi_instruct.data.oracle import OracleLanguage
from didi_instruct.process.masking import interleaved_times, interleaved_turns
from didi_instruct.process.schedule import Cosine, LogLinear
from didi_instruct.sampling.chain import Canvas, Chain, Draw
from didi_instruct.sampling.guidance import Guidance
from didi_instruct.sampling.guided import tilted_logits

from ..sampling.enumeration import (  # noqa: TID252
    all_masked,
    all_states,
    assert_follows,
    independent_step,
    index,
    masked_step,
    p_value,
    texts_of,
)
from ..sampling.test_guided import (  # noqa: TID252
    ToyGuide,
    chi_square,
    dense_tilt,
    law_of_reranking,
    law_of_tilting,
)

SCHEDULE = LogLinear(0.0)


def enumerated(language, schedule, steps):
    """Law of ancestral sampling over all texts."""
    alphas = schedule.alpha(torch.linspace(1, 0, steps + 1, dtype=torch.float64)).tolist()
    alphas[-1] = 1.0
    mass = all_masked(language)
    for before, after in itertools.pairwise(alphas):
        mass = masked_step(language, mass, (after - before) / (1 - before))
    return texts_of(mass, language.num_tokens, language.length)


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("schedule", [LogLinear(0.0), LogLinear(1e-3), Cosine(0.0)])
def test_samples_follow_the_enumerated_law(steps, schedule):
    """Chi-square over 81 texts, false alarm 1e-5; the law of other steps must fail it."""
    language = OracleLanguage.tiny()
    drawn = naive_ancestral(
        language.denoiser,
        schedule,
        torch.full((20_000, 4), 3),
        3,
        steps=steps,
        generator=torch.Generator().manual_seed(1),
    )
    assert_follows(drawn, enumerated(language, schedule, steps), 3)
    assert p_value(index(drawn, 3), enumerated(language, schedule, 4 - steps)) < 1e-5


def enumerated_streams(language, steps, guide=None, guidance=None):
    """Law over all texts where each step reveals the positions whose turn it is."""
    V, L = language.num_tokens, language.length
    z, mass = all_states(V + 1, L), all_masked(language)
    turn = interleaved_turns(torch.ones(1, L) > 0, steps)[0]
    times = interleaved_times(SCHEDULE, steps)
    stay = torch.nn.functional.one_hot(z, V + 1).double()
    for n in range(steps):
        logits = language.denoiser(z)
        if guide is not None:
            h = guidance.scales(steps)[n]
            logits = dense_tilt(language.denoiser, guide, z, V, times[n], h, guidance.clamp)
        p = torch.nn.functional.pad(logits.softmax(-1), (0, 1))
        here = (z == V) & (turn == n)
        mass = independent_step(mass, torch.where(here[..., None], p, stay))
    return texts_of(mass, V, L)


@pytest.mark.parametrize("steps", [2, 3])
def test_the_order_of_a_model_is_kept(steps):
    """Chi-square over 81 texts, false alarm 1e-5 each; the law of a random order must fail it."""
    language, guide = OracleLanguage.tiny(), ToyGuide(3)
    guidance = Guidance(h_start=1.0, h_end=4.0, split=1.0, clamp=0.3)
    law = enumerated_streams(language, steps)
    tilted_law = enumerated_streams(language, steps, guide, guidance)
    start, g = torch.full((20_000, 4), 3), torch.Generator().manual_seed(7)
    settings = {"steps": steps, "generator": g, "order": "streams"}
    drawn = naive_ancestral(language.denoiser, SCHEDULE, start, 3, **settings)
    tilted = naive_rgas(
        language.denoiser, SCHEDULE, guide, start, 3, guidance=guidance, **settings
    )  # fmt: skip
    assert_follows(drawn, law, 3)
    assert_follows(tilted, tilted_law, 3)
    assert p_value(index(tilted, 3), law) < 1e-5
    assert p_value(index(drawn, 3), enumerated(language, SCHEDULE, steps)) < 1e-5


def test_given_tokens_stay():
    language = OracleLanguage.tiny()
    start = torch.tensor([[3, 1, 3, 2]]).expand(50, 4)
    g = torch.Generator().manual_seed(0)
    for order in ("random", "streams"):
        drawn = naive_ancestral(
            language.denoiser, SCHEDULE, start, 3, steps=3, generator=g, order=order
        )  # fmt: skip
        assert bool((drawn[:, [1, 3]] == torch.tensor([1, 2])).all())
        assert int(drawn.max()) < 3


def test_dense_draws_follow_their_law():
    """Chi-square against p itself, 7 degrees, false alarm 1e-5; probability 0 is never drawn."""
    p = torch.tensor([0.5, 0.0, 1e-3, 0.2, 0.1, 0.1, 0.05, 0.049], dtype=torch.float64)
    rows = p.expand(1, 40_000, 8)
    drawn = draw_dense(rows, torch.Generator().manual_seed(3))
    assert_follows(drawn.view(-1, 1), p, 8)


def test_dense_tilting_is_ours():
    """At every mask: theirs by a gradient over all logits, ours in closed form where needed."""
    language, guide = OracleLanguage.tiny(), ToyGuide(3)
    z = torch.tensor([[3, 1, 3, 3], [3, 3, 3, 3], [0, 3, 2, 3]])
    masked = z == 3
    chain = Chain(language.denoiser, Canvas(z, 3, torch.arange(3)), Draw(), steps=1)
    ours = tilted_logits(chain, guide, 0.7, masked, h=5.0, clamp=0.3)
    logits = language.denoiser(z)
    theirs = tilt_dense(guide, logits, z, 3, 0.7, 5.0, 0.3)
    torch.testing.assert_close(theirs[masked], ours)
    assert float((theirs - logits)[masked].abs().max()) > 0.1
    torch.testing.assert_close(theirs[~masked], logits[~masked])


def test_tilting_has_the_enumerated_law():
    """Chi-square, 80 degrees, critical value 138: false alarm 6e-5."""
    language, guide, n = OracleLanguage.tiny(), ToyGuide(3), 20_000
    guidance = Guidance(h_start=1.0, h_end=4.0, split=1.0, clamp=0.3)
    drawn = guided(language, guide, guidance, steps=2, n=n)
    assert chi_square(drawn, law_of_tilting(language, guide, guidance, 2), 3) < 138


@pytest.mark.parametrize(("score", "select"), [("sum", "sample"), ("mean", "best")])
def test_reranking_has_the_enumerated_law(score, select):
    """Two candidates; chi-square over 9 texts, 8 degrees, critical value 35: false alarm 3e-5."""
    language = OracleLanguage.tiny(num_tokens=3, slots=2, sentences=1)
    guide = ToyGuide(3, scale=2.0)
    guidance = Guidance(candidates=2, split=0.0, score=score, select=select)
    drawn = guided(language, guide, guidance, steps=2, n=20_000)
    assert chi_square(drawn, law_of_reranking(language, guide, guidance, 2), 3) < 35
    plain = Guidance(candidates=1, split=0.0)
    drawn = guided(language, guide, plain, steps=2, n=20_000)
    assert chi_square(drawn, law_of_reranking(language, guide, guidance, 2), 3) > 35


def guided(language, guide, guidance, *, steps, n):
    return naive_rgas(
        language.denoiser,
        SCHEDULE,
        guide,
        torch.full((n, language.length), 3),
        3,
        steps=steps,
        guidance=guidance,
        generator=torch.Generator().manual_seed(5),
    )
