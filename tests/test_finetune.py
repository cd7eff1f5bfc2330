"""Fine-tuning: where it starts, what it learns, and that it goes on as if unbroken."""

import itertools
import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from tests.models import masked_folders
from tests.random_models import DUO, save_random
from tests.runs import STATE, entries, same_tensors

import didi_instruct as didi
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import UserError
from didi_instruct.training.reporting import Reporter

NAMES = ["Anna", "Boris", "Clara", "David", "Emma", "Felix", "Grace", "Hugo"]
WORDS = ["cats", "pies", "boats", "drums", "cook", "sailor", "singer", "horse"]
ADVERBS = ["often", "today", "again"]
MODELS = {
    "mdlm": {},
    "timed": {"time_conditioning": True, "schedule": {"eps": 1e-3}},
    "duo": DUO,
    "ar": {"kind": "ar"},
    "codes": {"masks": 2, "vocab_size": 66},
}


class Heard(Reporter):
    """Remembers what was said; may send a signal once a step is logged."""

    def __init__(self, stop_after=None):
        self.stop_after, self.lines = stop_after, []

    def say(self, text):
        self.lines.append(text)

    def advance(self, step, values):
        if step == self.stop_after:
            os.kill(os.getpid(), signal.SIGTERM)


def saved(folder, name="mdlm", **changes):
    """A small model of the oracle language, with dropout where it is a DiT."""
    from didi_instruct.config.model import ScheduleConfig

    settings = {**MODELS[name], **changes}
    if isinstance(settings.get("schedule"), dict):
        settings["schedule"] = ScheduleConfig(**settings["schedule"])
    return save_random(folder, **settings)


def questions(path, rows=64, more=""):
    """A mapping from names to words, which no model knows; answers of one token, and of two."""
    lines = []
    for n, (name, adverb) in enumerate(itertools.product(NAMES, ADVERBS)):
        word = WORDS[(3 * NAMES.index(name) + 1) % 8]
        answer = f" {word}" if n % 3 else f" {word} {more}".rstrip()
        lines.append({"prompt": f"{adverb} {name} greets", "answer": answer})
    path.write_text("".join(json.dumps(lines[n % len(lines)]) + "\n" for n in range(rows)))
    return path


def recipe(task="answers", source="oracle", **changes):
    """Six steps that log and save often; some settings changed."""
    values = {
        "task": task,
        "data": {"source": str(source), "valid": 6} if task == "answers" else {"source": source},
        "optim": {"lr": 1e-3, "warmup": 2},
        "train": {
            "steps": 6, "batch_size": 8, "ema": 0.9, "log_every": 1, "save_every": 3,
            "eval_every": 2, "eval_sequences": 16,
        },
    }  # fmt: skip
    for name, change in changes.items():
        values[name] = values.get(name, {}) | change if isinstance(change, dict) else change
    return values


@pytest.mark.parametrize("task", ["text", "answers"])
@pytest.mark.parametrize("kind", MODELS)
def test_a_stopped_and_resumed_run_is_bit_exact(tmp_path, kind, task):
    """Losses, held-out numbers, weights, averages and moments; dropout and noise go on."""
    model = saved(tmp_path / "model", kind, dropout=0.0 if kind == "ar" else 0.1)
    source = "oracle" if task == "text" else questions(tmp_path / "q.jsonl", more="today")
    settings = recipe(task, source)
    didi.finetune(settings, model=model, out=tmp_path / "whole", device="cpu")
    parts, how = tmp_path / "parts", {"model": model, "device": "cpu"}
    stopped = didi.finetune(settings, out=parts, reporter=Heard(4), **how)
    assert not stopped.finished
    assert not (parts / "config.json").exists()
    done = didi.finetune(settings, out=parts, resume=True, **how)
    assert done.finished
    assert entries(parts) == entries(tmp_path / "whole")
    for file in (f"checkpoints/step-00000006/{STATE}", "model.safetensors"):
        assert same_tensors(parts / file, tmp_path / "whole" / file), file
    again = didi.finetune(settings, out=parts, resume=True, **how)
    assert not again.new
    assert again.held_out == done.held_out
    assert done.held_out["before"] != done.held_out["after"]


