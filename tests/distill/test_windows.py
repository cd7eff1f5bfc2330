"""Distillation of a teacher whose texts have windows of their own, from files to files."""

import json
import shutil

import numpy as np
import pytest
import torch
from tests.random_models import add_noise
from tests.runs import STATE, distilling, entries, same_tensors

import didi_instruct as didi
from didi_instruct.config.model import ModelConfig, ScheduleConfig
from didi_instruct.data.dataset import open_data
from didi_instruct.data.prepare import PrepareSettings, prepare
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.distillation.methods import make_task
from didi_instruct.distillation.networks import make_student
from didi_instruct.distillation.run import Teacher
from didi_instruct.errors import UserError
from didi_instruct.evaluation.quick_eval import quick_test
from didi_instruct.hub.sources import load_source
from didi_instruct.models.checkpoint import save_model
from didi_instruct.models.dit import build_model
from didi_instruct.process.masking import LengthLaw, before_end
from didi_instruct.sampling.state import Reads
from didi_instruct.seeding import mix
from didi_instruct.training.distributed import World
from didi_instruct.training.likelihood import likelihood
from didi_instruct.training.objectives import make_objective

from .small import Heard, recipe

LENGTH = 12
LENGTHS = (0, 0, 5, 9, 0, 30, 0, 12, 2, 0, 0, 3, 8)
METHODS = ["didi", "token-matching", "mixture"]
TOKENIZER = Tokenizer.load("bytes")
END = TOKENIZER.eot_id


def save_teacher(folder, *, seed=0, ends=True, **changes):
    """Save a model of bytes whose weights are noise."""
    own = {"end_id": END, "lengths": LENGTHS} if ends else {}
    shape = {"layers": 2, "hidden": 32, "heads": 2, "cond_dim": 16, "length": LENGTH}
    size = {"vocab_size": TOKENIZER.size + 1, "schedule": ScheduleConfig(eps=0.0)}
    config = ModelConfig(**(shape | size | own | changes))
    torch.manual_seed(seed)
    network = add_noise(build_model(config))
    with torch.no_grad():
        network.output_layer.linear.bias[END] = -30.0
    save_model(folder, network, config, TOKENIZER)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    save_teacher(folder / "teacher")
    return folder


@pytest.fixture
def run(models, tmp_path, monkeypatch):
    """Distil the teacher into tmp_path / name; no picture, which takes longer than a run."""
    monkeypatch.setattr(distilling, "draw_curves", lambda *_, **__: False)

    def start(config, name="run", *, teacher="teacher", **options):
        teacher = models / teacher if isinstance(teacher, str) else teacher
        return didi.distill(config, teacher=teacher, out=tmp_path / name, device="cpu", **options)

    return start


def of(method, **changes):
    source = {"source": "online" if method == "token-matching" else "bank"}
    mixture = {"codes": 3, "budgets": [2, 4]}
    return recipe(method, **({"reference": source, "mixture": mixture} | changes))


def corpus(folder, **data):
    """Lines of one to eleven letters, as a text file of documents."""
    lines = ["abcdefghijk"[: 1 + i % 11] for i in range(60)]
    folder.mkdir(exist_ok=True)
    (folder / "corpus.txt").write_text("\n".join(lines) + "\n")
    source = {"source": str(folder / "corpus.txt"), "documents": "line", "valid": 12}
    return source | {"rows": "document"} | data


# Whole runs


@pytest.mark.parametrize("method", METHODS)
def test_a_stopped_and_resumed_run_is_bit_exact_and_keeps_the_law(run, tmp_path, method):
    config = of(method)
    whole = run(config, "whole")
    assert not run(config, "parts", reporter=Heard(2)).finished
    assert run(config, "parts", resume=True).finished
    assert entries(tmp_path / "parts") == entries(tmp_path / "whole")
    for name in (f"checkpoints/step-00000006/{STATE}", "model.safetensors"):
        assert same_tensors(tmp_path / "whole" / name, tmp_path / "parts" / name), name
    student = didi.load(whole.folder, device="cpu")
    assert (student.config.end_id, student.config.lengths) == (END, LENGTHS)
    drawn = student.sample(num=8, steps=2)
    assert (drawn[~before_end(drawn, END)] == END).all()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("source", ["data", "bank"])
def test_documents_give_prompts_and_their_ends(run, tmp_path, method, source):
    """Also to those that end within the prompt; held-out ones have a likelihood."""
    data = corpus(tmp_path / "text")
    result = run(of(method, prompt=3, data=data, reference={"source": source}))
    assert all(np.isfinite(value) for entry in entries(result.folder) for value in entry.values())
    assert result.student["valid_nats_per_token"] > 0
    assert 0 < result.student["path_entropy_2"] < np.log(TOKENIZER.size)
    if source == "bank" and method != "token-matching":
        rows = np.load(result.folder / "bank" / "rows-00000.npy").astype(int)
        given = open_data(result.folder / "data", seed=0).rows(0, len(rows))
        ends = ~before_end(given, END).numpy()
        assert np.array_equal(rows[:, :3], given[:, :3].numpy())
        assert (rows[ends] == END).all()
        assert not np.array_equal(rows[~ends], given.numpy()[~ends])


