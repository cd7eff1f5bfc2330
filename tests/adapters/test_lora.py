"""Roles on one frozen network: their outputs, their gradients, and what stays as it was."""

import copy

import pytest
import torch
from tests.models.causal_folders import BIDIRECTIONAL, INNER, LAYERS, MASK
from tests.random_models import save_random

from didi_instruct.adapters.lora import Lora, LoraLinear, adapt, layers
from didi_instruct.config.distill import DistillConfig
from didi_instruct.config.schema import parse
from didi_instruct.config.train import LoraConfig
from didi_instruct.errors import UserError
from didi_instruct.models.discriminator import Discriminator
from didi_instruct.models.masked_lm import load_masked_lm
from didi_instruct.models.network import logits_at

RANK = 3
TOKENS = torch.tensor([[3, 4, 99, 6, 7], [99, 5, 99, 99, 8]]).where(
    torch.tensor([[1, 1, 0, 1, 1], [0, 1, 0, 0, 1]]).bool(), torch.tensor(16)
)


@pytest.fixture(params=BIDIRECTIONAL)
def base(request, tmp_path):
    BIDIRECTIONAL[request.param](tmp_path)
    return load_masked_lm(tmp_path).model


def role(base, seed, **changes):
    """A role whose adapters add something."""
    found = adapt(base, LoraConfig(rank=RANK, **changes), seed=seed)
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            if name.endswith(".B"):
                parameter.normal_(generator=torch.Generator().manual_seed(seed)).mul_(0.1)
    return found


def full(found):
    """The same network with whole weights of its own."""
    return copy.deepcopy(found.merged()).requires_grad_(True)


def loss(network):
    return network(TOKENS).log_softmax(-1)[..., 5].sum()


def gradients_of_adapters(found, whole):
    """Gradients of A and B by the chain rule from those of the merged weights."""
    expected = {}
    for n, (adapters, block) in enumerate(zip(found.blocks, whole.blocks, strict=True)):
        for path, linear in layers(block).items():
            key = path.replace(".", "/")
            lora, slope = adapters[key], linear.weight.grad
            expected[f"blocks.{n}.{key}.A"] = lora.scale * lora.B.T @ slope
            expected[f"blocks.{n}.{key}.B"] = lora.scale * slope @ lora.A.T
    return expected


def assert_gradients(found, whole):
    expected = gradients_of_adapters(found, whole)
    assert expected.keys() == dict(found.named_parameters()).keys()
    for name, parameter in found.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("checkpointing", [True, False])
def test_a_roles_gradient_is_that_of_merged_weights(base, checkpointing):
    found = role(base, 1, checkpointing=checkpointing).requires_grad_(True)
    whole = full(found)
    loss(found).backward()
    loss(whole).backward()
    assert_gradients(found, whole)


@pytest.mark.parametrize("checkpointing", [True, False])
def test_passes_of_roles_may_overlap_in_any_order(base, checkpointing):
    """Another role and the teacher run between a role's pass and its gradient."""
    one, other = (role(base, seed, checkpointing=checkpointing) for seed in (1, 2))
    wholes = full(one), full(other)
    for whole in wholes:
        loss(whole).backward()
    first = loss(one)
    second = loss(other)
    with torch.no_grad():
        base(TOKENS)
    first.backward()
    with torch.no_grad():
        base(TOKENS)
    second.backward()
    for found, whole in zip((one, other), wholes, strict=True):
        assert_gradients(found, whole)


def test_checkpointing_keeps_less_and_changes_no_bit(base):
    kept = {}
    for checkpointing in (True, False):
        found, sizes = role(base, 1, checkpointing=checkpointing), []
        hooks = (lambda t, sizes=sizes: sizes.append(t.numel()) or t), (lambda t: t)
        with torch.autograd.graph.saved_tensors_hooks(*hooks):
            value = loss(found)
        value.backward()
        grads = [p.grad for p in found.parameters()]
        kept[checkpointing] = value, grads, sum(sizes)
    assert torch.equal(kept[True][0], kept[False][0])
    assert all(map(torch.equal, kept[True][1], kept[False][1]))
    assert kept[True][2] < kept[False][2]


def test_what_dropout_leaves_out_is_the_same_when_a_block_is_computed_again(base):
    for block in base.blocks:
        block.self_attn.attention_dropout = 0.3
    kept = {}
    for checkpointing in (True, False):
        found = role(base, 1, checkpointing=checkpointing).train()
        torch.manual_seed(0)
        loss(found).backward()
        kept[checkpointing] = [p.grad for p in found.parameters()]
    assert all(map(torch.equal, kept[True], kept[False]))
    torch.manual_seed(1)
    other = role(base, 1, checkpointing=False).train()
    loss(other).backward()
    assert not all(map(torch.equal, kept[True], [p.grad for p in other.parameters()]))


def test_a_new_role_is_the_teacher_bit_by_bit(base):
    found = adapt(base, LoraConfig(rank=RANK))
    assert torch.equal(found(TOKENS), base(TOKENS))
    at = torch.tensor([0, 7])
    assert torch.equal(logits_at(found, TOKENS, None, at), logits_at(base, TOKENS, None, at))