@pytest.mark.parametrize("family", ["bert", "esm"])
def test_a_masked_lm_goes_on_and_its_run_is_opened_like_any_other(tmp_path, family):
    """Resumed bit by bit; what it is made of stays, banned tokens are never asked for."""
    getattr(masked_folders, family)(tmp_path / "model")
    words = ["w1 w2 w3", " w4 w5"] if family == "bert" else ["MKV", "LAG"]
    source = tmp_path / "q.jsonl"
    row = {"prompt": words[0], "answer": words[1]}
    source.write_text(f"{json.dumps(row)}\n" * 8)
    settings = recipe(source=source, data={"valid": 0})
    how = {"model": tmp_path / "model", "device": "cpu"}
    didi.finetune(settings, out=tmp_path / "whole", **how)
    didi.finetune(settings, out=tmp_path / "parts", reporter=Heard(4), **how)
    didi.finetune(settings, out=tmp_path / "parts", resume=True, **how)
    assert entries(tmp_path / "parts") == entries(tmp_path / "whole")
    for file in (f"checkpoints/step-00000006/{STATE}", "model.safetensors"):
        assert same_tensors(tmp_path / "parts" / file, tmp_path / "whole" / file), file
    tuned = didi.load(tmp_path / "whole", device="cpu")
    assert tuned.provenance["finetuned_from"]["provenance"]["foreign"]["layout"]
    assert tuned.generate(num=2, steps=2, prompt=words[0], length=5)
    further = didi.finetune(settings, model=tmp_path / "whole", out=tmp_path / "more", device="cpu")
    assert further.finished
    special = {"bert": " [SEP]", "esm": "<unk>"}[family]
    source.write_text(json.dumps({"prompt": words[0], "answer": special}) + "\n")
    with pytest.raises(UserError, match=r"q.jsonl:1: `answer` has the token .* never writes"):
        didi.finetune(settings, out=tmp_path / "other", **how)


def test_a_masked_lm_learns_texts_in_their_frame(tmp_path):
    """Each alone, others not attended to; notation that it never writes is given; too long, left.

    A family of two proteins is learnt: from the many that a random network writes to these.
    """
    masked_folders.esm(tmp_path / "model")
    source = tmp_path / "family.fasta"
    rows = [">a\nMKVX\n", ">b\nLAGRS\n"] * 30 + [">c\n" + "M" * 13 + "\n", ">d\nX\n"]
    source.write_text("".join(rows))
    heard, settings = Heard(), recipe("text", str(source), optim={"lr": 1e-2})
    settings["data"] |= {"valid": 0, "rows": "document"}
    settings["train"] |= {"steps": 120, "eval_every": 0, "log_every": 60}
    how = {"model": tmp_path / "model", "device": "cpu"}
    didi.finetune(settings, out=tmp_path / "run", reporter=heard, **how)
    assert heard.lines[0] == "60 texts to learn, 0 held out."
    assert "2 texts are left out" in heard.lines[1]
    tuned = didi.load(tmp_path / "run", device="cpu")
    first, last = tuned.tokenizer.encode(["L", "AGRS"])
    masked = torch.tensor([[*first, *[tuned.mask_id] * 4]])
    assert tuned.denoiser(masked, 1.0)[0, 1:].argmax(-1).tolist() == last
    with pytest.raises(UserError, match=r"special tokens around each text.*data.rows=document"):
        didi.finetune(recipe("text", str(source)), out=tmp_path / "other", **how)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("task", ["text", "answers"])