# The bank


def test_a_bank_holds_the_teachers_texts_with_their_lengths(run, models, tmp_path):
    """Row i is what the teacher draws under the bank's seed and index i."""
    config = of("didi", reference={"source": "bank", "steps": 4, "seed": 3}, train={"steps": 1})
    run(config)
    rows = torch.from_numpy(np.load(tmp_path / "run" / "bank" / "rows-00000.npy").astype(int))
    teacher = didi.load(models / "teacher", device="cpu")
    drawn = teacher.sample(num=32, steps=4, seed=mix(3, "bank"), sampler="ancestral")
    assert torch.equal(rows, drawn)


def test_a_bank_of_other_lengths_is_refused(run, models, tmp_path):
    """The weights alone do not tell: the lengths are in the settings."""
    bank = of("didi", reference={"source": "bank", "bank": str(tmp_path / "bank")})
    run(bank, "one")
    shutil.copytree(models / "teacher", tmp_path / "other")
    path = tmp_path / "other" / "config.json"
    content = json.loads(path.read_text())
    text = json.dumps(content).replace(json.dumps(list(LENGTHS)), json.dumps([0] * 12 + [7]))
    assert text != json.dumps(content)
    path.write_text(text)
    with pytest.raises(UserError, match="holds texts of other lengths.*reference.bank"):
        run(bank, "two", teacher=tmp_path / "other")


# The quick evaluation


def quick(models, name="teacher", **changes):
    """The quick test of a task that is not run, and the model it is of."""
    config = of("token-matching", watch={"samples": 40, "budgets": [1]}, **changes)
    loaded = load_source(str(models / name))
    teacher = Teacher(network=loaded.model, tokenizer=TOKENIZER, fingerprint="x")
    student = make_student(loaded, "teacher", None, config)
    task = make_task(config, teacher, student, World(torch.device("cpu")))
    return task, quick_test(task, None, teacher)


def test_one_step_has_no_path_kl_to_its_own_law_of_texts(models):
    """The judge: log p(n) and independent tokens given the window. KL(q ‖ q) = 0, text by text.

    Without the length in the path it would be the entropy of lengths, 1.9 nats, off.
    """
    task, test = quick(models)

    def judge(tokens):
        text = before_end(tokens, END)
        window = torch.where(text, task.distillation.mask_id, tokens)
        at = text.flatten().nonzero().squeeze(1)
        times = torch.ones(len(tokens))
        laws = task.distillation.teacher_log_probs(Reads(window), times, at).double()
        own = laws.gather(1, tokens[text][:, None]).squeeze(1)
        total = LengthLaw(LENGTHS).log_prob(text.sum(1))
        return total.index_add(0, text.nonzero()[:, 0], own)

    object.__setattr__(test, "judge", judge)
    found = test.measure(task.distillation.teacher_log_probs)
    assert found["path_kl_1"] == pytest.approx(0, abs=1e-5)
    assert found["path_kl_1_se"] == pytest.approx(0, abs=1e-5)
    assert test.start_log_prob.mean().item() < -1
    drawn = test.draw(task.distillation.teacher_log_probs, 1)
    tokens = before_end(drawn.tokens, END).sum().item()
    assert found["path_entropy_1"] == pytest.approx(-drawn.log_prob.sum().item() / tokens)


def test_four_grams_are_those_of_the_texts(models):
    """Ends would be alike: of 40 texts in windows of 12, and few are that long."""
    task, test = quick(models)
    grams = []
    for row in test.draw(task.distillation.teacher_log_probs, 1).tokens.tolist():
        text = row[: row.index(END)] if END in row else row
        grams += [tuple(text[i : i + 4]) for i in range(len(text) - 3)]
    found = test.measure(task.distillation.teacher_log_probs)["unique_4gram_1"]
    assert found == pytest.approx(len(set(grams)) / len(grams))


def test_watched_texts_are_those_that_the_model_writes(models):
    """Lengths and tokens of `draw` under the same seed, its log-probability of whole texts too."""
    task, test = quick(models)
    drawn = test.draw(task.distillation.teacher_log_probs, 1)
    model = didi.load(models / "teacher", device="cpu")
    samples = model.draw(40, steps=1, seed=mix(0, "quick"), sampler="ancestral")
    assert torch.equal(drawn.tokens, samples.tokens)
    assert torch.allclose(drawn.log_prob + test.start_log_prob, samples.log_prob, atol=1e-4)


