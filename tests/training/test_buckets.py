"""Rows of similar length read together: the same batch, without computing its padding."""

import pytest
import torch
from tests.random_models import randomise

from didi_instruct.config.model import ModelConfig, ScheduleConfig
from didi_instruct.config.train import OptimConfig, PretrainConfig, PretrainTrainConfig
from didi_instruct.data.dataset import TokenDataset
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.models.ar import ARModel
from didi_instruct.models.masked_lm import new_esm
from didi_instruct.training.buckets import plan_passes, widths
from didi_instruct.training.distributed import World
from didi_instruct.training.pretrain_task import PretrainTask

LENGTH, ROWS, EOS = 32, 24, 2
BANNED = (0, 1, 2, 3, *range(24, 33))
SHAPE = {"layers": 2, "hidden": 16, "heads": 2, "cond_dim": 1, "vocab_size": 34, "length": LENGTH}


def windows(rows=ROWS, seed=0):
    """Chains of 1 to `LENGTH` residues, the rarer letters among them."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(1, LENGTH + 1, (rows,), generator=generator)
    tokens = torch.randint(4, 29, (rows, LENGTH), generator=generator)
    return torch.where(torch.arange(LENGTH) < counts[:, None], tokens, EOS)


def config_of(kind):
    windowed = {"lengths": (0, *[1] * LENGTH), "banned": BANNED, "schedule": ScheduleConfig(eps=0)}
    if kind == "ar":
        windowed = {"banned": tuple(n for n in BANNED if n != EOS)}
    return ModelConfig(kind=kind, end_id=EOS, **SHAPE, **windowed)


def task_of(kind, pass_tokens, world=None, batch_size=12):
    config, tokenizer = config_of(kind), Tokenizer.load("esm")
    network = randomise(ARModel(config) if kind == "ar" else new_esm(config, tokenizer))
    train = PretrainTrainConfig(steps=6, batch_size=batch_size, ema=0.0)
    settings = PretrainConfig(train=train, optim=OptimConfig(lr=1e-3, clip=0.0))
    data = TokenDataset([windows().numpy()], tokenizer, seed=3)
    world = world or World(torch.device("cpu"))
    given = {"network": network, "pass_tokens": pass_tokens}
    return PretrainTask(settings, config, data, world, **given)


@pytest.mark.parametrize("processes", [1, 2, 4])
@pytest.mark.parametrize("budget", [32, 50, 200, 10_000])
def test_each_row_is_in_one_pass_of_one_process(processes, budget):
    """No wider than the budget, no narrower than a row; all processes have the same shapes."""
    needed = widths(windows(), config_of("mdlm"))
    assert set((needed % 8).tolist()) == {0}
    plans = [plan_passes(needed, budget, rank, processes) for rank in range(processes)]
    rows = torch.cat([each.rows for plan in plans for each in plan])
    assert sorted(rows.tolist()) == list(range(ROWS))
    for plan in plans:
        assert [(len(p.rows), p.width) for p in plan] == [(len(p.rows), p.width) for p in plans[0]]
        assert all(len(p.rows) * p.width <= budget for p in plan)
        assert all((needed[p.rows] <= p.width).all() for p in plan)


def test_a_left_to_right_model_reads_the_end_it_learns():
    tokens = torch.full((3, 16), 5)
    for row, count in enumerate((7, 8, 16)):
        tokens[row, count:] = EOS
    shapes = {"layers": 1, "hidden": 4, "heads": 1, "vocab_size": 34, "length": 16, "end_id": EOS}
    given = ModelConfig(kind="mdlm", lengths=(0, *[1] * 16), **shapes)
    assert widths(tokens, given).tolist() == [8, 8, 16]
    assert widths(tokens, ModelConfig(kind="ar", **shapes)).tolist() == [8, 16, 16]


@pytest.mark.parametrize("kind", ["mdlm", "ar"])
@pytest.mark.parametrize("budget", [32, 130])
def test_a_step_is_that_of_the_whole_batch(kind, budget):
    """Same loss and same gradient as from whole windows in one pass, up to rounding."""
    plain, cropped = task_of(kind, None), task_of(kind, budget)
    for step in range(3):
        one, two = plain.step(step), cropped.step(step)
        torch.testing.assert_close(one["loss"], two["loss"], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(one["grad_norm"], two["grad_norm"], rtol=1e-4, atol=1e-6)
    for p, q in zip(plain.model.parameters(), cropped.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=2e-4)


def test_less_padding_is_read_and_told():
    """Of one pass over all rows it is that of whole windows, here with chains of full length."""
    text, told = int((windows() != EOS).sum()), []
    for budget in (ROWS * LENGTH, 64):
        task = task_of("mdlm", budget, batch_size=ROWS)
        task.step(0)
        told.append(task.describe(0, 1.0, 1)["padding"])
    assert told[0] == pytest.approx(1 - text / (ROWS * LENGTH))
    assert 0 < told[1] < told[0] / 2
    assert "padding" not in task_of("mdlm", None).describe(0, 1.0, 1)


@pytest.mark.parametrize("processes", [1, 2])
def test_an_epoch_has_every_row_once(processes):
    """Over all processes and steps, as long as the data."""
    found = []
    for rank in range(processes):
        task = task_of("mdlm", 64, World(torch.device("cpu"), rank, 1), batch_size=12)
        task.world = World(torch.device("cpu"), rank, processes)
        for step in range(ROWS // 12):
            reads = list(task._reads(step * 12))
            assert [read.last for read in reads] == [False] * (len(reads) - 1) + [True]
            for read in reads:
                width = read.tokens.shape[1]
                full = torch.full((len(read.tokens), LENGTH), EOS)
                full[:, :width] = read.tokens
                found += full.tolist()
    assert sorted(found) == sorted(windows().tolist())
