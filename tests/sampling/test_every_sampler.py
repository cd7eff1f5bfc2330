"""What is true of every sampler, for all texts, prompts, gaps, paddings and seeds."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from didi_instruct.config.model import ModelConfig
from didi_instruct.errors import UserError
from didi_instruct.models.ar import ARModel
from didi_instruct.process.schedule import Cosine
from didi_instruct.sampling.ancestral import ancestral
from didi_instruct.sampling.autoregressive import autoregressive
from didi_instruct.sampling.confidence import by_confidence
from didi_instruct.sampling.dplm import dplm
from didi_instruct.sampling.draw import DrawOptions
from didi_instruct.sampling.guide import Guidance
from didi_instruct.sampling.guided import rgas
from didi_instruct.sampling.state import Canvas, State
from didi_instruct.sampling.uniform_state import uniform_state
from didi_instruct.sampling.variants import blocks, first_hitting, remasking

from .toys import (
    LINEAR,
    MASK,
    L,
    Toy,
    ToyGuide,
    V,
    blank,
    by_hand,
    canvases,
    law,
    random_function,
    some_rows,
    start,
)


def small_ar():
    config = ModelConfig(kind="ar", layers=1, hidden=8, heads=1, vocab_size=V + 1, length=L)
    model = ARModel(config).double().eval()
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=generator, dtype=torch.float64)
    return model


AR = small_ar()
GUIDANCE = {
    "tilting": Guidance(h_start=2.0, h_end=9.0, split=1.0),
    "re-ranking": Guidance(split=0.0, candidates=3),
    "best": Guidance(split=0.0, candidates=2, select="best", score="mean"),
    "many candidates": Guidance(split=0.0, candidates=2),
    "both": Guidance(h_start=0.0, h_end=4.0, split=0.7, candidates=2),
}
# Each takes a denoiser, a guide and the state of a sampling.
SAMPLERS = {
    "ancestral": lambda d, g, s: ancestral(d, LINEAR, s, steps=3),
    "greedy tail": lambda d, g, s: ancestral(
        d, Cosine(1e-3), s, steps=4, grid="cosine", greedy_tail=True
    ),
    "streams": lambda d, g, s: ancestral(d, LINEAR, s, steps=4, order="streams"),
    "many steps": lambda d, g, s: ancestral(d, LINEAR, s, steps=40),
    "remasking": lambda d, g, s: remasking(d, Cosine(1e-3), s, steps=5, eta=0.4),
    "first-hitting": lambda d, g, s: first_hitting(d, Cosine(0.0), s),
    "blocks": lambda d, g, s: blocks(d, LINEAR, s, steps=2, block_length=4),
    "sure blocks": lambda d, g, s: blocks(
        d, LINEAR, s, steps=2, block_length=2, inner="confidence"
    ),
    "confidence": lambda d, g, s: by_confidence(d, s, steps=3),
    "entropy": lambda d, g, s: by_confidence(d, s, threshold=0.5, order="entropy"),
    "dplm": lambda d, g, s: dplm(d, s, steps=4),
    "dplm that revises": lambda d, g, s: dplm(d, s, steps=15),
    "uniform-state": lambda d, g, s: uniform_state(d, LINEAR, s, steps=3),
    "autoregressive": lambda d, g, s: autoregressive(AR, s),
} | {
    name: lambda d, g, s, name=name, guidance=guidance: rgas(
        d, LINEAR, g, s, steps=20 if name == "many candidates" else 5, guidance=guidance
    )
    for name, guidance in GUIDANCE.items()
}
VISIBLE = ("uniform-state", "dplm", "dplm that revises")
"""Those that ask for laws of tokens that are not masked."""
every_sampler = pytest.mark.parametrize("name", SAMPLERS)
OPTIONS = [
    {}, {"temperature": 0.7, "top_p": 0.9}, {"top_k": 3}, {"temperature": 0.0},
    {"measure_path": False},
]  # fmt: skip


def inputs(name):
    """Canvases that a sampler can fill."""
    if name == "autoregressive":
        return canvases(prompts=True)
    if name == "uniform-state":
        return canvases()
    return canvases(masks=(1, 1, 2))


def sampler(name):
    """One with a denoiser and a guide of its own, which count."""
    denoiser, guide = Toy(every=name in VISIBLE), ToyGuide()
    return denoiser, guide, partial(SAMPLERS[name], denoiser, guide)


@every_sampler
@law
@given(st.data())
def test_a_sample_is_whole_and_its_own(name, data):
    """Given tokens stay, all that is open is written, the batch does not matter, passes count."""
    canvas, before = data.draw(inputs(name)), torch.get_rng_state()
    settings = {"seed": data.draw(st.integers(0, 9)), **data.draw(st.sampled_from(OPTIONS))}
    tokens = canvas.tokens.clone()
    denoiser, guide, draw = sampler(name)
    result = draw(start(canvas, **settings))
    assert torch.equal(canvas.tokens, tokens)
    assert torch.equal(result.tokens[~canvas.open], tokens[~canvas.open])
    written = result.tokens[canvas.open]
    assert bool(((written >= 0) & (written < V)).all())
    if name != "autoregressive" and (canvas.masks == 1 or not settings.get("measure_path", True)):
        ran = denoiser.inputs + guide.scored + 3 * guide.differentiated
        assert result.passes == pytest.approx(ran / len(tokens))
    running = int(canvas.open.any(1).sum())
    assert (result.passes > 0) == (running > 0), "who has nothing to write runs nothing"
    if not result.disc_calls and canvas.masks == 1 and name != "autoregressive":
        assert result.passes <= result.nfe * running / len(tokens) + 1e-9
    torch.manual_seed(data.draw(st.integers(0, 9)))
    calls, order = [], data.draw(st.permutations(range(len(tokens))))
    for row in (order[: len(order) // 2], order[len(order) // 2 :]):
        rows = torch.tensor(row, dtype=torch.long)
        if not len(rows):
            continue
        part = draw(start(some_rows(canvas, rows), **settings))
        assert torch.equal(part.tokens, result.tokens[rows])
        calls.append(part.disc_calls)
        assert (part.log_prob is None) == (result.log_prob is None)
        if result.log_prob is not None:
            torch.testing.assert_close(part.log_prob, result.log_prob[rows])
    assert result.disc_calls == max(calls)
    torch.set_rng_state(before)


@every_sampler
@law
@given(st.data())
def test_a_callback_sees_a_run_that_can_be_replayed(name, data):
    """Snapshots lead from the canvas to the result, are never changed, and change nothing."""
    canvas = data.draw(inputs(name))
    seed = data.draw(st.integers(0, 9))
    _, _, draw = sampler(name)
    seen, copies = [], []

    def callback(step):
        seen.append(step)
        copies.append((step.tokens.clone(), step.revealed.clone(), step.confidence.clone()))

    silent, result = draw(start(canvas, seed=seed)), draw(start(canvas, callback, seed=seed))
    assert torch.equal(result.tokens, silent.tokens)
    assert (result.nfe, result.passes, result.disc_calls) == (
        silent.nfe, silent.passes, silent.disc_calls,
    )  # fmt: skip
    assert [step.index for step in seen] == list(range(len(seen)))
    # From left to right a row that begins behind its prompt waits for the others'.
    assert len(seen) == result.nfe or (name == "autoregressive" and len(seen) > result.nfe)
    assert all(step.steps >= len(seen) and 0 <= step.time <= 1 for step in seen)
    assert not seen or seen[0].time == 1.0 or not canvas.open.any()
    before, noise = canvas.tokens, name == "uniform-state"
    for step, copy in zip(seen, copies, strict=True):
        assert all(
            torch.equal(*pair)
            for pair in zip((step.tokens, step.revealed, step.confidence), copy, strict=True)
        )
        assert torch.equal(step.open, canvas.open)
        assert not step.revealed[~canvas.open].any()
        assert torch.equal(step.tokens[~canvas.open], canvas.tokens[~canvas.open])
        assert torch.equal(step.confidence > 0, canvas.open & (step.tokens != MASK))
        changed = (step.tokens != before) & (step.tokens != MASK)
        if not (noise and step.index == 0):
            assert torch.equal(step.revealed, changed)
        erased = (step.tokens == MASK) & (before != MASK)
        assert name.startswith(("remasking", "dplm")) or not erased.any()
        before = step.tokens
    assert torch.equal(before, result.tokens)


@every_sampler
def test_seeds_samples_and_parts_of_a_text_have_noise_of_their_own(name):
    """Twins differ; so do seeds, other samples and other parts of a longer text."""
    _, _, draw = sampler(name)
    canvas = Canvas.blank(8, L, MASK)
    later, elsewhere = Canvas.blank(8, L, MASK, first=8), replace(canvas, stream=(6, 1))
    one = draw(start(canvas)).tokens
    others = [draw(each).tokens for each in (start(canvas, seed=1), start(later), start(elsewhere))]
    assert all((one != other).any(1).sum() >= 4 for other in others)
    assert len(one.unique(dim=0)) >= 4


KNOWN = {
    "ancestral": partial(ancestral, schedule=LINEAR),
    "confidence": by_confidence,
    "remasking": partial(remasking, schedule=LINEAR, eta=0.1),
    "dplm": dplm,
    "uniform-state": partial(uniform_state, schedule=LINEAR),
    "blocks": partial(blocks, schedule=LINEAR, block_length=2),
    "rgas": partial(rgas, schedule=LINEAR, guide=ToyGuide()),
}
REFUSALS = [
    *((name, {"steps": 0}, "steps is 0") for name in KNOWN),
    ("ancestral", {"order": "streams", "grid": "cosine"}, "leave out grid"),
    ("remasking", {"eta": -0.1}, "eta is -0.1"),
    ("remasking", {"eta": 1.1}, "eta is 1.1"),
    ("dplm", {"guard": 0.0}, "guard is 0.0"),
    ("dplm", {"guard": 1.0}, "guard is 1.0"),
    ("dplm", {"guard": float("nan")}, "guard is nan"),
    ("blocks", {"block_length": 0}, "block_length is 0"),
    ("confidence", {"steps": None}, "steps or a threshold"),
    ("confidence", {"threshold": 0.5}, "steps or a threshold"),
    ("confidence", {"steps": None, "threshold": 1.5}, "threshold is 1.5"),
    ("confidence", {"steps": None, "threshold": float("nan")}, "threshold is nan"),
    ("confidence", {"steps": None, "threshold": -0.1, "order": "entropy"}, "threshold is -0.1"),
    ("rgas", {"guide": None}, "needs a discriminator"),
    ("rgas", {"guide": ToyGuide(7)}, "knows 7 tokens and the denoiser 5"),
    ("rgas", {"guide": ToyGuide(7), "guidance": Guidance(split=0.0)}, "knows 7 tokens"),
]


@pytest.mark.parametrize(("name", "arguments", "message"), REFUSALS)
def test_what_cannot_be_is_refused_in_one_line(name, arguments, message):
    known = {"denoiser": Toy(), "state": blank(2, L, MASK), "steps": 2}
    with pytest.raises(UserError, match=message) as error:
        KNOWN[name](**known | arguments)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", [name for name in SAMPLERS if name != "autoregressive"])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.0}])
def test_logits_that_are_not_numbers_are_refused(name, options):
    """Also where only the last step meets them, and where the best of them is to be taken."""
    function = random_function()

    def damaged(z, t):
        logits = function(z, t)
        logits[:, 2, 3] = torch.nan
        return logits

    draw = partial(SAMPLERS[name], Toy(damaged, every=True), ToyGuide())
    with pytest.raises(UserError, match="not numbers: its weights are damaged"):
        draw(blank(3, L, MASK, **options))


# The reference

GRIDS = [{}, {"grid": "cosine"}, {"order": "streams"}]


@law
@given(
    canvases(masks=(1, 1, 3)), st.sampled_from([1, 2, 5, 40]), st.sampled_from(OPTIONS),
    st.sampled_from(GRIDS), st.booleans(), st.sampled_from([LINEAR, Cosine(1e-3)]),
)  # fmt: skip
def test_ancestral_sampling_is_that_by_hand(canvas, steps, options, grid, greedy_tail, schedule):
    """Token by token: whatever is shared, skipped, narrowed or drawn in parts."""
    run = {"steps": steps, "greedy_tail": greedy_tail, **grid}
    settings = DrawOptions(seed=3, **options)
    result = ancestral(Toy(), schedule, State(canvas, settings), **run)
    tokens, log_prob, _ = by_hand(random_function(), schedule, canvas, options=settings, **run)
    assert torch.equal(result.tokens, tokens)
    if canvas.masks == 1:
        torch.testing.assert_close(result.log_prob, log_prob)


@law
@given(
    canvases(masks=(1, 1, 3)), st.sampled_from([1, 2, 3, 6, 30]), st.sampled_from(OPTIONS[:4]),
    st.sampled_from(GRIDS), st.sampled_from([None, 1, 4]), st.builds(
        Guidance, h_start=st.sampled_from([0.0, 3.0, -3.0]), h_end=st.sampled_from([0.0, 9.0]),
        candidates=st.sampled_from([1, 2, 3]), split=st.sampled_from([0.0, 0.5, 0.8, 1.0]),
        score=st.sampled_from(["sum", "mean"]), select=st.sampled_from(["sample", "best"]),
        clamp=st.sampled_from([0.1, 1.0]), reward=st.sampled_from(["sum", "mean"]),
    ),
)  # fmt: skip
def test_guided_sampling_is_that_by_hand(canvas, steps, options, grid, part, guidance):
    """Tokens, paths and calls of the guide; also of logits that come in parts, with padding.

    What is given and what is padding has no say in a reward: by hand it is left out.
    """
    settings, run = DrawOptions(seed=3, **options), {"steps": steps, "guidance": guidance, **grid}
    result = rgas(Toy(part=part), LINEAR, ToyGuide(), State(canvas, settings), **run)
    tokens, log_prob, calls = by_hand(
        random_function(), LINEAR, canvas, options=settings, guide=ToyGuide(), **run
    )
    assert torch.equal(result.tokens, tokens)
    assert result.disc_calls == max(calls)
    reranks = guidance.candidates > 1 and len(guidance.scales(steps)) < steps
    guided = reranks or any(guidance.scales(steps))
    assert (result.log_prob is None) == (reranks or (guided and canvas.masks > 1))
    if result.log_prob is not None and canvas.masks == 1:
        torch.testing.assert_close(result.log_prob, log_prob)
