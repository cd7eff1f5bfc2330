import itertools
import math
from dataclasses import replace

import pytest
import torch
from tests.random_models import randomise

from didi_instruct.config.model import ModelConfig
from didi_instruct.models.ar import ARModel, KVCache

from .plain_networks import ar_logits

CONFIG = ModelConfig(kind="ar", layers=2, hidden=16, heads=2, vocab_size=11, length=12)
LEARNED = replace(CONFIG, learned_positions=True)
TOKENS = torch.randint(11, (3, 9), generator=torch.Generator().manual_seed(1))
both = pytest.mark.parametrize("config", [CONFIG, LEARNED], ids=["rotary", "learned"])


def make(config=CONFIG):
    return randomise(ARModel(config)).eval()


def test_keys_are_the_cores_without_time():
    keys = set(ARModel(CONFIG).state_dict())
    assert not [k for k in keys if "sigma_map" in k or "adaLN" in k]
    assert {"vocab_embed.embedding", "blocks.1.mlp.2.bias", "output_layer.linear.bias"} <= keys


@both
@torch.no_grad()
def test_logits_equal_the_plain_reference(config):
    """Each row after the tokens before it alone: later ones change nothing."""
    model = make(config)
    logits = model(TOKENS)
    for row in range(3):
        expected = ar_logits(model.state_dict(), config, TOKENS[row])[:, :10]
        torch.testing.assert_close(logits[row], expected, rtol=1e-5, atol=1e-5)
    other = TOKENS.clone()
    other[:, 5:] = (other[:, 5:] + 1) % 11
    torch.testing.assert_close(model(other)[:, :5], logits[:, :5])
    torch.testing.assert_close(model(TOKENS, last_only=True), logits[:, -1:])


@both
@pytest.mark.parametrize("pieces", [[1] * 9, [5, 1, 1, 1, 1], [3, 4, 2], [9]], ids=str)
@torch.no_grad()
def test_cached_decoding_equals_the_full_pass(pieces, config):
    model, cache = make(config), KVCache(config, batch=3)
    parts = [model(part, cache) for part in TOKENS.split(pieces, dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), model(TOKENS), rtol=1e-5, atol=1e-5)
    assert cache.position == 9
    assert cache.keys.shape == (2, 3, 2, 12, 8)


@torch.no_grad()
def test_cache_follows_autocast_and_has_an_end():
    model, cache = make(), KVCache(CONFIG, batch=3, length=9)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        parts = [model(part, cache) for part in TOKENS.split([4, 1, 4], dim=1)]
        full = model(TOKENS)
    assert cache.keys.dtype == torch.bfloat16
    assert (torch.cat(parts, 1) - full).norm() < 0.02 * full.norm()
    with pytest.raises(ValueError, match="10 positions, but the cache has 9"):
        model(TOKENS[:, :1], cache)


@torch.no_grad()
def test_probabilities_of_all_sequences_sum_to_one():
    """Whole ones, and their beginnings."""
    model = make(replace(CONFIG, vocab_size=4, length=3))
    every = torch.tensor(list(itertools.product(range(3), repeat=3)))
    p = model.log_prob(every).exp()
    assert p.sum().item() == pytest.approx(1, abs=1e-5)
    assert p.max() > 2 * p.min()  # not just the uniform law
    first = model.log_prob(every, torch.tensor([1, 2, 3] * 9)).exp()
    torch.testing.assert_close(first[::3][::3], p.view(3, 9).sum(1))
    torch.testing.assert_close(first[2::3], p[2::3])


@torch.no_grad()
def test_log_prob_is_the_sum_of_cached_steps():
    model, cache, tokens = make(), KVCache(CONFIG, batch=3), TOKENS % 10
    total, previous = torch.zeros(3), torch.full((3, 1), CONFIG.mask_id)
    for n in range(9):
        log_p = model(previous, cache)[:, -1].log_softmax(-1)
        previous = tokens[:, n : n + 1]
        total += log_p.gather(1, previous)[:, 0]
    torch.testing.assert_close(model.log_prob(tokens), total, rtol=1e-5, atol=1e-4)


def test_it_starts_uniform():
    log_prob = ARModel(CONFIG).log_prob(TOKENS % 10)
    torch.testing.assert_close(log_prob, torch.full((3,), -9 * math.log(10)))