def test_two_processes_do_as_one_and_resume(tmp_path, task, strategy):
    """The loss curve and weights of one process, also where two go on from step 3."""
    import shutil

    import yaml

    model = saved(tmp_path / "model")
    source = "oracle" if task == "text" else questions(tmp_path / "q.jsonl", more="today")
    settings = recipe(task, str(source))
    didi.finetune(settings, model=model, out=tmp_path / "alone", device="cpu")
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(settings))
    out = tmp_path / "two"

    def run(*more):
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command = [*launch, "--nproc-per-node=2", "-m", "didi_instruct", "finetune"]
        command += [str(tmp_path / "recipe.yaml"), "--model", str(model), "--out", str(out)]
        command += ["--set", f"train.strategy={strategy}", "--device", "cpu", *more]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr

    def curve(folder):
        keys = ("loss", "valid_answer_nats", "valid_nats_per_token")
        return [line[key] for line in entries(folder) for key in keys if key in line]

    run()
    torch.testing.assert_close(curve(out), curve(tmp_path / "alone"), atol=1e-5, rtol=1e-5)
    ours = load_file(out / "model.safetensors")
    for name, tensor in load_file(tmp_path / "alone" / "model.safetensors").items():
        torch.testing.assert_close(ours[name], tensor, atol=1e-4, rtol=1e-3)
    before = curve(out)
    shutil.rmtree(out / "checkpoints" / "step-00000006")
    (out / "model.safetensors").unlink()
    run("--resume")
    assert curve(out) == before, "two processes go on bit by bit"
    assert all(torch.equal(ours[n], t) for n, t in load_file(out / "model.safetensors").items())


@pytest.mark.parametrize("kind", ["mdlm", "duo", "ar"])
def test_it_starts_from_the_model_and_says_so(tmp_path, kind):
    """At no learning rate to speak of weights stay, and held-out numbers, since the noise is one.

    Provenance names source and fingerprint.
    """
    model = saved(tmp_path / "model", kind)
    settings = recipe("text", optim={"lr": 1e-30, "weight_decay": 0.0}, train={"steps": 1})
    for task in ("answers", "text"):
        how = settings if task == "text" else settings | {
            "task": task, "data": {"source": str(questions(tmp_path / "q.jsonl", more="today"))}
        }  # fmt: skip
        result = didi.finetune(how, model=model, out=tmp_path / task, device="cpu")
        assert result.held_out["before"] == result.held_out["after"]
    (tmp_path / "text").rename(tmp_path / "run")
    assert same_tensors(model / "model.safetensors", tmp_path / "run" / "model.safetensors")
    tuned = didi.load(tmp_path / "run", device="cpu")
    origin = tuned.provenance["finetuned_from"]
    record = json.loads((model / "config.json").read_text())["files"]["model.safetensors"]
    assert (origin["source"], origin["sha256"]) == (str(model), record["sha256"])
    assert tuned.sample(num=2).shape == (2, 32)
    checkpoint = didi.load(tmp_path / "run" / "checkpoints" / "step-00000001", device="cpu")
    assert checkpoint.provenance["finetuned_from"] == origin
    tuned.save(tmp_path / "saved")
    card = (tmp_path / "saved" / "README.md").read_text()
    assert "fine-tuned from `model`" in card
    assert str(tmp_path) not in card
    assert "| | before | after |" in card


@pytest.mark.parametrize("kind", ["mdlm", "ar"])
def test_a_mapping_that_no_model_knows_is_learnt(tmp_path, kind):
    """Eight names to eight words, some prompts held out: from chance to all of them."""
    model = saved(tmp_path / "model", kind)
    source = questions(tmp_path / "q.jsonl", rows=24)
    settings = recipe(
        source=source, data={"valid": 4}, optim={"lr": 1e-2, "warmup": 5},
        train={"steps": 200, "eval_every": 0, "batch_size": 16},
    )  # fmt: skip
    result = didi.finetune(settings, model=model, out=tmp_path / "run", device="cpu")
    assert result.held_out["before"]["valid_answer_nats"] > 1.0
    assert result.held_out["after"]["valid_answer_nats"] < 0.1
    assert share_known(didi.load(model, device="cpu")) <= 6 / 24
    assert share_known(didi.load(tmp_path / "run", device="cpu")) == 1.0


