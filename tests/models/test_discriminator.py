import copy
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from tests.random_models import randomise

from didi_instruct.config.model import ModelConfig, architecture
from didi_instruct.config.pretrain import OptimConfig
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
from didi_instruct.models.network import Mixture
from didi_instruct.training.optim import Updater

from .plain_networks import discriminator_logits

CONFIG = ModelConfig(layers=3, hidden=16, heads=2, cond_dim=8, vocab_size=11, length=12)
TIMED = ModelConfig(
    layers=2, hidden=16, heads=4, cond_dim=8, vocab_size=11, length=12, time_conditioning=True
)
TOKENS = torch.randint(11, (3, 7), generator=torch.Generator().manual_seed(1))
SIGMA = torch.tensor([0.01, 0.7, 6.9])


class Whole(DiT):
    """A network whose trunk cannot be run in parts."""

    splits = False


def states(trunk):
    """States after the last block."""
    return trunk.trunk(trunk.embed(TOKENS), trunk.modulations(SIGMA))


@pytest.mark.parametrize(("name", "count"), [("small", 131_371_265), ("medium", 373_747_969)])
def test_published_parameter_counts(name, count):
    with torch.device("meta"):
        discriminator = build_discriminator(architecture(name))
    assert sum(p.numel() for p in discriminator.parameters()) == count


def test_keys_are_the_trunks_and_the_releases_head():
    head = {
        f"output_layer.main.{n}.{name}"
        for n in (0, 2)
        for name in ("weight_orig", "weight_u", "weight_v", "bias")
    }
    trunk = {k for k in DiT(CONFIG).state_dict() if not k.startswith("output_layer")}
    assert set(build_discriminator(CONFIG).state_dict()) == trunk | head


@pytest.mark.parametrize("config", [CONFIG, TIMED], ids=["constant", "timed"])
@torch.no_grad()
def test_logits_equal_the_plain_reference(config):
    discriminator = randomise(build_discriminator(config)).eval()
    logits = discriminator(TOKENS, SIGMA)
    assert logits.shape == TOKENS.shape
    state = discriminator.state_dict()
    for row in range(3):
        expected = discriminator_logits(state, config, TOKENS[row], SIGMA[row].item())
        torch.testing.assert_close(logits[row], expected, rtol=1e-5, atol=1e-5)


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


def test_power_iteration_runs_in_training_alone():
    torch.manual_seed(0)
    discriminator = build_discriminator(CONFIG).eval()
    with torch.no_grad():
        discriminator.output_layer.main[0].weight_orig.normal_()
    before = discriminator.output_layer.main[0].weight_u.clone()
    discriminator(TOKENS)
    assert torch.equal(discriminator.output_layer.main[0].weight_u, before)
    discriminator.train()(TOKENS)
    assert not torch.equal(discriminator.output_layer.main[0].weight_u, before)


def test_nothing_is_computed_on_the_meta_device(monkeypatch):
    monkeypatch.setattr(SpectralLinear, "_iterate", lambda *_: pytest.fail("iterated"))
    with torch.device("meta"):
        assert build_discriminator(CONFIG).output_layer.main[0].weight_u.is_meta
    with pytest.raises(pytest.fail.Exception):
        SpectralLinear(2, 2)


def test_largest_singular_value_is_one_from_the_start():
    torch.manual_seed(0)
    for layer in (SpectralLinear(32, 32).eval(), SpectralLinear(32, 1).eval()):
        assert torch.linalg.matrix_norm(layer.weight(), 2).item() == pytest.approx(1, abs=0.05)


def test_two_passes_before_one_backward():
    """A power iteration must not disturb the graph of an earlier pass."""
    torch.manual_seed(0)
    discriminator = build_discriminator(CONFIG).train()
    (discriminator(TOKENS).mean() - discriminator(TOKENS.flip(0)).mean()).backward()
    assert discriminator.output_layer.main[0].weight_orig.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_from_network_copies_the_trunk(dtype):
    dit = randomise(DiT(CONFIG)).to(dtype).eval()
    discriminator = Discriminator.from_network(dit).eval()
    hidden = states(discriminator.trunk)
    assert torch.equal(hidden, states(dit))
    assert discriminator(TOKENS, SIGMA).isfinite().all()
    dit.vocab_embed.embedding.zero_()
    assert torch.equal(states(discriminator.trunk), hidden)
    assert all(p.requires_grad and p.dtype == dtype for p in discriminator.parameters())


@pytest.mark.parametrize("trainable", [0, 2, 3])
def test_freeze_lower_leaves_the_last_blocks_and_the_head(trainable):
    discriminator = build_discriminator(CONFIG)
    discriminator.freeze_lower(trainable)
    kept = ("output_layer.", *(f"blocks.{n}." for n in range(3 - trainable, 3)))
    for name, parameter in discriminator.named_parameters():
        assert parameter.requires_grad == flat_name(name).startswith(kept), name
    with pytest.raises(ValueError, match="4 trainable blocks of 3"):
        discriminator.freeze_lower(4)


