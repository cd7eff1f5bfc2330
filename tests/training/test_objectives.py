"""Pretraining losses against dense or exact computations, and what all objectives promise."""

import pytest
import torch
from tests.process.reference import nelbo, subs
from tests.random_models import add_noise

from didi_instruct.config.model import ModelConfig, ScheduleConfig
from didi_instruct.config.schema import parse
from didi_instruct.config.train import CurriculumConfig, PretrainConfig
from didi_instruct.errors import UserError
from didi_instruct.models.dit import build_model
from didi_instruct.models.network import Mixture, all_logits
from didi_instruct.process.uniform import nelbo_integrand
from didi_instruct.training.objectives import (
    SoftObjective,
    UniformObjective,
    make_objective,
    temperature_at,
)

KINDS = {
    "mdlm": {},
    "codes": {"masks": 3, "vocab_size": 9, "schedule": ScheduleConfig(eps=0.0)},
    "duo": {"kind": "duo", "time_conditioning": True},
    "soft": {"kind": "duo", "time_conditioning": True},
    "ar": {"kind": "ar"},
}


def config_of(name, **changes):
    shape = {"layers": 1, "hidden": 16, "heads": 2, "cond_dim": 8, "vocab_size": 7, "length": 6}
    return ModelConfig(**(shape | KINDS[name] | changes))


def random_model(name, **changes):
    """A model, its objective, random tokens, their noise and their batch."""
    config = config_of(name, **changes)
    torch.manual_seed(0)
    model = add_noise(build_model(config), 0.3).eval()
    soft = name == "soft"
    objective = SoftObjective(config, 0.5, tokens=4) if soft else make_objective(config)
    return model, objective, *batch_of(config, objective)


def batch_of(config, objective, rows=5):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(config.num_tokens, (rows, config.length), generator=generator)
    noise = objective.draw(rows, generator)
    return tokens, noise, objective.corrupt(tokens, *noise)


@pytest.mark.parametrize("name", KINDS)
def test_rows_may_be_cut_anywhere(name):
    """The noise of a row is its own: two slices give the losses of the whole, shorter rows too."""
    model, objective, tokens, noise, batch = random_model(name)
    whole = objective.loss(model, batch)
    assert whole.shape == (5,)
    parts = [
        objective.loss(model, objective.corrupt(tokens[rows], *(n[rows] for n in noise)))
        for rows in (slice(0, 2), slice(2, 5))
    ]
    torch.testing.assert_close(torch.cat(parts), whole)
    assert objective.loss(model, objective.corrupt(tokens[:, :4], *noise)).isfinite().all()


@pytest.mark.parametrize("name", ["mdlm", "duo", "ar"])
def test_an_untrained_model_costs_log_v(name):
    """Zero-initialised heads are uniform: E loss = log V; stratified times, 4 standard errors."""
    torch.manual_seed(0)
    config = config_of(name, schedule=ScheduleConfig(eps=1e-4))
    objective = make_objective(config)
    _, _, batch = batch_of(config, objective, rows=20_000)
    with torch.no_grad():
        losses = objective.loss(build_model(config), batch)
    error = losses.std() / len(losses) ** 0.5
    expected = torch.tensor(float(config.num_tokens)).log()
    assert (losses.mean() - expected).abs() < 4 * error + 1e-3


@pytest.mark.parametrize("time_conditioning", [False, True])
def test_the_masked_loss_is_the_nelbo_of_the_dense_computation(time_conditioning):
    """Output layer on masked rows only, against SUBS on all rows and Eq. (3)."""
    model, objective, tokens, (t, _), batch = random_model(
        "mdlm", time_conditioning=time_conditioning
    )
    mask_id = objective.config.mask_id
    log_p = subs(model(batch["z"], batch["sigma"]), batch["z"], mask_id)
    truth = log_p.gather(-1, tokens[..., None]).squeeze(-1)
    weight = objective.schedule.nelbo_weight(t)[:, None]
    expected = nelbo(truth, batch["z"] == mask_id, weight)
    torch.testing.assert_close(objective.loss(model, batch), expected)


def test_masks_are_the_noise_and_nothing_else():
    _, objective, tokens, (t, uniforms), batch = random_model(
        "mdlm", schedule=ScheduleConfig(eps=0.0)
    )
    masked = uniforms >= 1 - t[:, None]
    assert torch.equal(batch["z"] == objective.config.mask_id, masked)
    assert torch.equal(batch["z"][~masked], tokens[~masked])
    assert torch.equal(batch["targets"], tokens[masked])


