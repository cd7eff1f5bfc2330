import dataclasses

import pytest
import torch
from didi_instruct.models.inference import InferenceDiT, suits
from tests.random_models import randomise

from didi_instruct.config.model import ModelConfig
from didi_instruct.models import inference, packed
from didi_instruct.models.dit import DiT

from .plain_networks import dit_logits

TINY = ModelConfig(layers=2, hidden=24, heads=2, cond_dim=8, vocab_size=11, length=40)
MASK = 10
LENGTHS = (0, *[1] * 40)


def network(seed=0, **changes):
    return randomise(DiT(dataclasses.replace(TINY, **changes)), seed).eval()


def text(rows=3, length=37, seed=1):
    """Tokens and masks, without the id 0."""
    return torch.randint(1, 11, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=[True, False], ids=["packed", "plain"])
def one_dnn(request, monkeypatch):
    if not request.param:
        monkeypatch.setattr(packed, "packs", lambda dtype: False)


@pytest.mark.usefixtures("one_dnn")
def test_logits_equal_the_plain_reference():
    dit = network()
    logits = InferenceDiT(dit)(text())
    for row, tokens in zip(logits, text(), strict=True):
        expected = dit_logits(dit.state_dict(), dit.config, tokens, 0.0)[:, :MASK]
        torch.testing.assert_close(row, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("one_dnn")
@pytest.mark.parametrize(
    "changes",
    [
        {"layers": 1},
        {"learned_positions": True},
        {"end_id": 0, "lengths": LENGTHS},
        {"masks": 3, "vocab_size": 13},
        {"kind": "duo"},
    ],
    ids=lambda changes: next(iter(changes)),
)
@torch.no_grad()
def test_every_kind_of_denoiser_has_its_own_logits(changes):
    dit = network(**changes)
    torch.testing.assert_close(InferenceDiT(dit)(text()), dit(text()), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("one_dnn")
@pytest.mark.parametrize("padded", [False, True])
@torch.no_grad()
def test_selected_rows_are_those_of_all_logits(padded):
    """Rows select many positions, few, none; those of one sample alone give the same."""
    dit, tokens = network(), text()
    quick = InferenceDiT(dit)
    attended = torch.arange(37) < torch.tensor([[37], [20], [9]]) if padded else None
    every = dit(tokens, attended=attended)
    where = torch.zeros(3, 37, dtype=torch.bool)
    where[0, 1:30] = True
    where[2, torch.tensor([3, 8])] = True
    found = quick.rows(tokens, where, attended)
    torch.testing.assert_close(found, every[where], rtol=1e-4, atol=1e-4)
    one = quick.rows(tokens[2:], where[2:], None if attended is None else attended[2:])
    torch.testing.assert_close(one, every[2, [3, 8]], rtol=1e-4, atol=1e-4)
    assert quick.rows(tokens, torch.zeros_like(where)).shape == (0, 10)


@torch.no_grad()
def test_bfloat16_is_as_near_as_the_network_in_bfloat16(monkeypatch):
    """Both round at other places: the mean error may be larger by half, as it is not by chance."""
    exact = network()(text())
    rounded = network().bfloat16()
    allowed = 1.5 * (rounded(text()).float() - exact).abs().mean()
    for small in (inference.SMALL, 0):  # both kernels of attention
        monkeypatch.setattr(inference, "SMALL", small)
        assert (InferenceDiT(rounded)(text()).float() - exact).abs().mean() < allowed


@torch.no_grad()
def test_a_cast_there_and_back_is_noticed():
    """It rounds, and the rounded weights may come to lie where the old ones lay."""
    dit = network()
    quick = InferenceDiT(dit)
    dit.bfloat16().float()
    assert not quick.is_current(dit)


def test_new_weights_are_noticed():
    dit = network()
    quick = InferenceDiT(dit)
    assert quick.is_current(dit)
    with torch.no_grad():
        dit.blocks[1].mlp[2].bias[0] += 1
    assert not quick.is_current(dit)
    quick = InferenceDiT(dit)
    dit.load_state_dict({k: v.clone() for k, v in dit.state_dict().items()}, assign=True)
    assert not quick.is_current(dit)
    assert not InferenceDiT(dit).is_current(network())


def test_networks_it_is_not_for():
    assert suits(network())
    assert suits(network().bfloat16())
    for other in (network(time_conditioning=True), network().double(), network().train()):
        assert not suits(other)
    assert not suits(network().to("meta"))
    assert not suits(torch.nn.Linear(2, 2))
