import copy
import dataclasses
import shutil

import pytest
import torch
from tests.random_models import randomise
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from didi_instruct.config.model import ModelConfig, architecture
from didi_instruct.models.ar import ARModel
from didi_instruct.models.discriminator import build_discriminator
from didi_instruct.models.dit import DiT, build_model, count_parameters, flops_per_token
from didi_instruct.models.layers import Block, LayerNorm
from didi_instruct.models.network import all_logits, logits_at, weights_stamp

from .plain_networks import dit_logits

BLOCK_KEYS = [
    *("norm1.weight", "attn_qkv.weight", "attn_out.weight", "norm2.weight"),
    *("mlp.0.weight", "mlp.0.bias", "mlp.2.weight", "mlp.2.bias"),
    *("adaLN_modulation.weight", "adaLN_modulation.bias"),
]
PARAMETERS = [
    "vocab_embed.embedding",
    *(f"sigma_map.mlp.{n}.{name}" for n in (0, 2) for name in ("weight", "bias")),
    *(f"blocks.{n}.{key}" for n in (0, 1) for key in BLOCK_KEYS),
    *("output_layer.norm_final.weight", "output_layer.linear.weight", "output_layer.linear.bias"),
    *("output_layer.adaLN_modulation.weight", "output_layer.adaLN_modulation.bias"),
]
SIGMA = torch.tensor([0.01, 0.7, 6.9])
timed_or_not = pytest.mark.parametrize("time_conditioning", [False, True])


def config(**changes):
    tiny = ModelConfig(layers=2, hidden=16, heads=2, cond_dim=8, vocab_size=11, length=12)
    return dataclasses.replace(tiny, **changes)


def model(seed=0, **changes):
    return randomise(DiT(config(**changes)), seed).eval()


def tokens_of(batch=3, length=7, vocab_size=11, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (batch, length), generator=generator)


TOKENS = tokens_of()


def states(dit, tokens=TOKENS, sigma=SIGMA):
    """States after the last block, and what modulates the output layer."""
    mods = dit.modulations(sigma)
    return dit.trunk(dit.embed(tokens), mods), mods


# Layout and cost


@pytest.mark.parametrize(
    ("name", "count", "critic"),
    [("small", 169_627_218, 131_371_265), ("medium", 424_477_010, 373_747_969)],
)
def test_published_parameter_counts(name, count, critic):
    assert count_parameters(architecture(name)) == count
    assert count_parameters(architecture(name), build_discriminator) == critic
    with torch.device("meta"):
        logits = build_model(architecture(name))(torch.zeros(2, 1024, dtype=torch.long))
    assert logits.shape == (2, 1024, 50257)


def test_parameters_come_in_the_order_of_foreign_ema_lists():
    """`ema.shadow_params` of Lightning files is an ordered list: order is part of the layout."""
    assert [name for name, _ in DiT(config()).named_parameters()] == PARAMETERS
    assert set(DiT(config()).state_dict()) == {*PARAMETERS, "rotary_emb.inv_freq"}


def test_kind_decides_the_network():
    kinds = {kind: type(build_model(config(kind=kind))) for kind in ("mdlm", "duo", "ar")}
    assert kinds == {"mdlm": DiT, "duo": DiT, "ar": ARModel}


@pytest.mark.parametrize("kind", ["mdlm", "duo"])
def test_flops_are_those_torch_counts(kind):
    """The counter counts every product, the modulation's too: that part is known and subtracted."""
    of, network = config(kind=kind), build_model(config(kind=kind))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        network(tokens_of(length=12))
    d, cond = of.hidden, of.cond_dim
    modulation = 2 * (256 * cond + cond * cond + of.layers * 6 * d * cond + 2 * d * cond)
    assert counter.get_total_flops() - modulation == 36 * flops_per_token(of)


def test_head_fraction_length_and_causality_enter_the_flops():
    whole = flops_per_token(config())
    assert whole - flops_per_token(config(), head_fraction=0) == 2 * 16 * 10
    assert whole - flops_per_token(config(), length=6) == 2 * 4 * 6 * 16
    assert whole - flops_per_token(config(kind="ar")) == 2 * 4 * (12 - 6.5) * 16


