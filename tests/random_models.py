"""Models whose weights are noise, all of which matter: of a fresh one many are zero."""

import torch

from didi_instruct.config.model import ModelConfig, ScheduleConfig
from didi_instruct.data.oracle import OracleLanguage
from didi_instruct.models.checkpoint import save_model
from didi_instruct.models.dit import build_model

DUO = {
    "kind": "duo",
    "vocab_size": 64,
    "time_conditioning": True,
    "schedule": ScheduleConfig(eps=1e-3),
}
"""What makes of `save_random` a uniform-state model: no mask, a time to see."""


def add_noise(network, scale=0.1):
    """Move every parameter, the zero-initialised ones too, by torch's own random numbers."""
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(scale * torch.randn_like(parameter))
    return network


def randomise(network, seed=0):
    """Give every parameter, the zero-initialised ones too, a value that matters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in network.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(1 + 0.2 * noise if "norm" in name else noise * (0.3 if p.ndim > 1 else 0.1))
    return network


def save_random(folder, seed=0, tokenizer=None, **changes):
    """Save a model of the oracle language whose weights are noise, all of which matter."""
    shape = {"layers": 2, "hidden": 32, "heads": 2, "cond_dim": 16, "vocab_size": 65, "length": 32}
    config = ModelConfig(**({"schedule": ScheduleConfig(eps=0.0)} | shape | changes))
    torch.manual_seed(seed)
    network = add_noise(build_model(config))
    save_model(folder, network, config, tokenizer or OracleLanguage.default().tokenizer)
    return folder
