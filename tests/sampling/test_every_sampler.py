"""What is true of every sampler."""

from functools import partial

import pytest
import torch

from didi_instruct.config.model import ModelConfig
from didi_instruct.data.oracle import OracleLanguage
from didi_instruct.errors import UserError
from didi_instruct.models.ar import ARModel
from didi_instruct.process.schedule import Cosine, LogLinear
from didi_instruct.sampling.ancestral import ancestral
from didi_instruct.sampling.autoregressive import autoregressive
from didi_instruct.sampling.blocks import blocks
from didi_instruct.sampling.chain import PAD, Canvas, Draw
from didi_instruct.sampling.first_hitting import first_hitting
from didi_instruct.sampling.ordered import ordered
from didi_instruct.sampling.remasking import remasking
from didi_instruct.sampling.uniform_state import uniform_state

LANGUAGE = OracleLanguage.tiny()
MASK = 3


def small_ar():
    config = ModelConfig(kind="ar", layers=1, hidden=8, heads=1, vocab_size=4, length=4)
    model = ARModel(config).double().eval()
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=generator, dtype=torch.float64)
    return model


class Counting:
    """A denoiser that counts the rows it is run on."""

    def __init__(self):
        self.inputs = 0

    def __call__(self, z, t):
        assert t.shape == (len(z),)
        assert t.dtype == torch.float32
        assert bool(((t >= 0) & (t <= 1)).all())
        self.inputs += len(z)
        return LANGUAGE.denoiser(z)


# Each takes a denoiser first, then a canvas, and does not stop early.
MASKED = {
    "ordered": lambda d, *a, **k: ordered(d, *a, steps=3, **k),
    "entropy": lambda d, *a, **k: ordered(d, *a, threshold=0.5, order="entropy", **k),
    "remasking": lambda d, *a, **k: remasking(d, Cosine(1e-3), *a, steps=5, eta=0.4, **k),
    "first-hitting": lambda d, *a, **k: first_hitting(d, Cosine(0.0), *a, **k),
    "blocks": lambda d, *a, **k: blocks(
        partial(ancestral, d, LogLinear(0.0), steps=3), *a, block_length=3, **k
    ),
    "blocks of hits": lambda d, *a, **k: blocks(
        partial(first_hitting, d, LogLinear(0.0)), *a, block_length=2, **k
    ),
    "uniform-state": lambda d, *a, **k: uniform_state(d, LogLinear(0.0), *a, steps=3, **k),
}
SAMPLERS = {name: partial(sampler, LANGUAGE.denoiser) for name, sampler in MASKED.items()}
SAMPLERS["autoregressive"] = partial(autoregressive, small_ar())
SAMPLERS["blocks of ar"] = partial(blocks, SAMPLERS["autoregressive"], block_length=2)

every_sampler = pytest.mark.parametrize("name", SAMPLERS)
every_masked = pytest.mark.parametrize("name", MASKED)


def canvas_for(name, first=0, rows=slice(None)):
    """Gaps, a prompt, padding, everything given, nothing given; no gaps for left-to-right."""
    gaps = [[0, 1, MASK, MASK]] if name.endswith(("autoregressive", "ar")) else [[3, 1, 3, 2]]
    others = [[2, MASK, MASK, PAD], [0, 1, 2, 0], [PAD] * 4, [MASK] * 4, [MASK] * 4]
    tokens = torch.tensor(gaps + others)
    return Canvas(tokens[rows], MASK, torch.arange(first, first + len(tokens))[rows])


@every_sampler
def test_given_tokens_stay_and_all_masks_are_filled(name):
    canvas = canvas_for(name)
    for seed in range(20):
        result = SAMPLERS[name](canvas, settings=Draw(seed=seed))
        assert torch.equal(result.tokens[~canvas.open], canvas.tokens[~canvas.open])
        written = result.tokens[canvas.open]
        assert bool(((written >= 0) & (written < MASK)).all())


@every_sampler
def test_a_sample_does_not_depend_on_its_batch_nor_on_the_global_generator(name):
    whole = SAMPLERS[name](canvas_for(name), settings=Draw(seed=3))
    state = torch.get_rng_state()
    for row in range(len(whole.tokens)):
        torch.manual_seed(row)
        part = SAMPLERS[name](canvas_for(name, rows=slice(row, row + 1)), settings=Draw(seed=3))
        assert torch.equal(part.tokens[0], whole.tokens[row])
        assert (part.log_prob is None) == (whole.log_prob is None)
        if whole.log_prob is not None:
            torch.testing.assert_close(part.log_prob[0], whole.log_prob[row])
    torch.set_rng_state(state)
    other = SAMPLERS[name](canvas_for(name), settings=Draw(seed=4))
    assert not torch.equal(whole.tokens, other.tokens)
    twins = whole.tokens[-2:]
    many = [SAMPLERS[name](canvas_for(name), settings=Draw(seed=s)).tokens[-2:] for s in range(9)]
    assert any(not torch.equal(*pair) for pair in [twins, *many])


@every_sampler
def test_a_callback_sees_every_step(name):
    canvas = canvas_for(name)
    seen = []
    result = SAMPLERS[name](canvas, callback=seen.append)
    silent = SAMPLERS[name](canvas)
    assert torch.equal(result.tokens, silent.tokens)
    assert [step.index for step in seen] == list(range(result.nfe))
    assert all(step.steps >= result.nfe for step in seen)
    assert seen[0].time == 1.0
    assert torch.equal(seen[-1].tokens, result.tokens)
    before = canvas.tokens
    for step in seen:
        assert not step.revealed[~canvas.open].any()
        written = canvas.open & (step.tokens != MASK)
        assert torch.equal(step.confidence > 0, written)
        changed = (step.tokens != before) & (step.tokens != MASK)
        noise = before == MASK if name == "uniform-state" else torch.zeros_like(changed)
        assert torch.equal(step.revealed | noise, changed | noise)
        before = step.tokens


@every_masked
def test_passes_are_those_that_ran(name):
    canvas = canvas_for(name)
    counting = Counting()
    result = MASKED[name](counting, canvas)
    assert result.passes == pytest.approx(counting.inputs / len(canvas.tokens))
    # Two of the six rows have nothing to write.
    assert 0 < result.passes <= 4 / 6 * result.nfe


@every_sampler
def test_nothing_to_write_runs_nothing(name):
    canvas = canvas_for(name, rows=slice(2, 4))
    result = SAMPLERS[name](canvas)
    assert torch.equal(result.tokens, canvas.tokens)
    assert result.passes == 0


@pytest.mark.parametrize("name", ["ordered", "remasking", "uniform-state"])
def test_steps_below_one_are_refused(name):
    samplers = {
        "ordered": partial(ordered, None),
        "remasking": partial(remasking, None, LogLinear(0.0), eta=0.1),
        "uniform-state": partial(uniform_state, None, LogLinear(0.0)),
    }
    with pytest.raises(UserError, match="steps is 0"):
        samplers[name](Canvas.blank(1, 4, MASK), steps=0)
