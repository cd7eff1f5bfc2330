import copy
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from tests.random_models import randomise

from didi_instruct.config.model import ModelConfig
from didi_instruct.config.train import OptimConfig
from didi_instruct.models.checkpoint import save_model
from didi_instruct.models.discriminator import (
    Discriminator,
    DiscriminatorHead,
    SpectralLinear,
    build_discriminator,
    flat_name,
)
from didi_instruct.models.dit import DiT
from didi_instruct.models.layers import upcast
from didi_instruct.training.optim import Updater

from .plain_networks import discriminator_logits

CONFIG = ModelConfig(layers=3, hidden=16, heads=2, cond_dim=8, vocab_size=11, length=12)
TIMED = replace(CONFIG, layers=2, heads=4, time_conditioning=True)
TOKENS = torch.randint(11, (3, 7), generator=torch.Generator().manual_seed(1))
SIGMA = torch.tensor([0.01, 0.7, 6.9])
WEIGHTS = [f"output_layer.main.{n}.{name}" for n in (0, 2) for name in ("bias", "weight_orig")]
VECTORS = [f"output_layer.main.{n}.weight_{name}" for n in (0, 2) for name in "uv"]
both = pytest.mark.parametrize("config", [CONFIG, TIMED], ids=["constant", "timed"])


def make(config=CONFIG, seed=0):
    return randomise(build_discriminator(config), seed).eval()


# The head


def test_normalisation_is_that_of_torch():
    """Weights, singular vectors and gradients through three training steps and an evaluation."""
    torch.manual_seed(0)
    ours = SpectralLinear(6, 4)
    theirs = torch.nn.utils.spectral_norm(torch.nn.Linear(6, 4))
    theirs.load_state_dict(ours.state_dict())
    for training in (True, True, True, False):
        ours.train(training)
        theirs.train(training)
        x = torch.randn(5, 6)
        for layer in (ours, theirs):
            layer.zero_grad()
            layer(x).square().sum().backward()
        torch.testing.assert_close(ours(x), theirs(x))
        torch.testing.assert_close(dict(ours.state_dict()), dict(theirs.state_dict()))
        torch.testing.assert_close(ours.weight_orig.grad, theirs.weight_orig.grad)


def test_largest_singular_value_is_one_from_the_start():
    torch.manual_seed(0)
    for layer in (SpectralLinear(32, 32).eval(), SpectralLinear(32, 1).eval()):
        assert torch.linalg.matrix_norm(layer.weight(), 2).item() == pytest.approx(1, abs=0.05)


def test_power_iteration_runs_in_training_or_where_it_is_asked_for():
    critic = make()
    u = critic.output_layer.main[0].weight_u
    kept = u.clone()
    critic(TOKENS)
    assert torch.equal(u, kept)
    for iterated in (lambda: critic.train()(TOKENS), critic.eval().iterate):
        iterated()
        assert not torch.equal(u, kept)
        kept = u.clone()


def test_two_passes_before_one_backward():
    """A power iteration must not disturb the graph of an earlier pass."""
    critic = make().train()
    (critic(TOKENS).mean() - critic(TOKENS.flip(0)).mean()).backward()
    assert critic.output_layer.main[0].weight_orig.grad.isfinite().all()


def test_nothing_is_computed_on_the_meta_device(monkeypatch):
    monkeypatch.setattr(SpectralLinear, "iterate", lambda *_: pytest.fail("iterated"))
    with torch.device("meta"):
        assert build_discriminator(CONFIG).output_layer.main[0].weight_u.is_meta
    with pytest.raises(pytest.fail.Exception):
        SpectralLinear(2, 2)


@torch.no_grad()
def test_log_ratios_of_16_bits_add_up():
    """Of 1,000 positions: what 16 bits lose is lost before the last layer, not in what it gives."""
    torch.manual_seed(0)
    head = DiscriminatorHead(64).eval()
    head.main[2].bias.fill_(5.0)
    low = copy.deepcopy(head).bfloat16()
    hidden = torch.randn(1000, 64).bfloat16()
    exact = upcast(low.main[1](low.main[0](hidden))).double()
    expected = torch.nn.functional.linear(
        exact, low.main[2].weight().double(), low.main[2].bias.double()
    )
    found = low(hidden)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert found.dtype == head(hidden).dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    assert (found.bfloat16().double() - expected).sum().abs() > 0.05, "else nothing is shown"


# The whole


