import pytest

from didi_instruct.config.pretrain import (
    DataConfig,
    ModelRecipe,
    OptimConfig,
    PretrainConfig,
    ScheduleConfig,
    TrainConfig,
)


def tiny_recipe(kind="mdlm", optim=None, **train) -> PretrainConfig:
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


@pytest.fixture
def recipe():
    return tiny_recipe
