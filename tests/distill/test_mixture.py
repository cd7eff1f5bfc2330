"""Mixture students: trained, measured, resumed, and not written as what they are not."""

import numpy as np
import pytest
import torch
from tests.runs import entries, same_tensors

import didi_instruct as didi
from didi_instruct.data.oracle import OracleLanguage, OracleSource
from didi_instruct.errors import UserError
from didi_instruct.evaluation.quick_eval import oracle_judge, path_gaps
from didi_instruct.models.checkpoint import load_model
from didi_instruct.models.foreign.writing import write_foreign
from didi_instruct.seeding import mix

from .small import Heard, recipe


def mixture(**changes):
    settings = {"codes": 3, "budgets": [2], "learning": 1} | changes.pop("mixture", {})
    return recipe("mixture", mixture=settings, reference={"source": "bank"}, **changes)


def test_a_mixture_student_is_trained_measured_saved_and_sampled(run, tmp_path):
    """Its masks come along; the path KL of the table is that of the mixture."""
    result = run(mixture())
    student = didi.load(result.folder, device="cpu")
    assert (student.config.masks, student.config.mask_id, student.config.vocab_size) == (3, 64, 67)
    drawn = student.draw(num=16, steps=2, seed=mix(0, "quick"))
    judge = oracle_judge(OracleLanguage.default())
    assert path_gaps(drawn, judge).mean() == pytest.approx(result.student["path_kl_2"], abs=1e-3)
    assert int(drawn.tokens.max()) < 64
    plain = student.draw(num=16, steps=2, seed=mix(0, "quick"), measure_path=False)
    assert torch.equal(plain.tokens, student.sample(num=16, steps=2, seed=mix(0, "quick")))
    assert plain.log_prob is None, "summing the code out costs passes: only for who asks"
    assert not (result.folder / "discriminator.safetensors").exists()
    log = [e for e in entries(result.folder) if "lr" in e]
    assert all(0 <= e["code_information"] <= np.log(3) for e in log)
    assert all(e["component_loss"] > 0 for e in log)
    bound = student.nelbo(OracleSource(OracleLanguage.default(), seed=0).ordered(0, 32))
    assert 1 < float(bound) < 20


def test_a_mixture_run_resumes_bit_for_bit(run, tmp_path):
    run(mixture(), "whole")
    assert not run(mixture(), "parts", reporter=Heard(stop_after=2)).finished
    assert run(mixture(), "parts", resume=True).finished
    assert entries(tmp_path / "parts") == entries(tmp_path / "whole")
    files = [tmp_path / name / "model.safetensors" for name in ("parts", "whole")]
    assert same_tensors(*files)


def test_a_mixture_student_can_go_on_learning_and_is_not_written_as_what_it_is_not(run, tmp_path):
    first = run(mixture(), "first").folder
    again = run(mixture(student=str(first)), "again")
    assert didi.load(again.folder, device="cpu").config.masks == 3
    with pytest.raises(UserError, match="has one mask, and the model 3"):
        write_foreign(load_model(first), tmp_path / "hub", "mdlm-hub")
    with pytest.raises(UserError, match="the teacher has 3 masks"):
        run(recipe("didi"), "other", teacher=first)
    for other in (
        recipe("didi", student=str(first)),
        mixture(mixture={"codes": 2}, student=str(first)),
    ):
        with pytest.raises(UserError, match="the student. has 3 masks: use method=mixture"):
            run(other, "other")
    assert not (tmp_path / "other").exists()
