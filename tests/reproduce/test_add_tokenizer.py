"""A teacher without a tokenizer is given one, told before, and sized by its weights."""

import pytest

from didi_instruct.data.prepare import PrepareSettings, prepare
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.hub.export import convert
from didi_instruct.hub.sources import load_source
from didi_instruct.models.dit import count_parameters
from didi_instruct.reproduce import preflight
from didi_instruct.reproduce.add_tokenizer import ADOPT, adopted
from didi_instruct.reproduce.costs import model_of
from didi_instruct.reproduce.experiments import ITEMS, command, jobs_of
from didi_instruct.reproduce.jobs import WORDS, Job
from didi_instruct.reproduce.running import RUN, folder_of, run_job
from didi_instruct.reproduce.scale import Given
from didi_instruct.reproduce.scales import find_scale

from .small_models import LANGUAGE, config_of, save

CONFIG = config_of(vocab_size=258, length=16)
SHORT = (
    "train.steps=2", "train.batch_size=4", "train.eval_every=0", "watch.budgets=[]",
    "discriminator.warmup=1", "discriminator.trainable_blocks=1", "reference.rows=8",
    "reference.steps=2",
)  # fmt: skip


@pytest.fixture
def hub(tmp_path):
    """A folder in the layout of kuleshov-group/mdlm-owt: settings and weights, no tokenizer."""
    ours = save(tmp_path / "ours", CONFIG, tokenizer=None)
    return str(convert(ours, tmp_path / "hub", "mdlm-hub"))


def test_it_is_the_same_model_with_words(hub, tmp_path):
    job = adopted(hub, "bytes")
    done = run_job(job, tmp_path / "out", device="cpu")
    assert done.result == {"given": True}
    found, before = load_source(done.folder / RUN), load_source(hub)
    assert before.tokenizer is None
    assert found.tokenizer.hash == Tokenizer.load("bytes").hash
    state = before.model.state_dict()
    assert all(weight.equal(state[name]) for name, weight in found.model.state_dict().items())


def test_one_that_brings_words_keeps_them(tmp_path):
    ours = save(tmp_path / "ours", config_of())
    done = run_job(adopted(ours, "bytes"), tmp_path / "out", device="cpu")
    assert done.result == {"given": False}
    assert load_source(done.folder / RUN).tokenizer.hash == LANGUAGE.tokenizer.hash


def test_a_student_learns_from_it(hub, tmp_path):
    """Without a tokenizer the bank of the teacher's texts is refused."""
    teacher = adopted(hub, "bytes")
    student = Job(
        name="student", does="distill", recipe="ablation-all-tricks", overrides=SHORT,
        inputs={"teacher": teacher},
    )  # fmt: skip
    for job in (teacher, student):
        run_job(job, tmp_path / "out", device="cpu")
    folder = folder_of(student, tmp_path / "out") / RUN
    assert Tokenizer.load(folder).hash == Tokenizer.load("bytes").hash


def test_at_paper_scale_it_has_the_recipes_tokenizer(hub, tmp_path):
    scale = find_scale("paper", Given(teacher=hub))
    assert (scale.teacher.does, scale.teacher.inputs[WORDS]) == (ADOPT, "gpt2")
    assert "--teacher hub" in command(ITEMS["generation"], scale)
    ours = save(tmp_path / "speaks", config_of())
    assert find_scale("paper", Given(teacher=ours)).teacher == ours
    unseen = find_scale("paper", Given(teacher="owner/name")).teacher
    assert unseen.inputs == {"model": "owner/name", WORDS: "gpt2"}


def test_prepared_texts_lend_it_theirs(hub, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "Once upon a time, a story."}\n' * 40)
    rows = tmp_path / "rows"
    prepare(PrepareSettings(src=str(tmp_path / "a.jsonl"), tokenizer="bytes", length=16, out=rows))
    teacher = find_scale("paper", Given(teacher=hub, data=str(rows))).teacher
    run_job(teacher, tmp_path / "out", device="cpu")
    words = Tokenizer.load(folder_of(teacher, tmp_path / "out") / RUN)
    assert words.hash == Tokenizer.load("bytes").hash


def test_a_dry_run_tells_whose_words_they_are_and_what_it_costs(hub, monkeypatch, tmp_path):
    monkeypatch.setattr(preflight, "_hub", lambda name, kind: "" if kind == "tokenizer" else "no")
    scale, items = find_scale("paper", Given(teacher=hub)), [ITEMS["ablation-cumulative"]]
    found = {c.what: c.is_there for c in preflight.checks(items, scale, tmp_path / "out")}
    assert found[f"texts and models of one tokenizer (gpt2, which {hub} does not bring)"]
    assert found["gpt2 (tokenizer on the hub)"]
    assert found[hub]
    planned = preflight.plan(items, scale, tmp_path / "out")
    assert all(one.gpu_hours is not None for one in planned)
    assert sum(one.gpu_hours for one in planned) > 0
    unseen = find_scale("paper", Given(teacher="owner/name"))
    told = [c.what for c in preflight.checks(items, unseen, tmp_path / "out")]
    assert "texts and models of one tokenizer (gpt2, unless owner/name brings its own)" in told


def test_a_foreign_model_is_sized_by_its_headers(hub, tmp_path):
    assert count_parameters(model_of(hub)) == count_parameters(CONFIG)
    assert model_of(adopted(hub, "gpt2")) == model_of(hub)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text("{}")
    assert model_of(str(tmp_path / "other")) is None


def test_disk_is_counted_for_students_of_a_foreign_teacher(hub, monkeypatch, tmp_path):
    """A copy of the teacher, and three checkpoints of every student."""
    monkeypatch.setattr(preflight, "_hub", lambda name, kind: "")
    monkeypatch.setattr(preflight, "count_parameters", lambda model: 1_000_000_000)
    scale, items = find_scale("paper", Given(teacher=hub)), [ITEMS["ablation-cumulative"]]
    students = sum(job.trains for job in jobs_of(items, scale, tmp_path))
    (disk,) = [c for c in preflight.checks(items, scale, tmp_path) if c.what.startswith("disk")]
    assert f"about {4 + students * 48:.1f} GB" in disk.what
