"""Losses whose logits are computed in parts: the same values and gradients, and less held."""

import torch
from tests.models.causal_folders import BIDIRECTIONAL

from didi_instruct.distillation.losses import HeadInParts, terms, terms_in_parts
from didi_instruct.models.masked_lm import load_masked_lm


def test_parts_give_the_values_and_gradients_of_the_whole(tmp_path):
    BIDIRECTIONAL["llada"](tmp_path)
    network = load_masked_lm(tmp_path).model.requires_grad_(True)
    generator = torch.Generator().manual_seed(0)
    states, teacher = torch.randn(2, 11, network.config.hidden, generator=generator)
    row = torch.tensor([10, 3, 3, 0, 7])
    drawn = row, torch.tensor([4, 5, 5, 8, 9])
    found = {}
    for rows in (4, 0):
        own = states.clone().requires_grad_(True)
        network.zero_grad()
        if rows:
            parts = HeadInParts(rows, network.head)
            seen = terms_in_parts(network, own, teacher, "jeffreys", drawn, parts)
        else:
            seen = terms(network.head(own), network.head(teacher).detach(), "jeffreys", drawn)
        weights = torch.arange(1.0, 12.0)
        (
            seen.entropy @ weights
            + 2 * seen.distance.sum()
            + seen.drawn @ torch.arange(5.0).double()
        ).backward()
        found[rows] = *seen, own.grad, network.network.lm_head.weight.grad
    for one, other in zip(*found.values(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_parts_hold_no_more_logits_than_they_say(tmp_path):
    """Of a vocabulary of 128 tokens, 12 rows; what is kept for the gradient has no logits."""
    network = load_masked_lm(BIDIRECTIONAL["llada"](tmp_path) and tmp_path).model
    wide = torch.nn.Linear(network.config.hidden, 128)
    network.head = lambda states: widest.append(len(states)) or wide(states)
    states = torch.randn(12, network.config.hidden, requires_grad=True)
    none, widest, kept = torch.zeros(0, dtype=torch.long), [], []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        parts = HeadInParts(5, network.head)
        found = terms_in_parts(network, states, states.detach(), "forward", (none, none), parts)
    assert max(widest) == 5
    assert not any(t.shape[-1:] == (128,) and t.ndim == 2 for t in kept)
    found.entropy.sum().backward()
    assert max(widest) == 5