def test_while_measuring_several_masks_have_the_law_of_their_mixture():
    """-log of the mean over codes, by hand; training sees one code per row, whose mean is more."""
    network, objective, *_ = random_model("codes")
    tokens, noise, batch = batch_of(objective.config, objective, rows=40)
    assert set(noise[2].tolist()) == {0, 1, 2}
    z = batch["z"]
    assert torch.equal(z >= 6, z == 6 + noise[2][:, None]), "all masks of a row carry its code"
    with torch.no_grad():
        measured = objective.loss(network, batch)
        p = torch.stack(
            [network(torch.where(z < 6, z, 6 + c), batch["sigma"]).softmax(-1) for c in range(3)]
        ).mean(0)
    nll = -p.gather(-1, tokens[..., None]).squeeze(-1).log().flatten()[batch["rows"]]
    by_hand = torch.zeros(40).index_add(0, batch["sequence"], batch["weight"] * nll)
    assert torch.allclose(measured, by_hand, rtol=1e-4)
    assert objective.loss(network, batch).mean() > measured.mean()


def test_the_ar_loss_is_its_exact_likelihood():
    model, objective, tokens, noise, batch = random_model("ar")
    assert noise == ()
    torch.testing.assert_close(objective.loss(model, batch), -model.log_prob(tokens) / 6)


# DUO's curriculum: softened tokens, and the discrete objective that they tend to


def test_a_falling_temperature_gives_the_discrete_objective():
    """The loss tends to that of the same states as single tokens, and is another one before."""
    network, *_ = random_model("duo")
    plain, gaps = UniformObjective(config_of("duo")), []
    for temperature in (1.0, 0.1, 1e-2, 1e-9):
        soft = SoftObjective(config_of("duo"), temperature, tokens=7)
        _, _, batch = batch_of(soft.config, soft)
        hard = {name: value for name, value in batch.items() if name not in ("tokens", "weights")}
        found, expected = soft.loss(network, batch), plain.loss(network, hard)
        gaps.append((found - expected).abs().max().item())
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[0] > 0.01
    assert gaps[-1] < 1e-5


def test_the_network_reads_the_mixture_of_all_embeddings():
    """Softmax times the embedding matrix, and the integrand at the state, by hand.

    Times, alpha and its slope come from the schedule, curriculum or not.
    """
    network, *_ = random_model("duo")
    soft = SoftObjective(config_of("duo"), 0.5, tokens=7)
    x, noise, batch = batch_of(soft.config, soft)
    dense = torch.zeros(5, 6, 7, dtype=torch.float64)
    dense.scatter_(-1, batch["tokens"], batch["weights"])
    assert torch.allclose(dense.sum(-1), torch.ones(5, 6, dtype=torch.float64))
    assert torch.equal(batch["z"], dense.argmax(-1))
    mixture = Mixture(None, dense.float() @ network.vectors)
    logits = all_logits(network, batch["z"], batch["sigma"], mixture=mixture)
    terms = nelbo_integrand(logits, x, batch["z"], batch["alpha"], batch["alpha_prime"])
    torch.testing.assert_close(soft.loss(network, batch), terms.mean(1))
    plain = UniformObjective(soft.config)
    hard = plain.corrupt(x, noise[0], torch.rand(5, 6), torch.zeros(5, 6).long())
    for name in ("sigma", "alpha", "alpha_prime", "x"):
        assert torch.equal(batch[name], hard[name])


def test_the_temperature_falls_by_the_same_factor_in_each_step():
    config = CurriculumConfig(steps=4, temperature=(1.0, 1e-4))
    found = [temperature_at(step, config) for step in range(4)]
    assert found == pytest.approx([1.0, 1e-1, 1e-2, 1e-3])
    assert temperature_at(4, config) is None
    assert temperature_at(0, CurriculumConfig()) is None


def test_bad_settings_of_a_curriculum_are_refused():
    for settings, message in (
        ({"steps": 1, "temperature": [0.0, 1.0]}, r"curriculum.temperature is \[0.0, 1.0\]"),
        ({"tokens": 1}, "curriculum.tokens is 1"),
        ({"steps": 3}, "curriculum.steps is 3, but model.kind is mdlm"),
    ):
        with pytest.raises(UserError, match=message):
            parse(PretrainConfig, {"curriculum": settings}, where="r")