def test_initialisation_is_the_references():
    """Modulation and head start at zero, so the logits do; the embedding is kaiming-uniform."""
    torch.manual_seed(0)
    dit = DiT(config(hidden=64))
    zero = {n for n, p in dit.named_parameters() if not p.any()}
    assert zero == {n for n in PARAMETERS if "adaLN" in n or "output_layer.linear" in n}
    bound = 1 / 64**0.5  # kaiming_uniform with a = sqrt(5): 1 / sqrt(fan_in)
    assert 0.95 * bound < dit.vocab_embed.embedding.abs().max() <= bound


# Logits


@pytest.mark.parametrize("changes", [{}, {"kind": "duo"}, {"learned_positions": True}], ids=str)
@timed_or_not
@torch.no_grad()
def test_logits_equal_the_plain_reference(time_conditioning, changes):
    dit = model(time_conditioning=time_conditioning, **changes)
    num = dit.config.num_tokens
    assert num == (11 if changes.get("kind") == "duo" else 10)
    logits = dit(TOKENS, SIGMA)
    for row in range(3):
        expected = dit_logits(dit.state_dict(), dit.config, TOKENS[row], SIGMA[row].item())
        torch.testing.assert_close(logits[row], expected[:, :num], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dit.head(*states(dit)), logits)


@pytest.mark.parametrize("learned", [False, True])
@torch.no_grad()
def test_masks_look_alike_everywhere_without_learned_positions(learned):
    """Rotary positions are relative: equal values averaged with any weights are equal."""
    dit = model(learned_positions=learned)
    logits = dit(torch.full((1, 6), dit.config.mask_id))[0]
    assert torch.allclose(logits, logits[:1].expand_as(logits), atol=1e-5) is not learned
    plain, more = (ModelConfig(learned_positions=on) for on in (False, True))
    assert count_parameters(more) - count_parameters(plain) == 1024 * 768


