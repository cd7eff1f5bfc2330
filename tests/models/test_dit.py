import copy
import dataclasses
import shutil

import pytest
import torch
from tests.random_models import randomise

from didi_instruct.config.model import ModelConfig, architecture
from didi_instruct.models.dit import DiT
from didi_instruct.models.layers import NEVER, Block, LayerNorm
from didi_instruct.models.network import (
    Mixture,
    aligned,
    all_logits,
    logits_at,
    weights_stamp,
)

from .plain_networks import dit_logits

FIRST_KEYS = [
    "vocab_embed.embedding",
    *(f"sigma_map.mlp.{n}.{name}" for n in (0, 2) for name in ("weight", "bias")),
]
BLOCK_KEYS = [
    *("norm1.weight", "attn_qkv.weight", "attn_out.weight", "norm2.weight"),
    *("mlp.0.weight", "mlp.0.bias", "mlp.2.weight", "mlp.2.bias"),
    *("adaLN_modulation.weight", "adaLN_modulation.bias"),
]
LAST_KEYS = [
    *("output_layer.norm_final.weight", "output_layer.linear.weight", "output_layer.linear.bias"),
    *("output_layer.adaLN_modulation.weight", "output_layer.adaLN_modulation.bias"),
]
PARAMETERS = [*FIRST_KEYS, *(f"blocks.{n}.{key}" for n in (0, 1) for key in BLOCK_KEYS), *LAST_KEYS]


def config(**changes):
    tiny = ModelConfig(layers=2, hidden=16, heads=2, cond_dim=8, vocab_size=11, length=12)
    return dataclasses.replace(tiny, **changes)


def model(seed=0, **changes):
    return randomise(DiT(config(**changes)), seed).eval()


def states(dit, tokens, sigma=None, attended=None):
    """States after the last block, and what modulates the output layer."""
    mods = dit.modulations(sigma)
    return dit.trunk(dit.embed(tokens), mods, attended), mods


def tokens_of(batch=3, length=7, vocab_size=11, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (batch, length), generator=generator)


@pytest.mark.parametrize(("name", "count"), [("small", 169_627_218), ("medium", 424_477_010)])
def test_published_parameter_counts(name, count):
    with torch.device("meta"):
        dit = DiT(architecture(name))
    assert sum(p.numel() for p in dit.parameters()) == count


def test_keys_are_the_core_keys():
    assert set(DiT(config()).state_dict()) == {*PARAMETERS, "rotary_emb.inv_freq"}


def test_parameters_come_in_the_order_of_foreign_ema_lists():
    """`ema.shadow_params` of Lightning files is an ordered list: order is part of the layout."""
    assert [name for name, _ in DiT(config()).named_parameters()] == PARAMETERS


def test_initialisation_is_the_references():
    """Modulation and head start at zero, so the logits do; the embedding is kaiming-uniform."""
    torch.manual_seed(0)
    dit = DiT(config(hidden=64))
    zero = {n for n, p in dit.named_parameters() if not p.any()}
    names = [n for n, _ in dit.named_parameters()]
    assert zero == {n for n in names if "adaLN" in n or "output_layer.linear" in n}
    embedding = dit.vocab_embed.embedding
    bound = 1 / 64**0.5  # kaiming_uniform with a = sqrt(5): 1 / sqrt(fan_in)
    assert 0.95 * bound < embedding.abs().max() <= bound