def test_checkpoints_and_files_name_the_trunk_like_a_dit(tmp_path):
    """Names that were written before a discriminator was made of two parts."""
    dit, critic = DiT(CONFIG), build_discriminator(CONFIG)
    updater = Updater(critic, OptimConfig(), 10, ema=0.9)
    body = [n for n, _ in dit.named_parameters() if not n.startswith("output_layer.")]
    parts = [f"output_layer.main.{n}.{name}" for n in (0, 2) for name in ("bias", "weight_orig")]
    kinds = ("model", "ema", *(f"optimizer/{k}" for k in ("step", "exp_avg", "exp_avg_sq")))
    vectors = [f"output_layer.main.{n}.weight_{name}" for n in (0, 2) for name in "uv"]
    buffers = ["rotary_emb.inv_freq", "rotary_emb.cos", "rotary_emb.sin", *vectors]
    assert set(updater.tensors()) == {
        *(f"{kind}/{name}" for kind in kinds for name in (*body, *parts)),
        *(f"buffer/{name}" for name in buffers),
    }
    save_model(tmp_path / "m", dit, CONFIG, discriminator=critic)
    with safe_open(tmp_path / "m" / "discriminator.safetensors", "pt") as file:
        assert set(file.keys()) == {*body, *parts, *vectors, "rotary_emb.inv_freq"}


def test_a_state_dict_goes_through_any_module_around_it():
    """FSDP and DDP wrap a discriminator in modules of their own."""
    critics = [randomise(build_discriminator(CONFIG), seed) for seed in (0, 1)]
    one, other = (torch.nn.ModuleDict({"network": critic.eval()}) for critic in critics)
    other.load_state_dict(one.state_dict())
    assert torch.equal(critics[0](TOKENS), critics[1](TOKENS))
    assert all(name.startswith("network.") for name in one.state_dict())
    with pytest.raises(RuntimeError, match="Unexpected"):
        critics[1].load_state_dict(critics[0].state_dict() | {"more": torch.zeros(1)})
    copied = copy.deepcopy(critics[0])
    assert list(copied.state_dict()) == list(critics[0].state_dict())


def test_a_trunk_that_cannot_be_split_is_read_whole():
    critic = Discriminator(Whole(CONFIG, head=False))
    critic.freeze_lower(1)
    assert critic.frozen == 0
    assert build_discriminator(CONFIG).trunk.splits


@pytest.mark.parametrize("config", [CONFIG, TIMED], ids=["constant", "timed"])
@pytest.mark.parametrize("trainable", [0, 1])
def test_frozen_blocks_and_the_rest_are_the_whole(config, trainable):
    """Logits and gradients, too, with learned positions, which are added once."""
    config = replace(config, learned_positions=True)
    discriminator = randomise(build_discriminator(config)).eval()
    assert discriminator.frozen == 0, "everything learns"
    discriminator.freeze_lower(trainable)
    assert discriminator.frozen == config.layers - trainable
    whole = discriminator(TOKENS, SIGMA)
    state = discriminator.below(TOKENS, SIGMA)
    assert not state.requires_grad
    parts = discriminator.above(state, SIGMA)
    torch.testing.assert_close(parts, whole)
    learned = [p for p in discriminator.parameters() if p.requires_grad]
    for ours, theirs in zip(
        *(torch.autograd.grad(logits.square().sum(), learned) for logits in (parts, whole)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


def told(discriminator, vectors):
    """Log-ratios of the third position of all texts, which show vectors everywhere."""
    return discriminator(TOKENS, SIGMA, mixture=Mixture(None, vectors))[:, 2].sum()


def test_gradient_reaches_soft_embeddings():
    """What guided sampling needs: the reward's gradient with respect to its input vectors."""
    discriminator = randomise(build_discriminator(CONFIG)).eval().requires_grad_(False)
    soft = discriminator.vectors[TOKENS].requires_grad_()
    told(discriminator, soft).backward()
    direction = torch.randn(soft.shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        step = 1e-3 * direction
        up, down = told(discriminator, soft + step), told(discriminator, soft - step)
    assert (up - down).item() / 2e-3 == pytest.approx(
        (soft.grad * direction).sum().item(), rel=1e-2, abs=1e-3
    )


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
    for found in (low(hidden), autocast_of(head, hidden)):
        assert found.dtype == torch.float32
    torch.testing.assert_close(low(hidden).double(), expected, rtol=1e-5, atol=1e-5)
    assert (low(hidden).bfloat16().double() - expected).sum().abs() > 0.05, "else nothing is shown"


def autocast_of(head, hidden):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return head(hidden)
