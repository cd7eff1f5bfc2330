"""Small models in folders, and evaluations of them on the CPU."""

import torch
from tests.random_models import add_noise

from didi_instruct.config.model import ModelConfig, ScheduleConfig
from didi_instruct.evaluation.config import EvalConfig
from didi_instruct.evaluation.evaluate import evaluate
from didi_instruct.models.checkpoint import save_model
from didi_instruct.models.dit import build_model


def save(folder, tokenizer, vocab_size, length=32, **changes):
    """A random denoiser with weights far from zero."""
    torch.manual_seed(0)
    config = ModelConfig(
        layers=1, hidden=32, heads=2, cond_dim=16, vocab_size=vocab_size, length=length,
        schedule=ScheduleConfig(eps=0.0), **changes,
    )  # fmt: skip
    network = add_noise(build_model(config), 0.2)
    save_model(folder, network, config, tokenizer=tokenizer)
    return str(folder)


def run(models, out, *, judge=None, baseline=None, samples=(), progress=None, **settings):
    """Evaluate; `settings` are those of `EvalConfig`."""
    config = EvalConfig(**{"device": "cpu", "metrics": ("entropy",)} | settings)
    return evaluate(
        models, config, out=out, judge=judge, baseline=baseline, samples=samples, progress=progress
    )
