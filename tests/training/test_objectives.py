import pytest
import torch
from tests.process.reference import nelbo, subs
from tests.random_models import add_noise

from didi_instruct.config.model import ModelConfig, ScheduleConfig
from didi_instruct.models.dit import build_model
from didi_instruct.training.objectives import make_objective


def random_model(kind, **changes):
    torch.manual_seed(0)
    config = ModelConfig(
        kind=kind, layers=1, hidden=16, heads=2, cond_dim=8, vocab_size=7, length=6, **changes
    )
    model = add_noise(build_model(config), 0.3)
    return config, model.eval()


def batch_of(config, objective, rows=5):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(config.num_tokens, (rows, config.length), generator=generator)
    noise = objective.draw(rows, generator)
    return tokens, noise, objective.corrupt(tokens, *noise)


@pytest.mark.parametrize("time_conditioning", [False, True])
def test_the_masked_loss_is_the_nelbo_of_the_dense_computation(time_conditioning):
    """Output layer on masked rows only, against SUBS on all rows and Eq. (3)."""
    config, model = random_model("mdlm", time_conditioning=time_conditioning)
    objective = make_objective(config)
    tokens, (t, _), batch = batch_of(config, objective)
    log_p = subs(model(batch["z"], batch["sigma"]), batch["z"], config.mask_id)
    truth = log_p.gather(-1, tokens[..., None]).squeeze(-1)
    weight = objective.schedule.nelbo_weight(t)[:, None]
    expected = nelbo(truth, batch["z"] == config.mask_id, weight)
    torch.testing.assert_close(objective.loss(model, batch), expected)


def test_masks_are_the_noise_and_nothing_else():
    config, _ = random_model("mdlm", schedule=ScheduleConfig(eps=0.0))
    objective = make_objective(config)
    tokens, (t, uniforms), batch = batch_of(config, objective)
    masked = uniforms >= 1 - t[:, None]
    assert torch.equal(batch["z"] == config.mask_id, masked)
    assert torch.equal(batch["z"][~masked], tokens[~masked])
    assert torch.equal(batch["targets"], tokens[masked])


def test_the_ar_loss_is_its_exact_likelihood():
    config, model = random_model("ar")
    objective = make_objective(config)
    tokens, noise, batch = batch_of(config, objective)
    assert noise == ()
    torch.testing.assert_close(objective.loss(model, batch), -model.log_prob(tokens) / 6)


@pytest.mark.parametrize("kind", ["mdlm", "duo", "ar"])
def test_rows_may_be_cut_anywhere(kind):
    """The noise of a row is its own: two slices give the losses of the whole."""
    config, model = random_model(kind, time_conditioning=kind == "duo")
    objective = make_objective(config)
    tokens, noise, batch = batch_of(config, objective)
    parts = [
        objective.loss(model, objective.corrupt(tokens[rows], *(n[rows] for n in noise)))
        for rows in (slice(0, 2), slice(2, 5))
    ]
    torch.testing.assert_close(torch.cat(parts), objective.loss(model, batch))


@pytest.mark.parametrize("kind", ["mdlm", "duo", "ar"])
def test_an_untrained_model_costs_log_v(kind):
    """Zero-initialised heads are uniform: E loss = log V; stratified times, 4 standard errors."""
    torch.manual_seed(0)
    config = ModelConfig(
        kind=kind, layers=1, hidden=16, heads=2, cond_dim=8, vocab_size=7, length=6,
        time_conditioning=kind == "duo", schedule=ScheduleConfig(eps=1e-4),
    )  # fmt: skip
    objective = make_objective(config)
    _, _, batch = batch_of(config, objective, rows=20_000)
    with torch.no_grad():
        losses = objective.loss(build_model(config), batch)
    error = losses.std() / len(losses) ** 0.5
    expected = torch.tensor(float(config.num_tokens)).log()
    assert (losses.mean() - expected).abs() < 4 * error + 1e-3


def test_while_measuring_several_masks_have_the_law_of_their_mixture():
    """-log of the mean over codes, by hand; training sees one code per row, whose mean is more."""
    config = ModelConfig(
        layers=1, hidden=16, heads=2, cond_dim=8, vocab_size=9, masks=3, length=6,
        schedule=ScheduleConfig(eps=0.0),
    )  # fmt: skip
    torch.manual_seed(0)
    network = add_noise(build_model(config).eval(), 0.3)
    objective = make_objective(config)
    tokens = torch.randint(6, (40, 6))
    noise = objective.draw(40, torch.Generator().manual_seed(1))
    assert set(noise[2].tolist()) == {0, 1, 2}
    batch = objective.corrupt(tokens, *noise)
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
