"""What no judge could read together is refused before anything is trained."""

import json

import pytest

from didi_instruct.data.prepare import PrepareSettings, prepare
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import UserError
from didi_instruct.models.checkpoint import read_manifest
from didi_instruct.reproduce.jobs import Job
from didi_instruct.reproduce.preflight import check_together
from didi_instruct.reproduce.running import RUN, run_job
from didi_instruct.reproduce.scale import Given
from didi_instruct.reproduce.scales import find_scale

from .small_models import LANGUAGE, config_of, save, save_letters

STORY = "Once upon a time there was a small dog that ran to a big house."
TINY = (
    "model.layers=1", "model.hidden=16", "model.heads=2", "model.length=80", "train.steps=1",
    "train.batch_size=2", "train.eval_sequences=2", "optim.warmup=0", "data.valid=4",
)  # fmt: skip


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "stories.jsonl"
    path.write_text("".join(json.dumps({"text": STORY}) + "\n" for _ in range(40)))
    return path


@pytest.fixture
def letters(tmp_path):
    return save_letters(tmp_path / "letters")


@pytest.fixture
def oracle(tmp_path):
    return save(tmp_path / "oracle", config_of())


def prepared(text, folder, tokenizer="bytes"):
    prepare(PrepareSettings(src=str(text), tokenizer=tokenizer, length=16, out=folder))
    return str(folder)


def small(**given):
    return find_scale("small", Given(**{name: str(value) for name, value in given.items()}))


@pytest.mark.parametrize("role", ["ar", "duo-teacher", "teacher-large"])
def test_what_is_trained_has_the_teachers_tokenizer(role, text, letters, tmp_path):
    """The recipes would learn one of 4,096 pieces, which no model of bytes shares."""
    job = small(data=text, teacher=letters).model(role)
    assert Tokenizer.load(job.settings().data.tokenizer).hash == Tokenizer.load("bytes").hash


def test_a_trained_judge_reads_what_the_teacher_writes(text, letters, tmp_path):
    judge = small(data=text, teacher=letters).judge
    tiny = Job(name="ar", does="pretrain", recipe=judge.recipe, overrides=(*judge.overrides, *TINY))
    folder = run_job(tiny, tmp_path / "out", device="cpu").folder / RUN
    assert Tokenizer.load(folder).hash == Tokenizer.load("bytes").hash
    assert read_manifest(folder).model.kind == "ar"


def test_models_of_one_tokenizer_pass(text, letters, oracle, tmp_path):
    check_together(small(data=text, teacher=letters))
    check_together(small(data=prepared(text, tmp_path / "rows"), teacher=letters, judge=letters))
    check_together(find_scale("toy", Given(teacher=oracle)))
    check_together(find_scale("toy", Given()))


def test_prepared_texts_of_another_tokenizer_are_refused(text, oracle, tmp_path):
    rows = prepared(text, tmp_path / "rows")
    with pytest.raises(UserError, match="prepared with another tokenizer") as error:
        check_together(small(data=rows, teacher=oracle))
    assert "didi data prepare --tokenizer" in str(error.value)


def test_a_judge_of_another_tokenizer_is_refused_one_of_texts_is_not(text, letters, oracle):
    with pytest.raises(UserError, match="--judge .* another tokenizer"):
        check_together(small(data=text, teacher=letters, judge=oracle))
    check_together(small(data=text, teacher=letters, judge="owner/name"))


def test_at_toy_scale_a_teacher_speaks_the_oracle_language(letters):
    with pytest.raises(UserError, match="does not speak the oracle language"):
        check_together(find_scale("toy", Given(teacher=letters)))


def test_a_teacher_that_brings_no_tokenizer_is_refused(text, tmp_path):
    bare = save(tmp_path / "bare", config_of(), tokenizer=None)
    with pytest.raises(UserError, match=r"no tokenizer\.json"):
        check_together(small(data=text, teacher=bare))


def test_a_source_without_text_is_refused(letters, tmp_path):
    for number in range(2):
        (tmp_path / "empty").mkdir(exist_ok=True)
        (tmp_path / "empty" / f"{number}.txt").write_text(" \n\n")
    with pytest.raises(UserError, match="holds no text"):
        check_together(small(data=tmp_path / "empty", teacher=letters))


def test_a_plain_file_is_one_text_and_refused_where_many_are_needed(letters, tmp_path):
    path = tmp_path / "stories.txt"
    path.write_text(STORY)
    with pytest.raises(UserError, match="one text as a whole"):
        check_together(small(data=path, teacher=letters))


def test_a_record_without_text_is_refused(letters, tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_text(json.dumps({"words": "none"}) + "\n")
    with pytest.raises(UserError, match="text"):
        check_together(small(data=path, teacher=letters))


def test_a_judge_lends_its_tokenizer_where_no_teacher_is_there(text, oracle, monkeypatch):
    monkeypatch.setattr("didi_instruct.reproduce.scales.shipped", dict)
    teacher = small(data=text, judge=oracle).teacher
    words = teacher.settings().data.tokenizer
    assert Tokenizer.load(words).hash == LANGUAGE.tokenizer.hash