@pytest.mark.parametrize("kind", ["mdlm", "duo"])
@pytest.mark.parametrize("time_conditioning", [False, True])
@torch.no_grad()
def test_logits_equal_the_plain_reference(time_conditioning, kind):
    dit = model(kind=kind, time_conditioning=time_conditioning)
    tokens, sigma = tokens_of(), torch.tensor([0.01, 0.7, 6.9])
    logits = dit(tokens, sigma)
    assert logits.shape == (3, 7, 11 if kind == "duo" else 10)
    for row in range(3):
        expected = dit_logits(dit.state_dict(), dit.config, tokens[row], sigma[row].item())
        expected = expected[:, : dit.config.num_tokens]
        torch.testing.assert_close(logits[row], expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(dit.head(*states(dit, tokens, sigma))[row], logits[row])


@torch.no_grad()
def test_time_matters_only_with_time_conditioning():
    tokens, low, high = tokens_of(), torch.full((3,), 0.1), torch.full((3,), 5.0)
    assert torch.equal(model()(tokens, low), model()(tokens, high))
    timed = model(time_conditioning=True)
    assert (timed(tokens, low) - timed(tokens, high)).abs().max() > 0.1
    with pytest.raises(ValueError, match="sigma is needed"):
        timed(tokens)


@pytest.mark.parametrize("time_conditioning", [False, True])
@torch.no_grad()
def test_head_works_on_selected_rows(time_conditioning):
    dit = model(time_conditioning=time_conditioning)
    tokens, sigma = tokens_of(), torch.tensor([0.1, 1.0, 4.0])
    hidden, mods = states(dit, tokens, sigma)
    rows, columns = torch.tensor([0, 0, 2]), torch.tensor([1, 6, 3])
    at = 7 * rows + columns
    assert len(mods.of_positions(at, 7).c) == (3 if time_conditioning else 1)
    some = dit.head(hidden[rows, columns], mods.of_positions(at, 7))
    torch.testing.assert_close(some, dit.head(hidden, mods)[rows, columns])
    found = logits_at(dit, tokens, sigma, at)
    torch.testing.assert_close(found, some)


@torch.no_grad()
def test_aligned_logits_are_padded_with_impossible_ids():
    dit = model()
    hidden, mods = states(dit, tokens_of())
    with aligned(dit, 8):
        padded = dit.head(hidden, mods)
        assert dit(tokens_of()).shape[-1] == 10
    assert padded.shape[-1] == 16
    assert dit.align == 1
    torch.testing.assert_close(padded[..., :10], dit.head(hidden, mods))
    assert (padded[..., 10:] == NEVER).all()
    assert (padded.softmax(-1)[..., 10:] == 0).all()


@torch.no_grad()
def test_one_sigma_for_all_rows_is_that_sigma_in_every_row():
    dit = model(time_conditioning=True)
    tokens = tokens_of()
    each = dit(tokens, torch.full((3,), 1.5))
    torch.testing.assert_close(dit(tokens, 1.5), each, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dit(tokens, torch.full((3, 1), 1.5)), each)


def test_constant_modulation_has_the_gradient_of_a_repeated_one():
    """One broadcast row of modulation, against a time-conditioned model given sigma 0 per row."""
    constant, repeated = model(), model(time_conditioning=True)
    tokens = tokens_of()
    constant(tokens).square().mean().backward()
    repeated(tokens, torch.zeros(3)).square().mean().backward()
    for (name, p), q in zip(constant.named_parameters(), repeated.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6, msg=name)


@torch.no_grad()
def test_a_mixture_of_one_token_is_that_token():
    """At every position, and at some of other texts."""
    dit = model(learned_positions=True)
    tokens, other = tokens_of(), tokens_of(seed=2)
    soft = torch.nn.functional.one_hot(tokens, 11).float() @ dit.vectors
    everywhere = dit.embed(other, mixture=Mixture(None, soft.flatten(0, 1)))
    assert torch.equal(everywhere, dit.embed(tokens))
    at = torch.tensor([20, 0, 8])
    some = dit.embed(other, mixture=Mixture(at, soft.flatten(0, 1)[at]))
    mixed = other.flatten().index_copy(0, at, tokens.flatten()[at]).view_as(other)
    assert torch.equal(some, dit.embed(mixed))
    found = logits_at(dit, other, None, at, mixture=Mixture(at, soft.flatten(0, 1)[at]))
    torch.testing.assert_close(found, dit(mixed).flatten(0, 1)[at])


@torch.no_grad()
def test_padding_is_never_attended():
    dit = model()
    tokens = tokens_of()
    mask = torch.arange(7) < torch.tensor([[7], [4], [1]])
    logits = dit(tokens, attended=mask)
    other = torch.where(mask, tokens, (tokens + 1) % 10)
    torch.testing.assert_close(dit(other, attended=mask)[mask], logits[mask])
    short = dit(tokens[1:2, :4])
    torch.testing.assert_close(logits[1:2, :4], short, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits[0], dit(tokens)[0], rtol=1e-5, atol=1e-5)


def test_a_fully_padded_row_harms_no_gradient():
    dit = model()
    mask = torch.ones(3, 7, dtype=torch.bool)
    mask[1] = False
    dit(tokens_of(), attended=mask)[mask].sum().backward()
    assert all(p.grad.isfinite().all() for p in dit.parameters())


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


@pytest.mark.parametrize("time_conditioning", [False, True])
@torch.no_grad()
def test_lower_precision_stays_close_and_keeps_the_residual_in_float32(time_conditioning):
    dit = model(time_conditioning=time_conditioning)
    tokens, sigma = tokens_of(), torch.tensor([0.1, 1.0, 4.0])
    exact = dit(tokens, sigma)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert states(dit, tokens, sigma)[0].dtype == torch.float32
        mixed = dit(tokens, sigma)
    dit.bfloat16()
    assert dit.rotary_emb.cos.dtype == dit.rotary_emb.inv_freq.dtype == torch.float32
    assert states(dit, tokens, sigma)[0].dtype == torch.float32
    for rough in (mixed, dit(tokens, sigma)):
        assert (rough - exact).norm() < 0.05 * exact.norm()


def test_dropout_acts_in_training_alone_and_on_the_branches():
    dit = model(dropout=0.5)
    tokens = tokens_of()
    reference = model()
    assert torch.equal(dit(tokens), reference(tokens))
    dit.train()
    assert not torch.equal(dit(tokens), dit(tokens))
    with torch.no_grad():  # closed gates leave nothing for dropout to act on
        for block in dit.blocks:
            block.adaLN_modulation.weight.zero_()
            block.adaLN_modulation.bias.zero_()
    assert torch.equal(states(dit, tokens)[0], dit.embed(tokens))


@torch.no_grad()
def test_constants_change_nothing():
    """Bit for bit, at every position and at some; of a network without a head, too."""
    dit = model()
    tokens, at = tokens_of(), torch.tensor([0, 9])
    mods = dit.constants()
    assert torch.equal(all_logits(dit, tokens, mods=mods), dit(tokens))
    assert torch.equal(
        logits_at(dit, tokens, None, at, mods=mods), logits_at(dit, tokens, None, at)
    )
    headless = dit.without_head()
    x = headless.embed(tokens)
    assert torch.equal(headless.trunk(x, headless.constants()), dit.trunk(x, mods))
    assert not any(layer.requires_grad for layer in mods.layers)


def test_constants_save_the_modulation():
    dit = model()
    calls, mods = [], dit.constants()
    for layer in (*dit.blocks, dit.output_layer):
        layer.adaLN_modulation.register_forward_hook(lambda *_: calls.append(1))
    all_logits(dit, tokens_of(), mods=mods)
    assert not calls
    dit(tokens_of()).sum().backward()
    assert len(calls) == 3
    assert dit.blocks[0].adaLN_modulation.weight.grad.abs().sum() > 0


def test_what_depends_on_time_is_not_constant():
    assert model(time_conditioning=True).constants() is None
    assert model().constants().layers is not None


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
        dit(tokens_of())
        assert weights_stamp(dit.train().eval()) == stamp
        change(dit)
        assert weights_stamp(dit) != stamp
    stamp = weights_stamp(holder["inner"])
    holder.load_state_dict({f"inner.{k}": v for k, v in other.state_dict().items()})
    assert weights_stamp(holder["inner"]) != stamp
    assert weights_stamp(copy.deepcopy(other)) != weights_stamp(other)


@torch.no_grad()
def test_tables_are_rebuilt_when_a_model_leaves_the_meta_device():
    source = model()
    with torch.device("meta"):
        emptied, assigned = DiT(config()), DiT(config())
    emptied.to_empty(device="cpu").load_state_dict(source.state_dict())
    assigned.load_state_dict(source.state_dict(), assign=True)
    for dit in (emptied, assigned):
        torch.testing.assert_close(dit.eval()(tokens_of()), source(tokens_of()))


def test_no_table_is_built_on_the_meta_device():
    """A length that a file claims must not cost memory (here petabytes) before it is checked."""
    with torch.device("meta"):
        dit = DiT(config(length=10**14))
    assert dit.rotary_emb.cos.shape == (10**14, dit.rotary_emb.width // 2)
    assert dit.rotary_emb.cos.is_meta


def test_foreign_frequencies_are_checked():
    """16-bit frequencies are replaced by exact ones; those of another base are refused."""
    source = model()
    state = source.state_dict()
    rounded = {**state, "rotary_emb.inv_freq": state["rotary_emb.inv_freq"].bfloat16()}
    dit = DiT(config()).eval()
    dit.load_state_dict(rounded)
    assert torch.equal(dit.rotary_emb.inv_freq, state["rotary_emb.inv_freq"])
    torch.testing.assert_close(dit(tokens_of()), source(tokens_of()))
    with pytest.raises(RuntimeError, match="base 10,000"):
        dit.load_state_dict({**state, "rotary_emb.inv_freq": state["rotary_emb.inv_freq"] * 0.5})


def test_too_long_a_text_is_refused():
    with pytest.raises(ValueError, match="13 positions, but the model has 12"):
        model()(tokens_of(length=13))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@torch.no_grad()
def test_compiled_trunk_equals_eager():
    dit = model(layers=1)
    tokens, sigma = tokens_of(), torch.tensor([0.1, 1.0, 4.0])
    compiled = torch.compile(dit.trunk, fullgraph=True)
    given = dit.embed(tokens), dit.modulations(sigma)
    torch.testing.assert_close(compiled(*given), dit.trunk(*given), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("time_conditioning", [False, True])
def test_trunk_traces_without_graph_breaks(time_conditioning):
    dit = model(time_conditioning=time_conditioning)
    tokens, sigma = tokens_of(), torch.tensor([0.1, 1.0, 4.0])
    compiled = torch.compile(dit.trunk, fullgraph=True, backend="eager")
    given = dit.embed(tokens), dit.modulations(sigma)
    torch.testing.assert_close(compiled(*given), dit.trunk(*given))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(compiled(*given), dit.trunk(*given))


@torch.no_grad()
def test_a_compiled_trunk_uses_what_is_constant():
    dit = model()
    x, mods = dit.embed(tokens_of()), dit.constants()
    compiled = torch.compile(dit.trunk, fullgraph=True, backend="eager")
    expected = dit.trunk(x, dit.modulations())
    torch.testing.assert_close(compiled(x, dit.modulations()), expected)
    torch.testing.assert_close(compiled(x, mods), expected)
    for layer in mods.layers:
        layer.zero_()  # closed gates: what is constant is really what is used
    assert torch.equal(compiled(x, mods), x)


@pytest.mark.gpu
@pytest.mark.parametrize("time_conditioning", [False, True])
@torch.no_grad()
def test_gpu_equals_cpu(time_conditioning):
    dit = model(time_conditioning=time_conditioning)
    tokens, sigma = tokens_of(), torch.tensor([0.1, 1.0, 4.0])
    expected = dit(tokens, sigma)
    dit.cuda()
    mods = dit.constants() or dit.modulations(sigma.cuda())
    logits = all_logits(dit, tokens.cuda(), mods=mods).cpu()
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        rough = dit(tokens.cuda(), sigma.cuda()).cpu()
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