@both
@torch.no_grad()
def test_logits_equal_the_plain_reference(config):
    critic = make(config)
    logits = critic(TOKENS, SIGMA)
    for row in range(3):
        expected = discriminator_logits(critic.state_dict(), config, TOKENS[row], SIGMA[row].item())
        torch.testing.assert_close(logits[row], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_from_network_copies_the_trunk(dtype):
    dit = randomise(DiT(replace(CONFIG, learned_positions=True))).to(dtype).eval()
    critic = Discriminator.from_network(dit).eval()
    hidden, expected = (
        trunk.trunk(trunk.embed(TOKENS), trunk.modulations()) for trunk in (critic.trunk, dit)
    )
    assert torch.equal(hidden, expected)
    assert critic(TOKENS, SIGMA).isfinite().all()
    assert all(p.requires_grad and p.dtype == dtype for p in critic.parameters())


# Blocks that do not learn


@pytest.mark.parametrize("trainable", [0, 2, 3])
def test_freeze_lower_leaves_the_last_blocks_and_the_head(trainable):
    critic = build_discriminator(CONFIG)
    critic.freeze_lower(trainable)
    kept = ("output_layer.", *(f"blocks.{n}." for n in range(3 - trainable, 3)))
    for name, parameter in critic.named_parameters():
        assert parameter.requires_grad == flat_name(name).startswith(kept), name
    with pytest.raises(ValueError, match="4 trainable blocks of 3"):
        critic.freeze_lower(4)


@both
@pytest.mark.parametrize("trainable", [0, 1])
def test_frozen_blocks_and_the_rest_are_the_whole(config, trainable):
    """Logits and gradients, too, with learned positions, which are added once."""
    critic = make(replace(config, learned_positions=True))
    assert critic.frozen == 0, "everything learns"
    critic.freeze_lower(trainable)
    assert critic.frozen == config.layers - trainable
    whole, state = critic(TOKENS, SIGMA), critic.below(TOKENS, SIGMA)
    assert not state.requires_grad
    parts = critic.above(state, SIGMA)
    torch.testing.assert_close(parts, whole)
    learned = [p for p in critic.parameters() if p.requires_grad]
    ours, theirs = (torch.autograd.grad(x.square().sum(), learned) for x in (parts, whole))
    torch.testing.assert_close(ours, theirs)


def test_a_trunk_that_cannot_be_split_is_read_whole():
    critic = build_discriminator(CONFIG)
    critic.freeze_lower(1)
    assert critic.frozen == 2
    critic.trunk.splits = False
    assert critic.frozen == 0


# Names of its tensors


def test_checkpoints_and_files_name_the_trunk_like_a_dit(tmp_path):
    """Names that were written before a discriminator was made of two parts."""
    dit, critic = DiT(CONFIG), build_discriminator(CONFIG)
    updater = Updater(critic, OptimConfig(), 10, ema=0.9)
    body = [n for n, _ in dit.named_parameters() if not n.startswith("output_layer.")]
    names = {*body, *WEIGHTS, *VECTORS, "rotary_emb.inv_freq"}
    assert set(critic.state_dict()) == names
    kinds = ("model", "ema", *(f"optimizer/{k}" for k in ("step", "exp_avg", "exp_avg_sq")))
    buffers = ["rotary_emb.inv_freq", "rotary_emb.cos", "rotary_emb.sin", *VECTORS]
    assert set(updater.tensors()) == {
        *(f"{kind}/{name}" for kind in kinds for name in (*body, *WEIGHTS)),
        *(f"buffer/{name}" for name in buffers),
    }
    save_model(tmp_path / "m", dit, CONFIG, discriminator=critic)
    with safe_open(tmp_path / "m" / "discriminator.safetensors", "pt") as file:
        assert set(file.keys()) == names


def test_a_state_dict_goes_through_any_module_around_it():
    """FSDP and DDP wrap a discriminator in modules of their own."""
    critics = [make(seed=seed) for seed in (0, 1)]
    one, other = (torch.nn.ModuleDict({"network": critic}) for critic in critics)
    other.load_state_dict(one.state_dict())
    assert torch.equal(critics[0](TOKENS), critics[1](TOKENS))
    assert all(name.startswith("network.") for name in one.state_dict())
    with pytest.raises(RuntimeError, match="Unexpected"):
        critics[1].load_state_dict(critics[0].state_dict() | {"more": torch.zeros(1)})
    assert list(copy.deepcopy(critics[0]).state_dict()) == list(critics[0].state_dict())
