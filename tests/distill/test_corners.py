"""Students, teachers and settings off the beaten track."""

import pytest
from tests.random_models import save_random
from tests.runs import entries, same_tensors

import didi_instruct as didi
from didi_instruct.config.distill import DistillConfig
from didi_instruct.config.model import ScheduleConfig
from didi_instruct.config.schema import parse
from didi_instruct.data.oracle import OracleLanguage
from didi_instruct.errors import UserError
from didi_instruct.hub.sources import find_source
from didi_instruct.models.checkpoint import load_model
from didi_instruct.models.foreign.writing import write_foreign

from .small import METHODS, recipe


@pytest.mark.parametrize("method", METHODS)
def test_a_student_may_have_another_shape(run, tmp_path, method):
    """One layer instead of two; the discriminator keeps the teacher's shape."""
    save_random(tmp_path / "small", seed=2, layers=1)
    run(recipe(method, student=str(tmp_path / "small")))
    model = didi.load(tmp_path / "run", device="cpu")
    assert model.config.layers == 1
    assert len(model.discriminator.blocks if model.discriminator else [1, 2]) == 2
    assert not same_tensors(
        tmp_path / "run" / "model.safetensors", tmp_path / "small" / "model.safetensors"
    )


@pytest.mark.parametrize("method", METHODS)
def test_a_student_may_read_longer_texts_than_the_teacher(run, tmp_path, method):
    """Then texts are as long as the teacher's."""
    save_random(tmp_path / "long", seed=2, length=64)
    assert run(recipe(method, student=str(tmp_path / "long"))).finished
    assert didi.load(tmp_path / "run", device="cpu").config.length == 64


@pytest.mark.parametrize("method", METHODS)
def test_a_teacher_may_have_more_ids_than_its_tokenizer(run, tmp_path, method):
    """An embedding padded to a round number: the oracle cannot judge ids it does not know."""
    save_random(tmp_path / "padded", vocab_size=80)
    assert run(recipe(method), teacher=tmp_path / "padded").finished


@pytest.mark.parametrize("method", METHODS)
def test_a_run_killed_in_its_last_evaluation_makes_up_for_it(run, tmp_path, method):
    """The last checkpoint is there, the student's numbers and the product are not."""
    config = recipe(method)
    whole = run(config)
    told = didi.load(tmp_path / "run", device="cpu").provenance
    for name in ("model.safetensors", "config.json"):
        (tmp_path / "run" / name).unlink()
    log = tmp_path / "run" / "log.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:-1]))
    resumed = run(config, resume=True)
    assert resumed.student == whole.student
    assert didi.load(tmp_path / "run", device="cpu").provenance == told
    assert entries(tmp_path / "run")[-1] == {"step": 6, **whole.student}


def test_one_setting_of_the_optimizer_leaves_the_others_at_the_papers():
    """A default is written once: naming the learning rate must not change the schedule."""
    named = parse(DistillConfig, {"optim": {"lr": 1e-6}}, where="test")
    assert named.optim == DistillConfig().optim


def test_settings_already_made_take_overrides_and_a_method(run, tmp_path):
    result = run(recipe(), overrides=["train.steps=2"], method="token-matching")
    assert result.outcome.step == 2
    assert didi.load(tmp_path / "run", device="cpu").discriminator is None
    with pytest.raises(UserError, match="choose one of didi, token-matching"):
        run(recipe(), "other", method="magic")


def test_a_bank_may_be_shared_between_seeds(run, tmp_path, draws):
    for seed in (0, 1):
        reference = {"source": "bank", "bank": str(tmp_path / "bank")}
        run(recipe(reference=reference, train={"seed": seed}), f"seed{seed}")
    assert sum(draws) == 32
    assert entries(tmp_path / "seed0") != entries(tmp_path / "seed1")


def test_a_student_with_another_schedule_is_refused(run, tmp_path):
    save_random(tmp_path / "cosine", seed=2, schedule=ScheduleConfig(name="cosine", eps=0.0))
    with pytest.raises(UserError, match="different noise schedules"):
        run(recipe(student=str(tmp_path / "cosine")))


def test_a_damaged_manifest_does_not_keep_a_run_from_resuming(run, tmp_path):
    config = recipe(train={"steps": 6, "save_every": 2, "keep": 3})
    run(config)
    newest = sorted((tmp_path / "run" / "checkpoints").iterdir())[-1]
    (newest / "manifest.json").write_text('{"info": ')
    assert run(config, resume=True).finished


def test_a_public_checkpoint_is_a_teacher(run, models, tmp_path):
    """Of another layout, without a tokenizer: the student is ours, and says where it comes from."""
    write_foreign(load_model(models / "teacher"), tmp_path / "hub", "mdlm-hub")
    words = tmp_path / "words"
    OracleLanguage.default().tokenizer.save(words)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "hub" / name).unlink()
    config = recipe(reference={"source": "bank"}, data={"source": "oracle"}, prompt=4)
    result = run(config, teacher=tmp_path / "hub", tokenizer=words)
    assert result.finished
    student = didi.load(result.folder, device="cpu")
    assert student.tokenizer.hash == OracleLanguage.default().tokenizer.hash
    assert student.provenance["teacher_source"] == str(tmp_path / "hub")
    assert student.provenance["teacher"] == find_source(tmp_path / "hub").fingerprint()
