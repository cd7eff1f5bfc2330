"""Products in 8-bit floats: what is rounded, how much it matters, what is left alone."""

import pytest
import torch
from tests.devices import DEVICES
from torch import nn

import didi_instruct as didi
from didi_instruct.api.model import Model
from didi_instruct.config.model import ModelConfig
from didi_instruct.errors import UserError
from didi_instruct.models.dit import DiT
from didi_instruct.models.float8 import LARGEST, Float8Linear, is_float8, rounded, to_float8
from didi_instruct.models.inference import suits


def make(hidden=64, device="cpu", **changes):
    settings = {"layers": 3, "heads": 2, "cond_dim": 8, "vocab_size": 70, "length": 16, **changes}
    torch.manual_seed(0)
    network = DiT(ModelConfig(hidden=hidden, **settings))
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.08)
    return network.to(device).eval()


def test_rows_keep_their_largest_number_and_four_bits_of_the_others():
    rows = torch.cat(
        [torch.randn(20, 300) * 10.0 ** torch.arange(-6, 14)[:, None], torch.zeros(1, 300)]
    )
    eight, scale = rounded(rows)
    back = eight.float() * scale
    assert eight.float().abs().amax(1)[:-1].tolist() == pytest.approx([LARGEST] * 20)
    assert torch.equal(back[-1], torch.zeros(300))
    top = rows.abs().amax(1, keepdim=True)
    # Normal numbers are off by 1/16 at most, smaller ones by half of the smallest of all.
    assert ((back - rows).abs() <= rows.abs() / 16 + top / LARGEST * 2**-10 + 1e-30).all()
    assert (back - rows).norm() > 0.005 * rows.norm()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_multiplies_what_was_rounded(bias, device):
    torch.manual_seed(1)
    linear = nn.Linear(96, 48, bias=bias).to(device, torch.bfloat16)
    layer, x = Float8Linear(linear), torch.randn(3, 16, 96, device=device, dtype=torch.bfloat16)
    (x8, a), (w8, b) = rounded(x.flatten(0, 1)), rounded(linear.weight)
    expected = (x8.double() @ w8.double().T) * a.double() * b.double().T
    expected = expected + (0 if linear.bias is None else linear.bias.double())
    found = layer(x)
    assert (found.shape, found.dtype) == ((3, 16, 48), torch.bfloat16)
    torch.testing.assert_close(found.double().flatten(0, 1), expected, rtol=1e-2, atol=2e-2)


@pytest.mark.parametrize("device", DEVICES)
@torch.no_grad()
def test_a_network_says_about_the_same(device):
    """Its logits move by a few percent of their spread: more than in bfloat16, and not much."""
    tokens, sigma = torch.randint(70, (8, 16), device=device), torch.ones(8, device=device)
    exact = make(device=device)(tokens, sigma).double()

    def gap(network):
        return ((network(tokens, sigma).double() - exact).std() / exact.std()).item()

    narrow = make(device=device).to(torch.bfloat16)
    narrow_gap = gap(narrow)
    to_float8(narrow)
    assert is_float8(narrow)
    assert narrow_gap < gap(narrow) < 0.15


def test_layers_of_odd_sizes_stay():
    network = make(hidden=24, heads=3)
    to_float8(network)
    assert not is_float8(network)


def test_a_model_samples_in_float8_and_is_not_saved_so(tmp_path):
    network = make()
    assert suits(network)
    model = Model(network, network.config)
    model.use_float8()
    assert not suits(model.network)
    assert model.cast == "float8"
    logits = model.denoiser(torch.zeros(2, 16, dtype=torch.long), 0.5)
    model.use_float8()  # once is enough
    model.network.to(torch.bfloat16).fold_modulation()
    assert torch.equal(model.denoiser(torch.zeros(2, 16, dtype=torch.long), 0.5), logits)
    assert model.denoiser(torch.zeros(0, 16, dtype=torch.long), 0.5).shape == (0, 16, 69)
    assert model.sample(2, steps=3).shape == (2, 16)
    with pytest.raises(UserError, match="float8"):
        model.save(tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_by_name():
    model = didi.load("stories", device="cpu", dtype="float8")
    assert is_float8(model.network)
    text = model.generate(1, steps=2, seed=0)[0]
    assert len(text) > 50


def test_other_networks_are_refused():
    network = nn.Linear(2, 2)
    model = Model(network, make().config)
    with pytest.raises(UserError, match="bfloat16"):
        model.use_float8()
