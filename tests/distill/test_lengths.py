"""Distillation of a masked LM whose texts have lengths that the settings name."""

import json

import numpy as np
import pytest
import torch
from tests.models.masked_folders import bert, dplm
from tests.random_models import save_random
from tests.runs import STATE, distilling, entries, same_tensors
from tests.sampling.enumeration import FALSE_ALARM, p_value

import didi_instruct as didi
from didi_instruct.config.model import NEVER
from didi_instruct.data.oracle import OracleLanguage, OracleSource
from didi_instruct.distillation.networks import prepare_teacher, take_lengths
from didi_instruct.errors import UserError
from didi_instruct.hub.sources import load_source
from didi_instruct.process.masking import before_end
from didi_instruct.training.likelihood import likelihood
from didi_instruct.training.objectives import make_objective

from .small import Heard, recipe
from .test_windows import END, save_teacher

LENGTHS = "5-12"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    dplm(folder / "dplm")
    return folder


@pytest.fixture
def run(models, tmp_path, monkeypatch):
    """Distil the DPLM into tmp_path / name; no picture, which takes longer than a run."""
    monkeypatch.setattr(distilling, "draw_curves", lambda *_, **__: False)

    def start(config, name="run", *, teacher="dplm", **options):
        out = tmp_path / name
        return didi.distill(config, teacher=models / teacher, out=out, device="cpu", **options)

    return start


def of(method, **changes):
    source = {"source": "online" if method == "token-matching" else "bank", "rows": 16}
    own = {"mixture": {"codes": 3, "budgets": [2, 4]}, "sdtt": {"steps": 8, "iterations": 3}}
    dimo = {"warmup": 1, "aux_lr": 1e-3, "budgets": [2]}
    return recipe(
        method, **({"reference": source, "lengths": LENGTHS, "dimo": dimo} | own | changes)
    )


@pytest.mark.parametrize("method", ["didi", "token-matching", "sdtt", "dimo", "mixture"])
def test_a_stopped_and_resumed_run_is_bit_exact(run, tmp_path, method):
    """Log, weights, moments and what is saved, of all networks."""
    whole = run(of(method), "whole")
    assert not run(of(method), "parts", reporter=Heard(2)).finished
    assert run(of(method), "parts", resume=True).finished
    assert entries(tmp_path / "parts") == entries(tmp_path / "whole")
    for name in (f"checkpoints/step-00000006/{STATE}", "model.safetensors"):
        assert same_tensors(tmp_path / "whole" / name, tmp_path / "parts" / name), name
    critic = "discriminator.safetensors"
    assert (whole.folder / critic).exists() == (method == "didi")
    if method == "didi":
        assert same_tensors(tmp_path / "whole" / critic, tmp_path / "parts" / critic)
        checkpoint = didi.load(tmp_path / "parts" / "checkpoints" / "step-00000006", device="cpu")
        assert checkpoint.discriminator is not None
    student = didi.load(whole.folder, device="cpu")
    expected = tuple(1 if 5 <= n <= 12 else NEVER for n in range(33))
    assert (student.config.end_id, student.config.lengths) == (2, expected)
    assert student.config.longest == 12


def test_texts_of_a_bank_have_the_law_of_lengths(run, tmp_path):
    """A chi-square test of 2,000 texts on eight lengths, of ends behind and residues before."""
    reference = {"source": "bank", "rows": 2000, "steps": 1}
    run(of("sdtt", reference=reference, train={"steps": 2}, sdtt={"steps": 8, "iterations": 2}))
    rows = torch.from_numpy(np.load(tmp_path / "run" / "bank" / "rows-00000.npy").astype(int))
    rows = torch.cat(
        [rows, torch.from_numpy(np.load(tmp_path / "run/bank/rows-00001.npy").astype(int))]
    )
    assert rows.shape == (2000, 12)
    text = before_end(rows, 2)
    assert (rows[~text] == 2).all()
    assert (rows[text] >= 4).all()
    count = text.sum(1)
    assert set(count.tolist()) == set(range(5, 13))
    assert p_value(count - 5, torch.full((8,), 1 / 8, dtype=torch.float64)) > FALSE_ALARM
    bank = reference | {"bank": str(tmp_path / "run" / "bank")}
    with pytest.raises(UserError, match="holds texts of other lengths"):
        run(of("sdtt", reference=bank, lengths="6-12"), "other")


