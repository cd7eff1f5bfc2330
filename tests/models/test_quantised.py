"""Weights in fewer bytes: what comes back is near, whole and checked before it is read."""

import json

import pytest
import torch
from safetensors.torch import load_file
from tests.random_models import randomise

from didi_instruct.config.model import ModelConfig, ScheduleConfig
from didi_instruct.errors import UserError
from didi_instruct.models import quantised
from didi_instruct.models.checkpoint import load_model, save_model
from didi_instruct.models.discriminator import build_discriminator, flat_name
from didi_instruct.models.dit import build_model
from didi_instruct.models.quantised import quantise

from .test_model_checkpoint import TOKENS, WORDS, edit, error_of, rewrite

CONFIG = ModelConfig(
    layers=1, hidden=64, heads=2, cond_dim=8, vocab_size=70, length=12, learned_positions=True,
    schedule=ScheduleConfig(eps=0.0),
)  # fmt: skip
SMALLEST = 2048


def network(seed=0):
    return randomise(build_model(CONFIG), seed).eval()


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Matrices of a tiny network are large enough here."""
    monkeypatch.setattr(quantised, "SMALLEST_MATRIX", SMALLEST)


@pytest.fixture
def folder(tmp_path):
    critic = randomise(build_discriminator(CONFIG), 7)
    return save_model(tmp_path / "m", network(), CONFIG, WORDS, critic, storage="int8")


def test_rows_are_rounded_to_within_half_a_step():
    """Least squares may only be better than the scale that clips nothing, row by row.

    And no other scale is nearer: the derivative of the squared error by the scale vanishes.
    """
    matrix = torch.randn(200, 256, generator=torch.Generator().manual_seed(0))
    numbers, scale = quantise(matrix)
    assert (numbers.dtype, scale.shape) == (torch.int8, (200,))
    assert int(numbers.min()) >= -127
    plain = matrix.abs().amax(1, keepdim=True) / 127
    largest = ((matrix / plain).round() * plain - matrix).square().sum(1)
    found = (numbers * scale[:, None] - matrix).square().sum(1)
    assert (found <= largest * (1 + 1e-5)).all()
    assert found.sum() < 0.995 * largest.sum()
    slope = ((matrix.double() - numbers * scale[:, None].double()) * numbers).sum(1)
    assert slope.abs().max() < 1e-4 * numbers.double().square().sum(1).max()


def test_a_row_with_one_large_number_is_clipped():
    """Of 2,000 numbers ±1 and one of 2.6 × 127: to clip costs less than to lose the many."""
    row = torch.ones(1, 2000) * torch.tensor([1.0, -1.0]).repeat(1000)
    row[0, 0] = 2.6 * 127
    numbers, scale = quantise(row)
    error = (numbers * scale[:, None] - row).square().sum()
    step = row.max() / 127
    plain = ((row / step).round().clamp(-127, 127) * step - row).square().sum()
    assert plain == pytest.approx(1999)  # each ±1 is nearer to 0 than to a step of 2.6
    assert error < plain * 2


def test_rows_of_nothing_and_of_next_to_nothing():
    matrix = torch.tensor([[0.0, 0.0], [1e-42, -1e-42], [1e30, -1e30], [2.0, -1.0]])
    numbers, scale = quantise(matrix)
    back = numbers * scale[:, None]
    assert back.isfinite().all()
    assert torch.equal(back[0], matrix[0])
    step = matrix.abs().amax(1, keepdim=True) / 127
    assert ((back - matrix).abs() <= step)[[0, 2, 3]].all()


def test_what_is_on_a_grid_survives(tmp_path, folder):
    """Whole numbers times a power of two are what int8 holds; so is what was stored before."""
    model = network()
    generator = torch.Generator().manual_seed(2)
    for parameter in (p.detach() for p in model.parameters() if p.ndim == 2):
        whole = torch.randint(-127, 128, parameter.shape, generator=generator).float()
        whole[:, 0] = 127
        parameter.copy_(whole * 2.0**-9)
    for number, once in enumerate((model, load_model(folder).model)):
        save_model(tmp_path / str(number), once, CONFIG, storage="int8")
        twice = load_model(tmp_path / str(number)).model.state_dict()
        for name, tensor in once.state_dict().items():
            torch.testing.assert_close(twice[name], tensor, rtol=1e-5, atol=1e-7, msg=name)


@torch.no_grad()
def test_a_network_comes_back_near_and_in_float32(folder):
    """Each matrix within 1% of its norm; vectors and buffers to the bit."""
    loaded = load_model(folder)
    pairs = [
        (loaded.model, network()),
        (loaded.discriminator, randomise(build_discriminator(CONFIG), 7)),
    ]
    for found, expected in pairs:
        parameters = {flat_name(n): p for n, p in found.named_parameters()}
        assert {p.dtype for p in parameters.values()} == {torch.float32}
        for name, tensor in expected.state_dict().items():
            if name in parameters and tensor.ndim == 2 and tensor.numel() >= SMALLEST:
                assert 0 < (parameters[name] - tensor).norm() < 0.01 * tensor.norm(), name
            elif not name.endswith(("weight_u", "weight_v")):  # drawn at random in each
                assert torch.equal(found.state_dict()[name], tensor), name
    exact = network()(TOKENS)
    assert (loaded.model(TOKENS) - exact).norm() < 0.1 * exact.norm()
    half = load_model(folder, dtype=torch.bfloat16).model
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert half.rotary_emb.inv_freq.dtype == torch.float32


def test_the_file_says_what_it_holds(folder, tmp_path):
    tensors = load_file(folder / "model.safetensors")
    scales = {name for name in tensors if name.endswith(".scale")}
    eight = {name for name, tensor in tensors.items() if tensor.dtype == torch.int8}
    matrices = {n for n, p in network().named_parameters() if p.ndim == 2 and p.numel() >= SMALLEST}
    assert {name.removesuffix(".scale") for name in scales} == eight == matrices
    assert set(tensors) - scales == set(network().state_dict())
    assert json.loads((folder / "config.json").read_text())["storage"] == "int8"
    read = load_model(folder).model.state_dict()
    for name in eight:
        assert torch.equal(tensors[name] * tensors[f"{name}.scale"][:, None], read[name])
    plain = save_model(tmp_path / "plain", network(), CONFIG)
    assert "storage" not in json.loads((plain / "config.json").read_text())
    sizes = [(f / "model.safetensors").stat().st_size for f in (folder, plain)]
    assert sizes[0] < 0.4 * sizes[1]


@pytest.mark.parametrize("storage", ["float32", "bfloat16"])
def test_floats_are_read_as_float32(tmp_path, storage):
    save_model(tmp_path, network(), CONFIG, storage=storage)
    found = load_model(tmp_path).model.state_dict()
    for name, parameter in network().named_parameters():
        assert torch.equal(found[name], parameter.to(getattr(torch, storage)).float()), name
    assert load_model(tmp_path, dtype=torch.bfloat16).model.state_dict()[name].element_size() == 2


def test_integers_are_weights_only_where_that_is_said(folder):
    edit(folder, lambda c: c.pop("storage"))
    assert "holds I8, not real numbers" in error_of(folder)


NAME = "blocks.0.attn_out.weight"
SCALE = f"{NAME}.scale"
ALONE = f"{NAME} has 8 bits without a scale"
NORM = "blocks.0.norm1.weight.scale"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(SCALE), ALONE),
        (lambda t: t.update({SCALE: t[SCALE][:-1]}), ALONE),
        (lambda t: t.update({SCALE: t[SCALE].double()}), ALONE),
        (lambda t: t.update({NAME: t[NAME][0]}), ALONE),
        (lambda t: t.update({NAME: t[NAME][:, :8]}), f"{NAME} (64, 8) for (64, 64)"),
        (lambda t: t.update({NORM: torch.ones(64)}), f"1 tensor unexpected ({NORM})"),
    ],
)
def test_what_does_not_fit_is_named_before_anything_is_read(folder, monkeypatch, change, message):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    rewrite(folder, "model.safetensors", tensors)
    monkeypatch.setattr(quantised.StoredWeights, "read", pytest.fail)
    assert message in error_of(folder)


def test_what_is_not_finite_is_not_stored(tmp_path):
    model = network()
    model.vocab_embed.embedding.data[3, 3] = torch.nan
    with pytest.raises(UserError, match="vocab_embed.embedding holds numbers that are not finite"):
        save_model(tmp_path / "m", model, CONFIG, storage="int8")
    assert not (tmp_path / "m").exists()
