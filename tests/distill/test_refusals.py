"""What is refused, and leaves no trace."""

from contextlib import nullcontext

import pytest
import torch
from tests.random_models import save_random
from tests.runs import contents

import didi_instruct as didi
from didi_instruct.config.distill import DistillConfig
from didi_instruct.config.model import ScheduleConfig
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import UserError
from didi_instruct.training import run_dir
from didi_instruct.training.distributed import World
from didi_instruct.training.run_dir import write_recipe

from .small import METHODS, recipe


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["ar", "duo"])
def test_only_masked_models_are_distilled(run, models, tmp_path, kind, method):
    shape = {"vocab_size": 65} if kind == "ar" else {"vocab_size": 64, "time_conditioning": True}
    save_random(tmp_path / kind, kind=kind, **shape, schedule=ScheduleConfig(eps=1e-3))
    with pytest.raises(UserError, match=f"{kind} is a model of kind `{kind}`.*mdlm"):
        run(recipe(method), teacher=tmp_path / kind)
    with pytest.raises(UserError, match=f"{kind} is a model of kind `{kind}`.*mdlm"):
        run(recipe(method, student=str(tmp_path / kind)))
    assert not (tmp_path / "run").exists()


def test_a_student_must_speak_the_teachers_tokens_and_read_its_texts(run, tmp_path):
    words = [f"w{i}" for i in range(64)]
    save_random(tmp_path / "foreign", tokenizer=Tokenizer.from_words(words))
    save_random(tmp_path / "short", length=16)
    for name, message in [
        ("foreign", "foreign .the student. and .*teacher.* have different tokenizers"),
        ("short", "reads at most 16 tokens, the teacher 32"),
    ]:
        with pytest.raises(UserError, match=message):
            run(recipe(student=str(tmp_path / name)))
    assert not (tmp_path / "run").exists()


def test_data_of_another_tokenizer_is_refused(run, tmp_path):
    save_random(tmp_path / "foreign", tokenizer=Tokenizer.from_words([f"w{i}" for i in range(64)]))
    config = recipe(reference={"source": "data"}, data={"source": "oracle"})
    with pytest.raises(UserError, match="another tokenizer"):
        run(config, teacher=tmp_path / "foreign")
    assert not (tmp_path / "run").exists()


def test_a_missing_model_is_named(run, tmp_path):
    with pytest.raises(UserError, match="nowhere: no such file or folder"):
        run(recipe(), teacher="nowhere")
    with pytest.raises(UserError, match="`elsewhere` is no file or folder here"):
        run(recipe(student="elsewhere"))
    assert not (tmp_path / "run").exists()


def test_bad_input_touches_nothing(run, models, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "log.jsonl").write_text("mine")
    (tmp_path / "file").write_text("mine too")
    before = contents(tmp_path)
    for config, name, options, message in [
        (recipe(), "run", {}, "is not empty"),
        (recipe(), "file", {}, "is a file"),
        (recipe(), "new", {"resume": True}, "holds no run to resume"),
        ("oracle-didi", "new", {"overrides": ["didi.group_sise=2"]}, "Did you mean `group_size`"),
        ("oracle-didi", "new", {"method": "magic"}, "choose one of didi, token-matching"),
        (
            "oracle-didi",
            "new",
            {"method": "sdtt", "overrides": ["sdtt.iterations=300"]},
            "not a whole number of rounds",
        ),
        ("oracle-dido", "new", {}, "neither a recipe file nor a shipped recipe"),
        (recipe(), "new", {"device": "cuda:77x"}, "not a device"),
        (recipe(data={"source": "nowhere.txt"}), "new", {}, "nowhere.txt"),
        (DistillConfig(method="magic"), "new", {}, "choose one of didi, token-matching"),
        ({"method": "magic"}, "new", {}, "choose one of didi, token-matching"),
        (17, "new", {}, "A recipe is a name"),
        ("oracle-didi", "new", {"overrides": "train.steps=3"}, "give a list"),
        (recipe(), "new", {"teacher": didi.load(models / "teacher")}, "teacher is a Model"),
        (
            recipe(reference={"source": "bank", "rows": 10**13}),
            "new",
            {},
            "the disk has .* free: make room",
        ),
    ]:
        with pytest.raises(UserError, match=message):
            run(config, name, **options)
        assert contents(tmp_path) == before, message
        assert not (tmp_path / "new").exists(), message


def test_a_run_is_not_begun_over_another(run, tmp_path):
    run(recipe(train={"steps": 1}, token_matching={"warmup": 0}, discriminator={"warmup": 0}))
    before = contents(tmp_path)
    with pytest.raises(UserError, match="already holds a run: resume it"):
        run(recipe())
    assert contents(tmp_path) == before


def test_a_run_that_was_stopped_before_it_saved_starts_over(run, tmp_path):
    """A kill while the teacher was measured leaves a recipe: neither command stumbles over it."""
    write_recipe(tmp_path / "run", recipe(optim={"lr": 1e-5}))
    assert run(recipe()).finished
    write_recipe(tmp_path / "other", recipe())
    assert run(recipe(), "other", resume=True).finished


def test_settings_that_do_not_fit_the_teacher_are_refused_before_its_bank_is_drawn(run, tmp_path):
    """Drawing takes minutes on a real teacher, and bad input touches nothing."""
    for changes, message in [
        ({"discriminator": {"trainable_blocks": 3}}, "trainable_blocks is 3"),
        ({"prompt": 32, "data": {"source": "oracle"}}, "nothing would be left to write"),
    ]:
        with pytest.raises(UserError, match=message):
            run(recipe(reference={"source": "bank"}, **changes))
        assert not (tmp_path / "run").exists(), message


def test_a_batch_that_processes_cannot_share_is_refused_before_the_bank_is_drawn(
    run, tmp_path, monkeypatch, draws
):
    world = World(torch.device("cpu"), 0, 3)
    monkeypatch.setattr(run_dir, "open_world", lambda _: nullcontext(world))
    monkeypatch.setattr(World, "wait", lambda _: None)
    monkeypatch.setattr(World, "any", lambda _, flag: flag)
    with pytest.raises(UserError, match="batch_size is 8, which 3 processes cannot share"):
        run(recipe(reference={"source": "bank"}))
    assert draws == []
    assert not (tmp_path / "run").exists()
