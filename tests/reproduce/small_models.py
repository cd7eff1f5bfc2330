"""Untrained models of a few thousand weights that speak the oracle language, or letters."""

import torch
from tests.random_models import add_noise

from didi_instruct.config.model import ModelConfig, ScheduleConfig
from didi_instruct.data.oracle import OracleLanguage
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.models.checkpoint import save_model
from didi_instruct.models.discriminator import build_discriminator
from didi_instruct.models.dit import build_model

LANGUAGE = OracleLanguage.default()


def config_of(kind="mdlm", vocab_size=65, length=32):
    if kind == "duo":
        vocab_size -= 1  # no mask
    return ModelConfig(
        kind=kind, layers=1, hidden=32, heads=2, cond_dim=16, vocab_size=vocab_size, length=length,
        schedule=ScheduleConfig(eps=1e-3 if kind == "duo" else 0.0),
        time_conditioning=kind == "duo",
    )  # fmt: skip


def save(folder, config, *, tokenizer=LANGUAGE.tokenizer, seed=0, discriminator=False, steers=0.2):
    """A model of random weights; return its SOURCE. `steers` is its discriminator's noise."""
    torch.manual_seed(seed)
    network = build_model(config)
    judge = build_discriminator(config) if discriminator else None
    parts = [(network, 0.2)] if judge is None else [(network, 0.2), (judge, steers)]
    for part, noise in parts:
        add_noise(part, noise)
    save_model(folder, network, config, tokenizer=tokenizer, discriminator=judge)
    return str(folder)


def save_letters(folder, seed=0):
    return save(
        folder, config_of(vocab_size=258, length=16), tokenizer=Tokenizer.load("bytes"), seed=seed
    )
