"""A run of a blink, what its log says, and a signal that stops it."""

import json
import os
import signal

import torch

from didi_instruct.config.train import (
    DataConfig,
    ModelRecipe,
    OptimConfig,
    PretrainConfig,
    PretrainTrainConfig,
    ScheduleConfig,
)
from didi_instruct.data.oracle import OracleLanguage, OracleSource
from didi_instruct.training.distributed import World
from didi_instruct.training.pretrain_task import PretrainTask
from didi_instruct.training.reporting import Reporter

CPU = World(torch.device("cpu"))
STATE = "state-00000-of-00001.safetensors"


def tiny_recipe(kind="mdlm", optim=None, **train):
    """A model of the oracle language that trains in a blink."""
    settings = {"steps": 6, "batch_size": 8, "ema": 0.9, "log_every": 1, "save_every": 3} | train
    schedule = ScheduleConfig(eps=1e-3 if kind == "duo" else 0.0)
    return PretrainConfig(
        model=ModelRecipe(
            kind=kind, layers=2, hidden=32, heads=2, cond_dim=16, length=32, schedule=schedule
        ),
        data=DataConfig(source="oracle"),
        optim=OptimConfig(**({"lr": 1e-2, "warmup": 2} | (optim or {}))),
        train=PretrainTrainConfig(**settings),
    )


def task_of(config, world=CPU):
    """The task of a recipe, on the oracle language."""
    source = OracleSource(OracleLanguage.default(), seed=config.train.seed)
    model = config.model.resolve(source.num_tokens)
    return PretrainTask(config, model, source, world, curriculum=config.curriculum)


def logged(folder, name="loss"):
    """One number of the log, wherever it is told."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [line[name] for line in lines if name in line]


class Interrupted(Reporter):
    """Sends SIGTERM to this process when a step is logged."""

    def __init__(self, step):
        self.step = step

    def advance(self, step, values):
        if step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)
