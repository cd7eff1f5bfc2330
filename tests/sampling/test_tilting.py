"""The arithmetic of tilting, alone and compiled."""

import pytest
import torch

from didi_instruct.models import compile as fused
from didi_instruct.models.compile import Fused
from didi_instruct.models.discriminator import Discriminator
from didi_instruct.sampling import network as networks
from didi_instruct.sampling.network import NetworkGuide
from didi_instruct.sampling.tilting import mixture, slopes, tilted

from .test_fast import make
from .test_guided_planned import MASK, SIZE, guided_pair


def numbers(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def scalars(*values):
    return [torch.tensor(value, dtype=torch.float64) for value in values]


@pytest.mark.parametrize("clamp", [0.01, float("inf")])
def test_a_tilt_is_a_step_along_the_gradient_of_the_mixture(clamp):
    """And columns of -inf beside rows of 0 change nothing and stay -inf."""
    logits, table, gradient = numbers(6, 9), numbers(9, 4, seed=1), numbers(6, 4, seed=2)
    leaf = logits.clone().requires_grad_()
    (expected,) = torch.autograd.grad((mixture(leaf, table) * gradient).sum(), leaf)
    expected = logits + 3 * expected.clamp(-clamp, clamp)
    wide = torch.nn.functional.pad(logits, (0, 7), value=-torch.inf)
    padded = torch.nn.functional.pad(table, (0, 0, 0, 7))
    torch.testing.assert_close(mixture(wide, padded), mixture(logits, table))
    slope = slopes(gradient, padded, torch.float64)
    found = tilted(wide, slope, *scalars(3.0, clamp))
    torch.testing.assert_close(found[:, :9], expected)
    assert bool((found[:, 9:] == -torch.inf).all())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_slopes_of_narrow_numbers_are_summed_in_wide_ones(dtype):
    """As in float64 up to float32 rounding, where 16-bit results would be off by a thousandth."""
    gradient, table = (numbers(5, 768).to("cuda", dtype), numbers(640, 768).to("cuda", dtype))
    found = slopes(gradient, table, torch.float32)
    expected = gradient.double() @ table.double().T
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, atol=1e-3, rtol=1e-5)
    assert (found.to(dtype).double() - expected).abs().max() > 1e-2


@pytest.fixture
def counter(monkeypatch):
    """Dynamo itself, with a backend that runs the graph as it is."""
    from torch._dynamo.testing import CompileCounter

    own = CompileCounter()
    for module in (fused, networks):
        monkeypatch.setattr(module, "compiled", lambda f: torch.compile(f, backend=own))
    monkeypatch.setattr(fused, "fuses", lambda tensor: True)
    torch._dynamo.reset()
    return own


def test_a_tilt_is_compiled_once(counter):
    """For all numbers of rows, and all strengths."""
    tilt = Fused(tilted, "A tilt")
    for rows, h in ((5, 1.0), (1, 2.0), (3, 30.0), (8, 40.0)):
        given = numbers(rows, 192), numbers(rows, 192, seed=1), *scalars(h, 1.0)
        torch.testing.assert_close(tilt(*given), tilted(*given))
    assert counter.frame_count == 1


def test_a_guide_whose_gradients_cannot_be_compiled_has_plain_ones(monkeypatch):
    """The compiler meets them last, when they are asked for."""

    class Refused(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise RuntimeError("no backward pass")

    def half(function):
        return lambda *given: Refused.apply(function(*given))

    _, _, guide, _ = guided_pair("cpu", **SIZE)
    z, place = torch.full((2, 12), MASK), torch.tensor([3, 0, 17])
    mixed = torch.randn(3, guide.table.shape[1], dtype=guide.table.dtype)
    given = z, 0.5, place, mixed, torch.ones(2, 12, dtype=torch.bool)
    guide._compiles = False
    expected = guide.gradient(*given)
    guide._compiles = True
    monkeypatch.setattr(networks, "compiled", half)
    said = []
    monkeypatch.setattr(networks, "say_once", said.append)
    torch.testing.assert_close(guide.gradient(*given), expected)
    assert len(said) == 1
    assert "no backward pass" in said[0]
    assert not guide._compiles


def test_a_guide_compiles_texts_once_and_gradients_once(counter):
    """For all numbers of texts: what it says of them, and where it wants them to go."""
    critic, schedule = make("cpu", Discriminator, length=12, vocab_size=300)
    guide, plain = NetworkGuide(critic, schedule, fast=True), NetworkGuide(critic, schedule)
    for count, kind in enumerate(("texts", "gradients"), 1):
        for rows in (5, 1, 3, 8):
            z = torch.full((rows, 12), 299)
            z[:, 3] = 7
            if kind == "texts":
                found, expected = guide.score_texts(z, 0.5), plain.score_texts(z, 0.5)
            else:
                place = torch.arange(12 * rows)[z.flatten() == 299]
                given = z, 0.5, place, numbers(len(place), 16), z == 299
                found, expected = guide.gradient(*given), plain.gradient(*given)
            torch.testing.assert_close(found, expected)
        assert counter.frame_count == count
