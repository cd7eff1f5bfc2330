"""What sampling on the CPU makes of a network: the same samples, and never those of old weights."""

import copy
import pickle

import pytest
import torch
from didi_instruct.sampling.network import InferenceDenoiser, NetworkDenoiser
from tests.random_models import add_noise

import didi_instruct as didi
from didi_instruct.config.model import ModelConfig, ScheduleConfig
from didi_instruct.models.dit import build_model
from didi_instruct.sampling.state import PAD


def make(**changes):
    torch.manual_seed(0)
    config = ModelConfig(
        layers=2, hidden=32, heads=2, cond_dim=8, length=32, vocab_size=65,
        schedule=ScheduleConfig(eps=1e-3), **changes,
    )  # fmt: skip
    network = add_noise(build_model(config))
    return didi.Model(network, config)


@pytest.mark.parametrize("sampler", ["ancestral", "confidence", "remasking", "first-hitting"])
def test_samples_are_the_networks(sampler, monkeypatch):
    """The same seed, and so the same tokens.

    Rounding moves a cumulative probability by about 1e-6, and so one of some hundred tokens in a
    run of thousands; the seed is fixed, so only other kernels can raise that alarm. Learned
    positions tell masks apart, so that confidence has no ties for rounding to break.
    """
    model = make(learned_positions=True)
    wish = {"num": 6, "steps": None if sampler == "first-hitting" else 8, "sampler": sampler}
    assert isinstance(model._as_denoiser(), InferenceDenoiser)
    ours = model.draw(**wish)
    plain = NetworkDenoiser(model.network, model.schedule)
    monkeypatch.setattr(model, "_as_denoiser", lambda: plain)
    expected = model.draw(**wish)
    assert torch.equal(ours.tokens, expected.tokens)
    torch.testing.assert_close(ours.log_prob, expected.log_prob, rtol=1e-5, atol=1e-4)


@torch.no_grad()
def test_padding_is_never_attended():
    """A short text beside a long one has the logits that it has alone."""
    denoiser = make()._as_denoiser()
    z = torch.full((2, 20), 64)
    z[1, 12:] = PAD
    t = torch.full((2,), 0.5)
    alone = denoiser(z[1:, :12], t[1:])
    torch.testing.assert_close(denoiser(z, t)[1:, :12], alone, rtol=1e-4, atol=1e-4)


def test_samples_follow_the_weights():
    model = make()
    before = model.sample(4, steps=4)
    with torch.no_grad():
        model.network.output_layer.linear.bias[:32] -= 1e3
    after = model.sample(4, steps=4)
    assert bool((before < 32).any())
    assert bool((after >= 32).all())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_model_that_has_sampled_can_be_copied(copied):
    model = make()
    expected = model.sample(2, steps=4)
    twin = copied(model)
    assert torch.equal(twin.sample(2, steps=4), expected)
    with torch.no_grad():
        model.network.output_layer.linear.bias[:32] -= 1e3
    assert torch.equal(twin.sample(2, steps=4), expected)


def test_a_network_that_sees_the_time_is_run_as_it_is():
    assert isinstance(make(time_conditioning=True)._as_denoiser(), NetworkDenoiser)