def test_held_out_answers_of_one_token_are_measured_exactly(tmp_path):
    """Of two prompts all rows of one are held out: -log p(answer | prompt), without noise.

    That is so whatever masks answers in training.
    """
    model, source = saved(tmp_path / "model"), tmp_path / "q.jsonl"
    pairs = [("often Anna greets", "cats"), ("today Hugo greets", "boats")]
    rows = [{"prompt": prompt, "answer": f" {answer}"} for prompt, answer in pairs * 8]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    loaded, exact = didi.load(model, device="cpu"), []
    for prompt, answer in pairs:
        [tokens], [[token]] = (loaded.tokenizer.encode([text]) for text in (prompt, answer))
        law = loaded.denoiser(torch.tensor([[*tokens, loaded.mask_id]]), 1.0)[0, -1].log_softmax(-1)
        exact.append(-float(law[token]))
    settings = recipe(
        source=source, data={"valid": 1}, answers={"masking": "random"}, train={"steps": 1}
    )
    result = didi.finetune(settings, model=model, out=tmp_path / "run", device="cpu")
    found = result.held_out["before"]
    assert min(abs(found["valid_answer_nats"] - nats) for nats in exact) < 1e-5
    assert abs(exact[0] - exact[1]) > 1e-3
    assert found["valid_ci95"] < 1e-5


def share_known(model):
    """Share of prompts whose word is the likeliest answer of all in the vocabulary."""
    known, vocabulary = 0, model.tokenizer.vocabulary
    for adverb, name in itertools.product(ADVERBS, NAMES):
        prompt = model.tokenizer.encode([f"{adverb} {name} greets"])[0]
        if model.config.kind == "ar":
            logits = model.network(torch.tensor([[64, *prompt]]))[0, -1]
        else:
            logits = model.denoiser(torch.tensor([[*prompt, model.mask_id]]), 0.5)[0, -1]
        known += int(logits.argmax()) == vocabulary[WORDS[(3 * NAMES.index(name) + 1) % 8]]
    return known / 24


def test_a_changed_file_or_model_refuses_to_resume(tmp_path):
    """In one line that says what changed; without the file, the tokens of the run serve."""
    model, source = saved(tmp_path / "model"), questions(tmp_path / "q.jsonl")
    how = {"model": model, "out": tmp_path / "run", "device": "cpu"}
    didi.finetune(recipe(source=source, train={"steps": 3}), **how)
    longer = recipe(source=source)
    text = source.read_text()
    source.write_text(text.replace("Anna", "Emma", 1))
    with pytest.raises(UserError, match="the prompts and answers changed since the run began"):
        didi.finetune(longer, resume=True, **how)
    source.unlink()
    other = saved(tmp_path / "other", seed=1)
    with pytest.raises(UserError, match=r"was trained with model \w+, now it is"):
        didi.finetune(longer, resume=True, **(how | {"model": other}))
    assert didi.finetune(longer, resume=True, **how).outcome.step == 6


def test_text_of_another_tokenizer_is_refused(tmp_path):
    from didi_instruct.data.prepare import PrepareSettings, prepare

    model, corpus = saved(tmp_path / "model"), tmp_path / "corpus.txt"
    corpus.write_text("all work and no play makes jack a dull boy\n" * 200)
    prepare(
        PrepareSettings(
            src=str(corpus), tokenizer="bytes", length=32, out=tmp_path / "bytes", valid=0
        )
    )
    with pytest.raises(UserError, match="another tokenizer than the model's"):
        didi.finetune(
            recipe("text", str(tmp_path / "bytes")), model=model, out=tmp_path / "run", device="cpu"
        )
    assert not (tmp_path / "run" / "config.json").exists()


def windowed(folder, kind="mdlm", tokens=None):
    """A model of bytes whose texts have windows of their own."""
    lengths = (0, *[1] * 32) if kind == "mdlm" else ()
    return save_random(
        folder, tokenizer=Tokenizer.load("bytes"), vocab_size=258, kind=kind, end_id=256,
        lengths=lengths,
    )  # fmt: skip