def test_a_student_may_go_on_as_teacher_and_as_student(run, tmp_path):
    """With the lengths that it has, or with others; its discriminator is one of its own making."""
    first = run(of("didi", train={"steps": 1}))
    again = run(of("didi", lengths="", train={"steps": 1}), "again", teacher=first.folder)
    assert didi.load(again.folder, device="cpu").config.longest == 12
    other = run(of("mixture", lengths="3,9", train={"steps": 1}), "other", teacher=first.folder)
    drawn = didi.load(other.folder, device="cpu").sample(num=30, steps=1, seed=0)
    assert set(before_end(drawn, 2).sum(1).tolist()) == {3, 9}
    started = of("didi", student=str(first.folder), train={"steps": 1})
    assert run(started, "third").finished
    with pytest.raises(UserError, match="those of .* fill their windows"):
        run(of("didi", student=str(first.folder), lengths=""), "fourth")


def test_the_likelihood_leaves_out_texts_of_lengths_never_drawn(run):
    """The mean over the others, under the same noise."""
    model = didi.load(run(of("mixture", train={"steps": 1})).folder, device="cpu")
    objective = make_objective(model.config)
    sizes = torch.tensor([4, 5, 12, 9, 3, 7])
    rows = torch.where(torch.arange(12) < sizes[:, None], 5, 2)

    def measured(tokens):
        return likelihood(
            lambda batch: objective.loss(model.network, batch),
            model.config,
            lambda start, count: tokens[start : start + count],
            sequences=len(tokens),
        )

    found = measured(rows)
    assert found.sequences == 4
    assert np.isfinite(found.nats_per_token)
    everything = measured(rows[[1, 1, 2, 3, 5, 5]])
    assert everything.sequences == 6
    with pytest.raises(UserError, match="None of the 2 held-out texts has a length"):
        measured(rows[[0, 4]])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": "20-40"}, "lengths is 20-40, but the model reads at most 32 tokens"),
        ({"lengths": "data"}, "lengths=data takes those of real text"),
    ],
)
def test_lengths_that_do_not_fit_are_refused_in_a_line(run, tmp_path, changes, message):
    with pytest.raises(UserError, match=message) as caught:
        run(of("mixture", **changes))
    assert "\n" not in str(caught.value)


def test_a_model_that_fills_its_windows_has_no_lengths(run, models):
    save_random(models / "plain")
    with pytest.raises(UserError, match="texts of .*plain fill their windows: leave it out"):
        run(of("didi"), teacher="plain")


def test_an_endless_language_has_no_lengths_to_count(models):
    """The built-in one makes up texts as they are asked for."""
    config, data = (
        of("mixture", data={"source": "oracle"}, lengths="data"),
        OracleSource(OracleLanguage.default()),
    )
    loaded = load_source(models / "dplm")
    network = prepare_teacher(loaded, config, "dplm")
    with pytest.raises(UserError, match="data.source=oracle has no end of them: name the lengths"):
        take_lengths(None, data, loaded, network, "oracle")


def test_a_model_that_reads_what_fills_a_window_keeps_its_windows(run, tmp_path):
    """A DiT has learnt texts with ends behind: shorter windows would be others to it."""
    teacher = save_teacher(tmp_path / "dit")
    result = run(of("didi", lengths="3,5", discriminator={"trainable_blocks": 1}), teacher=teacher)
    rows = np.load(result.folder / "bank" / "rows-00000.npy")
    assert rows.shape[1] == 12
    count = before_end(torch.from_numpy(rows.astype(int)), END).sum(1)
    assert set(count.tolist()) == {3, 5}


def test_masked_lms_of_text_are_distilled_with_and_without_lengths(run, models):
    """BERT closes a text with [SEP]; without lengths its texts fill all that it reads."""
    (models / "bert").mkdir()
    bert(models / "bert")
    for name, lengths, window in (("some", "4-9", 9), ("whole", "", 12)):
        result = run(of("didi", lengths=lengths, train={"steps": 2}), name, teacher="bert")
        model = didi.load(result.folder, device="cpu")
        assert model.config.longest == window
        assert model.config.end_id == (3 if lengths else None)
        drawn = model.sample(num=4, steps=2, sampler="rgas", seed=0)
        assert drawn.shape == (4, 12)


def test_rates_of_the_discriminator_rise(run):
    """Its first update is a hundredth of that without a warm-up of a hundred updates."""
    moved = {}
    for warmup in (0, 100):
        critic = {"discriminator": {"lr_warmup": warmup, "trainable_blocks": None}}
        result = run(of("didi", train={"steps": 1}, **critic), f"run-{warmup}")
        model = didi.load(result.folder, device="cpu")
        teacher = dict(load_source(json.loads(
            (result.folder / "config.json").read_text())["provenance"]["teacher_source"]
        ).model.named_parameters())  # fmt: skip
        own = dict(model.discriminator.trunk.named_parameters())
        name = "network.esm.encoder.layer.1.output.dense.weight"
        moved[warmup] = (own[name] - teacher[name]).abs().mean().item()
    assert moved[0] == pytest.approx(100 * moved[100], rel=0.05)
