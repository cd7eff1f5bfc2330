"""A run of a blink, and what its log says."""

import json

import torch

from didi_instruct.config.pretrain import (
    DataConfig,
    ModelRecipe,
    OptimConfig,
    PretrainConfig,
    ScheduleConfig,
    TrainConfig,
)
from didi_instruct.data.oracle import OracleLanguage, OracleSource
from didi_instruct.training.distributed import World
from didi_instruct.training.pretrain_task import PretrainTask

CPU = World(torch.device("cpu"))
STATE = "state-00000-of-00001.safetensors"

RECIPE = """
model: {layers: 2, hidden: 32, heads: 2, cond_dim: 16, length: 32, schedule: {eps: 0.0}}
data: {source: oracle}
optim: {lr: 1e-2, warmup: 2}
train: {steps: 6, batch_size: 8, ema: 0.9, log_every: 1, save_every: 3, eval_sequences: 64}
"""
"""The same as `tiny_recipe`, for other processes."""


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
        train=TrainConfig(**settings),
    )


def task_of(config, world=CPU):
    """The task of a recipe, on the oracle language."""
    source = OracleSource(OracleLanguage.default(), seed=config.train.seed)
    return PretrainTask(config, config.model.resolve(source.num_tokens), source, world)


def logged(folder, name="loss"):
    """One number of the log, wherever it is told."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [line[name] for line in lines if name in line]
