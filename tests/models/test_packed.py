import math

import pytest
import torch

from didi_instruct.models import packed
from didi_instruct.models.packed import PackedLinear, packs


@pytest.fixture(params=[True, False], ids=["packed", "plain"])
def one_dnn(request, monkeypatch):
    if not request.param:
        monkeypatch.setattr(packed, "packs", lambda dtype: False)


def gelu(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


@pytest.mark.usefixtures("one_dnn")
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("rows", [1, 5, 300])
def test_products_are_those_of_float64(rows, dtype, rtol):
    """With a bias, through the tanh-GELU, added to a float32 residual; any number of rows."""
    generator = torch.Generator().manual_seed(rows)
    x, weight, bias, stream = (
        torch.randn(shape, generator=generator) for shape in ((2, rows, 24), (40, 24), 40, 40)
    )
    x, weight, bias = x.to(dtype), weight.to(dtype), bias.to(dtype)
    linear = PackedLinear(weight, bias)
    exact = x.double() @ weight.double().T + bias.double()
    stream = stream.expand(2, rows, 40).contiguous()
    added = linear.added(x, stream)
    assert added.dtype == torch.float32
    close = {"rtol": rtol, "atol": rtol}
    torch.testing.assert_close(linear(x).double(), exact, **close)
    torch.testing.assert_close(linear.gelu(x).double(), gelu(exact), **close)
    torch.testing.assert_close(added.double(), exact + stream.double(), rtol=rtol, atol=5 * rtol)
    without = PackedLinear(weight)(x)
    torch.testing.assert_close(without.double(), exact - bias.double(), rtol=rtol, atol=5 * rtol)


def test_only_what_one_dnn_multiplies_well_is_packed(monkeypatch):
    monkeypatch.setattr(packed.platform, "machine", lambda: "x86_64")
    assert packs(torch.float32) == torch.backends.mkldnn.is_available()
    assert not packs(torch.float64)
    monkeypatch.setattr(packed.platform, "machine", lambda: "arm64")
    assert not packs(torch.float32)
    assert not packs(torch.bfloat16)
