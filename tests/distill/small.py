"""A recipe that runs in a blink, and a reporter that remembers what it heard."""

import os
import signal

from didi_instruct.config.distill import DistillConfig
from didi_instruct.config.schema import parse
from didi_instruct.training.reporting import Reporter

METHODS = ["didi", "token-matching"]


def recipe(method="didi", **changes):
    """Six iterations of eight texts in which both networks always learn; some settings changed."""
    values = {
        "method": method,
        "reference": {"source": "online", "steps": 2, "rows": 32},
        "discriminator": {"lr": 1e-3, "trainable_blocks": 1, "chance": 0.0, "saturation": 1.0},
        "token_matching": {"warmup": 0, "aux_lr": 1e-3, "aux_steps": 1, "budgets": [2, 4]},
        "optim": {"lr": 1e-3, "schedule": "linear"},
        "train": {"steps": 6, "batch_size": 8, "ema": 0.9, "log_every": 1, "save_every": 3},
        "watch": {"budgets": [2], "samples": 16, "min_entropy": 0.0},
    }
    for name, change in changes.items():
        values[name] = values.get(name, {}) | change if isinstance(change, dict) else change
    return parse(DistillConfig, values, where="test")


class Heard(Reporter):
    """Remembers what was said; may send a signal once a step is logged."""

    def __init__(self, stop_after=None):
        self.stop_after, self.lines = stop_after, []

    def say(self, text):
        self.lines.append(text)

    def advance(self, step, values):
        if step == self.stop_after:
            os.kill(os.getpid(), signal.SIGTERM)