@pytest.mark.parametrize("task", ["text", "answers"])
def test_own_windows_learn_how_long_these_texts_are(tmp_path, task):
    """Rows of one text each; the law of lengths is that of what was learnt."""
    model, source = windowed(tmp_path / "model"), tmp_path / "texts.jsonl"
    texts = ["ab", "abc", "abcd", "abcdefg"] * 8
    rows = [{"text": t, "prompt": t[:1], "answer": t[1:]} for t in texts]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = recipe(task, str(source), data={"valid": 0}, train={"steps": 2})
    settings["data"]["valid"] = 0
    if task == "text":
        with pytest.raises(UserError, match=r"window of its own.*data.rows=document"):
            didi.finetune(settings, model=model, out=tmp_path / "run", device="cpu")
        settings["data"]["rows"] = "document"
    didi.finetune(settings, model=model, out=tmp_path / "run", device="cpu")
    lengths = didi.load(tmp_path / "run", device="cpu").config.lengths
    assert lengths == (0, 0, 8, 8, 8, 0, 0, 8, *[0] * 25)


def test_an_answer_may_end_its_text(tmp_path):
    """A left-to-right model that learnt the end stops there; a masked one is given it."""
    model, source = windowed(tmp_path / "model", "ar"), tmp_path / "q.jsonl"
    source.write_text('{"prompt": "x", "answer": "yz"}\n' * 8)
    settings = recipe(
        source=source, data={"valid": 0}, answers={"end": True}, optim={"lr": 1e-2},
        train={"steps": 60, "eval_every": 0},
    )  # fmt: skip
    didi.finetune(settings, model=model, out=tmp_path / "run", device="cpu")
    tuned = didi.load(tmp_path / "run", device="cpu")
    assert set(tuned.generate(num=20, prompt="x")) == {"xyz"}
    masked = windowed(tmp_path / "masked")
    with pytest.raises(UserError, match=r"answers.end is true, but .*masked is given"):
        didi.finetune(settings, model=masked, out=tmp_path / "other", device="cpu")


def test_what_is_said_once(tmp_path):
    """Rows, prompts that were cut, and that nothing is held out."""
    model, source = saved(tmp_path / "model"), tmp_path / "q.jsonl"
    rows = [{"prompt": "often " * n + "Anna greets", "answer": " cats"} for n in (1, 40, 50)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    heard = Heard()
    settings = recipe(source=source, data={"valid": 0}, train={"steps": 1, "eval_every": 0})
    didi.finetune(settings, model=model, out=tmp_path / "run", device="cpu", reporter=heard)
    assert heard.lines[:3] == [
        "3 prompts with answers to learn, 0 held out.",
        "2 of 3 prompts are cut from the left, to fit the 32 tokens that the model reads.",
        "Nothing is held out (data.valid): no evaluations.",
    ]
    settings["answers"] = {"long": "refuse"}
    with pytest.raises(UserError, match=r"q.jsonl:2: prompt and answer have 43 tokens.*32"):
        didi.finetune(settings, model=model, out=tmp_path / "other", device="cpu")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {"source": None}}, "data.source is not set: give JSON lines"),
        ({"data": {"valid": 64}}, "data.valid is 64, and with rows of the same prompts"),
        ({"answers": {"share": 0.5}}, "answers.share is 0.5, but task is answers"),
        ({"answers": {"masking": "random"}}, "answers.masking is random, but .* kind `ar`"),
        ({"answers": {"end": True}}, "answers.end is true, but .* has no end-of-text token"),
    ],
)
def test_settings_that_mean_nothing_are_refused(tmp_path, changes, message):
    model = saved(tmp_path / "model", "ar")
    settings = recipe(source=questions(tmp_path / "q.jsonl"), **changes)
    with pytest.raises(UserError, match=message) as caught:
        didi.finetune(settings, model=model, out=tmp_path / "run", device="cpu")
    assert "\n" not in str(caught.value)


def test_the_function_stands_before_its_module():
    """`didi.finetune` is the function, whichever way its module was imported before."""
    import importlib

    assert importlib.import_module("didi_instruct.finetune").finetune is didi.finetune
    assert callable(didi.finetune)