def test_the_judge_counts_lengths_as_the_samples_do(models):
    """Of one-token texts the bound is exact but for its noise: the teacher is at no distance.

    A path KL of 0, within 5 standard errors of 4000 samples (false alarm below 1e-5).
    """
    task, test = quick(models)
    start = test.start[:1].expand(4000, -1).clone()
    start[:, 0], start[:, 1:] = task.distillation.mask_id, END
    object.__setattr__(test, "start", start)
    object.__setattr__(test, "start_log_prob", task.distillation.starts.log_prob(start))
    found = test.measure(task.distillation.teacher_log_probs)
    assert abs(found["path_kl_1"]) < 5 * found["path_kl_1_se"]
    assert found["path_kl_1_se"] < 0.5


def test_the_judge_sees_the_probability_of_the_lengths_too(models):
    task, test = quick(models)
    drawn = test.draw(task.distillation.teacher_log_probs, 1)
    expected = drawn.log_prob + LengthLaw(LENGTHS).log_prob(
        (test.start == task.distillation.mask_id).sum(1)
    )
    assert torch.allclose(test.whole_texts(drawn).log_prob, expected)


def test_the_held_out_likelihood_is_of_texts_up_to_their_ends(run, tmp_path):
    """As `likelihood` has it of the written student: lengths included, per token of text."""
    result = run(of("mixture", data=corpus(tmp_path / "text"), reference={"source": "data"}))
    loaded = load_source(str(result.folder))
    objective = make_objective(loaded.config)
    valid = open_data(result.folder / "data", split="valid")
    found = likelihood(
        lambda batch: objective.loss(loaded.model, batch),
        loaded.config,
        valid.ordered,
        sequences=valid.num_sequences,
    )
    assert result.student["valid_nats_per_token"] == pytest.approx(found.nats_per_token, rel=1e-4)


# What does not fit


@pytest.mark.parametrize("changes", [{}, {"prompt": 3}, {"reference": {"source": "data"}}])
def test_a_stream_is_refused(run, tmp_path, changes):
    """A corpus before it is prepared; prepared rows by what they hold."""
    data = corpus(tmp_path / "text", rows="stream")
    message = "rows go on after the end of a text.*data.rows=document .--rows document"
    with pytest.raises(UserError, match=message):
        run(of("didi", data=data, **changes))
    assert not (tmp_path / "run").exists()
    settings = {"src": data["source"], "tokenizer": "bytes", "length": LENGTH, "documents": "line"}
    prepare(PrepareSettings(**settings, out=tmp_path / "rows", valid=12))
    with pytest.raises(UserError, match=message):
        run(of("didi", data={"source": str(tmp_path / "rows")}, **changes))
    prepare(PrepareSettings(**settings, rows="document", out=tmp_path / "texts", valid=12))
    source = {"source": str(tmp_path / "texts")}
    assert run(of("didi", data=source, train={"steps": 1}, **changes)).finished


def test_a_student_has_the_teachers_windows(run, tmp_path):
    plain = save_teacher(tmp_path / "plain", ends=False)
    with pytest.raises(UserError, match="student. fill their windows, those of .* end with token"):
        run(of("didi", student=str(plain)))
    longer = save_teacher(tmp_path / "longer", length=16, lengths=(0,) * 16 + (1,))
    with pytest.raises(UserError, match="windows of 16 tokens, .* of 12: .*must be alike"):
        run(of("didi", student=str(longer)))
    with pytest.raises(UserError, match="student. end with token"):
        run(of("didi", student=str(tmp_path / "longer")), teacher=plain)
    assert not (tmp_path / "run").exists()


def test_a_student_from_elsewhere_takes_the_teachers_lengths(run, tmp_path):
    other = save_teacher(tmp_path / "other", seed=1, lengths=(0,) * 12 + (1,))
    result = run(of("token-matching", student=str(other), train={"steps": 1}))
    assert didi.load(result.folder, device="cpu").config.lengths == LENGTHS


def test_a_student_of_streams_teaches_token_matching_alone(run, models):
    """What it knows of a text does not depend on the order that it writes in."""
    save_teacher(models / "stream", order="streams")
    watch = {"budgets": [3], "samples": 16}
    found = run(of("token-matching", order="streams", watch=watch), teacher="stream")
    first = entries(found.folder)[0]
    assert first["step"] == 0
    assert first["path_kl_3"] == found.teacher["path_kl_3"]
    other = run(of("token-matching", order="streams", watch=watch), "other")
    assert other.teacher["path_kl_3"] != found.teacher["path_kl_3"]
    with pytest.raises(UserError, match="reveals positions in streams"):
        run(of("didi"), "third", teacher="stream")
    with pytest.raises(UserError, match="add `order=streams`"):
        run(of("token-matching"), "third", teacher="stream")
