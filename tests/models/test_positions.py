"""Learned positions: what rotary positions alone cannot see."""

import pytest
import torch
from tests.random_models import add_noise

from didi_instruct.config.model import ModelConfig
from didi_instruct.models.ar import KVCache
from didi_instruct.models.discriminator import Discriminator
from didi_instruct.models.dit import build_model, count_parameters
from didi_instruct.models.network import Mixture


def random_model(kind, learned):
    torch.manual_seed(0)
    config = ModelConfig(
        kind=kind, layers=2, hidden=16, heads=2, cond_dim=8, vocab_size=7, length=6,
        learned_positions=learned,
    )  # fmt: skip
    model = add_noise(build_model(config), 0.3)
    return config, model.eval()


@pytest.mark.parametrize("learned", [False, True])
def test_masks_look_alike_everywhere_without_learned_positions(learned):
    """Rotary positions are relative: equal values averaged with any weights are equal."""
    config, model = random_model("mdlm", learned)
    logits = model(torch.full((1, 6), config.mask_id))[0]
    same = torch.allclose(logits, logits[:1].expand_as(logits), atol=1e-5)
    assert same is not learned


def test_soft_embeddings_get_positions_too():
    config, model = random_model("mdlm", learned=True)
    tokens = torch.randint(config.num_tokens, (2, 6))
    mixture = Mixture(None, model.vectors[tokens])
    assert torch.equal(model.embed(tokens, mixture=mixture), model.embed(tokens))
    trunk = Discriminator.from_network(model).trunk
    assert torch.equal(trunk.embed(tokens), model.embed(tokens))


def test_a_cache_counts_positions():
    config, model = random_model("ar", learned=True)
    tokens = torch.randint(config.num_tokens, (2, 6))
    cache = KVCache(config, batch=2)
    with torch.no_grad():
        parts = torch.cat([model(tokens[:, :2], cache), model(tokens[:, 2:3], cache)], 1)
    torch.testing.assert_close(parts, model(tokens)[:, :3], atol=1e-5, rtol=1e-4)


def test_the_reference_has_none():
    plain, learned = (ModelConfig(learned_positions=on) for on in (False, True))
    assert count_parameters(learned) - count_parameters(plain) == 1024 * 768
