"""What `Network` promises, of every family: DiTs, masked LMs, bidirectional causal LMs."""

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.random_models import randomise

from didi_instruct.config.model import ModelConfig
from didi_instruct.models.dit import DiT
from didi_instruct.models.masked_lm import load_masked_lm
from didi_instruct.models.network import Mixture, aligned, logits_at

from .causal_folders import BIDIRECTIONAL
from .masked_folders import FAMILIES

FOLDERS = {**FAMILIES, **BIDIRECTIONAL}

SIGMA = torch.tensor([0.01, 0.7, 6.9])
SHAPE = {"layers": 2, "hidden": 16, "heads": 2, "cond_dim": 8, "vocab_size": 11, "length": 12}
DITS = {
    "dit": {},
    "timed dit": {"time_conditioning": True},
    "dit of places": {"learned_positions": True},
}


@dataclass
class Subject:
    """A network of 12 positions, and the ids that it may write."""

    name: str
    network: Any
    written: list[int]

    def text(self, rows, length, seed=1):
        """Words that may be written, and masks."""
        known = torch.tensor([*self.written, self.network.config.mask_id])
        generator = torch.Generator().manual_seed(seed)
        return known[torch.randint(len(known), (rows, length), generator=generator)]

    def states(self, network, tokens, attended=None):
        """States of a network like this one, and what modulates its head."""
        mods = network.modulations(SIGMA[: len(tokens)])
        return network.trunk(network.embed(tokens, attended), mods, attended), mods


@pytest.fixture(scope="module", params=[*DITS, *FOLDERS])
def subject(request, tmp_path_factory):
    if request.param in DITS:
        network = randomise(DiT(ModelConfig(**SHAPE, **DITS[request.param]))).eval()
        return Subject(request.param, network, list(range(10)))
    folder = tmp_path_factory.mktemp(request.param)
    FOLDERS[request.param](folder)
    network = load_masked_lm(folder).model
    written = set(range(network.config.num_tokens)) - set(network.ids.banned)
    return Subject(request.param, network, sorted(written))


@torch.no_grad()
def test_the_head_works_on_selected_rows(subject):
    """Selected positions have the logits of all; added columns are impossible."""
    network, at = subject.network, torch.tensor([1, 5, 20])
    text, num = subject.text(3, 7), network.config.num_tokens
    assert len(network.blocks) == 2
    everywhere = network(text, SIGMA)
    assert everywhere.shape == (3, 7, num)
    hidden, mods = subject.states(network, text)
    assert (hidden.shape, hidden.dtype) == ((3, 7, 16), torch.float32)
    own = None if mods is None else mods.of_positions(at, 7)
    some = network.head(hidden.flatten(0, 1)[at], own)
    torch.testing.assert_close(some, everywhere.flatten(0, 1)[at], atol=5e-6, rtol=1e-5)
    torch.testing.assert_close(logits_at(network, text, SIGMA, at), some, atol=5e-6, rtol=1e-5)
    assert logits_at(network, text, SIGMA, at[:0]).shape == (0, num)
    with aligned(network, 8):
        wide = network.head(hidden, mods)
        assert network(text, SIGMA).shape[-1] == num
    assert network.align == 1
    assert wide.shape[-1] == -(-num // 8) * 8
    assert (wide.softmax(-1)[..., num:] == 0).all()
    torch.testing.assert_close(wide[..., :num], everywhere)


@torch.no_grad()
def test_a_soft_token_of_one_token_is_that_token(subject):
    """In two texts, of which one has padding; learned positions are added to it, too."""
    network, text = subject.network, subject.text(3, 7)
    tokens, at = torch.tensor(subject.written)[[2, 0, 1]], torch.tensor([1, 7, 20])
    attended = torch.ones_like(text, dtype=torch.bool)
    attended[0, 4:] = False
    hard = text.flatten().index_copy(0, at, tokens).view_as(text)
    assert network.vectors.shape == (network.config.vocab_size, 16)
    mixture = Mixture(at, network.vectors[tokens])
    for seen in (None, attended):
        assert torch.equal(network.embed(text, seen, mixture), network.embed(hard, seen))
    found = logits_at(network, text, SIGMA, at, mixture=mixture)
    torch.testing.assert_close(found, logits_at(network, hard, SIGMA, at))
    if subject.name in DITS:
        everywhere = Mixture(None, network.vectors[hard].flatten(0, 1))
        assert torch.equal(network.embed(text, mixture=everywhere), network.embed(hard))


def test_gradients_reach_soft_tokens_and_all_weights(subject):
    network, text = copy.deepcopy(subject.network), subject.text(2, 5)
    text[:, 3] = network.config.mask_id
    at, every = torch.tensor([3, 8]), torch.arange(10)
    vectors = network.vectors[subject.written].mean(0).expand(2, -1).detach().requires_grad_()
    logits = logits_at(network, text, SIGMA[:2], every, mixture=Mixture(at, vectors))
    logits.logsumexp(-1).sum().backward()
    assert (vectors.grad.abs().sum(-1) > 0).all()
    untouched = {n for n, p in network.named_parameters() if p.grad is None}
    assert untouched <= ({"network.lm_head.bias"} if subject.name == "camembert" else set())
    kept = any("contact_head" in name for name in network.state_dict())  # of ESM, not trained
    assert kept == subject.name.startswith("esm")


@torch.no_grad()
def test_a_copy_without_head_has_the_same_trunk(subject):
    network, text = subject.network, subject.text(2, 5)
    trunk = network.without_head()
    words = ("head", "cls", "decoder.", "output_layer.")
    assert not any(word in name for name in trunk.state_dict() for word in words)
    assert {p.data_ptr() for p in trunk.parameters()}.isdisjoint(
        p.data_ptr() for p in network.parameters()
    )
    assert torch.equal(subject.states(trunk, text)[0], subject.states(network, text)[0])


@torch.no_grad()
def test_masks_that_are_alike_have_the_law_of_one(subject):
    """Also behind the end of a text, where a masked LM has its last special token."""
    network, mask, text = subject.network, subject.network.config.mask_id, subject.text(2, 6)
    text[:, 3:] = mask
    sigma, attended = SIGMA[:2], torch.arange(6) < torch.tensor([4, 6])[:, None]
    alike = network.with_masks(torch.zeros(2, 16))
    offset = torch.linspace(-1, 1, 16)[None]
    apart = alike.with_masks(offset)
    alike.eval()
    apart.eval()
    assert alike.config.num_tokens == apart.config.num_tokens == mask
    assert torch.equal(apart.vectors, torch.cat([alike.vectors, alike.vectors[-1:] + offset]))
    for seen in (None, attended):
        for code in range(3):
            coded = text + code * (text == mask)
            assert torch.equal(alike(coded, sigma, seen), network(text, sigma, seen))
    coded = text + 3 * (text == mask)
    assert not torch.allclose(apart(coded, sigma), network(text, sigma), atol=1e-3)
    alone = apart(coded[:1, :4], sigma[:1])[0]
    torch.testing.assert_close(apart(coded, sigma, attended)[0, :4], alone, atol=1e-5, rtol=0)