def test_merged_weights_give_the_same_logits(base):
    found = role(base, 1)
    assert not torch.allclose(found(TOKENS), base(TOKENS), atol=1e-2)
    torch.testing.assert_close(found.merged()(TOKENS), found(TOKENS), atol=1e-5, rtol=0)
    assert found.merged().state_dict().keys() == base.state_dict().keys()


def test_roles_share_weights_and_own_their_adapters(base):
    before = copy.deepcopy(base.state_dict())
    one, other = role(base, 1), role(base, 2)
    linears = [each for block in base.blocks for each in layers(block).values()]
    numbers = sum(RANK * (each.in_features + each.out_features) for each in linears)
    assert sum(p.numel() for p in one.parameters()) == numbers
    assert not list(one.buffers())
    optimizer = torch.optim.SGD(one.parameters(), lr=1.0)
    kept = [p.detach().clone() for p in other.parameters()]
    loss(one).backward()
    optimizer.step()
    assert all(map(torch.equal, before.values(), base.state_dict().values()))
    assert all(map(torch.equal, kept, other.parameters()))
    assert all(p.grad is None and not p.requires_grad for p in base.parameters())
    twin = copy.deepcopy(one)
    assert torch.equal(twin(TOKENS), one(TOKENS))
    optimizer.step()
    assert not torch.equal(twin(TOKENS), one(TOKENS))
    linear = twin._network.blocks[0].self_attn.q_proj
    assert isinstance(linear, LoraLinear)
    assert linear.linear is base.blocks[0].self_attn.q_proj


def test_a_discriminator_is_a_role_with_a_head(base):
    """One frozen trunk; adapters can learn in the last blocks alone."""
    torch.manual_seed(0)
    found = Discriminator.from_network(role(base, 1)).requires_grad_(True)
    expected = copy.deepcopy(found.trunk.merged())
    whole = Discriminator(expected)
    whole.output_layer = found.output_layer
    torch.testing.assert_close(found(TOKENS), whole(TOKENS), atol=1e-5, rtol=1e-5)
    found.freeze_lower(1)
    found(TOKENS).sum().backward()
    learn = {name for name, p in found.named_parameters() if p.grad is not None}
    assert all(name.startswith(("trunk.blocks.1.", "output_layer.")) for name in learn)
    assert sum(name.endswith("A") for name in learn) == len(layers(base.blocks[1]))
    assert {p.dtype for p in found.parameters()} == {torch.float32}


def test_adapters_of_a_base_in_16_bits_are_float32(tmp_path):
    """And what they add is not rounded to the base's type before it is added."""
    BIDIRECTIONAL["llada"](tmp_path, dtype=torch.bfloat16)
    base = load_masked_lm(tmp_path).model
    found = role(base, 1)
    assert {p.dtype for p in found.parameters()} == {torch.float32}
    found.eval()(TOKENS).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in found.parameters())
    assert {t.dtype for t in found.merged().state_dict().values()} == {torch.bfloat16}


def test_several_masks_are_learnt_beside_the_adapters(base):
    offsets = torch.randn(2, base.config.hidden, generator=torch.Generator().manual_seed(0))
    found, whole = role(base, 1).with_masks(offsets), role(base, 1).merged().with_masks(offsets)
    assert found.config == whole.config
    assert base.codes is None
    tokens = TOKENS.where(TOKENS != MASK, TOKENS + 1)
    torch.testing.assert_close(found(tokens), whole(tokens), atol=1e-5, rtol=0)
    found.requires_grad_(True)
    loss(found).backward()
    assert found.codes.grad.abs().sum() > 0
    torch.testing.assert_close(copy.deepcopy(found)(tokens), found(tokens), atol=0, rtol=0)
    assert copy.deepcopy(found).codes is not found.codes


def test_targets_name_layers_of_every_block(base):
    names = {"q_proj", "up_proj"}
    found = adapt(base, LoraConfig(rank=RANK, targets=tuple(names)))
    adapted = {key.rpartition("/")[2] for block in found.blocks for key in block}
    assert adapted == names
    assert sum(isinstance(m, Lora) for m in found.modules()) == LAYERS * len(names)
    assert found.blocks[0]["mlp/up_proj"].B.shape == (INNER, RANK)


def test_targets_that_match_partly_are_refused(base):
    """The list of a published recipe, of which LLaDA has four."""
    wanted = LoraConfig(rank=RANK, targets=("q_proj", "attn_out", "ff_out", "up_proj"))
    with pytest.raises(UserError) as refused:
        adapt(base, wanted)
    assert "names attn_out, ff_out, which its blocks do not have: use some of" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_networks_of_didis_own_are_refused(tmp_path):
    import didi_instruct as didi

    network = didi.load(save_random(tmp_path / "m")).network
    with pytest.raises(UserError, match="leave out lora.rank"):
        adapt(network, LoraConfig(rank=2))


@pytest.mark.parametrize("changes", [{"rank": -1}, {"rank": 2, "alpha": 0.0}, {"targets": ["q"]}])
def test_settings_that_mean_nothing_are_refused(changes):
    with pytest.raises(UserError, match="lora"):
        parse(DistillConfig, {"lora": changes}, where="r")


def test_a_patched_block_is_not_shared(base):
    base.blocks[0].forward = torch.relu
    with pytest.raises(AssertionError, match="patched"):
        adapt(base, LoraConfig(rank=2))