@torch.no_grad()
def test_time_matters_only_with_time_conditioning():
    low, high = torch.full((3,), 0.1), torch.full((3,), 5.0)
    assert torch.equal(model()(TOKENS, low), model()(TOKENS, high))
    timed = model(time_conditioning=True)
    assert (timed(TOKENS, low) - timed(TOKENS, high)).abs().max() > 0.1
    torch.testing.assert_close(timed(TOKENS, 0.1), timed(TOKENS, low), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(timed(TOKENS, low[:, None]), timed(TOKENS, low))
    with pytest.raises(ValueError, match="sigma is needed"):
        timed(TOKENS)


def test_constant_modulation_has_the_gradient_of_a_repeated_one():
    """One broadcast row of modulation, against a time-conditioned model given sigma 0 per row."""
    constant, repeated = model(), model(time_conditioning=True)
    constant(TOKENS).square().mean().backward()
    repeated(TOKENS, torch.zeros(3)).square().mean().backward()
    for (name, p), q in zip(constant.named_parameters(), repeated.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_padding_is_never_attended():
    """And a row of padding alone harms no gradient."""
    dit, mask = model(), torch.arange(7) < torch.tensor([[7], [4], [0]])
    logits = dit(TOKENS, attended=mask)
    other = torch.where(mask, TOKENS, (TOKENS + 1) % 10)
    torch.testing.assert_close(dit(other, attended=mask)[mask], logits[mask])
    short = dit(TOKENS[1:2, :4])
    torch.testing.assert_close(logits[1:2, :4], short, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits[0], dit(TOKENS)[0], rtol=1e-5, atol=1e-5)
    logits[mask].sum().backward()
    assert all(p.grad.isfinite().all() for p in dit.parameters())


def test_dropout_acts_in_training_alone_and_on_the_branches():
    dit = model(dropout=0.5)
    assert torch.equal(dit(TOKENS), model()(TOKENS))
    dit.train()
    assert not torch.equal(dit(TOKENS), dit(TOKENS))
    with torch.no_grad():  # closed gates leave nothing for dropout to act on
        for block in dit.blocks:
            block.adaLN_modulation.weight.zero_()
            block.adaLN_modulation.bias.zero_()
    assert torch.equal(states(dit)[0], dit.embed(TOKENS))


# Precision


def test_norm_is_computed_in_float32_under_autocast():
    """Rounding 1000 + noise to bfloat16 (steps of 4) would lose the noise."""
    x = 1000 + torch.randn(5, 16, generator=torch.Generator().manual_seed(0))
    norm = LayerNorm(16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = norm(x)
        shift, scale = torch.ones(5, 16), torch.full((5, 16), 0.5)
        modulated = norm(x, *norm.modulated(shift, scale))
    expected = torch.nn.functional.layer_norm(x.double(), (16,))
    assert y.dtype == modulated.dtype == torch.float32
    torch.testing.assert_close(y.double(), expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(modulated.double(), expected * 1.5 + 1, rtol=1e-3, atol=1e-3)


@timed_or_not
@torch.no_grad()
def test_lower_precision_stays_close_and_keeps_the_residual_in_float32(time_conditioning):
    dit = model(time_conditioning=time_conditioning)
    exact = dit(TOKENS, SIGMA)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert states(dit)[0].dtype == torch.float32
        mixed = dit(TOKENS, SIGMA)
    dit.bfloat16()
    assert dit.rotary_emb.cos.dtype == dit.rotary_emb.inv_freq.dtype == torch.float32
    assert states(dit)[0].dtype == torch.float32
    for rough in (mixed, dit(TOKENS, SIGMA)):
        assert (rough - exact).norm() < 0.05 * exact.norm()


# What is computed once


def test_constants_change_nothing():
    """Bit for bit, at every position and at some; of a network without a head, too."""
    dit, at, calls = model(), torch.tensor([0, 9]), []
    expected = dit(TOKENS)
    mods, headless = dit.constants(), dit.without_head()
    assert not any(layer.requires_grad for layer in mods.layers)
    for layer in (*dit.blocks, dit.output_layer):
        layer.adaLN_modulation.register_forward_hook(lambda *_: calls.append(1))
    assert torch.equal(all_logits(dit, TOKENS, mods=mods), expected)
    some = logits_at(dit, TOKENS, None, at, mods=mods)
    hidden = dit.trunk(dit.embed(TOKENS), mods)
    assert not calls
    assert torch.equal(some, logits_at(dit, TOKENS, None, at))
    assert len(calls) == 3
    assert torch.equal(headless.trunk(headless.embed(TOKENS), headless.constants()), hidden)
    assert model(time_conditioning=True).constants() is None


@torch.no_grad()
def test_a_stamp_tells_that_weights_have_changed():
    """In place, by loading, by a move or a cast, there and back."""
    other, holder = model(seed=5), torch.nn.ModuleDict({"inner": model()})

    def step(dit):
        for p, q in zip(dit.parameters(), other.parameters(), strict=True):
            p.copy_(q)

    changes = [
        step,
        lambda dit: dit.load_state_dict(other.state_dict()),
        lambda dit: dit.load_state_dict(other.state_dict(), assign=True),
        lambda dit: dit.blocks[1].mlp[2].bias.add_(1),
        lambda dit: dit.bfloat16().float(),
        lambda dit: dit.rotary_emb.cos.mul_(2),
    ]
    for change in changes:
        dit = model()
        stamp = weights_stamp(dit)
        dit(TOKENS)
        assert weights_stamp(dit.train().eval()) == stamp
        change(dit)
        assert weights_stamp(dit) != stamp
    stamp = weights_stamp(holder["inner"])
    holder.load_state_dict({f"inner.{k}": v for k, v in other.state_dict().items()})
    assert weights_stamp(holder["inner"]) != stamp
    assert weights_stamp(copy.deepcopy(other)) != weights_stamp(other)


# Tables of the rotary positions


@torch.no_grad()
def test_tables_are_rebuilt_when_a_model_leaves_the_meta_device():
    source = model()
    with torch.device("meta"):
        emptied, assigned = DiT(config()), DiT(config())
    emptied.to_empty(device="cpu").load_state_dict(source.state_dict())
    assigned.load_state_dict(source.state_dict(), assign=True)
    for dit in (emptied, assigned):
        torch.testing.assert_close(dit.eval()(TOKENS), source(TOKENS))


def test_no_table_is_built_on_the_meta_device():
    """A length that a file claims must not cost memory (here petabytes) before it is checked."""
    with torch.device("meta"):
        dit = DiT(config(length=10**14))
    assert dit.rotary_emb.cos.shape == (10**14, dit.rotary_emb.width // 2)
    assert dit.rotary_emb.cos.is_meta


def test_foreign_frequencies_are_checked():
    """16-bit frequencies are replaced by exact ones; those of another base are refused."""
    source, dit = model(), DiT(config()).eval()
    state = source.state_dict()
    own = state["rotary_emb.inv_freq"]
    dit.load_state_dict({**state, "rotary_emb.inv_freq": own.bfloat16()})
    assert torch.equal(dit.rotary_emb.inv_freq, own)
    torch.testing.assert_close(dit(TOKENS), source(TOKENS))
    with pytest.raises(RuntimeError, match="base 10,000"):
        dit.load_state_dict({**state, "rotary_emb.inv_freq": own * 0.5})


def test_too_long_a_text_is_refused():
    with pytest.raises(ValueError, match="13 positions, but the model has 12"):
        model()(tokens_of(length=13))


# Compilers and GPUs


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@torch.no_grad()
def test_compiled_trunk_equals_eager():
    dit = model(layers=1)
    compiled = torch.compile(dit.trunk, fullgraph=True)
    given = dit.embed(TOKENS), dit.modulations(SIGMA)
    torch.testing.assert_close(compiled(*given), dit.trunk(*given), rtol=1e-5, atol=1e-5)


@timed_or_not
def test_trunk_traces_without_graph_breaks(time_conditioning):
    dit = model(time_conditioning=time_conditioning)
    compiled = torch.compile(dit.trunk, fullgraph=True, backend="eager")
    given = dit.embed(TOKENS), dit.modulations(SIGMA)
    torch.testing.assert_close(compiled(*given), dit.trunk(*given))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(compiled(*given), dit.trunk(*given))


@torch.no_grad()
def test_a_compiled_trunk_uses_what_is_constant():
    dit = model()
    x, mods = dit.embed(TOKENS), dit.constants()
    compiled = torch.compile(dit.trunk, fullgraph=True, backend="eager")
    expected = dit.trunk(x, dit.modulations())
    torch.testing.assert_close(compiled(x, dit.modulations()), expected)
    torch.testing.assert_close(compiled(x, mods), expected)
    for layer in mods.layers:
        layer.zero_()  # closed gates: what is constant is really what is used
    assert torch.equal(compiled(x, mods), x)


@pytest.mark.gpu
@timed_or_not
@torch.no_grad()
def test_gpu_equals_cpu(time_conditioning):
    dit = model(time_conditioning=time_conditioning)
    expected = dit(TOKENS, SIGMA)
    dit.cuda()
    mods = dit.constants() or dit.modulations(SIGMA.cuda())
    logits = all_logits(dit, TOKENS.cuda(), mods=mods).cpu()
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        rough = dit(TOKENS.cuda(), SIGMA.cuda()).cpu()
    assert (rough - expected).norm() < 0.05 * expected.norm()


@pytest.mark.gpu
def test_a_gelu_inside_of_its_product_is_the_same():
    """Up to the rounding of 16 bits, which it has once less; with gradients it is not used."""
    torch.manual_seed(0)
    block = Block(64, 2, None, 0.0).cuda().bfloat16()
    x = torch.randn(3, 17, 64, device="cuda", dtype=torch.bfloat16)
    plain = block.feed(x)
    assert plain.requires_grad
    with torch.no_grad():
        fused = block.feed(x)
        exact = block.double().mlp(x.double())
    torch.testing.assert_close(fused, plain.detach(), rtol=0.05, atol=0.02)
    assert (fused.double() - exact).norm() <= 1.1 * (plain.detach().double() - exact).norm()
