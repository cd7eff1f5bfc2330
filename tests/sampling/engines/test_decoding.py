"""Captured decoding writes what plain decoding writes."""

import math
import re
import shutil
from dataclasses import replace

import pytest
import torch
from tests.devices import DEVICES

from didi_instruct.config.model import ModelConfig
from didi_instruct.models.ar import ARModel
from didi_instruct.models.compile import compiled
from didi_instruct.sampling import autoregressive as plain
from didi_instruct.sampling.autoregressive import autoregressive
from didi_instruct.sampling.engines import cuda
from didi_instruct.sampling.engines.cuda import LOOKS, MOST_DECODERS, Decoders, StaticDecoder
from didi_instruct.sampling.state import Canvas

from ..toys import start  # noqa: TID252
from .small import Buffered

EOT = 5


def make(device="cpu", **changes):
    settings = {"kind": "ar", "layers": 2, "hidden": 32, "heads": 2, "vocab_size": 20}
    torch.manual_seed(0)
    model = ARModel(ModelConfig(**(settings | {"length": 2 * LOOKS + 8} | changes)))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model.to(device).double().eval()


def blank(model, batch, length, device="cpu"):
    canvas = Canvas.blank(batch, length, model.config.vocab_size - 1, first=3, device=device)
    return replace(canvas, stream=(7,))


def same(one, other):
    assert torch.equal(one.tokens, other.tokens)
    torch.testing.assert_close(one.log_prob, other.log_prob, rtol=1e-9, atol=1e-9)
    assert one.nfe == other.nfe


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("changes", [{}, {"learned_positions": True}])
@pytest.mark.parametrize("eot_id", [None, EOT])
def test_a_static_cache_draws_the_tokens_of_a_growing_one(changes, eot_id, device, monkeypatch):
    """In float64, from the same numbers; twice, so that nothing is left of the first time."""
    if device == "cpu":
        monkeypatch.setattr(cuda, "capture", Buffered)
    model = make(device, **changes)
    decoders = Decoders(model)
    for seed in (3, 4):
        canvas = blank(model, 5, 2 * LOOKS + 8, device)
        expected = autoregressive(model, start(canvas, seed=seed), eot_id=eot_id)
        state = start(canvas, seed=seed)
        found = autoregressive(model, state, eot_id=eot_id, decoders=decoders)
        same(found, expected)
        assert found.passes == expected.passes or eot_id is not None
        assert len(found.tokens.unique()) > 5
        if eot_id is not None:
            ended = (found.tokens == EOT).any(1)
            assert ended.any(), "no text ended"
    assert len(decoders._made) == 1


def test_it_stops_when_all_texts_are_over():
    """Every token is the end: one is drawn, and no more passes run than until the next look."""
    model = make()
    with torch.no_grad():
        model.output_layer.linear.bias[EOT] = 1e4
    canvas = blank(model, 3, 2 * LOOKS + 8)
    expected = autoregressive(model, start(canvas), eot_id=EOT)
    found = autoregressive(model, start(canvas), eot_id=EOT, decoders=Decoders(model))
    same(found, expected)
    assert (found.nfe, found.passes, expected.passes) == (1, LOOKS, 1)
    assert (found.tokens == EOT).all()


def test_what_it_cannot_do_is_left_to_plain_decoding(monkeypatch):
    """Prompts, other laws, other types than the weights', nothing, and steps that are watched."""
    model = make()
    decoders = Decoders(model)
    monkeypatch.setattr(plain, "_decoded", lambda *_: pytest.fail("decoded"))
    canvas = blank(model, 2, 8)
    prompted = canvas.tokens.clone()
    prompted[0, 0] = 1
    given = Canvas(prompted, canvas.mask_id, canvas.samples)
    watched = start(canvas, lambda _: None)
    for state in (start(given), start(canvas, temperature=0.5), watched):
        autoregressive(model, state, decoders=decoders)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        autoregressive(model, start(canvas), decoders=decoders)
    nothing = autoregressive(model, start(blank(model, 0, 8)), decoders=decoders)
    assert nothing.tokens.shape == (0, 8)


def other_bias(model):
    with torch.no_grad():
        model.output_layer.linear.bias.copy_(torch.linspace(-3, 3, 20))


def other_place(model):
    weight = model.output_layer.linear.weight
    weight.data = weight.data.flip(0).clone()


@pytest.mark.parametrize("change", [other_bias, other_place])
def test_weights_that_change_are_noticed(change):
    model = make()
    decoders, canvas = Decoders(model), blank(model, 3, 6)
    before = autoregressive(model, start(canvas), decoders=decoders)
    change(model)
    after = autoregressive(model, start(canvas), decoders=decoders)
    assert not torch.equal(before.tokens, after.tokens)
    same(after, autoregressive(model, start(canvas)))


def test_a_move_drops_what_was_captured():
    """The tables of the positions are made anew by any move, and a graph would read the old."""
    model = make()
    decoders = Decoders(model)
    first = decoders.find(2, 4)
    assert decoders.find(2, 4) is first
    model.to("cpu")
    assert decoders.find(2, 4) is not first


def test_few_decoders_are_kept_and_serve_smaller_batches():
    decoders = Decoders(make())
    first = decoders.find(4, 4)
    assert decoders.find(2, 4) is decoders.find(4, 4) is first
    assert decoders.find(1, 4) is not first, "much too large"
    for length in range(5, 5 + MOST_DECODERS - 1):
        assert decoders.find(4, 4) is first
        decoders.find(4, length)
    assert len(decoders._made) == MOST_DECODERS
    assert decoders.find(4, 4) is first, "what is used stays"


def test_a_smaller_batch_is_written_by_a_larger_decoder():
    model = make()
    decoders = Decoders(model)
    for batch in (5, 3):
        canvas = blank(model, batch, 12)
        found = autoregressive(model, start(canvas), eot_id=EOT, decoders=decoders)
        same(found, autoregressive(model, start(canvas), eot_id=EOT))
    assert len(decoders._made) == 1


@pytest.mark.skipif(not shutil.which("g++"), reason="inductor asks for a C++ compiler")
@torch.no_grad()
def test_compiled_code_never_copies_the_cache():
    """No buffer that it takes is as large as the keys of one layer."""
    from torch._functorch import config as functorch
    from torch._inductor import config as inductor
    from torch._inductor.utils import get_code

    model = make(layers=1, length=256).float()
    decoder = StaticDecoder(model, batch=3, length=256)
    keys = 3 * 256 * 32
    assert decoder._cache[0][0].numel() == keys
    inputs = torch.full((3,), 19), torch.tensor([5])
    # Code is written but not built, so nothing of it may be remembered; and not for one CPU.
    fresh = inductor.patch({"fx_graph_cache": False, "cpp.simdlen": 1})
    with fresh, functorch.patch(enable_autograd_cache=False):
        code = "".join(get_code(compiled(decoder._logits, dynamic=False), *inputs))
    shapes = re.findall(r"= empty_strided_\w+\(\(([\d, ]+)\)", code)
    sizes = [math.prod(int(n) for n in text.split(",") if n.strip()) for text in shapes]
    assert 3 * 32 in sizes
    assert max(sizes) < keys
