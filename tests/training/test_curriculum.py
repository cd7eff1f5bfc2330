"""DUO's curriculum: softened tokens, and the discrete objective that they tend to."""

from dataclasses import replace

import pytest
import torch
from tests.random_models import add_noise

from didi_instruct.config.model import ModelConfig
from didi_instruct.config.pretrain import CurriculumConfig, PretrainConfig
from didi_instruct.data.oracle import OracleLanguage, OracleSource
from didi_instruct.errors import UserError
from didi_instruct.models.dit import build_model
from didi_instruct.models.network import Mixture, all_logits
from didi_instruct.process.uniform import nelbo_integrand
from didi_instruct.training.distributed import World
from didi_instruct.training.objectives import SoftObjective, UniformObjective, temperature_at
from didi_instruct.training.pretrain_task import PretrainTask

CONFIG = ModelConfig(
    kind="duo", layers=1, hidden=16, heads=2, cond_dim=8, vocab_size=7, length=6,
    time_conditioning=True,
)  # fmt: skip


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    model = add_noise(build_model(CONFIG), 0.3)
    return model.eval()


def batch_at(temperature, tokens=7, rows=5):
    """A batch of random texts; the noise does not depend on the temperature."""
    objective = SoftObjective(CONFIG, temperature, tokens)
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(7, (rows, 6), generator=generator)
    noise = objective.draw(rows, generator)
    return objective, x, noise, objective.corrupt(x, *noise)


def test_a_falling_temperature_gives_the_discrete_objective(network):
    """The loss tends to that of the same states as single tokens, and is another one before."""
    gaps = []
    for temperature in (1.0, 0.1, 1e-2, 1e-9):
        objective, _, _, batch = batch_at(temperature)
        hard = {name: value for name, value in batch.items() if name not in ("tokens", "weights")}
        found, expected = objective.loss(network, batch), objective.loss(network, hard)
        gaps.append((found - expected).abs().max().item())
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[0] > 0.01
    assert gaps[-1] < 1e-5


def test_the_network_reads_the_mixture_of_all_embeddings(network):
    """Softmax times the embedding matrix, and the integrand at the state, by hand."""
    objective, x, _, batch = batch_at(0.5)
    dense = torch.zeros(5, 6, 7, dtype=torch.float64)
    dense.scatter_(-1, batch["tokens"], batch["weights"])
    assert torch.allclose(dense.sum(-1), torch.ones(5, 6, dtype=torch.float64))
    assert torch.equal(batch["z"], dense.argmax(-1))
    mixture = Mixture(None, dense.float() @ network.vectors)
    logits = all_logits(network, batch["z"], batch["sigma"], mixture=mixture)
    terms = nelbo_integrand(logits, x, batch["z"], batch["alpha"], batch["alpha_prime"])
    torch.testing.assert_close(objective.loss(network, batch), terms.mean(1))


def test_levels_are_those_of_the_discrete_objective():
    """Times, alpha and its slope come from the schedule, curriculum or not."""
    _, x, noise, batch = batch_at(0.5)
    plain = UniformObjective(CONFIG)
    hard = plain.corrupt(x, noise[0], torch.rand(5, 6), torch.zeros(5, 6).long())
    for name in ("sigma", "alpha", "alpha_prime", "x"):
        assert torch.equal(batch[name], hard[name])


def test_rows_may_be_cut_anywhere(network):
    """The noise of a row is its own: two slices give the losses of the whole."""
    objective, x, noise, batch = batch_at(0.5, tokens=4)
    parts = [
        objective.loss(network, objective.corrupt(x[rows], *(n[rows] for n in noise)))
        for rows in (slice(0, 2), slice(2, 5))
    ]
    torch.testing.assert_close(torch.cat(parts), objective.loss(network, batch))


def test_the_temperature_falls_by_the_same_factor_in_each_step():
    config = CurriculumConfig(steps=4, temperature=(1.0, 1e-4))
    assert [temperature_at(step, config) for step in range(4)] == pytest.approx(
        [1.0, 1e-1, 1e-2, 1e-3]
    )
    assert temperature_at(4, config) is None
    assert temperature_at(0, CurriculumConfig()) is None


def test_training_is_plain_once_the_curriculum_is_over(recipe):
    """From its end on a step is that of a run without, bit by bit, given the same weights."""
    base = recipe("duo")
    soft = replace(base, curriculum=CurriculumConfig(steps=2, temperature=(1.0, 0.1)))

    def task_of(config):
        source = OracleSource(OracleLanguage.default(), seed=config.train.seed)
        world = World(torch.device("cpu"))
        return PretrainTask(config, config.model.resolve(source.num_tokens), source, world)

    plain, task = task_of(base), task_of(soft)
    losses = [(task.step(step)["loss"], plain.step(step)["loss"]) for step in range(2)]
    assert all(a != b for a, b in losses)
    for name, tensor in task.tensors().items():
        plain.tensors()[name].copy_(tensor)
    for step in (2, 3):
        assert torch.equal(task.step(step)["loss"], plain.step(step)["loss"])


def test_bad_settings_are_refused():
    with pytest.raises(UserError, match=r"curriculum.temperature is \[0.0, 1.0\]"):
        CurriculumConfig(steps=1, temperature=(0.0, 1.0))
    with pytest.raises(UserError, match="curriculum.tokens is 1"):
        CurriculumConfig(tokens=1)
    with pytest.raises(UserError, match="curriculum.steps is 3, but model.kind is mdlm"):
        PretrainConfig(curriculum=CurriculumConfig(steps=3))
