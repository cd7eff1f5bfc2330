"""Distillation of answers: prompts of any length, whose padding nothing sees."""

import json

import numpy as np
import pytest
import torch
from tests.models.causal_folders import BIDIRECTIONAL, LENGTH
from tests.random_models import randomise, save_random

import didi_instruct as didi
from didi_instruct.config.distill import DistillConfig
from didi_instruct.config.methods import PromptsConfig
from didi_instruct.config.schema import parse
from didi_instruct.data.chat import ChatTemplate
from didi_instruct.distillation import didi as didi_module
from didi_instruct.distillation import methods
from didi_instruct.distillation.run import Teacher
from didi_instruct.errors import UserError
from didi_instruct.hub.sources import load_source
from didi_instruct.sampling.draw import Noise
from didi_instruct.sampling.state import PAD
from didi_instruct.tasks.prompt_rows import read_prompts
from didi_instruct.training.distributed import World

PROMPTS = ["w1 w2 w3 w4", " w5", "w2 w3"]
ANSWERS = [" w6 w7 w8", " w6", " w8 w1 w1"]
METHODS = ["didi", "token-matching", "mixture", "sdtt"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("dream")
    BIDIRECTIONAL["dream"](path)
    return path


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": p, "answer": a} for p, a in zip(PROMPTS, ANSWERS, strict=True)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def opened(folder, source, *, answers=False, template=None, **settings):
    config = PromptsConfig(source=str(source), **{"length": 3, **settings})
    loaded = load_source(folder)
    given = {"answers": answers, "seed": 0, "template": template}
    return read_prompts(config, loaded, str(folder), **given)


def test_prompts_stand_on_the_right_of_their_part(folder, source):
    """Answers begin at one column; shorter ones are filled with ends of text."""
    rows, notes = opened(folder, source, answers=True)
    tokenizer = load_source(folder).tokenizer
    found = rows.ordered(0, 9)
    assert not notes
    for row, prompt, answer in zip(found, PROMPTS, ANSWERS, strict=True):
        left, right = tokenizer.encode([prompt, answer])
        width = rows.length - 3
        assert row[:width].tolist() == [PAD] * (width - len(left)) + left
        assert row[width:].tolist() == right + [tokenizer.eot_id] * (3 - len(right))
    shuffled = rows.rows(0, 3)
    assert sorted(map(tuple, shuffled.tolist())) == sorted(map(tuple, found.tolist()))
    assert torch.equal(rows.rows(1, 2), shuffled[1:])
    other, _ = opened(folder, source, answers=True, length=4)
    assert other.fingerprint != rows.fingerprint


def test_prompts_that_are_too_long_are_left_out(folder, source, tmp_path):
    rows, notes = opened(folder, source, longest=2)
    assert rows.num_sequences == 2
    assert "1 of 3 prompts are left out" in notes[0]
    (tmp_path / "long.jsonl").write_text('{"prompt": "w1 w2"}')
    with pytest.raises(UserError, match="no prompt fits"):
        opened(folder, tmp_path / "long.jsonl", longest=1)
    with pytest.raises(UserError, match="no room would be left"):
        opened(folder, source, length=LENGTH)


def test_prompts_are_written_as_messages(folder, source):
    template = ChatTemplate("{% for m in messages %}w0 {{ m.content }}{% endfor %} w8", {})
    rows, _ = opened(folder, source, template=template)
    tokenizer = load_source(folder).tokenizer
    expected = tokenizer.encode([f"w0 {p} w8" for p in PROMPTS])
    found = [[t for t in row if t != PAD] for row in rows.ordered(0, 3)[:, :-3].tolist()]
    assert found == expected


def test_networks_that_count_positions_are_refused(tmp_path, source):
    from tests.models.masked_folders import bert

    bert(tmp_path / "bert")
    for name in ("bert", "learned"):
        if name == "learned":
            save_random(tmp_path / name, learned_positions=True)
        with pytest.raises(UserError, match="counts positions from the start"):
            opened(tmp_path / name, source)


def settings(method, source, **changes):
    values = {
        "method": method,
        "prompts": {"source": source, "length": 3},
        "didi": {"group_size": 2, "kl_weight": 0.1},
        "reference": {"source": "online", "steps": 2},
        "discriminator": {"lr": 1e-3, "trainable_blocks": None, "chance": 0.0, "saturation": 1.0},
        "token_matching": {"warmup": 0, "aux_steps": 1, "budgets": [2], "anchor": 0.5},
        "mixture": {"codes": 2, "budgets": [2]},
        "sdtt": {"steps": 16, "iterations": 2},
        "optim": {"lr": 1e-3},
        "train": {"steps": 4, "batch_size": 6, "log_every": 1, "save_every": 2, "ema": 0.9},
        "watch": {"budgets": [2], "samples": 8, "min_entropy": 0.0},
    }
    return values | changes


def task_of(method, folder, source, wider=0, **changes):
    """A task whose rows have `wider` more columns of padding than they need."""
    config = parse(DistillConfig, settings(method, source, **changes), where="test")
    rows, _ = opened(folder, source, answers=True)
    data = Wider(rows, wider)
    teacher = load_source(folder).model
    student = randomise(load_source(folder).model, 3)
    return methods.make_task(
        config,
        Teacher(network=teacher, tokenizer=None, fingerprint="teacher"),
        student,
        World(torch.device("cpu")),
        data=data,
        references=data.rows,
    )


class Wider:
    """Rows with more padding before them."""

    num_sequences, tokenizer, fingerprint = 3, None, "wider"

    def __init__(self, rows, more):
        self._rows, self._more, self.num_tokens = rows, more, rows.num_tokens
        self.length = rows.length + more

    def rows(self, start, count):
        return torch.nn.functional.pad(self._rows.rows(start, count), (self._more, 0), value=PAD)

    ordered = rows


@pytest.mark.parametrize("method", METHODS)
def test_padding_has_no_part_in_an_iteration(method, folder, source, monkeypatch):
    """Two columns more of it, and the numbers of the log are the same under the same noise."""
    found, plain = {}, Noise.uniforms
    for wider in (0, 2):
        task = task_of(method, folder, source, wider)
        length = task.distillation.length

        def uniforms(self, count, *stream, wider=wider, length=length):
            if count != length:
                return plain(self, count, *stream)
            return torch.nn.functional.pad(plain(self, count - wider, *stream), (wider, 0))

        monkeypatch.setattr(Noise, "uniforms", uniforms)
        found[wider] = [task.step(step) for step in range(2)]
    for one, other in zip(*found.values(), strict=True):
        for name in one.keys() - {"kl_start"}:
            torch.testing.assert_close(other[name], one[name], atol=1e-4, rtol=1e-3, msg=name)


@pytest.mark.parametrize("method", METHODS)
def test_only_answers_are_written_and_compared(method, folder, source):
    task = task_of(method, folder, source)
    d = task.distillation
    width = d.length - 3
    rows = d.reference_texts(d.micro_batches(0)[0])
    assert d.starts.open(rows).nonzero()[:, 1].min() == width
    assert d.starts.open(rows).sum() == 3 * len(rows)
    if method == "didi":
        pair = didi_module.make_pair(d, d.micro_batches(0)[0], didi_module.write_texts)
        x, prompts = pair.rollout.x, d.references(0, 3)
        assert torch.equal(x[:, :width], prompts[:, :width].repeat_interleave(2, 0))
        assert (x[:, width:] < d.mask_id).all()
        assert (x[:, width:] >= 0).all()
        assert not pair.fake.written[:, :width].any()
        assert not pair.real.written[:, :width].any()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("reference", ["online", "bank", "data"])
def test_a_run_with_adapters_from_prompts_to_a_folder(method, reference, folder, source, tmp_path):
    if method == "token-matching" and reference != "online":
        pytest.skip("it reads no texts of the teacher")
    values = settings(method, source, lora={"rank": 2})
    values["reference"] = {"source": reference, "steps": 2, "rows": 16}
    result = didi.distill(values, teacher=folder, out=tmp_path / "run", device="cpu")
    assert result.config.continues
    assert didi.load(tmp_path / "run").generate(num=1, steps=2, prompt="w1 w2", length=5)
    if reference == "bank":
        [path] = (tmp_path / "run/bank").glob("rows-*.npy")
        rows, ids = np.load(path), load_source(folder).config.num_tokens
        assert rows[:, -3:].max() < ids
        assert (rows[:, :-3] == ids).any()


def test_a_bank_has_the_teachers_answers(folder, source, tmp_path):
    """Row i continues prompt i of the stream; what is read back has its padding."""
    values = settings("didi", source, reference={"source": "bank", "steps": 2, "rows": 6})
    seen = []
    make_pair = didi_module.make_pair

    def keep(d, batch, texts):
        pair = make_pair(d, batch, texts)
        seen.append(pair)
        return pair

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(didi_module, "make_pair", keep)
        didi.distill(values, teacher=folder, out=tmp_path / "run", device="cpu")
    prompts = {tuple(row[:-3].tolist()) for row in opened(folder, source)[0].ordered(0, 3)}
    for pair in seen:
        assert {tuple(row[:-3].tolist()) for row in pair.rollout.x} <= prompts


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": 2, "data": {"source": "oracle"}}, "prompt is 2, but prompts.source"),
        ({"method": "dimo"}, "which method=dimo does not know"),
        ({"prompts": {"source": "x", "length": 0}}, "prompts.length is 0"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        parse(DistillConfig, settings("didi", "x") | changes, where="test")
